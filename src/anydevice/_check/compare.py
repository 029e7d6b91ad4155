"""Compares a result with the reference: one rule for every op, dtype and engine.

A result may differ from the float64 reference by the sum of

- one rounding to its own dtype: half the distance between two numbers of that dtype, there;
- the op's budget (`_check/budgets.py`) in rounding units of the dtype that is computed in, which is
  float64 for float64 and float32 for everything else;
- where the dtype is not float16, four times the smallest normal number: engines may flush what is
  below it, on the way to a result as well.

So a 16-bit sum that is added up in 16 bits is wrong, though each step is as good as the dtype
allows: its result is off by many units where one is allowed. Integers and booleans are compared
for equality, infinities and NaN by position, zeros without their sign, unless the row of the op
says that it keeps signs.

Denormal numbers: XLA on the CPU takes them for zero in arguments and results, GPUs may. Either is
right here, element by element, except in float16, where they are a tenth of all that softmax gives.
Cases with such arguments are compared with two references: as they are, and with zeros for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from anydevice._check.cases.case import LARGEST, SMALLEST_NORMAL
from anydevice._core.record import Record

Array = np.ndarray[Any, Any]

ROUNDING_UNIT = {
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float32": 2.0**-24,
    "float64": 2.0**-53,
}
"""The largest relative error of rounding a number to the dtype."""


class Difference(Record):
    """The largest error of a result, relative to the allowed one."""

    got: float
    want: float
    error: float
    allowed: float
    at: tuple[int, ...]
    wrong_elements: int
    call: str = ""

    @property
    def excess(self) -> float:
        """The error as a multiple of the allowed error."""
        return self.error / self.allowed if self.allowed else float("inf")

    def __str__(self) -> str:
        place = f"[{', '.join(map(str, self.at))}]" if self.at else "its only element"
        more = f", {self.wrong_elements} elements are wrong" if self.wrong_elements > 1 else ""
        off = f"off by {self.error:.3g} where {self.allowed:.3g} is allowed"
        where = f" in {self.call}" if self.call else ""
        return f"{self.got:.9g} instead of {self.want:.9g} at {place}, {off}{more}{where}"


def computing_unit(dtype: str) -> float:
    """Return the rounding unit of the dtype that an op on `dtype` computes in."""
    return ROUNDING_UNIT["float64" if dtype == "float64" else "float32"]


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the arrays of a result in order; a result is one, or a list or tuple of results.

    >>> list(leaves(([1, 2], None, 3)))
    [1, 2, 3]
    """
    if isinstance(tree, list | tuple):
        for part in tree:
            yield from leaves(part)
    elif tree is not None:
        yield tree


def compare(
    got: Array,
    wants: Sequence[Array],
    budget: Array | float,
    dtype: str,
    result: str,
    signs: bool = False,
) -> Difference | None:
    """Return the largest error of `got`, of dtype `result`, of an op on `dtype`; `None` if right.

    `wants` are references of the shape of `got`; each element must meet one of them. With `signs`,
    the signs of zeros must agree too.

    >>> import numpy
    >>> compare(numpy.float32(1.5), [numpy.array(1.0)], 0.0, "float32", "float32").error
    0.5
    """
    if not got.size:
        return None
    numbers = np.asarray(got).astype(np.float64)
    with np.errstate(all="ignore"):
        near = np.abs(numbers - wants[0]) <= _tolerance(np.asarray(wants[0]), budget, dtype, result)
        if near.all() and not (signs and _wrong_zero_signs(numbers, wants[0]).any()):
            return None
        excesses = [_excess(numbers, want, budget, dtype, result) for want in wants]
    if signs:
        turned = [_wrong_zero_signs(numbers, want) for want in wants]
        excesses = [
            (np.where(wrong, np.inf, excess), allowed)
            for wrong, (excess, allowed) in zip(turned, excesses, strict=True)
        ]
    nearest = np.argmin([excess for excess, _ in excesses], axis=0)
    excess = np.choose(nearest, [excess for excess, _ in excesses])
    wrong = excess > 1
    if not wrong.any():
        return None
    at = np.unravel_index(int(np.argmax(excess)), excess.shape)
    want = np.asarray(wants[int(nearest[at])], np.float64)[at]
    with np.errstate(all="ignore"):
        error = float(np.nan_to_num(np.abs(numbers[at] - want), nan=np.inf, posinf=np.inf))
    return Difference(
        got=float(numbers[at]),
        want=float(want),
        error=error,
        allowed=float(np.broadcast_to(excesses[int(nearest[at])][1], excess.shape)[at]),
        at=tuple(int(index) for index in at),
        wrong_elements=int(wrong.sum()),
    )


def _excess(
    got: Array, want: Array, budget: Array | float, dtype: str, result: str
) -> tuple[Array, Array]:
    """Return each error as a multiple of the allowed one, infinite for a misplaced NaN or inf."""
    want = np.asarray(want, np.float64)
    allowed = _tolerance(want, budget, dtype, result)
    error = np.abs(got - want)
    excess = np.where(error == 0, 0.0, error / allowed)
    limit = LARGEST.get(result, np.inf)
    # Near the largest number, an allowed error may decide between it and infinity.
    same_side = np.sign(got) == np.sign(want)
    may_overflow = np.abs(want) + allowed >= limit
    excess = np.where(np.isinf(got) & same_side & may_overflow, 0.0, excess)
    beyond = np.isfinite(want) & (np.abs(want) > limit) & np.isfinite(got) & same_side
    excess = np.where(beyond & (np.abs(want) - allowed <= np.abs(got)), 0.0, excess)
    excess = np.where(got == want, 0.0, excess)
    excess = np.where(np.isnan(got) & np.isnan(want), 0.0, excess)
    return np.where(np.isnan(excess), np.inf, excess), allowed


def _wrong_zero_signs(got: Array, want: Array) -> Array:
    """Return a mask of zeros with the wrong sign."""
    return (got == 0) & (want == 0) & (np.signbit(got) != np.signbit(want))


def _tolerance(want: Array, budget: Array | float, dtype: str, result: str) -> Array:
    unit = ROUNDING_UNIT.get(result)
    if unit is None:
        return np.zeros(want.shape)
    smallest = SMALLEST_NORMAL[result]
    flushed = 0.0 if result == "float16" else 4 * smallest
    size = np.where(np.isfinite(want), np.maximum(np.abs(want), smallest), 0.0)
    computed = np.broadcast_to(np.nan_to_num(budget, nan=0.0, posinf=0.0), want.shape)
    return unit * size + computing_unit(dtype) * computed + flushed
