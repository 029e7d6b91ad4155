"""Softmax over the rows of a matrix: each row is read once and written once.

Rows of up to 64 KiB stay in the registers of one program, which asks for its next row while it
works on this one. Longer rows are read twice, the second time mostly out of the cache.
"""

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from anydevice.core.record import Record
from anydevice.engines.kernels.triton_launching import (
    LONGEST_ROW,
    fetch_ahead,
    multiprocessors,
    overlapping,
    shared_memory,
    start,
)

LOG2_E = tl.constexpr(1.4426950408889634)


class Shape(Record):
    """How the work is cut: `rows` and `columns` at a time, by so many warps.

    With `ahead`, one program for each multiprocessor goes through the rows, with the loads of so
    many further ones in flight; without, every tile of rows has its own program.
    """

    rows: int
    columns: int
    warps: int
    ahead: int = 0


def shape_for(columns: int, itemsize: int, shared: int) -> Shape:
    """What measures fastest for rows of this length, with so much fast memory for a program."""
    width = triton.next_power_of_2(max(columns, 1))
    if width * itemsize > LONGEST_ROW:
        return Shape(1, 8192, 16)
    if width >= 16384 and 2 * width * itemsize + 1024 <= shared:
        return Shape(1, width, 16, ahead=2)
    rows = max(1, 2048 // width)
    return Shape(rows, width, min(16, max(4, rows * width // 512)))


def softmax(x: torch.Tensor, shape: Shape | None = None) -> torch.Tensor:
    """Softmax along the last axis of a contiguous tensor, in float32, rounded once."""
    out = torch.empty_like(x)
    if not x.numel():
        return out
    columns = x.shape[-1]
    rows = x.numel() // columns
    cut = shape or shape_for(columns, x.element_size(), shared_memory(x.device))
    if columns > cut.columns:
        start(
            _long_row,
            (rows,),
            x.device,
            x,
            out,
            columns,
            block=cut.columns,
            num_warps=cut.warps,
        )
        return out
    tiles = triton.cdiv(rows, cut.rows)
    programs = tiles
    if cut.ahead:
        programs = min(tiles, multiprocessors(x.device))
    start(
        _whole_rows,
        (programs,),
        x.device,
        x,
        out,
        rows,
        columns,
        tiles,
        block_rows=cut.rows,
        block=cut.columns,
        stages=cut.ahead + 1,
        aligned=columns * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0,
        num_warps=cut.warps,
        **(overlapping(x.device) if cut.ahead else {"overlap": False}),
    )
    return out


@triton.jit(do_not_specialize=["rows", "tiles"])
def _whole_rows(
    x,
    out,
    rows,
    columns,
    tiles,
    block_rows: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
    overlap: tl.constexpr,
    aligned: tl.constexpr,
):
    column = tl.arange(0, block)
    if overlap:
        if aligned:
            first = x + tl.program_id(0).to(tl.int64) * block_rows * columns
            fetch_ahead(first, columns * x.dtype.element_ty.primitive_bitwidth // 8)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=stages):
        row = tile * block_rows + tl.arange(0, block_rows).to(tl.int64)
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
