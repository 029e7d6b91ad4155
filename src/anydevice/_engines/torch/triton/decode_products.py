"""Products of a decoding step, with what stands around them inside: as fast as weights are read.

`product` is `x · weightᵀ` with the root-mean-square norm of `x` before it, and a bias, SwiGLU and
the sum with the residual stream after it. One row is multiplied element by element; up to 64 go
through the matrix units, weights first, so that their side is the long one. Split-K: several
programs share the inputs of an output, and the last to end adds up their sums in a fixed order.

Weights depend on nothing: the first tile of them is loaded while the launch ahead still runs. All
else is touched only when that has ended. `bench/gpu_decode.py` finds the tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from anydevice._core.record import Record, replace
from anydevice._engines.torch.triton.launch import (
    counters,
    fetch_ahead,
    overlapping,
    shared_memory,
    start,
)

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def"

LOG2_E = tl.constexpr(1.4426950408889634)
MOST_ROWS = 64
"""The most rows of `x`: with more, a library's product is as fast."""


Release = Literal["first", "waited", "last"]
"""At the beginning, when the launch ahead has ended, or when all is read."""


class ProductTile(Record):
    """Tile of a product: `outputs` of a program, `inputs` at a time, by `warps`.

    `stages` loads are in flight. `splits` programs share the inputs of one output (split-K).
    `inside`: the norm is computed in the product, not in a launch before it. `ahead`: all weights
    of a program are prefetched before the wait. `release` is when the next launch may start.
    """

    outputs: int
    inputs: int
    warps: int
    stages: int = 1
    splits: int = 1
    inside: bool = True
    ahead: bool = False
    release: Release = "first"


ProductTiles = Mapping[tuple[str, int], ProductTile]

TILES: ProductTiles = {
    ("qkv", 1): ProductTile(4, 2048, 8, release="last"),
    ("output", 1): ProductTile(1, 4096, 4),
    ("gate_up", 1): ProductTile(1, 4096, 8),
    ("down", 1): ProductTile(4, 1024, 4),
    ("head", 1): ProductTile(2, 4096, 4),
    ("qkv", 16): ProductTile(64, 128, 4, stages=4, splits=2),
    ("output", 16): ProductTile(64, 256, 4, stages=4, splits=2),
    ("gate_up", 16): ProductTile(64, 128, 4, stages=3, release="waited"),
    ("down", 16): ProductTile(64, 128, 4, stages=4, splits=4, release="last"),
    ("head", 16): ProductTile(64, 64, 4, stages=5),
    ("qkv", 32): ProductTile(64, 128, 4, stages=3, splits=2, inside=False),
    ("output", 32): ProductTile(64, 128, 4, stages=4, splits=2),
    ("gate_up", 32): ProductTile(64, 64, 4, stages=3, inside=False),
    ("down", 32): ProductTile(64, 128, 4, stages=3, splits=4),
    ("head", 32): ProductTile(64, 64, 4, stages=3, inside=False),
    ("qkv", 64): ProductTile(64, 64, 4, stages=4, splits=2, inside=False),
    ("output", 64): ProductTile(64, 64, 4, stages=4, splits=4),
    ("gate_up", 64): ProductTile(64, 64, 4, stages=3, inside=False),
    ("down", 64): ProductTile(64, 64, 4, stages=4, splits=4),
    ("head", 64): ProductTile(64, 64, 4, stages=4, inside=False),
}
"""By product and padded rows, the tiles for a 7B model on an H200."""

NORM_WARPS = 8


def padded_rows(rows: int) -> int:
    """Return 1 for one row; more are padded to the size of the matrix units.

    >>> padded_rows(1), padded_rows(3), padded_rows(17)
    (1, 16, 32)
    """
    return 1 if rows == 1 else max(16, triton.next_power_of_2(rows))


def fitting(
    tile: ProductTile, rows: int, inputs: int, sides: int, half: bool, shared: int
) -> ProductTile:
    """Fit a tile to a smaller weight, or to `shared` bytes of fast memory.

    `sides` is 2 where the product is gated. In float16 (`half`), `x` times the norm may overflow
    before it is divided by the root, unless it is float32 as for one row.
    """
    block = min(tile.inputs, max(16, triton.next_power_of_2(inputs)))
    if rows == 1:
        return replace(tile, inputs=block, splits=1, inside=True)
    row = 2 * (sides * tile.outputs + padded_rows(rows))  # bytes of all that one input meets
    stages = max(1, min(tile.stages, shared // (block * row) - 1))
    while block > 16 and (stages + 1) * block * row > shared:
        block //= 2
    splits = max(1, min(tile.splits, inputs // block))
    inside = tile.inside and splits == 1 and not half
    return replace(tile, inputs=block, splits=splits, inside=inside, stages=stages)


def product(
    kind: str,
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    factor: float = 1.0,
    tiles: ProductTiles | None = None,
    in_order: bool = False,
    scales: Tensor | None = None,
) -> Tensor:
    """Multiply `x` (rows, inputs), normed by `norm` (inputs,), with `weight` (outputs, inputs).

    `bias` is added. `gated`: the weight has the rows of the gates first and then as many others,
    and the result is silu(gate) × other. `residual` (rows, outputs) is added to `factor` times
    that. With one row, the weight may be float8 with `scales` for its rows. All tensors are
    contiguous. Sums are float32, rounded once. With `in_order`, what follows begins only when all
    before this launch has ended.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0] // (2 if gated else 1)
    padded = padded_rows(rows)
    tile = fitting(
        (tiles or TILES)[kind, padded], rows, inputs, 2 if gated else 1,
        x.dtype == torch.float16, shared_memory(x.device),
    )  # fmt: skip
    if norm is not None and not tile.inside:
        x, norm = normed(x, norm, eps), None
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    programs = triton.cdiv(outputs, tile.outputs)
    partial = counts = out
    if tile.splits > 1:
        counts = counters(x.device, programs)
        sides = 2 if gated else 1
        partial = x.new_empty((sides, tile.splits, outputs, padded), dtype=torch.float32)
    even = inputs % (tile.inputs * tile.splits) == 0 and outputs % tile.outputs == 0
    start(
        _one_row if rows == 1 else _some_rows, (programs, tile.splits), x.device,
        x, x if norm is None else norm, weight, x if bias is None else bias,
        x if residual is None else residual, out, partial, counts,
        *(() if rows > 1 else (scales,)), rows, outputs, eps, factor,
        inputs=inputs, normed=norm is not None, biased=bias is not None, gated=gated,
        summed=residual is not None, block_rows=padded, block_outputs=tile.outputs,
        block=tile.inputs, splits=tile.splits, even=even, stages=tile.stages,
        ahead=tile.ahead and even and tile.splits == 1 and inputs % 8 == 0,
        release="waited" if in_order and tile.release == "first" else tile.release,
        num_warps=tile.warps, **overlapping(x.device),
    )  # fmt: skip
    return out


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the root-mean-square norm of each row, in a launch of its own within the chain."""
    out = torch.empty_like(x)
    start(
        _norm, (x.shape[0],), x.device, x, weight, out, x.shape[1], eps,
        block=triton.next_power_of_2(x.shape[1]), num_warps=NORM_WARPS, **overlapping(x.device),
    )  # fmt: skip
    return out


# Grid (rows,): a row of `block` elements stays in the registers of its program.
@triton.jit
def _norm(x, weight, out, columns, eps, block: tl.constexpr, overlap: tl.constexpr):
    begin(overlap, "first")
    column = tl.arange(0, block)
    here = column < columns
    scale = tl.load(weight + column, here, 0).to(tl.float32)
    wait(overlap, "first")
    row = tl.program_id(0).to(tl.int64) * columns
    value = tl.load(x + row + column, here, 0).to(tl.float32)
    root = tl.rsqrt(tl.sum(value * value, 0) / columns + eps)
    tl.store(out + row + column, (value * root * scale).to(out.dtype.element_ty), here)


@triton.jit
def begin(overlap: tl.constexpr, release: tl.constexpr):
    """Let the next launch start as this kernel begins, if `release` says so."""
    if overlap and release == "first":
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(overlap: tl.constexpr, release: tl.constexpr):
    """Wait until the launch ahead has ended, and all before it."""
    if overlap:
        tl.extra.cuda.gdc_wait()
        if release == "waited":
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def end(overlap: tl.constexpr, release: tl.constexpr):
    """Let the next launch start once all is read, if `release` says so."""
    if overlap and release == "last":
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _ask_for(weight, row, rows: tl.constexpr, inputs: tl.constexpr):
    """Prefetch some rows of the weight."""
    size: tl.constexpr = rows * inputs * weight.dtype.element_ty.primitive_bitwidth // 8
    fetch_ahead(weight + row.to(tl.int64) * inputs, size)


@triton.jit
def _weights(line, place, known, last, even: tl.constexpr):
    """Load a tile of weights, (outputs, inputs); zeros beyond either end."""
    if even:
        tile = tl.load(line + place[None, :], eviction_policy="evict_first")
    else:
        here = known[:, None] & (place < last)[None, :]
        tile = tl.load(line + place[None, :], here, 0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _values(x, place, last, even: tl.constexpr):
    """Load a part of a row as float32; zeros beyond its end."""
    if even:
        value = tl.load(x + place, eviction_policy="evict_last")
    else:
        value = tl.load(x + place, place < last, 0, eviction_policy="evict_last")
    return value.to(tl.float32)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp2(-x * LOG2_E))


@triton.jit
def _after(
    result, others, root, bias, output, known, outputs,
    normed: tl.constexpr, biased: tl.constexpr, gated: tl.constexpr,
):  # fmt: skip
    """Scale the sums by the norm's root, add the bias, and multiply by the others if gated."""
    if normed:
        result *= root
    if biased:
        result += tl.load(bias + output, known, 0).to(tl.float32)
    if gated:
        if normed:
            others *= root
        if biased:
            others += tl.load(bias + outputs + output, known, 0).to(tl.float32)
        result = _silu(result) * others
    return result


# Grid (outputs / block_outputs, 1): a matrix-vector product. A program multiplies tiles of
# block_outputs × block weights with the row, and sums along the inputs at the end.
@triton.jit(do_not_specialize=["rows"])
def _one_row(
    x, norm, weight, bias, residual, out, partial, counts, scales, rows, outputs, eps, factor,
    inputs: tl.constexpr, normed: tl.constexpr, biased: tl.constexpr, gated: tl.constexpr,
    summed: tl.constexpr, block_rows: tl.constexpr, block_outputs: tl.constexpr,
    block: tl.constexpr, splits: tl.constexpr, even: tl.constexpr, stages: tl.constexpr,
    ahead: tl.constexpr, release: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    begin(overlap, release)
    output = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    known = output < outputs
    place = tl.arange(0, block)
    line = weight + output.to(tl.int64)[:, None] * inputs
    other = weight + (output + outputs).to(tl.int64)[:, None] * inputs
    if overlap and ahead:
        _ask_for(weight, tl.program_id(0) * block_outputs, block_outputs, inputs)
        if gated:
            _ask_for(weight, tl.program_id(0) * block_outputs + outputs, block_outputs, inputs)
    tile = _weights(line, place, known, inputs, even)
    if gated:
        tile_of_others = _weights(other, place, known, inputs, even)
    if normed:
        scale = _values(norm, place, inputs, even)
    wait(overlap, release)

    value = _values(x, place, inputs, even)
    squares = value * value
    if normed:
        value *= scale
    sums = tile.to(tl.float32) * value[None, :]
    if gated:
        sums_of_others = tile_of_others.to(tl.float32) * value[None, :]
    for first in tl.range(block, inputs, block, num_stages=stages):
        value = _values(x, first + place, inputs, even)
        if normed:
            squares += value * value
            value *= _values(norm, first + place, inputs, even)
        sums += _weights(line, first + place, known, inputs, even).to(tl.float32) * value[None, :]
        if gated:
            tile = _weights(other, first + place, known, inputs, even)
            sums_of_others += tile.to(tl.float32) * value[None, :]

    end(overlap, release)
    root = 1.0
    if normed:
        root = tl.rsqrt(tl.sum(squares, 0) / inputs + eps)
    result = tl.sum(sums, 1)
    if scales is not None:
        result *= tl.load(scales + output, known, 0).to(tl.float32)
    others = result
    if gated:
        others = tl.sum(sums_of_others, 1)
        if scales is not None:
            others *= tl.load(scales + outputs + output, known, 0).to(tl.float32)
    result = _after(result, others, root, bias, output, known, outputs, normed, biased, gated)
    if summed:
        result = tl.load(residual + output, known, 0).to(tl.float32) + factor * result
    tl.store(out + output, result.to(out.dtype.element_ty), known)


@triton.jit
def _columns(x, row, place, rows, last, inputs: tl.constexpr):
    """Load a part of all rows, (inputs, rows)."""
    here = (place < last)[:, None] & (row < rows)[None, :]
    where = x + row[None, :] * inputs + place[:, None]
    return tl.load(where, here, 0, eviction_policy="evict_last")


@triton.jit
def _scale_tile(squares, value, scale):
    """Add the squares of a tile, and multiply the tile by the norm's weight."""
    wide = value.to(tl.float32)
    return squares + wide * wide, (wide * scale[:, None]).to(value.dtype)


# Grid (outputs / block_outputs, splits): split-K. A program adds up block_outputs × block_rows sums
# from tiles of block_outputs × block weights.
@triton.jit(do_not_specialize=["rows"])
def _some_rows(
    x, norm, weight, bias, residual, out, partial, counts, rows, outputs, eps, factor,
    inputs: tl.constexpr, normed: tl.constexpr, biased: tl.constexpr, gated: tl.constexpr,
    summed: tl.constexpr, block_rows: tl.constexpr, block_outputs: tl.constexpr,
    block: tl.constexpr, splits: tl.constexpr, even: tl.constexpr, stages: tl.constexpr,
    ahead: tl.constexpr, release: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    share: tl.constexpr = (inputs + splits * block - 1) // (splits * block) * block
    begin(overlap, release)
    split = tl.program_id(1)
    last = tl.minimum(split * share + share, inputs)
    output = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    known = output < outputs
    row = tl.arange(0, block_rows)
    place = split * share + tl.arange(0, block)
    line = weight + output.to(tl.int64)[:, None] * inputs
    other = weight + (output + outputs).to(tl.int64)[:, None] * inputs
    if overlap and ahead:
        _ask_for(weight, tl.program_id(0) * block_outputs, block_outputs, inputs)
        if gated:
            _ask_for(weight, tl.program_id(0) * block_outputs + outputs, block_outputs, inputs)
    tile = _weights(line, place, known, last, even)
    if gated:
        tile_of_others = _weights(other, place, known, last, even)
    if normed:
        scale = _values(norm, place, last, even)
    wait(overlap, release)

    sums = tl.zeros([block_outputs, block_rows], tl.float32)
    value = _columns(x, row, place, rows, last, inputs)
    if normed:
        squares, value = _scale_tile(tl.zeros([block, block_rows], tl.float32), value, scale)
    sums = tl.dot(tile, value, sums, input_precision="ieee")
    if gated:
        sums_of_others = tl.zeros([block_outputs, block_rows], tl.float32)
        sums_of_others = tl.dot(tile_of_others, value, sums_of_others, input_precision="ieee")
    for first in tl.range(block, share, block, num_stages=stages):
        there = first + place
        value = _columns(x, row, there, rows, last, inputs)
        if normed:
            scale = _values(norm, there, last, even)
            squares, value = _scale_tile(squares, value, scale)
        tile = _weights(line, there, known, last, even)
        sums = tl.dot(tile, value, sums, input_precision="ieee")
        if gated:
            tile = _weights(other, there, known, last, even)
            sums_of_others = tl.dot(tile, value, sums_of_others, input_precision="ieee")

    end(overlap, release)
    is_last = True
    if splits > 1:
        # Each split leaves its sums; the last one adds them all up, always in one order.
        spot = output[:, None] * block_rows + row[None, :]
        size = outputs * block_rows
        tl.store(partial + split * size + spot, sums, known[:, None])
        if gated:
            tl.store(partial + (splits + split) * size + spot, sums_of_others, known[:, None])
        tl.debug_barrier()
        count = counts + tl.program_id(0)
        is_last = tl.atomic_add(count, 1, sem="acq_rel") == splits - 1
        if is_last:
            tl.store(count, 0)
            sums = tl.zeros([block_outputs, block_rows], tl.float32)
            if gated:
                sums_of_others = tl.zeros([block_outputs, block_rows], tl.float32)
            for index in tl.static_range(splits):
                there = partial + index * size + spot
                sums += tl.load(there, known[:, None], 0, cache_modifier=".cg")
                if gated:
                    there += splits * size
                    sums_of_others += tl.load(there, known[:, None], 0, cache_modifier=".cg")

    if is_last:
        root = 1.0
        if normed:
            root = tl.rsqrt(tl.sum(squares, 0) / inputs + eps)[None, :]
        others = sums
        if gated:
            others = sums_of_others
        result = _after(
            sums,
            others,
            root,
            bias,
            output[:, None],
            known[:, None],
            outputs,
            normed,
            biased,
            gated,
        )
        where = row[None, :] * outputs + output[:, None]
        here = known[:, None] & (row < rows)[None, :]
        if summed:
            result = tl.load(residual + where, here, 0).to(tl.float32) + factor * result
        tl.store(out + where, result.to(out.dtype.element_ty), here)
