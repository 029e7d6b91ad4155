"""Softmax and norms, against the reference in float64."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from anydevice import ops
from anydevice._check.reference import call
from tests.refusals import refuses

pytestmark = pytest.mark.usefixtures("either_version")
Array = np.ndarray[Any, Any]
X = np.random.default_rng(0).normal(size=(3, 5, 7)) * 3


def close(result: Array, exact: Array, dtype: Any) -> None:
    assert (result.dtype, result.shape) == (dtype, exact.shape)
    eps = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(result.astype(np.float64), exact, rtol=6 * eps, atol=6 * eps)


def test_softmax_and_norms_at_the_edges() -> None:
    assert ops.softmax(np.array([[1e30, -1e30, 0.0]])).tolist() == [[1, 0, 0]]
    assert ops.log_softmax(np.array([[1e30, 0.0]])).tolist() == [[0, -1e30]]
    assert ops.softmax(np.array([[-math.inf, 0.0]])).tolist() == [[0, 1]]
    for row in ([-math.inf, -math.inf], [math.inf, 0.0], [math.nan, 0.0]):
        assert np.isnan(ops.softmax(np.array(row))).any()
    assert ops.softmax(np.array([[5.0]])).tolist() == [[1]]
    for op in (ops.softmax, ops.log_softmax):
        assert op(np.ones((0, 3))).shape == (0, 3)
        assert op(np.ones((3, 0))).shape == (3, 0)
    one = np.ones(3, np.float32)
    assert ops.rmsnorm(np.zeros((2, 3), np.float32), one).tolist() == [[0, 0, 0]] * 2
    assert ops.rmsnorm(np.ones((0, 3), np.float32), one).shape == (0, 3)
    assert ops.rmsnorm(np.full(3, 6e4, np.float16), one.astype(np.float16)).tolist() == [1, 1, 1]
    assert ops.layernorm(np.full((1, 3), 1e6, np.float32), one, one).tolist() == [[1, 1, 1]]
    assert np.isnan(ops.rmsnorm(np.array([math.nan, 1, 1], np.float32), one)).all()
    assert ops.layernorm(np.ones((2, 0)), np.ones(0), None).shape == (2, 0)


def test_weights_may_be_wider_than_what_they_scale() -> None:
    x, weight = X.astype(ml_dtypes.bfloat16), np.full(7, 1.001, np.float32)
    exact = call("rmsnorm", x.astype(np.float64), weight.astype(np.float64))
    close(ops.rmsnorm(x, weight), exact, ml_dtypes.bfloat16)


def test_what_does_not_fit_is_named() -> None:
    said = r"weight must be as long as the last axis of x, but x is \(3, 5, 7\), weight is \(5,"
    refuses(said, ops.rmsnorm, X, np.ones(5))
    said = r"layernorm: bias must be as long .*bias is \(7, 1\)"
    refuses(said, ops.layernorm, X, np.ones(7), np.ones((7, 1)))
    refuses("of type int", ops.layernorm, X, 1, None)
    one = np.array(1.0)  # as long as no axis at all
    refuses(r"rmsnorm: .* x is \(\), weight is \(\)", ops.rmsnorm, one, one)
    refuses(r"layernorm: .* x is \(\), bias is \(\)", ops.layernorm, one, None, one)
    refuses(r"layernorm: .* array of int64", ops.layernorm, X, np.ones(7, np.int64), None)
    for op in (ops.softmax, ops.log_softmax):
        refuses("floating-point numbers", op, np.arange(3))
