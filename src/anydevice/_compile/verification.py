"""Verifying a compiled model on its device: its weights, its parts, its output, its properties.

Each part is compared with a reference that runs in float64; `tolerance.py` says how far it may be
off. The compiled model is called several times with the example, and once with other inputs made
from it: smaller and larger numbers, and one more row, where it takes that. The result says for
which shapes and which range of inputs it was found.
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
from anydevice._compile.inputs import (
    CallSignature,
    other_numbers,
    other_rows,
    range_of,
    shapes_text,
    split_inputs,
)
from anydevice._compile.properties import Property, check_properties
from anydevice._compile.report import Checked
from anydevice._compile.tolerance import STRONGLY, Tolerance, matched_rows, tolerance_of
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
"""Runs that are changed by rounding: at first, if something seems wrong, if few elements do."""
_LITTLE = 0.1
_CALLS = 12
"""Calls of the compiled model with the example."""
_COMPILES_AGAIN = 5.0
"""Seconds of the first call up to which compiled code is made for another number of rows too."""
_LARGEST_FLOAT16 = 65504.0
_NUMBERS = (bool, int, float, complex, np.number, np.bool_)
_CONSTANTS = (str, bytes, type(None), Enum)
_SHAPE = attrgetter("shape")


class Original(Record):
    """A model before it was moved, and a hash of each weight as it should be on the device."""

    adapter: ModelAdapter
    digests: Mapping[str, str]

    @classmethod
    def of(cls, adapter: ModelAdapter, policy: Policy) -> Original:
        wanted = DTYPES[policy.parameters].numpy()
        digests, fixed = {}, adapter.kept_weights()
        for path, x in adapter.weights().items():
            host = host_array(x)
            if host.dtype.kind in "fV" and path not in fixed:
                with np.errstate(all="ignore"):  # weights that become infinite are found later
                    host = host.astype(wanted)
            digests[path] = digest_of(host)
        return cls(adapter, digests)


class Candidate(Record):
    """A compiled model to be verified.

    `run` calls it, `compiler` compiles a function the way it was compiled; `None` if it runs as
    written. `tolerance` is how far it may be off.
    """

    adapter: ModelAdapter
    device: Device
    policy: Policy
    run: Callable[..., Any]
    compiler: Callable[..., Callable[..., Any]] | None
    tolerance: Tolerance


class Part:
    """The output of one part of a model: its name, and its leaves by their paths.

    `arrays` are float64 or int64; those of complex numbers have their real and imaginary parts one
    after the other. `constants` are texts and the like. `numbers` are the paths of Python's
    numbers, which are among the arrays.
    """

    def __init__(self, name: str, value: Any, read: Callable[[object], Array | None]) -> None:
        """Read an output into host memory, without arrays that are only traced."""
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
        """Read the leaves of an output; `around` are the identities of the containers."""
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
        """Return a part with the rows of each array in the order of their nearest ones."""
        ordered = copy(self)
        ordered.arrays = {
            path: matched_rows(x, other.arrays[path]) for path, x in self.arrays.items()
        }
        return ordered

    def is_same(self, other: Part) -> bool:
        """Whether all of it is equal; NaN equals NaN."""
        if not self.is_like(other) or self.constants != other.constants:
            return False
        for path, x in self.arrays.items():
            if not np.array_equal(x, other.arrays[path], equal_nan=True):
                return False
        return True


class Reference:
    """The right outputs of all parts, at the end the output: exact, and changed by rounding.

    `rewritten` names what the model changes in itself when it is called. `change` runs it changed
    by rounding, in another way for each number.
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
        """Return an array of one part in `count` changed runs: by one unit, and by several.

        Runs that took another branch are left out.
        """
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

    Raises `VerificationError` for the first thing that is wrong, and `ConfigurationError` where
    there is nothing to compare: an example without elements, a model that changes itself.
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
            except Exception:  # the device may have no memory for it, or the code one fixed shape
                continue  # the result is not for this shape then, and says so
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
    """Return the first of these inputs that the model takes, and its reference; `None` if none."""
    most = _LARGEST_FLOAT16 / 16 if compute == "float16" else np.inf
    for arrays in inputs:
        try:
            reference = run(arrays, repeats=False)
        except Exception:  # whatever a model raises for inputs that it does not take
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
    """Compare all parts, and the output of several calls.

    Returns the output, and the seconds of the first call.
    """
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
    """Get the error with the first part that is wrong in compiled code, where it can be found."""
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
    """Hash a NumPy array: its dtype, its shape and its bytes.

    NaN has many bit patterns, and libraries rewrite them: here all are one.
    """
    if x.dtype.kind in "fV" and (nan := np.isnan(x)).any():
        x = np.where(nan, x.dtype.type("nan"), x)
    digest = hashlib.blake2b(f"{x.dtype.name} {x.shape}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(x).view(np.uint8).reshape(-1).data)
    return digest.hexdigest()


def _check_weights(
    weights: Mapping[str, DeviceArray], moved: Mapping[str, str], rewritten: Collection[str]
) -> None:
    """Raise `VerificationError` if a weight that is read back is not the one that was moved.

    Those that the model has rewritten itself are left out.
    """
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
    """Return the outputs of all parts on the device, at the end the output."""
    parts: list[Part] = []

    def after(name: str, value: Any) -> Any:
        parts.append(Part(name, value, adapter.read))
        return value

    with adapter.scope():
        output = adapter.traced(after, *inputs[0], **inputs[1])
    return [*parts, Part("the output", output, adapter.read)]


class _ReferenceRunner:
    """Runs the reference on inputs in host memory, exactly and changed by rounding.

    In float64; where the model's library cannot do that, in float32. Raises `ConfigurationError`
    for a model whose output is random, or changes from call to call.
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
    """A copy of the model on the CPU.

    With a `seed`, its weights, its inputs and the output of each part are changed by rounding.
    """

    def __init__(self, runner: _ReferenceRunner, dtype: str, seed: int | None = None) -> None:
        self._signature, self._dtype = runner.signature, dtype
        self._tolerance = None if seed is None else runner.tolerance
        self._draw = np.random.default_rng(seed or 0)
        self._units = STRONGLY if seed is not None and seed >= _CHANGED_RUNS[0] else 1.0
        self._parts: list[Part] = []
        self.adapter = runner.adapter.reference(self._prepare, runner.engine)

    def run(self, inputs: Sequence[Array]) -> tuple[Part, ...]:
        """Return the outputs of all parts, at the end the output."""
        self._parts = []
        place = self.adapter.reference_input
        with self.adapter.scope(), np.errstate(all="ignore"):
            given, named = self._signature.filled(list(map(place, map(self._prepare, inputs))))
            output = self.adapter.traced(self._record, *given, **named)
            return (*self._parts, Part("the output", output, self.adapter.read))

    def _record(self, name: str, value: Any) -> Any:
        """Keep the output of a part; return what the next part gets."""
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
        # V: the 16-bit and smaller dtypes that NumPy does not know.
        kind = x.dtype.kind
        if kind not in "cfV":
            return x
        x = np.asarray(x, np.complex128 if kind == "c" else self._dtype)
        if self._tolerance is None:
            return x
        return self._tolerance.changed(x, self._draw, self._units)


def _rewritten_names(before: State, after: State) -> tuple[str, ...]:
    """Return the names whose value is another object, or was written to."""
    names = []
    for name, (value, version) in after.items():
        old, old_version = before.get(name, (None, 0))
        if old is not value or old_version != version:
            names.append(name)
    return tuple(names)


def _check_repeats(first: Sequence[Part], second: Sequence[Part], rewritten: Sequence[str]) -> None:
    """Raise `ConfigurationError` if two runs of one model differ."""
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
    """Raise `VerificationError`, with the name of the first part that is wrong."""
    chose_otherwise = False
    first: VerificationError | None = None
    for place, (here, exact) in enumerate(zip(got[:-1], reference.exact[:-1], strict=False)):
        if here.name != exact.name or here.arrays.keys() != exact.arrays.keys():
            break  # which parts run depends on the numbers; the output is compared all the same
        try:
            _check_part(here, place, reference, tolerance, so_far)
        except VerificationError as error:
            if chose_otherwise:
                break  # after another choice, as of experts, rows may be in another order
            try:  # as where tokens are sorted by their expert: the output says whether it is right
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
                f"{name}: the shape is {here.shape}, and that of the reference {right.shape}",
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
                allowed = tolerance_of("float32")  # a number of the program, not of computing
            deviation = allowed.compared(here, right, others, strongly)
            is_right = deviation.is_right
            if is_right or (count > _CHANGED_RUNS[0] and deviation.wrong > _LITTLE * here.size):
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
    """Raise `VerificationError` if something else is in an output than in the reference."""
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
    """Raise `VerificationError` if NaN and infinities are not those of the reference.

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
        error = VerificationError(
            f"{name}: gives {values}, {number} of {here.size} elements; {cause}",
            where=part,
            shapes=(here.shape,),
            largest_error=float("inf"),
        )
        raise error
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
