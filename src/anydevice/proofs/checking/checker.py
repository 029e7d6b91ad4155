"""Checks certificates: rebuilds each part of each box, and computes its bounds anew.

A certificate is wrong where its hashes are, where its tree does not cover the box, or where a leaf
is not closed by sound bounds. Whatever it says, no false theorem passes. This module imports NumPy
alone, and no code that finds proofs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from anydevice.proofs.checking.bounds import Bounding, Bounds, narrow
from anydevice.proofs.checking.certificate import EACH_GROUP, LEAF, TIGHTEN, Certificate, Tree
from anydevice.proofs.checking.network import (
    Floats,
    Network,
    Query,
    RefusedError,
    check_query,
    outward,
)

BATCH = 256
Cases = tuple[tuple[int, int], ...]
"""Neurons and the signs that they are assumed to have before their function."""


class Box(NamedTuple):
    """A part of the box of a query, with the cases under which its bounds are computed."""

    low: Floats
    high: Floats
    cases: Cases = ()


class Leaf(NamedTuple):
    """What bounds must decide: a box, cases of neurons, and a group, -1 for all."""

    box: Box
    cases: Cases
    group: int


class Rows(NamedTuple):
    """The rows of a query in float64, and what they are multiplied with."""

    coefficients: Floats
    constants: Floats
    group: np.ndarray[Any, Any]
    strict: np.ndarray[Any, Any]


def check(network: Network, queries: Sequence[Query], certificate: Certificate) -> int:
    """The number of leaves of a proof that holds; else `RefusedError`, which names a leaf."""
    if certificate.network != network.hash():
        raise RefusedError("it is about another network")
    if list(certificate.queries) != [query.hash() for query in queries] or not queries:
        raise RefusedError("it is about other queries")
    if len(certificate.trees) != len(queries):
        raise RefusedError(f"it has {len(certificate.trees)} trees for {len(queries)} queries")
    bounding, leaves = Bounding(network, certificate.arithmetic), 0
    if dict(certificate.assumptions) != bounding.assumptions:
        raise RefusedError(f"its assumptions are not those of this checker, {bounding.assumptions}")
    for number, (query, tree) in enumerate(zip(queries, certificate.trees, strict=True), 1):
        for start, bounds, closed in verdicts(bounding, query, tree):
            for k in np.nonzero(~closed)[0][:1]:
                place = f"query {number}, leaf {start + k + 1} of {tree.leaves}"
                raise RefusedError(f"{place} is not proved: its bound is {bounds[k]:.3g}", place)
            leaves += len(closed)
    return leaves


def refused(network: Network, query: Query, tree: Tree, arithmetic: str) -> list[int]:
    """The numbers of the leaves, from 0, that bounds do not close."""
    found = verdicts(Bounding(network, arithmetic), query, tree)
    return [int(start + k) for start, _, closed in found for k in np.nonzero(~closed)[0]]


def leaves_of(tree: Tree, root: Box, inputs: int, neurons: int, groups: int) -> list[Leaf]:
    """The leaves of a tree. They cover the root: two halves share the number that divides them."""
    found: list[Leaf] = []
    stack = [Leaf(root, (), -1)]
    for step in tree.steps.tolist():
        if not stack:
            raise RefusedError(f"a tree goes on behind leaf {len(found)}, its last")
        box, cases, group = part = stack.pop()
        if step == LEAF:
            found.append(part)
        elif 0 <= step < inputs:
            low, high = box.low.copy(), box.high.copy()
            low[step] = high[step] = (box.low[step] + box.high[step]) / 2
            stack.append(Leaf(Box(low, box.high, box.cases), cases, group))
            stack.append(Leaf(Box(box.low, high, box.cases), cases, group))
        elif inputs <= step < inputs + neurons:
            stack.append(Leaf(box, (*cases, (step - inputs, -1)), group))
            stack.append(Leaf(box, (*cases, (step - inputs, 1)), group))
        elif step == TIGHTEN:
            stack.append(Leaf(box._replace(cases=cases), cases, group))
        elif step == EACH_GROUP and group < 0:
            stack += [Leaf(box, cases, each) for each in range(groups)][::-1]
        else:
            raise RefusedError(f"a tree has an unknown step {step} behind leaf {len(found)}")
    if stack or not len(found) == len(tree.weights) == len(tree.slopes_of):
        raise RefusedError(f"a tree leaves a part uncovered behind leaf {len(found)}")
    return found


@np.errstate(all="ignore")
def verdicts(net: Bounding, query: Query, tree: Tree) -> Iterator[tuple[int, Floats, Any]]:
    """Of some leaves, from which one on: the smallest bound of each, and whether it is closed."""
    check_query(query, net.network)
    group, strict = np.array(query.group), np.array(query.strict)
    coefficients = np.array([[float(number) for number in row] for row in query.coefficients])
    constants = np.array([float(number) for number in query.constants])
    groups, root = max(query.group) + 1, Box(*outward(query.low, query.high))
    leaves = leaves_of(tree, root, net.network.inputs, net.neurons, groups)
    ends = np.cumsum([len(leaf.cases) for leaf in leaves])
    if tree.weights.shape[1] != len(group) or len(tree.multipliers) != ends[-1]:
        raise RefusedError("a tree has not as many weights or multipliers as it needs")
    if not ((tree.multipliers >= 0) & (tree.multipliers < np.inf)).all():
        raise RefusedError("a multiplier of a tree is negative or not finite")
    if len(tree.slopes) and tree.slopes.shape[1] != net.neurons:
        raise RefusedError("a tree has not a slope for each neuron")
    last, known = len(net.nodes), _Known(net, tree)
    for start in range(0, len(leaves), BATCH):
        parts = leaves[start : start + BATCH]
        pairs = [(k, g) for k, p in enumerate(parts) for g in range(groups) if p.group in (-1, g)]
        leaf, its = np.array(pairs).T
        weights = tree.weights[start + leaf] * (group == its[:, None])
        begin = ends[start] - len(parts[0].cases)
        bounds, box, lines, taken, empty = known.about(parts, start, begin)
        size = bounds.size[last][box[leaf]]
        error = net.e * (
            (weights @ np.abs(coefficients) * size).sum(1) + weights @ np.abs(constants)
        )
        rows, of = {last: weights @ coefficients}, box[leaf] if taken is None else leaf
        taken = None if taken is None else taken[leaf]
        lower, _ = net.back(rows, weights @ constants, error, bounds, box[leaf], lines, of, taken)
        lower[empty[leaf]] = np.inf
        equal = (strict | (weights == 0)).all(1) & (weights > 0).any(1)
        closed, smallest = np.ones(len(parts), bool), np.full(len(parts), np.inf)
        np.logical_and.at(closed, leaf, (lower > 0) | ((lower >= 0) & equal))
        np.minimum.at(smallest, leaf, lower)
        yield start, smallest, closed


class _Known:
    """Bounds of boxes, kept as long as leaves are about the same ones."""

    def __init__(self, net: Bounding, tree: Tree) -> None:
        self.net, self.tree = net, tree
        self.boxes: list[Box] = []
        self.bounds: Bounds

    def about(self, parts: list[Leaf], start: int, begin: int) -> tuple[Any, ...]:
        """Bounds, the box and lines of each leaf, what its multipliers take, if it is empty."""
        net, tree = self.net, self.tree
        boxes = list({id(leaf.box): leaf.box for leaf in parts}.values())
        if [id(box) for box in boxes] != [id(box) for box in self.boxes]:
            low, high = np.array([b.low for b in boxes]), np.array([b.high for b in boxes])
            sign = _signs([box.cases for box in boxes], net.neurons)
            self.boxes, self.bounds = boxes, net.bounds(low, high, sign, self._slopes)
        number = {id(box): k for k, box in enumerate(boxes)}
        box = np.array([number[id(leaf.box)] for leaf in parts])
        empty, sets = np.zeros(len(parts), bool), tree.slopes_of[start : start + len(parts)]
        sign = _signs([leaf.cases for leaf in parts], net.neurons)
        if sign is None and (sets < 0).all():
            return self.bounds, box, self.bounds.lines, None, empty
        slopes = np.full((len(parts), net.neurons), np.nan)
        slopes[sets >= 0] = tree.slopes[sets[sets >= 0]] / 255
        lines: dict[int, Any] = {}
        for k, its in net.its.items():
            low, high = self.bounds.low[k][box], self.bounds.high[k][box]
            if sign is not None:
                narrow(low, high, sign[:, its])
            empty |= (low > high).any(1)
            lines[k] = net.lines(k, low, high, slopes[:, its])
        taken = np.zeros((len(parts), net.neurons))
        for k, leaf in enumerate(parts):
            for neuron, its_sign in leaf.cases:
                taken[k, neuron] += 255.0 * its_sign * float(tree.multipliers[begin])
                begin += 1
        return self.bounds, box, lines, taken, empty

    def _slopes(self, k: int) -> tuple[Any, Any]:
        """The slopes of the certificate for the bounds of a node from below and from above."""
        if not len(self.tree.bound_slopes):
            return None, None
        sets = self.tree.bound_slopes[list(self.net.its).index(k)]
        below, above = (None if n < 0 else self.tree.slopes[n] / 255 for n in sets)
        return below, above


def _signs(cases: Sequence[Cases], neurons: int) -> Floats | None:
    if not any(cases):
        return None
    sign = np.zeros((len(cases), neurons))
    for k, each in enumerate(cases):
        for neuron, its_sign in each:
            sign[k, neuron] = its_sign
    return sign
