"""A decoder layer for one token of each row in NumPy, with a tenth of the calls of one in ops."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from anydevice._core.engine import LayerConfig
from anydevice._core.rope_scaling import depends_on_length, frequencies

Array = np.ndarray[Any, Any]
Scaling = tuple[tuple[str, Any], ...]

_FLOAT32 = np.dtype(np.float32)
_sum: Any = np.add.reduce


def decoder_layer(
    x: Array, positions: Array, keys: Array, values: Array, attention_norm: Array, qkv: Array,
    output: Array, mlp_norm: Array, gate_up: Array, down: Array, qkv_bias: Any, output_bias: Any,
    query_norm: Any, key_norm: Any, config: LayerConfig,
) -> Any:  # fmt: skip
    """Compute a layer as `LayerConfig` says: x, keys and values; the cache is written in place."""
    if not _serves(x, keys, values, config):
        return NotImplemented
    at = tuple(positions.tolist())
    rows, heads, size = len(at), config.heads, config.size
    rope_heads, eps, factor = heads + config.kv_heads, config.eps, config.factor
    stream = x.reshape(rows, -1)
    y = _rmsnorm(stream, attention_norm, eps) @ qkv.T
    if qkv_bias is not None:
        y += qkv_bias
    y = y.reshape(rows, -1, size)
    both, v = y[:, :rope_heads], y[:, rope_heads:]
    if query_norm is not None:
        both[:, :heads] = _rmsnorm(both[:, :heads], query_norm, eps)
        both[:, heads:] = _rmsnorm(both[:, heads:], key_norm, eps)
    if config.rotated:
        both = _rotate(both, at, config)
    y = np.empty((rows, heads * size), np.float32)
    for row, position in enumerate(at):
        cached = _write_cache(
            keys[row], values[row], both[row, heads:], v[row], position, config.ring
        )
        y[row] = _attend(both[row, :heads], *cached, config)
    y = y @ output.T
    if output_bias is not None:
        y += output_bias
    stream = stream + (y if factor == 1 else y * np.float32(factor))
    y = _swiglu(_rmsnorm(stream, mlp_norm, eps) @ gate_up.T) @ down.T
    stream += y if factor == 1 else y * np.float32(factor)
    return stream.reshape(x.shape), keys, values


def _serves(x: Array, keys: Array, values: Array, config: LayerConfig) -> bool:
    return (
        x.dtype == _FLOAT32 == keys.dtype
        and x.shape[1] == 1
        and keys.flags.writeable
        and keys.flags.c_contiguous
        and values.flags.c_contiguous
        and values.flags.writeable
        and not (config.scaling and depends_on_length(dict(config.scaling)))
    )


def _rmsnorm(x: Array, weight: Array, eps: float) -> Array:
    mean = _sum(x * x, -1, keepdims=True) * np.float32(1 / x.shape[-1])
    return x * (1 / np.sqrt(mean + np.float32(eps))) * weight


def _rotate(x: Array, at: tuple[int, ...], config: LayerConfig) -> Array:
    """Rotate queries and keys (rows, heads, size) by their positions."""
    size, interleaved = config.rotated, config.interleaved
    cosine, sine = _tables(at, size, config.theta, config.scaling)
    step, half = (2, 1) if interleaved else (1, size // 2)
    first, second = x[..., : size - half : step], x[..., half:size:step]
    rotated = x.copy()
    rotated[..., : size - half : step] = first * cosine - second * sine
    rotated[..., half:size:step] = second * cosine + first * sine
    return rotated


@lru_cache(maxsize=16)
def _tables(at: tuple[int, ...], size: int, theta: float, scaling: Scaling) -> tuple[Array, Array]:
    """Return cosines and sines (rows, 1, pairs), the same for all layers of a step."""
    steps, factor = frequencies(size, theta, dict(scaling) if scaling else None)
    angles = np.array(at, np.float32)[:, None, None] * np.array(steps, np.float32)
    return np.cos(angles) * np.float32(factor), np.sin(angles) * np.float32(factor)


def _write_cache(
    keys: Array, values: Array, k: Array, v: Array, position: int, ring: bool
) -> tuple[Array, Array]:
    """Return the keys and values (kv heads, used, size) that a row sees, its own among them."""
    slots = keys.shape[1]
    slot = position % slots if ring else position
    if slot < slots:
        keys[:, slot], values[:, slot] = k, v
    used = min(position + 1, slots)
    return keys[:, :used], values[:, :used]


def _attend(q: Array, keys: Array, values: Array, config: LayerConfig) -> Array:
    """Return the attention of one row (heads × size)."""
    q = q.reshape(config.kv_heads, -1, config.size) * np.float32(config.scale)
    scores = q @ keys.transpose(0, 2, 1)
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= _sum(scores, -1, keepdims=True)
    return (scores @ values).reshape(-1)


def _swiglu(y: Array) -> Array:
    """Return SiLU of the first half, times the second half."""
    half = y.shape[-1] // 2
    gate, up = y[:, :half], y[:, half:]
    # exp of a large number is infinity, and the gate then 0, as it should be.
    with np.errstate(over="ignore"):
        gated: Array = gate / (1 + np.exp(-gate)) * up
    return gated


def final_logits(x: Array, norm: Array, head: Array, eps: float) -> Any:
    """Multiply the normed x (rows, hidden) with the head: (rows, vocabulary)."""
    if x.dtype != _FLOAT32 or head.dtype != _FLOAT32:
        return NotImplemented
    return _rmsnorm(x, norm, eps) @ head.T


def draw_token(
    logits: Array, numbers: Array, seeds: Array, place: Array, greedy: bool, *_: object
) -> Any:
    """Return the likeliest token of each row, or -1 if a logit is not finite."""
    if not greedy or logits.dtype != _FLOAT32:
        return NotImplemented
    finite = np.isfinite(_sum(logits, -1))
    return np.where(finite, logits.argmax(-1), -1).astype(np.int32)
