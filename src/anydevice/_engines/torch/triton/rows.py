"""Root-mean-square norm, softmax and SwiGLU: each row is read once and written once.

Rows of up to 64 KiB stay in the registers of one program; softmax loads the next row meanwhile.
Longer rows are read twice, the second time mostly from the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anydevice._core.record import Record
from anydevice._engines.torch.triton import launch
from anydevice._engines.torch.triton.launch import LONGEST_ROW, fetch_ahead, start

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def"

LOG2_E = tl.constexpr(1.4426950408889634)


class RowTile(Record):
    """Tile: `rows` and `columns` at a time, by `warps`.

    With `ahead`, persistent programs walk the rows with that many further loads in flight; without,
    every tile of rows has its own program.
    """

    rows: int
    columns: int
    warps: int
    ahead: int = 0


def rmsnorm_tile(columns: int, itemsize: int) -> RowTile:
    """Return the fastest measured for rows of this length."""
    width = triton.next_power_of_2(max(columns, 1))
    if width * itemsize > LONGEST_ROW:
        return RowTile(1, 8192, 16)
    rows = max(1, 2048 // width)
    return RowTile(rows, width, min(16, max(4, rows * width // 512)))


def rmsnorm(x: Tensor, weight: Tensor, eps: float, tile: RowTile | None = None) -> Tensor:
    """Return the root-mean-square norm of a contiguous tensor, in float32, rounded once."""
    out = torch.empty_like(x)
    if not x.numel():
        return out
    columns = x.shape[-1]
    rows = x.numel() // columns
    cut = tile or rmsnorm_tile(columns, x.element_size())
    start(
        _rmsnorm_rows if columns <= cut.columns else _rmsnorm_long_row,
        (triton.cdiv(rows, cut.rows),), x.device, x, weight, out, rows, columns, eps,
        block_rows=cut.rows, block=cut.columns, num_warps=cut.warps,
    )  # fmt: skip
    return out


# Grid (rows / block_rows,): block_rows × block elements stay in registers.
@triton.jit(do_not_specialize=["rows"])
def _rmsnorm_rows(
    x, weight, out, rows, columns, eps, block_rows: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = tl.arange(0, block)
    here = (row < rows)[:, None] & (column < columns)[None, :]
    places = row[:, None] * columns + column[None, :]
    scale = tl.load(weight + column, column < columns, 0, eviction_policy="evict_last")
    value = tl.load(x + places, here, 0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 1) / columns + eps)
    result = value * factor[:, None] * scale.to(tl.float32)[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty), here)


# Grid (rows,): two passes over a row, in blocks.
@triton.jit(do_not_specialize=["rows"])
def _rmsnorm_long_row(
    x, weight, out, rows, columns, eps, block_rows: tl.constexpr, block: tl.constexpr
):
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


def softmax_tile(columns: int, itemsize: int, shared: int, warps: int = 32) -> RowTile:
    """Return the fastest measured within `shared` bytes of fast memory and `warps` a program."""
    width = triton.next_power_of_2(max(columns, 1))
    size = width * itemsize
    if width >= 16384 and size <= LONGEST_ROW and 2 * size + 1024 <= shared:
        return RowTile(1, width, min(warps, width // 1024), ahead=2)
    return rmsnorm_tile(columns, itemsize)


def softmax(x: Tensor, tile: RowTile | None = None) -> Tensor:
    """Return the softmax along the last axis of a contiguous tensor, in float32, rounded once."""
    out = torch.empty_like(x)
    if not x.numel():
        return out
    columns = x.shape[-1]
    rows = x.numel() // columns
    device = x.device
    shared, warps = launch.shared_memory(device), launch.most_warps(device)
    cut = tile or softmax_tile(columns, x.element_size(), shared, warps)
    if columns > cut.columns:
        start(
            _softmax_long_row, (rows,), device, x, out, columns,
            block=cut.columns, num_warps=cut.warps,
        )  # fmt: skip
    elif cut.ahead and 2 * columns >= cut.columns:
        start(
            _softmax_row_after_row, (min(rows, launch.multiprocessors(device)),), device,
            x, out, rows, columns, half=cut.columns // 2, stages=cut.ahead + 1,
            aligned=columns * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0,
            num_warps=cut.warps, **launch.overlapping(device),
        )  # fmt: skip
    else:
        start(
            _softmax_rows, (triton.cdiv(rows, cut.rows),), device, x, out, rows, columns,
            block_rows=cut.rows, block=cut.columns, num_warps=cut.warps,
        )  # fmt: skip
    return out


# Persistent programs, one per multiprocessor: each walks rows, one row in registers as two halves,
# the next ones in flight.
@triton.jit(do_not_specialize=["rows"])
def _softmax_row_after_row(
    x, out, rows, columns,
    half: tl.constexpr, stages: tl.constexpr, overlap: tl.constexpr, aligned: tl.constexpr,
):  # fmt: skip
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


# Grid (rows / block_rows,): block_rows × block elements stay in registers.
@triton.jit(do_not_specialize=["rows"])
def _softmax_rows(x, out, rows, columns, block_rows: tl.constexpr, block: tl.constexpr):
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


# Grid (rows,): online softmax (Milakov and Gimelshein 2018) per lane, then a second pass.
@triton.jit
def _softmax_long_row(x, out, columns, block: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * columns
    largest = tl.full([block], float("-inf"), tl.float32)
    total = tl.zeros([block], tl.float32)
    for first in range(0, columns, block):
        column = first + tl.arange(0, block)
        value = tl.load(x + begin + column, column < columns, float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, value)
        # Where nothing but -inf was seen yet, the difference would be NaN.
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


SWIGLU_TILE = RowTile(1, 1024, 4)
"""The fastest measured: small programs, so that memory is read and written in its order."""


def swiglu(gate: Tensor, up: Tensor, tile: RowTile = SWIGLU_TILE) -> Tensor:
    """Return `silu(gate) * up` in float32, rounded once, as a contiguous tensor.

    Each operand, as a matrix of all axes but the last by the last, has contiguous rows.
    """
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if not gate.numel():
        return out
    flat = gate.is_contiguous() and up.is_contiguous()
    columns = gate.numel() if flat else gate.shape[-1]
    blocks = triton.cdiv(columns, tile.columns)
    start(
        _swiglu, (blocks,) if flat else (gate.numel() // columns, blocks), gate.device,
        gate, up, out, columns,
        *((0, 0) if flat else (one.view(-1, columns).stride(0) for one in (gate, up))),
        flat=flat, block=tile.columns, num_warps=tile.warps,
    )  # fmt: skip
    return out


# SwiGLU (Shazeer 2020). Grid (elements / block,), or (rows, columns / block) for strided rows.
@triton.jit
def _swiglu(gate, up, out, columns, gate_step, up_step, flat: tl.constexpr, block: tl.constexpr):
    if flat:
        begin = tl.program_id(0).to(tl.int64) * block
    else:
        row = tl.program_id(0).to(tl.int64)
        begin = tl.program_id(1).to(tl.int64) * block
        gate += row * gate_step
        up += row * up_step
        out += row * columns
    column = begin + tl.arange(0, block)
    here = column < columns
    value = tl.load(gate + column, here, 0).to(tl.float32)
    other = tl.load(up + column, here, 0).to(tl.float32)
    result = value / (1.0 + tl.exp2(-value * LOG2_E)) * other
    tl.store(out + column, result.to(out.dtype.element_ty), here)
