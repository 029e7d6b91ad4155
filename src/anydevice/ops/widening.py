"""Floating numbers of 16 bits are computed with as `float32`, and rounded once, at the end."""

from __future__ import annotations

from anydevice.core.dtypes import DTYPES, DType
from anydevice.core.primitives import Primitives
from anydevice.ops.dispatch import Array

FLOAT32 = DTYPES["float32"]
INT32 = DTYPES["int32"]
BOOL = DTYPES["bool"]


def wide(dtype: DType) -> DType:
    """The type in which an op computes: `float64` for itself, `float32` for all others.

    >>> wide(DTYPES["bfloat16"]).name, wide(DTYPES["float64"]).name
    ('float32', 'float64')
    """
    return dtype if dtype.bits == 64 and dtype.kind == "float" else FLOAT32


def widened(xp: Primitives, x: Array) -> Array:
    """The array as `float32` where it holds floating numbers of fewer bits, else itself."""
    dtype = xp.dtype(x)
    return xp.astype(x, FLOAT32) if dtype.kind == "float" and dtype.bits < 32 else x
