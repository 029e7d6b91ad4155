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
from enum import Enum
from functools import partial
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
from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES
from anydevice._core.record import Record, replace
from anydevice._core.text import type_text
from anydevice._libraries.base import Array, ModelAdapter, State, host_array
from anydevice._libraries.precision import Policy, cast
from anydevice.errors import ConfigurationError, VerificationError

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_REFERENCES = ("float64", "float32")
_CHANGED_RUNS = (2, 12, 48)
"""As many runs are changed by rounding; more if something seems wrong, most if that is little."""
_LITTLE = 0.1
_CALLS = 12
"""Of the compiled model, with the example."""
_COMPILES_AGAIN = 5.0
"""Seconds of the first call up to which compiled code is made for another number of rows too."""
_LARGEST_FLOAT16 = 65504.0


class Original(Record):
    """A model before it was moved, and a hash of each weight as it should be on the device."""

    adapter: ModelAdapter
    digests: Mapping[str, str]

    @classmethod
    def of(cls, adapter: ModelAdapter, policy: Policy) -> Original:
        wanted = DTYPES[policy.parameters].numpy()
        digests, kept = {}, adapter.kept_weights()
        for path, x in adapter.weights().items():
            host = host_array(x)
            if host.dtype.kind in "fV" and path not in kept:
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


class Part(Record):
    """The output of one part of a model: its name, and by their paths what is in it.

    `arrays` are float64 or int64, those of complex numbers with their real and imaginary parts one
    after the other; `constants` are texts and the like, `numbers` the paths of Python's numbers,
    which are among the arrays.
    """

    name: str
    arrays: Mapping[str, Array]
    constants: Mapping[str, Any]
    numbers: frozenset[str]

    @classmethod
    def of(cls, name: str, value: Any) -> Part:
        """The output in host memory, without arrays that are only traced."""
        found = dict(_leaves_in(value))
        arrays = {
            path: _widened(host_array(x) if is_array(x) else np.asarray(x))
            for path, x in found.items()
            if is_array(x) or isinstance(x, _NUMBERS)
        }
        constants = {path: x for path, x in found.items() if path not in arrays}
        return cls(name, arrays, constants, frozenset(x for x in arrays if not is_array(found[x])))

    def is_like(self, other: Part) -> bool:
        """Whether names and shapes are the same."""
        mine, others = (
            {path: x.shape for path, x in part.arrays.items()} for part in (self, other)
        )
        return self.name == other.name and mine == others

    def in_order_of(self, other: Part) -> Part:
        """The same, with the rows of each array in the order of those that they are nearest to."""
        pairs = {path: (x, other.arrays[path]) for path, x in self.arrays.items()}
        return replace(self, arrays={path: matched_rows(*pair) for path, pair in pairs.items()})

    def is_same(self, other: Part) -> bool:
        """Whether all of it is equal; NaN equals NaN."""
        return (
            self.is_like(other)
            and self.constants == other.constants
            and all(
                np.array_equal(x, other.arrays[path], equal_nan=True)
                for path, x in self.arrays.items()
            )
        )


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

    def changed(self, place: int, count: int) -> tuple[list[Part], list[Part]]:
        """One part under so many changes, of one unit and of several.

        Runs that took other ways are left out.
        """
        while len(self._changed) < count:
            self._changed.append(self._change(len(self._changed)))
        exact = self.exact[place]
        likes = [
            [x for run in runs for x in run[place : place + 1 or None] if x.is_like(exact)]
            for runs in (self._changed[: _CHANGED_RUNS[0]], self._changed[_CHANGED_RUNS[0] : count])
        ]
        return likes[0], likes[1]


class _SoFar:
    """What was found so far."""

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
        run = _RunReference(original.adapter, engine, signature, candidate.tolerance)
        reference = run(hosts)
        if not any(x.size for x in reference.exact[-1].arrays.values()):
            raise _nothing_compared("the output of the model holds no array with elements")
        _check_weights(adapter.weights(), original.digests, reference.rewritten)
        so_far = _SoFar()
        output, seconds = _check_calls(candidate, reference, signature, arrays, _CALLS, so_far)
        example = named or (given[0] if len(given) == 1 else given)
        held = check_properties(example, output, properties)
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
        properties=held,
        rewritten=reference.rewritten,
        calls=_CALLS,
        shapes=tuple(dict.fromkeys(so_far.shapes)),
        range=range_of(verified),
        uncertain=so_far.uncertain / max(1, so_far.compared),
        resolution=so_far.resolution,
    )


def _other_reference(
    run: _RunReference, inputs: Iterator[list[Array]], compute: str
) -> tuple[list[Array], Reference] | None:
    """The first of these inputs that the model takes, and its reference; `None` if none."""
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
    arrays: Sequence[Array],
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
    first = Part.of("the output", output)
    seconds = time.perf_counter() - began
    _check_output(candidate, first, cast_inputs, parts, reference, so_far)
    for _ in range(calls - 1):
        again = Part.of("the output", candidate.run(*given, **named))
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
    """The error with the first part that is wrong in compiled code, where it can be found."""
    where, text = error.where, str(error)
    try:
        assert candidate.compiler is not None
        traced = candidate.adapter.for_tracing(candidate.device, candidate.policy)
        values = candidate.compiler(traced.with_parts)(traced.arguments, *inputs)
        if values is not None:
            named = zip([part.name for part in written], values, strict=True)
            parts = [Part.of(*each) for each in named]
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
    """A hash of a NumPy array: of its dtype, its shape and its bytes.

    NaN has many bit patterns, and libraries rewrite them: here all are one.
    """
    if x.dtype.kind in "fV" and (nan := np.isnan(x)).any():
        x = np.where(nan, x.dtype.type("nan"), x)
    digest = hashlib.blake2b(f"{x.dtype.name} {x.shape}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(x).view(np.uint8).reshape(-1).data)
    return digest.hexdigest()


def _check_weights(
    weights: Mapping[str, Array], moved: Mapping[str, str], rewritten: Collection[str]
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


_NUMBERS = (bool, int, float, complex, np.number, np.bool_)
_CONSTANTS = (str, bytes, type(None), Enum)


def _leaves_in(value: Any, path: str = "", around: tuple[int, ...] = ()) -> Iterator[Any]:
    """The arrays, numbers and constants of any output, each with its path."""
    if is_array(value) or isinstance(value, (*_NUMBERS, *_CONSTANTS)):
        yield path, value
        return
    rule = rule_of(type(value))
    parts = None if id(value) in around else rule.take_apart(value)
    for key, part in zip(*parts[:2], strict=True) if parts is not None else ():
        step = rule.step(key) or f"[{key!r}]"
        yield from _leaves_in(part, path + step, (*around, id(value)))


def _widened(x: Array) -> Array:
    if x.dtype.kind == "c":
        return np.stack([x.real, x.imag]).astype(np.float64)
    return np.asarray(x, np.int64 if x.dtype.kind in "biu" else np.float64)


def _parts_of(adapter: ModelAdapter, inputs: Inputs) -> list[Part]:
    """The outputs of all parts on the device, at the end the output."""
    parts: list[Part] = []

    def after(name: str, value: Any) -> Any:
        parts.append(Part.of(name, value))
        return value

    with adapter.scope():
        output = adapter.traced(after, *inputs[0], **inputs[1])
    return [*parts, Part.of("the output", output)]


class _RunReference:
    """Runs the reference on inputs in host memory, exactly and changed by rounding.

    In float64; where the model's library cannot do that, in float32. Raises `ConfigurationError`
    for a model whose output is random, or changes from call to call.
    """

    def __init__(
        self, adapter: ModelAdapter, engine: str, signature: CallSignature, tolerance: Tolerance
    ) -> None:
        self._adapter, self._engine = adapter, engine
        self._signature, self._tolerance = signature, tolerance

    def __call__(self, inputs: Sequence[Array], *, repeats: bool = True) -> Reference:
        failed: Exception | None = None
        for dtype in _REFERENCES:
            try:
                runs = self._runs(inputs, dtype)
                before = runs.adapter.state()
                exact = runs()
            except Exception as error:  # each library refuses float64 with errors of its own
                failed = failed or error
                continue
            rewritten = _rewritten(before, runs.adapter.state())
            if repeats:
                _check_repeats(exact, runs(), rewritten)
            text = f"{dtype} on the CPU"
            if failed is not None:
                first_line = (str(failed) or type(failed).__name__).splitlines()[0]
                text += f" (not float64: {first_line})"
            return Reference(exact, partial(self._changed, inputs, dtype), rewritten, text)
        assert failed is not None
        raise failed

    def _changed(self, inputs: Sequence[Array], dtype: str, seed: int) -> tuple[Part, ...]:
        return self._runs(inputs, dtype, self._tolerance, seed)()

    def _runs(
        self,
        inputs: Sequence[Array],
        dtype: str,
        changed_by: Tolerance | None = None,
        seed: int = 0,
    ) -> _ReferenceRuns:
        return _ReferenceRuns(
            self._adapter, self._engine, self._signature, inputs, dtype, changed_by, seed
        )


class _ReferenceRuns:
    """A reference with its inputs; each call runs the same model once more.

    With a tolerance, everything is changed by rounding.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        engine: str,
        signature: CallSignature,
        inputs: Sequence[Array],
        dtype: str,
        tolerance: Tolerance | None,
        seed: int,
    ) -> None:
        self._signature, self._inputs = signature, inputs
        self._dtype, self._tolerance = dtype, tolerance
        self._draw = np.random.default_rng(seed)
        self._units = STRONGLY if seed >= _CHANGED_RUNS[0] else 1.0
        self.adapter = adapter.reference(self._prepared, engine)

    def __call__(self) -> tuple[Part, ...]:
        """The outputs of all parts, at the end the output."""
        parts: list[Part] = []

        def after(name: str, value: Any) -> Any:
            if self._tolerance is not None:
                arrays, rebuild = flatten(value, is_array)
                value = rebuild([self._placed(self._rounded(host_array(x))) for x in arrays.values])
            parts.append(Part.of(name, value))
            return value

        with self.adapter.scope(), np.errstate(all="ignore"):
            arrays = [self._placed(self._prepared(x)) for x in self._inputs]
            given, named = self._signature.filled(arrays)
            output = self.adapter.traced(after, *given, **named)
            return (*parts, Part.of("the output", output))

    def _placed(self, x: Array) -> Array:
        return self.adapter.reference_input(x)

    def _prepared(self, x: Array) -> Array:
        if x.dtype.kind == "c":
            return self._rounded(np.asarray(x, np.complex128))
        # V: the 16-bit and smaller dtypes that NumPy does not know.
        return self._rounded(np.asarray(x, self._dtype)) if x.dtype.kind in "fV" else x

    def _rounded(self, x: Array) -> Array:
        if self._tolerance is None or x.dtype.kind not in "fc":
            return x
        return self._tolerance.changed(x, self._draw, self._units)


def _rewritten(before: State, after: State) -> tuple[str, ...]:
    """The names whose value is another object, or was written to."""
    nothing = (None, 0)
    pairs = [(name, before.get(name, nothing), now) for name, now in after.items()]
    return tuple(name for name, old, new in pairs if old[0] is not new[0] or old[1] != new[1])


def _check_repeats(first: Sequence[Part], second: Sequence[Part], rewritten: Sequence[str]) -> None:
    """Raise `ConfigurationError` if two runs of one model differ."""
    for one, other in zip(first, second, strict=False):
        pairs = zip(one.arrays.values(), other.arrays.values(), strict=False)
        if not (one.is_like(other) and all(_agree(*each) for each in pairs)):
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
        chose_otherwise = chose_otherwise or any(
            x.dtype.kind == "i" and not np.array_equal(x, exact.arrays[path])
            for path, x in here.arrays.items()
        )
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
            changed, strongly = (
                [run.arrays[path] for run in runs] for runs in reference.changed(place, count)
            )
            others = changed or [right]
            allowed = tolerance
            if path in exact.numbers and all(np.array_equal(x, right) for x in others):
                allowed = tolerance_of("float32")  # a number of the program, not of computing
            deviation = allowed.compared(here, right, others, strongly)
            much = count > _CHANGED_RUNS[0] and deviation.wrong > _LITTLE * here.size
            if deviation.is_right or much:
                break
        if not deviation.is_right:
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
