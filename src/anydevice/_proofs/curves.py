"""Lines below and above an elementwise function between two bounds of its argument."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from anydevice._proofs.checking import smooth
from anydevice._proofs.machines import ArrayOps, DeviceArray


class TwoLines(NamedTuple):
    """`lower * z + below <= f(z) <= upper * z + above` for each z between the bounds."""

    lower: DeviceArray
    below: DeviceArray | float
    upper: DeviceArray
    above: DeviceArray

    def take(self, xp: ArrayOps, box: DeviceArray) -> TwoLines:
        """Return the lines of the box of each row."""
        below = self.below if isinstance(self.below, float) else xp.take(self.below, box)
        lower, upper, above = (xp.take(x, box) for x in (self.lower, self.upper, self.above))
        return TwoLines(lower, below, upper, above)


class Relaxation(NamedTuple):
    """The lines of a function, and the least and the greatest value that it takes."""

    lines: TwoLines
    least: DeviceArray
    most: DeviceArray


def relu_curve(
    xp: ArrayOps, low: DeviceArray, high: DeviceArray, unit: float, tiny: float
) -> Relaxation:
    """Bound a ReLU by its chord, and by the line through 0 that leaves the smaller triangle.

    This is the triangle relaxation of CROWN. The chord is moved up until it is valid at both ends.
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


def open_neurons(xp: ArrayOps, function: str, low: DeviceArray, high: DeviceArray) -> DeviceArray:
    """Whether better bounds would help each neuron: ReLUs neither on nor off, and all others."""
    return xp.logical_and(low < 0, high > 0) if function == "relu" else low < high


def smooth_curve(function: str, low: Any, high: Any, executed: bool) -> Relaxation:
    """Return tangents and chords of a smooth function, in float64 on the host.

    They are those of the checker, on which a proof depends in any case.
    """
    low, high = np.asarray(low, np.float64), np.asarray(high, np.float64)
    with np.errstate(all="ignore"):
        pair = smooth.lines(function, low, high, executed)
        floor = np.zeros_like(low) if pair.floor is None else pair.floor
        size = abs(pair.below) * np.maximum(abs(low), abs(high)) + abs(floor)
        least = np.minimum(pair.below * low, pair.below * high) + floor - size * 1e-14
        size = abs(pair.above) * np.maximum(abs(low), abs(high)) + abs(pair.ceiling)
        most = np.maximum(pair.above * low, pair.above * high) + pair.ceiling + size * 1e-14
        least, most = np.maximum(least, -pair.size), np.minimum(most, pair.size)
    return Relaxation(TwoLines(pair.below, floor, pair.above, pair.ceiling), least, most)
