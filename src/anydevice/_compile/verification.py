"""Verify a compiled model on its device: its weights, its parts, its output, its properties.

Each part is compared with a reference that runs in float64: for the example several times, then for
inputs drawn from it. The result names the shapes and the range of inputs that were verified.

The tolerance comes from the model itself, by Monte Carlo arithmetic (Parker, 1997): the reference
runs again with weights, inputs and the result of every operation changed by about one rounding unit
of the compute dtype, each element up or down at random. Without access to the operations, only the
outputs of parts are changed, and more is allowed. The change of an element is the effect of
rounding on it, but may be small by chance, so that an error may be as large as

    factor × the largest of
        the change of this element,
        the changes of most elements of its row (the last axis) or its column, the smaller one,
        its size × the relative change of a usual element of the part

The factor is 64 for float32, whose sums round at every step, and 4 for 16-bit dtypes, whose sums do
not. Rounding has no direction: in 16 bits, the averages of columns, rows and the whole must be as
close as those of the changed runs. If something seems wrong, the reference runs more often. If any
element jumps, two elements, or one in a hundred, may exceed the tolerance without having jumped.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from enum import Enum
from functools import partial
from itertools import chain, islice, starmap
from math import prod
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from anydevice._arrays.memory.out_of_memory import translating_oom
from anydevice._arrays.move import is_array, to_device
from anydevice._arrays.trees.containers import rule_of
from anydevice._arrays.trees.tree import flatten
from anydevice._check.compare import ROUNDING_UNIT
from anydevice._compile.properties import Property, check_properties
from anydevice._compile.report import Checked
from anydevice._compile.versions import CallSignature, shapes_text, split_inputs
from anydevice._core.array import Array as DeviceArray
from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES
from anydevice._core.record import Record, replace
from anydevice._core.text import type_text
from anydevice._libraries.base import ModelAdapter, State, host_array
from anydevice._libraries.precision import Policy, cast
from anydevice._machine.settings import config as settings
from anydevice.errors import ConfigurationError, VerificationError

Array = np.ndarray[Any, Any]

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_CHANGED_RUNS = (2, 12, 48)
"""Changed runs of the reference: at first, if something seems wrong, if few elements do."""
_FEW = 0.1
"""Share of wrong elements up to which more changed runs are made."""
_CALLS = 12
"""Calls of the compiled model with the example."""
_COMPILES_AGAIN = 5.0
"""Seconds of the first call up to which compiled code is made for another number of rows too."""
_SECONDS = 2.0
"""Seconds that other inputs may take longer than the example."""
_LARGEST_FLOAT16, _LARGEST_FLOAT32, _MASK = 65504.0, 3.4e38, 1e300  # above it: masks
_WITH_STRIDES, _WITH_BOUNDS = ("numpy", "torch", "cupy"), ("numpy", "torch", "jax")
_NUMBERS = (bool, int, float, complex, np.number, np.bool_)
_CONSTANTS = (str, bytes, type(None), Enum)
_SHAPE = attrgetter("shape")
_MOST_ROWS = 4096
"""Limit of rows of a part that are matched with rows of the reference."""

_SMALLEST = {"float16": 2.0**-24}
"""The smallest number above 0; in all other dtypes it is too small to matter."""
_TINY = 1e-37
_SHORT_ROW = 16
"""Rows with fewer elements are too short for statistics of their own."""
_SAMPLE = 1024
"""Number of elements of a row that its quantiles are computed from."""
_SMALL, _LARGER, _SPREAD = 0.25, 0.9, 8.0
_JUMPING = 0.01
_MARGIN = 2.5


class Original(Record):
    """A model before its move, and the expected hash of each weight on the device."""

    adapter: ModelAdapter
    digests: Mapping[str, str]

    @classmethod
    def of(cls, adapter: ModelAdapter, policy: Policy) -> Original:
        wanted = DTYPES[policy.parameters].numpy()
        digests, fixed = {}, adapter.kept_weights()
        for path, x in adapter.weights().items():
            host = host_array(x)
            if host.dtype.kind in "fV" and path not in fixed:
                with np.errstate(all="ignore"):  # infinite weights are found later
                    host = host.astype(wanted)
            digests[path] = digest_of(host)
        return cls(adapter, digests)


class Candidate(Record):
    """A compiled model to verify: `run` calls it; `compiler` is `None` if it runs as written."""

    adapter: ModelAdapter
    device: Device
    policy: Policy
    run: Callable[..., Any]
    compiler: Callable[..., Callable[..., Any]] | None
    tolerance: Tolerance


class Part:
    """The output of one part of a model in host memory: its name, and its leaves by path.

    `arrays` are float64 or int64; complex arrays are stacks of their real and imaginary parts.
    `constants` are strings and the like. `numbers` are the paths of Python's numbers, which are
    among the arrays. Arrays that are only traced are left out.
    """

    def __init__(self, name: str, value: Any, read: Callable[[object], Array | None]) -> None:
        self.name = name
        self.arrays: dict[str, Array] = {}
        self.constants: dict[str, Any] = {}
        self.numbers: set[str] = set()
        self._read(value, read, "", ())
        self.shapes = dict(zip(self.arrays, map(_SHAPE, self.arrays.values()), strict=True))

    def _read(
        self,
        value: Any,
        read: Callable[[object], Array | None],
        path: str,
        around: tuple[int, ...],
    ) -> None:
        """Read the leaves of an output; `around` are the ids of the containers around it."""
        host = read(value)
        if host is not None:
            pass
        elif isinstance(value, _NUMBERS):
            self.numbers.add(path)
            host = np.asarray(value)
        elif isinstance(value, _CONSTANTS):
            self.constants[path] = value
            return
        else:
            rule = rule_of(type(value))
            parts = None if id(value) in around else rule.take_apart(value)
            for key, inner in zip(*parts[:2], strict=True) if parts is not None else ():
                step = rule.step(key) or f"[{key!r}]"
                self._read(inner, read, path + step, (*around, id(value)))
            return
        if host.dtype.kind == "c":
            self.arrays[path] = np.stack([host.real, host.imag]).astype(np.float64)
        else:
            dtype = np.int64 if host.dtype.kind in "biu" else np.float64
            self.arrays[path] = np.array(host, dtype)

    def is_like(self, other: Part) -> bool:
        """Whether names and shapes are the same."""
        return self.name == other.name and self.shapes == other.shapes

    def in_order_of(self, other: Part) -> Part:
        """Return the part with the rows of each array matched to the rows of `other`."""
        ordered = copy(self)
        ordered.arrays = {
            path: matched_rows(x, other.arrays[path]) for path, x in self.arrays.items()
        }
        return ordered

    def is_same(self, other: Part) -> bool:
        """Whether both are equal; NaN equals NaN."""
        if not self.is_like(other) or self.constants != other.constants:
            return False
        others = map(other.arrays.__getitem__, self.arrays)
        return all(map(partial(np.array_equal, equal_nan=True), self.arrays.values(), others))


class Reference(Record):
    """The correct outputs of all parts and, last, of the model: exact, and in changed runs.

    `runs` are the changed runs so far; `rewritten` names the state that a call changes. `largest`
    is the largest number in it. `is_fine` tells whether the results of operations inside its parts
    are changed too.
    """

    runner: _ReferenceRunner
    inputs: Sequence[Array]
    exact: tuple[Part, ...]
    runs: list[tuple[Part, ...]]
    rewritten: tuple[str, ...]
    text: str
    largest: float
    is_fine: bool

    def changed(self, index: int, path: str, count: int) -> list[Array]:
        """Return an array in `count` changed runs of the same branch."""
        while len(self.runs) < count:
            self.runs.append(self.runner.model(len(self.runs)).run(self.inputs))
        place, exact = slice(index, index + 1 or None), self.exact[index]  # empty if it is missing
        parts = chain.from_iterable(map(itemgetter(place), self.runs[:count]))
        return [part.arrays[path] for part in parts if part.is_like(exact)]


Trace = partial[list[Part]]


class _SoFar:
    def __init__(self) -> None:
        self.largest = 0.0
        self.uncertain = 0
        self.compared = 0
        self.resolution = np.inf
        self.shapes: list[str] = []
        self.is_drawn = False
        self.first: tuple[Any, ...] = ()  # output, part, reference and inputs of the example
        self.first_nan: VerificationError | None = None


def verify_model(
    candidate: Candidate,
    original: Original,
    inputs: Inputs,
    properties: Sequence[Property],
    seed: int | None = None,
) -> Checked:
    """Verify a compiled model with these inputs, and with others that are drawn from the seed.

    Raises `VerificationError` for the first error, and `ConfigurationError` if nothing can be
    compared: for an example without elements, or a model that changes itself.
    """
    adapter, device = candidate.adapter, candidate.device
    given, named = inputs
    adapter.check_inputs(given, named)
    signature, arrays = split_inputs(given, named)
    if signature.constants and not arrays:
        raise ConfigurationError(
            f"verify takes an example of the model's inputs, and {type_text(given[0])} holds no "
            "array; give an array, a tuple of several inputs, or a dict of inputs by name",
            source="verify=",
        )
    adapter.check_verifiable()
    with translating_oom(device):
        hosts = [host_array(x) for x in arrays]
        if hosts and not any(map(np.size, hosts)):
            raise _nothing_compared(f"the example has no elements: {shapes_text(arrays)}")
        engine, began = device.engine or "numpy", time.perf_counter()
        run = _ReferenceRunner(original.adapter, engine, signature, candidate.tolerance)
        reference = run(hosts)
        if not any(map(np.size, reference.exact[-1].arrays.values())):
            raise _nothing_compared("the output of the model holds no array with elements")
        _check_weights(adapter.weights(), original.digests, reference.rewritten)
        so_far = _SoFar()
        output, seconds = _check_calls(candidate, reference, arrays, so_far)
        example = named or (given[0] if len(given) == 1 else given)
        holding = check_properties(example, output, properties) if properties else ()
        verified = [hosts]
        seed = settings.seed(seed, "compile")
        sampler = Sampler(hosts, seed, run, reference)
        so_far.is_drawn = True
        drawing = time.perf_counter()
        for drawn, other in sampler.inputs():
            is_new = [*map(np.shape, drawn), run.signature] != [*map(np.shape, hosts), signature]
            if is_new and candidate.compiler is not None and seconds >= _COMPILES_AGAIN:
                break
            try:
                seconds += _check_calls(candidate, other, drawn, so_far)[1]
            except VerificationError as error:
                inputs_text = f"The inputs, {shapes_text(drawn)}, were drawn with seed={seed}"
                raise _restate(error, f"{error}. {inputs_text}") from error
            except Exception:  # the device may lack memory for it, or the code have a fixed shape
                continue  # then the report does not list this shape
            verified.append(drawn)
            if time.perf_counter() - drawing > _SECONDS + drawing - began:
                break
    return Checked(
        reference=reference.text,
        parts=sum(1 for part in reference.exact[:-1] if part.arrays),
        weights=len(original.digests),
        largest=so_far.largest,
        properties=holding,
        rewritten=reference.rewritten,
        calls=_CALLS,
        shapes=tuple(dict.fromkeys(so_far.shapes)),
        range=range_of(verified),
        uncertain=so_far.uncertain / max(1, so_far.compared),
        resolution=so_far.resolution,
        seed=seed,
    )


def _check_calls(
    candidate: Candidate, reference: Reference, arrays: Sequence[DeviceArray], so_far: _SoFar
) -> tuple[Any, float]:
    """Compare all parts and calls; return the output and the duration of the first call."""
    read, runner = candidate.adapter.read, reference.runner
    move: Any = partial(to_device, device=candidate.device, convert=True, narrow=True)
    before = list(map(np.array, reference.inputs))
    moved = map(partial(_place_turned, move) if runner.turns else move, arrays)
    by_id = dict(zip(map(id, arrays), moved, strict=True))
    placed = list(map(by_id.__getitem__, map(id, arrays)))
    trace = partial(_parts_of, candidate, runner.signature, placed)
    if not so_far.is_drawn and len(reference.exact) > 1:
        _check_parts(trace(), reference, candidate.tolerance, so_far)
    given, named = runner.signature.filled(placed)
    began = time.perf_counter()
    try:
        output = candidate.run(*given, **named)
    except Exception:
        if not runner.turns:
            raise
        runner.turns = False  # it may take no views
        return _check_calls(candidate, reference, arrays, so_far)
    first = Part("the output", output, read)
    seconds = time.perf_counter() - began
    _check_output(candidate, first, trace, reference, so_far)
    if not all(map(_is_equal, map(read, placed), before)):
        _refuse_effect("the call changes its inputs", reference, reference)
    for _ in range(0 if so_far.is_drawn else _CALLS - 1):
        again = candidate.run(*given, **named)
        host = read(again) if "" in first.arrays else None
        if host is not None and np.array_equal(host, first.arrays[""], equal_nan=True):
            continue  # the usual case, made short
        if not (other := Part("the output", again, read)).is_same(first):
            _check_output(candidate, other, trace, reference, so_far)
    so_far.shapes.append(shapes_text(placed))
    if not so_far.is_drawn:
        so_far.first = output, first, reference, placed
    elif so_far.first and len(by_id) == len(placed):
        _check_effects(candidate, trace, reference, so_far)
        so_far.first = ()
    return output, seconds


def _place_turned(move: Callable[[Array], Any], x: Array) -> Any:
    """Return an array on the device with its channels, or its last axis but one, last in memory."""
    if x.ndim == 4:
        return move(np.moveaxis(x, 1, -1).copy()).swapaxes(1, 3).swapaxes(2, 3)
    return move(x.swapaxes(-2, -1).copy()).swapaxes(-2, -1) if x.ndim > 1 else move(x)


def _is_equal(here: Any, before: Array) -> bool:
    """Whether an array has the same numbers as before its move, which may have narrowed it."""
    with np.errstate(all="ignore"):
        return np.array_equal(here, before.astype(here.dtype), equal_nan=here.dtype.kind in "fcV")


def _check_effects(
    candidate: Candidate, trace: Trace, reference: Reference, so_far: _SoFar
) -> None:
    """Check the output of the example after a later call, then give its numbers in those arrays."""
    output, first, example, own = so_far.first
    read, (signature, placed) = candidate.adapter.read, trace.args[-2:]
    if not Part("the output", output, read).is_same(first):
        _refuse_effect("a later call changes the output of the first", example, reference)
    if so_far.shapes[0] != so_far.shapes[-1]:
        return
    try:
        for x, y in zip(placed, own, strict=True):
            x[...] = y
    except Exception:  # the arrays of JAX do not change
        return
    given, named = signature.filled(placed)
    again = Part("the output", candidate.run(*given, **named), read)
    if not again.is_same(first):
        _check_output(candidate, again, trace, example, so_far)


def _refuse_effect(what: str, first: Reference, second: Reference) -> None:
    """Raise `VerificationError` unless the model as written has such an effect too."""
    if not first.runner.model().has_effects(first.inputs, second.inputs):
        raise VerificationError(f"{what}; the model as written does not", where="the output")


def _restate(error: VerificationError, text: str, where: str | None = None) -> VerificationError:
    shapes, largest = error.shapes, error.largest_error
    return VerificationError(text, where=where or error.where, shapes=shapes, largest_error=largest)


def _nothing_compared(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what}; nothing would be compared. Give an example with at least one row, of a model "
        "that returns arrays",
        source="verify=",
    )


def _check_output(
    candidate: Candidate, output: Part, trace: Trace, reference: Reference, so_far: _SoFar
) -> None:
    """Raise `VerificationError` if the output of the whole model is wrong."""
    try:
        _check_part(output, -1, reference, candidate.tolerance, so_far)
    except VerificationError as error:
        _check_parts(trace(), reference, candidate.tolerance, so_far)
        if candidate.compiler is None:
            raise _restate(
                error,
                f"called as a whole, {error}. Part by part, it was right: verify it again, and "
                "check the device with anydevice doctor",
            ) from error
        where, text = error.where, str(error)
        traced = candidate.adapter.for_tracing(candidate.device, candidate.policy)
        inputs = _cast_inputs(candidate, trace.args[-1])
        try:  # to find the first wrong part of the compiled code
            values = candidate.compiler(traced.with_parts)(traced.arguments, *inputs)
            if values is not None:
                named = zip([part.name for part in trace()], values, strict=True)
                parts = [Part(name, value, traced.read) for name, value in named]
                _check_parts(parts, reference, candidate.tolerance, _SoFar())
        except VerificationError as inside:
            where, text = inside.where, str(inside)
        raise _restate(
            error,
            f"in the compiled code, {text}. Run as written, every part is right: compile with "
            'optimize="none", and report it to the library',
            where,
        ) from error


def _cast_inputs(candidate: Candidate, arrays: Sequence[DeviceArray]) -> list[DeviceArray]:
    dtype = candidate.adapter.input_dtype(candidate.policy)
    return [cast(x, dtype) for x in arrays]


def digest_of(x: Array) -> str:
    """Hash an array's dtype, shape and bytes; all NaN are one, as libraries rewrite their bits."""
    if x.dtype.kind in "fV" and (nan := np.isnan(x)).any():
        x = np.where(nan, x.dtype.type("nan"), x)
    digest = hashlib.blake2b(f"{x.dtype.name} {x.shape}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(x).view(np.uint8).reshape(-1).data)
    return digest.hexdigest()


def _check_weights(
    weights: Mapping[str, DeviceArray], moved: Mapping[str, str], rewritten: Collection[str]
) -> None:
    """Raise `VerificationError` if a moved weight differs, unless the model rewrites it itself."""
    for path, x in weights.items():
        if path in rewritten:
            continue
        host = host_array(x)
        if digest_of(host) != moved[path]:
            raise VerificationError(
                f"{path}: the weight on the device is not the one that was moved there; move the "
                "model again, and check the device with anydevice doctor",
                where=path,
                shapes=(host.shape,),
            )


# The parts, on the device and in the reference


def _parts_of(
    candidate: Candidate, signature: CallSignature, arrays: Sequence[DeviceArray]
) -> list[Part]:
    """Return the outputs of all parts on the device and, last, of the model."""
    adapter = candidate.adapter.for_tracing(candidate.device, candidate.policy)
    inputs = signature.filled(_cast_inputs(candidate, arrays))
    parts: list[Part] = []

    def after(name: str, value: Any) -> Any:
        parts.append(Part(name, value, adapter.read))
        return value

    with adapter.scope():
        output = adapter.traced(after, *inputs[0], **inputs[1])
    return [*parts, Part("the output", output, adapter.read)]


class _ReferenceRunner:
    """Runs the reference on host inputs, exactly and changed by rounding.

    It computes in float64, or in float32 if the library has no float64. Raises `ConfigurationError`
    for a model whose output changes from call to call.
    """

    def __init__(
        self, adapter: ModelAdapter, engine: str, signature: CallSignature, tolerance: Tolerance
    ) -> None:
        self.adapter, self.engine = adapter, engine
        self.signature, self.tolerance = signature, tolerance
        self._dtype = ""
        self._dtypes: tuple[str, ...] = ("float64", "float32")
        self._models: dict[tuple[str, int | None], _ReferenceModel] = {}
        self.shapes = list(map(_SHAPE, adapter.weights().values()))
        self.size = sum(map(prod, self.shapes))
        self._reuses = self.size < 2**24
        self.turns = False  # whether inputs are given as views

    def __call__(self, inputs: Sequence[Array], *, repeats: bool = True) -> Reference:
        """Return the reference for these inputs; with `repeats`, check that two runs agree."""
        failure: Exception | None = None
        rewritten: tuple[str, ...] = ()
        for dtype in self._dtypes:
            self._dtype = dtype
            try:
                model = self.model()
                before = model.adapter.state() if repeats else {}
                exact = model.run(inputs)
            except Exception as error:  # each library refuses float64 with errors of its own
                failure = failure or error
                continue
            self._dtypes = (dtype,)
            if repeats:
                rewritten = _rewritten_names(before, model.adapter.state())
                self._reuses = self._reuses and not rewritten
                _check_repeats(exact, model.run(inputs), rewritten)
            text = f"{dtype} on the CPU"
            if failure is not None:
                first_line = (str(failure) or type(failure).__name__).splitlines()[0]
                text += f" (not float64: {first_line})"
            is_fine = model.adapter.changes_operations
            return Reference(self, inputs, exact, [], rewritten, text, model.largest, is_fine)
        assert failure is not None
        raise failure

    def model(self, seed: int | None = None) -> _ReferenceModel:
        """Return a copy of the model, the same for all inputs if calls do not change it."""
        models = self._models if self._reuses else {}
        model = models.get((self._dtype, seed)) or _ReferenceModel(self, self._dtype, seed)
        if seed is None or seed < _CHANGED_RUNS[0]:
            models[self._dtype, seed] = model
        return model


class _ReferenceModel:
    """A copy on the CPU; a `seed` changes weights, inputs and parts' outputs by rounding."""

    def __init__(self, runner: _ReferenceRunner, dtype: str, seed: int | None = None) -> None:
        self._runner, self._dtype = runner, dtype
        self._tolerance = None if seed is None else runner.tolerance
        self._draw = np.random.default_rng(seed or 0)
        self._parts: list[Part] = []
        self.largest = 0.0
        self.adapter = runner.adapter.reference(self._prepare, runner.engine)

    def run(self, inputs: Sequence[Array]) -> tuple[Part, ...]:
        """Return the outputs of all parts and, last, of the model."""
        self._parts, self.largest = [], 0.0
        place = self.adapter.reference_input
        with self.adapter.scope(), np.errstate(all="ignore"):
            self._placed = list(map(place, map(self._prepare, inputs)))
            given, named = self._runner.signature.filled(self._placed)
            self._output = output = self.adapter.traced(self._record, *given, **named)
        return (*self._parts, Part("the output", output, self.adapter.read))

    def has_effects(self, inputs: Sequence[Array], others: Sequence[Array]) -> bool:
        """Whether a call changes its inputs, or one with `others` the output of the first."""
        before = list(map(np.array, inputs))
        first, read = self.run(inputs)[-1], self.adapter.read
        output = self._output
        changes = not all(map(_is_equal, map(read, self._placed), before))
        self.run(others)
        return changes or not Part("the output", output, read).is_same(first)

    def _record(self, name: str, value: Any) -> Any:
        """Record the output of a part; return the input of the next part."""
        read, place = self.adapter.read, self.adapter.reference_input
        if self._tolerance is not None:
            host = read(value)
            if host is None:
                arrays, rebuild = flatten(value, is_array)
                value = rebuild([place(self._prepare(host_array(x))) for x in arrays.values])
            else:
                value = place(self._prepare(host))
        self._parts.append(Part(name, value, read))
        return value

    def _prepare(self, x: Array) -> Array:
        """Convert an array to the dtype of the reference, and change it by rounding."""
        kind = x.dtype.kind  # V: dtypes of at most 16 bits that NumPy does not have
        if kind not in "cfV":
            return x
        x = np.asarray(x, np.complex128 if kind == "c" else self._dtype)
        if self._tolerance is None:
            sizes = np.abs(x)
            self.largest = max(self.largest, float(sizes.max(initial=0.0, where=sizes < _MASK)))
            return x
        return self._tolerance.changed(x, self._draw)


def _rewritten_names(before: State, after: State) -> tuple[str, ...]:
    names = []
    for name, (value, version) in after.items():
        old, old_version = before.get(name, (None, 0))
        if old is not value or old_version != version:
            names.append(name)
    return tuple(names)


def _check_repeats(first: Sequence[Part], second: Sequence[Part], rewritten: Sequence[str]) -> None:
    for one, other in zip(first, second, strict=False):
        pairs = map(_agree, one.arrays.values(), other.arrays.values())
        if not (one.is_like(other) and all(pairs)):
            why, fix = "", "or pass random numbers to the model as an input"
            if rewritten:
                why = f": the model changes its {', '.join(rewritten)} in each call"
                fix = "if that stops it, or pass what changes to the model as an input"
            raise ConfigurationError(
                f"{one.name} differs from run to run{why}, so there is nothing to compare with; "
                f"call model.eval() before compile, {fix}",
                source="verify=",
            )


def _agree(first: Array, second: Array) -> bool:
    """Whether two exact runs gave the same, except for the order of sums."""
    with np.errstate(all="ignore"):
        size = np.max(np.abs(first), axis=-1, initial=0.0, keepdims=True) if first.ndim else first
        apart = np.abs(first - second) > 16 * ROUNDING_UNIT["float32"] * np.abs(size)
        return not (apart | (np.isnan(first) != np.isnan(second))).any()


def _check_parts(
    got: Sequence[Part], reference: Reference, tolerance: Tolerance, so_far: _SoFar
) -> None:
    """Raise `VerificationError` with the name of the first wrong part."""
    chose_otherwise = False
    first: VerificationError | None = None
    for place, (here, exact) in enumerate(zip(got[:-1], reference.exact[:-1], strict=False)):
        if here.name != exact.name or here.arrays.keys() != exact.arrays.keys():
            break  # the values decide which parts run; the output is compared anyway
        try:
            _check_part(here, place, reference, tolerance, so_far)
        except VerificationError as error:
            if chose_otherwise:
                break  # after another choice, such as of experts, rows may be in another order
            try:  # tokens may be sorted by expert; the output shows whether they are right
                _check_part(here.in_order_of(exact), place, reference, tolerance, so_far)
            except VerificationError:
                raise first or error from None
            first = first or error
        for path, x in here.arrays.items():
            if x.dtype.kind == "i" and not np.array_equal(x, exact.arrays[path]):
                chose_otherwise = True
    try:
        _check_part(got[-1], -1, reference, tolerance, so_far)
    except VerificationError as error:
        raise first or error from None


def _check_part(
    got: Part, place: int, reference: Reference, tolerance: Tolerance, so_far: _SoFar
) -> None:
    exact = reference.exact[place]
    if not reference.is_fine:
        factor = max(8.0, tolerance.factor) * (8 if so_far.is_drawn else 1)
        averages = tolerance.in_averages and not so_far.is_drawn
        tolerance = replace(tolerance, factor=factor, in_averages=averages, is_fine=False)
    _check_structure(got, exact)
    for path, right in exact.arrays.items():
        here = got.arrays[path]
        name = f"{got.name}{path}"
        if here.shape != right.shape:
            raise VerificationError(
                f"{name}: the shape is {here.shape} instead of {right.shape}",
                where=got.name,
                shapes=(here.shape, right.shape),
            )
        if not (np.isfinite(here).all() and np.isfinite(right).all()):
            _check_finite(got.name, name, here, right, is_output=place < 0, so_far=so_far)
        if not here.size:
            continue
        for count in _CHANGED_RUNS:
            others = reference.changed(place, path, count) or [right]
            allowed = tolerance
            if path in exact.numbers and all(np.array_equal(x, right) for x in others):
                allowed = tolerance_of("float32")  # a constant of the program
            deviation = allowed.compared(here, right, others)
            few = here.size // 50 if so_far.is_drawn and not reference.is_fine else 0
            is_right = deviation.is_right or deviation.wrong < few
            if is_right or (count > _CHANGED_RUNS[0] and deviation.wrong > _FEW * here.size):
                break
        if not is_right:
            at = deviation.worst
            what = (
                f"{here[at]:.9g} instead of {right[at]:.9g} at {list(at)}, off by "
                f"{deviation.error[at]:.3g} where {deviation.allowed[at]:.3g} is allowed; "
                f"{deviation.wrong} of {here.size} elements are wrong"
            )
            if deviation.wrong <= deviation.excused:
                what = f"each element alone could be rounding, but {deviation.in_averages}"
            raise VerificationError(
                f"{name}: {what}",
                where=got.name,
                shapes=(here.shape,),
                largest_error=float(deviation.error.max()),
            )
        so_far.largest = max(so_far.largest, deviation.largest)
        if place < 0 and not so_far.is_drawn:
            so_far.uncertain += deviation.uncertain
            so_far.compared += here.size
            so_far.resolution = min(so_far.resolution, deviation.resolution)


def _check_structure(got: Part, exact: Part) -> None:
    """Raise `VerificationError` if the output and the reference have different leaves."""
    for mine, others in ((got, exact), (exact, got)):
        for path in (*mine.arrays, *mine.constants):
            if path not in others.arrays and path not in others.constants:
                which = "only on the device" if mine is got else "only in the reference"
                raise VerificationError(
                    f"{got.name}: {path or 'an output'} is there {which}", where=got.name
                )
    for path in (path for path in exact.arrays if path in got.constants):
        what = f"{got.constants[path]!r} instead of an array of shape {exact.shapes[path]}"
        raise VerificationError(f"{got.name}{path}: {what}", where=got.name)
    for path, right in exact.constants.items():
        here = got.constants.get(path, got.arrays.get(path))
        if path not in got.constants or type(here) is not type(right) or here != right:
            raise VerificationError(
                f"{got.name}{path}: {here!r} instead of {right!r}", where=got.name
            )


def _check_finite(
    part: str, name: str, here: Array, right: Array, *, is_output: bool, so_far: _SoFar
) -> None:
    """Raise `VerificationError` if NaN and infinities differ from those of the reference.

    An output with NaN is refused even if the reference has it: the model or the example is wrong.
    """
    same = (here == right) | (np.isnan(here) & np.isnan(right)) | np.isfinite(here)
    same &= np.isfinite(here) == np.isfinite(right)
    number = int((~same).sum())
    values = "NaN" if np.isnan(here).any() else "infinite numbers"
    if number:
        cause = "the reference does not"
        if np.isfinite(here).all():
            values, cause = "numbers", "the reference gives NaN or infinite numbers there"
        raise VerificationError(
            f"{name}: gives {values}, {number} of {here.size} elements; {cause}",
            where=part,
            shapes=(here.shape,),
            largest_error=float("inf"),
        )
    number = int(np.isnan(here).sum())
    if number and so_far.first_nan is None:
        so_far.first_nan = VerificationError(
            f"{name}: gives NaN, {number} of {here.size} elements; so does the reference: it is "
            "the model or the example, not the device",
            where=part,
            shapes=(here.shape,),
            largest_error=float("inf"),
        )
    if number and is_output:
        assert so_far.first_nan is not None
        raise so_far.first_nan


# Inputs drawn from an example

_LEVELS = ("vast ±0", "wide ±0", "wide ±", "wide", "near ±", "near", "same")
"""How far numbers are from the example, wildest first; some with other signs, and zeros."""
_POWERS = {
    "vast": [(0, 0), (-7, -1), (-20, -10), (4, 5), (8, 20), (-20, 11)],
    "wide": [(0, 0), (-7, -1), (-20, -10), (4, 5), (8, 11), (-20, 11)],
    "near": [(0, 0), (-1, 0), (-4, -1), (0, 1), (1, 2), (-4, 2)],
}
"""Powers of two for rows as in the example, small, tiny, large, huge, and of mixed sizes."""
_WORK = 2.0**25
"""Operations of a run with other inputs, about, unless the example needs half as many."""

Axes = Sequence[tuple[int, int]]
Sample = tuple[list[Array], Reference]


class Sampler:
    """Draws inputs like an example, with other numbers, numbers of rows and lengths.

    If the reference has too large numbers, a tamer level is used.
    """

    def __init__(
        self, example: Sequence[Array], seed: int, run: _ReferenceRunner, reference: Reference
    ) -> None:
        self._example, self._run, self._start = example, run, 1
        self._draw = np.random.default_rng(seed)
        self._rows = next((x.shape[0] for x in example if x.ndim), 0)
        outputs = [x for part in reference.exact for x in part.arrays.values()]
        self._work = sum(map(np.size, outputs)) * max(1.0, run.size**0.5)
        outer = set[int]().union(*map(_SHAPE, outputs)).difference((0, 1), *map(_SHAPE, example))
        self._outer = np.array(sorted(outer), int)  # with an axis of the same size, mixed up
        # Differences of large numbers are as exact as their operations, which must be known.
        self._shifts = ["shifted"] * reference.is_fine
        is_narrow = run.tolerance.smallest > _TINY
        has_order = any(x.dtype.kind == "i" for x in outputs)  # zeros have none
        has_numbers = any(map(_is_floating, example))
        levels = _LEVELS[(4 if is_narrow else 2 * has_order) if has_numbers else -2 :]
        special = [f"{levels[0]} special"] * (has_numbers and not has_order)
        emptied = [f"{levels[0]} emptied"] * any(map(_is_mask, example))
        self._levels = (*special, *emptied, *levels)
        integers = [x for x in example if x.dtype.kind in "iu" and x.size and not _is_mask(x)]
        most = max([int(x.max()) for x in integers], default=2**63) + 1
        shapes = run.shapes if run.engine in _WITH_BOUNDS and integers else ()
        sizes = {shape[0] for shape in shapes if len(shape) == 2 and shape[0] > most}
        self._tables = sorted(sizes, reverse=True)
        self._largest = (_LARGEST_FLOAT16 if is_narrow else _LARGEST_FLOAT32) / 16

    def inputs(self) -> Iterator[Sample]:
        """Yield inputs that the model accepts, and their references; the runner has how to call."""
        own, many = self._rows, 4 * int(self._draw.integers(25, 33)) + 2  # in no tile as a whole
        if same := self._draw_sample(own):
            yield same
        sample = self._draw_sample(many) or self._draw_sample(own + 1)
        yield from filter(None, [sample] if sample else map(self._draw_sample, [own] * 6))
        lengths = [axes for axes in self._groups() if self._draw_sample(own, "next", [axes])]
        arrays = enumerate(self._example)  # a norm needs several features
        widths = [(at, x.ndim - 1) for at, x in arrays if _is_floating(x) and x.ndim < 4]
        inner = [axes for axes in lengths if axes[-1] not in widths]
        longer = [(how, lengths) for how in ("long", "double", "next") if lengths]
        several = len(self._example) > 1
        sizes = sorted({n for x in self._example for n in x.shape[1:] if 1 < n < 128 and n != own})
        plans: tuple[list[Any], ...] = (
            [*[(1, *x) for x in longer], (1,), *[(own, *x) for x in longer]],
            [*[(3, "single", inner[:1], x) for x in self._shifts], (3, "single", inner[:1]), (3,)],
            [(own, "short", inner)] if inner else [],
            [(own, "twice")] if several else [],
            [(size,) for size in sizes] if several else [],
            [(own, f"below {size}") for size in self._tables],
        )
        for place, plan in enumerate(plans):
            self._run.turns = place in (1, 2) and self._run.engine in _WITH_STRIDES
            yield from islice(filter(None, starmap(self._draw_sample, plan)), 1)
        signature = self._run.signature
        constants = tuple((at, x.changed()) for at, x in signature.constants)
        if constants != signature.constants:
            self._run.signature = replace(signature, constants=constants)
            yield from filter(None, [self._draw_sample(own, "same")])

    def _groups(self) -> list[Axes]:
        """Return the axes that may be lengths: those of one size, and all but one of them."""
        groups: dict[int, list[tuple[int, int]]] = {}
        for at, x in enumerate(self._example):
            for axis, size in enumerate(x.shape):
                if size > 1 and (axis or size != self._rows):
                    groups.setdefault(size, []).append((at, axis))
        parts = [part for axes in groups.values() if axes[1:] for part in (axes[1:], axes[:-1])]
        return [*groups.values(), *parts]

    def _draw_sample(
        self, rows: int, how: str = "", lengths: Sequence[Axes] = (), *levels: str
    ) -> Sample | None:
        """Return inputs with other sizes, and their reference; None if the model refuses them."""
        places = enumerate(self._example)
        self._most = int(how.split()[1]) - 1 if "below" in how else 0
        sizes = {(at, 0): rows for at, x in places if x.ndim and len(x) == self._rows > 0}
        for axes in lengths:
            size = self._example[axes[0][0]].shape[axes[0][1]]
            more, less = self._draw.integers((60, min(2, size - 1)), (320, size))
            if (self._outer < size).any():
                less = self._draw.choice(self._outer[self._outer < size])
            new = {"long": size + more | 1, "double": 2 * size + 1, "next": size + 1, "short": less}
            sizes |= dict.fromkeys(axes, int(new.get(how, 1)))
        arrays = list(self._example)
        for (at, axis), size in sizes.items():
            arrays[at] = arrays[at].take(np.arange(size) % arrays[at].shape[axis], axis)
        growth = sum(map(np.size, arrays)) / max(1, sum(map(np.size, self._example)))
        if growth * self._work > max(_WORK, 2 * self._work):
            return None
        for place, level in enumerate(levels or self._levels):
            inputs = [self._numbers(at, x, level) for at, x in enumerate(arrays)]
            if how == "twice":  # floating arrays of one kind become one array
                kinds = [(x.shape, x.dtype) if _is_floating(x) else id(x) for x in inputs]
                inputs = [inputs[kinds.index(kind)] for kind in kinds]
            try:
                reference = self._run(inputs, repeats=False)
            except Exception:  # a model may raise anything for inputs that it does not accept
                if how or rows != self._rows:
                    return None
                continue
            numbers = reference.exact[-1].arrays.values()
            if reference.largest < self._largest and all(map(np.all, map(np.isfinite, numbers))):
                self._levels = self._levels[place:]
                self._start += max(1, self._rows)
                return inputs, reference
        return None

    def _numbers(self, at: int, x: Array, level: str) -> Array:
        """Return other numbers of this level for an array of the example."""
        draw, own, kind = self._draw, self._example[at], x.dtype.kind
        if level == "same" or not x.ndim or not x.size or kind == "c":
            return x
        if kind in "biu":
            some = draw.random(x.shape) < 0.25
            numbers = x ^ some if kind == "b" else np.where(some, x.dtype.type(0), x)
            if kind != "b" and level != "shifted":
                most = max(own.max(), min(self._most, np.iinfo(x.dtype).max) * (not _is_mask(own)))
                numbers = draw.integers(own.min(), most, x.shape, x.dtype, endpoint=True)
            if "emptied" in level and _is_mask(own):
                numbers[len(x) // 2] = 0
            return np.asarray(numbers)
        largest = np.max(np.abs(np.nan_to_num(own.astype(np.float64), posinf=1, neginf=1)))
        if level == "shifted":  # far from 0 beside the differences
            return np.asarray(x + largest / 4 * self._run.tolerance.unit**-0.5, x.dtype)
        powers = np.array(_POWERS[level.split()[0]], np.float64)
        above = np.log2(largest or 1.0) - 1
        powers = np.where(powers > 2, np.maximum(powers - above, 2), powers)
        rows = np.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1))
        if len(x) > 3 or x.shape == own.shape:
            rows = rows + self._start + 7 * draw.integers(4)
        if x.ndim > 2:  # every other row is of several kinds
            rows = rows + rows % 2 * draw.integers(28, size=(*x.shape[:2], *rows.shape[2:]))
        size, sign = rows % 7, rows // 7 % 4
        low, high = np.moveaxis(powers[np.minimum(size, 5)], -1, 0)
        shares = np.where(size < 5, draw.random(size.shape), draw.random(x.shape))
        numbers = x * 2.0 ** (low + shares * (high - low) - draw.random(x.shape))
        if "±" in level:
            random = np.where(draw.random(x.shape) < 0.5, numbers, -numbers)
            signs = sign if len(x) > 1 else 3  # a model may decide by the sign of its whole input
            numbers = np.choose(signs, [numbers, random, np.abs(numbers), -np.abs(numbers)])
        if "0" in level:
            numbers = np.where(size == 6, 0.0, numbers)
        if "special" in level:
            some = draw.random(x.shape) < 0.5 / x.shape[-1]
            numbers = np.where(some, draw.choice([np.nan, np.inf, -np.inf], x.shape), numbers)
        return np.asarray(numbers.astype(x.dtype))


def _is_floating(x: Array) -> bool:
    return x.dtype.kind in "fV"


def _is_mask(x: Array) -> bool:
    """Whether an array tells which elements count."""
    is_small = x.dtype.kind in "iu" and x.size > 0 and x.min() >= 0 and x.max() <= 1
    return x.ndim > 0 and (x.dtype.kind == "b" or is_small)


def range_of(examples: Sequence[Sequence[Array]]) -> tuple[float, float] | None:
    """Return the minimum and the maximum of all floating inputs; `None` if there are none."""
    arrays = [x for example in examples for x in example if x.dtype.kind in "fV"]
    floats = [np.asarray(x, np.float64) for x in arrays]
    numbers = np.concatenate([np.zeros(0), *[x[np.isfinite(x)] for x in floats]])
    return (float(numbers.min()), float(numbers.max())) if numbers.size else None


# How far a result may be from the reference


class Tolerance(Record):
    """The precision of a computation.

    `unit` is the rounding unit, `factor` the allowed multiple of its effect, and `smallest` the
    smallest number above 0. With `in_averages`, averages are compared too. With `is_fine`, changed
    runs change the result of every operation.
    """

    unit: float
    factor: float
    smallest: float = _TINY
    in_averages: bool = False
    is_fine: bool = True

    def changed(self, x: Array, draw: np.random.Generator) -> Array:
        """Move every element up or down by about a rounding unit; 0 stays 0."""
        if x.dtype.kind == "c":
            return self.changed(x.real, draw) + 1j * self.changed(x.imag, draw)
        signs = draw.integers(0, 2, x.shape) * 2 - 1
        steps = (signs * draw.uniform(0.5, 1.5, x.shape)).astype(x.dtype)
        moved = x * (1 + self.unit * steps) + self.smallest * steps * (x != 0)
        return np.asarray(moved)  # NumPy's arithmetic turns a 0-d array into a number

    def compared(self, here: Array, exact: Array, changed: Sequence[Array]) -> Deviation:
        """Compare a result with the exact one, given changed runs of the exact one.

        Elements that are not finite in the exact result are ignored here: `_check_finite` compares
        them.
        """
        with np.errstate(all="ignore"):
            if here.dtype.kind == exact.dtype.kind == "i":
                moves = (np.stack(changed) != exact).any(0)
                allowed = np.where(moves, np.inf, 0.0)
                uncertain = int(moves.sum())
                return Deviation(np.abs(here - exact), allowed, _excused_count(moves), uncertain)
            there = np.isfinite(exact)
            here, exact = np.where(there, here, 0.0), np.where(there, exact, 0.0)
            changes = np.asarray(np.stack(changed) - exact, np.float64)
            changes = np.where(there & np.isfinite(changes), changes, 0.0)
            effect = np.abs(changes).max(0)
            usual = self._usual_effect(np.abs(exact), effect)
            expected = np.maximum(effect, usual)
            off, allowed = here - exact, self.factor * expected
            size = np.abs(exact)
            relative = float(_quantiles(allowed / size, exact != 0, 0.5, rows=False)[0])
            excused = _excused_count(effect > self.factor * usual)
            uncertain = int((effect > np.maximum(size, np.median(size)) / 2).sum())
            averages = "", relative
            if self.in_averages:
                averages = self._in_averages(exact, expected, off, changes, excused)
            return Deviation(np.abs(off), allowed, excused, uncertain, *averages)

    def _usual_effect(self, size: Array, effect: Array) -> Array:
        """Return the largest of the usual effects: in the row or column, and relative to size."""
        some = size > 0
        share = max(self.unit, 2 * float(_quantiles(effect / size, some, _SMALL, rows=False)[0]))
        usual = np.asarray(np.inf if size.ndim else 0.0)
        for axis in (-1, 0) if size.ndim else ():
            length = size.shape[axis]
            if axis == 0 and (size.ndim < 2 or length < _SHORT_ROW):
                break
            along, sizes = np.moveaxis(effect, axis, -1), np.moveaxis(size, axis, -1)
            counts = sizes > 0
            larger = _LARGER if length >= _SHORT_ROW else 1.0
            borrowed = _quantiles(along, counts | (along > 0), larger, _SMALL)
            typical = self.unit * _quantiles(sizes, counts, 0.5 if larger < 1 else 1.0)
            borrowed = np.minimum(borrowed[..., :1], _SPREAD * borrowed[..., 1:])
            usual = np.minimum(usual, np.moveaxis(np.maximum(borrowed, typical), -1, axis))
        least = self.smallest if self.is_fine else self.unit * min(1.0, float(size.max()))
        return np.maximum(np.maximum(usual, max(least, self.smallest)), share * size)

    def _in_averages(
        self, exact: Array, expected: Array, off: Array, changes: Array, excused: int
    ) -> tuple[str, float]:
        """Return the fault in the averages as text, and the smallest error that they show."""
        sure = np.abs(exact) > 4 * expected  # where it is not, rounding may have a direction
        number = int(sure.sum())
        if not number:
            return "", 0.0
        sizes = np.where(sure, exact / expected, 0.0)
        off, *others = (np.where(sure, x / expected, 0.0) for x in (off, *changes))
        together = float(np.sqrt((off**2).sum() / number))
        if together > 1 + 3 / np.sqrt(number):
            return f"its elements are off by {together:.2g} times what rounding does", 0.0
        table = [x.reshape(-1, x.shape[-1] if x.ndim else 1) for x in (sizes, off, *others)]
        allowed = _JUMPING * number + 1 if excused else 0.0
        wrong, most = _in_lines("it is", None, self.unit, 0.0, *table)
        for axis, name in enumerate(("its columns are", "its rows are") if self.is_fine else ()):
            wrong = wrong or _in_lines(name, axis, self.unit, allowed, *table)[0]
        return wrong, most


class Deviation(Record):
    """The error of each element of a result, and the allowed error.

    `excused` is the number of elements that may exceed it, because the reference jumps too;
    `uncertain` counts the elements that rounding changes by half their size or more. `in_averages`
    is the fault in the averages, or empty. `resolution` is the smallest relative error of the whole
    result that would be noticed.
    """

    error: Array
    allowed: Array
    excused: int
    uncertain: int = 0
    in_averages: str = ""
    resolution: float = 0.0

    @property
    def wrong(self) -> int:
        """The number of elements with a larger error than allowed."""
        return int((self.error > self.allowed).sum())

    @property
    def is_right(self) -> bool:
        """Whether every element but the excused ones is right, and so are the averages."""
        return self.wrong <= self.excused and not self.in_averages

    @property
    def worst(self) -> tuple[int, ...]:
        """The index of the largest error, relative to its limit."""
        place = np.unravel_index(int(np.argmax(self._share())), self.error.shape)
        return tuple(int(i) for i in place)

    @property
    def largest(self) -> float:
        """The largest allowed error, as a share of the limit."""
        share = self._share()
        return float(np.max(share, initial=0.0, where=share <= 1))

    def _share(self) -> Array:
        with np.errstate(all="ignore"):
            return np.where(self.error == 0, 0.0, self.error / self.allowed)


def tolerance_of(compute: str, *, coarse_products: bool = False) -> Tolerance:
    """Return the tolerance of a compute dtype, with products in TF32 if `coarse_products`."""
    smallest = _SMALLEST.get(compute, _TINY)
    if compute in ("float16", "bfloat16"):
        return Tolerance(ROUNDING_UNIT[compute], 4.0, smallest, in_averages=True)
    if coarse_products:  # correct models reached 0.43 of this, with JAX on an H200
        return Tolerance(ROUNDING_UNIT["float16"], 16.0, smallest)
    return Tolerance(ROUNDING_UNIT[compute], 64.0, smallest)


def _excused_count(jumps: Array) -> int:
    """Return the number of elements that may jump unseen: two, which may swap, or 1 in 100."""
    return max(min(2, jumps.size // 8), int(_JUMPING * jumps.size)) if jumps.any() else 0


def _in_lines(
    name: str, axis: int | None, unit: float, excused: float, sizes: Array, *errors: Array
) -> tuple[str, float]:
    """Return a fault in slopes or means as text, and the smallest error they show."""
    some = sizes != 0
    power = np.sqrt((sizes**2).sum(axis, keepdims=True))
    number = np.sqrt(some.sum(axis, keepdims=True))
    for weights in (sizes / np.maximum(power, _TINY), some / np.maximum(number, 1.0)):
        here, *others = (np.abs((x * weights).sum(axis, keepdims=True)) for x in errors)
        rms = np.sqrt(np.square(others).mean(0))
        most = _MARGIN * np.maximum(rms, np.sqrt(np.square(rms).mean())) + 1 + unit * power / 2
        if (here > most).sum() > excused:
            times = float((here / most).max())
            return f"{name} off on average, {times:.2g} times as far as allowed", 0.0
    return "", float((most / np.maximum(power, _TINY)).min())


def _quantiles(x: Array, counts: Array, *shares: float, rows: bool = True) -> Array:
    """Return the quantiles of each row, or of the whole array, over the elements that count.

    The last axis of the result is the shares. A quantile is 0 if no element counts.
    """
    if not rows:
        x, counts = x.reshape(-1), counts.reshape(-1)
    step = max(1, x.shape[-1] // _SAMPLE)
    x, counts = x[..., ::step], counts[..., ::step]
    ordered = np.sort(np.where(counts, x, np.inf), axis=-1)
    last = np.maximum(counts.sum(-1, keepdims=True) - 1, 0)
    elements = np.take_along_axis(ordered, (last * np.array(shares)).astype(int), -1)
    return np.where(np.isfinite(elements), elements, 0.0)


def matched_rows(x: Array, other: Array) -> Array:
    """Order the rows of an array so that each is next to the nearest row of another array."""
    rows, others = (array.reshape(-1, array.shape[-1] if array.ndim else 1) for array in (x, other))
    if x.shape != other.shape or not 1 < len(rows) <= _MOST_ROWS:
        return x
    with np.errstate(all="ignore"):
        apart = (rows**2.0).sum(-1) - 2.0 * (others @ rows.T)
    order = np.empty(len(rows), np.int64)
    for place, distances in enumerate(apart):
        order[place] = nearest = np.argmin(distances)
        apart[:, nearest] = np.inf
    return rows[order].reshape(x.shape)
