"""A compiled model checked on its device: its weights, its parts, its output, its properties.

Is what a model gives on a device right? Checked part by part against a float64 reference.

How far a result may be off is found from the model itself: see `tolerances`. Beyond that, nothing
may be infinite or no number, and the reference must give the same each time.

How far a result may be off, found from the model itself.

The reference runs again with weights, inputs and the result of every part changed by one rounding
unit of the type that is computed in, each element up or down at random. What that changes in an
element is what rounding can do to it; so many times as much is allowed there:

    allowed = factor × the largest of
        what the runs changed in this element,
        what they changed in the larger elements of its row (the last axis), but for the largest,
        its size × the share by which they changed a usual element of the part,
        one unit of a usual element of the part

The last three are there because a change can be small by chance. None of them follows a few numbers
that are far larger than the rest, be they a row or a column: "larger" leaves out a tenth, "usual"
is the median. The factor is 64 for float32, whose sums round at every step, and 8 for 16-bit types,
whose sums do not.

Where a function jumps, a rounding may send an element to the other side. So where the runs made
elements jump, four times as many may be further off than allowed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from anydevice.check.comparing import ROUNDING_UNIT
from anydevice.compiling.inputs import taken_apart
from anydevice.compiling.report import Checked
from anydevice.core.dtypes import DTYPES
from anydevice.core.record import Record
from anydevice.errors import ConfigurationError, VerificationError
from anydevice.models.base import Array, Subject, in_words
from anydevice.models.precision import Policy, cast
from anydevice.transfer.moving import is_array, to_device, to_numpy
from anydevice.transfer.trees.tree import flatten

if TYPE_CHECKING:
    from anydevice.compiling._compile import Compiled


class Evidence(Record):
    """A model before it was moved, and a hash of each weight as it should be on the device."""

    source: Subject
    digests: Mapping[str, str]

    @classmethod
    def of(cls, source: Subject, policy: Policy) -> Evidence:
        wanted = DTYPES[policy.parameters].numpy()
        digests = {}
        for path, x in source.weights().items():
            host = to_numpy(x)
            if host.dtype.kind in "fV":
                with np.errstate(all="ignore"):  # what becomes infinite is found by its effects
                    host = host.astype(wanted)
            digests[path] = digest_of(host)
        return cls(source, digests)


def refuse_no_functions(properties: Any) -> None:
    """Raise `ConfigurationError` where these are not several functions."""
    if not isinstance(properties, Collection) or not all(map(callable, properties)):
        raise ConfigurationError(
            "properties are functions of the output in a list, as in properties=[is_finite]",
            source="properties=",
        )


def verified(
    compiled: Compiled,
    evidence: Evidence,
    inputs: Inputs,
    properties: Sequence[Property],
) -> Checked:
    """What the checks found; raises `VerificationError` for the first thing that is wrong."""
    subject, policy, device = compiled._subject, compiled.policy, compiled.device
    given, named = inputs
    subject.accepts(given, named)
    form, arrays = taken_apart(given, named)
    if form.constants and not arrays:
        raise _no_example(given)
    subject.can_be_verified()
    check_weights(subject.weights(), evidence.digests)
    tolerance = tolerance_of(policy.compute, coarse_products=subject.has_coarse_products(device))
    reference = reference_of(
        evidence.source, compiled._engine.name, (to_numpy(given), to_numpy(named)), tolerance
    )
    dtype = subject.input_type(policy)
    placed = [cast(to_device(x, device, convert=True, narrow=True), dtype) for x in arrays]
    parts = trace(subject.for_tracing(device, policy), form.filled(placed))
    largest = check_parts(parts, reference, tolerance)
    output = compiled(*given, **named)
    try:
        largest = max(largest, check_output(output, reference, tolerance))
    except VerificationError as error:
        raise _in_compiled_code(compiled, placed, parts, reference, tolerance, error) from error
    held = check_properties(output, properties)
    return found(reference, len(evidence.digests), largest, held)


def _no_example(given: Sequence[Any]) -> ConfigurationError:
    return ConfigurationError(
        f"verify takes an example of what the model takes, and {in_words(given[0])} holds no "
        "array; give an array, a tuple of several inputs, or a dict of inputs by name",
        source="verify=",
    )


def _in_compiled_code(
    compiled: Compiled,
    inputs: Sequence[Any],
    written: Sequence[Part],
    reference: Reference,
    tolerance: Tolerance,
    error: VerificationError,
) -> VerificationError:
    """The error with the first part that is wrong in compiled code, where it can be found."""
    where, said = error.where, str(error)
    try:
        values = _compiled_parts(compiled, inputs)
        if values is not None:
            names = [part.name for part in written]
            got = [part_of(name, value) for name, value in zip(names, values, strict=True)]
            check_parts(got, reference, tolerance)
    except VerificationError as found_inside:
        where, said = found_inside.where, str(found_inside)
    return VerificationError(
        f"in the compiled code, {said}. Run as written, every part is right: compile with "
        'optimize="none", and tell the library\'s makers',
        where=where,
        shapes=error.shapes,
        largest_error=error.largest_error,
    )


def _compiled_parts(compiled: Compiled, inputs: Sequence[Any]) -> list[Any] | None:
    subject = compiled._subject.for_tracing(compiled.device, compiled.policy)
    ways = compiled._versions.ways
    if not ways:
        return None
    values: list[Any] | None = ways[0][1](subject.with_parts)(subject.arguments, *inputs)
    return values


Property = Callable[[Any], Any]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_REFERENCES = ("float64", "float32")
_CHANGED_RUNS = 2


class Part(Record):
    """What one part of a model gave: its name, and its arrays as float64 or int64."""

    name: str
    arrays: tuple[Array, ...]


class Reference(Record):
    """What is right: the parts and the output, exactly, and as roundings may change them."""

    exact: tuple[Part, ...]
    changed: tuple[tuple[Part, ...], ...]
    text: str


def digest_of(x: Array) -> str:
    """A hash of a NumPy array: of its type, its shape and its bytes.

    What is no number is written in many ways, and libraries rewrite it: here it is one.
    """
    if x.dtype.kind in "fV" and (wrong := np.isnan(x)).any():
        x = np.where(wrong, x.dtype.type("nan"), x)
    seen = hashlib.blake2b(f"{x.dtype.name} {x.shape}".encode(), digest_size=16)
    seen.update(np.ascontiguousarray(x).view(np.uint8).reshape(-1).data)
    return seen.hexdigest()


def check_weights(weights: Mapping[str, Array], moved: Mapping[str, str]) -> None:
    """Raise `VerificationError` where a weight that is read back is not what was moved."""
    for path, x in weights.items():
        host = to_numpy(x)
        if digest_of(host) != moved[path]:
            raise VerificationError(
                f"{path}: the weight on the device is not the one that was moved there; move the "
                "model again, and check the device with anydevice doctor",
                where=path,
                shapes=(host.shape,),
            )


def reference_of(subject: Subject, engine: str, inputs: Inputs, tolerance: Tolerance) -> Reference:
    """Run the reference, exactly and with changes as large as roundings.

    In float64; where the model's library cannot do that, in float32. Raises `ConfigurationError`
    for a model that gives another answer each time.
    """
    refused: Exception | None = None
    for dtype in _REFERENCES:
        try:
            exact = _traced(subject, engine, inputs, dtype)
        except Exception as error:  # each library refuses float64 with errors of its own
            refused = refused or error
            continue
        _check_repeats(exact, _traced(subject, engine, inputs, dtype))
        changed = tuple(
            _traced(subject, engine, inputs, dtype, tolerance, run) for run in range(_CHANGED_RUNS)
        )
        text = f"{dtype} on the CPU"
        if refused is not None:
            first_line = (str(refused) or type(refused).__name__).splitlines()[0]
            text += f" (not float64: {first_line})"
        return Reference(exact, changed, text)
    assert refused is not None
    raise refused


def _check_repeats(first: Sequence[Part], second: Sequence[Part]) -> None:
    """Raise `ConfigurationError` where two runs of one model differ: chance is in it."""
    for one, other in zip(first, second, strict=False):
        same = one.name == other.name and _shapes(one) == _shapes(other)
        if not (same and all(map(are_one, one.arrays, other.arrays))):
            raise ConfigurationError(
                f"{one.name} gives another answer each time, so there is nothing to compare with; "
                "call model.eval() before compile, or give the model its random numbers as an "
                "input",
                source="verify=",
            )


def _shapes(part: Part) -> list[tuple[int, ...]]:
    return [x.shape for x in part.arrays]


def trace(subject: Subject, inputs: Inputs) -> list[Part]:
    """What every part gives where the subject is, and in the end the output."""
    parts: list[Part] = []

    def after(name: str, value: Any) -> Any:
        parts.append(part_of(name, value))
        return value

    with subject.scope():
        output = subject.traced(after, *inputs[0], **inputs[1])
    parts.append(part_of("the output", output))
    return parts


def check_parts(got: Sequence[Part], reference: Reference, tolerance: Tolerance) -> float:
    """The largest error as a share of what is allowed.

    Raises `VerificationError`, with the name of the first part that is wrong.
    """
    largest = 0.0
    for place, (here, exact) in enumerate(zip(got[:-1], reference.exact[:-1], strict=False)):
        if here.name != exact.name or len(here.arrays) != len(exact.arrays):
            break  # what is run depends on the numbers; the output is compared all the same
        changed = [run[place] for run in reference.changed if _is_there(run[:-1], place, exact)]
        largest = max(largest, _check_part(here, exact, changed, tolerance))
    return max(largest, _check_last(got[-1], reference, tolerance))


def _is_there(run: Sequence[Part], place: int, exact: Part) -> bool:
    """Whether a run under changes came by the same way."""
    return place < len(run) and _is_like(run[place], exact)


def _is_like(part: Part, exact: Part) -> bool:
    return part.name == exact.name and _shapes(part) == _shapes(exact)


def check_output(output: Any, reference: Reference, tolerance: Tolerance) -> float:
    """The same for the output of compiled code, whose parts one by one are right."""
    return _check_last(part_of("the output", output), reference, tolerance)


def _check_last(part: Part, reference: Reference, tolerance: Tolerance) -> float:
    exact = reference.exact[-1]
    changed = [run[-1] for run in reference.changed if _is_like(run[-1], exact)]
    return _check_part(part, exact, changed, tolerance)


def check_properties(output: Any, properties: Sequence[Property]) -> tuple[str, ...]:
    """The names of the properties; raises `VerificationError` for the first that does not hold.

    They are given the output as NumPy.
    """
    host = to_numpy(output)
    names = []
    for holds in properties:
        name = getattr(holds, "__name__", repr(holds))
        try:
            answer = bool(np.all(holds(host)))
        except Exception as error:
            raise VerificationError(
                f"the property {name} could not be checked: {type(error).__name__}: {error}; it "
                "is called with the output as NumPy, and answers true or false",
                where=name,
            ) from error
        if not answer:
            raise VerificationError(
                f"the property {name} does not hold for what the model gives", where=name
            )
        names.append(name)
    return tuple(names)


def found(reference: Reference, weights: int, largest: float, held: tuple[str, ...]) -> Checked:
    """The record of a verification that found nothing wrong."""
    parts = sum(1 for part in reference.exact[:-1] if part.arrays)
    return Checked(reference.text, parts, weights, largest, held)


def _traced(
    subject: Subject,
    engine: str,
    inputs: Inputs,
    dtype: str,
    tolerance: Tolerance | None = None,
    seed: int = 0,
) -> tuple[Part, ...]:
    """What the reference gives, part by part; with a tolerance, all changed by roundings."""
    draw = np.random.default_rng(seed)

    def widened(x: Array) -> Array:
        if x.dtype.kind not in "fV":  # V: the 16-bit and smaller types that NumPy does not know
            return x
        return shaken(np.asarray(x, dtype))

    def shaken(x: Array) -> Array:
        return x if tolerance is None or x.dtype.kind != "f" else tolerance.changed(x, draw)

    def placed(tree: Any, change: Callable[[Array], Array]) -> Any:
        arrays, rebuild = flatten(tree, is_array)
        return rebuild([reference.reference_input(change(to_numpy(x))) for x in arrays.values])

    parts: list[Part] = []

    def after(name: str, value: Any) -> Any:
        value = value if tolerance is None else placed(value, shaken)
        parts.append(part_of(name, value))
        return value

    reference = subject.reference(widened, engine)
    with reference.scope(), np.errstate(all="ignore"):
        given, named = placed(inputs, widened)
        output = reference.traced(after, *given, **named)
        parts.append(part_of("the output", output))
    return tuple(parts)


def _check_part(got: Part, exact: Part, changed: Sequence[Part], tolerance: Tolerance) -> float:
    largest = 0.0
    for place, (here, right) in enumerate(zip(got.arrays, exact.arrays, strict=True)):
        if here.shape != right.shape:
            raise VerificationError(
                f"{got.name}: the shape is {here.shape}, and that of the reference {right.shape}",
                where=got.name,
                shapes=(here.shape, right.shape),
            )
        _check_finite(got.name, here, right)
        if not here.size:
            continue
        others = [run.arrays[place] for run in changed] or [right]
        compared = tolerance.compared(here, right, others)
        largest = max(largest, compared.largest)
        if not compared.is_right:
            at = compared.worst
            raise VerificationError(
                f"{got.name}: {here[at]:.9g} instead of {right[at]:.9g} at {list(at)}, off by "
                f"{compared.error[at]:.3g} where {compared.allowed[at]:.3g} is allowed; "
                f"{compared.wrong} of {here.size} elements are wrong",
                where=got.name,
                shapes=(here.shape,),
                largest_error=float(compared.error.max()),
            )
    return largest


def _check_finite(name: str, here: Array, right: Array) -> None:
    wrong = ~np.isfinite(here)
    if not wrong.any():
        return
    what = "nan" if np.isnan(here).any() else "infinite numbers"
    cause = (
        "so does the reference: it is the model or the example, not the device"
        if not np.isfinite(right).all()
        else "the reference does not"
    )
    raise VerificationError(
        f"{name}: gives {what}, {int(wrong.sum())} of {here.size} elements; {cause}",
        where=name,
        shapes=(here.shape,),
        largest_error=float("inf"),
    )


def part_of(name: str, value: Any) -> Part:
    """What a part gave, in the host's memory; arrays that only stand for some not."""
    arrays, _ = flatten(value, is_array)
    return Part(name, tuple(_as_wide(to_numpy(x)) for x in arrays.values))


def _as_wide(x: Array) -> Array:
    return np.asarray(x, np.int64 if x.dtype.kind in "biu" else np.float64)


_SMALLEST = {"float16": 2.0**-24}
"""What numbers near 0 are rounded to; in all other types it is too small to matter."""
_NEXT_TO_NOTHING = 1e-37
_SHORT_ROW = 16
"""Rows with fewer elements say little by themselves."""
_SAMPLE = 1024
"""How many elements of a row are looked at for what is usual in it."""
_LARGER = 0.9
_JUMPS = 4


class Tolerance(Record):
    """How coarse computing is.

    `unit` is the rounding unit, `factor` how many times its effect is allowed, `smallest` the
    distance of the numbers next to 0.
    """

    unit: float
    factor: float
    smallest: float = _NEXT_TO_NOTHING

    def changed(self, x: Array, draw: np.random.Generator) -> Array:
        """Every element up or down by one rounding; what is 0 stays 0."""
        signs = draw.integers(0, 2, x.shape).astype(x.dtype) * 2 - 1
        moved = x * (1 + self.unit * signs) + self.smallest * signs * (x != 0)
        return np.asarray(moved)  # of an array without axes, NumPy makes a number on the way

    def compared(self, here: Array, exact: Array, changed: Sequence[Array]) -> Comparison:
        """A result beside that of the reference, and of the reference under changes."""
        with np.errstate(all="ignore"):
            if here.dtype.kind == exact.dtype.kind == "i":
                return _whole_numbers(here, exact, changed)
            effects = [_finite(np.abs(each - exact)) for each in changed]
            usual = self._usual(_finite(np.abs(exact)), _largest_of(effects))
            jumps = max(int((each > self.factor * usual).sum()) for each in effects)
            allowed = self.factor * np.maximum(_largest_of(effects), usual)
            return Comparison(np.abs(here - exact), allowed, _JUMPS * jumps)

    def _usual(self, size: Array, effect: Array) -> Array:
        """What changes do to elements like these: by their row, by their size, and at least."""
        some = size > 0
        share = max(self.unit, _median(effect / size, some))
        least = max(self.unit * _median(size, some), self.smallest)
        if effect.ndim and effect.shape[-1] >= _SHORT_ROW:
            row = _among(effect, some | (effect > 0), _LARGER)
        else:
            row = _median(effect, some | (effect > 0))
        return np.maximum(np.maximum(row, least), share * size)


class Comparison(Record):
    """How far the elements of a result are off, and how far they may be.

    `excused` is how many may be further off, because the reference jumps as well.
    """

    error: Array
    allowed: Array
    excused: int

    @property
    def wrong(self) -> int:
        """How many elements are further off than they may be."""
        return int((self.error > self.allowed).sum())

    @property
    def is_right(self) -> bool:
        return self.wrong <= self.excused

    @property
    def worst(self) -> tuple[int, ...]:
        """Where the error is largest, measured by what is allowed there."""
        place = np.unravel_index(int(np.argmax(self._share())), self.error.shape)
        return tuple(int(i) for i in place)

    @property
    def largest(self) -> float:
        """The largest error as a share of what is allowed, of the elements that are right."""
        share = self._share()
        return float(np.max(share, initial=0.0, where=share <= 1))

    def _share(self) -> Array:
        with np.errstate(all="ignore"):
            return np.where(self.error == 0, 0.0, self.error / self.allowed)


def tolerance_of(compute: str, *, coarse_products: bool = False) -> Tolerance:
    """The tolerance of computing in a type; `coarse_products` where products are of TF32."""
    smallest = _SMALLEST.get(compute, _NEXT_TO_NOTHING)
    if compute in ("float16", "bfloat16"):
        return Tolerance(ROUNDING_UNIT[compute], 8.0, smallest)
    return Tolerance(ROUNDING_UNIT["float16" if coarse_products else compute], 64.0, smallest)


def are_one(first: Array, second: Array) -> bool:
    """Whether two exact runs gave the same, but for the order in which sums were added up."""
    with np.errstate(all="ignore"):
        size = np.max(np.abs(first), axis=-1, initial=0.0, keepdims=True) if first.ndim else first
        apart = np.abs(first - second) > 16 * ROUNDING_UNIT["float32"] * np.abs(size)
        return not (apart | (np.isnan(first) != np.isnan(second))).any()


def _whole_numbers(here: Array, exact: Array, changed: Sequence[Array]) -> Comparison:
    jumps = max(int((each != exact).sum()) for each in changed)
    return Comparison(np.abs(here - exact), np.zeros(exact.shape), _JUMPS * jumps)


def _median(x: Array, counts: Array) -> float:
    return float(_among(x.reshape(-1), counts.reshape(-1), 0.5)[0])


def _among(x: Array, counts: Array, place: float) -> Array:
    """The element of each row that has this share below it, of those that count; 0 of none."""
    step = max(1, x.shape[-1] // _SAMPLE)
    x, counts = x[..., ::step], counts[..., ::step]
    ordered = np.sort(np.where(counts, x, np.inf), axis=-1)
    last = np.maximum(counts.sum(-1, keepdims=True) - 1, 0)
    return _finite(np.take_along_axis(ordered, (last * place).astype(int), axis=-1))


def _largest_of(arrays: Sequence[Array]) -> Array:
    return np.maximum.reduce(arrays)


def _finite(x: Array) -> Array:
    return np.where(np.isfinite(x), x, 0.0)
