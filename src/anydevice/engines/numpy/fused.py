"""NumPy's own versions of composite ops: a few rows at a time, in memory that is used again.

The definitions make an array of full size for each step. Large ones do not fit the processor's
cache, and every step waits for memory; these stay within it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_FULL = (np.dtype(np.float32), np.dtype(np.float64))
_BLOCK = 1 << 16
"""Elements at a time: a few arrays of so many fit the cache of one core."""


def _softmax(x: Array, axis: int) -> Any:
    if not _suits(x) or axis not in (-1, x.ndim - 1):
        return NotImplemented
    rows, result, step = _by_rows(x)
    with np.errstate(all="ignore"):
        for start in range(0, len(rows), step):
            given, block = rows[start : start + step], result[start : start + step]
            np.subtract(given, given.max(-1, keepdims=True), out=block)
            np.exp(block, out=block)
            block /= block.sum(-1, keepdims=True)
    return result.reshape(x.shape)


def _rmsnorm(x: Array, weight: Array, eps: float) -> Any:
    if not _suits(x):
        return NotImplemented
    rows, result, step = _by_rows(x)
    factor = weight.astype(x.dtype, copy=False)
    with np.errstate(all="ignore"):
        for start in range(0, len(rows), step):
            given, block = rows[start : start + step], result[start : start + step]
            np.multiply(given, given, out=block)
            scale = block.sum(-1, keepdims=True)
            scale /= x.shape[-1]
            scale += eps
            np.sqrt(scale, out=scale)
            np.divide(given, scale, out=block)
            block *= factor
    return result.reshape(x.shape)


def _silu(x: Array) -> Any:
    return _swiglu(x, None)


def _swiglu(gate: Array, up: Array | None) -> Any:
    if not _suits(gate):
        return NotImplemented
    given = np.ascontiguousarray(gate).reshape(-1)
    other = None if up is None else np.ascontiguousarray(up).reshape(-1)
    result = np.empty_like(given)
    with np.errstate(all="ignore"):
        for start in range(0, given.size, _BLOCK):
            part = slice(start, start + _BLOCK)
            block = result[part]
            np.negative(given[part], out=block)
            np.exp(block, out=block)
            block += 1
            np.divide(given[part], block, out=block)
            if other is not None:
                block *= other[part]
    return result.reshape(gate.shape)


def _suits(x: Array) -> bool:
    """Whether an array is large enough to gain, and of a type that is computed with as it is."""
    return x.size > _BLOCK and x.dtype in _FULL


def _by_rows(x: Array) -> tuple[Array, Array, int]:
    """The array as rows, room for a result of that shape, and how many rows to take at a time."""
    rows = x.reshape(-1, x.shape[-1])
    return rows, np.empty(rows.shape, x.dtype), max(1, _BLOCK // x.shape[-1])


FUSED: Mapping[str, Callable[..., Any]] = {
    "flip": lambda x, axes: np.flip(x, axes) if axes else x,
    "rmsnorm": _rmsnorm,
    "silu": _silu,
    "softmax": _softmax,
    "swiglu": _swiglu,
}
