"""Sound bounds of a network over boxes, for checking: plain, in float64, and moved outward.

`e` is twice gamma of the longest sum, so that the discrepancy of each step is less than
e * |coefficients| * v, where v = |W| H + |b| and H bounds the values that enter a node. That holds
for every order of summation. In float32 arithmetic an execution of the network may differ from the
real one by gamma * v at each node, which is added. NaN is a bound of nothing, and stays NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from anydevice.proofs.checking import smooth
from anydevice.proofs.checking.network import Floats, Network, RefusedError, check_network

U64, U32, TINY, FLUSH, LARGEST = 2.0**-53, 2.0**-24, 1e-290, 2.0**-124, 2.0**127
PAIRS, FORWARD = 512, 50
"""So many rows are bounded at once; so many inputs at most have forms of their own."""

Integers = np.ndarray[Any, Any]
LinesOf = Mapping[int, smooth.Lines]


class Bounds(NamedTuple):
    """What holds over each box, by number of the node: intervals and lines, the error
    of a step, and H.
    """

    center: Floats
    radius: Floats
    low: dict[int, Floats]
    high: dict[int, Floats]
    lines: dict[int, smooth.Lines]
    error: dict[int, Floats]
    size: dict[int, Floats]


class Bounding:
    """Bounds of a network in an arithmetic."""

    def __init__(self, network: Network, arithmetic: str) -> None:
        self.network, self.nodes = check_network(network), network.nodes
        self.neurons, self.its = 0, dict[int, slice]()
        for k, node in enumerate(self.nodes, 1):
            if node.function:
                self.its[k] = slice(self.neurons, self.neurons + node.size)
                self.neurons += node.size
        self.absolute = [[np.abs(weight) for weight in node.weights] for node in self.nodes]
        fans = [sum(w.shape[-1] if w.ndim > 1 else 1 for w in n.weights) for n in self.nodes]
        self.e = 2 * (2 * max(*fans, network.inputs, network.outputs) + 30) * U64
        self.float32 = arithmetic == "float32"
        gammas = [node.roundings * U32 * self.float32 for node in self.nodes]
        if arithmetic not in ("real", "float32") or max(gammas) > 0.1 or self.e > 1e-6:
            raise RefusedError(f"bounds of this network in {arithmetic!r} arithmetic are not known")
        self.x = [g / (1 - g) + 2 * n.inexact for g, n in zip(gammas, self.nodes, strict=True)]
        self.under = [TINY + FLUSH * self.float32 * (n.roundings + 1) for n in self.nodes]
        self.assumptions = smooth.assumptions({n.function for n in self.nodes}, self.float32)

    def bounds(self, low: Floats, high: Floats, sign: Floats | None, slopes: Any = None) -> Bounds:
        """Of every node over each box, where neurons have the signs 1 (z >= 0) and -1 (z <= 0).

        `slopes(k)` are those of all neurons for the bounds of node k from below and from above.
        """
        center = low / 2 + high / 2
        radius = np.maximum(high - center, center - low) * (1 + 8 * U64) + TINY
        found = Bounds(center, radius, {}, {}, {}, {}, {0: np.abs(center) + radius})
        forms = {0: (low[:, None], high[:, None])}
        if self.network.inputs <= FORWARD:
            form = np.zeros((len(low), self.network.inputs + 1, self.network.inputs))
            form[:, np.arange(self.network.inputs), np.arange(self.network.inputs)] = radius
            form[:, -1] = center
            forms[0] = (form, form)
        for k, node in enumerate(self.nodes, 1):
            self._affine(k, found, forms)
            if node.function:
                if any(node.inputs):
                    self._tighten(k, found, forms[k], slopes(k) if slopes else (None, None))
                if sign is not None:
                    narrow(found.low[k], found.high[k], sign[:, self.its[k]])
                found.lines[k] = lines = self.lines(k, found.low[k], found.high[k])
                found.size[k] = lines.size
                forms[k] = _on_lines(*forms[k], lines)
        return found

    def lines(
        self, k: int, low: Floats, high: Floats, slopes: Floats | None = None
    ) -> smooth.Lines:
        """Lines below and above the function of a node; a slope that is NaN is chosen here."""
        if self.nodes[k - 1].function != "relu":
            return smooth.lines(self.nodes[k - 1].function, low, high, self.float32)
        on, off = low >= 0, high <= 0
        above = np.clip(high / (high - low), 0, 1)
        ceiling = np.maximum(-above * low, (1 - above) * high) * (1 + 1e-14) + TINY
        below: Floats = np.where(high > -low, 1.0, 0.0)
        if slopes is not None:
            below = np.where(np.isnan(slopes), below, slopes)
        below = np.where(on, 1.0, np.where(off, 0.0, below))
        above = np.where(on, 1.0, np.where(off, 0.0, above))
        ceiling = np.where(on | off, 0.0, ceiling)
        return smooth.Lines(below, None, above, ceiling, np.maximum(high, 0))

    def _affine(self, k: int, found: Bounds, forms: dict[int, tuple[Floats, Floats]]) -> None:
        """The interval of a node before its function, and two forms between which it lies.

        They are affine in coordinates of [-1, 1]; the last coefficient is the constant.
        """
        node, e = self.nodes[k - 1], self.e
        v: Any = np.abs(node.bias)
        mass, middle, half = v, np.zeros(1), np.zeros(1)
        for i, weight, absolute in zip(
            node.inputs, node.weights, self.absolute[k - 1], strict=True
        ):
            lower, upper = forms[i]
            m, h = (lower, None) if lower is upper else ((lower + upper) / 2, (upper - lower) / 2)
            v = v + _times(found.size[i], absolute)
            mass = mass + _times(np.abs(m).sum(1), absolute)
            middle = middle + _times(m, weight)
            if h is not None:
                mass = mass + _times(np.abs(h).sum(1), absolute)
                half = half + _times(h, absolute)
        middle[:, -1] += node.bias
        v = np.where(v > LARGEST, np.inf, v) if self.float32 else v
        half = half + np.zeros_like(middle) if half.ndim == 1 else half
        error = (e + self.x[k - 1]) * v + self.under[k - 1]
        half[:, -1] += e * mass + error
        lower, upper = middle - half, middle + half
        below, above = np.abs(lower[:, :-1]).sum(1), np.abs(upper[:, :-1]).sum(1)
        low = lower[:, -1] - below - e * (np.abs(lower[:, -1]) + below) - TINY
        high = upper[:, -1] + above + e * (np.abs(upper[:, -1]) + above) + TINY
        forms[k], found.error[k], found.low[k], found.high[k] = (lower, upper), error, low, high
        found.size[k] = np.maximum(np.abs(low), np.abs(high))

    def _tighten(self, k: int, found: Bounds, forms: tuple[Floats, Floats], slopes: Any) -> None:
        """Bound the undecided neurons of a node again, by substituting back to the input."""
        node, low, high = self.nodes[k - 1], found.low[k], found.high[k]
        undecided = (low < 0) & (high > 0) if node.function == "relu" else low < high
        boxes, neurons = np.nonzero(undecided)
        lines = [found.lines if each is None else self._sloped(k, found, each) for each in slopes]
        for start in range(0, len(boxes), PAIRS):
            box, neuron = boxes[start : start + PAIRS], neurons[start : start + PAIRS]
            rows, bias, error = dict[int, Floats](), node.bias[neuron], found.error[k][box, neuron]
            for i, weight in zip(node.inputs, node.weights, strict=True):
                row = weight[neuron] if weight.ndim > 1 else np.zeros((len(box), len(weight)))
                if weight.ndim == 1:
                    row[np.arange(len(box)), neuron] = weight[neuron]
                error = self._join(rows, i, row, error, found, box)
            for side, sign, form, its in zip((low, high), (1.0, -1.0), forms, lines, strict=True):
                signed = {i: sign * row for i, row in rows.items()}
                bound, row = self.back(signed, sign * bias, error, found, box, its, box)
                better = bound > sign * side[box, neuron]
                b, n = box[better], neuron[better]
                side[b, n] = sign * bound[better]
                if len(form[0]) > 1:
                    form[b, :-1, n] = reach = sign * (row * found.radius[box])[better]
                    form[b, -1, n] = side[b, n] + sign * np.abs(reach).sum(1)

    def _sloped(self, k: int, found: Bounds, slopes: Floats) -> LinesOf:
        earlier = {j: its for j, its in self.its.items() if j < k}
        return {
            j: self.lines(j, found.low[j], found.high[j], slopes[its]) for j, its in earlier.items()
        }

    def back(
        self, rows: dict[int, Floats], constant: Floats, error: Floats, found: Bounds,
        box: Integers, lines: LinesOf, of: Integers, taken: Floats | None = None,
    ) -> tuple[Floats, Floats]:  # fmt: skip
        """Lower bounds of the sums of rows @ values + constant - error, in boxes `box`.

        Lines are those of number `of`. `taken` of each neuron's value is subtracted on the way: a
        multiplier of the sign that it is assumed to have.
        """
        e, rows = self.e, dict(rows)
        for k in range(max(rows), 0, -1):
            if k not in rows:
                continue
            row, node = rows.pop(k), self.nodes[k - 1]
            if node.function:
                row, constant, error = self._through(row, constant, error, lines[k], of)
            mass = np.abs(row)
            if taken is not None and node.function:
                row = row - taken[:, self.its[k]]
                mass = np.abs(row) + np.abs(taken[:, self.its[k]])
            before, constant = np.abs(constant), constant + row @ node.bias
            error = error * (1 + 1e-14) + e * (before + np.abs(constant)) + self.under[k - 1]
            error += _dot(mass, found.error[k][box])
            for i, weight in zip(node.inputs, node.weights, strict=True):
                part = row @ weight if weight.ndim > 1 else row * weight
                error = self._join(rows, i, part, error, found, box)
        row, size = rows[0], np.abs(rows[0])
        center, radius = found.center[box], found.radius[box]
        error = error * (1 + 1e-12) + e * (_dot(size, found.size[0][box]) + np.abs(constant))
        return _dot(row, center) - _dot(size, radius) + constant - error - TINY, row

    def _join(
        self, rows: dict[int, Floats], i: int, part: Floats, error: Floats, found: Bounds, box: Any
    ) -> Floats:
        """Add coefficients of a node to those that it has already."""
        if i in rows:
            part = part + rows[i]
            error = error + self.e * _dot(np.abs(part), found.size[i][box])
        rows[i] = part
        return error

    def _through(
        self, row: Floats, constant: Floats, error: Floats, lines: smooth.Lines, of: Integers
    ) -> tuple[Floats, Floats, Floats]:
        """From values of a function to its arguments."""
        positive, negative = np.maximum(row, 0), np.minimum(row, 0)
        shift = _dot(negative, lines.ceiling[of])
        size = np.abs(shift)
        if lines.floor is not None:
            size = _dot(-negative, np.abs(lines.ceiling)[of])
            size += _dot(positive, np.abs(lines.floor)[of])
            shift = shift + _dot(positive, lines.floor[of])
        positive *= lines.below[of]
        negative *= lines.above[of]
        positive += negative  # one of the two is 0: nothing is rounded here
        return positive, constant + shift, error + self.e * (size + np.abs(constant))


def narrow(low: Floats, high: Floats, sign: Floats) -> None:
    """Intervals as they are where values have signs."""
    np.maximum(low, 0, out=low, where=sign > 0)
    np.minimum(high, 0, out=high, where=sign < 0)


def _on_lines(lower: Floats, upper: Floats, lines: smooth.Lines) -> tuple[Floats, Floats]:
    """Forms of the values of a function from those of its arguments."""
    below, above = lines.below[:, None], lines.above[:, None]
    low, high = lower * below, upper * above
    if lines.floor is not None:
        low = np.where(below < 0, upper, lower) * below
        high = np.where(above < 0, lower, upper) * above
        low[:, -1] += lines.floor - 8 * U64 * (np.abs(low[:, -1]) + np.abs(lines.floor))
    high[:, -1] += lines.ceiling + 8 * U64 * (np.abs(high[:, -1]) + np.abs(lines.ceiling))
    return low, high


def _times(values: Floats, weight: Floats) -> Floats:
    return values @ weight.T if weight.ndim > 1 else values * weight


def _dot(a: Floats, b: Floats) -> Floats:
    total: Floats = np.einsum("pn,pn->p", a, b)
    return total
