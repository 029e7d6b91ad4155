"""Is what a model gives on a device right? Checked part by part against a float64 reference.

How far a result may be off is found from the model itself. The reference runs a second time with
weights, inputs and the result of every part changed by one rounding unit of the type that is
computed in, each element up or down at random. What that changes in a result is what rounding can
do to it there; so many times as much is allowed:

    allowed = factor × max(largest change in the second run, unit × largest number)

The factor is 64 for float32, whose sums round at every step, and 4 for 16-bit types, whose sums do
not. Beyond that, nothing may be infinite or no number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from anydevice.check.comparing import ROUNDING_UNIT
from anydevice.core.record import Record
from anydevice.errors import VerificationError
from anydevice.run.reports import Checked
from anydevice.run.subjects import Array, Subject
from anydevice.transfer.moving import is_array, to_numpy
from anydevice.transfer.tree import flatten

Property = Callable[[Any], Any]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_SMALLEST = 1e-37
_REFERENCES = ("float64", "float32")


class Tolerance(Record):
    """How coarse computing is: the rounding unit, and how many times its effect is allowed."""

    unit: float
    factor: float

    def allowed(self, exact: Array, changed: Array) -> float:
        """The largest error of a result that is right."""
        with np.errstate(all="ignore"):
            effect = _largest(changed - exact)
            return self.factor * max(effect, self.unit * _largest(exact)) + _SMALLEST


class Part(Record):
    """What one part of a model gave: its name, and its arrays as float64."""

    name: str
    arrays: tuple[Array, ...]


class Reference(Record):
    """What is right: the parts and the output, each exactly and as rounding may change it."""

    exact: tuple[Part, ...]
    changed: tuple[Part, ...]
    text: str


def tolerance_of(compute: str, *, coarse_products: bool = False) -> Tolerance:
    """The tolerance of computing in a type; `coarse_products` where products are of TF32."""
    if compute in ("float16", "bfloat16"):
        return Tolerance(ROUNDING_UNIT[compute], 4.0)
    return Tolerance(ROUNDING_UNIT["float16" if coarse_products else compute], 64.0)


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

    In float64; where the model's library cannot do that, in float32.
    """
    refused: Exception | None = None
    for dtype in _REFERENCES:
        try:
            exact = _traced(subject, engine, inputs, dtype, None)
            changed = _traced(subject, engine, inputs, dtype, tolerance.unit)
        except Exception as error:  # each library refuses float64 with errors of its own
            refused = refused or error
            continue
        text = f"{dtype} on the CPU"
        if refused is not None:
            first_line = (str(refused) or type(refused).__name__).splitlines()[0]
            text += f" (not float64: {first_line})"
        return Reference(exact, changed, text)
    assert refused is not None
    raise refused


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
    rows = zip(_by_name(got), _by_name(reference.exact), _by_name(reference.changed), strict=False)
    for (key, here), (known, exact), (_, changed) in rows:
        if key != known or len(here.arrays) != len(exact.arrays):
            break  # what is run depends on the numbers; the output is compared all the same
        largest = max(largest, _check_part(here, exact, changed, tolerance))
    return max(largest, _check_part(got[-1], reference.exact[-1], reference.changed[-1], tolerance))


def check_output(output: Any, reference: Reference, tolerance: Tolerance) -> float:
    """The same for the output of compiled code, whose parts one by one are right."""
    part = part_of("the output", output)
    return _check_part(part, reference.exact[-1], reference.changed[-1], tolerance)


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
    subject: Subject, engine: str, inputs: Inputs, dtype: str, unit: float | None
) -> tuple[Part, ...]:
    draw = np.random.default_rng(0)

    def changed(x: Array) -> Array:
        """Every element up or down by one unit of itself."""
        if x.dtype.kind not in "fV":  # V: the 16-bit and smaller types that NumPy does not know
            return x
        wide = np.asarray(x, dtype)
        return wide if unit is None else wide * (1 + unit * _signs(draw, wide.shape, dtype))

    def shaken(x: Array) -> Array:
        """Every element up or down by one unit of the largest."""
        if unit is None or x.dtype.kind != "f":
            return x
        return x + unit * _largest(x) * _signs(draw, x.shape, x.dtype)

    def placed(tree: Any, change: Callable[[Array], Array]) -> Any:
        arrays, rebuild = flatten(tree, is_array)
        return rebuild([reference.reference_input(change(to_numpy(x))) for x in arrays.values])

    parts: list[Part] = []

    def after(name: str, value: Any) -> Any:
        value = value if unit is None else placed(value, shaken)
        parts.append(part_of(name, value))
        return value

    reference = subject.reference(changed, engine)
    with reference.scope(), np.errstate(all="ignore"):
        given, named = placed(inputs, changed)
        output = reference.traced(after, *given, **named)
        parts.append(part_of("the output", output))
    return tuple(parts)


def _check_part(got: Part, exact: Part, changed: Part, tolerance: Tolerance) -> float:
    largest = 0.0
    for here, right, other in zip(got.arrays, exact.arrays, changed.arrays, strict=True):
        if here.shape != right.shape:
            raise VerificationError(
                f"{got.name}: the shape is {here.shape}, and that of the reference {right.shape}",
                where=got.name,
                shapes=(here.shape, right.shape),
            )
        _check_finite(got.name, here, right)
        if not here.size:
            continue
        allowed = tolerance.allowed(right, other)
        error = np.abs(here - right)
        at = np.unravel_index(int(np.argmax(error)), error.shape)
        largest = max(largest, float(error[at]) / allowed)
        if error[at] > allowed:
            place = f"[{', '.join(str(int(i)) for i in at)}]"
            raise VerificationError(
                f"{got.name}: {here[at]:.9g} instead of {right[at]:.9g} at {place}, off by "
                f"{error[at]:.3g} where {allowed:.3g} is allowed; "
                f"{int((error > allowed).sum())} of {error.size} elements are wrong",
                where=got.name,
                shapes=(here.shape,),
                largest_error=float(error[at]),
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
    """What a part gave, as float64 in the host's memory; arrays that only stand for some not."""
    arrays, _ = flatten(value, is_array)
    return Part(name, tuple(np.asarray(to_numpy(x), np.float64) for x in arrays.values))


def _by_name(parts: Sequence[Part]) -> list[tuple[str, Part]]:
    return [(part.name, part) for part in parts[:-1]]


def _largest(x: Array) -> float:
    return float(np.max(np.abs(x), initial=0.0, where=np.isfinite(x)))


def _signs(draw: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    return draw.integers(0, 2, shape).astype(dtype) * 2 - 1
