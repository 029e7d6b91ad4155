"""Bounds hold: against exact rationals, against float32 of any order, and not without any term."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from anydevice._proofs import bounds
from anydevice._proofs.attack import exact_outputs
from anydevice._proofs.bounds import LinearBounds, Prepared, outward, prepare
from anydevice._proofs.checking.network import Network, Node
from anydevice._proofs.machines import numpy_machine
from anydevice._proofs.search import rows_of
from tests.proofs import networks
from tests.proofs.checking.theorems import query


def relaxed(
    net: Network,
    low: Any,
    high: Any,
    arithmetic: str,
    dtype: str,
    change: Callable[[Prepared], Prepared] = lambda prepared: prepared,
) -> LinearBounds:
    prepared = change(prepare(net, arithmetic, numpy_machine(dtype)))
    with np.errstate(all="ignore"):
        return LinearBounds(prepared, *outward(np.atleast_2d(low), np.atleast_2d(high), dtype))


def outside_exact(net: Network, found: LinearBounds, x: Any) -> int:
    """How many neurons are outside of their bounds at points, one of each box, in rationals."""
    count = 0
    for box, point in enumerate(x):
        for layer, values in zip(found.layers, networks.exact_arguments(net, point), strict=True):
            for value, low, high in zip(values, layer.low[box], layer.high[box], strict=True):
                count += not Fraction(float(low)) <= value <= Fraction(float(high))
    return count


def outside_executed(net: Network, found: LinearBounds, x: Any, runs: int, seed: int = 0) -> int:
    random = np.random.default_rng(seed)
    count = 0
    for run in range(runs):
        box = run % len(x)
        for layer, z in zip(found.layers, networks.executed(net, x[box], random), strict=True):
            z = z.astype(np.float64)
            count += int((~((layer.low[box] <= z) & (z <= layer.high[box]))).sum())
    return count


def points(net: Network, count: int, seed: int = 1) -> Any:
    random = np.random.default_rng(seed)
    return random.normal(size=(count, net.inputs)).astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("residual", [False, True])
def test_bounds_at_points_contain_the_exact_values(dtype: str, residual: bool) -> None:
    net = networks.network(6, 20, 20, 4, residual=residual)
    x = points(net, 6)
    assert outside_exact(net, relaxed(net, x, x, "real", dtype), x) == 0


@pytest.mark.parametrize("inputs", [5, 80])
def test_bounds_over_boxes_contain_the_values_at_their_points(inputs: int) -> None:
    net = networks.network(inputs, 16, 16, 3)
    x = points(net, 5)
    found = relaxed(net, x - 0.05, x + 0.05, "real", "float64")
    random = np.random.default_rng(0)
    for _ in range(3):
        shift = random.choice([-0.05, 0.0, 0.05], x.shape)
        assert outside_exact(net, found, np.clip(x + shift, x - 0.05, x + 0.05)) == 0


def test_substitution_is_tighter_than_what_is_carried_forward() -> None:
    net = networks.network(5, 16, 16, 16, 3)
    x = points(net, 8)
    prepared, box = prepare(net, "real", numpy_machine()), outward(x - 0.1, x + 0.1, "float64")
    loose, tight = (LinearBounds(prepared, *box, each).layers[3] for each in (False, True))
    widths = [float((layer.high - layer.low).mean()) for layer in (loose, tight)]
    assert widths[1] < 0.97 * widths[0]


def _without(**terms: float) -> Callable[[Prepared], Prepared]:
    def change(prepared: Prepared) -> Prepared:
        return prepared._replace(steps=tuple(step._replace(**terms) for step in prepared.steps))

    return change


def test_every_float32_execution_is_inside_and_the_term_for_it_is_needed() -> None:
    net = networks.network(8, 24, 24, 4)
    x = points(net, 10)
    found = relaxed(net, x, x, "float32", "float64")
    assert outside_executed(net, found, x, 60) == 0
    planted = relaxed(net, x, x, "float32", "float64", _without(run=0.0))
    assert outside_executed(net, planted, x, 60) > 0
    assert outside_executed(net, relaxed(net, x, x, "real", "float64"), x, 60) > 0


class Adversary:
    """An engine whose products of matrices are as wrong as any order of summation allows."""

    def __init__(self, sign: float) -> None:
        self.sign, self.machine = sign, numpy_machine("float32")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.machine.xp, name)

    def matmul(self, a: Any, b: Any) -> Any:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        most = 0.95 * a.shape[1] * 2.0**-24
        return (a @ b + self.sign * most * (abs(a) @ abs(b))).astype(np.float32)

    def einsum(self, formula: str, a: Any, b: Any) -> Any:
        assert formula == "ij,ij->i"
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        most = 0.95 * a.shape[1] * 2.0**-24
        return ((a * b).sum(1) + self.sign * most * abs(a * b).sum(1)).astype(np.float32)

    def found(self, net: Network, x: Any, change: Callable[[Prepared], Prepared]) -> LinearBounds:
        machine = self.machine._replace(xp=self)
        return LinearBounds(change(prepare(net, "real", machine)), *outward(x, x, "float32"))


@pytest.mark.parametrize("term", ["forth", "back"])
def test_bounds_hold_for_any_order_of_summation_and_need_the_terms_for_it(term: str) -> None:
    net = networks.network(3, 60, 60, 4, residual=True)
    x = points(net, 4)
    counts = []
    for change in (lambda prepared: prepared, _without(**{term: 0.0})):
        found = [Adversary(sign).found(net, x, change) for sign in (1.0, -1.0)]
        counted = [
            outside_exact(net, each, x) if term == "forth" else _rows_outside(net, x, each)
            for each in found
        ]
        counts.append(sum(counted))
    assert counts[0] == 0
    assert counts[1] > 0


def _rows_outside(net: Network, x: Any, found: LinearBounds) -> int:
    """How many lower bounds of outputs, by substitution, are above the exact values."""
    outputs = net.nodes[-1].size
    rows = np.concatenate([np.eye(outputs), -np.eye(outputs)]).astype(np.float32)
    rows = np.tile(rows, (len(x), 1))
    box = np.repeat(np.arange(len(x)), 2 * outputs)
    low = found.rows_below(rows, np.zeros(len(rows), np.float32), box).low
    exact = [networks.exact_arguments(net, point)[-1] for point in x]
    signed = [sign * value for values in exact for sign in (1, -1) for value in values]
    return sum(Fraction(float(a)) > b for a, b in zip(low, signed, strict=True))


def test_terms_for_inputs_and_constants_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    net = networks.network(200, 4, seed=5)
    x = points(net, 20)
    assert _rows_outside(net, x, relaxed(net, x, x, "real", "float32")) == 0
    monkeypatch.setattr(Prepared, "gamma", lambda self, count: 0.0)
    planted = relaxed(net, x, x, "real", "float32", _without(back=0.0))
    assert _rows_outside(net, x, planted) > 0


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_what_is_lost_beside_a_large_constant_is_part_of_the_error(dtype: str) -> None:
    """A bias of -2**60, forty small ones that vanish beside it, and one of 2**60 at last."""
    large, one = 2.0**60, np.ones((1, 1))
    small = np.array([0.4 * (np.nextafter(np.array(large, dtype), np.inf) - large)])
    nodes = [Node((0,), (one,), np.array([large]), "relu", 2)]
    nodes.append(Node((0,), (one,), small, "relu", 2))
    nodes += [Node((number,), (one,), small, "relu", 2) for number in range(2, 41)]
    nodes.append(Node((1, 41), (one, -one), np.array([-large]), "", 3))
    net, x = Network(1, tuple(nodes)), np.zeros((1, 1))
    found = relaxed(net, x, x, "real", dtype)
    low = found.rows_below(np.ones((1, 1), dtype), np.zeros(1, dtype), np.zeros(1, int)).low
    exact = exact_outputs(net, (Fraction(0),))[0]
    assert exact < -39 * Fraction(float(small[0]))
    assert Fraction(float(low[0])) <= exact


def test_the_chord_above_a_relu_is_valid_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    low = -np.exp(random.uniform(-20, 5, 2000)).astype(np.float32)
    high = np.exp(random.uniform(-20, 5, 2000)).astype(np.float32)

    def below(unit: float, tiny: float) -> int:
        lines = bounds.relu_curve(numpy_machine().xp, low, high, unit, tiny).lines
        wrong = 0
        for a, b, s, t in zip(low, high, lines.upper, lines.above, strict=True):
            a, b, s, t = (Fraction(float(each)) for each in (a, b, s, t))
            wrong += s * a + t < 0 or s * b + t < b
        return wrong

    assert below(2.0**-24, 2.0**-126) == 0
    assert below(0.0, 0.0) > 0


def test_boxes_of_float32_contain_those_of_float64() -> None:
    random = np.random.default_rng(0)
    low = random.normal(size=(500, 3))
    high = low + np.exp(random.uniform(-40, 1, (500, 3)))
    for dtype in ("float64", "float32"):
        centre, radius = outward(low, high, dtype)
        for c, r, a, b in zip(*(e.ravel() for e in (centre, radius, low, high)), strict=True):
            c, r = Fraction(float(c)), Fraction(float(r))
            assert c - r <= Fraction(a)
            assert Fraction(b) <= c + r


def test_numbers_next_to_zero_may_become_zero() -> None:
    """Products that vanish: without the floor, flushed executions are outside of the bounds."""
    weight = np.full((1, 3), float(np.float32(2.0**-70)))
    nodes = (
        Node((0,), (weight,), np.zeros(1), "relu", 4),
        Node((1,), (np.full((1, 1), 2.0**100),), np.zeros(1), "", 2),
    )
    net, x = Network(3, nodes), np.full((1, 3), 2.0**-60)
    found = relaxed(net, x, x, "float32", "float64")
    assert outside_executed(net, found, x, 40) == 0
    planted = relaxed(net, x, x, "float32", "float64", _without(floor=0.0))
    assert outside_executed(net, planted, x, 40) > 0


def test_sums_that_may_overflow_float32_have_no_bound() -> None:
    weight = np.full((2, 2), 2.0**100)
    nodes = tuple(Node((i,), (weight,), np.zeros(2), "relu", 3) for i in range(2))
    net = Network(2, nodes)
    found = relaxed(net, np.ones((1, 2)), np.ones((1, 2)), "float32", "float64")
    assert not (found.layers[1].high[0] < 1e60).any()


def test_weights_that_are_not_float32_are_bounded_in_float32_too() -> None:
    net = networks.network(6, 20, 4)
    nodes = tuple(n._replace(weights=(n.weights[0] * (1 + 2.0**-26),)) for n in net.nodes)
    net = Network(6, nodes)
    x = points(net, 6)
    assert outside_exact(net, relaxed(net, x, x, "real", "float32"), x) == 0


def test_constants_of_rows_are_rounded_downward() -> None:
    thirds = (Fraction(1, 3), Fraction(-1, 3))
    rows = rows_of(query([0, 0], [1, 1], [[1], [1]], thirds))
    assert all(Fraction(float(c)) <= e for c, e in zip(rows.constants, thirds, strict=True))
    assert not rows.mixes


def test_a_nan_is_a_bound_of_nothing() -> None:
    net = networks.network(3, 8, 8, 2)
    low, high = np.full((1, 3), -1e308), np.full((1, 3), 1e308)
    found = relaxed(net, low, high, "real", "float64")
    rows = found.rows_below(np.eye(2), np.full(2, 1e300), np.zeros(2, np.int64))
    assert not (rows.low > 0).any()


@pytest.mark.soak
def test_five_thousand_exact_bounds() -> None:
    checked = 0
    for seed in range(30):
        net = networks.network(5, 30, 30, 30, 5, seed=seed)
        x = points(net, 2, seed)
        for radius in (0.0, 0.02):
            found = relaxed(net, x - radius, x + radius, "real", ("float64", "float32")[seed % 2])
            assert outside_exact(net, found, x) == 0
            checked += 2 * len(x) * sum(node.size for node in net.nodes)
    assert checked >= 5000


@pytest.mark.soak
def test_ten_thousand_executions_in_float32() -> None:
    for seed in range(10):
        net = networks.network(8, 24, 24, 4, seed=seed)
        x = points(net, 10, seed)
        found = relaxed(net, x - 0.01, x + 0.01, "float32", "float64")
        assert outside_executed(net, found, x, 1000, seed) == 0


def test_few_sizes_are_compiled() -> None:
    assert {bounds.padded_size(n) for n in range(1, 3000)} == {32, 256, 2048, 16384}
