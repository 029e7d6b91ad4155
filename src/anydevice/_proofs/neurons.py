"""Splits on the signs of ReLUs, with slopes (α) and multipliers (β) optimised for each part.

This is β-CROWN (Wang et al., 2021) with the slopes of α-CROWN (Xu et al., 2021). It decides
networks of many inputs and hard queries, for which halving inputs takes too long. A ReLU that is
neither on nor off is on in one case and off in the other. In each case its relaxation is exact, and
a Lagrange multiplier uses its sign. `split_neurons` repeats, for a batch of parts:

1. Optimise slopes and multipliers with Adam (Kingma and Ba, 2015), in fast arithmetic. Gradients
   need no autodiff: substitution runs backward, and forward from the point of the bound.
2. Close the parts whose sound bound is above 0, with the slopes rounded to bytes and the
   multipliers rounded to float16, as the certificate has them.
3. Split each other part on the neuron whose relaxation loses most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anydevice._proofs.bounds import (
    LinearBounds,
    NodeLines,
    Prepared,
    relu_curve,
    times_vector,
    times_weight,
    without,
)
from anydevice._proofs.checking.certificate import EACH_GROUP, LEAF, Lemma, Tree, preorder
from anydevice._proofs.machines import DeviceArray, Host

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]

_RATE_OF_SLOPES, _RATE_OF_MULTIPLIERS = 0.25, 0.05
_DECAY = 0.97

_MAX_MULTIPLIER = 60_000.0
"""Below the largest number of float16."""


class Branch:
    """The part of a tree below one open box, with numbers of its own."""

    def __init__(self) -> None:
        self.steps: list[int] = [LEAF]
        self.first: list[int] = [0]
        self.slopes: dict[int, Bytes] = {}
        self.multipliers: dict[int, npt.NDArray[np.float16]] = {}
        self.open = 1

    def split(self, node: int, step: int) -> int:
        """Split a node, and return the first of its two children."""
        first = len(self.steps)
        self.steps[node], self.first[node] = step, first
        self.steps += [LEAF, LEAF]
        self.first += [0, 0]
        self.open += 1
        return first


class TreeBuilder:
    """A tree while it grows: the step at each node, and the numbers of its children."""

    def __init__(self, groups: int, rows: int, neurons: int) -> None:
        self._groups, self._neurons = groups, neurons
        self._empty = np.zeros(rows, np.uint8)
        self._parts: list[tuple[Integers, Integers, Integers, Bytes]] = []
        self._slopes: dict[int, Bytes] = {}
        self._multipliers: dict[int, npt.NDArray[np.float16]] = {}
        self.lemmas: tuple[Lemma, ...] = ()
        self.nodes = 1

    def _add(self, ids: Any, steps: Any, first: Any, weights: Bytes) -> None:
        arrays = [np.asarray(array, np.int64) for array in (ids, steps, first)]
        self._parts.append((arrays[0], arrays[1], arrays[2], weights))

    def close(self, ids: Integers, weights: Bytes) -> None:
        self._add(ids, np.full(len(ids), LEAF), np.zeros(len(ids)), weights)

    def split(self, ids: Integers, inputs: Integers) -> Integers:
        """Split nodes, and return the number of the first child of each."""
        first = self.nodes + 2 * np.arange(len(ids))
        self.nodes += 2 * len(ids)
        self._add(ids, inputs, first, np.tile(self._empty, (len(ids), 1)))
        return first

    def add_cases(
        self, box: int, weights: Bytes, group_of_row: Integers, branches: dict[int, Branch]
    ) -> None:
        """Close a box by branches of cases of neurons, by the number of their group."""
        if self._groups == 1:
            self._graft(box, weights, branches[0])
            return
        first = self.nodes
        self.nodes += self._groups
        self._add([box], [EACH_GROUP], [first], self._empty[None])
        for group in range(self._groups):
            of_group = np.where(group_of_row == group, weights, 0).astype(np.uint8)
            if group in branches:
                self._graft(first + group, of_group, branches[group])
            else:
                self.close(np.array([first + group]), of_group[None])

    def _graft(self, root: int, weights: Bytes, branch: Branch) -> None:
        count = len(branch.steps)
        ids = np.concatenate([[root], self.nodes + np.arange(count - 1)])
        first = np.array(branch.first) + self.nodes - 1
        self.nodes += count - 1
        steps = np.array(branch.steps)
        is_leaf = (steps == LEAF)[:, None]
        self._add(ids, steps, first, np.where(is_leaf, weights, 0).astype(np.uint8))
        for node, slopes in branch.slopes.items():
            self._slopes[int(ids[node])] = slopes
            self._multipliers[int(ids[node])] = branch.multipliers[node]

    def tree(self) -> Tree:
        """Return the tree in preorder, with each set of slopes once."""
        parts = zip(*self._parts, strict=True)
        ids, steps, first, weights = (np.concatenate(arrays) for arrays in parts)
        by_id = np.argsort(ids)
        order = preorder(steps[by_id], first[by_id], self._groups)
        ids, steps, weights = ids[by_id][order], steps[by_id][order], weights[by_id][order]
        leaves = steps == LEAF
        sets: dict[bytes, int] = {}
        slopes_of = np.full(int(leaves.sum()), -1)
        multipliers = [np.zeros(0, np.float16)]
        if self._slopes:
            for index, leaf in enumerate(ids[leaves].tolist()):
                if leaf in self._slopes:
                    key = self._slopes[leaf].tobytes()
                    slopes_of[index] = sets.setdefault(key, len(sets))
                    multipliers.append(self._multipliers[leaf])
        table = np.frombuffer(b"".join(sets), np.uint8)
        slopes = table.reshape(len(sets), self._neurons) if sets else np.zeros((0, 0), np.uint8)
        joined = np.concatenate(multipliers)
        return Tree(steps, weights[leaves], slopes_of, slopes, joined, self.lemmas)


class Problems:
    """Rows to bound over boxes of a batch; `branches` has the cases of each problem so far."""

    def __init__(self, box: Host, rows: Floats, constants: Floats) -> None:
        self.box, self.rows, self.constants = box, rows, constants
        self.branches = [Branch() for _ in box]


class Parts(NamedTuple):
    """Open parts: their problem, their node in its branch, and their state.

    `sign` is 1 or -1 for each neuron that a case decides, else 0. `path` lists these neurons from
    the root. `neuron` is the one to split next, -1 if there is none, and `pull` its coefficient.
    """

    problem: Host
    node: Host
    bound: Singles
    sign: npt.NDArray[np.int8]
    slopes: Singles
    multipliers: Singles
    neuron: Host
    pull: Singles
    path: list[tuple[int, ...]]

    def take(self, which: Host) -> Parts:
        arrays: list[Any] = [array[which] for array in self[:-1]]
        arrays.append([self.path[i] for i in which])
        return Parts(*arrays)


class Optimised(NamedTuple):
    """Bounds of parts with their slopes and multipliers, and the points that attain them."""

    bound: Singles
    slopes: Singles
    multipliers: Singles
    neuron: Host
    pull: Singles
    points: Floats

    def update(self, parts: Parts) -> Parts:
        """Return the parts with these bounds, slopes and multipliers."""
        fields = self._asdict()
        del fields["points"]
        return parts._replace(**fields)


class Neurons:
    """Splits problems over the boxes of a batch, whose sound bounds are `relaxed`.

    `fast` is the same network, on the machine that optimises. `tally` is called with the number of
    parts that are bounded. Neurons that are off in every box are dropped; `live` are the numbers of
    the others, in the order of `Parts`. `outputs` are those of the problems, `None` for all.
    """

    def __init__(
        self,
        relaxed: LinearBounds,
        fast: Prepared,
        tally: Callable[[int], None],
        outputs: Host | None = None,
    ) -> None:
        live = relaxed.live()
        if outputs is not None:
            live[len(fast.steps)] = outputs
        self.where: dict[int, slice] = {}
        numbers, count, whole = [], 0, 0
        for number, step in enumerate(fast.steps, 1):
            if step.function:
                its = live.get(number, np.arange(step.size))
                self.where[number] = slice(count, count + len(its))
                numbers.append(whole + its)
                count += len(its)
                whole += step.size
        self.count, self.neurons = count, whole
        self.live = np.concatenate(numbers)
        relaxed, fast = relaxed.without(live), without(fast, live)
        self.relaxed, self.fast = relaxed, fast
        host = relaxed.net.machine.host
        layers = [relaxed.layers[n - 1] for n in self.where]
        self.low = np.concatenate([np.asarray(host(layer.low)) for layer in layers], 1)
        self.high = np.concatenate([np.asarray(host(layer.high)) for layer in layers], 1)
        self.centre, self.radius = (np.asarray(host(x)) for x in (relaxed.centre, relaxed.radius))
        self.tally = tally

    def start(self, problems: Problems, steps: int) -> tuple[Parts, Floats]:
        """Return one part for each problem, optimised, and the points that attain its bound."""
        count = len(problems.box)
        low, high = self.low[problems.box], self.high[problems.box]
        slopes = (high > -low).astype(np.float32)
        sign = np.zeros((count, self.count), np.int8)
        parts = Parts(
            np.arange(count),
            np.zeros(count, np.int64),
            np.full(count, -np.inf, np.float32),
            sign,
            slopes,
            np.zeros_like(slopes),
            np.full(count, -1),
            np.zeros(count, np.float32),
            [()] * count,
        )
        optimised = self.optimise(problems, parts, steps)
        return optimised.update(parts), optimised.points

    def halve(self, problems: Problems, parts: Parts, steps: int) -> tuple[Parts, Floats]:
        """Return both cases of the neuron of each part, on and off.

        Their multipliers begin with the difference between the exact line and the lower line, so
        that both have at least the bound of the part.
        """
        neuron = parts.neuron
        count = len(neuron)
        steps_of = self.fast.inputs + self.live[neuron]
        cases = zip(parts.problem, parts.node, steps_of, strict=True)
        branches = problems.branches
        first = np.array([branches[p].split(int(node), int(step)) for p, node, step in cases])
        twice = parts.take(np.concatenate([np.arange(count), np.arange(count)]))
        sign = twice.sign.copy()
        on, off = np.arange(count), np.arange(count) + count
        sign[on, neuron], sign[off, neuron] = 1, -1
        pull, slope = np.maximum(parts.pull, 0), parts.slopes[on, neuron]
        multipliers = twice.multipliers.copy()
        multipliers[on, neuron], multipliers[off, neuron] = pull * (1 - slope), pull * slope
        path = [(*path, int(n)) for path, n in zip(twice.path, np.tile(neuron, 2), strict=True)]
        node = np.concatenate([first, first + 1])
        twice = twice._replace(node=node, sign=sign, multipliers=multipliers, path=path)
        optimised = self.optimise(problems, twice, steps)
        self.tally(len(twice.node))
        return optimised.update(twice), optimised.points

    def close(self, problems: Problems, parts: Parts) -> npt.NDArray[np.bool_]:
        """Whether a sound bound closes each part; the branch keeps its slopes and multipliers."""
        closed = np.zeros(len(parts.node), bool)
        likely = np.flatnonzero(parts.bound > 0)
        if not len(likely):
            return closed
        some = parts.take(likely)
        good = self.keep(problems, some, 0.0) > 0
        closed[likely[good]] = True
        for problem in some.problem[good]:
            problems.branches[problem].open -= 1
        return closed

    def keep(self, problems: Problems, parts: Parts, least: float = -np.inf) -> Floats:
        """Return sound bounds; branches keep slopes and multipliers of parts above `least`."""
        slopes = np.round(np.clip(parts.slopes, 0, 1) * 255).astype(np.uint8)
        multipliers = np.minimum(parts.multipliers, _MAX_MULTIPLIER).astype(np.float16)
        bounds = self.sound(problems, parts, slopes / 255.0, multipliers.astype(np.float64))
        for i in np.flatnonzero(bounds > least):
            branch, node = problems.branches[parts.problem[i]], int(parts.node[i])
            box = problems.box[parts.problem[i]]
            low, high = self.low[box], self.high[box]
            # Decided neurons have slopes, too: rounding may leave them undecided for the checker.
            usual = np.where(high > -low, 255, 0)
            free = (low < 0) & (high > 0) & (parts.sign[i] == 0)
            branch.slopes[node] = bytes_ = np.zeros(self.neurons, np.uint8)
            bytes_[self.live] = np.where(free, slopes[i], usual)
            branch.multipliers[node] = multipliers[i, list(parts.path[i])]
        return bounds

    def sound(
        self, problems: Problems, parts: Parts, slopes: Floats, multipliers: Floats
    ) -> Floats:
        """Return sound lower bounds of parts, for any slopes in [0, 1] and multipliers >= 0."""
        relaxed, machine = self.relaxed, self.relaxed.net.machine
        box = problems.box[parts.problem]
        own = {}
        for number, its in self.where.items():
            sign = parts.sign[:, its]
            least, most = map(machine.place, self._ends(its, box, sign))
            lines = relu_curve(machine.xp, least, most, machine.unit, machine.tiny).lines
            slope = machine.place(slopes[:, its])
            is_open = machine.xp.logical_and(least < 0, most > 0)
            lines = lines._replace(lower=machine.xp.where(is_open, slope, lines.lower))
            own[number] = NodeLines(lines, machine.place(multipliers[:, its] * sign))
        rows, constants = problems.rows[parts.problem], problems.constants[parts.problem]
        lower = relaxed.rows_below(rows, constants, box, own=own)
        return np.array(machine.host(lower.low), np.float64)

    def optimise(self, problems: Problems, parts: Parts, steps: int) -> Optimised:
        """Improve slopes and multipliers by steps of Adam on both.

        No neuron has both: `values` are the slopes of open ones and the multipliers of cases.
        """
        machine = self.fast.machine
        place, xp = machine.place, machine.xp
        box = problems.box[parts.problem]
        rows = _PartRows(
            place(problems.rows[parts.problem]),
            place(problems.constants[parts.problem]),
            place(self.centre[box]),
            place(self.radius[box]),
        )
        layers = {n: self._layer(its, box, parts) for n, its in self.where.items()}
        start = np.where(parts.sign != 0, parts.multipliers, parts.slopes)
        values = {n: place(start[:, its]) for n, its in self.where.items()}
        mean = {n: value * 0 for n, value in values.items()}
        square = dict(mean)
        passed = self._pass(layers, values, rows)
        best, best_values = passed.bound, values
        for i in range(steps):
            values = {}
            # Both averages begin at 0; these correct their bias.
            mean_bias, root_bias = 1 - 0.9 ** (i + 1), (1 - 0.999 ** (i + 1)) ** 0.5
            for n, layer in layers.items():
                g = passed.gradient[n]
                mean[n] = mean[n] * 0.9 + g * 0.1
                square[n] = square[n] * 0.999 + g * g * 0.001
                move = xp.sqrt(square[n])
                move += 1e-8 * root_bias
                move = mean[n] / move
                move *= layer.rate
                move *= _DECAY**i * root_bias / mean_bias
                move += passed.values[n]
                values[n] = xp.minimum(xp.maximum(move, 0.0), layer.limit)
            passed = self._pass(layers, values, rows)
            better = xp.reshape(passed.bound > best, (len(box), 1))
            best = xp.maximum(passed.bound, best)
            best_values = {n: xp.where(better, new, best_values[n]) for n, new in values.items()}
        passed = self._pass(layers, best_values, rows)
        improved, row, score = (
            np.concatenate([np.asarray(machine.host(arrays[n]), np.float32) for n in layers], 1)
            for arrays in (best_values, passed.row, self._score(layers, passed))
        )
        bound, points = (np.asarray(machine.host(x)) for x in (passed.bound, passed.points))
        points = points.astype(np.float64)
        if not self.count:  # there is no neuron to split
            no_neuron = np.full(len(bound), -1)
            return Optimised(bound, improved, improved, no_neuron, parts.pull, points)
        first = score.argmax(1)
        every = np.arange(len(first))
        is_case = parts.sign != 0
        return Optimised(
            bound,
            np.where(is_case, parts.slopes, improved),
            np.where(is_case, improved, np.float32(0)),
            np.where(score[every, first] > 0, first, -1),
            row[every, first],
            points,
        )

    def _ends(self, its: slice, box: Host, sign: Host) -> tuple[Host, Host]:
        """Return the bounds of a node's neurons, narrowed by the signs of their cases."""
        low, high = self.low[box][:, its], self.high[box][:, its]
        low = np.where(sign > 0, np.maximum(low, 0), low)
        return low, np.where(sign < 0, np.minimum(high, 0), high)

    def _layer(self, its: slice, box: Host, parts: Parts) -> _Cases:
        place = self.fast.machine.place
        sign = parts.sign[:, its]
        low, high = self._ends(its, box, sign)
        is_open = (low < 0) & (high > 0)
        on = low >= 0
        upper = np.where(is_open, high / np.where(is_open, high - low, 1.0), on)
        above = np.where(is_open, -upper * low, 0.0)
        return _Cases(
            place(is_open.astype(float)),
            place(on.astype(float)),
            place(upper),
            place(above),
            place(sign.astype(float)),
            place(np.minimum(-low, high) * is_open),
            place(np.where(sign != 0, _RATE_OF_MULTIPLIERS, _RATE_OF_SLOPES)),
            place(np.where(sign != 0, _MAX_MULTIPLIER, 1.0)),
        )

    def _pass(
        self, layers: dict[int, _Cases], values: dict[int, DeviceArray], rows: _PartRows
    ) -> _Passed:
        """Go backward to the bound, and forward from the point that attains it: the gradients."""
        xp, dot, net = self.fast.machine.xp, self.fast.machine.dot, self.fast
        pending, constant = {len(net.steps): rows.rows}, rows.constants
        met: dict[int, DeviceArray] = {}
        used: dict[int, DeviceArray] = {}
        for number in range(len(net.steps), 0, -1):
            if number not in pending:
                continue
            row, step = pending.pop(number), net.steps[number - 1]
            if step.function:
                layer, value = layers[number], values[number]
                negative = xp.minimum(row, 0.0)
                slope = xp.where(row < 0, layer.upper, layer.on + layer.open * value)
                met[number], used[number] = row, slope
                constant = constant + dot(negative, layer.above)
                row = row * slope
                row -= value * layer.sign
            constant = constant + times_vector(xp, row, step.bias)
            for i, weight in zip(step.inputs, step.weights, strict=True):
                passed = times_weight(xp, row, weight)
                pending[i] = pending[i] + passed if i in pending else passed
        row = pending[0]
        points = rows.centre - xp.sign(row) * rows.radius
        bound = dot(row, points) + constant
        reached, gradient, arguments = {0: points}, {}, {}
        for number, step in enumerate(net.steps, 1):
            if number == len(net.steps) and not step.function:
                break
            z: Any = step.bias
            for i, weight in zip(step.inputs, step.transposed, strict=True):
                z = times_weight(xp, reached[i], weight) + z
            if number in met:
                layer, row = layers[number], met[number]
                pull = xp.maximum(row, 0.0)
                pull *= layer.open
                pull -= layer.sign
                gradient[number], arguments[number] = pull * z, z
                z = z * used[number]
                z += xp.where(row < 0, layer.above, layer.above * 0)
            reached[number] = z
        return _Passed(bound, points, values, gradient, met, arguments, reached)

    def _score(self, layers: dict[int, _Cases], passed: _Passed) -> dict[int, DeviceArray]:
        """Return the loss of each relaxation at the bound's point, plus a little of its maximum."""
        xp, scores = self.fast.machine.xp, {}
        for n, layer in layers.items():
            row, z = passed.row[n], passed.arguments[n]
            loss = xp.maximum(row * (xp.maximum(z, 0.0) - passed.reached[n]), 0.0)
            scores[n] = layer.open * (loss + 1e-3 * abs(row) * layer.gap)
        return scores


class _PartRows(NamedTuple):
    """The rows of parts, their constants, and their boxes."""

    rows: DeviceArray
    constants: DeviceArray
    centre: DeviceArray
    radius: DeviceArray


class _Cases(NamedTuple):
    """The neurons of a node: open, on, or decided by a case; the upper lines of open ones.

    `rate` is the learning rate of their slopes or multipliers, and `limit` the largest value.
    """

    open: DeviceArray
    on: DeviceArray
    upper: DeviceArray
    above: DeviceArray
    sign: DeviceArray
    gap: DeviceArray
    rate: DeviceArray
    limit: DeviceArray


class _Passed(NamedTuple):
    """Bounds of parts, the points that attain them, and arrays of both passes by node."""

    bound: DeviceArray
    points: DeviceArray
    values: dict[int, DeviceArray]
    gradient: dict[int, DeviceArray]
    row: dict[int, DeviceArray]
    arguments: dict[int, DeviceArray]
    reached: dict[int, DeviceArray]


def split_neurons(
    neurons: Neurons,
    problems: Problems,
    stop: Callable[[], bool],
    refutes: Callable[[Floats], Floats | None],
    *,
    limit: int = 1_000_000,
    batch: int = 96,
    first_steps: int = 30,
    steps: int = 12,
) -> Floats | None:
    """Split problems into cases; return a point that refutes one, `None` if there is none.

    A branch without open parts is a proof. A problem is given up beyond `limit` open parts, and all
    are if `stop` returns True.
    """
    parts, points = neurons.start(problems, first_steps)
    waiting: list[Parts] = []
    while True:
        bad = refutes(points)
        if bad is not None:
            return bad
        rest = np.flatnonzero(~neurons.close(problems, parts))
        if len(rest):
            waiting.append(parts.take(rest))
        next_parts = None if stop() else _next_parts(waiting, problems.branches, limit, batch)
        if next_parts is None:
            return None
        parts, points = neurons.halve(problems, next_parts, steps)


def _next_parts(
    waiting: list[Parts], branches: list[Branch], limit: int, batch: int
) -> Parts | None:
    """Pop the parts to split next, the last first, without problems that were given up."""
    while waiting:
        last = waiting.pop()
        is_tried = np.array([branches[p].open <= limit for p in last.problem])
        which = np.flatnonzero(is_tried & (last.neuron >= 0))
        if len(which) > batch:
            order = which[np.argsort(last.bound[which], kind="stable")]
            waiting.append(last.take(order[:-batch]))
            return last.take(order[-batch:])
        if len(which):
            return last.take(which)
    return None
