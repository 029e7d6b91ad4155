"""The rule by which a result is right: what it lets pass, and what it does not."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from anydevice._check import budgets
from anydevice._check.cases.case import LARGEST, SMALLEST_NORMAL
from anydevice._check.compare import ROUNDING_UNIT, Difference, compare, leaves

BFLOAT16 = ml_dtypes.bfloat16
INF, NAN = np.inf, np.nan


def judged(got: Any, want: Any, dtype: str = "float32", budget: Any = 0.0, *rest: Any) -> Any:
    kind = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    wants = [np.asarray(each, np.float64) for each in (want, *rest)]
    return compare(np.asarray(got).astype(kind), wants, budget, dtype, dtype)


@pytest.mark.parametrize("dtype", ROUNDING_UNIT)
def test_one_rounding_is_right_and_two_are_not(dtype: str) -> None:
    unit = ROUNDING_UNIT[dtype]
    assert judged(1.0, 1.0 + unit * 0.99, dtype) is None
    wrong = judged(1.0 + 4 * unit, 1.0, dtype)
    assert wrong is not None
    assert wrong.error == pytest.approx(4 * unit)


@pytest.mark.parametrize(
    ("got", "want"),
    [(NAN, 1.0), (1.0, NAN), (INF, 1.0), (-INF, INF), (1.0, INF), (NAN, INF), (INF, NAN)],
)
def test_what_is_out_of_place_is_wrong(got: float, want: float) -> None:
    wrong = judged([1.0, got], [1.0, want])
    assert wrong is not None
    assert wrong.at == (1,)
    assert wrong.error == INF
    assert judged([1.0, got], [1.0, want], budget=1e9) is not None, "no budget makes it right"


@pytest.mark.parametrize("value", [NAN, INF, -INF, 0.0])
def test_what_is_in_its_place_is_right(value: float) -> None:
    assert judged(value, value, budget=INF) is None
    assert judged(value, value, budget=NAN) is None


def test_zeros_have_no_sign() -> None:
    assert judged(-0.0, 0.0) is None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_what_is_too_large_for_the_type_is_infinite(dtype: str) -> None:
    largest = LARGEST[dtype]
    assert judged(INF, largest * 2, dtype) is None
    assert judged(-INF, -largest * 2, dtype) is None
    assert judged(-INF, largest * 2, dtype) is not None
    assert judged(largest, largest * 2, dtype) is not None
    # At the very edge, an allowed error may lead to either side.
    assert judged(INF, largest, dtype) is None
    assert judged(largest, largest * (1 + ROUNDING_UNIT[dtype] / 2), dtype) is None
    assert judged(INF, largest / 2, dtype) is not None


def test_denormals_may_be_flushed_except_in_float16() -> None:
    for dtype in ("float32", "bfloat16", "float64"):
        assert judged(0.0, SMALLEST_NORMAL[dtype] / 2, dtype) is None
    assert judged(0.0, SMALLEST_NORMAL["float16"] / 2, "float16") is not None
    assert judged(0.0, 2.0**-25, "float16") is None, "that is how it is rounded"


def test_any_of_several_references_may_be_met_element_by_element() -> None:
    assert judged([1.0, 5.0], [1.0, 4.0], "float32", 0.0, [2.0, 5.0]) is None
    wrong = judged([1.0, 6.0], [1.0, 4.0], "float32", 0.0, [2.0, 5.0])
    assert wrong is not None
    assert (wrong.want, wrong.at) == (5.0, (1,))


def test_integers_and_conditions_are_compared_for_equality() -> None:
    whole = np.array([1, 2], np.int32)
    assert compare(whole, [np.array([1, 2])], 0.0, "float32", "int32") is None
    assert compare(whole, [np.array([1, 3])], 9.0, "float32", "int32") is not None
    assert compare(np.array([True]), [np.array([False])], 0.0, "float32", "bool") is not None


def test_a_budget_counts_in_units_of_the_computing_type() -> None:
    off = 100 * ROUNDING_UNIT["float32"]
    assert judged(1 + off, 1.0, "float32", 101.0) is None
    assert judged(1 + off, 1.0, "float32", 90.0) is not None
    assert judged(1 + off, 1.0, "float64", 101.0) is not None


def test_the_place_furthest_off_for_its_tolerance_is_named() -> None:
    wrong = judged([[1.0, 2.0], [1000.5, 1.1]], [[1.0, 2.0], [1000.0, 1.0]])
    assert wrong is not None
    assert (wrong.at, wrong.wrong_elements) == ((1, 1), 2)
    assert str(wrong).startswith("1.10000002 instead of 1 at [1, 1], off by 0.1 where ")
    assert str(wrong).endswith("2 elements are wrong")
    only = judged(2.0, 1.0)
    assert "at its only element" in str(only)
    assert only is not None
    assert only.excess > 1e6
    assert Difference(1, 2, 1, 0, (), 1).excess == INF


def test_nothing_is_right() -> None:
    assert judged(np.zeros((0, 3)), np.zeros((0, 3))) is None


def test_sums_added_up_in_their_own_type_are_wrong() -> None:
    """What the rule is for: ten thousand numbers, added up in 16 bits and in 32."""
    numbers = np.random.default_rng(0).uniform(0.5, 1.5, 10_000)
    for dtype, kind in (("float16", np.dtype(np.float16)), ("bfloat16", np.dtype(BFLOAT16))):
        x = numbers.astype(kind)
        want = x.astype(np.float64).mean()
        budget = budgets.of_reduction("mean")(want, 1.0, x.astype(np.float64))
        in_order = np.add.accumulate(x.astype(np.float32), dtype=np.float32)[-1] / len(x)
        assert judged(in_order, want, dtype, budget) is None
        short = np.add.accumulate(x, dtype=kind)[-1].astype(np.float64) / len(x)
        assert judged(short, want, dtype, budget) is not None


def test_the_arrays_of_a_nested_result() -> None:
    assert list(leaves(([1, [2]], None, (3,)))) == [1, 2, 3]
    assert list(leaves(None)) == []
