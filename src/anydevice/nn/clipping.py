"""Keeping gradients from being too large."""

from __future__ import annotations

import math
from typing import Any

from anydevice import ops
from anydevice.errors import ConfigurationError
from anydevice.nn.trees import Tree, leaves, refilled
from anydevice.ops.dispatch import primitives
from anydevice.ops.widening import wide

Array = Any


def global_norm(gradients: Tree) -> Array:
    """The root of the sum of all squares in a tree, added up in float32: one number.

    It is float64 where all gradients are. Raises `ConfigurationError` where there are none.

    >>> import numpy
    >>> global_norm({"a": numpy.array([3.0]), "b": [numpy.array([[4.0]])]}).tolist()
    5.0
    """
    return ops.reshape(_norm(leaves(gradients)), ())


def clipped(gradients: Tree, limit: float) -> tuple[Tree, Array]:
    """The gradients, scaled down together where their global norm is above `limit`, and that norm.

    Those whose norm is smaller stay as they are, bit for bit. Where one is not a number, all
    become so, and the norm says it. Raises `ConfigurationError` for a limit that is not above 0.

    >>> import numpy
    >>> clipped({"a": numpy.array([3.0, 4.0])}, limit=1.0)[0]["a"].round(3).tolist()
    [0.6, 0.8]
    """
    number = isinstance(limit, int | float) and not isinstance(limit, bool)
    if not number or not 0 < limit < math.inf:
        raise ConfigurationError(
            f"gradients are clipped to a finite norm above 0, not {limit!r}", source="limit"
        )
    arrays = leaves(gradients)
    norm = _norm(arrays)
    scale = ops.divide(float(limit), ops.maximum(norm, float(limit)))
    scaled = [_scaled(array, scale) for array in arrays]
    return refilled(gradients, scaled), ops.reshape(norm, ())


def _norm(arrays: list[Array]) -> Array:
    """Of shape (1,)."""
    if not arrays:
        raise ConfigurationError("there are no gradients in this tree, so they have no norm")
    types = {wide(primitives(array).dtype(array)).name for array in arrays}
    dtype = "float64" if types == {"float64"} else "float32"
    squares = [_square(array, dtype) for array in arrays]
    return ops.sqrt(ops.sum(ops.concat(squares, axis=0), axis=0, keepdims=True))


def _square(array: Array, dtype: str) -> Array:
    row = ops.astype(ops.reshape(array, (-1,)), dtype)
    return ops.sum(ops.multiply(row, row), axis=0, keepdims=True)


def _scaled(array: Array, scale: Array) -> Array:
    dtype = primitives(array).dtype(array)
    wider = ops.multiply(ops.astype(array, wide(dtype)), ops.astype(scale, wide(dtype)))
    return ops.reshape(ops.astype(wider, dtype), tuple(array.shape))
