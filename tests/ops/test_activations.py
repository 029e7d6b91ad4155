"""The functions between layers, against the formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from anydevice import ops
from anydevice.errors import ConfigurationError

pytestmark = pytest.mark.usefixtures("either_version")

Array = np.ndarray[Any, Any]


def gelu(x: float) -> float:
    return x * 0.5 * math.erfc(-x / math.sqrt(2))


def approximate_gelu(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


FORMULAS: dict[str, tuple[Callable[[Any], Any], Callable[[float], float]]] = {
    "relu": (ops.relu, lambda x: max(x, 0.0)),
    "silu": (ops.silu, silu),
    "gelu": (ops.gelu, gelu),
    "gelu, approximate": (lambda x: ops.gelu(x, approximate=True), approximate_gelu),
    "swiglu": (lambda x: ops.swiglu(x, x), lambda x: silu(x) * x),
}
TYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("name", FORMULAS)
def test_against_the_formula(name: str, dtype: Any) -> None:
    op, formula = FORMULAS[name]
    x = np.linspace(-8, 8, 161).reshape(7, 23).astype(dtype)
    result = op(x)
    exact = np.vectorize(formula)(x.astype(np.float64))
    assert (result.dtype, result.shape) == (dtype, x.shape)
    eps = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(result.astype(np.float64), exact, rtol=eps * 4, atol=8 * eps)


@pytest.mark.parametrize("name", FORMULAS)
def test_edges(name: str) -> None:
    op, _ = FORMULAS[name]
    assert op(np.ones((0, 4), np.float32)).shape == (0, 4)
    assert op(np.array(0.0)).tolist() == 0
    large = op(np.array([60.0, -60.0, math.inf, math.nan], np.float32))
    assert large[0] in (60.0, 3600.0)
    assert large[1] == pytest.approx(0, abs=1e-20)
    assert large[2] == math.inf
    assert math.isnan(large[3])


def test_narrow_numbers_are_rounded_once() -> None:
    gate, up = np.random.default_rng(0).normal(size=(2, 50, 64)).astype(ml_dtypes.bfloat16)
    exact = ops.swiglu(gate.astype(np.float32), up.astype(np.float32))
    assert np.array_equal(ops.swiglu(gate, up), exact.astype(ml_dtypes.bfloat16))


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"gate is \(2, 3\), up is \(3,\)"):
        ops.swiglu(np.ones((2, 3)), np.ones(3))
    with pytest.raises(ConfigurationError, match="one dtype"):
        ops.swiglu(np.ones(3), np.ones(3, np.float32))
    for op in (ops.silu, ops.gelu):
        with pytest.raises(ConfigurationError, match="floating-point numbers"):
            op(np.arange(3))
