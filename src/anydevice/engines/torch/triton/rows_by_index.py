"""Rows by their index: embedded tokens, and keys or values of new tokens that go into a cache.

Each is read once and written once, by one launch: a step of decoding has few others so small.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anydevice.core.record import Record
from anydevice.engines.torch.triton.launch import start

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def"


class WriteTile(Record):
    """How the work is cut: so many tokens of a head for a program, by so many warps."""

    tokens: int
    warps: int


WRITE_TILE = WriteTile(32, 4)


def cache_write(
    cache: torch.Tensor, new: torch.Tensor, positions: torch.Tensor, tile: WriteTile = WRITE_TILE
) -> torch.Tensor:
    """`cache` (batch, heads, slots, size) itself, with `new` (batch, heads, tokens, size) in it.

    `positions`, (tokens,) or (batch, tokens), says in which slot; what is outside is left out. The
    last axes of cache and new are contiguous.
    """
    batch, heads, tokens, size = new.shape
    if not new.numel():
        return cache
    block = min(tile.tokens, triton.next_power_of_2(tokens))
    start(
        _write, (triton.cdiv(tokens, block), heads, batch), cache.device,
        cache, new, positions, tokens, cache.shape[2],
        positions.stride(0) if positions.ndim == 2 else 0, positions.stride(-1),
        *cache.stride()[:3], *new.stride()[:3],
        size=size, width=triton.next_power_of_2(size), block=block, num_warps=tile.warps,
    )  # fmt: skip
    return cache


EMBEDDING_COLUMNS, EMBEDDING_WARPS = 1024, 4


def embedding(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The rows of `weight` (rows, size) for contiguous ids, (…, size); NaN where there is none."""
    count, size = weight.shape
    out = weight.new_empty((*ids.shape, size))
    if not out.numel():
        return out
    block = min(EMBEDDING_COLUMNS, triton.next_power_of_2(size))
    start(
        _embed, (ids.numel(), triton.cdiv(size, block)), weight.device,
        weight, ids, out, count, size, weight.stride(0), block=block, num_warps=EMBEDDING_WARPS,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count"])
def _embed(weight, ids, out, count, size, step, block: tl.constexpr):
    token = tl.program_id(0) + tl.arange(0, 1).to(tl.int64)
    row = tl.load(ids + token).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    known = (column < size) & (row >= 0) & (row < count)
    value = tl.load(weight + row * step + column, known, float("nan"))
    tl.store(out + token * size + column, value, column < size)


@triton.jit(do_not_specialize=["tokens", "slots"])
def _write(
    cache, new, positions, tokens, slots, positions_batch, positions_token,
    cache_batch, cache_head, cache_slot, new_batch, new_head, new_token,
    size: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * block + tl.arange(0, block)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    known = token < tokens
    slot = tl.load(positions + batch * positions_batch + token * positions_token, known, -1)
    slot = slot.to(tl.int64)
    place = tl.arange(0, width)[None, :]
    here = (known & (slot >= 0) & (slot < slots))[:, None] & (place < size)
    source = new + batch * new_batch + head * new_head + token.to(tl.int64)[:, None] * new_token
    target = cache + batch * cache_batch + head * cache_head + slot[:, None] * cache_slot
    tl.store(target + place, tl.load(source + place, here, 0), here)
