"""CuPy's versions of composite ops: chains of elementwise steps, each fused into one kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import cupy
import numpy as np
from cupy import ndarray

from anydevice._core.quantized import QuantizedWeight
from anydevice._engines.cupy.primitives import ordered
from anydevice._engines.quantized import dequantizer

_FULL = (np.dtype(np.float32), np.dtype(np.float64))


@cupy.fuse(kernel_name="anydevice_silu")  # type: ignore[untyped-decorator,unused-ignore]
def _fused_silu(x: ndarray) -> ndarray:
    return x / (cupy.exp(-x) + 1)


@cupy.fuse(kernel_name="anydevice_swiglu")  # type: ignore[untyped-decorator,unused-ignore]
def _fused_swiglu(gate: ndarray, up: ndarray) -> ndarray:
    return gate / (cupy.exp(-gate) + 1) * up


def _argsort(x: ndarray, axis: int, descending: bool) -> ndarray:
    with x.device:
        if not x.size:
            return cupy.empty(x.shape, np.int32)
        # The sort is stable; with all bits of the keys inverted, it descends.
        keys = ordered(x)
        return cupy.argsort(~keys if descending else keys, axis=axis).astype(np.int32)


def _cumulative_sum(x: ndarray, axis: int) -> ndarray:
    with x.device:
        kind = x.dtype if x.dtype in _FULL or x.dtype.kind in "iu" else np.dtype(np.float32)
        return cupy.cumsum(x.astype(kind, copy=False), axis, kind).astype(x.dtype, copy=False)


def _prod(x: ndarray, axes: tuple[int, ...], keepdims: bool) -> ndarray:
    if x.dtype not in _FULL and x.dtype.kind not in "iu":
        return NotImplemented
    with x.device:
        return cupy.prod(x, axes, x.dtype, keepdims=keepdims)


def _truths(
    function: Callable[..., ndarray], x: ndarray, axes: tuple[int, ...], keepdims: bool
) -> ndarray:
    if x.dtype != np.bool_ or not axes:
        return NotImplemented
    with x.device:
        return function(x, axes, keepdims=keepdims)


def _full_only(function: Callable[..., ndarray], *arrays: ndarray) -> ndarray:
    """Call a function of `float32` or `float64`: the definitions round 16-bit numbers only once."""
    if arrays[0].dtype not in _FULL or arrays[0].dtype != arrays[-1].dtype:
        return NotImplemented
    with arrays[0].device:
        return function(*arrays)


_dequantized = dequantizer(
    cupy.stack,
    lambda x: x.astype(np.float32),
    lambda table, codes: cupy.asarray(table, np.float32)[codes],
)


def _dequantize(weight: QuantizedWeight) -> ndarray:
    with weight.codes.device:  # type: ignore[attr-defined]
        return _dequantized(weight)


FUSED: Mapping[str, Callable[..., Any]] = {
    "all": partial(_truths, cupy.all),
    "any": partial(_truths, cupy.any),
    "argsort": _argsort,
    "cumulative_sum": _cumulative_sum,
    "flip": lambda x, axes: cupy.flip(x, axes) if axes else x,
    "prod": _prod,
    "round": partial(_full_only, cupy.rint),
    "silu": partial(_full_only, _fused_silu),
    "swiglu": partial(_full_only, _fused_swiglu),
    "dequantize": _dequantize,
}
