"""Certificates: what is true passes, and whatever is wrong with one, it is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from anydevice._proofs.checking.certificate import (
    EACH_GROUP,
    LEAF,
    Certificate,
    Tree,
    preorder,
    read_certificate,
)
from anydevice._proofs.checking.checker import check, refused
from anydevice._proofs.checking.network import FormatError, Network, Node, Query, RefusedError
from tests.proofs.checking.theorems import (
    certificate,
    dense,
    executed,
    leaf_tree,
    proved,
    query,
    residual,
)

NETWORK = dense((3, 8, 8, 2))
LEAST = executed(NETWORK, np.random.default_rng(0).uniform(-1, 1, (50_000, 3))).min(0)
TRUE = query([-1] * 3, [1] * 3, np.eye(2), 0.4 - LEAST)
"""Both outputs are greater than their least value - 0.4: two groups of one row."""
FALSE = query([-1] * 3, [1] * 3, np.eye(2), -LEAST - 0.01)
TREE = proved(NETWORK, TRUE)
GOOD = certificate(NETWORK, [TRUE], [TREE])


def test_a_proof_is_accepted_in_memory_and_from_a_file() -> None:
    assert check(NETWORK, [TRUE], GOOD) == TREE.leaves > 3
    again = read_certificate(GOOD._replace(carried=NETWORK).to_bytes())
    assert again.carried is not None
    assert check(again.carried, [TRUE], again) == TREE.leaves


@pytest.mark.parametrize("network", [NETWORK, residual(), dense((3, 6, 6, 2), 1, "tanh")])
@pytest.mark.parametrize("arithmetic", ["real", "float32"])
def test_small_theorems_are_proved(network: Network, arithmetic: str) -> None:
    least = executed(network, np.random.default_rng(0).uniform(-1, 1, (50_000, 3))).min(0)
    question = query([-1] * 3, [1] * 3, np.eye(2), 0.4 - least)
    tree = proved(network, question, arithmetic)
    assert check(network, [question], certificate(network, [question], [tree], arithmetic)) > 0


def changed(**fields: Any) -> Certificate:
    return GOOD._replace(**fields)


def tree(**fields: Any) -> Certificate:
    return changed(trees=(TREE._replace(**fields),))


def steps(*values: int) -> Certificate:
    count = sum(value == LEAF for value in values)
    rows = np.full((count, 2), 255, np.uint8)
    return changed(trees=(leaf_tree(rows, values),))


def with_weights(change: Callable[[Any], Any]) -> Certificate:
    weights = TREE.weights.copy()
    change(weights)
    return tree(weights=weights)


def swapped(at: int) -> Certificate:
    """Two steps of the tree in the other order."""
    order = TREE.steps.copy()
    order[[at, at + 1]] = order[[at + 1, at]]
    return tree(steps=order)


def first_leaf_pair_joined() -> Certificate:
    """The first two leaves that have one parent become one."""
    pairs = np.flatnonzero((TREE.steps[1:-1] == LEAF) & (TREE.steps[2:] == LEAF))
    at = next(k for k in pairs if TREE.steps[k] >= 0)
    leaf = int((TREE.steps[:at] == LEAF).sum())
    order = np.delete(TREE.steps, [at, at + 1])
    order[at] = LEAF
    return changed(trees=(leaf_tree(np.delete(TREE.weights, leaf, 0), order.tolist()),))


def cased(multipliers: Sequence[float], **fields: Any) -> Certificate:
    """A tree of two cases of a neuron, with a multiplier for each."""
    whole = leaf_tree([[255, 255]] * 2, [3, LEAF, LEAF])
    many = whole._replace(multipliers=np.array(multipliers, np.float16), **fields)
    return changed(trees=(many,))


def zero(weights: Any, rows: Any = slice(None), columns: Any = slice(None)) -> None:
    weights[rows, columns] = 0


FAULTS: dict[str, Callable[[], Certificate]] = {
    "another network": lambda: changed(network=dense((3, 8, 8, 2), 1).hash()),
    "no network": lambda: changed(network=""),
    "another query": lambda: changed(queries=(FALSE.hash(),)),
    "no query": lambda: changed(queries=()),
    "one query twice": lambda: changed(queries=GOOD.queries * 2, trees=(TREE, TREE)),
    "a query more": lambda: changed(queries=GOOD.queries * 2),
    "no tree": lambda: changed(trees=()),
    "a tree more": lambda: changed(trees=(TREE, TREE)),
    "no arithmetic": lambda: changed(arithmetic=""),
    "arithmetic of another kind": lambda: changed(arithmetic="float64"),
    "arithmetic in capitals": lambda: changed(arithmetic="Real"),
    "an assumption more": lambda: changed(assumptions={"exp": 2.0**-20}),
    "an error below 0": lambda: changed(assumptions={"sigmoid, absolute": -1.0}),
    "no steps": lambda: tree(steps=np.zeros(0, np.int64)),
    "a step less": lambda: tree(steps=TREE.steps[:-1]),
    "a step more": lambda: tree(steps=np.append(TREE.steps, LEAF)),
    "the first step less": lambda: tree(steps=TREE.steps[1:]),
    "a leaf in place of the tree": lambda: steps(LEAF),
    "one level": lambda: steps(0, LEAF, LEAF),
    "two leaves joined": first_leaf_pair_joined,
    "one half of the box": lambda: steps(0, LEAF),
    "steps in another order": lambda: swapped(0),
    "an input that is not there": lambda: steps(100, LEAF, LEAF),
    "an unknown step": lambda: steps(-7, LEAF),
    "each group, twice": lambda: steps(EACH_GROUP, EACH_GROUP, *[LEAF] * 4),
    "each group, one of them missing": lambda: steps(EACH_GROUP, LEAF),
    "no weights": lambda: with_weights(zero),
    "no weights of one leaf": lambda: with_weights(lambda w: zero(w, 0)),
    "no weights of one group": lambda: with_weights(lambda w: zero(w, slice(None), 1)),
    "weights of a leaf less": lambda: tree(weights=TREE.weights[1:]),
    "weights of a row less": lambda: tree(weights=TREE.weights[:, :1]),
    "weights of a row more": lambda: tree(weights=np.repeat(TREE.weights, 2, 1)),
    "slopes of a leaf less": lambda: tree(slopes_of=TREE.slopes_of[1:]),
    "slopes of a neuron less": lambda: tree(
        slopes=np.zeros((1, 15), np.uint8), slopes_of=0 * TREE.slopes_of
    ),
    "no multipliers": lambda: cased([]),
    "a multiplier less": lambda: cased([0.5]),
    "a multiplier more": lambda: cased([0.5, 0.5, 0.5]),
    "a negative multiplier": lambda: cased([-0.5, 0.5]),
    "an infinite multiplier": lambda: cased([np.inf, 0.5]),
    "a multiplier that is NaN": lambda: cased([np.nan, 0.5]),
    "huge multipliers": lambda: cased([60000.0, 60000.0]),
    "cases in place of halves": lambda: cased([0.0, 0.0]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refused(fault: str) -> None:
    assert len(FAULTS) >= 30
    with pytest.raises(RefusedError):
        check(NETWORK, [TRUE], FAULTS[fault]())


def altered(change: Callable[[list[Any]], None]) -> Network:
    nodes = list(NETWORK.nodes)
    change(nodes)
    return Network(3, tuple(nodes))


def _more_weight(nodes: list[Any]) -> None:
    weight = nodes[1].weights[0].copy()
    weight[0, 0] = np.nextafter(weight[0, 0], np.inf)
    nodes[1] = nodes[1]._replace(weights=(weight,))


NETWORKS: dict[str, Network] = {
    "one bit of one weight": altered(_more_weight),
    "another function": altered(lambda n: n.__setitem__(0, n[0]._replace(function=""))),
    "fewer roundings": altered(lambda n: n.__setitem__(0, n[0]._replace(roundings=0))),
    "inexact weights": altered(lambda n: n.__setitem__(0, n[0]._replace(inexact=1e-9))),
    "a node less": altered(lambda n: n.pop(1)),
}


@pytest.mark.parametrize("change", NETWORKS)
def test_a_proof_of_another_network_is_refused(change: str) -> None:
    with pytest.raises((RefusedError, FormatError)):
        check(NETWORKS[change], [TRUE], GOOD)


def test_other_queries_are_refused_also_with_their_own_hashes() -> None:
    wider = TRUE._replace(high=(*TRUE.high[:2], Fraction(3)))
    tighter = TRUE._replace(constants=tuple(c - Fraction(1, 2) for c in TRUE.constants))
    for other in (wider, tighter, FALSE):
        with pytest.raises(RefusedError, match="other queries"):
            check(NETWORK, [other], GOOD)
        with pytest.raises(RefusedError, match="leaf") as error:
            check(NETWORK, [other], changed(queries=(other.hash(),)))
        assert error.value.leaf.startswith("query 1, leaf ")


def test_a_refused_certificate_names_the_leaf() -> None:
    weights = TREE.weights.copy()
    weights[5] = 0
    with pytest.raises(RefusedError) as error:
        check(NETWORK, [TRUE], tree(weights=weights))
    assert error.value.leaf == f"query 1, leaf 6 of {TREE.leaves}"
    assert refused(NETWORK, TRUE, TREE._replace(weights=weights), "real") == [5]


def test_no_tree_proves_a_false_theorem() -> None:
    """Whatever the splits, the weights, the slopes and the multipliers are."""
    random = np.random.default_rng(0)
    for _ in range(60):
        many = grown(random, 3, 16, 2)
        with pytest.raises(RefusedError):
            check(NETWORK, [FALSE], certificate(NETWORK, [FALSE], [many]))


def grown(random: Any, inputs: int, neurons: int, rows: int, most: int = 30) -> Tree:
    """A tree that covers, of random splits and cases, with random weights."""
    order, first, made, cases = [0], [0], 0, {0: 0}
    while made < len(order):
        kind = random.choice([LEAF, 0, 1]) if len(order) < most else LEAF
        cases.setdefault(made, 0)
        order[made] = LEAF
        if kind != LEAF:
            order[made] = random.integers(inputs) if kind else inputs + random.integers(neurons)
            first[made] = len(order)
            cases |= dict.fromkeys((len(order), len(order) + 1), cases[made] + (1 - kind))
            order += [0, 0]
            first += [0, 0]
        made += 1
    where = preorder(np.array(order), np.array(first))
    leaves = [k for k in where if order[k] == LEAF]
    count = sum(int(cases[k]) for k in leaves)
    return Tree(
        np.array(order)[where],
        random.integers(0, 256, (len(leaves), rows)).astype(np.uint8),
        random.integers(-1, 3, len(leaves)),
        random.integers(0, 256, (3, neurons)).astype(np.uint8),
        random.exponential(0.3, count).astype(np.float16),
    )


def clipped(low: float, high: float) -> Network:
    """A layer, clipped to an interval, as it is lowered: high - relu(high - max(low, x))."""
    first, ones = NETWORK.nodes[0]._replace(function=""), np.ones(8)
    less = Node((1,), (ones,), np.full(8, -low), "relu")
    most = Node((3,), (-ones,), np.full(8, high), "relu")
    copies = [Node((2,), (ones,), np.full(8, low)), most, Node((4,), (-ones,), np.full(8, high))]
    return Network(3, (first, less, *copies))


@pytest.mark.parametrize("arithmetic", ["real", "float32"])
def test_bounds_that_are_reached_are_proved_where_rows_are_strict(arithmetic: str) -> None:
    """A ReLU is at least 0, not greater; a clip reaches both of its ends, and not more."""
    box, tree = ([-9] * 3, [9] * 3), leaf_tree([[255]])
    relu, row = Network(3, NETWORK.nodes[:2]), np.eye(8)[:1]
    assert not refused(relu, query(*box, row, [0.0], strict=True), tree, arithmetic)
    assert refused(relu, query(*box, row, [0.0]), tree, arithmetic)
    assert refused(relu, query(*box, row, [-1e-9], strict=True), tree, arithmetic)
    clip = clipped(0.1, 0.7)
    for sign, end in ((1, 0.1), (-1, 0.7)):
        question = query(*box, sign * row, [-sign * end], strict=True)
        assert not refused(clip, question, tree, arithmetic)
        closer = question._replace(constants=(question.constants[0] - Fraction(1, 10**40),))
        assert refused(clip, closer, tree, arithmetic)
        assert refused(clip, query(*box, sign * row, [-sign * end]), tree, arithmetic)


def test_rows_that_close_only_together() -> None:
    """One of y and 1 - y is positive; neither is everywhere, and their sum is."""
    network = Network(2, (Node((0,), (np.array([[1.0, 0.5]]),), np.zeros(1), "", 3),))
    question = query([-2, -2], [2, 2], [[1], [-1]], [0.0, 1.0], group=[0, 0])
    assert not refused(network, question, leaf_tree([[9, 9]]), "real")
    for weights in ([9, 0], [0, 9], [9, 1]):
        assert refused(network, question, leaf_tree([weights]), "real") == [0]


def test_groups_of_their_own() -> None:
    wide = steps(EACH_GROUP, LEAF, 0, LEAF, LEAF).trees[0]
    assert wide.leaves == 3
    narrow = TRUE._replace(low=(Fraction(0),) * 3, high=(Fraction(1, 64),) * 3)
    assert not refused(NETWORK, narrow, wide, "real")
    one = wide._replace(weights=np.array([[255, 0], [0, 255], [0, 255]], np.uint8))
    assert not refused(NETWORK, narrow, one, "real")
    other = wide._replace(weights=np.array([[0, 255], [0, 255], [0, 255]], np.uint8))
    assert refused(NETWORK, narrow, other, "real") == [0]


def test_cases_that_cannot_happen_are_closed() -> None:
    """A neuron that is never positive has only one case to be proved."""
    first = NETWORK.nodes[0]._replace(bias=np.full(8, -100.0))
    network = Network(3, (first, *NETWORK.nodes[1:]))
    question = query([-1] * 3, [1] * 3, [[1, 0]], [-1000.0])
    whole = leaf_tree([[255]] * 2, [3, LEAF, LEAF])
    many = whole._replace(multipliers=np.zeros(2, np.float16))
    assert refused(network, question, many, "real") == [1]


BAD_QUERIES: dict[str, Callable[[], Query]] = {
    "an input less": lambda: query([-1] * 2, [1] * 2, np.eye(2), [9, 9]),
    "an output more": lambda: query([-1] * 3, [1] * 3, np.eye(3), [9, 9, 9]),
    "an empty box": lambda: query([1] * 3, [-1] * 3, np.eye(2), [9, 9]),
    "no rows": lambda: query([-1] * 3, [1] * 3, [], []),
    "a group that is not there": lambda: query([-1] * 3, [1] * 3, np.eye(2), [9, 9], [0, 2]),
    "a constant less": lambda: query([-1] * 3, [1] * 3, np.eye(2), [9]),
    "a number beyond float64": lambda: TRUE._replace(constants=(Fraction(10) ** 400,) * 2),
}


@pytest.mark.parametrize("fault", BAD_QUERIES)
def test_bad_queries_are_errors(fault: str) -> None:
    with pytest.raises(FormatError):
        refused(NETWORK, BAD_QUERIES[fault](), leaf_tree([[255, 255]]), "real")
