"""A decoder layer for one token of each row on the CPU, in as few calls of PyTorch as it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from anydevice._core.engine import LayerConfig
from anydevice._core.rope_scaling import depends_on_length, frequencies

Scaling = tuple[tuple[str, Any], ...]

_linear = torch._C._nn.linear
_NOTHING = torch.zeros(1)
"""The addend of `addmv` with `beta` 0, which is not read."""
_FLOAT32 = torch.float32
_attend = torch._C._nn.scaled_dot_product_attention
_silu = torch._C._nn.silu


_FAST_ROW = 2048
"""Numbers of a row from which MKL reads a matrix by rows as fast as by columns."""


def lay_out_matrices(matrices: Sequence[dict[str, Any]]) -> None:
    """Store each "weight" by columns if its product with one vector is faster that way.

    On an AMD EPYC it takes 15 to 30 % less processor time with rows of 576 to 1,536 numbers, 1 to
    13 % with 2,048, and more with longer ones. The time of 450 rows stays the same.
    """
    for matrix in matrices:
        weight = matrix["weight"]
        is_served = type(weight) is Tensor and weight.is_cpu and weight.dtype is _FLOAT32
        if is_served and weight.ndim == 2 and weight.shape[1] < _FAST_ROW:
            matrix["weight"] = weight.t().contiguous().t()


def decoder_layer(
    x: Tensor, positions: Tensor, keys: Tensor, values: Tensor, attention_norm: Tensor,
    qkv: Tensor, output: Tensor, mlp_norm: Tensor, gate_up: Tensor, down: Tensor,
    qkv_bias: Tensor | None, output_bias: Tensor | None, query_norm: Tensor | None,
    key_norm: Tensor | None, config: LayerConfig,
) -> Any:  # fmt: skip
    """See `LayerConfig`: x, keys and values after it; the cache is written in place."""
    if not _serves(x, keys, values, qkv, config):
        return NotImplemented
    at = tuple(positions.tolist())
    if len(at) == 1 and query_norm is None and qkv_bias is None and output_bias is None:
        weights = attention_norm, qkv, output, mlp_norm, gate_up, down
        return _of_one_row(x, at, keys, values, weights, config), keys, values
    rows, heads, kv_heads, size = len(at), config.heads, config.kv_heads, config.size
    rope_heads, eps, factor = heads + kv_heads, config.eps, config.factor
    y = _linear(_rmsnorm(x, attention_norm, eps), qkv, qkv_bias).view(rows, -1, size)
    both, v = y[:, :rope_heads], y[:, rope_heads:]
    if query_norm is not None:
        q, k = _rmsnorm(both[:, :heads], query_norm, eps), _rmsnorm(both[:, heads:], key_norm, eps)
        both = torch.cat((q, k), 1)
    if config.rotated:
        both = _rotate(both, at, config)
    used, visible = _write_cache(keys, values, both[:, heads:], v, at, config.ring)
    q = both[:, :heads].reshape(rows, kv_heads, heads // kv_heads, size)
    k, v = keys[:, :, :used], values[:, :, :used]
    y = _attend(q, k, v, visible, 0.0, False, scale=config.scale).reshape(rows, 1, -1)
    y = _linear(y, output, output_bias)
    x = x + (y if factor == 1 else y * factor)
    gate, up = _linear(_rmsnorm(x, mlp_norm, eps), gate_up).chunk(2, -1)
    y = _linear(_silu(gate).mul_(up), down)
    return x.add_(y if factor == 1 else y * factor), keys, values


def _of_one_row(
    x: Tensor,
    at: tuple[int],
    keys: Tensor,
    values: Tensor,
    weights: tuple[Tensor, ...],
    config: LayerConfig,
) -> Tensor:
    """Return the same for one row without biases: products of vectors start faster."""
    attention_norm, qkv, output, mlp_norm, gate_up, down = weights
    heads, kv_heads, size, eps = config.heads, config.kv_heads, config.size, config.eps
    rope_heads, factor, slots = heads + kv_heads, config.factor, keys.shape[2]
    stream = x.reshape(-1)
    y = _normed_product(qkv, stream, attention_norm, eps).view(1, -1, size)
    both, v = y.split_with_sizes((rope_heads, kv_heads), 1)
    if config.rotated:
        both = _rotate(both, at, config)
    q, k = both.split_with_sizes((heads, kv_heads), 1)
    slot = at[0] % slots if config.ring else at[0]
    if slot < slots:
        keys.select(2, slot).copy_(k)
        values.select(2, slot).copy_(v)
    used = min(at[0] + 1, slots)
    q, k, v = q.view(1, kv_heads, -1, size), keys.narrow(2, 0, used), values.narrow(2, 0, used)
    attended = _attend(q, k, v, None, 0.0, False, scale=config.scale)
    stream = torch.addmv(stream, output, attended.reshape(-1), alpha=factor)
    gate, up = _normed_product(gate_up, stream, mlp_norm, eps).chunk(2)
    return torch.addmv(stream, down, _silu(gate).mul_(up), alpha=factor).view(1, 1, -1)


def _normed_product(matrix: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the product with the RMS norm of a vector, whose root is the factor of the BLAS."""
    mean = torch.dot(x, x).item() / x.shape[0] + eps
    factor = mean**-0.5 if mean else math.inf
    return torch.addmv(_NOTHING, matrix, torch.mul(x, weight), beta=0, alpha=factor)


def _serves(x: Tensor, keys: Tensor, values: Tensor, qkv: Tensor, config: LayerConfig) -> bool:
    return (
        type(x) is Tensor
        and x.is_cpu
        and x.dtype is _FLOAT32
        and keys.dtype is _FLOAT32
        and qkv.dtype is _FLOAT32
        and x.shape[1] == 1
        and keys.shape[3] == values.shape[3]
        and not ((x.requires_grad or qkv.requires_grad) and torch.is_grad_enabled())
        and not (config.scaling and depends_on_length(dict(config.scaling)))
        and not torch.compiler.is_compiling()
    )


def _rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.rms_norm(x, weight.shape, weight, eps)


def _rotate(x: Tensor, at: tuple[int, ...], config: LayerConfig) -> Tensor:
    """Rotate queries and keys (rows, heads, size) by their positions."""
    size, rotated, interleaved = config.size, config.rotated, config.interleaved
    cosine, sine = _tables(at, rotated, config.theta, config.scaling, interleaved)
    y = x if rotated == size else x[..., :rotated]
    if interleaved:
        swapped = y.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        swapped = y.roll(rotated // 2, -1)
    y = torch.addcmul(y * cosine, swapped, sine)
    return y if rotated == size else torch.cat((y, x[..., rotated:]), -1)


@lru_cache(maxsize=16)
def _tables(
    at: tuple[int, ...], size: int, theta: float, scaling: Scaling, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (rows, 1, size); the sines of a pair are -sine and sine."""
    frequency, factor = frequencies(size, theta, dict(scaling) if scaling else None)
    steps = torch.tensor(frequency, dtype=torch.float32)
    angles = torch.tensor(at, dtype=torch.float32)[:, None, None] * steps
    cosine, sine = angles.cos() * factor, angles.sin() * factor
    if interleaved:
        apart = torch.stack((cosine, cosine), -1), torch.stack((-sine, sine), -1)
        return apart[0].flatten(-2), apart[1].flatten(-2)
    return torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)


def _write_cache(
    keys: Tensor, values: Tensor, k: Tensor, v: Tensor, at: tuple[int, ...], ring: bool
) -> tuple[int, Tensor | None]:
    """Write k and v; return the number of slots that rows see, and which if they differ."""
    slots = keys.shape[2]
    for row, position in enumerate(at):
        slot = position % slots if ring else position
        if slot < slots:
            keys[row, :, slot] = k[row]
            values[row, :, slot] = v[row]
    used = [min(position + 1, slots) for position in at]
    most = max(used)
    if min(used) == most:
        return most, None
    valid = torch.tensor(used).view(-1, 1, 1, 1)
    return most, torch.arange(most) < valid
