"""How far a result may be off, found from the model itself.

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

from collections.abc import Sequence
from typing import Any

import numpy as np

from anydevice.check.comparing import ROUNDING_UNIT
from anydevice.core.record import Record

Array = Any

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
