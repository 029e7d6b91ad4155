"""Branch and bound over boxes of inputs (as in Bunel et al., 2018, and β-CROWN, 2021).

The phases of `Search.run`, for one batch of open boxes after another:

1. Bound the outputs over each box (`bounds.py`), and close the boxes whose rows are proved.
2. Attack the boxes that stay open, from the points at which their bounds are attained.
3. Bound again in float64 the boxes that only the rounding of float32 leaves open.
4. Split on the signs of a few neurons (`neurons.py`). Networks of many inputs are split in no
   other way: lemmas about neurons (`lemmas.py`) and more cases follow in turn.
5. Halve each box that is still open along the input with the highest score.

Boxes live on the host in float64, in the numbers that a certificate names; an engine bounds them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anydevice._proofs.bounds import (
    FORWARD_INPUTS,
    KnownBounds,
    LinearBounds,
    Prepared,
    outward,
    padded_size,
)
from anydevice._proofs.checking.certificate import Tree
from anydevice._proofs.checking.network import Query
from anydevice._proofs.lemmas import Effort, LemmaSearch
from anydevice._proofs.machines import Host
from anydevice._proofs.neurons import Neurons, Problems, TreeBuilder, split_neurons

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Tally = Callable[[int], None]
"""A function that is called with the number of parts that were bounded."""

_ROUNDS = 40
"""Steps towards the best weights of the rows of a group."""

_PARTS = (1_000, 4_000, 16_000, 16_000, 16_000, 1 << 40)
_EFFORTS = (Effort(12, 4), Effort(30, 6), Effort(60, 8), Effort(120, 12), Effort(240, 16))
"""The limit of cases in each round, and the effort for lemmas after it."""

_LARGE, _PARTS_OF_LARGE = 1 << 21, 16_000
"""Above this number of weights, lemmas take minutes: the first tries have more parts."""


class OutOfTimeError(Exception):
    """The time of a search is up, while bounds or an attack were computed."""


class QueryRows(NamedTuple):
    """The rows of a query in float64, with constants rounded downward.

    `mixes` is whether their sums are exact. `trivial` are groups that are known to hold.
    """

    coefficients: Floats
    constants: Floats
    groups: tuple[Integers, ...]
    strict: npt.NDArray[np.bool_]
    mixes: bool
    trivial: frozenset[int] = frozenset()


def rows_of(query: Query) -> QueryRows:
    """Return the rows of a query for bounds in floating point."""
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
    return QueryRows(coefficients, constants, groups, np.array(query.strict), mixes)


class Boxes(NamedTuple):
    """Open boxes: their numbers in the tree, their depths, and the bounds of their inputs."""

    ids: Integers
    depth: Integers
    low: Floats
    high: Floats

    def take(self, which: Host | slice) -> Boxes:
        return Boxes(self.ids[which], self.depth[which], self.low[which], self.high[which])


class Progress(NamedTuple):
    """The progress of a search: the proved share of the box, and the number of open parts.

    The parts that are being bounded are open, too. `worst` is the lowest bound of the last batch.
    """

    share: float
    open: int
    boxes: int
    boxes_per_second: float
    worst: float


class SearchResult(NamedTuple):
    """The tree that proves the query, or the reason to stop; neither, if the attack refuted it."""

    tree: Tree | None
    reason: str
    progress: Progress


class Decision(NamedTuple):
    """The groups that bounds prove over each box of a batch, and how to go on with the others.

    `holds` (boxes, groups) is whether a group is proved, by `weights` (boxes, rows). For the others
    these are the best weights, and `bound` is the smallest bound. `scores` (boxes, inputs) is the
    share of each input in the relaxation's loss. `points` (boxes, rows + 1, inputs) are those at
    which bounds are attained. `near` are the boxes that float64 might close.
    """

    holds: npt.NDArray[np.bool_]
    near: npt.NDArray[np.bool_]
    weights: npt.NDArray[np.uint8]
    bound: Floats
    scores: Floats
    points: Floats
    relaxed: LinearBounds

    @property
    def closed(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.holds.all(1))


class BoxDecider:
    """Decides batches of boxes by the bounds of a network on a machine.

    `fast` is the network on the machine that optimises; `None` if neurons are not split.
    """

    def __init__(self, net: Prepared, rows: QueryRows, fast: Prepared | None = None) -> None:
        self.net, self.rows, self.fast = net, rows, fast

    def __call__(self, low: Floats, high: Floats, known: KnownBounds | None = None) -> Decision:
        count = len(low)
        if self.net.machine.pads:
            more = padded_size(count) - count
            low, high = (np.concatenate([x, np.repeat(x[:1], more, 0)]) for x in (low, high))
        with np.errstate(all="ignore"):
            box = outward(low, high, self.net.machine.dtype)
            relaxed = LinearBounds(self.net, *box, known=known)
            verdict = self._decide(relaxed, len(low))
        arrays: list[Any] = [*(array[:count] for array in verdict[:-1]), relaxed]
        return Decision(*arrays)

    def _decide(self, relaxed: LinearBounds, boxes: int) -> Decision:
        rows, host = self.rows, self._host
        number, every = len(rows.constants), np.arange(boxes)
        box = np.repeat(every, number)
        tiled = np.tile(rows.coefficients, (boxes, 1)), np.tile(rows.constants, boxes)
        lower = relaxed.rows_below(*tiled, box)
        low, nominal, constant = (
            host(x).reshape(boxes, number) for x in (lower.low, lower.nominal, lower.constant)
        )
        slopes = host(lower.slopes).reshape(boxes, number, -1)
        proved = np.where(rows.strict, low >= 0, low > 0)
        low = np.where(np.isnan(low), -np.inf, low)
        weights = np.zeros((boxes, number), np.uint8)
        holds, near = np.zeros((boxes, len(rows.groups)), bool), np.ones(boxes, bool)
        worst, chosen = np.full(boxes, np.inf), np.zeros((boxes, number))
        for g, group in enumerate(rows.groups):
            best = group[low[:, group].argmax(1)]
            done, bound, hair = proved[every, best], low[every, best], nominal[every, best]
            weights[every, best] = 255
            if g in rows.trivial:
                done = np.ones(boxes, bool)
            open_ = np.flatnonzero(~done)
            if len(open_) and len(group) > 1 and rows.mixes:
                mixed = np.zeros((len(open_), number))
                mixed[:, group] = self._mix(
                    relaxed, open_, slopes[open_][:, group], constant[open_][:, group]
                )
                again = relaxed.rows_below(mixed @ rows.coefficients, mixed @ rows.constants, open_)
                scale = mixed.max(1)
                value, other = host(again.low) / scale, host(again.nominal) / scale
                better = value > bound[open_]
                some = open_[better]
                bound[some], hair[some] = value[better], other[better]
                weights[some[:, None], group] = mixed[better][:, group].astype(np.uint8)
                done[some] = value[better] > 0
            # float64 might show what rounding in float32 hides
            near &= done | (bound + 0.75 * (hair - bound) > 0)
            holds[:, g] = done
            lowest = np.flatnonzero(~done & (bound < worst))
            worst[lowest] = bound[lowest]
            chosen[lowest] = 0
            chosen[lowest[:, None], group] = weights[lowest[:, None], group] / 255.0
        open_ = np.flatnonzero(~holds.all(1))
        scores = np.zeros((boxes, self.net.inputs))
        points = np.zeros((boxes, number + 1, self.net.inputs))
        centre, radius = host(relaxed.centre)[open_], host(relaxed.radius)[open_]
        scores[open_], last = self._scores(relaxed, open_, chosen[open_])
        ends = np.sign(np.concatenate([slopes[open_], last[:, None]], 1))
        points[open_] = centre[:, None] - ends * radius[:, None]
        return Decision(holds, near & ~holds.all(1), weights, worst, scores, points, relaxed)

    def _host(self, x: Any) -> Floats:
        return np.asarray(self.net.machine.host(x), np.float64)

    def _mix(self, relaxed: LinearBounds, boxes: Host, slopes: Floats, constant: Floats) -> Floats:
        """Return bytes that weigh the rows of a group such that their sum has the best lower bound.

        Takes steps of exponentiated gradients (Kivinen and Warmuth, 1997) on the linear functions
        that bound the rows.
        """
        centre, radius = self._host(relaxed.centre)[boxes], self._host(relaxed.radius)[boxes]
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

    def _scores(self, relaxed: LinearBounds, open_: Host, chosen: Floats) -> tuple[Floats, Floats]:
        """Return each input's share of the relaxation's loss, and the slopes of the bound."""
        machine, rows = self.net.machine, self.rows
        if not len(open_):
            return np.zeros((0, self.net.inputs)), np.zeros((0, self.net.inputs))
        sums = chosen @ rows.coefficients, chosen @ rows.constants
        lower = relaxed.rows_below(*sums, open_, keep=True)
        xp, where = machine.xp, machine.indices(open_)
        total: Any = None
        for number, row in lower.rows.items():
            layer = relaxed.layers[number - 1]
            if layer.lines is None or layer.share is None:
                continue
            low, high = xp.take(layer.low, where), xp.take(layer.high, where)
            negative = xp.minimum(row, 0.0)
            gap = xp.maximum(xp.minimum(-low, high), 0.0)
            loss = (row - negative) * gap - negative * xp.take(layer.lines.above, where)
            share = xp.take(layer.share, where)
            share = share / (xp.sum(share, 1, True) + 1e-30)
            part = xp.sum(share * xp.reshape(loss, (len(open_), 1, loss.shape[1])), 2)
            total = part if total is None else total + part
        slopes = self._host(lower.slopes)
        radius = self._host(relaxed.radius)[open_]
        return abs(slopes) * radius if total is None else self._host(total), slopes


class Search:
    """One search: the open boxes, the tree so far, and the progress.

    `finishing` decides near boxes in float64 if `decider` has only float32. `small` decides batches
    that are too small for an accelerator. `lemma_search` makes the search for lemmas about a box
    that is not halved along its inputs, from its centre and radius and the tally of parts.
    """

    def __init__(
        self,
        decider: BoxDecider,
        finishing: BoxDecider | None,
        refutes: Callable[[Floats], Floats | None],
        limits: SearchLimits,
        small: BoxDecider | None = None,
        lemma_search: Callable[[tuple[Floats, Floats], Tally], LemmaSearch] | None = None,
    ) -> None:
        self.decider, self.finishing, self.small = decider, finishing, small
        self.lemma_search = lemma_search
        self.refutes, self.limits = refutes, limits
        net, rows = decider.net, decider.rows
        neurons = sum(step.size for step in net.steps if step.function)
        self.builder = TreeBuilder(len(rows.groups), len(rows.constants), neurons)
        self.stack: list[Boxes] = []
        self._in_hand = 0  # open boxes of the batch that is being decided
        self.share, self.worst, self.boxes = 0.0, -np.inf, 0
        # Whether many inputs are halved, too: few of them vary, and no ReLU is split.
        self._halves_inputs = False
        self.point: Floats | None = None
        self.begin = limits.clock()

    def first(self, low: Floats, high: Floats) -> SearchResult:
        """Bound a box once, then attack it; the reason is "open" if neither decides it."""
        self.limits.keep()
        boxes = _whole(low, high)
        verdict = (self.small or self.decider)(boxes.low, boxes.high)
        self._in_hand = self.boxes = 1
        if verdict.closed.all():
            self._close(boxes, np.zeros(1, np.int64), verdict)
        else:
            self.worst = float(verdict.bound.min())
            middle = (boxes.low + boxes.high) / 2
            self.point = self.refutes(np.concatenate([verdict.points[0], middle]))
        now, tree = self.progress(), None if self._in_hand else self.builder.tree()
        self.limits.tell(now)
        return SearchResult(tree, "open" if self._in_hand else "", now)

    def run(self, low: Floats, high: Floats) -> SearchResult:
        """Search a box until it is proved or refuted, or a limit is reached."""
        self.stack.append(_whole(low, high))
        few = np.count_nonzero(high > low) <= FORWARD_INPUTS
        self._halves_inputs = bool(few and self.decider.fast is None)
        reason = ""
        try:
            while self.stack and not reason and self.point is None:
                reason = self._limit_reached() or self._step()
                self.limits.tell(self.progress())
        except KeyboardInterrupt:
            reason = "interrupted"
        except OutOfTimeError:
            reason = "time"
        proved = not self.stack and not reason and self.point is None
        return SearchResult(self.builder.tree() if proved else None, reason, self.progress())

    def progress(self) -> Progress:
        seconds = max(self.limits.clock() - self.begin, 1e-9)
        open_ = self._in_hand + sum(len(batch.ids) for batch in self.stack)
        return Progress(self.share, open_, self.boxes, self.boxes / seconds, self.worst)

    def _count(self, parts: int) -> None:
        self.boxes += parts

    def _must_stop(self) -> bool:
        """Report the progress; whether a limit is reached."""
        self.limits.tell(self.progress())
        return bool(self._limit_reached())

    def _limit_reached(self) -> str:
        """Return "time" or "memory" if that limit is reached, else ""."""
        if self.limits.clock() > self.limits.until:
            return "time"
        waiting = sum(len(batch.ids) for batch in self.stack)
        size = waiting * (16 * self.decider.net.inputs + 16) + 40 * self.builder.nodes
        return "memory" if size > self.limits.memory else ""

    def _step(self) -> str:
        """Decide one batch, and halve the boxes that stay open; return a reason to stop, or ""."""
        boxes = _pop(self.stack, self.limits.batch)
        self._in_hand = len(boxes.ids)
        self._count(self._in_hand)
        few = self.small is not None and len(boxes.ids) < self.limits.few
        open_, scores = self._settle(self.small if few and self.small else self.decider, boxes)
        if self.point is not None or not len(open_.ids):
            return ""
        if self.decider.net.linear == 0 and not self._halves_inputs:
            return self._limit_reached() or "resolution"
        halves = _halve(open_, scores, self.builder)
        if halves is None:
            return "resolution"
        self.stack.append(halves)
        self._in_hand = 0
        return ""

    def _settle(self, decider: BoxDecider, boxes: Boxes) -> tuple[Boxes, Floats]:
        """Close boxes by bounds and cases; return the open boxes, with scores of their inputs."""
        verdict = decider(boxes.low, boxes.high)
        closed = verdict.closed
        self._close(boxes, np.flatnonzero(closed), verdict)
        again = np.zeros(len(closed), bool)
        scores = verdict.scores
        if decider is self.decider and self.finishing is not None:
            again = verdict.near & ~closed
        open_ = np.flatnonzero(~closed & ~again)
        if len(open_):
            self.worst = float(verdict.bound[open_].min())
            middles = (boxes.low[open_] + boxes.high[open_]) / 2
            ends = verdict.points[open_].reshape(-1, middles.shape[1])
            self.point = self.refutes(np.concatenate([ends, middles]))
            patient = decider.net.linear and self.boxes < self.limits.patience
            if self.point is None and decider.fast is not None and not patient:
                open_ = self._by_neurons(decider, boxes, open_, verdict)
        rest, rest_scores = boxes.take(open_), scores[open_]
        if again.any() and self.finishing is not None and self.point is None:
            more, more_scores = self._settle(self.finishing, boxes.take(np.flatnonzero(again)))
            rest = Boxes(*(np.concatenate(pair) for pair in zip(rest, more, strict=True)))
            rest_scores = np.concatenate([rest_scores, more_scores])
        return rest, rest_scores

    def _close(self, boxes: Boxes, which: Host, verdict: Decision) -> None:
        self.builder.close(boxes.ids[which], verdict.weights[which])
        self.share += float((0.5 ** boxes.depth[which]).sum())
        self._in_hand -= len(which)

    def _by_neurons(
        self, decider: BoxDecider, boxes: Boxes, open_: Host, verdict: Decision
    ) -> Host:
        """Close boxes by cases of neurons, with lemmas between; return the open boxes."""
        if decider.net.linear or self.lemma_search is None:
            return self._split_neurons(decider, boxes, open_, verdict)
        box = outward(boxes.low, boxes.high, "float64")
        lemma_search = self.lemma_search(box, self._count)
        least = _PARTS_OF_LARGE if decider.net.weights > _LARGE else 0
        for parts, effort in zip(_PARTS, (*_EFFORTS, None), strict=True):
            open_ = self._split_neurons(decider, boxes, open_, verdict, max(parts, least))
            if effort is None or not len(open_) or self.point is not None or self._limit_reached():
                break
            lemma_set = lemma_search.run(effort, self._must_stop)
            self.builder.lemmas = lemma_set.lemmas
            verdict = decider(boxes.low, boxes.high, lemma_set.known)
            self.worst = float(verdict.bound.min())
            if verdict.closed.all():
                self._close(boxes, open_, verdict)
                return open_[:0]
        return open_

    def _split_neurons(
        self,
        decider: BoxDecider,
        boxes: Boxes,
        open_: Host,
        verdict: Decision,
        parts: int = 1 << 40,
    ) -> Host:
        """Close boxes by at most `parts` cases of neurons; return the open boxes."""
        rows, limits = decider.rows, self.limits
        alone = decider.net.linear == 0
        assert decider.fast is not None
        neurons = Neurons(verdict.relaxed, decider.fast, self._count)
        undecided = ((neurons.low < 0) & (neurons.high > 0)).sum(1)
        tried = open_ if alone else open_[undecided[open_] <= limits.undecided]
        if not len(tried):
            return open_
        index, group = np.nonzero(~verdict.holds[tried])
        group_of_row = np.zeros(len(rows.constants), np.int64)
        for number, its_rows in enumerate(rows.groups):
            group_of_row[its_rows] = number
        box = tried[index]
        weights = np.where(group_of_row == group[:, None], verdict.weights[box], 0) / 255.0
        problems = Problems(box, weights @ rows.coefficients, weights @ rows.constants)
        before = self.boxes
        self.point = split_neurons(
            neurons,
            problems,
            lambda: self._must_stop() or self.boxes - before > parts,
            self.refutes,
            limit=1 << 40 if alone else limits.cases,
            batch=limits.cases_batch,
            first_steps=30 if alone else 10,
            steps=12 if alone else 8,
        )
        failed = set(open_.tolist()) - set(tried.tolist())
        failed |= {int(b) for b, branch in zip(box, problems.branches, strict=True) if branch.open}
        for b in tried.tolist():
            if b not in failed:
                mine = np.flatnonzero(box == b)
                by_group = {int(group[i]): problems.branches[i] for i in mine}
                self.builder.add_cases(
                    int(boxes.ids[b]), verdict.weights[b], group_of_row, by_group
                )
                self.share += 0.5 ** float(boxes.depth[b])
                self._in_hand -= 1
        return np.array(sorted(failed), np.int64)


class SearchLimits(NamedTuple):
    """The limits of a search: the end on its clock, bytes, and the sizes of batches.

    Fewer than `few` boxes are not worth an accelerator. Cases of neurons are tried after `patience`
    boxes if at most `undecided` neurons are neither on nor off, and given up beyond `cases` open
    ones. `tell` gets the progress.
    """

    until: float = float("inf")
    memory: int = 2 << 30
    batch: int = 512
    few: int = 1024
    patience: int = 2_000
    cases: int = 3
    cases_batch: int = 1024
    undecided: int = 60
    tell: Callable[[Progress], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic

    def keep(self) -> None:
        """Raise `OutOfTimeError` if the time is up."""
        if self.clock() > self.until:
            raise OutOfTimeError


def _whole(low: Floats, high: Floats) -> Boxes:
    """Return the box at the root of a tree."""
    root = np.zeros(1, np.int64)
    return Boxes(root, root, low[None], high[None])


def _pop(stack: list[Boxes], limit: int) -> Boxes:
    """Pop the boxes that were added last, which are the smallest."""
    parts: list[Boxes] = []
    room = limit
    while stack and room:
        last = stack.pop()
        if len(last.ids) > room:
            stack.append(last.take(slice(0, len(last.ids) - room)))
            last = last.take(slice(len(last.ids) - room, None))
        parts.append(last)
        room -= len(last.ids)
    return Boxes(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _halve(boxes: Boxes, scores: Floats, builder: TreeBuilder) -> Boxes | None:
    """Halve each box along its input of the highest score; `None` if one has no midpoint."""
    count = np.arange(len(boxes.ids))
    middle = (boxes.low + boxes.high) / 2
    can = (middle > boxes.low) & (middle < boxes.high)
    scores = np.where(can, np.nan_to_num(scores, nan=0.0), -1.0)
    inputs = scores.argmax(1)
    if not can[count, inputs].all():
        return None
    first = builder.split(boxes.ids, inputs)
    low, high = boxes.low.copy(), boxes.high.copy()
    high[count, inputs] = low[count, inputs] = middle[count, inputs]
    ids, depth = np.concatenate([first, first + 1]), np.tile(boxes.depth + 1, 2)
    return Boxes(ids, depth, np.concatenate([boxes.low, low]), np.concatenate([high, boxes.high]))
