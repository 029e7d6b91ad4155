"""Shapes, order and types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from anydevice import ops
from anydevice.core.dtypes import DTYPES
from anydevice.errors import ConfigurationError, UnsupportedError

X = np.arange(24.0).reshape(2, 3, 4)


def test_reshape() -> None:
    assert np.array_equal(ops.reshape(X, (4, -1)), X.reshape(4, 6))
    assert np.array_equal(ops.reshape(X, -1), X.ravel())
    assert np.array_equal(ops.reshape(X.transpose(2, 1, 0), 24), X.transpose(2, 1, 0).ravel())
    assert ops.reshape(X[:0], (0, 5)).shape == (0, 5)
    assert ops.reshape(X[:0], (-1, 5)).shape == (0, 5)
    assert ops.reshape(np.array(1.0), (1, 1)).shape == (1, 1)


def test_permute_and_broadcast() -> None:
    assert np.array_equal(ops.permute(X, (2, 0, 1)), X.transpose(2, 0, 1))
    assert np.array_equal(ops.permute(X, (-1, 0, 1)), X.transpose(2, 0, 1))
    assert ops.broadcast_to(X[:, :1], (5, 2, 3, 4)).shape == (5, 2, 3, 4)
    assert ops.broadcast_to(np.array(1.0), (0, 2)).shape == (0, 2)


def test_concat_and_part() -> None:
    assert np.array_equal(ops.concat([X, X], -1), np.concatenate([X, X], -1))
    assert np.array_equal(ops.concat([X]), X)
    assert np.array_equal(ops.part(X, -1, 1, 4, 2), X[..., 1:4:2])
    assert ops.part(X, 0, 2, 2).shape == (0, 3, 4)


@pytest.mark.parametrize("dtype", ["bfloat16", DTYPES["bfloat16"], ml_dtypes.bfloat16])
def test_astype(dtype: Any) -> None:
    assert ops.astype(X, dtype).dtype == ml_dtypes.bfloat16
    assert ops.astype(X, "float64") is X


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "too many": (lambda: ops.reshape(X, (5, 5)), r"\(5, 5\) has as many elements as x, but x is"),
    "not whole": (lambda: ops.reshape(X, (5, -1)), r"\(5, -1\)"),
    "two unknown": (lambda: ops.reshape(X, (-1, -1)), r"\(-1, -1\)"),
    "negative": (lambda: ops.reshape(X, (-2, -12)), r"\(-2, -12\)"),
    "zero and unknown": (lambda: ops.reshape(X[:0], (0, -1)), r"\(0, -1\)"),
    "axis twice": (lambda: ops.permute(X, (0, 0, 1)), r"permute: \(0, 0, 1\) names each axis"),
    "axis missing": (lambda: ops.permute(X, (0, 1)), "names each axis"),
    "no axis": (lambda: ops.permute(X, (0, 1, 3)), r"axis 3 is one of x, but x is \(2, 3, 4\)"),
    "a truth for an axis": (lambda: ops.permute(X[0], (True, False)), "axis is an integer"),
    "a truth for a size": (lambda: ops.broadcast_to(X, (True, 2, 3, 4)), "True is in it"),
    "below nothing": (lambda: ops.broadcast_to(X, (-1, 2, 3, 4)), r"repeated to \(-1, 2, 3, 4\)"),
    "nothing": (lambda: ops.concat([]), "there are no arrays"),
    "sizes": (lambda: ops.concat([X, X[:, :2]], 0), r"another is \(2, 2, 4\)"),
    "axes": (lambda: ops.concat([X, X[0]], 0), r"another is \(3, 4\)"),
    "types": (lambda: ops.concat([X, X.astype("f")]), "the first is float64, another is float32"),
    "beyond": (lambda: ops.part(X, 0, 0, 3), "0:3:1 is a range of axis 0"),
    "from the end": (lambda: ops.part(X, 0, -1, 2), "counted from the front"),
    "backwards": (lambda: ops.part(X, 0, 2, 1), "2:1:1"),
    "no step": (lambda: ops.part(X, 0, 0, 1, 0), "0:1:0"),
    "not repeated": (lambda: ops.broadcast_to(X, (2, 3, 5)), r"x can be repeated to \(2, 3, 5\)"),
    "fewer axes": (lambda: ops.broadcast_to(X, (3, 4)), r"x can be repeated to \(3, 4\)"),
    "no type": (lambda: ops.astype(X, "half"), "did you mean 'float16'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_named(name: str) -> None:
    call, said = WRONG[name]
    with pytest.raises(ConfigurationError, match=said):
        call()


def test_it_is_said_how_jax_gets_64_bits_in_code_and_for_commands() -> None:
    import jax.numpy as jnp

    with pytest.raises(
        UnsupportedError, match=r"configure\(x64=True\).* x64 = true in anydevice\."
    ):
        ops.astype(jnp.ones(2, jnp.float32), "float64")
