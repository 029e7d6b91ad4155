"""Attention by PyTorch's own kernels, where what is asked for is something that they do."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

PREFER: Mapping[tuple[int, int], tuple[SDPBackend, ...]] = {
    (9, 0): (
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ),
}
"""By compute capability, the order in which PyTorch's kernels are tried for many queries.

On an H200, causal and of 16-bit numbers, cuDNN's reaches 527 TFLOP/s with 4,096 tokens and 630
with 16,384, flash attention's 266 and 335. Cards that are not named keep PyTorch's own order.
"""

_orders: dict[Any, tuple[SDPBackend, ...]] = {}


def attention(
    q: Any,
    k: Any,
    v: Any,
    causal: bool,
    scale: float | None,
    mask: Any,
    window: int | None,
    lengths: Any,
) -> Any:
    """The op of that name; `NotImplemented` where there is nothing to attend to or to compute."""
    asked, held = q.shape, k.shape
    if 0 in asked or 0 in held:
        return NotImplemented
    queries, keys = asked[2], held[2]
    if lengths is None and mask is None and window is None:
        if queries == 1 or not causal:
            if scale is None and asked[1] == held[1] and not q.is_cuda:
                return scaled_dot_product_attention(q, k, v)
            return _of_groups(q, k, v, None, scale)
        if queries == keys:
            return _from_the_first_on(q, k, v, scale)
    seen = _seen(q, keys, causal, mask, window, lengths)
    some = seen.any(-1, keepdim=True)
    # A query that sees nothing would give what is no number; it sees all, and is left out after.
    return torch.where(some, _of_groups(q, k, v, seen | ~some, scale), 0.0)


def _from_the_first_on(q: Any, k: Any, v: Any, scale: float | None) -> Any:
    """As many queries as keys, each seeing those up to its own."""
    with _preferred(q):
        return scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


def _of_groups(q: Any, k: Any, v: Any, seen: Any, scale: float | None) -> Any:
    """Without an order among the queries: the heads of one key head are rows of one matrix.

    So no key is copied, and kernels that know nothing of grouped heads serve too.
    """
    batch, heads, queries, size = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    groups = heads // kv_heads
    if groups > 1:
        q = q.reshape(batch, kv_heads, groups * queries, size)
        if seen is not None:
            seen = seen.expand(seen.shape[0], heads if seen.shape[1] > 1 else groups, queries, keys)
            seen = seen.reshape(seen.shape[0], -1, groups * queries, keys)
    with _preferred(q):
        result = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    return result.reshape(batch, heads, queries, size)


def _seen(
    q: Any, keys: int, causal: bool, mask: Any, window: int | None, lengths: Any
) -> torch.Tensor:
    """Which keys a query may see: four axes, of which the first two may be 1."""
    queries = q.shape[2]
    key = torch.arange(keys, device=q.device)
    valid = keys if lengths is None else _within(lengths, keys).reshape(-1, 1, 1, 1)
    seen = (key < valid) if lengths is not None else torch.ones_like(key, dtype=torch.bool)
    if causal:
        own = torch.arange(queries, device=q.device)[:, None] + (valid - queries)
        seen = seen & (key <= own)
        if window is not None:
            seen = seen & (key > own - window)
    if mask is not None:
        seen = seen & (mask[:, None, None, :] if mask.ndim == 2 else mask)
    shape = (1,) * (4 - seen.ndim) + tuple(seen.shape)
    return seen.reshape(shape).expand(shape[0], shape[1], queries, keys)


def _within(lengths: Any, keys: int) -> Any:
    return lengths.to(torch.int64).clamp(0, keys)


def _preferred(q: Any) -> AbstractContextManager[Any]:
    """The order of PyTorch's kernels for this card; one query is served by what PyTorch says."""
    if not q.is_cuda or q.shape[2] == 1:
        return nullcontext()
    order = _orders.get(q.device)
    if order is None:
        order = _orders[q.device] = PREFER.get(torch.cuda.get_device_capability(q.device), ())
    scope: AbstractContextManager[Any] = (
        sdpa_kernel(list(order), set_priority=True) if order else nullcontext()
    )
    return scope
