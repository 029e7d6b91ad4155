"""Sums, means, the largest, and where they are."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from anydevice import ops
from tests.comparing import COPIED, EXACT, assert_same_values
from tests.refusals import refuses

X = np.random.default_rng(0).normal(size=(2, 3, 4))
AXES: list[Any] = [None, 0, -1, (0, 2), (-1, 1), [1]]


@pytest.mark.usefixtures("either_version")
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "prod", "any", "all", "var", "std"])
def test_along_axes(name: str, axis: Any, keepdims: bool) -> None:
    over = tuple(axis) if isinstance(axis, list) else axis
    x = np.where(X > 0.5, X, 0) if name == "any" else X
    expected = getattr(np, name)(x, axis=over, keepdims=keepdims)
    result = getattr(ops, name)(x, axis, keepdims)
    rtol = 1e-13 if name in ("sum", "mean", "max", "min") else 1e-12
    np.testing.assert_allclose(result, expected, rtol=rtol)
    assert result.dtype == expected.dtype


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
        refuses(r"axis 1 must have elements, but x is \(2, 0\)", op, empty, 1)
    refuses("x must have elements", ops.max, empty)


@pytest.mark.parametrize("k", [1, 2, 6])
def test_the_largest_come_first_and_equal_ones_in_order(k: int) -> None:
    x = np.array([[3, 1, 3, 7, 0, 3], [0, 0, 0, 0, 0, 0]], np.int16)
    values, places = ops.top_k(x, k)
    assert places.tolist() == [[3, 0, 2, 5, 1, 4][:k], [0, 1, 2, 3, 4, 5][:k]]
    assert_same_values(values, np.take_along_axis(x, places, -1), because=COPIED)
    assert (values.dtype, places.dtype) == (np.int16, np.int32)
    assert ops.argmax(x).tolist() == [3, 0]


def test_what_does_not_fit_is_named() -> None:
    refuses("axis -1", ops.top_k, np.array(1.0), 1)
    refuses("there is none for complex128", ops.mean, X.astype(complex))


def test_variances() -> None:
    assert ops.var(np.array([1, 3], np.int8)).dtype == np.float32
    assert float(ops.var(np.array([1.0, 3.0]), correction=1)) == 2
    assert np.isnan(ops.var(np.array([1.0]), correction=1))
    assert float(ops.std(np.array([1.0, 3.0]), correction=5)) == math.inf
    refuses("var: correction must be a finite number", ops.var, X, correction=math.inf)
    refuses("std: there is none for complex64", ops.std, X.astype(np.complex64))


def test_norms() -> None:
    for order in (0, 0.5, 1, 2, 3, math.inf, -math.inf):
        expected = np.linalg.norm(X[0], order, axis=1)
        np.testing.assert_allclose(ops.vector_norm(X[0], 1, ord=order), expected, rtol=1e-12)
    assert ops.vector_norm(np.array(-3.0)).tolist() == 3
    assert ops.vector_norm(np.ones((2, 0)), 1).tolist() == [0, 0]
    refuses(
        "vector_norm: axis 1 must have elements", ops.vector_norm, np.ones((2, 0)), 1, ord=math.inf
    )
    refuses("vector_norm: ord must be a number", ops.vector_norm, X, ord="fro")


@pytest.mark.usefixtures("either_version")
@pytest.mark.parametrize("descending", [False, True])
def test_order_is_stable_and_nan_is_the_largest(descending: bool) -> None:
    x = np.array([2.0, math.nan, 1.0, 2.0, math.nan, -math.inf])
    want = [1, 4, 0, 3, 2, 5] if descending else [5, 2, 0, 3, 1, 4]
    places = ops.argsort(x, descending=descending)
    assert (places.tolist(), places.dtype) == (want, np.int32)
    assert_same_values(ops.sort(x, descending=descending), x[want], because=COPIED)
    turned = np.stack([x, x], 1)
    assert ops.argsort(turned, 0, descending)[:, 1].tolist() == want


@pytest.mark.usefixtures("either_version")
def test_running_sums() -> None:
    for size in (0, 1, 2, 7, 8, 9):
        x = np.arange(1.0, 2 * size + 1).reshape(2, size)
        assert_same_values(ops.cumulative_sum(x), np.cumsum(x, 1), because=EXACT)
        assert ops.cumulative_sum(x, 1, include_initial=True).shape == (2, size + 1)
    many = np.ones(4096, np.float16)
    assert ops.cumulative_sum(many)[-1] == 4096


def test_the_logarithm_of_a_sum() -> None:
    assert ops.logsumexp(np.ones((2, 0)), 1).tolist() == [-math.inf, -math.inf]
    assert ops.logsumexp(np.array([math.inf, 0.0])).tolist() == math.inf
    assert ops.logsumexp(np.array([-math.inf, -math.inf])).tolist() == -math.inf
    refuses("logsumexp: this is an array of int64", ops.logsumexp, np.ones(2, int))
