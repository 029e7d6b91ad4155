"""Softmax over the rows of a matrix: each row is read once and written once.

Rows of up to 64 KiB stay in the registers of one program, which asks for its next row while it
works on this one. Longer rows are read twice, the second time mostly out of the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anydevice.core.record import Record
from anydevice.engines.torch.triton.launch import (
    LONGEST_ROW,
    fetch_ahead,
    most_warps,
    multiprocessors,
    overlapping,
    shared_memory,
    start,
)

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def"


LOG2_E = tl.constexpr(1.4426950408889634)


class Shape(Record):
    """How the work is cut: `rows` and `columns` at a time, by so many warps.

    With `ahead`, one program for each multiprocessor goes through the rows one by one, with the
    loads of so many further ones in flight; without, every tile of rows has its own program.
    """

    rows: int
    columns: int
    warps: int
    ahead: int = 0


def shape_for(columns: int, itemsize: int, shared: int, warps: int = 32) -> Shape:
    """What measures fastest for rows of this length.

    `shared` is the fast memory that a program can have, `warps` the most of them that it can.
    """
    width = triton.next_power_of_2(max(columns, 1))
    if width * itemsize > LONGEST_ROW:
        return Shape(1, 8192, 16)
    if width >= 16384 and 2 * width * itemsize + 1024 <= shared:
        return Shape(1, width, min(warps, width // 1024), ahead=2)
    rows = max(1, 2048 // width)
    return Shape(rows, width, min(16, max(4, rows * width // 512)))


def softmax(x: torch.Tensor, shape: Shape | None = None) -> torch.Tensor:
    """Softmax along the last axis of a contiguous tensor, in float32, rounded once."""
    out = torch.empty_like(x)
    if not x.numel():
        return out
    columns = x.shape[-1]
    rows = x.numel() // columns
    device = x.device
    cut = shape or shape_for(columns, x.element_size(), shared_memory(device), most_warps(device))
    if columns > cut.columns:
        start(
            _long_row,
            (rows,),
            device,
            x,
            out,
            columns,
            block=cut.columns,
            num_warps=cut.warps,
        )
    elif cut.ahead and 2 * columns >= cut.columns:
        start(
            _row_after_row,
            (min(rows, multiprocessors(device)),),
            device,
            x,
            out,
            rows,
            columns,
            half=cut.columns // 2,
            stages=cut.ahead + 1,
            aligned=columns * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0,
            num_warps=cut.warps,
            **overlapping(device),
        )
    else:
        start(
            _whole_rows,
            (triton.cdiv(rows, cut.rows),),
            device,
            x,
            out,
            rows,
            columns,
            block_rows=cut.rows,
            block=cut.columns,
            num_warps=cut.warps,
        )
    return out


@triton.jit(do_not_specialize=["rows"])
def _row_after_row(
    x,
    out,
    rows,
    columns,
    half: tl.constexpr,
    stages: tl.constexpr,
    overlap: tl.constexpr,
    aligned: tl.constexpr,
):
    if overlap:
        if aligned:
            first = x + tl.program_id(0).to(tl.int64) * columns
            fetch_ahead(first, columns * x.dtype.element_ty.primitive_bitwidth // 8)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    column = tl.arange(0, half)[None, :]
    # The first half of a row is all there, and only the second needs a mask.
    here = half + column < columns
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=stages):
        # As a tile of one row: the loads of a mere row are laid out in a slower way.
        places = (row + tl.arange(0, 1).to(tl.int64))[:, None] * columns + column
        left = tl.load(x + places, eviction_policy="evict_first").to(tl.float32)
        right = tl.load(x + places + half, here, float("-inf"), eviction_policy="evict_first").to(
            tl.float32
        )
        largest = tl.max(tl.maximum(left, right), 1)[:, None]
        left = tl.exp2((left - largest) * LOG2_E)
        right = tl.exp2((right - largest) * LOG2_E)
        factor = (1.0 / tl.sum(left + right, 1))[:, None]
        tl.store(out + places, (left * factor).to(out.dtype.element_ty))
        tl.store(out + places + half, (right * factor).to(out.dtype.element_ty), here)


@triton.jit(do_not_specialize=["rows"])
def _whole_rows(x, out, rows, columns, block_rows: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows).to(tl.int64)
    column = tl.arange(0, block)
    here = (row < rows)[:, None] & (column < columns)[None, :]
    places = row[:, None] * columns + column[None, :]
    raw = tl.load(x + places, here, float("-inf"), eviction_policy="evict_first")
    value = raw.to(tl.float32)
    largest = tl.max(value, 1)
    power = tl.exp2((value - largest[:, None]) * LOG2_E)
    result = power * (1.0 / tl.sum(power, 1))[:, None]
    tl.store(out + places, result.to(out.dtype.element_ty), here)


@triton.jit
def _long_row(x, out, columns, block: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * columns
    largest = tl.full([block], float("-inf"), tl.float32)
    total = tl.zeros([block], tl.float32)
    for first in range(0, columns, block):
        column = first + tl.arange(0, block)
        value = tl.load(x + begin + column, column < columns, float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, value)
        # Where nothing but -inf was seen yet, the difference would not be a number.
        base = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp2((largest - base) * LOG2_E) + tl.exp2((value - base) * LOG2_E)
        largest = larger
    whole = tl.max(largest, 0)
    factor = 1.0 / tl.sum(total * tl.exp2((largest - whole) * LOG2_E), 0)
    for first in range(0, columns, block):
        column = first + tl.arange(0, block)
        here = column < columns
        value = tl.load(x + begin + column, here, 0).to(tl.float32)
        result = tl.exp2((value - whole) * LOG2_E) * factor
        tl.store(out + begin + column, result.to(out.dtype.element_ty), here)
