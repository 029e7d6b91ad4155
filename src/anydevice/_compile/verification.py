"""Verify a compiled model on its device: its weights, its parts, its output, its properties.

Each part is compared with a reference that runs in float64. The compiled model is called several
times with the example, and once with other inputs made from it: smaller and larger numbers, and one
more row if it accepts that. The result names the shapes and the range of inputs that were verified.

The tolerance comes from the model itself. The reference runs again with weights, inputs and the
output of every part changed by about one rounding unit of the compute dtype, each element up or
down at random. The change of an element is the effect of rounding on it:

    allowed = factor × the largest of
        the change of this element,
        the changes of the larger elements of its row (the last axis), except for the largest,
        its size × the relative change of a usual element of the part,
        one rounding unit of a usual element of the part, or of its row

The last three are there because a change can be small by chance. No outlier raises them, be it a
row, a column or half of all elements: "larger" leaves out a tenth and is at most eight times a
small change, "usual" is less than the median. The factor is 64 for float32, whose sums round at
every step, and 8 for 16-bit dtypes, whose sums do not.

Rounding has no direction, so its errors cancel in averages. In 16 bits, an error that hides in the
rounding of each element shows there: the root mean square of all errors, the averages of columns
and rows, and the slope of the result against the reference may exceed those of the changed runs by
little.

If a function jumps, rounding may move an element across the jump. So if something seems wrong, the
reference runs more often, changed by four units each: an element that jumps in one of these runs
may jump, and any other element changes four times as much as by one unit. If any element jumps,
two elements, or one in a hundred, may exceed the tolerance without having jumped.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from enum import Enum
from functools import partial
from operator import attrgetter
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
from anydevice._core.record import Record
from anydevice._core.text import type_text
from anydevice._libraries.base import ModelAdapter, State, host_array
from anydevice._libraries.precision import Policy, cast
from anydevice.errors import ConfigurationError, VerificationError

Array = np.ndarray[Any, Any]

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_REFERENCES = ("float64", "float32")
_CHANGED_RUNS = (2, 12, 48)
"""Changed runs of the reference: at first, if something seems wrong, if few elements do."""
_FEW = 0.1
"""Share of wrong elements up to which more changed runs are made."""
_CALLS = 12
"""Calls of the compiled model with the example."""
_COMPILES_AGAIN = 5.0
"""Seconds of the first call up to which compiled code is made for another number of rows too."""
_LARGEST_FLOAT16 = 65504.0
_NUMBERS = (bool, int, float, complex, np.number, np.bool_)
_CONSTANTS = (str, bytes, type(None), Enum)
_SHAPE = attrgetter("shape")
_DOWN, _UP = 1 / 16, 4.0
"""Factors for the rows of other inputs."""
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
STRONGLY = 4.0
_MARGIN = 1.5


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
        for path, x in self.arrays.items():
            if not np.array_equal(x, other.arrays[path], equal_nan=True):
                return False
        return True


class Reference:
    """The correct outputs of all parts and, last, of the model: exact, and in changed runs.

    `rewritten` names the state that a call changes; `change` makes the changed run of a seed.
    """

    def __init__(
        self,
        exact: tuple[Part, ...],
        change: Callable[[int], tuple[Part, ...]],
        rewritten: tuple[str, ...],
        text: str,
    ) -> None:
        self.exact = exact
        self.rewritten = rewritten
        self.text = text
        self._change = change
        self._changed: list[tuple[Part, ...]] = []

    def changed(self, index: int, path: str, count: int) -> tuple[list[Array], list[Array]]:
        """Return an array in `count` runs of the same branch, by one unit and by `STRONGLY`."""
        while len(self._changed) < count:
            self._changed.append(self._change(len(self._changed)))
        exact = self.exact[index]
        weakly: list[Array] = []
        strongly: list[Array] = []
        for number, run in enumerate(self._changed[:count]):
            if -len(run) <= index < len(run) and run[index].is_like(exact):
                arrays = weakly if number < _CHANGED_RUNS[0] else strongly
                arrays.append(run[index].arrays[path])
        return weakly, strongly


class _SoFar:
    """The results so far."""

    def __init__(self) -> None:
        self.largest = 0.0
        self.uncertain = 0
        self.compared = 0
        self.resolution = np.inf
        self.shapes: list[str] = []
        self.first_nan: VerificationError | None = None


def verify_model(
    candidate: Candidate, original: Original, inputs: Inputs, properties: Sequence[Property]
) -> Checked:
    """Verify a compiled model with these inputs.

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
        if hosts and not any(x.size for x in hosts):
            raise _nothing_compared(f"the example has no elements: {shapes_text(arrays)}")
        engine = device.engine or "numpy"
        run = _ReferenceRunner(original.adapter, engine, signature, candidate.tolerance)
        reference = run(hosts)
        if not any(x.size for x in reference.exact[-1].arrays.values()):
            raise _nothing_compared("the output of the model holds no array with elements")
        _check_weights(adapter.weights(), original.digests, reference.rewritten)
        so_far = _SoFar()
        output, seconds = _check_calls(candidate, reference, signature, arrays, _CALLS, so_far)
        example = named or (given[0] if len(given) == 1 else given)
        holding = check_properties(example, output, properties) if properties else ()
        verified = [hosts]
        others = [other_numbers(hosts)]
        if candidate.compiler is None or seconds < _COMPILES_AGAIN:
            others.append(other_rows(hosts))
        for inputs_to_try in others:
            other = _other_reference(run, inputs_to_try, candidate.policy.compute)
            if other is None:
                continue
            try:
                _check_calls(candidate, other[1], signature, other[0], 1, so_far)
            except VerificationError:
                raise
            except Exception:  # the device may lack memory for it, or the code have a fixed shape
                continue  # then the report does not list this shape
            verified.append(other[0])
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
    )


def _other_reference(
    run: _ReferenceRunner, inputs: Iterator[list[Array]], compute: str
) -> tuple[list[Array], Reference] | None:
    """Return the first of these inputs that the model accepts, and its reference, if any."""
    most = _LARGEST_FLOAT16 / 16 if compute == "float16" else np.inf
    for arrays in inputs:
        try:
            reference = run(arrays, repeats=False)
        except Exception:  # a model may raise anything for inputs that it does not accept
            continue
        numbers = [x for part in reference.exact for x in part.arrays.values() if x.size]
        if all(np.isfinite(x).all() and np.abs(x).max() < most for x in numbers):
            return arrays, reference
    return None


def _check_calls(
    candidate: Candidate,
    reference: Reference,
    signature: CallSignature,
    arrays: Sequence[DeviceArray],
    calls: int,
    so_far: _SoFar,
) -> tuple[Any, float]:
    """Compare all parts and calls; return the output and the duration of the first call."""
    adapter, policy, device = candidate.adapter, candidate.policy, candidate.device
    dtype = adapter.input_dtype(policy)
    placed = [to_device(x, device, convert=True, narrow=True) for x in arrays]
    cast_inputs = [cast(x, dtype) for x in placed]
    parts = _parts_of(adapter.for_tracing(device, policy), signature.filled(cast_inputs))
    _check_parts(parts, reference, candidate.tolerance, so_far)
    given, named = signature.filled(placed)
    began = time.perf_counter()
    output = candidate.run(*given, **named)
    first = Part("the output", output, adapter.read)
    seconds = time.perf_counter() - began
    _check_output(candidate, first, cast_inputs, parts, reference, so_far)
    for _ in range(calls - 1):
        again = Part("the output", candidate.run(*given, **named), adapter.read)
        if not again.is_same(first):
            _check_output(candidate, again, cast_inputs, parts, reference, so_far)
    so_far.shapes.append(shapes_text(placed))
    return output, seconds


def _nothing_compared(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what}; nothing would be compared. Give an example with at least one row, of a model "
        "that returns arrays",
        source="verify=",
    )


def _check_output(
    candidate: Candidate,
    output: Part,
    inputs: Sequence[Any],
    written: Sequence[Part],
    reference: Reference,
    so_far: _SoFar,
) -> None:
    """Raise `VerificationError` if the output of the whole model is wrong."""
    try:
        _check_part(output, -1, reference, candidate.tolerance, so_far)
    except VerificationError as error:
        if candidate.compiler is None:
            raise VerificationError(
                f"called as a whole, {error}. Part by part, it was right: verify it again, and "
                "check the device with anydevice doctor",
                where=error.where,
                shapes=error.shapes,
                largest_error=error.largest_error,
            ) from error
        raise _in_compiled_code(candidate, inputs, written, reference, error) from error


def _in_compiled_code(
    candidate: Candidate,
    inputs: Sequence[Any],
    written: Sequence[Part],
    reference: Reference,
    error: VerificationError,
) -> VerificationError:
    """Return the error with the first wrong part of the compiled code, if that can be found."""
    where, text = error.where, str(error)
    try:
        assert candidate.compiler is not None
        traced = candidate.adapter.for_tracing(candidate.device, candidate.policy)
        values = candidate.compiler(traced.with_parts)(traced.arguments, *inputs)
        if values is not None:
            named = zip([part.name for part in written], values, strict=True)
            parts = [Part(name, value, traced.read) for name, value in named]
            _check_parts(parts, reference, candidate.tolerance, _SoFar())
    except VerificationError as inside:
        where, text = inside.where, str(inside)
    return VerificationError(
        f"in the compiled code, {text}. Run as written, every part is right: compile with "
        'optimize="none", and report it to the library',
        where=where,
        shapes=error.shapes,
        largest_error=error.largest_error,
    )


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


def _parts_of(adapter: ModelAdapter, inputs: Inputs) -> list[Part]:
    """Return the outputs of all parts on the device and, last, of the model."""
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

    def __call__(self, inputs: Sequence[Array], *, repeats: bool = True) -> Reference:
        """Return the reference for these inputs; with `repeats`, check that two runs agree."""
        failure: Exception | None = None
        for dtype in _REFERENCES:
            try:
                model = _ReferenceModel(self, dtype)
                before = model.adapter.state()
                exact = model.run(inputs)
            except Exception as error:  # each library refuses float64 with errors of its own
                failure = failure or error
                continue
            rewritten = _rewritten_names(before, model.adapter.state())
            if repeats:
                _check_repeats(exact, model.run(inputs), rewritten)
            text = f"{dtype} on the CPU"
            if failure is not None:
                first_line = (str(failure) or type(failure).__name__).splitlines()[0]
                text += f" (not float64: {first_line})"
            return Reference(exact, partial(self._run_changed, inputs, dtype), rewritten, text)
        assert failure is not None
        raise failure

    def _run_changed(self, inputs: Sequence[Array], dtype: str, seed: int) -> tuple[Part, ...]:
        return _ReferenceModel(self, dtype, seed).run(inputs)


class _ReferenceModel:
    """A copy on the CPU; a `seed` changes weights, inputs and parts' outputs by rounding."""

    def __init__(self, runner: _ReferenceRunner, dtype: str, seed: int | None = None) -> None:
        self._signature, self._dtype = runner.signature, dtype
        self._tolerance = None if seed is None else runner.tolerance
        self._draw = np.random.default_rng(seed or 0)
        self._units = STRONGLY if seed is not None and seed >= _CHANGED_RUNS[0] else 1.0
        self._parts: list[Part] = []
        self.adapter = runner.adapter.reference(self._prepare, runner.engine)

    def run(self, inputs: Sequence[Array]) -> tuple[Part, ...]:
        """Return the outputs of all parts and, last, of the model."""
        self._parts = []
        place = self.adapter.reference_input
        with self.adapter.scope(), np.errstate(all="ignore"):
            given, named = self._signature.filled(list(map(place, map(self._prepare, inputs))))
            output = self.adapter.traced(self._record, *given, **named)
            return (*self._parts, Part("the output", output, self.adapter.read))

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
            return x
        return self._tolerance.changed(x, self._draw, self._units)


def _rewritten_names(before: State, after: State) -> tuple[str, ...]:
    """Return the names of values that were replaced or written to."""
    names = []
    for name, (value, version) in after.items():
        old, old_version = before.get(name, (None, 0))
        if old is not value or old_version != version:
            names.append(name)
    return tuple(names)


def _check_repeats(first: Sequence[Part], second: Sequence[Part], rewritten: Sequence[str]) -> None:
    """Raise `ConfigurationError` if two runs of the reference differ."""
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
        _check_finite(got.name, name, here, right, is_output=place < 0, so_far=so_far)
        if not here.size:
            continue
        for count in _CHANGED_RUNS:
            changed, strongly = reference.changed(place, path, count)
            others = changed or [right]
            allowed = tolerance
            if path in exact.numbers and all(np.array_equal(x, right) for x in others):
                allowed = tolerance_of("float32")  # a constant of the program
            deviation = allowed.compared(here, right, others, strongly)
            is_right = deviation.is_right
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
        if place < 0:
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
    if np.isfinite(here).all() and np.isfinite(right).all():
        return
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


# Inputs made from an example


def other_numbers(example: Sequence[Array]) -> Iterator[list[Array]]:
    """Yield inputs of the same shapes with smaller and larger numbers, or only smaller ones."""
    rows = _rows_of(example)
    if any(map(_is_floating, example)):
        if rows > 1:
            yield [_scale_rows(x, (_DOWN, _UP)) for x in example]
        yield [_scale_rows(x, (_DOWN,)) for x in example]
    else:
        yield [np.roll(x, 1, 0 if rows > 1 else -1) if x.ndim else x for x in example]


def other_rows(example: Sequence[Array]) -> Iterator[list[Array]]:
    """Yield inputs with one more row, if all inputs have the same number of rows."""
    rows = _rows_of(example)
    for factors in ((_DOWN, _UP), (_DOWN, 1.0)) if rows else ():
        yield [_scale_rows(x[np.arange(rows + 1) % rows], factors) for x in example]


def _rows_of(example: Sequence[Array]) -> int:
    """Return the number of rows of all arrays; 0 if they differ."""
    rows = {x.shape[0] if x.ndim else 0 for x in example}
    return rows.pop() if len(rows) == 1 else 0


def _scale_rows(x: Array, factors: Sequence[float]) -> Array:
    """Multiply the rows of a floating array by the factors in turn."""
    if not _is_floating(x):
        return x
    if not x.ndim:
        return np.asarray(x * factors[0], x.dtype)
    scales = np.resize(factors, x.shape[0]).reshape(-1, *[1] * (x.ndim - 1))
    return np.asarray(x.astype(np.float64) * scales).astype(x.dtype)


def _is_floating(x: Array) -> bool:
    return x.dtype.kind in "fV"


def range_of(examples: Sequence[Sequence[Array]]) -> tuple[float, float] | None:
    """Return the minimum and the maximum of all floating inputs; `None` if there are none."""
    floats = [np.asarray(x, np.float64) for arrays in examples for x in arrays if _is_floating(x)]
    numbers = [x[np.isfinite(x)] for x in floats]
    numbers = [x for x in numbers if x.size]
    if not numbers:
        return None
    return float(min(x.min() for x in numbers)), float(max(x.max() for x in numbers))


# How far a result may be from the reference


class Tolerance(Record):
    """The precision of a computation.

    `unit` is the rounding unit, `factor` the allowed multiple of its effect, and `smallest` the
    smallest number above 0. With `in_averages`, averages are compared too.
    """

    unit: float
    factor: float
    smallest: float = _TINY
    in_averages: bool = False

    def changed(self, x: Array, draw: np.random.Generator, units: float = 1.0) -> Array:
        """Move every element up or down by about `units` rounding units; 0 stays 0."""
        if x.dtype.kind == "c":
            return self.changed(x.real, draw, units) + 1j * self.changed(x.imag, draw, units)
        signs = draw.integers(0, 2, x.shape) * 2 - 1
        steps = (units * signs * draw.uniform(0.5, 1.5, x.shape)).astype(x.dtype)
        moved = x * (1 + self.unit * steps) + self.smallest * steps * (x != 0)
        return np.asarray(moved)  # NumPy's arithmetic turns a 0-d array into a number

    def compared(
        self, here: Array, exact: Array, changed: Sequence[Array], strongly: Sequence[Array] = ()
    ) -> Deviation:
        """Compare a result with the exact one, given changed runs of the exact one.

        The runs in `strongly` are changed by `STRONGLY` units. Elements that are not finite in the
        exact result are ignored here: `_check_finite` compares them.
        """
        with np.errstate(all="ignore"):
            if here.dtype.kind == exact.dtype.kind == "i":
                moves = (np.stack([*changed, *strongly]) != exact).any(0)
                allowed = np.where(moves, np.inf, 0.0)
                uncertain = int(moves.sum())
                return Deviation(np.abs(here - exact), allowed, _excused_count(moves), uncertain)
            there = np.isfinite(exact)
            here, exact = np.where(there, here, 0.0), np.where(there, exact, 0.0)
            changes = np.asarray(np.stack([*changed, *strongly]) - exact, np.float64)
            changes[len(changed) :] /= STRONGLY
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
                averages = self._in_averages(exact, expected, off, changes)
            return Deviation(np.abs(off), allowed, excused, uncertain, *averages)

    def _usual_effect(self, size: Array, effect: Array) -> Array:
        """Return the largest of the usual effects: in the row, relative to size, and at least."""
        some = size > 0
        share = max(self.unit, 2 * float(_quantiles(effect / size, some, _SMALL, rows=False)[0]))
        typical: Array | float = float(_quantiles(size, some, 0.5, rows=False)[0])
        long = bool(effect.ndim) and effect.shape[-1] >= _SHORT_ROW
        if long:
            typical = np.maximum(typical, _quantiles(size, some, 0.5))
        larger = _LARGER if long else 0.5
        effects = _quantiles(effect, some | (effect > 0), larger, _SMALL, rows=long)
        row, small = (effects[..., :1], effects[..., 1:]) if long else effects
        row = np.minimum(row, _SPREAD * small)
        least = np.maximum(self.unit * typical, self.smallest)
        return np.maximum(np.maximum(row, least), share * size)

    def _in_averages(
        self, exact: Array, expected: Array, off: Array, changes: Array
    ) -> tuple[str, float]:
        """Return the fault in the averages as text, and the smallest error that they show."""
        number = int(((exact != 0) | (off != 0)).sum())
        if not number:
            return "", 0.0
        off, sizes = off / expected, exact / expected
        changes = changes / expected
        together = float(np.sqrt((off**2).sum() / number))
        wrong = ""
        if together > 1 + 3 / np.sqrt(number):
            wrong = f"the elements together are off by {together:.2g} times what rounding does"
        rows = max(1, exact.size // exact.shape[-1]) if exact.ndim else 1
        power = float((sizes**2).sum()) or 1.0
        slope, *slopes = (float((x * sizes).sum()) / power for x in (off, *changes))
        most = 2 / np.sqrt(power) + self.unit / np.sqrt(rows)
        most = float(_MARGIN * (max(map(abs, slopes)) + most))
        if abs(slope) > most:
            wrong = wrong or f"all in all it is {1 + slope:.5g} ± {most:.2g} times the reference"
        if exact.ndim and rows > 1 and not wrong:
            wrong = _in_means("columns", 0, off, changes) or _in_means("rows", 1, off, changes)
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
        return Tolerance(ROUNDING_UNIT[compute], 8.0, smallest, in_averages=True)
    if coarse_products:  # correct models reached 0.43 of this, with JAX on an H200
        return Tolerance(ROUNDING_UNIT["float16"], 16.0, smallest)
    return Tolerance(ROUNDING_UNIT[compute], 64.0, smallest)


def _excused_count(jumps: Array) -> int:
    """Return the number of elements that may jump unseen: two, which may swap, or 1 in 100."""
    return max(min(2, jumps.size // 8), int(_JUMPING * jumps.size)) if jumps.any() else 0


def _in_means(name: str, axis: int, off: Array, changes: Array) -> str:
    """Return the fault in the averages of rows or columns as text; empty if there is none."""
    table = [x.reshape(-1, x.shape[-1]) for x in (off, *changes)]
    mean, *others = (float(np.sqrt((x.mean(axis) ** 2).mean())) for x in table)
    most = _MARGIN * (max(others) + 0.5 / np.sqrt(table[0].shape[axis]))
    wrong = f"its {name} are off on average, {mean / most:.2g} times as far as allowed"
    return wrong if mean > most else ""


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
