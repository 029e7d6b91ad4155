"""Properties and regions are data: what they mean, what is refused, and how they are saved."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn
from anydevice._proofs import properties as p
from anydevice._proofs.checking.network import Query
from anydevice._proofs.evaluation import evaluate
from anydevice._proofs.graph import absolute_sums, derivative
from anydevice._proofs.lowering import lower
from anydevice.errors import ConfigurationError, UnsupportedError

CPU = anydevice.device("cpu", engine="numpy")
MODEL = nn.build(nn.Dense(3, 6), "tanh", nn.Dense(6, 4), device=CPU)
NETWORK = lower(MODEL).network
UNIT = p.box(0.0, 1.0)
unchecked: Any = p  # as a program calls it that no type checker reads


def is_bad(query: Query, y: Any) -> bool:
    """Whether outputs are bad for a query, in exact arithmetic."""
    exact = [Fraction(float(number)) for number in y]
    rows = []
    for row, shift, strict in zip(query.coefficients, query.constants, query.strict, strict=True):
        value = sum((a * b for a, b in zip(row, exact, strict=True)), shift)
        rows.append(value < 0 if strict else value <= 0)
    groups = set(query.group)
    return any(
        all(bad for bad, own in zip(rows, query.group, strict=True) if own == group)
        for group in groups
    )


def query_of(claim: Any) -> Query:
    (problem,) = p.problems(claim, NETWORK, UNIT)
    assert problem.network is NETWORK
    return problem.query


OUTPUTS = [
    [0.0, 0.0, 0.0, 0.0],
    [1.0, 0.0, 0.5, 0.25],
    [0.0, 1.0, 0.5, 0.25],
    [-1.0, 2.0, 0.5, 3.5e38],
    [1.0, 1.0, 0.5, 1.0],
    [0.5, 0.25, 0.75, 1.0],
    [0.5, 0.25, 2.0, 1.0],
]


@pytest.mark.parametrize(
    ("claim", "holds"),
    [
        (p.same_class(1), lambda y: all(y[1] > y[j] for j in (0, 2, 3))),
        (p.less(0, 3), lambda y: y[0] < y[3]),
        (p.within(0, 1), lambda y: all(0 <= each <= 1 for each in y)),
        (p.within(0, 1, 2), lambda y: 0 <= y[2] <= 1),
        (p.within(-np.inf, 0.9, (0, 1)), lambda y: max(y[:2]) <= 0.9),
        (p.finite(), lambda y: all(abs(each) <= p.LARGEST_FLOAT32 for each in y)),
        (
            p.all_of(p.less(0, 3), p.within(0, 1)),
            lambda y: y[0] < y[3] and 0 <= min(y) <= max(y) <= 1,
        ),
        (p.any_of(p.less(0, 1), p.less(1, 0)), lambda y: y[0] != y[1]),
        (
            p.any_of(p.same_class(0), p.all_of(p.less(0, 3), p.within(0, 0.3, 1))),
            lambda y: y[0] > max(y[1:]) or (y[0] < y[3] and 0 <= y[1] <= 0.3),
        ),
    ],
)
def test_a_query_is_bad_exactly_where_the_property_does_not_hold(claim: Any, holds: Any) -> None:
    query = query_of(claim)
    reports = [is_bad(query, y) for y in OUTPUTS]
    assert reports == [not holds(y) for y in OUTPUTS]
    assert len(set(reports)) == 2, "a case on each side"


def test_regions_are_exact() -> None:
    low: Any
    high: Any
    low, high = p.ball([0.1, 0.9, 0.5], 0.25, 0, 1).corners(3)
    assert low == (0, Fraction(0.9) - Fraction(1, 4), Fraction(1, 4))
    assert high == (Fraction(0.1) + Fraction(1, 4), 1, Fraction(3, 4))
    assert low[1] != Fraction(0.9 - 0.25) or high[0] != Fraction(0.1 + 0.25)
    assert p.box(np.array([0.1, 0.2], np.float32), 1).corners(2)[0][0] == Fraction(
        float(np.float32(0.1))
    )
    low, high = UNIT.corners(3)
    assert (low, high) == ((0, 0, 0), (1, 1, 1))
    assert p.box(np.zeros((2, 3)), 1).shape == (2, 3)


@pytest.mark.parametrize("engine", ["torch", "jax", "mlx"])
def test_arrays_of_every_library_are_taken(engine: str) -> None:
    pytest.importorskip("mlx.core" if engine == "mlx" else engine)
    x = np.array([0.1, 0.2], np.float32)
    there = anydevice.to_device(x, anydevice.device("cpu", engine=engine), convert=True)
    assert p.ball(there, 0.1) == p.ball(x, 0.1)


@pytest.mark.parametrize(
    "made",
    [
        lambda: unchecked.box([0.0, 2.0], [1.0, 1.0]),
        lambda: unchecked.box([0.0, np.nan], 1.0),
        lambda: unchecked.box(0.0, np.inf),
        lambda: unchecked.box([0.0], [1.0, 2.0]),
        lambda: unchecked.box([], []),
        lambda: unchecked.box("a", 1),
        lambda: unchecked.box([True], [True]),
        lambda: unchecked.box([[1.0], [1.0, 2.0]], 1),
        lambda: unchecked.box(2**60 + 1, 2**61),
        lambda: unchecked.ball([0.5], -0.1),
        lambda: unchecked.ball([0.5], np.nan),
        lambda: unchecked.ball([np.inf], 0.1),
        lambda: unchecked.ball([0.5], 0.1, 0.7, 1.0),
        lambda: unchecked.ball([0.5], 0.1, 1.0, 0.0),
        lambda: unchecked.same_class(-1),
        lambda: unchecked.same_class(1.5),
        lambda: unchecked.same_class(True),
        lambda: unchecked.within(1, 0),
        lambda: unchecked.within(np.nan, 0),
        lambda: unchecked.within(-np.inf, np.inf),
        lambda: unchecked.within(0, 1, []),
        lambda: unchecked.less(1, 1),
        lambda: unchecked.lipschitz(0),
        lambda: unchecked.lipschitz(np.inf),
        lambda: unchecked.monotone(0, tolerance=-1),
        lambda: unchecked.monotone(0, rising=1),
        lambda: unchecked.all_of(),
        lambda: unchecked.any_of(lambda y: True),
        lambda: unchecked.any_of(unchecked.monotone(0), unchecked.finite()),
        lambda: unchecked.problems(lambda y: True, NETWORK, UNIT),
        lambda: unchecked.problems(unchecked.finite(), NETWORK, (0, 1)),
        lambda: unchecked.problems(unchecked.finite(), NETWORK, unchecked.box([0.0], 1.0)),
        lambda: unchecked.problems(unchecked.finite(), NETWORK, unchecked.ball([0.0] * 4, 1.0)),
        lambda: unchecked.problems(unchecked.same_class(4), NETWORK, UNIT),
        lambda: unchecked.problems(unchecked.less(0, 7), NETWORK, UNIT),
        lambda: unchecked.problems(unchecked.within(0, 1, 4), NETWORK, UNIT),
        lambda: unchecked.problems(unchecked.monotone(3), NETWORK, UNIT),
        lambda: unchecked.problems(unchecked.monotone(0, 4), NETWORK, UNIT),
    ],
)
def test_what_makes_no_sense_is_refused(made: Any) -> None:
    with pytest.raises(ConfigurationError):
        made()


ALL = [
    p.same_class(1),
    p.less(2, 0),
    p.within(0.1, 1, (1, 2)),
    p.within(-np.inf, 3),
    p.finite(),
    p.monotone(1, 2, rising=False, tolerance=0.5),
    p.lipschitz(2.5),
    p.all_of(p.less(0, 1), p.any_of(p.less(1, 2), p.within(0, 1))),
    UNIT,
    p.box([[0.1, 0.2]], [[0.3, 0.4]]),
    p.ball([[0.1], [0.2]], 0.3),
    p.ball([0.1, 0.2], 0.3, 0, 1),
]


@pytest.mark.parametrize("value", ALL)
def test_they_are_saved_and_read_again(value: Any) -> None:
    text = json.dumps(p.to_json(value), allow_nan=False)
    assert p.from_json(json.loads(text)) == value


def test_a_python_function_cannot_be_saved() -> None:
    def is_small(y: Any) -> bool:
        return bool(np.abs(y).max() < 1)

    with pytest.raises(ConfigurationError, match=r"is_small, a Python function, cannot be saved"):
        p.to_json(is_small)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "described",
    [
        *(None, {}, [], 3, {"kind": "Nothing"}, {"kind": "Within"}),
        {"kind": "Within", "low": "a"},
        {"kind": "AllOf", "parts": [1]},
        {"kind": "AllOf", "parts": []},
        {"kind": "Box", "low": [0.0], "high": [1.0, 2.0], "sizes": [1]},
        {"kind": "SameClass", "label": -1},
        {"kind": "SameClass", "label": 1, "more": 2},
        {**p.to_json(p.ball([0.0], 1.0)), "sizes": [2]},
    ],
)
def test_damaged_descriptions_are_refused(described: Any) -> None:
    with pytest.raises(ConfigurationError):
        p.from_json(described)


def numeric(model: nn.Model, x: Any, step: float = 1e-6) -> Any:
    """The derivatives (outputs, inputs) by differences."""
    wide = model.with_parameters(
        [{k: v.astype(np.float64) for k, v in each.items()} for each in model.parameters]
    )
    moves = np.eye(x.size) * step
    return ((wide(x + moves) - wide(x - moves)) / (2 * step)).T


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "tanh", "sigmoid", "silu", "softmax"])
def test_derivative_networks(activation: str) -> None:
    first = (nn.Dense(3, 5), nn.BatchNorm(5), activation)
    model = nn.build(*first, nn.Dense(5, 4), activation, nn.Dense(4, 2), device=CPU)
    network = lower(model).network
    generator = np.random.default_rng(0)
    for _ in range(5):
        x = generator.standard_normal((1, 3))
        expected = numeric(model, x)
        found, _ = evaluate(absolute_sums(network), x)
        assert np.allclose(found[0], np.abs(expected).sum(1), atol=1e-6)
        for output, along in ((0, 1), (1, 2)):
            found, _ = evaluate(derivative(network, along, output), x)
            assert np.allclose(found[0, 0], expected[output, along], atol=1e-6)


def test_a_query_is_no_larger_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p, "MAX_NUMBERS", 31)
    assert p.problems(p.within(0, 1, outputs=[0, 1, 2]), NETWORK, UNIT)
    with pytest.raises(ConfigurationError, match="8 conditions on 4 outputs are too many"):
        p.problems(p.within(0, 1), NETWORK, UNIT)


def test_slopes_are_problems_of_their_own_in_real_arithmetic() -> None:
    claim = p.all_of(p.monotone(0, 1, rising=False, tolerance=0.25), p.within(0, 1), p.lipschitz(2))
    values, slope, steepness = p.problems(claim, NETWORK, UNIT)
    assert values.network is NETWORK
    assert values.arithmetic is None
    assert slope.arithmetic == steepness.arithmetic == "real"
    assert not is_bad(slope.query, [0.25])
    assert is_bad(slope.query, [0.26])
    assert steepness.network.outputs == 4
    assert not is_bad(steepness.query, [2.0] * 4)
    assert is_bad(steepness.query, [0.0, 2.1, 0.0, 0.0])


def test_slopes_of_straight_models_and_none_of_gelu() -> None:
    model = nn.build(nn.Dense(3, 5), nn.Dense(5, 2), device=CPU)
    found, _ = evaluate(derivative(lower(model).network, 1, 0), np.ones((2, 3)))
    assert np.allclose(found, numeric(model, np.ones((1, 3)))[0, 1])
    model = nn.build(nn.Dense(3, 5), "gelu", device=CPU)
    with pytest.raises(UnsupportedError, match="gelu"):
        p.problems(p.lipschitz(1), lower(model).network, UNIT)
