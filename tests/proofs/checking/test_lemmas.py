"""Lemmas, bounds of neurons that a certificate proves first: wrong ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from anydevice._proofs.checking.bounds import SoundNetwork
from anydevice._proofs.checking.certificate import LEAF, Lemma, Tree, read_certificate
from anydevice._proofs.checking.checker import check, refused, verdicts
from anydevice._proofs.checking.network import FormatError, Network, Node, RefusedError
from tests.comparing import assert_same_bits, assert_same_integers
from tests.proofs.checking.theorems import certificate, dense, executed, leaf_tree, proved, query

NETWORK = dense((3, 8, 8, 2))
BOX = ([-1] * 3, [1] * 3)
POINTS = np.random.default_rng(0).uniform(-1, 1, (50_000, 3))
BARE = NETWORK._replace(nodes=(NETWORK.nodes[0], NETWORK.nodes[1]._replace(function="")))
VALUES = executed(BARE, POINTS)
"""The second node before its function, at points of the box."""
SIDES = np.arange(16)
MOST = np.stack([-VALUES.min(0), VALUES.max(0)], 1).ravel()
"""The maxima of the negatives and of the values of its neurons, by side."""


def lemma(slack: float = 0.2) -> Lemma:
    """True bounds of all neurons of the second node, by halving the inputs."""
    made = Lemma(2, SIDES, MOST + slack, leaf_tree(np.zeros((1, 16))))
    ending, question = made.theorem(NETWORK, query(*BOX, np.eye(2), [0, 0]))
    return made._replace(tree=proved(ending, question))


LEMMA = lemma()
LEAF_ALONE = leaf_tree([[255, 255]])
WITH = LEAF_ALONE._replace(lemmas=(LEMMA,))


def least(tree: Tree, row: Any = (1, 0)) -> float:
    """The bound of a leaf that is the whole box."""
    question = query(*BOX, [row], [0.0])
    one = tree._replace(weights=tree.weights[:, :1])
    found = list(verdicts(SoundNetwork(NETWORK, "real"), question, one, {}))
    return float(found[0][1][0]) / 255


ROWS = ((1, 0), (0, -1))
BETWEEN = query(*BOX, ROWS, [-(least(WITH, row) + least(LEAF_ALONE, row)) / 2 for row in ROWS])
"""A query that bounds prove with the lemma, and not without it."""
GOOD = certificate(NETWORK, [BETWEEN], [WITH])


def test_a_lemma_proves_what_bounds_alone_do_not() -> None:
    assert refused(NETWORK, BETWEEN, LEAF_ALONE, "real") == [0]
    assert refused(NETWORK, BETWEEN, WITH, "real") == []
    again = read_certificate(GOOD.to_bytes())
    assert check(NETWORK, [BETWEEN], again) == 1
    kept = again.trees[0].lemmas[0]
    assert_same_integers(kept.sides, SIDES)
    assert_same_bits(kept.bounds, LEMMA.bounds, because="a file keeps them")
    assert kept.tree.leaves == LEMMA.tree.leaves > 10


def changed(**fields: Any) -> Lemma:
    return LEMMA._replace(**fields)


def tree(**fields: Any) -> Lemma:
    return LEMMA._replace(tree=LEMMA.tree._replace(**fields))


def lowered(side: int) -> Lemma:
    """One bound that is just not true."""
    bounds = LEMMA.bounds.copy()
    bounds[side] = MOST[side] - 1e-6
    return changed(bounds=bounds)


FAULTS: dict[str, Callable[[], Lemma]] = {
    "a bound from below that is not true": lambda: lowered(0),
    "a bound from above that is not true": lambda: lowered(1),
    "bounds of another neuron": lambda: changed(sides=np.roll(SIDES, 2)),
    "bounds of the other side": lambda: changed(sides=SIDES ^ 1),
    "bounds of another node": lambda: changed(node=1),
    "bounds of the inputs": lambda: changed(node=0),
    "bounds of a node before the first": lambda: changed(node=-1),
    "bounds of a node that is not there": lambda: changed(node=9),
    "a node that is no number": lambda: changed(node="2"),
    "a neuron that is not there": lambda: changed(sides=SIDES + 2),
    "a neuron before the first": lambda: changed(sides=SIDES - 2),
    "no neurons": lambda: changed(sides=SIDES[:0], bounds=MOST[:0]),
    "a bound less": lambda: changed(bounds=LEMMA.bounds[1:]),
    "a bound that is NaN": lambda: changed(bounds=LEMMA.bounds * np.nan),
    "a bound that is -infinite": lambda: changed(bounds=LEMMA.bounds * 0 - np.inf),
    "a bound that is too large": lambda: changed(bounds=LEMMA.bounds * 0 + 1e260),
    "a bound that is too small": lambda: changed(bounds=LEMMA.bounds * 0 + 1e-260),
    "a leaf in place of the tree": lambda: changed(tree=leaf_tree(np.full((1, 16), 255))),
    "a step less": lambda: tree(steps=LEMMA.tree.steps[:-1]),
    "a step more": lambda: tree(steps=np.append(LEMMA.tree.steps, LEAF)),
    "no weights": lambda: tree(weights=LEMMA.tree.weights * 0),
    "a row of weights less": lambda: tree(weights=LEMMA.tree.weights[:, 1:]),
    "slopes of another network": lambda: tree(slopes=np.zeros((1, 16), np.uint8)),
    "a multiplier without a case": lambda: tree(multipliers=np.ones(1, np.float16)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lemma_with_a_fault_is_refused(fault: str) -> None:
    bad = WITH._replace(lemmas=(FAULTS[fault](),))
    with pytest.raises(RefusedError):
        check(NETWORK, [BETWEEN], certificate(NETWORK, [BETWEEN], [bad]))


def test_a_refused_lemma_is_named() -> None:
    bad = WITH._replace(lemmas=(LEMMA, lowered(3)))
    with pytest.raises(RefusedError, match=r"leaf \d+ of lemma 2 is not proved") as refusal:
        check(NETWORK, [BETWEEN], certificate(NETWORK, [BETWEEN], [bad]))
    assert refusal.value.leaf == "lemma 2"


def test_a_lemma_holds_for_its_own_query_alone() -> None:
    """A bound over a small box does not hold over a larger one."""
    inner = query([0] * 3, [0.01] * 3, ROWS, [9, 9])
    bare = executed(BARE, np.random.default_rng(1).uniform(0, 0.01, (9, 3)))
    most = np.stack([-bare.min(0), bare.max(0)], 1).ravel() + 0.2
    made = Lemma(2, SIDES, most, leaf_tree(np.full((1, 16), 255)))
    small = LEAF_ALONE._replace(lemmas=(made,))
    assert refused(NETWORK, inner, small, "real") == []
    both = certificate(NETWORK, [inner, BETWEEN], [small, LEAF_ALONE])
    with pytest.raises(RefusedError, match="query 2"):
        check(NETWORK, [inner, BETWEEN], both)


def test_a_lemma_of_real_arithmetic_is_none_of_float32() -> None:
    """The difference of two large numbers is 0, and in float32 whatever they are rounded by."""
    copies, difference = np.ones((2, 1)), np.array([[1e7, -1e7]])
    network = Network(
        1,
        (
            Node((0,), (copies,), np.zeros(2), "relu"),
            Node((1,), (difference,), np.zeros(1), "relu", 3),
            Node((2,), (np.ones((1, 1)),), np.zeros(1), "", 2),
        ),
    )
    question = query([1], [2], [[-1]], [2])
    made = Lemma(2, np.array([1]), np.array([1.0]), leaf_tree([[255]]))
    with_it = [leaf_tree([[255]])._replace(lemmas=(made,))]
    assert check(network, [question], certificate(network, [question], with_it)) == 1
    with pytest.raises(RefusedError, match="lemma 1"):
        check(network, [question], certificate(network, [question], with_it, "float32"))


def test_no_lemma_proves_a_false_theorem() -> None:
    """Whatever it claims, by whatever slopes, cases and multipliers."""
    random = np.random.default_rng(0)
    outputs = executed(NETWORK, POINTS).min(0)
    false = query(*BOX, np.eye(2), -outputs - 0.01)
    for _ in range(40):
        claim = MOST + random.uniform(-1, 0.5, 16) * random.choice([0.1, 1.0, 10.0])
        claim = np.where(random.random(16) < 0.5, claim, MOST + 0.2)
        cases = [int(each) for each in random.integers(3, 11, 2)]
        leaves = leaf_tree(
            random.integers(1, 256, (3, 16)), [cases[0], LEAF, cases[1], LEAF, LEAF]
        )._replace(
            slopes_of=random.integers(-1, 2, 3),
            slopes=random.integers(0, 256, (2, 8)).astype(np.uint8),
            multipliers=random.exponential(0.3, 5).astype(np.float16),
        )
        which = leaves if random.random() < 0.5 else LEMMA.tree
        bad = WITH._replace(lemmas=(changed(bounds=claim, tree=which),))
        with pytest.raises(RefusedError):
            check(NETWORK, [false], certificate(NETWORK, [false], [bad]))


@pytest.mark.parametrize("cut", [0.2, 0.5, 0.8, 0.999])
def test_a_damaged_lemma_is_an_error(cut: float) -> None:
    whole = GOOD.to_bytes()
    with pytest.raises(FormatError):
        read_certificate(whole[: int(len(whole) * cut)])


def test_slopes_and_multipliers_of_lemmas_never_make_a_bound_wrong() -> None:
    """The bounds of a node by cases hold at every point, with whatever bytes a certificate has."""
    random = np.random.default_rng(1)
    question = query(*BOX, np.eye(2), [0, 0])
    for _ in range(40):
        made = changed(bounds=np.zeros(16))
        ending, theorem = made.theorem(NETWORK, question)
        count = int(random.integers(1, 3))
        steps = [3 + int(random.integers(8)), LEAF, LEAF] if count == 2 else [LEAF]
        weights = np.zeros((count, 16), np.uint8)
        side = int(random.integers(16))
        weights[:, side] = 255
        one = theorem._replace(
            coefficients=theorem.coefficients[side : side + 1],
            constants=theorem.constants[:1],
            group=(0,),
            strict=(False,),
        )
        cases = leaf_tree(weights[:, side : side + 1], steps)._replace(
            slopes_of=np.zeros(count, np.int64),
            slopes=random.integers(0, 256, (1, 8)).astype(np.uint8),
            multipliers=random.exponential(0.5, 2 * (count - 1)).astype(np.float16),
        )
        found = list(verdicts(SoundNetwork(ending, "real"), one, cases, {}))
        assert found[0][1].min() / 255 <= -MOST[side] + 1e-9
