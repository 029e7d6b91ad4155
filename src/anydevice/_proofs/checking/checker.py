"""Checks certificates: rebuilds each part of each box, and computes its bounds anew.

A certificate is refused if its hashes are wrong, if its tree does not cover the box, or if sound
bounds do not close a leaf. No certificate makes a false theorem pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from anydevice._proofs.checking.bounds import BATCH, U64, Bounds, SoundNetwork
from anydevice._proofs.checking.certificate import ARITHMETICS, EACH_GROUP, LEAF, Certificate, Tree
from anydevice._proofs.checking.exact import reaches
from anydevice._proofs.checking.network import Floats, Network, Query, RefusedError, root_box


class TreePart(NamedTuple):
    """A leaf for bounds to decide: a box, assumed signs of neurons, and a group.

    The group is -1 for all groups. Leaves that share a box share the object `low`.
    """

    low: Floats
    high: Floats
    cases: tuple[tuple[int, int], ...] = ()
    group: int = -1


def check(network: Network, queries: Sequence[Query], certificate: Certificate) -> int:
    """Return the number of leaves of a proof that holds; else `RefusedError` names a leaf."""
    if certificate.network != network.hash():
        raise RefusedError("it is about another network")
    hashes, trees = [query.hash() for query in queries], len(certificate.trees)
    if list(certificate.queries) != hashes or not len(hashes) == trees > 0:
        raise RefusedError("it is about other queries, that is another property or region")
    net = SoundNetwork(network, certificate.arithmetic, certificate.assumptions)
    if dict(certificate.assumptions) != net.assumptions:
        raise RefusedError(f"its assumptions are not those of this checker, {net.assumptions}")
    for number, (query, tree) in enumerate(zip(queries, certificate.trees, strict=True), 1):
        for start, bounds, closed in verdicts(net, query, tree, {}):
            for k in np.nonzero(~closed)[0][:1]:
                place = f"query {number}, leaf {start + k + 1} of {tree.leaves}"
                raise RefusedError(f"{place} is not proved: its bound is {bounds[k]:.3g}", place)
    return sum(tree.leaves for tree in certificate.trees)


def refused(network: Network, query: Query, tree: Tree, arithmetic: str) -> list[int]:
    """Return the numbers of the leaves, from 0, that bounds do not close."""
    batches = verdicts(SoundNetwork(network, arithmetic), query, tree, {})
    return [int(start + k) for start, _, closed in batches for k in np.nonzero(~closed)[0]]


def leaves_of(tree: Tree, root: TreePart, net: SoundNetwork, groups: int) -> list[TreePart]:
    """Return the leaves of a tree. They cover the root: both halves include the midpoint."""
    leaves, stack, inputs = list[TreePart](), [root], net.network.inputs
    for step in tree.steps.tolist():
        if not stack:
            raise RefusedError(f"a tree continues behind leaf {len(leaves)}, its last")
        part = stack.pop()
        if step == LEAF:
            leaves.append(part)
        elif 0 <= step < inputs:
            low, high = part.low.copy(), part.high.copy()
            low[step] = high[step] = (part.low[step] + part.high[step]) / 2
            stack += [part._replace(low=low), part._replace(low=part.low.copy(), high=high)]
        elif inputs <= step < inputs + net.neurons:
            stack += [part._replace(cases=(*part.cases, (step - inputs, s))) for s in (-1, 1)]
        elif step == EACH_GROUP and part.group < 0:
            stack += [part._replace(group=group) for group in range(groups)][::-1]
        else:
            raise RefusedError(f"a tree has an unknown step {step} behind leaf {len(leaves)}")
    if stack or not len(leaves) == len(tree.weights) == len(tree.slopes_of):
        raise RefusedError(f"a tree leaves a part uncovered behind leaf {len(leaves)}")
    return leaves


def verdicts(net: SoundNetwork, query: Query, tree: Tree, known: Any) -> Iterator[Any]:
    """Yield batches of leaves: the first number, their smallest bounds, and which are closed.

    First the lemmas of the tree are proved, each with the bounds of the lemmas before it. `known`
    has, by node, upper bounds of -value and value of each neuron.
    """
    for n, lemma in enumerate(tree.lemmas, 1):
        ending, question = lemma.theorem(net.network, query)
        below = SoundNetwork(ending, ARITHMETICS[net.float32], net.assumptions)
        for start, _, closed in verdicts(below, question, lemma.tree, known):
            for k in np.nonzero(~closed)[0][:1]:
                raise RefusedError(f"leaf {start + k + 1} of lemma {n} is not proved", f"lemma {n}")
        most = known.setdefault(lemma.node, np.full((2, ending.outputs), np.inf))
        np.minimum.at(most, (lemma.sides % 2, lemma.sides // 2), lemma.bounds)
    leaves = leaves_of(tree, TreePart(*root_box(query, net.network)), net, max(query.group) + 1)
    ends = np.cumsum([len(leaf.cases) for leaf in leaves])
    if not tree.fits(len(query.group), net.neurons, ends[-1]):
        raise RefusedError("a tree lacks weights, slopes, or multipliers that are at least 0")
    rows = np.array(query.coefficients, float), np.array(query.constants, float)
    number, bounds = dict[int, int](), None
    for start in range(0, len(leaves), BATCH):
        parts = leaves[start : start + BATCH]
        boxes = {id(leaf.low): (leaf.low, leaf.high) for leaf in parts}
        if bounds is None or list(number) != list(boxes):
            low, high = np.moveaxis(np.array(list(boxes.values())), 1, 0)
            bounds = net.bounds(low, high, known)
            number = {name: k for k, name in enumerate(boxes)}
        box, begin = [number[id(leaf.low)] for leaf in parts], ends[start] - len(parts[0].cases)
        yield start, *_decide(net, query, tree, bounds, (start, parts, np.array(box), begin, rows))


@np.errstate(all="ignore")
def _decide(net: SoundNetwork, query: Query, tree: Tree, bounds: Bounds, some: Any) -> Any:
    """Return the smallest bound of each leaf, and whether all its groups are closed."""
    start, parts, box, begin, (table, constants) = some
    group, strict, groups = np.array(query.group), np.array(query.strict), set(query.group)
    pairs = [(k, g) for k, p in enumerate(parts) for g in (groups if p.group < 0 else [p.group])]
    leaf, of_group = np.array(pairs).T
    lines, of, taken, empty = bounds.lines, box[leaf], None, np.zeros(len(parts), bool)
    sets = tree.slopes_of[start:][: len(parts)]
    cases = [(k, *case) for k, part in enumerate(parts) for case in part.cases]
    if cases or (sets >= 0).any():
        of_case, neuron, signs = np.array(cases, np.int64).reshape(-1, 3).T
        slopes, sign, much = (np.full((len(parts), net.neurons), n) for n in (np.nan, 0.0, 0.0))
        if len(tree.slopes):
            slopes[sets >= 0] = tree.slopes[sets[sets >= 0]] / 255
        sign[of_case, neuron] = signs
        np.add.at(much, (of_case, neuron), 255.0 * signs * tree.multipliers[begin:][: len(signs)])
        lines, of, taken = {}, leaf, much[leaf]
        for k, where in net.its.items():
            low, high = bounds.low[k][box], bounds.high[k][box]
            np.maximum(low, 0, out=low, where=sign[:, where] > 0)
            np.minimum(high, 0, out=high, where=sign[:, where] < 0)
            empty |= (low > high).any(1)
            lines[k] = net.lines(k, low, high, slopes[:, where])
    weights, last = tree.weights[start + leaf] * (group == of_group[:, None]), len(net.nodes)
    error = (weights @ np.abs(table) * bounds.size[last][box[leaf]]).sum(1)
    error = (net.e + 4 * len(group) * U64) * (error + weights @ np.abs(constants))
    rows, offset = {last: weights @ table}, weights @ constants
    lower, _ = net.back(rows, offset, error, bounds, box[leaf], lines, of, taken)
    lower[empty[leaf]] = np.inf
    equal = (strict | (weights == 0)).all(1) & (weights > 0).any(1)
    for n in np.nonzero(equal & (lower < 0))[0]:
        lower[n] = 0.0 if reaches(net, bounds, box[leaf[n]], query, weights[n]) else lower[n]
    closed, smallest = np.ones(len(parts), bool), np.full(len(parts), np.inf)
    np.logical_and.at(closed, leaf, (lower > 0) | ((lower >= 0) & equal))
    np.minimum.at(smallest, leaf, lower)
    return smallest, closed
