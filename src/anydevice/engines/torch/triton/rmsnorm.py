"""Root-mean-square norm in one pass over the rows: each is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anydevice.core.record import Record
from anydevice.engines.torch.triton.launch import LONGEST_ROW, start

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def"


class Shape(Record):
    """How the work is cut: `rows` at a time, `columns` at a time, by so many warps."""

    rows: int
    columns: int
    warps: int


def shape_for(columns: int, itemsize: int) -> Shape:
    """What measures fastest for rows of this length."""
    width = triton.next_power_of_2(max(columns, 1))
    if width * itemsize > LONGEST_ROW:
        return Shape(1, 8192, 16)
    rows = max(1, 2048 // width)
    return Shape(rows, width, min(16, max(4, rows * width // 512)))


def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, shape: Shape | None = None
) -> torch.Tensor:
    """`x` over the root of the mean of its squares, times `weight`; `x` must be contiguous.

    The numbers are float32 in between and are rounded once.
    """
    out = torch.empty_like(x)
    if not x.numel():
        return out
    columns = x.shape[-1]
    rows = x.numel() // columns
    cut = shape or shape_for(columns, x.element_size())
    whole = columns <= cut.columns
    start(
        _whole_rows if whole else _long_row,
        (triton.cdiv(rows, cut.rows),),
        x.device,
        x,
        weight,
        out,
        rows,
        columns,
        eps,
        block_rows=cut.rows,
        block=cut.columns,
        num_warps=cut.warps,
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _whole_rows(x, weight, out, rows, columns, eps, block_rows: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = tl.arange(0, block)
    here = (row < rows)[:, None] & (column < columns)[None, :]
    places = row[:, None] * columns + column[None, :]
    scale = tl.load(weight + column, column < columns, 0, eviction_policy="evict_last")
    value = tl.load(x + places, here, 0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 1) / columns + eps)
    result = value * factor[:, None] * scale.to(tl.float32)[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty), here)


@triton.jit(do_not_specialize=["rows"])
def _long_row(x, weight, out, rows, columns, eps, block_rows: tl.constexpr, block: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * columns
    squares = tl.zeros([block], tl.float32)
    for first in range(0, columns, block):
        column = first + tl.arange(0, block)
        value = tl.load(x + begin + column, column < columns, 0).to(tl.float32)
        squares += value * value
    factor = tl.rsqrt(tl.sum(squares, 0) / columns + eps)
    for first in range(0, columns, block):
        column = first + tl.arange(0, block)
        here = column < columns
        value = tl.load(x + begin + column, here, 0).to(tl.float32)
        scale = tl.load(weight + column, here, 0).to(tl.float32)
        tl.store(out + begin + column, (value * factor * scale).to(out.dtype.element_ty), here)
