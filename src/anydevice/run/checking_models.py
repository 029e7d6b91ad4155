"""Is what a model gives on a device right? Checked part by part against a float64 reference.

How far a result may be off is found from the model itself: see `tolerances`. Beyond that, nothing
may be infinite or no number, and the reference must give the same each time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from anydevice.core.record import Record
from anydevice.errors import ConfigurationError, VerificationError
from anydevice.run.reports import Checked
from anydevice.run.subjects import Array, Subject
from anydevice.run.tolerances import Tolerance, are_one
from anydevice.transfer.moving import is_array, to_numpy
from anydevice.transfer.tree import flatten

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
