"""Sound bounds of a network over boxes, for checking: plain, in float64, and moved outward.

`e` is twice gamma of the longest sum, so that the discrepancy of each step is less than
e * |coefficients| * v, where v = |W| H + |b| and H bounds the values that enter a node. That holds
for every order of summation. In float32 arithmetic an execution of the network may differ from the
real one by gamma * v at each node, which is added. NaN is a bound of nothing, and stays NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from anydevice._proofs.checking import smooth
from anydevice._proofs.checking.certificate import ARITHMETICS, first_neurons
from anydevice._proofs.checking.network import Floats, Network, RefusedError, check_network

U64, U32, TINY, FLUSH, NORMAL = 2.0**-53, 2.0**-24, 1e-290, 2.0**-124, 2.0**-126
PAIRS, FORWARD, BATCH = 512, 64, 256
"""So many rows are bounded at once; so many inputs have forms of their own; so many leaves."""

Forms = tuple[Floats, Floats]
"""Two affine functions of coordinates in [-1, 1] with a value between; the constant is last."""


class Bounds(NamedTuple):
    """What holds over each box, by number of the node: intervals, lines, error of a step, and H."""

    center: Floats
    radius: Floats
    low: dict[int, Floats]
    high: dict[int, Floats]
    lines: dict[int, smooth.LinePair]
    error: dict[int, Floats]
    size: dict[int, Floats]


class SoundNetwork:
    """Bounds of a network in an arithmetic."""

    def __init__(self, network: Network, arithmetic: str) -> None:
        self.network, self.nodes = check_network(network), network.nodes
        first, self.neurons = first_neurons(network), sum(n.size for n in self.nodes if n.function)
        self.its = {k: slice(n, n + self.nodes[k - 1].size) for k, n in first.items()}
        fans = [sum(w.shape[-1] if w.ndim > 1 else 1 for w in n.weights) for n in self.nodes]
        widest, self.float32 = max(*fans, network.inputs, network.outputs), arithmetic == "float32"
        self.e, m = 2 * (2 * widest + 30) * U64, self.float32 / U64  # flushed: all is an error
        self.most, self.least = (smooth.LARGEST, NORMAL) if self.float32 else (np.inf, TINY)
        sizes = [[np.abs(w) for w in node.weights] for node in self.nodes]
        self.absolute = [[s * (1 + m * (s < NORMAL)) for s in each] for each in sizes]
        gammas = [node.roundings * U32 * self.float32 for node in self.nodes]
        if arithmetic not in ARITHMETICS or max(gammas) > 0.1 or self.e > 1e-6:
            raise RefusedError(f"bounds of this network in {arithmetic!r} arithmetic are not known")
        self.x = [g / (1 - g) + 2 * n.inexact for g, n in zip(gammas, self.nodes, strict=True)]
        self.under = [TINY + FLUSH * self.float32 * (n.roundings + 1) for n in self.nodes]
        self.assumptions = smooth.assumptions({n.function for n in self.nodes}, self.float32)

    @np.errstate(all="ignore")
    def bounds(self, low: Floats, high: Floats, known: Any = None) -> Bounds:
        """Of every node over each box; of some it is known what -values and values are at most."""
        center, inputs = low / 2 + high / 2, np.arange(self.network.inputs)
        radius = np.maximum(high - center, center - low) * (1 + 8 * U64) + self.least
        size = np.where((s := np.abs(center) + radius) > self.most, np.inf, s)
        found = Bounds(center, radius, {}, {}, {}, {}, {0: size})
        forms: dict[int, Forms] = {0: (low[:, None] - self.least, high[:, None] + self.least)}
        if len(inputs) <= FORWARD:
            form = np.zeros((len(low), len(inputs) + 1, len(inputs)))
            form[:, inputs, inputs], form[:, -1] = radius, center
            forms[0] = (form, form)
        for k, node in enumerate(self.nodes, 1):
            forms[k] = self._affine(k, found, forms)
            if known and k in known:
                found.low[k] = np.maximum(found.low[k], -known[k][0])
                found.high[k] = np.minimum(found.high[k], known[k][1])
            if node.function:
                if any(node.inputs):
                    self._tighten(k, found, forms[k])
                found.lines[k] = lines = self.lines(k, found.low[k], found.high[k])
                forms[k] = lines.on_forms(*forms[k], found.low[k], found.high[k])
                found.size[k] = lines.size
        return found

    def lines(self, k: int, low: Floats, high: Floats, slopes: Any = np.nan) -> smooth.LinePair:
        """Lines below and above the function of a node; a slope that is NaN is chosen here."""
        if self.nodes[k - 1].function != "relu":
            return smooth.lines(self.nodes[k - 1].function, low, high, self.float32)
        on, off = low >= 0, high <= 0
        above = np.clip(high / (high - low), 0, 1)
        ceiling = np.maximum(-above * low, (1 - above) * high) * (1 + 1e-14) + TINY
        ceiling, size = np.where(on | off, 0.0, ceiling), np.maximum(high, 0)
        below: Floats = np.where(np.isnan(slopes), high > -low, slopes)
        below, above = (np.where(on, 1.0, np.where(off, 0.0, each)) for each in (below, above))
        return smooth.LinePair(below, None, above, ceiling, size)

    def _affine(self, k: int, found: Bounds, forms: dict[int, Forms]) -> Forms:
        """The interval of a node before its function, and forms of its values."""
        node, e, v = self.nodes[k - 1], self.e, np.abs(self.nodes[k - 1].bias)
        mass, middle, half = v, np.zeros(1), np.zeros_like(forms[0][0][:, :, :1])
        for i, w, absolute in zip(node.inputs, node.weights, self.absolute[k - 1], strict=True):
            m, h = (forms[i][0] + forms[i][1]) / 2, (forms[i][1] - forms[i][0]) / 2
            v = v + _times(found.size[i], absolute)
            mass = mass + _times((np.abs(m) + np.abs(h)).sum(1), absolute)
            middle, half = middle + _times(m, w), half + _times(h, absolute)
        middle[:, -1] += node.bias
        v = np.where(v > self.most, np.inf, v)
        found.error[k] = (e + self.x[k - 1]) * v + self.under[k - 1]
        half[:, -1] += e * mass + found.error[k]
        lower, upper = middle - half, middle + half
        below, above = np.abs(lower[:, :-1]).sum(1), np.abs(upper[:, :-1]).sum(1)
        found.low[k] = lower[:, -1] - below - e * (np.abs(lower[:, -1]) + below) - TINY
        found.high[k] = upper[:, -1] + above + e * (np.abs(upper[:, -1]) + above) + TINY
        found.size[k] = np.maximum(np.abs(found.low[k]), np.abs(found.high[k]))
        return lower, upper

    def _tighten(self, k: int, found: Bounds, forms: Forms) -> None:
        """Bound the undecided neurons of a node again, by substituting back to the input."""
        node, low, high = self.nodes[k - 1], found.low[k], found.high[k]
        undecided = (low < 0) & (high > 0) if node.function == "relu" else low < high
        boxes, neurons = np.nonzero(undecided)
        for start in range(0, len(boxes), PAIRS):
            box, neuron = boxes[start : start + PAIRS], neurons[start : start + PAIRS]
            rows, error = dict[int, Floats](), found.error[k][box, neuron]
            for i, w in zip(node.inputs, node.weights, strict=True):
                row = w[neuron] if w.ndim > 1 else np.eye(node.size)[neuron] * w
                error = self._join(rows, i, row, error, found, box)
            for side, sign, form in zip((low, high), (1.0, -1.0), forms, strict=True):
                signed, bias = {i: sign * row for i, row in rows.items()}, sign * node.bias[neuron]
                bound, row = self.back(signed, bias, error, found, box, found.lines, box)
                better = bound > sign * side[box, neuron]
                b, n = box[better], neuron[better]
                side[b, n] = sign * bound[better]
                if form.shape[1] > 1:  # the function that was found is a better form, too
                    form[b, :-1, n] = reach = sign * (row * found.radius[box])[better]
                    form[b, -1, n] = side[b, n] + sign * np.abs(reach).sum(1)

    def back(
        self, rows: dict[int, Floats], constant: Floats, error: Floats, found: Bounds, box: Any,
        lines: dict[int, smooth.LinePair], of: Any, taken: Floats | None = None,
    ) -> Forms:  # fmt: skip
        """Lower bounds of the sums of rows @ values + constant - error, in boxes `box`.

        Lines are those of number `of`. `taken` of each neuron's value is subtracted on the way: a
        multiplier of the sign that it is assumed to have. Also gives the rows of the inputs.
        """
        e = self.e
        for k in (k for k in range(max(rows), 0, -1) if k in rows):
            row, node = rows.pop(k), self.nodes[k - 1]
            if node.function:
                row, shift, size = lines[k].through(row, of)
                error = error + e * (size + np.abs(constant))
                constant = constant + shift
            mass = np.abs(row)
            if taken is not None and node.function:  # only the difference itself is rounded more
                row = row - taken[:, self.its[k]]
                mass = np.abs(row) + np.abs(taken[:, self.its[k]]) * (e / (e + self.x[k - 1]))
            before, constant = np.abs(constant), constant + row @ node.bias
            error = error * (1 + 1e-14) + e * (before + np.abs(constant))
            error += smooth.dot(mass, found.error[k][box])
            for i, w in zip(node.inputs, node.weights, strict=True):
                error = self._join(rows, i, _times(row, w.T), error, found, box)
        row, size = rows[0], np.abs(rows[0])
        error = error * (1 + 1e-12) + e * (smooth.dot(size, found.size[0][box]) + np.abs(constant))
        reach = smooth.dot(size, found.radius[box])
        return smooth.dot(row, found.center[box]) - reach + constant - error - TINY, row

    def _join(
        self, rows: dict[int, Floats], i: int, part: Floats, error: Floats, found: Bounds, box: Any
    ) -> Floats:
        """Add coefficients of a node to those that it has already."""
        if i in rows:
            part = part + rows[i]
            error = error + self.e * smooth.dot(np.abs(part), found.size[i][box])
        rows[i] = part
        return error


def _times(values: Floats, weight: Floats) -> Floats:
    return values @ weight.T if weight.ndim > 1 else values * weight
