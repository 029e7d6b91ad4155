"""Attention of a decoding step in one launch: rope, the new key and value, and all earlier ones.

Flash-decoding (Dao et al. 2023) with the combination in the same launch: an atomic counter tells
the last program that ends. Each program takes a part of the keys of one key head and row of the
batch; a part without keys returns. The first part also writes the new key and value into the cache.

Keys and values of earlier tokens, positions and angles depend on nothing in the step: they are
loaded and computed while the launch ahead still runs. That is right because the product ahead lets
this launch begin only when all before it has ended (`in_order`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from anydevice._core.engine import LayerConfig
from anydevice._core.record import Record
from anydevice._engines.torch.triton.decode_products import Release, begin, end, padded_rows, wait
from anydevice._engines.torch.triton.launch import counters, multiprocessors, overlapping, start
from anydevice._engines.torch.triton.rope import sine_and_cosine

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def"

LOG2_E = 1.4426950408889634
LEAST_GROUP = 16
"""The fewest rows that the matrix units take; query heads of one key head are padded to it."""
MOST_GROUP = 16
EVERY_KEY = 2**31 - 1
NOT_SEEN = tl.constexpr(-1e30)
"""A score that no key has, and finite: the difference of two such is no NaN."""


class AttentionTile(Record):
    """Tile: at most `parts` of the keys, `keys` at a time, `warps` and `stages` of loads.

    There are fewer parts where `per_processor` programs for each multiprocessor are enough.
    `release` is when the next launch may begin.
    """

    parts: int
    keys: int
    warps: int
    stages: int = 2
    per_processor: int = 4
    release: Release = "first"


TILES: Mapping[tuple[int, int], AttentionTile] = {
    (64, 1): AttentionTile(parts=64, keys=128, warps=4, stages=1, release="waited"),
    (64, 16): AttentionTile(parts=64, keys=128, warps=4, per_processor=2),
    (64, 32): AttentionTile(parts=64, keys=128, warps=4),
    (128, 1): AttentionTile(parts=64, keys=128, warps=4, stages=1, release="waited"),
    (128, 16): AttentionTile(parts=64, keys=128, warps=4, per_processor=2),
    (128, 32): AttentionTile(parts=64, keys=128, warps=8),
    (256, 1): AttentionTile(parts=64, keys=64, warps=8),
    (256, 16): AttentionTile(parts=64, keys=64, warps=8),
    (256, 32): AttentionTile(parts=64, keys=64, warps=8),
}
"""By the size of a head and the padded rows, up to 32 of them: the tiles for an H200."""
LARGEST_SIZE = 256


class Rotation(NamedTuple):
    """Rope: the angles of one position, (rotated / 2,) float32, and the factor of cosine and sine.

    `_core/rope_scaling.py` computes both; without `frequencies`, nothing is rotated.
    """

    frequencies: Tensor | None = None
    factor: float = 1.0


def usual_tile(size: int, rows: int) -> AttentionTile:
    """Return the tile for heads of this size and this number of rows."""
    return TILES[max(64, triton.next_power_of_2(size)), min(32, padded_rows(rows))]


def attention_parts(tile: AttentionTile, pairs: int, slots: int, processors: int) -> int:
    """Return the number of parts of a cache's keys, for `pairs` of row and key head.

    >>> attention_parts(AttentionTile(parts=64, keys=128, warps=8), 8, 4096, 132)
    32
    """
    enough = max(1, tile.per_processor * processors // pairs)
    return int(max(1, min(tile.parts, -(-slots // tile.keys), enough)))


def attend(
    qkv: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    config: LayerConfig,
    rotation: Rotation,
    norms: tuple[Tensor | None, Tensor | None] = (None, None),
    tile: AttentionTile | None = None,
    window: int = EVERY_KEY,
) -> Tensor:
    """Attention of one new token of each row; its key and value are written into the cache.

    `qkv` (rows, (heads + 2 × kv heads) × size) has the token's queries, keys and values,
    `positions` (rows,) says where it stands. `keys` and `values` are (rows, kv heads, slots,
    size); a position that a cache without a ring does not have is not written. `norms` are those
    of each query and key head, (size,). `window` is the number of visible keys, its own included.
    The result is (rows, heads × size). All tensors are contiguous. Scores and sums are float32.
    """
    query_norm, key_norm = norms
    frequencies, factor = rotation
    rows, slots = qkv.shape[0], keys.shape[2]
    heads, key_heads, size = config.heads, config.kv_heads, config.size
    out = torch.empty((rows, heads * size), dtype=qkv.dtype, device=qkv.device)
    width = max(16, triton.next_power_of_2(size))
    cut = tile or usual_tile(width, rows)
    pairs, group = rows * key_heads, heads // key_heads
    parts = attention_parts(cut, pairs, slots, multiprocessors(qkv.device))
    averages = sums = counts = out
    if parts > 1:
        counts = counters(qkv.device, pairs)
        averages = qkv.new_empty((pairs, parts, group, width), dtype=torch.float32)
        sums = qkv.new_empty((pairs, 2, group, parts), dtype=torch.float32)
    start(
        _attend, (parts, pairs), qkv.device,
        qkv, positions, keys, values, qkv if frequencies is None else frequencies,
        qkv if query_norm is None else query_norm, qkv if key_norm is None else key_norm,
        averages, sums, counts, out,
        slots, window, config.scale * LOG2_E, factor, config.eps,
        key_heads=key_heads, group=group, block_group=LEAST_GROUP, size=size, width=width,
        rotated=0 if frequencies is None else config.rotated, interleaved=config.interleaved,
        normed=query_norm is not None, ring=config.ring, block=cut.keys, parts=parts,
        block_parts=triton.next_power_of_2(parts), block_members=triton.next_power_of_2(group),
        stages=cut.stages, release=cut.release, num_warps=cut.warps,
        **overlapping(qkv.device),
    )  # fmt: skip
    return out


@triton.jit
def _partner(place, rotated: tl.constexpr, interleaved: tl.constexpr):
    """Return the partner of each element, the number of their pair, and the sign of the sine."""
    if interleaved:
        other = place ^ 1
        pair = place // 2
        sign = tl.where(place % 2 == 0, -1.0, 1.0)
    else:
        first = place < rotated // 2
        other = tl.where(first, place + rotated // 2, place - rotated // 2)
        pair = tl.where(first, place, place - rotated // 2)
        sign = tl.where(first, -1.0, 1.0)
    turned = place < rotated
    return tl.where(turned, other, place), tl.where(turned, pair, 0), sign


@triton.jit
def _head(
    start, known, norm, place, other, cosine, sine, eps,
    size: tl.constexpr, rotated: tl.constexpr, normed: tl.constexpr,
):  # fmt: skip
    """Load heads (…, size) as float32, normed and rotated; each begins at `start`."""
    here = known & (place < size)
    value = tl.load(start + place, here, 0).to(tl.float32)
    root = 1.0
    if normed:
        root = tl.rsqrt(tl.sum(value * value, 1) / size + eps)[:, None]
        value *= root * tl.load(norm + place, place < size, 0).to(tl.float32)
    if rotated > 0:
        # Read again and not exchanged between threads: it is in the cache.
        partner = tl.load(start + other, here, 0).to(tl.float32)
        if normed:
            partner *= root * tl.load(norm + other, place < size, 0).to(tl.float32)
        value = value * cosine + partner * sine
    return value


@triton.jit
def _is_visible(slot, last, position, slots, window, ring: tl.constexpr):
    """Whether a slot of the cache has a key that the token attends to, its own not counted."""
    visible = slot < last
    if ring:
        age = (position - slot) % slots
        visible = visible & (age > 0) & (age < window)
    return visible


@triton.jit
def _add_keys(query, key, value, visible, scale, largest, total, gathered):
    """Add a tile of keys (keys, size) to the online softmax (Milakov and Gimelshein 2018)."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    scores = tl.where(visible[None, :], scores, NOT_SEEN)
    larger = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - larger[:, None])
    fade = tl.exp2(largest - larger)
    total = total * fade + tl.sum(weights, 1)
    gathered = tl.dot(
        weights.to(value.dtype), value, gathered * fade[:, None], input_precision="ieee"
    )
    return larger, total, gathered


# Grid (parts, rows × key heads). A program has block_group × width queries in registers and walks
# its part of the cache in tiles of block × width keys and values.
@triton.jit(do_not_specialize=["window"])
def _attend(
    qkv, positions, keys, values, frequencies, query_norm, key_norm,
    averages, sums, counts, out, slots, window, scale, factor, eps,
    key_heads: tl.constexpr, group: tl.constexpr, block_group: tl.constexpr, size: tl.constexpr,
    width: tl.constexpr, rotated: tl.constexpr, interleaved: tl.constexpr, normed: tl.constexpr,
    ring: tl.constexpr, block: tl.constexpr, parts: tl.constexpr, block_parts: tl.constexpr,
    block_members: tl.constexpr, stages: tl.constexpr, release: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    begin(overlap, release)
    part = tl.program_id(0)
    pair = tl.program_id(1)
    row = pair // key_heads
    key_head = pair % key_heads
    heads: tl.constexpr = key_heads * group
    position = tl.load(positions + row).to(tl.int32)

    # The keys that are there already: those of the first tile are asked for at once.
    cached = tl.maximum(tl.minimum(position, slots), 0)
    oldest = 0
    if not ring:
        oldest = tl.maximum(tl.minimum(position - window + 1, cached), 0)
    share = tl.cdiv(tl.cdiv(cached - oldest, parts), block) * block
    first = oldest + part * share
    last = tl.minimum(first + share, cached)
    used = tl.maximum(tl.cdiv(cached - oldest, tl.maximum(share, 1)), 1)
    if part >= used:
        return  # it has no keys, and no program waits for it
    place = tl.arange(0, width)
    inside = (place < size)[None, :]
    cache = pair.to(tl.int64) * slots * size
    slot = first + tl.arange(0, block)
    visible = _is_visible(slot, last, position, slots, window, ring)
    where = cache + slot[:, None] * size + place[None, :]
    key = tl.load(keys + where, visible[:, None] & inside, 0)
    value = tl.load(values + where, visible[:, None] & inside, 0)
    other, couple, sign = _partner(place, rotated, interleaved)
    cosine = 1.0
    sine = 0.0
    if rotated > 0:
        turned = place < rotated
        frequency = tl.load(frequencies + couple, turned, 0)
        sine, cosine = sine_and_cosine(position.to(tl.float32) * frequency)
        sine = tl.where(turned, sine * sign * factor, 0.0)[None, :]
        cosine = tl.where(turned, cosine * factor, 1.0)[None, :]
    wait(overlap, release)

    member = tl.arange(0, block_group)[:, None]
    source = qkv + row.to(tl.int64) * (heads + 2 * key_heads) * size
    query = _head(
        source + (key_head * group + member) * size, member < group, query_norm,
        place[None, :], other[None, :], cosine, sine, eps, size, rotated, normed,
    ).to(qkv.dtype.element_ty)  # fmt: skip
    largest = tl.full([block_group], NOT_SEEN, tl.float32)
    total = tl.zeros([block_group], tl.float32)
    gathered = tl.zeros([block_group, width], tl.float32)
    if part == 0:
        single = tl.arange(0, 1)[:, None]
        new = _head(
            source + (heads + key_head + single) * size, single == 0, key_norm,
            place[None, :], other[None, :], cosine, sine, eps, size, rotated, normed,
        ).to(qkv.dtype.element_ty)  # fmt: skip
        fresh = tl.load(
            source + (heads + key_heads + key_head + single) * size + place[None, :], inside, 0
        )
        own = position + single
        if ring:
            own = own % slots
        writable = inside & (own >= 0) & (own < slots)
        spot = cache + own.to(tl.int64) * size + place[None, :]
        tl.store(keys + spot, new, writable)
        tl.store(values + spot, fresh, writable)
        largest = tl.sum(query.to(tl.float32) * new.to(tl.float32), 1) * scale
        total += 1.0
        gathered += fresh.to(tl.float32)

    largest, total, gathered = _add_keys(
        query, key, value, visible, scale, largest, total, gathered
    )
    for at in tl.range(first + block, last, block, num_stages=stages):
        slot = at + tl.arange(0, block)
        visible = _is_visible(slot, last, position, slots, window, ring)
        where = cache + slot[:, None] * size + place[None, :]
        key = tl.load(keys + where, visible[:, None] & inside, 0)
        value = tl.load(values + where, visible[:, None] & inside, 0)
        largest, total, gathered = _add_keys(
            query, key, value, visible, scale, largest, total, gathered
        )

    end(overlap, release)
    target = out + row.to(tl.int64) * heads * size + key_head * group * size
    if parts == 1:
        average = gathered / total[:, None]
        spot = target + member * size + place[None, :]
        tl.store(spot, average.to(out.dtype.element_ty), (member < group) & inside)
    else:
        line = tl.arange(0, block_group)
        spot = ((pair * parts + part).to(tl.int64) * group + member) * width + place[None, :]
        tl.store(averages + spot, gathered, member < group)
        spot = (pair * 2 * group + line) * parts + part
        tl.store(sums + spot, largest, line < group)
        tl.store(sums + spot + group * parts, total, line < group)
        tl.debug_barrier()
        if tl.atomic_add(counts + pair, 1, sem="acq_rel") == used - 1:
            tl.store(counts + pair, 0)
            _put_together(
                averages + pair.to(tl.int64) * parts * group * width,
                sums + pair * 2 * group * parts, target, used,
                group, block_members, size, width, parts, block_parts,
            )  # fmt: skip


@triton.jit
def _put_together(
    averages, sums, target, used, group: tl.constexpr, members: tl.constexpr, size: tl.constexpr,
    width: tl.constexpr, parts: tl.constexpr, block_parts: tl.constexpr,
):  # fmt: skip
    """Combine the averages of the parts that were used, for the heads of a pair.

    Parts are read in tiles of several × members × width; the first is loaded with the sums.
    """
    several: tl.constexpr = min(block_parts, 64 // members)
    member = tl.arange(0, members)
    place = tl.arange(0, width)
    known = member < group
    part = tl.arange(0, several)
    line = part[:, None, None] * group + member[None, :, None]
    spot = averages + line * width + place[None, None, :]
    here = (part < used)[:, None] & known[None, :]
    averages_of_parts = tl.load(spot, here[:, :, None], 0, cache_modifier=".cg")
    highest = sums + member[None, :] * parts + part[:, None]
    high = tl.load(highest, here, NOT_SEEN, cache_modifier=".cg")
    index = tl.arange(0, block_parts)
    state = sums + member[:, None] * parts + index[None, :]
    there = known[:, None] & (index < used)[None, :]
    every = tl.load(state, there, NOT_SEEN, cache_modifier=".cg")
    count = tl.load(state + group * parts, there, 0, cache_modifier=".cg")
    top = tl.max(every, 1)
    total = tl.sum(count * tl.exp2(every - top[:, None]), 1)
    result = tl.sum(averages_of_parts * tl.exp2(high - top[None, :])[:, :, None], 0)
    for first in range(several, used, several):
        here = (first + part < used)[:, None] & known[None, :]
        averages_of_parts = tl.load(
            spot + first * group * width, here[:, :, None], 0, cache_modifier=".cg"
        )
        high = tl.load(highest + first, here, NOT_SEEN, cache_modifier=".cg")
        result += tl.sum(averages_of_parts * tl.exp2(high - top[None, :])[:, :, None], 0)
    # Beyond the group, sums are 0.
    whole = (result / tl.where(known, total, 1.0)[:, None]).to(target.dtype.element_ty)
    spot = target + member[:, None] * size + place[None, :]
    tl.store(spot, whole, known[:, None] & (place < size)[None, :])
