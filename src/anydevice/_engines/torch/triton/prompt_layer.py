"""The tokens of a prompt through a decoder layer: few launches, and few calls on the host.

Products are the library's, and so is attention. Between them, one launch rotates queries and keys
and puts keys and values into the cache; products add to the residual stream where it lies. For a
short prompt, calls of single ops would take longer on the host than the work on the device.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812, as everyone calls it
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend

from anydevice._core.engine import LayerConfig
from anydevice._core.quantized import QuantizedWeight
from anydevice._core.record import replace
from anydevice._engines.torch.fused import PREFER, causal_attention
from anydevice._engines.torch.triton.decode_attention import (
    MOST_GROUP,
    Rotation,
    _head,
    _partner,
)
from anydevice._engines.torch.triton.decode_products import MOST_ROWS
from anydevice._engines.torch.triton.decoder_layer import LayerWeights, decoder_layer
from anydevice._engines.torch.triton.launch import start
from anydevice._engines.torch.triton.quantized import dequantized, has_float8_rows, multiply_rounded
from anydevice._engines.torch.triton.rope import sine_and_cosine
from anydevice._engines.torch.triton.rows import rmsnorm, swiglu

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def"

LEAST_ROUNDED = 256
"""Prompts of at least this many tokens are rounded to float8 for products with float8 weights."""
TOKENS, HEADS, WARPS = 16, 8, 4
"""Tokens and heads of a program that rotates them, and its warps."""


def prompt_layer(
    x: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    weights: LayerWeights,
    config: LayerConfig,
    rotation: Rotation,
    only: Tensor | None,
) -> Tensor:
    """Apply the layer to `x` (rows, tokens, hidden); `x` and the cache are overwritten.

    `positions` (rows,) says where the first token of each row stands; tokens see those of their row
    up to themselves, and none that were in the cache. The rest is as in `decoder_layer`.

    With `only` (rows,), that token of each row alone has a result, (rows, 1, hidden): after the
    last layer the others are not needed. They have their keys and values in the cache.
    """
    rows, tokens, hidden = x.shape
    norms = weights.query_norm, weights.key_norm
    y = rmsnorm(x, weights.attention_norm, config.eps)
    if only is not None:
        query_width = config.heads * config.size
        bias = None if weights.qkv_bias is None else weights.qkv_bias[query_width:]
        y = F.linear(y, matrix(weights.qkv, x.dtype)[query_width:], bias)
        rotate(y, positions, keys, values, replace(config, heads=0), rotation, norms)
        token = x[torch.arange(rows, device=x.device), only][:, None]
        return decoder_layer(token, positions + only, keys, values, weights, config, rotation)
    y = _product(y, weights.qkv, weights.qkv_bias, config.exact)
    queries, k, v = rotate(y, positions, keys, values, config, rotation, norms)
    y = attend(queries, k, v, config.scale)
    y = y.transpose(1, 2).reshape(rows * tokens, config.heads * config.size)
    stream = x.view(rows * tokens, hidden)
    _add_product(stream, y, weights.output, weights.output_bias, config)
    y = rmsnorm(stream, weights.mlp_norm, config.eps)
    gate, up = _product(y, weights.gate_up, None, config.exact).chunk(2, 1)
    _add_product(stream, swiglu(gate, up), weights.down, None, config)
    return x


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend causally to (rows, heads, tokens, size); PyTorch takes long to choose a kernel."""
    if q.shape[3] not in (64, 128) or not _prefers_cudnn(q.device):
        return causal_attention(q, k, v, scale)
    return torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, False, 0.0, True, False, scale=scale
    )[0]


@cache
def _prefers_cudnn(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    order = PREFER.get(torch.cuda.get_device_capability(device), ())
    return order[:1] == (SDPBackend.CUDNN_ATTENTION,) and torch.backends.cudnn.is_available()


def matrix(weight: Any, dtype: torch.dtype) -> Tensor:
    """Return the matrix of a weight that may be quantized."""
    return weight if isinstance(weight, Tensor) else dequantized(weight, dtype)[0]


def _product(x: Tensor, weight: Any, bias: Tensor | None, exact: bool) -> Tensor:
    if _is_rounded(x, weight, exact):
        y = multiply_rounded(x.view(-1, x.shape[-1]), weight, bias)
        return y.view(*x.shape[:-1], -1)
    return F.linear(x, matrix(weight, x.dtype), bias)


def _is_rounded(x: Tensor, weight: Any, exact: bool) -> bool:
    """Whether x is rounded to float8, because PyTorch's float8 product is faster."""
    # With scales for rows, PyTorch's product gives bfloat16 alone on some cards.
    if exact or x.dtype != torch.bfloat16 or not isinstance(weight, QuantizedWeight):
        return False
    if not has_float8_rows(weight):
        return False
    rows = x.numel() // x.shape[-1]
    return rows >= LEAST_ROUNDED and rows % 16 == 0 and weight.shape[0] % 16 == 0


def _add_product(
    stream: Tensor, x: Tensor, weight: Any, bias: Tensor | None, config: LayerConfig
) -> None:
    """Add to the residual stream, rounding once where there is no bias."""
    if bias is None and not _is_rounded(x, weight, config.exact):
        stream.addmm_(x, matrix(weight, x.dtype).t(), alpha=config.factor)
    else:
        stream.add_(_product(x, weight, bias, config.exact), alpha=config.factor)


def rotate(
    qkv: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    config: LayerConfig,
    rotation: Rotation,
    norms: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and rotate queries and keys, and write keys and values into the cache.

    Returns all three as (rows, heads, tokens, size), token by token in memory. Without heads, `qkv`
    has keys and values alone.
    """
    query_norm, key_norm = norms
    frequencies, factor = rotation
    rows, tokens, _ = qkv.shape
    heads, kv_heads, size = config.heads, config.kv_heads, config.size
    every = heads + 2 * kv_heads
    made = heads + kv_heads if heads else 0
    out = torch.empty((rows, tokens, made, size), dtype=qkv.dtype, device=qkv.device)
    start(
        _rotate, (triton.cdiv(tokens, TOKENS), triton.cdiv(every, HEADS), rows), qkv.device,
        qkv, positions, qkv if frequencies is None else frequencies,
        qkv if query_norm is None else query_norm, qkv if key_norm is None else key_norm,
        out, keys, values, tokens, keys.shape[2], factor, config.eps,
        heads=heads, kv_heads=kv_heads, size=size, width=triton.next_power_of_2(size),
        rotated=0 if frequencies is None else config.rotated, interleaved=config.interleaved,
        normed=query_norm is not None, block=TOKENS, some=HEADS, num_warps=WARPS,
    )  # fmt: skip
    by_head = out.transpose(1, 2)
    v = qkv.view(rows, tokens, every, size)[:, :, heads + kv_heads :].transpose(1, 2)
    return by_head[:, :heads], by_head[:, heads:], v


# Grid (tokens / block, all heads / some, rows): a program rotates `some` heads of `block` tokens,
# with one table of angles, and stores keys and values in the cache.
@triton.jit(do_not_specialize=["tokens"])
def _rotate(
    qkv, positions, frequencies, query_norm, key_norm, out, keys, values, tokens, slots, factor,
    eps, heads: tl.constexpr, kv_heads: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
    rotated: tl.constexpr, interleaved: tl.constexpr, normed: tl.constexpr, block: tl.constexpr,
    some: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * block + tl.arange(0, block)
    known = (token < tokens)[:, None]
    position = tl.load(positions + row).to(tl.int32) + token
    place = tl.arange(0, width)
    other, couple, sign = _partner(place, rotated, interleaved)
    cosine = 1.0
    sine = 0.0
    if rotated > 0:  # once for all heads
        rotates = place < rotated
        frequency = tl.load(frequencies + couple, rotates, 0)
        angle = position.to(tl.float32)[:, None] * frequency[None, :]
        sine, cosine = sine_and_cosine(angle)
        sine = tl.where(rotates[None, :], sine * sign[None, :] * factor, 0.0)
        cosine = tl.where(rotates[None, :], cosine * factor, 1.0)
    line = (row * tokens + token)[:, None]
    inside = known & (place < size)[None, :]
    writable = inside & ((position >= 0) & (position < slots))[:, None]
    for number in range(some):
        head = tl.program_id(1) * some + number
        source = qkv + (line * (heads + 2 * kv_heads) + head) * size
        target = out + (line * (heads + kv_heads) + head) * size + place[None, :]
        if head < heads:
            value = _head(
                source, known, query_norm, place[None, :], other[None, :], cosine, sine, eps,
                size, rotated, normed,
            )  # fmt: skip
            tl.store(target, value.to(out.dtype.element_ty), inside)
        elif head < heads + kv_heads:
            value = _head(
                source, known, key_norm, place[None, :], other[None, :], cosine, sine, eps,
                size, rotated, normed,
            )  # fmt: skip
            if heads > 0:
                tl.store(target, value.to(out.dtype.element_ty), inside)
            slot = (row * kv_heads + head - heads) * slots + position[:, None]
            tl.store(keys + slot * size + place[None, :], value.to(out.dtype.element_ty), writable)
        elif head < heads + 2 * kv_heads:
            fresh = tl.load(source + place[None, :], inside, 0)
            slot = (row * kv_heads + head - heads - kv_heads) * slots + position[:, None]
            tl.store(values + slot * size + place[None, :], fresh, writable)


def fits(x: Tensor, keys: Tensor, config: LayerConfig, only: Tensor | None) -> bool:
    """Whether the kernels have these sizes, for inputs that any layer takes."""
    if only is not None and (
        only.shape != x.shape[:1]
        or x.shape[0] > MOST_ROWS
        or config.heads // config.kv_heads > MOST_GROUP
    ):
        return False
    return bool(x.shape[1] > 1 and not config.ring and config.size % 8 == 0)
