"""Attention of one new token to a cache: as fast as the cache is read.

Flash-decoding (Dao et al. 2023, "Flash-Decoding for long-context inference"): split-K over the
keys. Each part computes an online softmax (Milakov and Gimelshein 2018) and stores its average and
the logarithm of its sum; a second, small kernel combines the parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anydevice._core.record import Record
from anydevice._engines.torch.triton.launch import (
    multiprocessors,
    overlapping,
    shared_memory,
    start,
)

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def"

LOG2_E = 1.4426950408889634
LEAST_GROUP = 16
"""The fewest rows that the matrix units take; query heads of one key head are padded to it."""


class DecodeTile(Record):
    """Tile: `parts` of the keys, `keys` at a time, `warps` of a program, `stages` of loads."""

    parts: int
    keys: int
    warps: int
    stages: int


def decode_tile(pairs: int, keys: int, size: int, processors: int, shared: int) -> DecodeTile:
    """Return the fastest measured for `pairs` of batch and key head, within `shared` bytes each."""
    if pairs * triton.cdiv(keys, 64) <= 4 * processors:
        return DecodeTile(triton.cdiv(keys, 64), 64 if size <= 128 else 32, 4, 1)
    parts = max(1, processors // pairs)
    for block, stages in ((128, 3), (64, 3), (64, 2), (32, 2)):
        # Two bytes an element, keys and values, and a little for what is exchanged.
        if (stages - 1) * 4 * block * size + 16384 <= shared:
            return DecodeTile(parts, block, 4, stages)
    return DecodeTile(parts, 32, 4, 1)


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    lengths: Tensor | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    tile: DecodeTile | None = None,
) -> Tensor:
    """Attention of `q` (batch, heads, 1, size) to `k` and `v` (batch, kv heads, keys, size).

    `lengths` (batch,) says how many keys are valid, `window` how many of those, from the last, are
    seen. `soft_cap` bounds the scores, and `sinks` (heads,) take part in their softmax without a
    value. Scores and sums are float32. The last axes must be contiguous and `size` a power of two.
    """
    batch, heads, _, size = q.shape
    _, key_heads, keys, _ = k.shape
    out = torch.empty((batch, heads, 1, size), dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    if not keys:
        return out.zero_()
    pairs, device = batch * key_heads, q.device
    cut = tile or decode_tile(pairs, keys, size, multiprocessors(device), shared_memory(device))
    options = overlapping(device)
    alone = cut.parts == 1
    averages, sums = out, out
    if not alone:
        averages = q.new_empty((batch, heads, cut.parts, size), dtype=torch.float32)
        sums = q.new_empty((batch, heads, cut.parts), dtype=torch.float32)
    group = heads // key_heads
    start(
        _part, (cut.parts, pairs), device,
        q, k, v, q if lengths is None else lengths, q if sinks is None else sinks, averages, sums,
        scale if soft_cap else scale * LOG2_E, soft_cap or 0.0,
        key_heads, keys, keys if window is None else window,
        *q.stride()[:2], *k.stride()[:3], *v.stride()[:3],
        measured=lengths is not None, capped=soft_cap is not None, sunk=sinks is not None,
        alone=alone, group=group,
        block_group=max(LEAST_GROUP, triton.next_power_of_2(group)), size=size, block=cut.keys,
        stages=cut.stages, num_warps=cut.warps, **options,
    )  # fmt: skip
    if not alone:
        start(
            _together, (batch * heads, triton.cdiv(size, 32)), device, averages, sums,
            q if sinks is None else sinks, out, heads, sunk=sinks is not None, parts=cut.parts,
            block_parts=triton.next_power_of_2(cut.parts), size=size,
            block=min(size, 32), num_warps=4, **options,
        )  # fmt: skip
    return out


@triton.jit
def _cap_scores(scores, soft_cap):
    """Cap the scores by tanh, and multiply them by log2(e) for `exp2`."""
    power = tl.exp2(scores * (2 * 1.4426950408889634 / soft_cap))
    return (1 - 2 / (1 + power)) * (soft_cap * 1.4426950408889634)


# Grid (parts, batch × key heads). A program has block_group × size queries in registers, the query
# heads of one key head, and walks its part in tiles of block × size keys and values.
@triton.jit(do_not_specialize=["key_heads", "keys", "window", "soft_cap"])
def _part(
    q, k, v, lengths, sinks, averages, sums, scale, soft_cap, key_heads, keys, window,
    q_batch, q_head, k_batch, k_head, k_key, v_batch, v_head, v_key,
    measured: tl.constexpr, capped: tl.constexpr, sunk: tl.constexpr, alone: tl.constexpr,
    group: tl.constexpr, block_group: tl.constexpr, size: tl.constexpr, block: tl.constexpr,
    stages: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    if overlap:
        tl.extra.cuda.gdc_wait()
    part = tl.program_id(0)
    parts = tl.num_programs(0)
    pair = tl.program_id(1)
    batch = (pair // key_heads).to(tl.int64)
    key_head = (pair % key_heads).to(tl.int64)
    valid = keys
    if measured:
        valid = tl.maximum(tl.minimum(tl.load(lengths + batch), keys), 0).to(tl.int32)
    begin = tl.maximum(valid - window, 0)
    share = tl.cdiv(tl.cdiv(valid - begin, parts), block) * block
    first = begin + part * share
    last = tl.minimum(first + share, valid)

    member = tl.arange(0, block_group)
    place = tl.arange(0, size)
    head = key_head * group + member
    query = tl.load(
        q + batch * q_batch + head[:, None] * q_head + place[None, :],
        (member < group)[:, None],
        0,
    )
    key_rows = k + batch * k_batch + key_head * k_head
    value_rows = v + batch * v_batch + key_head * v_head

    largest = tl.full([block_group], float("-inf"), tl.float32)
    total = tl.zeros([block_group], tl.float32)
    gathered = tl.zeros([block_group, size], tl.float32)
    for at in tl.range(first, last, block, num_stages=stages):
        row = at + tl.arange(0, block)
        known = row < last
        line = row.to(tl.int64)
        key = tl.load(
            key_rows + line[None, :] * k_key + place[:, None],
            known[None, :],
            0,
            eviction_policy="evict_first",
        )
        value = tl.load(
            value_rows + line[:, None] * v_key + place[None, :],
            known[:, None],
            0,
            eviction_policy="evict_first",
        )
        scores = tl.dot(query, key) * scale
        if capped:
            scores = _cap_scores(scores, soft_cap)
        scores = tl.where(known[None, :], scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        fade = tl.exp2(largest - larger)
        total = total * fade + tl.sum(weights, 1)
        gathered = tl.dot(weights.to(value.dtype), value, gathered * fade[:, None])
        largest = larger

    if overlap:
        tl.extra.cuda.gdc_launch_dependents()
    if sunk and alone:
        sink = tl.load(sinks + head, member < group, 0).to(tl.float32) * 1.4426950408889634
        larger = tl.maximum(largest, sink)
        larger = tl.where(larger == float("-inf"), 0.0, larger)
        fade = tl.exp2(largest - larger)
        total = total * fade + tl.exp2(sink - larger)
        gathered = gathered * fade[:, None]
    # A part that saw no key has the sum 0: its average is 0, and its logarithm -inf.
    average = gathered / tl.where(total == 0.0, 1.0, total)[:, None]
    heads = key_heads * group
    if alone:
        target = averages + (batch * heads + head)[:, None] * size + place[None, :]
        tl.store(target, average.to(averages.dtype.element_ty), (member < group)[:, None])
    else:
        spot = (batch * heads + head) * parts + part
        target = averages + spot[:, None] * size + place[None, :]
        tl.store(target, average, (member < group)[:, None])
        tl.store(sums + spot, largest + tl.log2(total), member < group)


# Grid (batch × heads, size / block). A program weighs the averages (parts, block) of one head.
@triton.jit(do_not_specialize=["heads"])
def _together(
    averages, sums, sinks, out, heads,
    sunk: tl.constexpr, parts: tl.constexpr, block_parts: tl.constexpr, size: tl.constexpr,
    block: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, block_parts)
    place = tl.program_id(1) * block + tl.arange(0, block)
    known = part < parts
    sum_of = tl.load(sums + head * parts + part, known, float("-inf"))
    largest = tl.max(sum_of, 0)
    if sunk:
        sink = tl.load(sinks + head % heads).to(tl.float32) * 1.4426950408889634
        largest = tl.maximum(largest, sink)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    share = tl.exp2(sum_of - largest)
    rows = averages + (head * parts + part)[:, None] * size + place[None, :]
    average = tl.load(rows, known[:, None], 0)
    total = tl.sum(share, 0)
    if sunk:
        total += tl.exp2(sink - largest)
    result = tl.sum(average * share[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + head * size + place, result.to(out.dtype.element_ty))
