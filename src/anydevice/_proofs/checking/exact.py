"""Bounds that hold with equality: intervals of outputs in rational numbers.

Bounds in float64 are moved outward, so they never reach exactly 0, as the output of a ReLU does. A
claim whose rows are all strict needs only a bound of 0. These intervals show it for outputs that
are sums of few terms, which every execution computes exactly.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from anydevice._proofs.checking.bounds import NORMAL, Bounds, SoundNetwork
from anydevice._proofs.checking.network import Floats, Query

_DEEPEST, _TERMS, _HUGE = 6, 2, Fraction(10) ** 400
Interval = tuple[Fraction, Fraction]


def reaches(net: SoundNetwork, bounds: Bounds, box: int, query: Query, weights: Floats) -> bool:
    """Whether the sum of the rows times the weights is at least 0, by intervals of the outputs."""
    total = Fraction(0)
    for weight, row, constant in zip(weights, query.coefficients, query.constants, strict=True):
        total += int(weight) * constant
        for j, coefficient in enumerate(row):
            if coefficient and weight:
                low, high = _interval(net, bounds, box, len(net.nodes), j, _DEEPEST)
                total += int(weight) * coefficient * (low if coefficient > 0 else high)
    return total >= 0


def _interval(net: SoundNetwork, bounds: Bounds, box: int, k: int, j: int, depth: int) -> Interval:
    """Return the interval of element j of node k, which float32 may flush to zero."""
    low, high = _exact_interval(net, bounds, box, k, j, depth)
    if net.float32:
        low = Fraction(0) if 0 < low < NORMAL else low
        high = Fraction(0) if -NORMAL < high < 0 else high
    return low, high


def _exact_interval(
    net: SoundNetwork, bounds: Bounds, box: int, k: int, j: int, depth: int
) -> Interval:
    """Return the interval before a flush, from float64 if a node is no sum of few terms."""
    if k == 0:
        center, radius = (Fraction(float(part[box, j])) for part in (bounds.center, bounds.radius))
        return center - radius, center + radius
    node = net.nodes[k - 1]
    known = [float(side[k][box, j]) for side in (bounds.low, bounds.high)]
    if not np.isfinite(known).all():
        return -_HUGE, _HUGE
    low, high = Fraction(known[0]), Fraction(known[1])
    if depth and not node.inexact and not (node.roundings and net.float32):
        sum_low = sum_high = Fraction(float(node.bias[j]))
        terms = [
            (i, int(m), float(row[m]))
            for i, w in zip(node.inputs, node.weights, strict=True)
            for row in [w[j] if w.ndim > 1 else np.where(np.arange(len(w)) == j, w, 0.0)]
            for m in np.flatnonzero(row)
        ]
        if len(terms) <= _TERMS:
            for i, m, weight in terms:
                ends = [
                    Fraction(weight) * end for end in _interval(net, bounds, box, i, m, depth - 1)
                ]
                sum_low, sum_high = sum_low + min(ends), sum_high + max(ends)
            low, high = max(low, sum_low), min(high, sum_high)
    if node.function == "relu":
        return max(low, Fraction(0)), max(high, Fraction(0))
    if node.function:
        size = float(bounds.size[k][box, j])
        return (-Fraction(size), Fraction(size)) if np.isfinite(size) else (-_HUGE, _HUGE)
    return low, high
