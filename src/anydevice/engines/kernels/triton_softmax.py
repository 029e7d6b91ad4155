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
from anydevice.engines.kernels.triton_launching import LONGEST_ROW, multiprocessors, start

LOG2_E = tl.constexpr(1.4426950408889634)


class Shape(Record):
    """How the work is cut.

    `rows` and `columns` at a time, by so many warps. With `ahead`, a multiprocessor has `programs`
    programs that go through the rows, and each holds `ahead` loads of further rows in flight;
    without, every tile of rows has its own program.
    """

    rows: int
    columns: int
    warps: int
    programs: int = 0
    ahead: int = 0
    registers: int = 0


def shape_for(columns: int, itemsize: int) -> Shape:
    """What measures fastest for rows of this length."""
    width = triton.next_power_of_2(max(columns, 1))
    if width * itemsize > LONGEST_ROW:
        return Shape(1, 8192, 16)
    if width >= 16384:
        return Shape(1, width, 16, programs=1, ahead=2)
    rows = max(1, 2048 // width)
    return Shape(rows, width, min(16, max(4, rows * width // 1024)))


def softmax(x: torch.Tensor, shape: Shape | None = None) -> torch.Tensor:
    """Softmax along the last axis of a contiguous tensor, in float32, rounded once."""
    out = torch.empty_like(x)
    if not x.numel():
        return out
    columns = x.shape[-1]
    rows = x.numel() // columns
    cut = shape or shape_for(columns, x.element_size())
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
    if cut.registers:
        start(
            _one_row,
            (rows,),
            x.device,
            x,
            out,
            columns,
            block=cut.columns,
            num_warps=cut.warps,
            maxnreg=cut.registers,
        )
        return out
    tiles = triton.cdiv(rows, cut.rows)
    programs = tiles
    if cut.programs:
        rounds = triton.cdiv(tiles, cut.programs * multiprocessors(x.device))
        programs = triton.cdiv(tiles, rounds)  # the same number of rows for each
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
        num_warps=cut.warps,
    )
    return out


@triton.jit
def _whole_rows(
    x,
    out,
    rows,
    columns,
    tiles,
    block_rows: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
):
    column = tl.arange(0, block)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=stages):
        row = tile * block_rows + tl.arange(0, block_rows).to(tl.int64)
        here = (row < rows)[:, None] & (column < columns)[None, :]
        places = row[:, None] * columns + column[None, :]
        raw = tl.load(x + places, here, float("-inf"))
        value = raw.to(tl.float32)
        largest = tl.max(value, 1)
        power = tl.exp2((value - largest[:, None]) * LOG2_E)
        result = power * (1.0 / tl.sum(power, 1))[:, None]
        tl.store(out + places, result.to(out.dtype.element_ty), here)


@triton.jit
def _one_row(x, out, columns, block: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, block)
    here = column < columns
    raw = tl.load(x + begin + column, here, float("-inf"))
    largest = tl.max(raw.to(tl.float32), 0)
    # The powers are computed twice, differently, so that 16 bits an element are kept in between.
    total = tl.sum(tl.exp2((largest - raw.to(tl.float32)) * -LOG2_E), 0)
    shift = tl.log2(total)
    result = tl.exp2((raw.to(tl.float32) - largest) * LOG2_E - shift)
    tl.store(out + begin + column, result.to(out.dtype.element_ty), here)


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
