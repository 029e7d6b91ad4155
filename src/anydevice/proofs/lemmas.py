"""Better bounds of neurons over the whole box, for networks that are not divided by their inputs.

Node by node, what a neuron can be is divided by cases of neurons before it, with slopes and
multipliers of its own, and the worst case of each neuron is divided further. In the cases that are
left, far fewer neurons of the next node are undecided. What is found is a lemma for the
certificate: the numbers, and the tree that proves them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anydevice.proofs.bounds import Known, Prepared, Relaxed, until
from anydevice.proofs.checking.certificate import Lemma
from anydevice.proofs.neurons import Neurons, Problems
from anydevice.proofs.trees import Branch, Growing

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_FIRST_STEPS, _STEPS = 20, 10
"""Steps of optimisation for a neuron, and for each case of another one."""

_ROWS = 1024
_GAIN = 1e-3
"""Which part of the width of an interval a lemma must take away to be worth its bytes."""


class Effort(NamedTuple):
    """How often each undecided neuron is divided further, and how many of its cases at once."""

    rounds: int
    width: int


class Sharpened(NamedTuple):
    """Lemmas, and the bounds of neurons that they prove, by node."""

    lemmas: tuple[Lemma, ...]
    known: Known


def sharpen(
    net: Prepared, fast: Prepared, box: tuple[Floats, Floats], effort: Effort,
    stop: Callable[[], bool],
) -> Sharpened:  # fmt: skip
    """Lemmas about all nodes behind the first in turn, until `stop` says so.

    `box` is a centre and a radius, each (1, inputs).
    """
    lemmas: list[Lemma] = []
    known: dict[int, Any] = {}
    for number, step in enumerate(net.steps, 1):
        if step.function == "relu" and any(step.inputs) and not stop():
            found = _lemma(until(net, number), until(fast, number), box, known, effort, stop)
            if found is not None:
                lemma, known[number] = found
                lemmas.append(lemma)
    return Sharpened(tuple(lemmas), known)


def _lemma(
    net: Prepared, fast: Prepared, box: tuple[Floats, Floats], known: Known, effort: Effort,
    stop: Callable[[], bool],
) -> tuple[Lemma, tuple[Floats, Floats]] | None:  # fmt: skip
    """A lemma about the last node of a network, which ends before its function."""
    relaxed = Relaxed(net, *box, known=known)
    size = net.steps[-1].size
    rows = np.concatenate([np.eye(size), -np.eye(size)])
    every = np.zeros(2 * size, np.int64)
    machine = net.machine
    plain = relaxed.rows_below(
        machine.place(rows), machine.place(np.zeros(2 * size)), machine.indices(every)
    )
    before = np.maximum(np.asarray(machine.host(plain.low), np.float64), -np.inf)
    low, high = before[:size], -before[size:]
    undecided = np.flatnonzero((low < 0) & (high > 0))
    if not len(undecided):
        return None
    asked = np.concatenate([undecided, undecided + size])
    problems = Problems(every[: len(asked)], rows[asked][:, undecided], np.zeros(len(asked)))
    neurons = Neurons(relaxed, fast, undecided)
    cases = _Cases(neurons, problems)
    cases.divide(effort, stop)
    bounds = cases.sound()
    gained = bounds > before[asked] + _GAIN * (high - low)[asked % size]
    # What is on or off needs only the bound that says so.
    pairs = bounds.reshape(2, -1)
    gained &= ~((pairs[::-1] > 0) & (pairs <= 0)).ravel()
    if not gained.any():
        return None
    which = np.flatnonzero(gained)
    sides = 2 * (asked[which] % size) + asked[which] // size
    growing = Growing(len(which), len(which), neurons.neurons)
    branches = {group: cases.branches[i] for group, i in enumerate(which)}
    growing.cases(0, np.full(len(which), 255, np.uint8), np.arange(len(which)), branches)
    lemma = Lemma(len(net.steps), sides, -bounds[which], growing.tree())
    least, most = np.full(size, -np.inf), np.full(size, np.inf)
    upper = sides % 2 == 1
    least[sides[~upper] // 2] = -lemma.bounds[~upper]
    most[sides[upper] // 2] = lemma.bounds[upper]
    return lemma, (least, most)


class _Cases:
    """The cases of all problems: one branch for each, and the parts that they end with."""

    def __init__(self, neurons: Neurons, problems: Problems) -> None:
        self.neurons, self.problems = neurons, problems
        self.branches = [Branch() for _ in problems.box]
        parts, _ = neurons.start(problems, _FIRST_STEPS)
        self.count = len(parts.node)
        self.parts = parts.take(np.arange(self.count))

    def divide(self, effort: Effort, stop: Callable[[], bool]) -> None:
        for _ in range(effort.rounds):
            worst = self._worst(effort.width)
            if not len(worst) or stop():
                return
            for start in range(0, len(worst), _ROWS):
                self._divide(worst[start : start + _ROWS])

    def _worst(self, width: int) -> Integers:
        """The parts with the lowest bounds of each neuron that is neither on nor off."""
        parts, count = self.parts, len(self.branches)
        lowest = np.full(count, np.inf)
        np.minimum.at(lowest, parts.problem[: self.count], parts.bound[: self.count])
        decided = (lowest.reshape(2, -1) > 0).any(0)
        bound, problem = parts.bound[: self.count], parts.problem[: self.count]
        can = (bound <= 0) & ~np.tile(decided, 2)[problem]
        can &= parts.score[: self.count].max(1) > 0
        its = np.flatnonzero(can)
        its = its[np.lexsort((bound[its], problem[its]))]
        first = np.searchsorted(problem[its], problem[its])
        return its[np.arange(len(its)) - first < width]

    def _divide(self, which: Integers) -> None:
        halves, _ = self.neurons.halve(self.problems, self.parts.take(which), self.branches, _STEPS)
        more = len(which)
        while self.count + more > len(self.parts.node):
            self.parts = self.parts.take(np.resize(np.arange(self.count), 2 * self.count + more))
        new = np.concatenate([which, self.count + np.arange(more)])
        arrays: Any = zip(self.parts[:-1], halves[:-1], strict=True)
        for mine, theirs in arrays:
            mine[new] = theirs
        for place, path in zip(new, halves.path, strict=True):
            self.parts.path[place] = path
        self.count += more

    def sound(self) -> Floats:
        """Sound bounds of all problems, each the least one of its parts."""
        found = np.full(len(self.branches), np.inf)
        for start in range(0, self.count, _ROWS):
            parts = self.parts.take(np.arange(start, min(start + _ROWS, self.count)))
            low = self.neurons.keep(self.problems, parts, self.branches)
            np.minimum.at(found, parts.problem, np.where(np.isnan(low), -np.inf, low))
        # The checker's roundings are others.
        return np.asarray(found - 1e-7 * (1 + np.abs(found)))
