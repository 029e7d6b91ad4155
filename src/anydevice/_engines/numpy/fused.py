"""NumPy's own versions of composite ops: a few rows at a time, within the processor's cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from anydevice._core.quantized import QuantizedWeight
from anydevice._engines.decoder_layer import decoder_layer, draw_token, final_logits
from anydevice._engines.numpy.primitives import is_narrow, wide
from anydevice._engines.quantized import dequantize, linear

Array = np.ndarray[Any, Any]

_FULL = (np.dtype(np.float32), np.dtype(np.float64))
_MULTIPLIED: Callable[..., Any] = np.multiply.reduce
"""The function behind `np.prod`, called directly."""
_MAX_SCORES = 1 << 26
_BLOCK = 1 << 16
"""Elements of a block: a few arrays of this size fit the cache of one core."""


def _softmax(x: Array, axis: int) -> Any:
    if not _suits(x) or axis not in (-1, x.ndim - 1):
        return NotImplemented
    rows, result, step = _by_rows(x)
    with np.errstate(all="ignore"):
        for start in range(0, len(rows), step):
            source, block = rows[start : start + step], result[start : start + step]
            np.subtract(source, source.max(-1, keepdims=True), out=block)
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
            source, block = rows[start : start + step], result[start : start + step]
            np.multiply(source, source, out=block)
            scale = block.sum(-1, keepdims=True)
            scale /= x.shape[-1]
            scale += eps
            np.sqrt(scale, out=scale)
            np.divide(source, scale, out=block)
            block *= factor
    return result.reshape(x.shape)


def _swiglu(gate: Array, up: Array | None) -> Any:
    if not _suits(gate):
        return NotImplemented
    gates = np.ascontiguousarray(gate).reshape(-1)
    other = None if up is None else np.ascontiguousarray(up).reshape(-1)
    result = np.empty_like(gates)
    with np.errstate(all="ignore"):
        for start in range(0, gates.size, _BLOCK):
            part = slice(start, start + _BLOCK)
            block = result[part]
            np.negative(gates[part], out=block)
            np.exp(block, out=block)
            block += 1
            np.divide(gates[part], block, out=block)
            if other is not None:
                block *= other[part]
    return result.reshape(gate.shape)


def _attention(
    q: Array, k: Array, v: Array, causal: bool, scale: float | None, mask: Any, window: int | None,
    lengths: Any, soft_cap: float | None = None, sinks: Any = None,
) -> Any:  # fmt: skip
    """Attend to the valid keys of each text alone, without copying them."""
    _, heads, queries, size = q.shape
    _, kv_heads, keys, _ = k.shape
    nothing = not (q.size and k.size and v.size)
    if mask is not None or lengths is None or nothing or heads * queries * keys > _MAX_SCORES:
        return NotImplemented
    kind = q.dtype if q.dtype in _FULL else np.dtype(np.float32)
    factor = kind.type(size**-0.5 if scale is None else scale)
    rows = (kv_heads, heads // kv_heads * queries)
    extra = None
    if sinks is not None:
        extra = np.repeat(sinks.astype(kind, copy=False), queries).reshape(*rows, 1)
    result = np.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    with np.errstate(all="ignore"):
        for text, length in enumerate(lengths.tolist()):
            valid = min(max(length, 0), keys)
            first = 0 if window is None else max(0, valid - queries + 1 - window)
            own_keys, values = (x[text, :, first:valid].astype(kind, copy=False) for x in (k, v))
            if not own_keys.size:
                continue
            queries_of_text = q[text].astype(kind, copy=False).reshape(*rows, -1) * factor
            scores = queries_of_text @ own_keys.swapaxes(1, 2)
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            if causal and queries > 1:
                key = np.arange(first, valid)
                own = np.arange(valid - queries, valid)[:, None]
                hidden = key > own
                if window is not None:
                    hidden |= key <= own - window
                scores.reshape(kv_heads, -1, queries, len(key))[:, :, hidden] = -np.inf
            weights, total = _weights(scores, extra)
            averaged = weights @ values / total
            result[text] = averaged.reshape(heads, queries, -1)
    return result


def _weights(scores: Array, sinks: Any) -> tuple[Array, Array]:
    """Return the exponentials of the scores, and their divisors."""
    largest = scores.max(-1, keepdims=True)
    if sinks is not None:
        largest = np.maximum(largest, sinks)
    largest[largest == -np.inf] = 0  # a query that sees nothing
    scores -= largest
    weights = np.exp(scores, out=scores)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks - largest)
    total[total == 0] = 1
    return weights, total


def _argsort(x: Array, axis: int, descending: bool) -> Any:
    if not descending:
        return np.argsort(wide(x), axis, kind="stable").astype(np.int32)
    # Sorted backwards and reversed, equal numbers keep their order.
    order = np.flip(np.argsort(np.flip(wide(x), axis), axis, kind="stable"), axis)
    return (x.shape[axis] - 1 - order).astype(np.int32)


def _sort(x: Array, axis: int, descending: bool) -> Any:
    if is_narrow(x):
        return NotImplemented
    if not descending:
        return np.sort(x, axis, kind="stable")
    return np.flip(np.sort(np.flip(x, axis), axis, kind="stable"), axis)


def _prod(x: Array, axes: tuple[int, ...], keepdims: bool) -> Any:
    if is_narrow(x):
        return NotImplemented
    with np.errstate(all="ignore"):
        return np.asarray(_MULTIPLIED(x, axes, x.dtype, keepdims=keepdims))


def _cumulative_sum(x: Array, axis: int) -> Any:
    if x.dtype.kind in "iu":
        return np.add.accumulate(x, axis, x.dtype)
    kind = np.dtype(np.float32) if is_narrow(x) else x.dtype
    with np.errstate(all="ignore"):
        return np.add.accumulate(x, axis, kind).astype(x.dtype, copy=False)


def _truths(function: np.ufunc, x: Array, axes: tuple[int, ...], keepdims: bool) -> Any:
    return np.asarray(function.reduce(x, axes, bool, keepdims=keepdims))


def _suits(x: Array) -> bool:
    """Whether an array is large enough to gain, and of a type that is computed with as it is."""
    return x.size > _BLOCK and x.dtype in _FULL


def _by_rows(x: Array) -> tuple[Array, Array, int]:
    """Return the array as rows, an empty result of that shape, and the rows of a block."""
    rows = x.reshape(-1, x.shape[-1])
    return rows, np.empty(rows.shape, x.dtype), max(1, _BLOCK // x.shape[-1])


def _quantized_linear(x: Array, weight: QuantizedWeight, bias: Array | None) -> Any:
    return linear(x, weight, bias) if x.dtype == np.float32 else NotImplemented


FUSED: Mapping[str, Callable[..., Any]] = {
    "all": partial(_truths, np.logical_and),
    "any": partial(_truths, np.logical_or),
    "attention": _attention,
    "argmin": lambda x, axis: np.asarray(np.argmin(wide(x), axis)).astype(np.int32),
    "argsort": _argsort,
    "cumulative_sum": _cumulative_sum,
    "decoder_layer": decoder_layer,
    "dequantize": dequantize,
    "draw_token": draw_token,
    "final_logits": final_logits,
    "flip": lambda x, axes: np.flip(x, axes) if axes else x,
    "isfinite": lambda x: np.asarray(np.isfinite(x)),
    "prod": _prod,
    "quantized_linear": _quantized_linear,
    "rmsnorm": _rmsnorm,
    "round": lambda x: np.asarray(np.rint(x)) if x.dtype in _FULL else NotImplemented,
    "silu": lambda x: _swiglu(x, None),
    "softmax": _softmax,
    "sort": _sort,
    "swiglu": _swiglu,
}
