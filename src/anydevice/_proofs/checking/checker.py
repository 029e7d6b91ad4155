"""Checks certificates: rebuilds each part of each box, and computes its bounds anew.

A certificate is refused if its hashes are wrong, if its tree does not cover the box, or if sound
bounds do not close a leaf. No certificate makes a false theorem pass. The bounds are CROWN's, in
float64 and moved outward:

`e` is twice γ_n of the longest sum (γ_n = n u / (1 - n u), Higham, 2002), so that the error of each
step is less than e * |coefficients| * v, where v = |W| H + |b| and H bounds the values that enter a
node. That holds for every order of summation. An execution of the network in float32 may differ
from the real one by γ_n * v at each node, which is added. A NaN bounds nothing, and stays NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from anydevice._proofs.checking import smooth
from anydevice._proofs.checking.certificate import (
    ARITHMETICS,
    EACH_GROUP,
    LEAF,
    Certificate,
    Tree,
    first_neurons,
)
from anydevice._proofs.checking.network import (
    Floats,
    Network,
    Query,
    RefusedError,
    check_network,
    root_box,
)

U64, U32, TINY, NORMAL = 2.0**-53, 2.0**-24, 1e-290, 2.0**-126
PAIRS, FORWARD, BATCH = 512, 64, 256
"""The rows of a batch, the largest number of inputs that have forms, the leaves of a batch."""

Forms = tuple[Floats, Floats]
"""Affine functions of coordinates in [-1, 1], one below a value and one above; constants last."""


class Bounds(NamedTuple):
    """Bounds over each box, by number of the node: intervals, lines, error of a step, and H."""

    center: Floats
    radius: Floats
    low: dict[int, Floats]
    high: dict[int, Floats]
    lines: dict[int, smooth.LinePair]
    error: dict[int, Floats]
    size: dict[int, Floats]


class SoundNetwork:
    """Bounds of a network in an arithmetic, with the errors that are assumed of functions."""

    def __init__(self, network: Network, arithmetic: str, given: Any = smooth.WIDEST) -> None:
        self.network, self.nodes = check_network(network), network.nodes
        first, self.neurons = first_neurons(network), sum(n.size for n in self.nodes if n.function)
        self.its = {k: slice(n, n + self.nodes[k - 1].size) for k, n in first.items()}
        fans = [sum(w.shape[-1] if w.ndim > 1 else 1 for w in n.weights) for n in self.nodes]
        widest, self.float32 = max(*fans, network.inputs, network.outputs), arithmetic == "float32"
        self.e, m = 2 * (2 * widest + 30) * U64, self.float32 / U64  # flushed: all is an error
        self.most, self.least = (smooth.LARGEST, NORMAL) if self.float32 else (np.inf, TINY)
        sizes = [[np.abs(w) for w in node.weights] for node in self.nodes]
        self.absolute = [[s * (1 + m * (s < NORMAL)) for s in stage] for stage in sizes]
        gammas = [node.roundings * U32 * self.float32 for node in self.nodes]
        if arithmetic not in ARITHMETICS or max(gammas) > 0.1 or self.e > 1e-6:
            raise RefusedError(f"bounds of this network in {arithmetic!r} arithmetic are not known")
        self.x = [g / (1 - g) + 2 * n.inexact for g, n in zip(gammas, self.nodes, strict=True)]
        self.under = [TINY + smooth.FLUSH * self.float32 * (n.roundings + 1) for n in self.nodes]
        self.assumptions = smooth.assumptions([n.function for n in self.nodes], self.float32, given)

    @np.errstate(all="ignore")
    def bounds(self, low: Floats, high: Floats, known: Any = None) -> Bounds:
        """Bound every node over each box; `known` bounds -values and values of some from above."""
        center, inputs = low / 2 + high / 2, np.arange(self.network.inputs)
        radius = np.maximum(high - center, center - low) * (1 + 8 * U64) + self.least
        size = np.where((s := np.abs(center) + radius) > self.most, np.inf, s)
        bounds = Bounds(center, radius, {}, {}, {}, {}, {0: size})
        forms: dict[int, Forms] = {0: (low[:, None] - self.least, high[:, None] + self.least)}
        if len(inputs) <= FORWARD:
            form = np.zeros((len(low), len(inputs) + 1, len(inputs)))
            form[:, inputs, inputs], form[:, -1] = radius, center
            forms[0] = (form, form)
        for k, node in enumerate(self.nodes, 1):
            forms[k] = self._affine(k, bounds, forms)
            if known and k in known:
                bounds.low[k] = np.maximum(bounds.low[k], -known[k][0])
                bounds.high[k] = np.minimum(bounds.high[k], known[k][1])
            if node.function:
                if any(node.inputs):
                    self._tighten(k, bounds, forms[k])
                bounds.lines[k] = lines = self.lines(k, bounds.low[k], bounds.high[k])
                forms[k] = lines.on_forms(*forms[k], bounds.low[k], bounds.high[k])
                bounds.size[k] = lines.size
        return bounds

    def lines(self, k: int, low: Floats, high: Floats, slopes: Any = np.nan) -> smooth.LinePair:
        """Return lines below and above the function of a node; NaN is for a slope to choose."""
        if (name := self.nodes[k - 1].function) != "relu":
            return smooth.lines(name, low, high, self.float32, self.assumptions)
        on, off = low >= 0, high <= 0
        above = np.clip(high / (high - low), 0, 1)
        ceiling = np.maximum(-above * low, (1 - above) * high) * (1 + 1e-14) + TINY
        ceiling, size = np.where(on | off, 0.0, ceiling), np.maximum(high, 0)
        below: Floats = np.where(np.isnan(slopes), high > -low, slopes)
        below, above = (np.where(on, 1.0, np.where(off, 0.0, slope)) for slope in (below, above))
        return smooth.LinePair(below, None, above, ceiling, size)

    def _affine(self, k: int, bounds: Bounds, forms: dict[int, Forms]) -> Forms:
        """Bound a node before its function, and return forms of its values."""
        node, e, v = self.nodes[k - 1], self.e, np.abs(self.nodes[k - 1].bias)
        mass, middle, half = v, np.zeros(1), np.zeros_like(forms[0][0][:, :, :1])
        for i, w, absolute in zip(node.inputs, node.weights, self.absolute[k - 1], strict=True):
            m, h = (forms[i][0] + forms[i][1]) / 2, (forms[i][1] - forms[i][0]) / 2
            v = v + _times(bounds.size[i], absolute)
            mass = mass + _times((np.abs(m) + np.abs(h)).sum(1), absolute)
            middle, half = middle + _times(m, w), half + _times(h, absolute)
        middle[:, -1] += node.bias
        v = np.where(v > self.most, np.inf, v)
        bounds.error[k] = (e + self.x[k - 1]) * v + self.under[k - 1]
        half[:, -1] += e * mass + bounds.error[k]
        lower, upper = middle - half, middle + half
        below, above = np.abs(lower[:, :-1]).sum(1), np.abs(upper[:, :-1]).sum(1)
        bounds.low[k] = lower[:, -1] - below - e * (np.abs(lower[:, -1]) + below) - TINY
        bounds.high[k] = upper[:, -1] + above + e * (np.abs(upper[:, -1]) + above) + TINY
        bounds.size[k] = np.maximum(np.abs(bounds.low[k]), np.abs(bounds.high[k]))
        return lower, upper

    def _tighten(self, k: int, bounds: Bounds, forms: Forms) -> None:
        """Bound the undecided neurons of a node again, by substituting back to the input."""
        node, low, high = self.nodes[k - 1], bounds.low[k], bounds.high[k]
        undecided = (low < 0) & (high > 0) if node.function == "relu" else low < high
        boxes, neurons = np.nonzero(undecided)
        for start in range(0, len(boxes), PAIRS):
            box, neuron = boxes[start : start + PAIRS], neurons[start : start + PAIRS]
            rows, error = dict[int, Floats](), bounds.error[k][box, neuron]
            for i, w in zip(node.inputs, node.weights, strict=True):
                row = w[neuron] if w.ndim > 1 else np.eye(node.size)[neuron] * w
                error = self._join(rows, i, row, error, bounds, box)
            for side, sign, form in zip((low, high), (1.0, -1.0), forms, strict=True):
                signed, bias = {i: sign * row for i, row in rows.items()}, sign * node.bias[neuron]
                bound, row = self.back(signed, bias, error, bounds, box, bounds.lines, box)
                better = bound > sign * side[box, neuron]
                b, n = box[better], neuron[better]
                side[b, n] = sign * bound[better]
                if form.shape[1] > 1:  # the function of this bound is a better form, too
                    form[b, :-1, n] = reach = sign * (row * bounds.radius[box])[better]
                    form[b, -1, n] = side[b, n] + sign * np.abs(reach).sum(1)

    def back(
        self, rows: dict[int, Floats], constant: Floats, error: Floats, bounds: Bounds, box: Any,
        lines: dict[int, smooth.LinePair], of: Any, taken: Floats | None = None,
    ) -> Forms:  # fmt: skip
        """Return lower bounds of rows @ values + constant - error in boxes `box`, and input rows.

        Lines are those of number `of`. `taken` times each neuron's argument is subtracted: a
        multiplier of the sign that it is assumed to have (β in β-CROWN).
        """
        e = self.e
        for k in (k for k in range(max(rows), 0, -1) if k in rows):
            row, node = rows.pop(k), self.nodes[k - 1]
            if node.function:
                row, shift, size = lines[k].through(row, of)
                error = error + e * (size + np.abs(constant))
                constant = constant + shift
            mass = np.abs(row)
            if taken is not None and node.function:  # only the difference is rounded once more
                row = row - taken[:, self.its[k]]
                mass = np.abs(row) + np.abs(taken[:, self.its[k]]) * (e / (e + self.x[k - 1]))
            before, constant = np.abs(constant), constant + row @ node.bias
            error = error * (1 + 1e-14) + e * (before + np.abs(constant))
            error += smooth.dot(mass, bounds.error[k][box])
            for i, w in zip(node.inputs, node.weights, strict=True):
                error = self._join(rows, i, _times(row, w.T), error, bounds, box)
        row, size = rows[0], np.abs(rows[0])
        error = error * (1 + 1e-12) + e * (smooth.dot(size, bounds.size[0][box]) + np.abs(constant))
        reach = smooth.dot(size, bounds.radius[box])
        return smooth.dot(row, bounds.center[box]) - reach + constant - error - TINY, row

    def _join(
        self, rows: dict[int, Floats], i: int, part: Floats, error: Floats, bounds: Bounds, box: Any
    ) -> Floats:
        """Add coefficients of a node to its coefficients so far, and return the error."""
        if i in rows:
            part = part + rows[i]
            error = error + self.e * smooth.dot(np.abs(part), bounds.size[i][box])
        rows[i] = part
        return error


def _times(values: Floats, weight: Floats) -> Floats:
    return values @ weight.T if weight.ndim > 1 else values * weight


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


_DEEPEST, _TERMS, _HUGE = 6, 2, Fraction(10) ** 400
Interval = tuple[Fraction, Fraction]


def reaches(net: SoundNetwork, bounds: Bounds, box: int, query: Query, weights: Floats) -> bool:
    """Whether the sum of the rows times the weights is at least 0, in rational numbers.

    Bounds in float64 are moved outward, so they never reach exactly 0, as the output of a ReLU
    does. These intervals do, for outputs that are sums of few terms, which every execution computes
    exactly.
    """
    total = Fraction(0)
    for weight, row, constant in zip(weights, query.coefficients, query.constants, strict=True):
        total += int(weight) * constant
        for j, coefficient in enumerate(row):
            if coefficient and weight:
                low, high = _interval(net, bounds, box, len(net.nodes), j, _DEEPEST)
                total += int(weight) * coefficient * (low if coefficient > 0 else high)
    return total >= 0


def _interval(net: SoundNetwork, bounds: Bounds, box: int, k: int, j: int, depth: int) -> Interval:
    """Return the interval of element j of node k, which float32 may flush to zero."""
    low, high = _exact_interval(net, bounds, box, k, j, depth)
    if net.float32:
        low = Fraction(0) if 0 < low < NORMAL else low
        high = Fraction(0) if -NORMAL < high < 0 else high
    return low, high


def _exact_interval(
    net: SoundNetwork, bounds: Bounds, box: int, k: int, j: int, depth: int
) -> Interval:
    """Return the interval before a flush, from float64 if a node is no sum of few terms."""
    if k == 0:
        center, radius = (Fraction(float(part[box, j])) for part in (bounds.center, bounds.radius))
        return center - radius, center + radius
    node = net.nodes[k - 1]
    known = [float(side[k][box, j]) for side in (bounds.low, bounds.high)]
    if not np.isfinite(known).all():
        return -_HUGE, _HUGE
    low, high = Fraction(known[0]), Fraction(known[1])
    if depth and not node.inexact and not (node.roundings and net.float32):
        sum_low = sum_high = Fraction(float(node.bias[j]))
        terms = [
            (i, int(m), float(row[m]))
            for i, w in zip(node.inputs, node.weights, strict=True)
            for row in [w[j] if w.ndim > 1 else np.where(np.arange(len(w)) == j, w, 0.0)]
            for m in np.flatnonzero(row)
        ]
        if len(terms) <= _TERMS:
            for i, m, weight in terms:
                ends = [
                    Fraction(weight) * end for end in _interval(net, bounds, box, i, m, depth - 1)
                ]
                sum_low, sum_high = sum_low + min(ends), sum_high + max(ends)
            low, high = max(low, sum_low), min(high, sum_high)
    if node.function == "relu":
        return max(low, Fraction(0)), max(high, Fraction(0))
    if node.function:
        size = float(bounds.size[k][box, j])
        return (-Fraction(size), Fraction(size)) if np.isfinite(size) else (-_HUGE, _HUGE)
    return low, high
