"""Metrics against their definitions, in one piece and over batches, on every engine."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice._core.device import Device
from anydevice._train import metrics
from anydevice._train.metrics import metric_of, metrics_of
from anydevice.errors import ConfigurationError

Array = np.ndarray[Any, Any]
DRAWN = np.random.default_rng(3)
SCORES = DRAWN.normal(size=(61, 5)).astype(np.float32)
IDS = DRAWN.integers(0, 4, 61)
IDS[7] = -100
LOGITS = DRAWN.normal(size=61).round(1).astype(np.float32)
YES = (LOGITS + DRAWN.normal(size=61) > 0.4).astype(np.int64)


def f1_of(found: Array, wanted: Array, which: int) -> float:
    right = ((found == which) & (wanted == which)).sum()
    precision = right / max((found == which).sum(), 1)
    recall = right / max((wanted == which).sum(), 1)
    return float(2 * precision * recall / (precision + recall)) if right else 0.0


def area_of(scores: Array, wanted: Array) -> float:
    """By all pairs of a positive and a negative example."""
    apart = scores[wanted > 0][:, None] - scores[wanted <= 0]
    return float((apart > 0).mean() + (apart == 0).mean() / 2)


KEPT = IDS >= 0
FOUND = SCORES.argmax(-1)
CASES: dict[str, tuple[Array, Array, float]] = {
    "accuracy": (SCORES, IDS, float((FOUND == IDS)[KEPT].mean())),
    "top_1": (SCORES, IDS, float((FOUND == IDS)[KEPT].mean())),
    "top_3": (
        SCORES,
        IDS,
        float((np.argsort(-SCORES)[:, :3] == IDS[:, None]).any(1)[KEPT].mean()),
    ),
    "top_9": (SCORES, IDS, 1.0),
    "mean_absolute_error": (SCORES, SCORES[::-1], float(np.abs(SCORES - SCORES[::-1]).mean())),
    "mae": (LOGITS[:, None], LOGITS[::-1], float(np.abs(LOGITS - LOGITS[::-1]).mean())),
    "f1": (LOGITS, YES, f1_of(LOGITS > 0, YES, 1)),
    "macro_f1": (
        SCORES,
        IDS,
        float(np.mean([f1_of(FOUND[KEPT], IDS[KEPT], each) for each in range(5)])),
    ),
    "auc": (LOGITS, YES, area_of(LOGITS, YES)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_metric_is_its_definition_over_all_batches(name: str, cpu: Device) -> None:
    output, target, expected = CASES[name]
    metric = metric_of(name)
    state = None
    for rows in (slice(0, 20), slice(20, 53), slice(53, 61)):
        there = anydevice.to_device(
            (output[rows].copy(), target[rows].astype(target.dtype.str.replace("i8", "i4"))),
            cpu,
        )
        state = metric.add(state, *there)
    assert metric.result(state) == pytest.approx(expected, rel=1e-6)
    assert math.isnan(metric.result(None))


def test_two_classes_may_be_two_columns_or_one() -> None:
    columns = np.stack([-LOGITS, LOGITS], -1)
    for name in ("accuracy", "f1", "macro_f1", "auc"):
        function = getattr(metrics, name)
        one = function(LOGITS, YES)
        assert function(columns, YES) == pytest.approx(one)
        assert function(LOGITS[:, None], YES) == pytest.approx(one)
        assert function(LOGITS, YES[:, None]) == pytest.approx(one)
        assert function(LOGITS, YES * 2 - 1) == pytest.approx(one)
    assert metrics.accuracy(LOGITS, YES) == float(((LOGITS > 0) == YES).mean())


def test_probabilities_are_yes_above_a_half() -> None:
    shares = 1 / (1 + np.exp(-LOGITS))
    for name in ("accuracy", "f1", "macro_f1"):
        function = getattr(metrics, name)
        expected = function(LOGITS, YES)
        assert function(shares, YES) != expected
        assert function(shares, YES, threshold=0.5) == expected
        for spec in (name, function):
            metric = metric_of(spec, 0.5)
            assert metric.result(metric.add(None, shares, YES)) == expected
        own = metric_of(partial(function, threshold=0.5))
        assert own.result(own.add(None, shares, YES)) == expected


def test_areas_and_shares_at_their_ends() -> None:
    assert math.isnan(metrics.auc(LOGITS, np.ones(61)))
    assert math.isnan(metrics.auc(np.where(YES, np.nan, 0.0), YES))
    assert metrics.auc(np.zeros(61), YES) == 0.5
    assert metrics.auc(YES.astype(float), YES) == 1.0
    assert metrics.f1(np.full(4, -1.0), np.zeros(4)) == 0.0
    assert math.isnan(metrics.accuracy(SCORES[:2], np.array([-100, -100])))
    assert math.isnan(metrics.macro_f1(np.eye(3), np.full(3, -100)))


def test_counts_stay_exact_beyond_the_digits_of_float32(cpu: Device) -> None:
    metric = metric_of("accuracy")
    output, target = anydevice.to_device((np.ones(3, np.float32), np.ones(3, np.int32)), cpu)
    state = metric.add(None, output, target)
    state = [anydevice.to_device(np.array(2**24, np.int32), cpu) for _ in state]
    for _ in range(3):
        state = metric.add(state, output, target)
    assert [int(anydevice.to_numpy(each)) for each in state] == [2**24 + 9] * 2


def test_a_function_of_ones_own_is_weighted_by_rows() -> None:
    def bias(output: Array, target: Array) -> Any:
        return (output - target).mean()

    (metric,) = metrics_of(bias)
    state = None
    for rows in (slice(0, 50), slice(50, 61)):
        state = metric.add(state, LOGITS[rows], YES[rows])
    assert metric.name == "bias"
    assert metric.result(state) == pytest.approx(float((LOGITS - YES).mean()))
    assert metrics_of({"mine": lambda output, target: 1, "other": "auc"})[1].name == "other"
    assert metrics_of("mae")[0].name == "mae"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: metric_of("acuracy"), "use one of accuracy, top_5, mean_absolute_error, f1"),
        (lambda: metric_of(3), "unknown metric 3"),
        (lambda: metrics_of(["auc", "auc"]), "more than one 'auc'"),
        (lambda: metrics_of({"loss": "auc"}), "'loss'"),
        (lambda: metrics.top_k(SCORES, IDS, 0), "k must be an integer of 1 or more"),
        (lambda: metrics.f1(SCORES, IDS), 'use "macro_f1"'),
        (
            lambda: metrics.accuracy(SCORES, YES[:5]),
            r"shape \(61, 5\) and a target of shape \(5,\)",
        ),
        (lambda: metrics.auc(SCORES, YES), "auc takes the same shape"),
        (
            lambda: metric_of(lambda output, target: "much").result([("much", 1)]),
            "must return a number, and returned str",
        ),
    ],
)
def test_what_is_no_metric_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make()


def test_outputs_that_are_nan_are_of_no_class() -> None:
    nan = np.full((6, 3), np.nan, np.float32)
    target = np.array([0, 0, 1, 1, 2, 2])
    for metric in (metrics.accuracy, partial(metrics.top_k, k=2), metrics.macro_f1):
        assert metric(nan, target) == 0
    assert metrics.accuracy(nan[:, 0], np.array([0, 0, 1, 1, 0, 0])) == 0
    half = np.where(np.arange(6)[:, None] < 3, nan, np.eye(3, dtype=np.float32)[target])
    assert metrics.accuracy(half, target) == 0.5
