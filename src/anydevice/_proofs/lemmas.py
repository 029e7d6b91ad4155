"""Better bounds of neurons over the whole box, for networks that are not halved along inputs.

Node by node, each undecided neuron is a problem of its own: `neurons.py` splits it into cases of
neurons before it, and splits its worst cases further. With these bounds, far fewer neurons of the
next node are undecided. The result is a lemma of the certificate: bounds, with the tree as proof.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anydevice._proofs.bounds import KnownBounds, LinearBounds, Prepared, end_at
from anydevice._proofs.checking.certificate import Lemma
from anydevice._proofs.neurons import Neurons, Problems, TreeBuilder

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_FIRST_STEPS, _STEPS = 20, 10
"""Steps of optimisation for a neuron, and for each case of another one."""

_ROWS, _MAX_PARTS, _BYTES = 256, 100_000, 9
"""The parts of a batch and of a node, and the bytes of sign, slope and multiplier of a neuron."""

_GAIN = 1e-3
"""The share of an interval's width that a lemma must remove to be worth its bytes."""


class Effort(NamedTuple):
    """The rounds of splits for each undecided neuron, and the cases of it that a round splits."""

    rounds: int
    width: int


class LemmaSet(NamedTuple):
    """Lemmas, and the bounds of neurons that they prove, by node."""

    lemmas: tuple[Lemma, ...]
    known: KnownBounds


class LemmaSearch:
    """Finds lemmas about a network over a box, which is a centre and a radius, each (1, inputs).

    The parts of a node take at most half of `memory` bytes. `tally` gets the number bounded.
    """

    def __init__(
        self,
        net: Prepared,
        fast: Prepared,
        box: tuple[Floats, Floats],
        memory: int = 2 << 30,
        tally: Callable[[int], None] = lambda parts: None,
    ) -> None:
        self.net, self.fast, self.box, self.memory, self.tally = net, fast, box, memory, tally
        self._sides: dict[int, _NeuronSides] = {}

    def run(self, effort: Effort, stop: Callable[[], bool]) -> LemmaSet:
        """Find lemmas about the nodes behind the first; `stop` is called before each batch."""
        lemmas: list[Lemma] = []
        known: dict[int, Any] = {}
        for number, step in enumerate(self.net.steps, 1):
            if step.function == "relu" and any(step.inputs) and not stop():
                cases = self._cases(number, known)
                if cases is not None:
                    cases.divide(effort, stop)
                    result = cases.lemma()
                    if result is not None:
                        lemma, known[number] = result
                        lemmas.append(lemma)
        return LemmaSet(tuple(lemmas), known)

    def _cases(self, number: int, known: KnownBounds) -> _NeuronSides | None:
        """Return the cases of the undecided neurons of a node; `None` if all are decided.

        The cases of an earlier run are continued if nothing new is known of the nodes before.
        """
        if not known and number in self._sides:
            return self._sides[number]
        net, fast = end_at(self.net, number), end_at(self.fast, number)
        relaxed = LinearBounds(net, *self.box, known=known)
        size = net.steps[-1].size
        rows = np.concatenate([np.eye(size), -np.eye(size)])
        plain = relaxed.rows_below(rows, np.zeros(2 * size), np.zeros(2 * size, np.int64)).low
        bounds = np.asarray(net.machine.host(plain), np.float64).reshape(2, size)
        undecided = np.flatnonzero((bounds < 0).all(0))
        if not len(undecided):
            return None
        cases = _NeuronSides(
            Neurons(relaxed, fast, self.tally, undecided), bounds, self.memory // 2
        )
        if not known:
            self._sides[number] = cases
        return cases


class _NeuronSides:
    """The cases of both sides of all undecided neurons of the last node of a network.

    `plain` are sound bounds of all its neurons and of their negatives. There is one branch for
    each side, the lower ones first, and `parts` are their leaves, which take at most `room` bytes.
    """

    def __init__(self, neurons: Neurons, plain: Floats, room: int) -> None:
        self.neurons, self.size, self.node = neurons, plain.shape[1], len(neurons.fast.steps)
        self.undecided = np.flatnonzero((plain < 0).all(0))
        self.plain = plain[:, self.undecided].ravel()
        count = len(self.undecided)
        one = np.eye(count)
        self.problems = Problems(
            np.zeros(2 * count, np.int64), np.concatenate([one, -one]), np.zeros(2 * count)
        )
        self.limit = min(_MAX_PARTS, room // (_BYTES * max(1, self.neurons.count)))
        self.rounds = 0
        parts, _ = self.neurons.start(self.problems, _FIRST_STEPS)
        self.count = len(parts.node)
        self.parts = parts.take(np.arange(self.count))
        # Sound bounds are lower by less than this.
        low = self.neurons.keep(self.problems, parts)
        self.margin = 1.5 * np.maximum(parts.bound - low, 0) + 1e-6 * (1 + np.abs(low))

    def lemma(self) -> tuple[Lemma, tuple[Floats, Floats]] | None:
        """Return a lemma and its bounds of all neurons; `None` if it is not worth its bytes."""
        bounds = self._sound()
        pairs = self.plain.reshape(2, -1)
        gained = bounds > self.plain - _GAIN * np.tile(pairs.sum(0), 2)
        # A neuron that is on or off needs only the bound that shows it.
        pairs = bounds.reshape(2, -1)
        gained &= ~((pairs[::-1] > 0) & (pairs <= 0)).ravel()
        which = np.flatnonzero(gained)
        if not len(which):
            return None
        builder = TreeBuilder(len(which), len(which), self.neurons.neurons)
        branches = {group: self.problems.branches[i] for group, i in enumerate(which)}
        builder.add_cases(0, np.full(len(which), 255, np.uint8), np.arange(len(which)), branches)
        side, neuron = np.divmod(which, len(self.undecided))
        sides = 2 * self.undecided[neuron] + side
        most = np.full(2 * self.size, np.inf)
        most[sides] = -bounds[which]
        lemma = Lemma(self.node, sides, -bounds[which], builder.tree())
        return lemma, (-most[::2], most[1::2])

    def divide(self, effort: Effort, stop: Callable[[], bool]) -> None:
        """Split the worst cases of each neuron, round by round."""
        while self.rounds < effort.rounds:
            self.rounds += 1
            worst = self._worst(effort.width)
            if not len(worst):
                return
            for start in range(0, len(worst), _ROWS):
                some = worst[start : start + _ROWS]
                if self.count + len(some) > self.limit or stop():
                    return
                self._divide(some)

    def _worst(self, width: int) -> Integers:
        """Return the parts with the lowest bounds of each neuron that is neither on nor off."""
        parts, count = self.parts, len(self.problems.box)
        lowest = np.full(count, np.inf)
        np.minimum.at(lowest, parts.problem[: self.count], parts.bound[: self.count])
        decided = ((lowest - self.margin).reshape(2, -1) > 0).any(0)
        bound, problem = parts.bound[: self.count], parts.problem[: self.count]
        can = (bound <= self.margin[problem]) & ~np.tile(decided, 2)[problem]
        can &= parts.neuron[: self.count] >= 0
        which = np.flatnonzero(can)
        which = which[np.lexsort((bound[which], problem[which]))]
        first = np.searchsorted(problem[which], problem[which])
        return which[np.arange(len(which)) - first < width]

    def _divide(self, which: Integers) -> None:
        halves, _ = self.neurons.halve(self.problems, self.parts.take(which), _STEPS)
        more = len(which)
        while self.count + more > len(self.parts.node):
            self.parts = self.parts.take(np.resize(np.arange(self.count), 2 * self.count + more))
        new = np.concatenate([which, self.count + np.arange(more)])
        arrays: Any = zip(self.parts[:-1], halves[:-1], strict=True)
        for mine, theirs in arrays:
            mine[new] = theirs
        for index, path in zip(new, halves.path, strict=True):
            self.parts.path[index] = path
        self.count += more

    def _sound(self) -> Floats:
        """Return sound bounds of all problems, each the least one of its parts."""
        bounds = np.full(len(self.problems.box), np.inf)
        for start in range(0, self.count, _ROWS):
            parts = self.parts.take(np.arange(start, min(start + _ROWS, self.count)))
            low = self.neurons.keep(self.problems, parts)
            np.minimum.at(bounds, parts.problem, np.where(np.isnan(low), -np.inf, low))
        # The checker rounds in another order.
        return np.asarray(bounds - 1e-7 * (1 + np.abs(bounds)))
