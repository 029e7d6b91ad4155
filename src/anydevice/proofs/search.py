"""Branch and bound over boxes of inputs: a box whose bounds do not decide it is halved.

Boxes live on the host in float64, in the numbers that a certificate names; batches of them are
bounded on an engine. Where that computes in float32, what it cannot decide by a hair is bounded
again in float64.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anydevice.proofs.bounds import Lowered, Prepared, Relaxed, outward, padded
from anydevice.proofs.checking.certificate import LEAF, Tree, preorder
from anydevice.proofs.checking.network import Query
from anydevice.proofs.machines import Host

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_ROUNDS = 40
"""Steps towards the best weights of the rows of a group."""


class Rows(NamedTuple):
    """The rows of a query in float64: constants rounded downward, and what may be mixed exactly."""

    coefficients: Floats
    constants: Floats
    groups: tuple[Integers, ...]
    strict: npt.NDArray[np.bool_]
    mixes: bool


def rows_of(query: Query) -> Rows:
    coefficients = np.array([[float(c) for c in row] for row in query.coefficients])
    constants = np.array([float(d) for d in query.constants])
    for i, exact in enumerate(query.constants):
        if constants[i] > exact:
            constants[i] = np.nextafter(constants[i], -np.inf)
    group = np.array(query.group)
    groups = tuple(np.flatnonzero(group == g) for g in range(int(group.max()) + 1))
    whole = np.concatenate([coefficients.ravel(), constants])
    # Sums of rows times bytes are exact if all are integers, and not too large for float32 either.
    mixes = bool(((whole == np.round(whole)) & (abs(whole) < 1024)).all())
    mixes = mixes and all(c == float(c) for row in query.coefficients for c in row)
    return Rows(coefficients, constants, groups, np.array(query.strict), mixes)


class Boxes(NamedTuple):
    """Boxes that are still open: their number in the tree, depth, and bounds of the inputs."""

    ids: Integers
    depth: Integers
    low: Floats
    high: Floats

    def take(self, which: Host | slice) -> Boxes:
        return Boxes(self.ids[which], self.depth[which], self.low[which], self.high[which])


class Progress(NamedTuple):
    """How far a search is: the share of the box that is proved, and what is still open."""

    share: float
    open: int
    boxes: int
    boxes_per_second: float
    worst: float


class Found(NamedTuple):
    """How a search ended: with a tree that proves it, a point that refutes it, or neither."""

    tree: Tree | None
    point: Floats | None
    reason: str
    progress: Progress


class Verdict(NamedTuple):
    """What the bounds of a batch say: which boxes are closed, and by which weights.

    `near` are those that float64 might close. For the others, the score of each input, the best
    bound, and where it is attained: points that may be counterexamples.
    """

    closed: npt.NDArray[np.bool_]
    near: npt.NDArray[np.bool_]
    weights: npt.NDArray[np.uint8]
    scores: Floats
    bound: Floats
    points: Floats


class Growing:
    """A tree while it grows: what was done at each node, and where its children are."""

    def __init__(self) -> None:
        self._parts: list[tuple[Integers, Integers, Integers, npt.NDArray[np.uint8]]] = []
        self.nodes = 1

    def close(self, ids: Integers, weights: npt.NDArray[np.uint8]) -> None:
        steps = np.full(len(ids), LEAF)
        self._parts.append((ids, steps, np.zeros(len(ids), np.int64), weights))

    def split(self, ids: Integers, inputs: Integers, rows: int) -> Integers:
        """The numbers of the first of two children of each node."""
        first = self.nodes + 2 * np.arange(len(ids))
        self.nodes += 2 * len(ids)
        self._parts.append((ids, inputs, first, np.zeros((len(ids), rows), np.uint8)))
        return first

    def tree(self) -> Tree:
        ids, steps, first, weights = (
            np.concatenate(each) for each in zip(*self._parts, strict=True)
        )
        by_id = np.argsort(ids)
        order = preorder(steps[by_id], first[by_id])
        steps = steps[by_id][order]
        weights = weights[by_id][order][steps == LEAF]
        none = np.full(len(weights), -1)
        return Tree(steps, weights, none, np.zeros((0, 0), np.uint8), np.zeros(0, np.float16))


class Bounding:
    """Decides batches of boxes by the bounds of a prepared network."""

    def __init__(self, net: Prepared, rows: Rows) -> None:
        self.net, self.rows = net, rows

    def __call__(self, low: Floats, high: Floats) -> Verdict:
        net = self.net
        count = len(low)
        if net.machine.pads:
            more = padded(count) - count
            low, high = (np.concatenate([x, np.repeat(x[:1], more, 0)]) for x in (low, high))
        with np.errstate(all="ignore"):
            relaxed = Relaxed(net, *outward(low, high, net.machine.dtype))
            verdict = self._decide(relaxed, len(low))
        return _verdict(each[:count] for each in verdict)

    def _decide(self, relaxed: Relaxed, boxes: int) -> Verdict:
        rows, host = self.rows, self.net.machine.host
        number = len(rows.constants)
        box = np.repeat(np.arange(boxes), number)
        found = self._below(
            relaxed, np.tile(rows.coefficients, (boxes, 1)), np.tile(rows.constants, boxes), box
        )
        low, nominal = (
            np.array(host(x), np.float64).reshape(boxes, number) for x in (found.low, found.nominal)
        )
        slopes = np.array(host(found.slopes), np.float64).reshape(boxes, number, -1)
        constant = np.array(host(found.constant), np.float64).reshape(boxes, number)
        holds = np.where(rows.strict, low >= 0, low > 0)
        weights = np.zeros((boxes, number), np.uint8)
        closed, near = np.ones(boxes, bool), np.ones(boxes, bool)
        worst = np.full(boxes, np.inf)
        chosen = np.zeros((boxes, number))
        low = np.where(np.isnan(low), -np.inf, low)
        for group in rows.groups:
            best = group[low[:, group].argmax(1)]
            done = holds[np.arange(boxes), best]
            weights[np.arange(boxes), best] = 255
            bound = low[np.arange(boxes), best]
            hair = nominal[np.arange(boxes), best]
            pick = np.zeros((boxes, number))
            pick[np.arange(boxes), best] = 1
            open_ = np.flatnonzero(~done)
            if len(open_) and len(group) > 1 and rows.mixes:
                mixed = self._mix(
                    relaxed, open_, slopes[open_][:, group], constant[open_][:, group]
                )
                whole = np.zeros((len(open_), number))
                whole[:, group] = mixed
                again = self._below(
                    relaxed, whole @ rows.coefficients, whole @ rows.constants, open_
                )
                scale = mixed.max(1)
                value = np.array(host(again.low), np.float64) / scale
                other = np.array(host(again.nominal), np.float64) / scale
                better = value > bound[open_]
                some = open_[better]
                bound[some], hair[some] = value[better], other[better]
                pick[some] = (whole / scale[:, None])[better]
                weights[some[:, None], group] = whole[better][:, group].astype(np.uint8)
                done[some[value[better] > 0]] = True
            # What rounding in float32 may have hidden, and what float64 would show
            near &= done | (bound + 0.75 * (hair - bound) > 0)
            closed &= done
            lowest = ~done & (bound < worst)
            worst[lowest] = bound[lowest]
            chosen[lowest] = pick[lowest]
        scores, points = self._scores(relaxed, np.flatnonzero(~closed), chosen, boxes)
        return Verdict(closed, near & ~closed, weights, scores, worst, points)

    def _below(
        self,
        relaxed: Relaxed,
        coefficients: Floats,
        constants: Floats,
        box: Host,
        keep: bool = False,
    ) -> Lowered:
        machine = self.net.machine
        return relaxed.rows_below(
            machine.place(coefficients), machine.place(constants), machine.indices(box), keep
        )

    def _mix(self, relaxed: Relaxed, boxes: Host, slopes: Floats, constant: Floats) -> Floats:
        """Bytes that weigh the rows of a group such that their sum has the best lower bound.

        By steps of exponentiated gradients on the linear functions that bound the rows.
        """
        host = self.net.machine.host
        centre, radius = (
            np.array(host(x), np.float64)[boxes] for x in (relaxed.centre, relaxed.radius)
        )
        middle = np.einsum("brd,bd->br", slopes, centre) + constant
        reach = slopes * radius[:, None]
        size = abs(middle).max(1) + abs(reach).sum(2).max(1) + 1e-300
        middle, reach = middle / size[:, None], reach / size[:, None, None]
        count = slopes.shape[1]
        weights = np.full((len(boxes), count), 1 / count)
        best, value = weights.copy(), np.full(len(boxes), -np.inf)
        for i in range(_ROUNDS):
            along = np.einsum("br,brd->bd", weights, reach)
            now = np.einsum("br,br->b", weights, middle) - abs(along).sum(1)
            better = now > value
            value[better], best[better] = now[better], weights[better]
            gradient = middle - np.einsum("brd,bd->br", reach, np.sign(along))
            weights = weights * np.exp(gradient * (4.0 / (1 + 0.3 * i)))
            weights /= weights.sum(1, keepdims=True)
        best = np.round(best / best.max(1, keepdims=True) * 255)
        return np.where(np.isfinite(best), best, 255)

    def _scores(
        self, relaxed: Relaxed, open_: Host, chosen: Floats, boxes: int
    ) -> tuple[Floats, Floats]:
        """How much of the relaxation's loss each input carries, and where the bound is attained."""
        machine, rows, net = self.net.machine, self.rows, self.net
        scores = np.zeros((boxes, net.inputs))
        points = np.zeros((boxes, net.inputs))
        if not len(open_):
            return scores, points
        some = chosen[open_]
        found = self._below(
            relaxed, some @ rows.coefficients, some @ rows.constants, open_, keep=True
        )
        xp, where = machine.xp, machine.indices(open_)
        total = 0.0
        for number, row in found.met.items():
            layer = relaxed.layers[number - 1]
            if layer.lines is None or layer.share is None:
                continue
            low, high = xp.take(layer.low, where), xp.take(layer.high, where)
            above = xp.take(layer.lines.above, where)
            negative = xp.minimum(row, 0.0)
            gap = xp.maximum(xp.minimum(-low, high), 0.0)
            loss = (row - negative) * gap - negative * above
            share = xp.take(layer.share, where)
            share = share / (xp.sum(share, 1, True) + 1e-30)
            total = total + xp.sum(share * xp.reshape(loss, (len(open_), 1, loss.shape[1])), 2)
        radius = np.array(machine.host(relaxed.radius), np.float64)[open_]
        centre = np.array(machine.host(relaxed.centre), np.float64)[open_]
        slopes = np.array(machine.host(found.slopes), np.float64)
        scores[open_] = (
            np.array(machine.host(total)) if not isinstance(total, float) else abs(slopes) * radius
        )
        points[open_] = centre - np.sign(slopes) * radius
        return scores, points


def search(
    bounding: Bounding,
    finishing: Bounding | None,
    low: Floats,
    high: Floats,
    refutes: Callable[[Floats], Floats | None],
    *,
    limit: float = float("inf"),
    batch: int = 512,
    most_open: int = 4_000_000,
    tell: Callable[[Progress], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """Divide a box until each part is proved, or a point is found that `refutes` names.

    `bounding` decides batches; `finishing`, if given, decides again in float64 what is near.
    """
    begin = clock()
    growing = Growing()
    number = len(bounding.rows.constants)
    first = np.zeros(1, np.int64)
    stack = [Boxes(first, first, low[None], high[None])]
    waiting, seen, share, worst = 1, 0, 0.0, -np.inf

    def progress() -> Progress:
        passed = max(clock() - begin, 1e-9)
        return Progress(share, waiting, seen, seen / passed, worst)

    try:
        while stack:
            if clock() - begin > limit:
                return Found(None, None, "time", progress())
            if waiting > most_open:
                return Found(None, None, "memory", progress())
            boxes = _pop(stack, batch)
            verdict = bounding(boxes.low, boxes.high)
            if finishing is not None and verdict.near.any():
                verdict = _again(finishing, boxes, verdict)
            seen += len(boxes.ids)
            closed = verdict.closed
            growing.close(boxes.ids[closed], verdict.weights[closed])
            share += float((0.5 ** boxes.depth[closed]).sum())
            open_ = np.flatnonzero(~closed)
            if len(open_):
                rest = boxes.take(open_)
                bad = refutes(np.concatenate([verdict.points[open_], (rest.low + rest.high) / 2]))
                if bad is not None:
                    return Found(None, bad, "", progress())
                worst = float(verdict.bound[open_].min())
                split = _halve(rest, verdict.scores[open_], growing, number)
                if split is None:
                    return Found(None, None, "resolution", progress())
                stack.append(split)
            waiting = sum(len(each.ids) for each in stack)
            tell(progress())
    except KeyboardInterrupt:
        return Found(None, None, "interrupted", progress())
    return Found(growing.tree(), None, "", progress())


def _pop(stack: list[Boxes], most: int) -> Boxes:
    """The boxes that were added last, which are the smallest."""
    parts: list[Boxes] = []
    room = most
    while stack and room:
        last = stack.pop()
        if len(last.ids) > room:
            stack.append(last.take(slice(0, len(last.ids) - room)))
            last = last.take(slice(len(last.ids) - room, None))
        parts.append(last)
        room -= len(last.ids)
    return Boxes(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def _again(finishing: Bounding, boxes: Boxes, verdict: Verdict) -> Verdict:
    near = np.flatnonzero(verdict.near)
    better = finishing(boxes.low[near], boxes.high[near])
    merged = []
    for old, new in zip(verdict, better, strict=True):
        old = old.copy()
        old[near] = new
        merged.append(old)
    return _verdict(merged)


def _verdict(parts: Iterable[Any]) -> Verdict:
    return Verdict(*parts)


def _halve(boxes: Boxes, scores: Floats, growing: Growing, rows: int) -> Boxes | None:
    """Both halves of each box along its input of the highest score; `None` if one cannot be."""
    count = np.arange(len(boxes.ids))
    middle = (boxes.low + boxes.high) / 2
    can = (middle > boxes.low) & (middle < boxes.high)
    scores = np.where(can, np.nan_to_num(scores, nan=0.0), -1.0)
    inputs = scores.argmax(1)
    if not can[count, inputs].all():
        return None
    first = growing.split(boxes.ids, inputs, rows)
    low, high = boxes.low.copy(), boxes.high.copy()
    at = middle[count, inputs]
    high[count, inputs] = at
    low[count, inputs] = at
    ids, depth = np.concatenate([first, first + 1]), np.tile(boxes.depth + 1, 2)
    return Boxes(ids, depth, np.concatenate([boxes.low, low]), np.concatenate([high, boxes.high]))
