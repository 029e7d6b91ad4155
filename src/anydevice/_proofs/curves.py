"""TwoLines below and above an elementwise function between two bounds of its argument."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from anydevice._proofs.checking import smooth

Array = Any


class TwoLines(NamedTuple):
    """`lower * z + below <= f(z) <= upper * z + above` for each z between the bounds."""

    lower: Array
    below: Array
    upper: Array
    above: Array

    def take(self, xp: Any, box: Array) -> TwoLines:
        """Those of the box of each row."""
        if isinstance(self.below, float):
            below: Array = self.below
        else:
            below = xp.take(self.below, box)
        lower, upper, above = (xp.take(x, box) for x in (self.lower, self.upper, self.above))
        return TwoLines(lower, below, upper, above)


class Relaxation(NamedTuple):
    """The lines of a function, and the least and the greatest value that it takes."""

    lines: TwoLines
    least: Array
    most: Array


def relu_curve(xp: Any, low: Array, high: Array, unit: float, tiny: float) -> Relaxation:
    """The chord above, and below the line through 0 that leaves the smaller triangle.

    The chord is moved up until it is valid at both ends, whatever slope came out.
    """
    on, off = low >= 0, high <= 0
    decided = xp.logical_or(on, off)
    chord = xp.clip(high / xp.where(decided, high * 0 + 1, high - low), 0.0, 1.0)
    above = xp.maximum(-chord * low, (1.0 - chord) * high) * (1.0 + 8 * unit) + tiny
    nothing = chord * 0
    upper = xp.where(on, nothing + 1, xp.where(off, nothing, chord))
    lower = xp.where(on, nothing + 1, xp.where(high > -low, nothing + 1, nothing))
    lower = xp.where(off, nothing, lower)
    most = xp.maximum(high, nothing)
    lines = TwoLines(lower, 0.0, upper, xp.where(decided, nothing, above))
    return Relaxation(lines, xp.maximum(low, nothing), most)


def open_neurons(xp: Any, function: str, low: Array, high: Array) -> Array:
    """Which neurons better bounds would help: ReLUs neither on nor off, and all others."""
    return xp.logical_and(low < 0, high > 0) if function == "relu" else low < high


def smooth_curve(function: str, low: Any, high: Any, executed: bool) -> Relaxation:
    """Tangents and chords of a smooth function, in float64 on the host.

    They are those of the checker. Whoever checks a proof depends on them in any case.
    """
    low, high = np.asarray(low, np.float64), np.asarray(high, np.float64)
    with np.errstate(all="ignore"):
        found = smooth.lines(function, low, high, executed)
        floor = np.zeros_like(low) if found.floor is None else found.floor
        size = abs(found.below) * np.maximum(abs(low), abs(high)) + abs(floor)
        least = np.minimum(found.below * low, found.below * high) + floor - size * 1e-14
        size = abs(found.above) * np.maximum(abs(low), abs(high)) + abs(found.ceiling)
        most = np.maximum(found.above * low, found.above * high) + found.ceiling + size * 1e-14
        least, most = np.maximum(least, -found.size), np.minimum(most, found.size)
    return Relaxation(TwoLines(found.below, floor, found.above, found.ceiling), least, most)
