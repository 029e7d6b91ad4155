"""Sound bounds of a network over boxes, for checking: CROWN in float64, moved outward.

`e` is twice γ_n of the longest sum (γ_n = n u / (1 - n u), Higham, 2002), so that the error of each
step is less than e * |coefficients| * v, where v = |W| H + |b| and H bounds the values that enter a
node. That holds for every order of summation. An execution of the network in float32 may differ
from the real one by γ_n * v at each node, which is added. A NaN bounds nothing, and stays NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from anydevice._proofs.checking import smooth
from anydevice._proofs.checking.certificate import ARITHMETICS, first_neurons
from anydevice._proofs.checking.network import Floats, Network, RefusedError, check_network

U64, U32, TINY, NORMAL = 2.0**-53, 2.0**-24, 1e-290, 2.0**-126
PAIRS, FORWARD, BATCH = 512, 64, 256
"""The rows of a batch, the largest number of inputs that have forms, the leaves of a batch."""

Forms = tuple[Floats, Floats]
"""Affine functions of coordinates in [-1, 1], one below a value and one above; constants last."""


class Bounds(NamedTuple):
    """Bounds over each box, by number of the node: intervals, lines, error of a step, and H."""

    center: Floats
    radius: Floats
    low: dict[int, Floats]
    high: dict[int, Floats]
    lines: dict[int, smooth.LinePair]
    error: dict[int, Floats]
    size: dict[int, Floats]


class SoundNetwork:
    """Bounds of a network in an arithmetic, with the errors that are assumed of functions."""

    def __init__(self, network: Network, arithmetic: str, given: Any = smooth.WIDEST) -> None:
        self.network, self.nodes = check_network(network), network.nodes
        first, self.neurons = first_neurons(network), sum(n.size for n in self.nodes if n.function)
        self.its = {k: slice(n, n + self.nodes[k - 1].size) for k, n in first.items()}
        fans = [sum(w.shape[-1] if w.ndim > 1 else 1 for w in n.weights) for n in self.nodes]
        widest, self.float32 = max(*fans, network.inputs, network.outputs), arithmetic == "float32"
        self.e, m = 2 * (2 * widest + 30) * U64, self.float32 / U64  # flushed: all is an error
        self.most, self.least = (smooth.LARGEST, NORMAL) if self.float32 else (np.inf, TINY)
        sizes = [[np.abs(w) for w in node.weights] for node in self.nodes]
        self.absolute = [[s * (1 + m * (s < NORMAL)) for s in stage] for stage in sizes]
        gammas = [node.roundings * U32 * self.float32 for node in self.nodes]
        if arithmetic not in ARITHMETICS or max(gammas) > 0.1 or self.e > 1e-6:
            raise RefusedError(f"bounds of this network in {arithmetic!r} arithmetic are not known")
        self.x = [g / (1 - g) + 2 * n.inexact for g, n in zip(gammas, self.nodes, strict=True)]
        self.under = [TINY + smooth.FLUSH * self.float32 * (n.roundings + 1) for n in self.nodes]
        self.assumptions = smooth.assumptions([n.function for n in self.nodes], self.float32, given)

    @np.errstate(all="ignore")
    def bounds(self, low: Floats, high: Floats, known: Any = None) -> Bounds:
        """Bound every node over each box; `known` bounds -values and values of some from above."""
        center, inputs = low / 2 + high / 2, np.arange(self.network.inputs)
        radius = np.maximum(high - center, center - low) * (1 + 8 * U64) + self.least
        size = np.where((s := np.abs(center) + radius) > self.most, np.inf, s)
        bounds = Bounds(center, radius, {}, {}, {}, {}, {0: size})
        forms: dict[int, Forms] = {0: (low[:, None] - self.least, high[:, None] + self.least)}
        if len(inputs) <= FORWARD:
            form = np.zeros((len(low), len(inputs) + 1, len(inputs)))
            form[:, inputs, inputs], form[:, -1] = radius, center
            forms[0] = (form, form)
        for k, node in enumerate(self.nodes, 1):
            forms[k] = self._affine(k, bounds, forms)
            if known and k in known:
                bounds.low[k] = np.maximum(bounds.low[k], -known[k][0])
                bounds.high[k] = np.minimum(bounds.high[k], known[k][1])
            if node.function:
                if any(node.inputs):
                    self._tighten(k, bounds, forms[k])
                bounds.lines[k] = lines = self.lines(k, bounds.low[k], bounds.high[k])
                forms[k] = lines.on_forms(*forms[k], bounds.low[k], bounds.high[k])
                bounds.size[k] = lines.size
        return bounds

    def lines(self, k: int, low: Floats, high: Floats, slopes: Any = np.nan) -> smooth.LinePair:
        """Return lines below and above the function of a node; NaN is for a slope to choose."""
        if (name := self.nodes[k - 1].function) != "relu":
            return smooth.lines(name, low, high, self.float32, self.assumptions)
        on, off = low >= 0, high <= 0
        above = np.clip(high / (high - low), 0, 1)
        ceiling = np.maximum(-above * low, (1 - above) * high) * (1 + 1e-14) + TINY
        ceiling, size = np.where(on | off, 0.0, ceiling), np.maximum(high, 0)
        below: Floats = np.where(np.isnan(slopes), high > -low, slopes)
        below, above = (np.where(on, 1.0, np.where(off, 0.0, slope)) for slope in (below, above))
        return smooth.LinePair(below, None, above, ceiling, size)

    def _affine(self, k: int, bounds: Bounds, forms: dict[int, Forms]) -> Forms:
        """Bound a node before its function, and return forms of its values."""
        node, e, v = self.nodes[k - 1], self.e, np.abs(self.nodes[k - 1].bias)
        mass, middle, half = v, np.zeros(1), np.zeros_like(forms[0][0][:, :, :1])
        for i, w, absolute in zip(node.inputs, node.weights, self.absolute[k - 1], strict=True):
            m, h = (forms[i][0] + forms[i][1]) / 2, (forms[i][1] - forms[i][0]) / 2
            v = v + _times(bounds.size[i], absolute)
            mass = mass + _times((np.abs(m) + np.abs(h)).sum(1), absolute)
            middle, half = middle + _times(m, w), half + _times(h, absolute)
        middle[:, -1] += node.bias
        v = np.where(v > self.most, np.inf, v)
        bounds.error[k] = (e + self.x[k - 1]) * v + self.under[k - 1]
        half[:, -1] += e * mass + bounds.error[k]
        lower, upper = middle - half, middle + half
        below, above = np.abs(lower[:, :-1]).sum(1), np.abs(upper[:, :-1]).sum(1)
        bounds.low[k] = lower[:, -1] - below - e * (np.abs(lower[:, -1]) + below) - TINY
        bounds.high[k] = upper[:, -1] + above + e * (np.abs(upper[:, -1]) + above) + TINY
        bounds.size[k] = np.maximum(np.abs(bounds.low[k]), np.abs(bounds.high[k]))
        return lower, upper

    def _tighten(self, k: int, bounds: Bounds, forms: Forms) -> None:
        """Bound the undecided neurons of a node again, by substituting back to the input."""
        node, low, high = self.nodes[k - 1], bounds.low[k], bounds.high[k]
        undecided = (low < 0) & (high > 0) if node.function == "relu" else low < high
        boxes, neurons = np.nonzero(undecided)
        for start in range(0, len(boxes), PAIRS):
            box, neuron = boxes[start : start + PAIRS], neurons[start : start + PAIRS]
            rows, error = dict[int, Floats](), bounds.error[k][box, neuron]
            for i, w in zip(node.inputs, node.weights, strict=True):
                row = w[neuron] if w.ndim > 1 else np.eye(node.size)[neuron] * w
                error = self._join(rows, i, row, error, bounds, box)
            for side, sign, form in zip((low, high), (1.0, -1.0), forms, strict=True):
                signed, bias = {i: sign * row for i, row in rows.items()}, sign * node.bias[neuron]
                bound, row = self.back(signed, bias, error, bounds, box, bounds.lines, box)
                better = bound > sign * side[box, neuron]
                b, n = box[better], neuron[better]
                side[b, n] = sign * bound[better]
                if form.shape[1] > 1:  # the function of this bound is a better form, too
                    form[b, :-1, n] = reach = sign * (row * bounds.radius[box])[better]
                    form[b, -1, n] = side[b, n] + sign * np.abs(reach).sum(1)

    def back(
        self, rows: dict[int, Floats], constant: Floats, error: Floats, bounds: Bounds, box: Any,
        lines: dict[int, smooth.LinePair], of: Any, taken: Floats | None = None,
    ) -> Forms:  # fmt: skip
        """Return lower bounds of rows @ values + constant - error in boxes `box`, and input rows.

        Lines are those of number `of`. `taken` times each neuron's argument is subtracted: a
        multiplier of the sign that it is assumed to have (β in β-CROWN).
        """
        e = self.e
        for k in (k for k in range(max(rows), 0, -1) if k in rows):
            row, node = rows.pop(k), self.nodes[k - 1]
            if node.function:
                row, shift, size = lines[k].through(row, of)
                error = error + e * (size + np.abs(constant))
                constant = constant + shift
            mass = np.abs(row)
            if taken is not None and node.function:  # only the difference is rounded once more
                row = row - taken[:, self.its[k]]
                mass = np.abs(row) + np.abs(taken[:, self.its[k]]) * (e / (e + self.x[k - 1]))
            before, constant = np.abs(constant), constant + row @ node.bias
            error = error * (1 + 1e-14) + e * (before + np.abs(constant))
            error += smooth.dot(mass, bounds.error[k][box])
            for i, w in zip(node.inputs, node.weights, strict=True):
                error = self._join(rows, i, _times(row, w.T), error, bounds, box)
        row, size = rows[0], np.abs(rows[0])
        error = error * (1 + 1e-12) + e * (smooth.dot(size, bounds.size[0][box]) + np.abs(constant))
        reach = smooth.dot(size, bounds.radius[box])
        return smooth.dot(row, bounds.center[box]) - reach + constant - error - TINY, row

    def _join(
        self, rows: dict[int, Floats], i: int, part: Floats, error: Floats, bounds: Bounds, box: Any
    ) -> Floats:
        """Add coefficients of a node to its coefficients so far, and return the error."""
        if i in rows:
            part = part + rows[i]
            error = error + self.e * smooth.dot(np.abs(part), bounds.size[i][box])
        rows[i] = part
        return error


def _times(values: Floats, weight: Floats) -> Floats:
    return values @ weight.T if weight.ndim > 1 else values * weight
