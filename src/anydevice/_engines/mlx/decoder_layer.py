"""Products on the CPU by NumPy, in MLX's own memory, where MLX has no fast ones.

MLX for Linux comes with the reference BLAS, three to seven times slower than NumPy's. NumPy reads
an MLX array without a copy. Its results have no gradient, so this is for blocks that need none.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from anydevice._core.engine import LayerConfig
from anydevice._core.quantized import QuantizedWeight
from anydevice._engines.decoder_layer import decoder_layer as on_host
from anydevice._engines.quantized import block_scales
from anydevice._engines.quantized import linear as on_host_quantized

_CPU = mx.Device(mx.cpu, 0)


class _Allowed(threading.local):
    now: bool = False


_allowed = _Allowed()


@contextmanager
def host_products() -> Iterator[None]:
    """Let this thread compute products on the CPU with NumPy within the block."""
    before, _allowed.now = _allowed.now, sys.platform == "linux"
    try:
        yield
    finally:
        _allowed.now = before


def linear(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    """Compute `ops.linear`; `NotImplemented` outside of such a block, or on another device."""
    if not (_allows(x) and x.size):
        return NotImplemented
    result = np.matmul(np.asarray(x), np.asarray(weight).T)
    if bias is not None:
        result += np.asarray(bias)
    return mx.array(result)


def quantized_linear(x: mx.array, weight: QuantizedWeight, bias: mx.array | None) -> mx.array:
    """Compute `ops.quantized_linear` in float32, by MLX's own product if it has the scheme."""
    if _allows(x) and x.size:
        arrays: dict[str, Any] = {name: _host(array) for name, array in weight.arrays.items()}
        given = () if bias is None else (np.asarray(bias),)
        return mx.array(on_host_quantized(np.asarray(x), weight.with_arrays(arrays), *given))
    codes: Any = weight.codes
    plain = weight.high is None and weight.table is None and weight.block in (32, 64, 128)
    if not (plain and x.size and x.dtype != mx.float64 and codes.shape[-1] % 4 == 0):
        return NotImplemented
    scales = block_scales(weight.scales, weight.super_scales, _wide)
    if weight.minimums is None:
        minimums = scales * -weight.zero
    else:
        minimums = block_scales(weight.minimums, weight.super_minimums, _wide)
    words = mx.contiguous(codes).view(mx.uint32)
    product = mx.quantized_matmul(
        _wide(x), words, scales, minimums, True, weight.block, weight.bits
    )
    return (product if bias is None else product + _wide(bias)).astype(x.dtype)


def _wide(x: mx.array) -> mx.array:
    return x.astype(mx.float32)


def _host(x: Any) -> Any:
    return np.asarray(_wide(x) if x.dtype == mx.bfloat16 else x)


def decoder_layer(
    x: mx.array, positions: mx.array, keys: mx.array, values: mx.array, *others: Any
) -> Any:
    """Compute a layer as `LayerConfig` says: x, keys and values; the cache is written in place."""
    *weights, config = others
    assert isinstance(config, LayerConfig)
    if not _allows(x):
        return NotImplemented
    arrays = (x, positions, keys, values, *weights)
    views: list[Any] = [None if array is None else np.asarray(array) for array in arrays]
    result = on_host(*views, config)  # type: ignore[call-arg]
    return result if result is NotImplemented else (mx.array(result[0]), keys, values)


def _allows(x: mx.array) -> bool:
    return _allowed.now and x.dtype == mx.float32 and bool(mx.default_device() == _CPU)
