"""How far a result may be from the reference, found from the model itself.

The reference runs again with weights, inputs and the output of every part changed by one rounding
unit of the dtype of computing, more or less, each element up or down at random. The change of an
element is what rounding can do to it, and a multiple of that is allowed there:

    allowed = factor × the largest of
        the change of this element,
        the changes of the larger elements of its row (the last axis), except for the largest,
        its size × the relative change of a usual element of the part,
        one rounding unit of a usual element of the part, or of its row

The last three are there because a change can be small by chance. None of them follows outliers, be
they a row, a column or half of all: "larger" leaves out a tenth and is at most eight times a small
one, "usual" is less than the median. The factor is 64 for float32, whose sums round at every step,
and 8 for 16-bit dtypes, whose sums do not.

Rounding has no direction, so its errors cancel in averages. Where the dtype has 16 bits, an error
that hides in the rounding of each element shows there: the elements together (root mean square),
the averages of columns and rows, and the slope of the result against the reference may be off by
little more than in the changed runs.

Where a function jumps, rounding may send an element to the other side. So where something seems
wrong, there are more runs, changed by four units each: an element that jumps in one of them may
jump, any other one changes by four times as much as by one unit. Of those that were not seen to
jump, where others were, two, or one in a hundred, may be further off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from anydevice._check.compare import ROUNDING_UNIT
from anydevice._core.record import Record

Array = np.ndarray[Any, Any]

_MOST_ROWS = 4096
"""The largest part whose rows are matched with those of the reference."""

_SMALLEST = {"float16": 2.0**-24}
"""The distance of the numbers next to 0; in all other dtypes it is too small to matter."""
_TINY = 1e-37
_SHORT_ROW = 16
"""Rows with fewer elements say little by themselves."""
_SAMPLE = 1024
"""Elements of a row that its usual size is found from."""
_SMALL, _LARGER, _SPREAD = 0.25, 0.9, 8.0
_JUMPING = 0.01
STRONGLY = 4.0
_MARGIN = 1.5


class Tolerance(Record):
    """The precision of computing.

    `unit` is the rounding unit, `factor` the multiple of its effect that is allowed, `smallest` the
    distance of the numbers next to 0. `in_averages` if averages are compared too.
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
        return np.asarray(moved)  # of an array without axes, NumPy makes a number on the way

    def compared(
        self, here: Array, exact: Array, changed: Sequence[Array], strongly: Sequence[Array] = ()
    ) -> Deviation:
        """Compare a result with the exact one, given the exact one under changes.

        Those of `strongly` are by `STRONGLY` units. Where the exact one is not finite, the result
        must be the same, and is not looked at here.
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
        """Return the usual effect on elements like these: by row, by size, and at least."""
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
        """Return the fault in the averages as text, and the smallest relative error seen there."""
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
    """The error of each element of a result, and the allowed one.

    `excused` is how many may be further off, because the reference jumps too; `uncertain` how many
    could be anything, because rounding changes them by half their size and more. `in_averages` says
    what is wrong with averages, if anything is. `resolution` is the smallest relative error of the
    whole that would be noticed.
    """

    error: Array
    allowed: Array
    excused: int
    uncertain: int = 0
    in_averages: str = ""
    resolution: float = 0.0

    @property
    def wrong(self) -> int:
        """How many elements are further off than allowed."""
        return int((self.error > self.allowed).sum())

    @property
    def is_right(self) -> bool:
        """Whether every element but the excused ones is right, and so are the averages."""
        return self.wrong <= self.excused and not self.in_averages

    @property
    def worst(self) -> tuple[int, ...]:
        """The index of the largest error, as a share of the allowed one."""
        place = np.unravel_index(int(np.argmax(self._share())), self.error.shape)
        return tuple(int(i) for i in place)

    @property
    def largest(self) -> float:
        """The largest error of the right elements, as a share of the allowed one."""
        share = self._share()
        return float(np.max(share, initial=0.0, where=share <= 1))

    def _share(self) -> Array:
        with np.errstate(all="ignore"):
            return np.where(self.error == 0, 0.0, self.error / self.allowed)


def tolerance_of(compute: str, *, coarse_products: bool = False) -> Tolerance:
    """Return the tolerance of computing in a dtype; `coarse_products` are those of TF32."""
    smallest = _SMALLEST.get(compute, _TINY)
    if compute in ("float16", "bfloat16"):
        return Tolerance(ROUNDING_UNIT[compute], 8.0, smallest, in_averages=True)
    if coarse_products:  # right models were seen off by up to 0.43 of this, JAX's on an H200
        return Tolerance(ROUNDING_UNIT["float16"], 16.0, smallest)
    return Tolerance(ROUNDING_UNIT[compute], 64.0, smallest)


def _excused_count(jumps: Array) -> int:
    """Return how many elements may jump that were not seen to: two, which may change places, or
    more.
    """
    return max(min(2, jumps.size // 8), int(_JUMPING * jumps.size)) if jumps.any() else 0


def _in_means(name: str, axis: int, off: Array, changes: Array) -> str:
    """Return the fault in the averages of rows or columns as text; empty if there is none."""
    table = [x.reshape(-1, x.shape[-1]) for x in (off, *changes)]
    mean, *others = (float(np.sqrt((x.mean(axis) ** 2).mean())) for x in table)
    most = _MARGIN * (max(others) + 0.5 / np.sqrt(table[0].shape[axis]))
    wrong = f"its {name} are off on average, {mean / most:.2g} times as far as allowed"
    return wrong if mean > most else ""


def _quantiles(x: Array, counts: Array, *shares: float, rows: bool = True) -> Array:
    """Return the element of each row, or of all, that has each share of those that count below it.

    The last axis is that of the shares. An element is 0 if none counts.
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
    """Order the rows of an array by those of another that they are nearest to."""
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
