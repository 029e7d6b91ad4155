"""Sums, means, the largest, and where they are."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from anydevice import ops
from anydevice.errors import ConfigurationError

X = np.random.default_rng(0).normal(size=(2, 3, 4))
AXES: list[Any] = [None, 0, -1, (0, 2), (-1, 1), [1]]


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min"])
def test_along_axes(name: str, axis: Any, keepdims: bool) -> None:
    over = tuple(axis) if isinstance(axis, list) else axis
    expected = getattr(np, name)(X, axis=over, keepdims=keepdims)
    np.testing.assert_allclose(getattr(ops, name)(X, axis, keepdims), expected, rtol=1e-13)


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min"])
def test_a_single_number_is_its_own(name: str) -> None:
    assert getattr(ops, name)(np.array(3.0)).tolist() == 3
    assert getattr(ops, name)(np.array([[3.0]])).shape == ()


def test_types() -> None:
    for dtype in (np.float16, ml_dtypes.bfloat16):
        many = np.ones(40_000, dtype)
        assert ops.mean(many).dtype == dtype
        assert float(ops.mean(many)) == 1
        assert ops.sum(many[:1000]).astype(float) == 1000
    assert math.isinf(float(ops.sum(np.full(100, 60000, np.float16))))
    assert float(ops.mean(np.full(100, 60000, np.float16))) == 60000
    assert ops.sum(np.ones(300, np.int32)).dtype == np.int32
    assert ops.mean(np.array([1, 2], np.int8)).dtype == np.float32
    counted = ops.sum(np.array([[True, True], [True, False]]), 1)
    assert (counted.tolist(), counted.dtype) == ([2, 1], np.int32)


def test_of_nothing() -> None:
    empty = np.ones((2, 0))
    assert ops.sum(empty, 1).tolist() == [0, 0]
    assert np.isnan(ops.mean(empty, 1)).all()
    assert ops.max(empty, 0).shape == (0,)
    for op in (ops.max, ops.min, ops.argmax):
        with pytest.raises(ConfigurationError, match=r"axis 1 has elements, but x is \(2, 0\)"):
            op(empty, 1)
    with pytest.raises(ConfigurationError, match="x has elements"):
        ops.max(empty)


def test_nan_wins() -> None:
    x = np.array([[1.0, math.nan, 9.0], [-math.inf, 2.0, math.inf]])
    assert ops.max(x, 1).tolist() == pytest.approx([math.nan, math.inf], nan_ok=True)
    assert ops.min(x, 1).tolist() == pytest.approx([math.nan, -math.inf], nan_ok=True)
    assert ops.argmax(x).tolist() == [1, 2]
    assert ops.argmax(x, 0).tolist() == [0, 0, 1]
    values, places = ops.top_k(x, 2)
    assert places.tolist() == [[1, 2], [2, 1]]
    assert values[1].tolist() == [math.inf, 2]


@pytest.mark.parametrize("k", [1, 2, 6])
def test_the_largest_come_first_and_equal_ones_in_order(k: int) -> None:
    x = np.array([[3, 1, 3, 7, 0, 3], [0, 0, 0, 0, 0, 0]], np.int16)
    values, places = ops.top_k(x, k)
    assert places.tolist() == [[3, 0, 2, 5, 1, 4][:k], [0, 1, 2, 3, 4, 5][:k]]
    assert np.array_equal(values, np.take_along_axis(x, places, -1))
    assert (values.dtype, places.dtype) == (np.int16, np.int32)
    assert ops.argmax(x).tolist() == [3, 0]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ops.sum(X, 3), r"sum: axis 3 is one of x, but x is \(2, 3, 4\)"),
        (lambda: ops.mean(X, (0, -3)), r"the axes \(0, -3\) are different ones"),
        (lambda: ops.argmax(X, -4), "axis -4"),
        (lambda: ops.top_k(X, 5), "k, which is 5, is from 1 to the size of the last axis"),
        (lambda: ops.top_k(X, 0), "k, which is 0"),
        (lambda: ops.top_k(np.array(1.0), 1), "axis -1"),
        (lambda: ops.mean(X.astype(complex)), "there is none for complex128"),
    ],
)
def test_what_does_not_fit_is_named(call: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        call()
