"""Better bounds of neurons: they hold, they decide more neurons, and they prove what was open."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest

from anydevice import proofs
from anydevice._proofs import search
from anydevice._proofs.bounds import LinearBounds, Prepared, outward, prepare
from anydevice._proofs.checking.checker import refused
from anydevice._proofs.checking.network import Network
from anydevice._proofs.lemmas import Effort, LemmaSearch, LemmaSet
from anydevice._proofs.machines import numpy_machine
from anydevice._proofs.prove import Theorem, prove_theorems
from anydevice._proofs.search import SearchLimits
from tests.proofs.checking.theorems import executed as outputs_at
from tests.proofs.checking.theorems import query
from tests.proofs.networks import exact_arguments, executed, network

INPUTS, WIDE = 60, 0.06
CENTRE = np.random.default_rng(5).uniform(-1, 1, INPUTS)
LOW, HIGH = CENTRE - WIDE, CENTRE + WIDE
NETWORKS = {
    "chain": network(INPUTS, 20, 20, 20, 3, seed=3),
    "residual": network(INPUTS, 16, 16, 8, seed=4, residual=True),
}


@cache
def found(name: str, arithmetic: str = "float32") -> tuple[Prepared, LinearBounds, LemmaSet]:
    net = prepare(NETWORKS[name], arithmetic, numpy_machine())
    fast = prepare(NETWORKS[name], arithmetic, numpy_machine("float32"))
    box = outward(LOW[None], HIGH[None], "float64")
    return (
        net,
        LinearBounds(net, *box),
        LemmaSearch(net, fast, box).run(Effort(8, 3), lambda: False),
    )


def undecided(net: LinearBounds) -> int:
    layers = [layer for layer in net.layers if layer.lines is not None]
    return sum(int(((layer.low < 0) & (layer.high > 0)).sum()) for layer in layers)


@pytest.mark.parametrize("name", NETWORKS)
def test_lemmas_decide_more_neurons_and_the_checker_proves_them(name: str) -> None:
    net, plain, sharp = found(name)
    better = LinearBounds(net, *outward(LOW[None], HIGH[None], "float64"), known=sharp.known)
    assert undecided(better) < undecided(plain)
    outputs = NETWORKS[name].outputs
    whole = query(LOW, HIGH, np.eye(outputs), [0] * outputs)
    ending, question = sharp.lemmas[0].theorem(NETWORKS[name], whole)
    assert refused(ending, question, sharp.lemmas[0].tree, "float32") == []


def arguments(name: str, x: Any, random: Any) -> list[Any]:
    """Return the arguments of each node: exactly, and in float32 of any order."""
    exact = exact_arguments(NETWORKS[name], [Fraction(float(each)) for each in x])
    return [exact, executed(NETWORKS[name], x, random)]


@pytest.mark.parametrize("name", NETWORKS)
def test_no_value_is_outside_of_what_is_known(name: str) -> None:
    random = np.random.default_rng(0)
    known = found(name)[2].known
    assert known
    closest = 1.0
    for k in range(30):
        x = np.where(random.random(INPUTS) < 0.5, LOW, HIGH) if k % 2 else random.uniform(LOW, HIGH)
        inside = (CENTRE + 0.9999 * (x - CENTRE)).astype(np.float32)
        for values in arguments(name, inside, random):
            for number, (least, most) in known.items():
                its = np.array([float(each) for each in values[number - 1]])
                assert (least <= its).all()
                assert (its <= most).all()
                both = np.isfinite(most - least)
                room = np.minimum(its - least, most - its)[both] / (most - least)[both]
                closest = min(closest, room.min(initial=1.0))
    assert closest < 0.3  # the bounds are no trivial ones


def claim(net: Network, share: float) -> Any:
    """Outputs are above a number between what they reach and what plain bounds show."""
    random = np.random.default_rng(1)
    points = np.where(random.random((4000, INPUTS)) < 0.5, LOW, HIGH)
    values = outputs_at(net, points)
    relaxed = found("chain")[1]
    low = relaxed.rows_below(np.eye(3), np.zeros(3), np.zeros(3, np.int64)).low
    return query(LOW, HIGH, np.eye(3), -(share * low + (1 - share) * values.min(0)))


def prove_share(share: float) -> proofs.Proof | proofs.Counterexample | proofs.Undecided:
    net = NETWORKS["chain"]
    theorem = Theorem(net, (claim(net, share),), "float32", False)
    return prove_theorems([theorem], numpy_machine(), SearchLimits())


def test_parts_of_lemmas_are_as_many_as_memory_holds() -> None:
    net = prepare(NETWORKS["chain"], "real", numpy_machine())
    fast = prepare(NETWORKS["chain"], "real", numpy_machine("float32"))
    box = outward(LOW[None], HIGH[None], "float64")
    parts = []
    for memory in (1 << 30, 200_000):
        counts: list[int] = []
        lemma_search = LemmaSearch(net, fast, box, memory, counts.append)
        for lemma in lemma_search.run(Effort(40, 8), lambda: False).lemmas:
            before = sum(step.size for step in net.steps[: lemma.node - 1])
            if memory == 200_000:
                assert lemma.tree.leaves * 9 * before <= memory
        parts.append(sum(counts))
    assert parts[0] > 2 * parts[1] > 0


def test_progress_goes_on_while_lemmas_are_found(monkeypatch: Any) -> None:
    """Parts are counted as they are bounded, not only where all of them are."""
    monkeypatch.setattr(search, "_PARTS", (20, *search._PARTS[1:]))
    reports: list[search.Progress] = []
    at: list[int] = []
    run = LemmaSearch.run

    def noted(self: LemmaSearch, effort: Effort, stop: Any) -> LemmaSet:
        at.append(len(reports))
        sharp = run(self, effort, stop)
        at.append(len(reports))
        return sharp

    monkeypatch.setattr(LemmaSearch, "run", noted)
    theorem = Theorem(NETWORKS["chain"], (claim(NETWORKS["chain"], 0.35),), "float32", False)
    result = prove_theorems([theorem], numpy_machine(), SearchLimits(tell=reports.append))
    assert isinstance(result, proofs.Proof)
    first, last = at[-2:]  # the first proof of a process has another search before it
    assert last - first > 5
    boxes = [each.boxes for each in reports]
    assert boxes == sorted(boxes)
    assert boxes[last - 1] > boxes[first]
    assert result.boxes == boxes[-1]


def test_what_cases_alone_leave_open_is_proved_with_lemmas(monkeypatch: Any) -> None:
    monkeypatch.setattr(search, "_PARTS", (20, *search._PARTS[1:]))
    result = prove_share(0.35)
    assert isinstance(result, proofs.Proof)
    (tree,) = result.certificates[0].trees
    assert tree.lemmas
    assert result.check() == tree.leaves
    net = NETWORKS["chain"]
    assert refused(net, claim(net, 0.35), tree._replace(lemmas=()), "float32")


def test_large_networks_try_more_cases_before_lemmas(monkeypatch: Any) -> None:
    """Better bounds of all their neurons would take minutes."""
    monkeypatch.setattr(search, "_PARTS", (20, *search._PARTS[1:]))
    weights = sum(w.size for node in NETWORKS["chain"].nodes for w in node.weights)
    trees = []
    for large in (weights, weights - 1):
        monkeypatch.setattr(search, "_LARGE", large)
        result = prove_share(0.35)
        assert isinstance(result, proofs.Proof)
        trees.append(result.certificates[0].trees[0])
    assert [bool(tree.lemmas) for tree in trees] == [True, False]
