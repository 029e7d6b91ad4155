"""Sound bounds of a network over many boxes at once, on any engine.

1. Forward: two linear functions of the input bound each neuron (DeepPoly, Singh et al., 2019).
   Networks of many inputs have intervals instead (IBP, Gowal et al., 2018).
2. Backward: a ReLU that these leave undecided is substituted through the layers before it (CROWN,
   Zhang et al., 2018), which is tighter.
3. At last the rows of the query are substituted backward.

Everything is computed in plain floating point, in any order of summation, with FMA or without. The
computed coefficients are taken for the exact ones. The error of each step is at most γ_n times
known magnitudes, with γ_n = n u / (1 - n u) (Higham, Accuracy and Stability of Numerical
Algorithms, 2002, section 3.1). The sum of these errors is subtracted from the bound, together with
the error that an execution of the network in float32 may add. A NaN anywhere makes a bound NaN, and
a NaN proves nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anydevice._proofs.checking import smooth
from anydevice._proofs.checking.network import Network, Node
from anydevice._proofs.machines import ArrayOps, BoundsMachine, DeviceArray, Host

FORWARD_INPUTS = 50
"""Networks with more inputs have intervals instead of linear functions."""

Live = Mapping[int, Host]
"""Neurons that are not off in every box, by the number of their node."""

KnownBounds = Mapping[int, tuple[Host, Host]]
"""Lower and upper bounds of neurons before their function, in all boxes, by node."""

_SLACK = 1.02
"""Covers the rounding of the error terms themselves, and terms of second order."""


class PlacedNode(NamedTuple):
    """A node of a network as bounds need it.

    `sizes` are the magnitudes of the transposed weights. `back` and `forth` bound the relative
    rounding of a backward and a forward step, `run` the errors of an execution of the network and
    of inexact weights, `floor` the loss if small numbers are flushed to zero.
    """

    inputs: tuple[int, ...]
    weights: tuple[DeviceArray, ...]
    transposed: tuple[DeviceArray, ...]
    sizes: tuple[DeviceArray, ...]
    bias: DeviceArray
    size_of_bias: DeviceArray
    function: str
    size: int
    back: float
    forth: float
    run: float
    floor: float


class Prepared(NamedTuple):
    """A network on a machine; `linear` is the number of inputs of its forward functions.

    `executed` is whether bounds are about every execution in float32. `pause` is called between
    batches of bounds, and may raise an error.
    """

    machine: BoundsMachine
    inputs: int
    linear: int
    steps: tuple[PlacedNode, ...]
    executed: bool
    pause: Callable[[], None] = lambda: None

    def gamma(self, count: int) -> float:
        """Return γ_count of the machine's dtype, with slack."""
        return _SLACK * count * self.machine.unit

    @property
    def weights(self) -> int:
        """Return the number of weights, zeros included."""
        shapes = (weight.shape for step in self.steps for weight in step.weights)
        return sum(prod(shape) for shape in shapes)

    @property
    def terms(self) -> float:
        """Return an upper bound of the number of products in one backward substitution."""
        return 8.0 * sum(step.size for step in self.steps) + 64.0 * self.inputs


def prepare(network: Network, arithmetic: str, machine: BoundsMachine) -> Prepared:
    """Place the arrays of a network on a machine, with the constants of their errors."""
    linear = network.inputs if network.inputs <= FORWARD_INPUTS else 0
    steps = tuple(_step(node, arithmetic == "float32", machine) for node in network.nodes)
    return Prepared(machine, network.inputs, linear, steps, arithmetic == "float32")


def _step(node: Node, executed: bool, machine: BoundsMachine) -> PlacedNode:
    exact = (*node.weights, node.bias)
    *weights, bias = [np.ascontiguousarray(array, machine.dtype) for array in exact]
    is_exact = all((a == b).all() for a, b in zip((*weights, bias), exact, strict=True))
    inexact = node.inexact + (0.0 if is_exact else machine.unit)
    terms = sum(w.shape[1] if w.ndim == 2 else 1 for w in weights) + len(weights)
    place = machine.place
    return PlacedNode(
        node.inputs,
        tuple(place(w) for w in weights),
        tuple(place(w.T) for w in weights),
        tuple(place(np.abs(w).T) for w in weights),
        place(bias),
        place(np.abs(bias)),
        node.function,
        node.size,
        back=_SLACK * (node.size + len(weights) + 4) * machine.unit,
        forth=_SLACK * (terms + 4) * machine.unit,
        run=_SLACK * (node.roundings * 2.0**-24 * executed + inexact),
        floor=(terms + 4) * max(smooth.FLUSH * executed, machine.tiny),
    )


def end_at(net: Prepared, number: int) -> Prepared:
    """Return the network that ends with a node, before its function."""
    *before, last = net.steps[:number]
    return net._replace(steps=(*before, last._replace(function="")))


def without(net: Prepared, live: Live) -> Prepared:
    """Return the network without the neurons that are always off, for substitution alone."""
    machine = net.machine

    def part(array: DeviceArray, rows: Host | None, columns: Host | None) -> DeviceArray:
        whole = machine.host(array)
        whole = whole if rows is None else whole[rows]
        return machine.place(whole if columns is None else whole[:, columns])

    steps = []
    for number, step in enumerate(net.steps, 1):
        its, before = live.get(number), [live.get(i) for i in step.inputs]
        if its is None and all(neurons is None for neurons in before):
            steps.append(step)
            continue
        steps.append(
            step._replace(
                weights=tuple(part(w, its, b) for w, b in zip(step.weights, before, strict=True)),
                transposed=tuple(
                    part(w, b, its) for w, b in zip(step.transposed, before, strict=True)
                ),
                sizes=tuple(part(w, b, its) for w, b in zip(step.sizes, before, strict=True)),
                bias=part(step.bias, its, None),
                size_of_bias=part(step.size_of_bias, its, None),
                size=step.size if its is None else len(its),
            )
        )
    return net._replace(steps=tuple(steps))


class Form(NamedTuple):
    """Linear functions below and above the values of a node over each box.

    They are `middle - spread` and `middle + spread`, of inputs between -1 and 1, with coefficients
    (boxes, inputs + 1, size), the constant last. `spread` has two more rows: the sum of the
    magnitudes of all coefficients, and the largest magnitude of the value.
    """

    middle: DeviceArray
    spread: DeviceArray


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


class NodeBounds(NamedTuple):
    """The bounds of a node over each box, as backward substitution needs them.

    `share` is the share of each input in the node's range. `packed` has the lines and the error in
    one array (boxes, 4 or 5, size), so that one call takes all of them.
    """

    low: DeviceArray
    high: DeviceArray
    error: DeviceArray
    share: DeviceArray | None = None
    lines: TwoLines | None = None
    packed: DeviceArray | None = None

    def of_rows(self, xp: ArrayOps, box: DeviceArray) -> tuple[TwoLines | None, DeviceArray]:
        """Return the lines and the error for the box of each row."""
        if self.packed is None or self.lines is None:
            lines = None if self.lines is None else self.lines.take(xp, box)
            return lines, xp.take(self.error, box)
        packed = xp.take(self.packed, box)
        rows = [_row(xp, packed, k) for k in range(packed.shape[1])]
        lower, upper, above, error = rows[:4]
        return TwoLines(lower, rows[4] if len(rows) > 4 else 0.0, upper, above), error


class NodeLines(NamedTuple):
    """The lines of a node for each row, and the multiple of its argument that is subtracted.

    `taken` is a multiplier >= 0 times the sign that the argument is assumed to have (β in β-CROWN).
    """

    lines: TwoLines
    taken: DeviceArray


class LowerBounds(NamedTuple):
    """Lower bounds of rows, as linear functions of the inputs: (rows,), (rows, inputs), (rows,).

    `nominal` are the bounds without the errors of rounding and execution. `rows` has the
    coefficients of each node on the way, if `keep` asked for them.
    """

    low: DeviceArray
    nominal: DeviceArray
    slopes: DeviceArray
    constant: DeviceArray
    rows: dict[int, DeviceArray]


class LinearBounds:
    """The bounds of all nodes of a network over a batch of boxes."""

    def __init__(
        self,
        net: Prepared,
        centre: Host,
        radius: Host,
        tighten: bool = True,
        known: KnownBounds | None = None,
    ) -> None:
        self.net = net
        self.known = known or {}
        self.xp = net.machine.xp
        self.boxes = len(centre)
        if net.executed:  # an execution may flush an input to zero
            radius = radius + 2.0**-126
        self.pairs = 0
        self.layers: list[NodeBounds] = []
        self.centre, self.radius = net.machine.place(centre), net.machine.place(radius)
        reach = abs(self.centre) + self.radius
        reach = reach + self._overflow(reach) if net.executed else reach
        self.largest: dict[int, DeviceArray] = {0: reach}
        self.total = self.xp.sum(reach, 1, True)
        self._forms = {0: self._input_form(centre, radius)}
        last_use = {i: n for n, step in enumerate(net.steps, 1) for i in step.inputs}
        for number, step in enumerate(net.steps, 1):
            self._pass(number, step, tighten)
            for i in {i for i in step.inputs if last_use[i] == number}:
                del self._forms[i]

    def _input_form(self, centre: Host, radius: Host) -> Form:
        place, linear = self.net.machine.place, self.net.linear
        boxes, inputs = centre.shape
        middle = np.zeros((boxes, linear + 1, inputs))
        spread = np.zeros((boxes, linear + 3, inputs))
        if linear:
            middle[:, np.arange(inputs), np.arange(inputs)] = radius
        else:
            spread[:, 0] = radius
        middle[:, linear] = centre
        size = np.abs(centre) + radius
        spread[:, -2:] = size[:, None]
        if self.net.executed:
            spread[:, -1] = np.where(size > smooth.LARGEST, np.inf, size)
        return Form(place(middle), place(spread))

    def _pass(self, number: int, step: PlacedNode, tighten: bool) -> None:
        """Bound one node, from the bounds of the nodes before it."""
        xp, net = self.xp, self.net
        linear, tiny = net.linear, net.machine.tiny
        used = [self._forms[i] for i in step.inputs]
        middle: Any = sum(
            self._times(f.middle, w) for f, w in zip(used, step.transposed, strict=True)
        )
        spread: Any = sum(self._times(f.spread, w) for f, w in zip(used, step.sizes, strict=True))
        sizes = _row(xp, spread, linear + 1) + step.size_of_bias
        reach = _row(xp, spread, linear + 2) + step.size_of_bias
        spread = xp.slice_axis(spread, 1, 0, linear + 1)
        # The errors of an execution, of the backward step, and of the forward step
        executed = reach * step.run + (self.total + 1.0) * step.floor + self._overflow(reach)
        error = reach * step.back + executed
        off = sizes * step.forth + executed
        lower, upper = middle - spread, middle + spread
        below, above = abs(lower), abs(upper)
        sizes = xp.sum(xp.maximum(below, above), 1) + step.size_of_bias
        # The error of the sums over the inputs
        off = off + sizes * net.gamma(linear + 8) + tiny
        low = _row(xp, lower, linear) + step.bias - off
        high = _row(xp, upper, linear) + step.bias + off
        share = None
        if linear:
            below, above = xp.slice_axis(below, 1, 0, linear), xp.slice_axis(above, 1, 0, linear)
            low, high = low - xp.sum(below, 1), high + xp.sum(above, 1)
            share = below + above
        if number in self.known:
            least, most = (net.machine.place(ends) for ends in self.known[number])
            low, high = xp.maximum(low, least), xp.minimum(high, most)
        self.total = self.total + xp.sum(reach, 1, True)
        self.layers.append(NodeBounds(low, high, error, share))
        if step.function and tighten and number > 1:
            tighter = self._substitute_open(number, step, low, high)
            if tighter is not None and linear:
                middle, spread = self._use_tighter(tighter, lower, upper, step.bias)
                lower, upper = middle - spread, middle + spread
                below, above = abs(lower), abs(upper)
                sizes = xp.sum(xp.maximum(below, above), 1) + step.size_of_bias
                share = xp.slice_axis(below, 1, 0, linear) + xp.slice_axis(above, 1, 0, linear)
            if tighter is not None:
                low, high = tighter.low, tighter.high
        curve = self._curve(step, low, high)
        largest = xp.maximum(abs(curve.least), abs(curve.most))
        self.total = self.total + xp.sum(largest, 1, True)
        self.largest[number] = largest
        lines = curve.lines if step.function else None
        self.layers[-1] = NodeBounds(low, high, error, share, lines, self._pack(lines, error))
        if number < len(net.steps):
            form = _Functions(middle, spread, sizes, off, step.bias)
            self._forms[number] = self._form(form, curve, largest)

    def _overflow(self, reach: DeviceArray) -> DeviceArray:
        """Return infinity for sums that might overflow float32: no error term bounds them."""
        limit = smooth.LARGEST
        excess: DeviceArray = self.xp.maximum(reach - limit, 0.0) * limit * limit
        return excess

    def _curve(self, step: PlacedNode, low: DeviceArray, high: DeviceArray) -> Relaxation:
        machine = self.net.machine
        if step.function == "relu":
            return relu_curve(self.xp, low, high, machine.unit, machine.tiny)
        if not step.function:
            one, zero = low * 0 + 1, low * 0
            return Relaxation(TwoLines(one, zero, one, zero), low, high)
        least, most = (np.asarray(machine.host(end), np.float64) for end in (low, high))
        curve = _smooth_curve(step.function, least, most, self.net.executed)
        *lines, lowest, highest = (machine.place(np.asarray(x)) for x in (*curve.lines, *curve[1:]))
        return Relaxation(TwoLines(*lines), lowest, highest)

    def _form(self, before: _Functions, curve: Relaxation, largest: DeviceArray) -> Form:
        """Return the linear functions behind a node's own function, or the intervals."""
        xp, net = self.xp, self.net
        if not net.linear:
            half = (curve.least + curve.most) * 0.5
            wide = xp.maximum(curve.most - half, half - curve.least)
            wide = wide * (1.0 + 8 * net.machine.unit) + net.machine.tiny
            rows = xp.stack([wide, abs(half) + wide, largest], 1)
            return Form(_row_of(xp, half), rows)
        lower, below, upper, above = curve.lines
        grown = abs(lower) + abs(upper)
        size = (before.sizes + before.off) * grown + (abs(below) + abs(above))
        # The products below round, and the lines pass on the error of the affine step.
        steep = xp.maximum(abs(lower), abs(upper))
        pad = size * net.gamma(net.linear + 12) + steep * before.off + net.machine.tiny
        mean, turn = (lower + upper) * 0.5, (upper - lower) * 0.5
        tilt = (abs(upper) - abs(lower)) * 0.5
        bias = before.bias
        middle = before.middle * _row_of(xp, mean) + before.spread * _row_of(xp, tilt)
        spread = before.middle * _row_of(xp, turn) + before.spread * _row_of(xp, grown * 0.5)
        middle = _with_last(xp, middle, mean * bias + (above + below) * 0.5)
        spread = _with_last(xp, spread, turn * bias + (above - below) * 0.5 + pad)
        extra = xp.stack([size + pad, largest], 1)
        return Form(middle, xp.concat([spread, extra], 1))

    def _substitute_open(
        self, number: int, step: PlacedNode, low: DeviceArray, high: DeviceArray
    ) -> _Tighter | None:
        """Bound by substitution the neurons that the forward functions leave open (CROWN)."""
        machine, xp, rows = self.net.machine, self.xp, self.net.machine.rows // 2
        # Better bounds help ReLUs that are neither on nor off, and all other functions.
        is_relu = step.function == "relu"
        is_open = machine.host(xp.logical_and(low < 0, high > 0) if is_relu else low < high)
        box, neuron = np.nonzero(is_open)
        self.pairs += len(box)
        if not len(box):
            return None
        chunks = []
        for start in range(0, len(box), rows):
            self.net.pause()
            some = box[start : start + rows], neuron[start : start + rows]
            chunks.append(self._both_sides(number, step, *some))
        place = np.zeros(is_open.shape, np.int64)
        place[box, neuron] = np.arange(len(box))
        where, mask = machine.indices(place.ravel()), machine.place(is_open)
        joined = [
            arrays[0] if len(chunks) == 1 else xp.concat(list(arrays), 0)
            for arrays in zip(*chunks, strict=True)
        ]
        lower, upper, rising, falling = (xp.take(array, where) for array in joined)
        lower, upper = (xp.reshape(side, is_open.shape) for side in (lower, upper))
        better = xp.logical_and(mask > 0, lower > low)
        worse = xp.logical_and(mask > 0, upper < high)
        # A comparison with NaN is False: the bound of before stays.
        low, high = xp.where(better, lower, low), xp.where(worse, upper, high)
        return _Tighter(low, xp.maximum(low, high), better, worse, rising, falling)

    def _use_tighter(
        self, tighter: _Tighter, lower: DeviceArray, upper: DeviceArray, bias: DeviceArray
    ) -> tuple[DeviceArray, DeviceArray]:
        """Replace forward functions by the functions of substitution where these are tighter."""
        xp, linear = self.xp, self.net.linear
        boxes, _, size = lower.shape
        radius = xp.reshape(self.radius, (boxes, linear, 1))
        functions = []
        for old, slopes, better, end, sign in (
            (lower, tighter.rising, tighter.better, tighter.low, 1.0),
            (upper, tighter.falling, tighter.worse, tighter.high, -1.0),
        ):
            slopes = xp.permute(xp.reshape(slopes, (boxes, size, linear)), (0, 2, 1)) * radius
            constant = end + xp.sum(abs(slopes), 1) * sign - bias
            new = xp.concat([slopes, _row_of(xp, constant)], 1)
            functions.append(xp.where(_row_of(xp, better), new, old))
        lower, upper = functions
        return (lower + upper) * 0.5, (upper - lower) * 0.5

    def _both_sides(
        self, number: int, step: PlacedNode, box: Host, neuron: Host
    ) -> tuple[DeviceArray, ...]:
        """Return lower and upper bounds of neurons, each over one box, and their functions."""
        machine, xp, count = self.net.machine, self.xp, len(box)
        if machine.pads:
            more = padded_size(count) - count
            box, neuron = np.pad(box, (0, more)), np.pad(neuron, (0, more))
        where, which = machine.indices(box), machine.indices(neuron)
        flat = xp.reshape(self.layers[number - 1].error, (self.boxes * step.size,))
        error = xp.take(flat, machine.indices(box * step.size + neuron))
        bias = xp.take(step.bias, which)
        pending: dict[int, DeviceArray] = {}
        for i, weight in zip(step.inputs, step.weights, strict=True):
            if len(weight.shape) == 2:
                rows = xp.take(weight, which)
            else:
                rows = xp.one_hot(which, weight.shape[0], machine.dtype) * _row_of(xp, weight)
            rows = xp.concat([rows, -rows], 0)
            pending[i] = pending[i] + rows if i in pending else rows
        twice = xp.concat([where, where], 0)
        constant, errors = xp.concat([bias, -bias], 0), xp.concat([error, error], 0)
        bounds = self.substitute(pending, constant, errors, twice)
        lower, upper, rising, falling = (
            xp.slice_axis(array, 0, start, start + count)
            for array in (bounds.low, bounds.slopes)
            for start in (0, len(box))
        )
        return lower, -upper, rising, -falling

    def substitute(
        self,
        pending: dict[int, DeviceArray],
        constant: DeviceArray,
        error: DeviceArray,
        box: DeviceArray,
        keep: bool = False,
        own: Mapping[int, NodeLines] | None = None,
    ) -> LowerBounds:
        """Bound sums `coefficients @ values of nodes + constant - error` from below, one a row.

        `pending` has the coefficients by node, and `box` the box of each row. `own` has lines of
        rows, which replace the lines of their boxes.
        """
        xp, net, dot = self.xp, self.net, self.net.machine.dot
        row_of_node: dict[int, DeviceArray] = {}
        unit = net.machine.unit
        # The loss if numbers near zero are flushed
        floor = (self.total + 1.0) * (net.terms * net.machine.tiny)
        error = error + xp.take(xp.reshape(floor, (self.boxes,)), box)
        for number in range(max(pending), 0, -1):
            if number not in pending:
                continue
            row = pending.pop(number)
            step, layer = net.steps[number - 1], self.layers[number - 1]
            if keep:
                row_of_node[number] = row
            size = abs(constant)
            lines: TwoLines | None
            of_rows = own.get(number) if own else None
            if of_rows is not None:
                lines, off = of_rows.lines, xp.take(layer.error, box)
            else:
                lines, off = layer.of_rows(xp, box)
            if lines is not None:
                negative = xp.minimum(row, 0.0)
                row = row - negative
                moved = dot(negative, lines.above)
                if isinstance(lines.below, float):  # the upper line of a ReLU is nowhere below 0
                    size = size - moved
                else:
                    size = size + dot(-negative, abs(lines.above)) + dot(row, abs(lines.below))
                    moved = moved + dot(row, lines.below)
                row *= lines.lower
                negative *= lines.upper
                row += negative
                constant = constant + moved
                if of_rows is not None:
                    # The difference rounds relative to itself, and the multiplier is exact.
                    row = row - of_rows.taken
            error = error + size * step.back + dot(abs(row), off)
            constant = constant + times_vector(xp, row, step.bias)
            for i, weight in zip(step.inputs, step.weights, strict=True):
                passed = times_weight(xp, row, weight)
                if i in pending:
                    passed = passed + pending[i]
                    error = error + 2 * unit * dot(abs(passed), xp.take(self.largest[i], box))
                pending[i] = passed
        slopes = pending[0]
        centre, radius = xp.take(self.centre, box), xp.take(self.radius, box)
        size = abs(slopes)
        around = dot(size, radius)
        error = error + net.gamma(net.inputs + 6) * (
            dot(size, abs(centre)) + around + abs(constant)
        )
        nominal = dot(slopes, centre) - around + constant
        return LowerBounds(nominal - _SLACK * error, nominal, slopes, constant, row_of_node)

    def rows_below(
        self,
        rows: Host,
        constants: Host,
        box: Host,
        keep: bool = False,
        own: Mapping[int, NodeLines] | None = None,
    ) -> LowerBounds:
        """Bound `rows @ outputs + constants` from below, each row over its box."""
        last, machine = len(self.net.steps), self.net.machine
        placed, constant, where = (
            machine.place(rows),
            machine.place(constants),
            machine.indices(box),
        )
        size = machine.dot(abs(placed), self.xp.take(self.largest[last], where))
        error = self.net.gamma(8) * (size + abs(constant))
        return self.substitute({last: placed}, constant, error, where, keep, own)

    def live(self) -> dict[int, Host]:
        """Return the neurons that may be on, for nodes that have neurons that are always off."""
        steps, host = self.net.steps, self.net.machine.host
        diagonal = {
            n
            for number, step in enumerate(steps, 1)
            for i, weight in zip(step.inputs, step.weights, strict=True)
            if len(weight.shape) == 1
            for n in (i, number)
        }
        live = {}
        for number, (step, layer) in enumerate(zip(steps, self.layers, strict=True), 1):
            if step.function == "relu" and number not in diagonal:
                on = ~(host(layer.high) <= 0).all(0)
                if not on.all():
                    live[number] = np.flatnonzero(on)
        return live

    def without(self, live: Live) -> LinearBounds:
        """Return the bounds without neurons that are always off: their lines pass on nothing."""
        machine = self.net.machine
        smaller = copy.copy(self)
        smaller.net = without(self.net, live)
        smaller.layers, smaller.largest = list(self.layers), dict(self.largest)
        for number, its in live.items():

            def part(array: DeviceArray, its: Host = its) -> DeviceArray:
                return machine.place(machine.host(array)[..., its])

            layer = self.layers[number - 1]
            lines = None
            if layer.lines is not None:
                lower, below, upper, above = layer.lines
                below = below if isinstance(below, float) else part(below)
                lines = TwoLines(part(lower), below, part(upper), part(above))
            error = part(layer.error)
            packed = self._pack(lines, error)
            smaller.layers[number - 1] = NodeBounds(
                part(layer.low), part(layer.high), error, None, lines, packed
            )
            smaller.largest[number] = part(self.largest[number])
        return smaller

    def _pack(self, lines: TwoLines | None, error: DeviceArray) -> DeviceArray | None:
        if lines is None or self.net.machine.is_numpy:  # calls of NumPy are cheap, strides are not
            return None
        below = [] if isinstance(lines.below, float) else [lines.below]
        return self.xp.stack([lines.lower, lines.upper, lines.above, error, *below], 1)

    def _times(self, rows: DeviceArray, weight: DeviceArray) -> DeviceArray:
        """Multiply (boxes, rows, inputs) with a matrix (inputs, outputs) or a diagonal."""
        boxes, count, inputs = rows.shape
        flat = times_weight(self.xp, self.xp.reshape(rows, (boxes * count, inputs)), weight)
        return self.xp.reshape(flat, (boxes, count, weight.shape[-1]))


class _Tighter(NamedTuple):
    """Bounds by substitution, whether they are tighter, and the slopes of their functions."""

    low: DeviceArray
    high: DeviceArray
    better: DeviceArray
    worse: DeviceArray
    rising: DeviceArray
    falling: DeviceArray


class _Functions(NamedTuple):
    """The forward functions before a node's own function, without the bias."""

    middle: DeviceArray
    spread: DeviceArray
    sizes: DeviceArray
    off: DeviceArray
    bias: DeviceArray


def padded_size(count: int) -> int:
    """Return the next of the sizes 32, 256, 2048 and so on."""
    size = 32
    while size < count:
        size *= 8
    return size


def outward(
    low: npt.NDArray[np.float64], high: npt.NDArray[np.float64], dtype: str
) -> tuple[Host, Host]:
    """Return centres and radii in a dtype that contain boxes of float64."""
    centre = (low + (high - low) * 0.5).astype(dtype)
    exact = centre.astype(np.float64)
    radius = np.maximum(high - exact, exact - low) * (1 + 2.0**-50)
    if dtype == "float32":
        radius = radius * (1 + 2.0**-22) + 2.0**-126
    return centre, (radius + 2.0**-1022 * 4).astype(dtype)


def _row(xp: ArrayOps, x: DeviceArray, number: int) -> DeviceArray:
    boxes, _, size = x.shape
    return xp.reshape(xp.slice_axis(x, 1, number, number + 1), (boxes, size))


def _row_of(xp: ArrayOps, x: DeviceArray) -> DeviceArray:
    return xp.reshape(x, (*x.shape[:-1], 1, x.shape[-1]))


def _with_last(xp: ArrayOps, x: DeviceArray, last: DeviceArray) -> DeviceArray:
    """Return the coefficients with `last` added to the constants."""
    rows = x.shape[1]
    end = xp.slice_axis(x, 1, rows - 1, rows) + _row_of(xp, last)
    return xp.concat([xp.slice_axis(x, 1, 0, rows - 1), end], 1) if rows > 1 else end


def times_weight(xp: ArrayOps, rows: DeviceArray, weight: DeviceArray) -> DeviceArray:
    """Multiply rows with a matrix, or with a diagonal."""
    product: DeviceArray = xp.matmul(rows, weight) if len(weight.shape) == 2 else rows * weight
    return product


def times_vector(xp: ArrayOps, rows: DeviceArray, vector: DeviceArray) -> DeviceArray:
    """Return `rows @ vector`."""
    return xp.reshape(xp.matmul(rows, xp.reshape(vector, (vector.shape[0], 1))), (rows.shape[0],))


# Lines below and above an elementwise function between two bounds of its argument


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


def _smooth_curve(function: str, low: Host, high: Host, executed: bool) -> Relaxation:
    """Return tangents and chords in float64 on the host: the lines that the checker has, too."""
    with np.errstate(all="ignore"):
        pair = smooth.lines(function, low, high, executed)
        floor = np.zeros_like(low) if pair.floor is None else pair.floor
        reach = np.maximum(abs(low), abs(high))
        size = abs(pair.below) * reach + abs(floor)
        least = np.minimum(pair.below * low, pair.below * high) + floor - size * 1e-14
        size = abs(pair.above) * reach + abs(pair.ceiling)
        most = np.maximum(pair.above * low, pair.above * high) + pair.ceiling + size * 1e-14
        least, most = np.maximum(least, -pair.size), np.minimum(most, pair.size)
    return Relaxation(TwoLines(pair.below, floor, pair.above, pair.ceiling), least, most)
