"""Kernels for the tokens of a step: embedding, cache writes, and drawing the next token.

Each is one launch, where a library takes several, or some hundred for a draw from the likeliest.

A token is drawn by the Gumbel-max trick (Gumbel 1954): the largest sum of a logit and its noise. A
draw from all logits, and the likeliest token, are found by many programs, and the last to end
combines them. With `top_p` (nucleus sampling, Holtzman et al. 2020) or `min_p`, one program for a
row passes over the logits: for the largest, for the `top_p` threshold by bisection, and for the
draw. Up to 32,768 logits stay in its registers. `_llm/sampling.py` defines draws and noise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anydevice._core.record import Record
from anydevice._engines.torch.triton.launch import counters, overlapping, start

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def"


class WriteTile(Record):
    """Tile: `tokens` of a head for a program, by `warps`."""

    tokens: int
    warps: int


WRITE_TILE = WriteTile(32, 4)


def cache_write(
    cache: Tensor, new: Tensor, positions: Tensor, tile: WriteTile = WRITE_TILE
) -> Tensor:
    """Write `new` (batch, heads, tokens, size) into `cache` (batch, heads, slots, size); return it.

    `positions`, (tokens,) or (batch, tokens), are the slots; tokens of slots out of range are not
    written. The last axes of cache and new are contiguous.
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


def embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """Return the rows of `weight` (rows, size) for contiguous ids; NaN for ids out of range."""
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


# Grid (tokens, size / block).
@triton.jit(do_not_specialize=["count"])
def _embed(weight, ids, out, count, size, step, block: tl.constexpr):
    token = tl.program_id(0) + tl.arange(0, 1).to(tl.int64)
    row = tl.load(ids + token).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    known = (column < size) & (row >= 0) & (row < count)
    value = tl.load(weight + row * step + column, known, float("nan"))
    tl.store(out + token * size + column, value, column < size)


# Grid (tokens / block, heads, batch): block × width elements of a head.
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


COLUMNS, FEW, FEWEST_WARPS, MOST_WARPS = 32768, 8192, 4, 16
PART, PART_WARPS = 1024, 4
"""Logits of a program of a draw from all of them, and its warps."""
NO_TOKEN = tl.constexpr(-1)
"""The result of a draw if a logit is NaN or infinite."""


def draw_token(
    logits: Tensor,
    numbers: Tensor,
    seeds: Tensor,
    place: Tensor,
    greedy: bool,
    top_p: bool,
    min_p: bool,
    constants: tuple[int, ...],
) -> Tensor:
    """Draw a token (rows,) int32 from logits (rows, vocabulary), whose rows are contiguous.

    `numbers` (5,) float32, `seeds` and `place` (rows,) int32 are those of `choose`. `greedy` takes
    the likeliest token, the first of equal ones. `constants` are the factors of seed, place and
    token, the addend, the numbers of rounds and halvings, and the faintest logit. The result is -1
    if a logit is not finite.
    """
    rows, columns = logits.shape
    out = torch.empty((rows,), dtype=torch.int32, device=logits.device)
    by_seed, by_place, by_token, between, rounds, halvings, faintest = constants
    if not top_p and not min_p:
        parts = triton.cdiv(columns, PART)
        winners = torch.empty((rows, 3, parts), dtype=torch.float32, device=logits.device)
        start(
            _draw_parts, (parts, rows), logits.device, logits, numbers, seeds, place, out, winners,
            out if parts == 1 else counters(logits.device, rows), columns, logits.stride(0),
            by_seed, by_place, by_token, between, greedy=greedy, rounds=rounds, block=PART,
            parts=parts, block_parts=triton.next_power_of_2(parts), num_warps=PART_WARPS,
            **overlapping(logits.device),
        )  # fmt: skip
        return out
    block = min(COLUMNS, triton.next_power_of_2(columns))
    start(
        _draw, (rows,), logits.device, logits, numbers, seeds, place, out, columns,
        logits.stride(0), by_seed, by_place, by_token, between,
        top_p=top_p, min_p=min_p, rounds=rounds, halvings=halvings, faintest=faintest,
        whole=block >= columns, block=block, few=min(block, FEW),
        num_warps=min(MOST_WARPS, max(FEWEST_WARPS, block // 1024)),
    )  # fmt: skip
    return out


# Rounds of x(2x + 1) + c, the permutation of RC6 (Rivest et al. 1998).
@triton.jit
def _mix(x, between, rounds: tl.constexpr):
    for number in tl.static_range(rounds):
        x = x * (x * 2 + 1) + (between + number)
    return x


@triton.jit
def _noise(key, token, by_token, between, rounds: tl.constexpr):
    """Return Gumbel noise, by 32-bit integers that wrap around."""
    number = _mix(token * by_token + key, between, rounds) * (key * 2 + 1)
    number = tl.where(number < 0, -1 - number, number)
    v = (number.to(tl.float32) + 0.5) * 4.656612873077393e-10
    series = v * (v * (v * 0.3333333333333333 + 0.5) + 1.0)
    logarithm = -tl.log(tl.maximum(1.0 - v, 2.9802322387695312e-8))
    return -tl.log(tl.where(v < 0.0078125, series, logarithm))


# Grid (columns / block, rows); `winners` (rows, 3, parts) has each part's maximum, score and token.
@triton.jit(do_not_specialize=["by_seed", "by_place", "by_token", "between"])
def _draw_parts(
    logits, numbers, seeds, places, out, winners, counts, columns, step,
    by_seed, by_place, by_token, between, greedy: tl.constexpr, rounds: tl.constexpr,
    block: tl.constexpr, parts: tl.constexpr, block_parts: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    row = tl.program_id(1)
    place = part * block + tl.arange(0, block)
    inverse = 1.0
    noise = tl.zeros([block], tl.float32)
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()
    if not greedy:  # needs nothing that another launch of this step writes
        inverse = tl.load(numbers)
        key = _mix(tl.load(seeds + row) * by_seed, between, rounds)
        key = _mix(key + tl.load(places + row) * by_place, between, rounds)
        noise = _noise(key, place, by_token, between, rounds)
    if overlap:
        tl.extra.cuda.gdc_wait()
    x = tl.load(logits + row.to(tl.int64) * step + place, place < columns, float("-inf"))
    x = x.to(tl.float32)
    total = tl.sum(tl.where(place < columns, x, 0.0), 0)
    top = tl.max(x, 0)
    # Operations in the order of `_scale_row`; the last program adds the other parts' maxima.
    score = (x - top) * inverse + noise
    best = tl.max(score, 0)
    token = tl.min(tl.where((score == best) & (place < columns), place, 2147483647), 0)
    spot = winners + row * 3 * parts + part
    # Tokens as float32: exact up to 16 million.
    tl.store(spot, top)
    tl.store(spot + parts, best)
    tl.store(spot + 2 * parts, tl.where(total - total == 0, token, -1).to(tl.float32))
    tl.debug_barrier()
    is_last = True
    if parts > 1:
        is_last = tl.atomic_add(counts + row, 1, sem="acq_rel") == parts - 1
    if is_last:
        if parts > 1:
            tl.store(counts + row, 0)
        index = tl.arange(0, block_parts)
        there = index < parts
        lines = winners + row * 3 * parts + index
        tops = tl.load(lines, there, float("-inf"), cache_modifier=".cg")
        bests = tl.load(lines + parts, there, float("-inf"), cache_modifier=".cg")
        tokens = tl.load(lines + 2 * parts, there, 0, cache_modifier=".cg")
        scores = tl.where(there, (tops - tl.max(tops, 0)) * inverse + bests, float("-inf"))
        winner = tl.where(scores == tl.max(scores, 0), tokens, float("inf"))
        chosen = tl.min(winner, 0)
        finite = tl.min(tokens, 0) >= 0
        tl.store(out + row, tl.where(finite, chosen.to(tl.int32), NO_TOKEN))


@triton.jit
def _load_row(line, place, columns):
    return tl.load(line + place, place < columns, float("-inf")).to(tl.float32)


@triton.jit
def _scale_row(line, place, columns, inverse, top):
    # In this order: fused to one product and sum, the largest would not be quite 0.
    return (_load_row(line, place, columns) - top) * inverse


@triton.jit
def _above(x, limit):
    """Add up the weights of logits above a limit."""
    return tl.sum(tl.where(x > limit, tl.exp(x), 0.0), 1)[:, None]


# Grid (rows,). Phases: maximum; threshold by bisection, two steps a pass; draw, `few` at a time.
@triton.jit(do_not_specialize=["by_seed", "by_place", "by_token", "between"])
def _draw(
    logits, numbers, seeds, places, out, columns, step, by_seed, by_place, by_token, between,
    top_p: tl.constexpr, min_p: tl.constexpr, rounds: tl.constexpr, halvings: tl.constexpr,
    faintest: tl.constexpr, whole: tl.constexpr, block: tl.constexpr,
    few: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) + tl.arange(0, 1)
    line = logits + (tl.program_id(0).to(tl.int64) + tl.arange(0, 1)[:, None]) * step
    column = tl.arange(0, block)[None, :]
    inverse = tl.load(numbers + tl.arange(0, 1)[:, None])
    resident = _load_row(line, column, columns)
    top = tl.max(resident, 1)[:, None]
    total = tl.sum(tl.where(column < columns, resident, 0.0), 1)[:, None]
    if not whole:
        for first in range(block, columns, block):
            more = _load_row(line, first + column, columns)
            top = tl.maximum(top, tl.max(more, 1)[:, None])
            total += tl.sum(tl.where(first + column < columns, more, 0.0), 1)[:, None]
    resident = (resident - top) * inverse

    low = tl.full([1, 1], faintest, tl.float32)
    high = tl.zeros([1, 1], tl.float32)
    if top_p:
        wanted = _above(resident, float("-inf"))
        if not whole:
            for first in range(block, columns, block):
                more = _scale_row(line, first + column, columns, inverse, top)
                wanted += _above(more, float("-inf"))
        wanted *= tl.load(numbers + 1 + tl.arange(0, 1)[:, None])
        for _ in range(halvings // 2):  # two at once: each takes all logits
            middle = (low + high) * 0.5
            left = (low + middle) * 0.5
            right = (middle + high) * 0.5
            in_left = _above(resident, left)
            in_middle = _above(resident, middle)
            in_right = _above(resident, right)
            if not whole:
                for first in range(block, columns, block):
                    more = _scale_row(line, first + column, columns, inverse, top)
                    in_left += _above(more, left)
                    in_middle += _above(more, middle)
                    in_right += _above(more, right)
            lower = tl.where(in_left >= wanted, left, low)
            upper = tl.where(in_left >= wanted, middle, left)
            reached = in_right >= wanted
            low, high = (
                tl.where(in_middle >= wanted, tl.where(reached, right, middle), lower),
                tl.where(in_middle >= wanted, tl.where(reached, high, right), upper),
            )

    key = _mix(tl.load(seeds + row)[:, None] * by_seed, between, rounds)
    key = _mix(key + tl.load(places + row)[:, None] * by_place, between, rounds)
    distance = tl.load(numbers + 2 + tl.arange(0, 1)[:, None])
    best = tl.full([1, 1], float("-inf"), tl.float32)
    token = tl.zeros([1, 1], tl.int32)
    near = tl.arange(0, few)[None, :]
    for first in range(0, columns, few):  # read again: with its noise, a tile takes more registers
        place = first + near
        x = _scale_row(line, place, columns, inverse, top)
        score = x + _noise(key, place, by_token, between, rounds)
        if top_p:
            score = tl.where(x > low, score, float("-inf"))
        if min_p:
            score = tl.where(x >= distance, score, float("-inf"))
        largest = tl.max(score, 1)[:, None]
        here = tl.min(tl.where(score == largest, place, 2147483647), 1)[:, None]
        token = tl.where(largest > best, here, token)
        best = tl.maximum(best, largest)
    tl.store(out + row[:, None], tl.where(total - total == 0, token, NO_TOKEN))
