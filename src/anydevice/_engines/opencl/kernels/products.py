"""Products of matrices: tiles on GPUs, packed panels on CPUs, and a way of its own for few rows."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from pyopencl.array import Array

from anydevice._core.dtypes import DTYPES
from anydevice._core.record import Record
from anydevice._engines.opencl import buffers
from anydevice._engines.opencl.buffers import Ints
from anydevice._engines.opencl.kernels import programs
from anydevice._engines.opencl.kernels.elementwise import (
    extent,
    filled,
    is_wide,
    plain,
    walk,
)
from anydevice._engines.opencl.kernels.programs import Number, accumulator_of, dtype_of, number_of

_FEW_ROWS = 8
_RUN = 8


class Tiles(Record):
    """The shape of a tile, and the part of it that one work item computes."""

    rows: int
    columns: int
    k: int
    item_rows: int
    item_columns: int

    @property
    def group(self) -> int:
        return self.rows // self.item_rows * (self.columns // self.item_columns)

    def local_memory(self, itemsize: int) -> int:
        return (self.rows + self.columns + 8) * self.k * itemsize

    def defines(self, prefix: str) -> dict[str, object]:
        return {
            f"{prefix}ROWS": self.rows,
            f"{prefix}COLUMNS": self.columns,
            f"{prefix}K": self.k,
            "ITEM_ROWS": self.item_rows,
            "ITEM_COLUMNS": self.item_columns,
        }


_TILES = (
    Tiles(128, 128, 16, 8, 8),
    Tiles(64, 64, 16, 4, 4),
    Tiles(32, 32, 16, 4, 4),
    Tiles(16, 16, 16, 4, 4),
)
"""The largest first; large ones read less, small ones keep more processors busy."""


class Product(Record):
    """A stack of products (rows, inner) × (inner, columns), strides and starts in elements."""

    a: Any
    b: Any
    out: Any
    number: Number
    rows: int
    columns: int
    inner: int
    stack: Ints
    a_stack: Ints
    b_stack: Ints
    a_steps: Ints
    """The strides of a along its rows and along k."""
    b_steps: Ints
    """The strides of b along its columns and along k."""

    @property
    def count(self) -> int:
        return prod(self.stack)

    @property
    def wide(self) -> bool:
        shape_a, shape_b = (self.rows, self.inner), (self.columns, self.inner)
        far_a = extent(buffers.offset_of(self.a), self.stack + shape_a, self.a_stack + self.a_steps)
        far_b = extent(buffers.offset_of(self.b), self.stack + shape_b, self.b_stack + self.b_steps)
        return is_wide(far_a, far_b, self.count * self.rows * self.columns)


def matmul(a: Array, b: Array) -> Array:
    """Return the products of matrices (…, m, k) and (…, k, n); raises `ValueError` for others."""
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"a matrix {a.shape} cannot be multiplied by a matrix {b.shape}")
    dtype = dtype_of(a)
    number = number_of(dtype, a.context)
    stack = buffers.broadcast_shape(a.shape[:-2], b.shape[:-2])
    shape = (*stack, a.shape[-2], b.shape[-1])
    if not prod(shape) or not a.shape[-1]:
        return filled(shape, number.scalar(0), dtype, number, a.context)
    out = buffers.new(shape, dtype, a.context)
    _run(_product(a, b, out, number, stack))
    return out


def _product(a: Array, b: Array, out: Array, number: Number, stack: Ints) -> Product:
    a = plain(a) if a.shape[-2] <= _FEW_ROWS else _with_neighbours(a)
    b = _with_neighbours(b)
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    (a_row, a_k), (b_k, b_column) = buffers.strides_of(a)[-2:], buffers.strides_of(b)[-2:]
    full_a = buffers.broadcast_strides(a, (*stack, rows, inner))
    full_b = buffers.broadcast_strides(b, (*stack, inner, columns))
    sizes, (a_stack, b_stack) = buffers.collapsed(stack, full_a[:-2], full_b[:-2])
    if len(sizes) == 1 and b_stack == (0,) and a_stack == (a_row * rows,):
        # One b for all: the stack is one matrix with more rows.
        rows, sizes, a_stack, b_stack = rows * sizes[0], (), (), ()
    return Product(
        a, b, out, number, rows, columns, inner, sizes, a_stack, b_stack,
        (a_row, a_k), (b_column, b_k),
    )  # fmt: skip


def _with_neighbours(x: Array) -> Array:
    """Return the array with neighbours in memory along one of its last two axes."""
    row, column = buffers.strides_of(x)[-2:]
    rows, columns = x.shape[-2:]
    return x if 1 in (row, column) or columns == 1 or rows == 1 else plain(x)


def _run(product: Product) -> None:
    about = programs.limits(product.a.context)
    if product.rows <= _FEW_ROWS and 1 in (product.a_steps[1], product.inner):
        _few_rows(product, about)
        return
    if not about.is_cpu:
        for tiles in _fitting(product, about):
            if _multiply_in_tiles(product, tiles):
                return
    _panels(product)


def _fitting(product: Product, about: programs.Limits) -> list[Tiles]:
    """Return the tiles that fit the device, the best first."""
    itemsize = np.dtype(product.number.scalar).itemsize
    possible = [
        tiles
        for tiles in _TILES
        if tiles.group <= about.work_group
        and tiles.local_memory(itemsize) <= about.local_memory
        and tiles.item_rows * itemsize <= 32
    ]
    for place, tiles in enumerate(possible):
        down, across = -(-product.rows // tiles.rows), -(-product.columns // tiles.columns)
        if down * across * product.count >= about.processors:
            return possible[place:]
    return possible[-1:]


def _multiply_in_tiles(product: Product, tiles: Tiles) -> bool:
    """Compute it in tiles; false if the device does not take such large groups."""
    rows, columns, inner = product.rows, product.columns, product.inner
    edges = bool(rows % tiles.rows or columns % tiles.columns or inner % tiles.k)
    route = walk(product.stack, (product.a_stack, product.b_stack), ("a", "b"), "batch")
    kernel = programs.kernel_in_one_size(
        product.a.context, "matmul_tiles.cl", "matmul", product.number, product.wide,
        tiles.group, TILE_=tiles, BATCH_=route, EDGES=edges,
        A_BY_K=product.a_steps[1] == 1, B_BY_K=product.b_steps[1] == 1,
    )  # fmt: skip
    if kernel is None:
        return False
    groups = -(-rows // tiles.rows) * -(-columns // tiles.columns) * product.count
    kernel(
        groups, rows, columns, inner,
        product.a.base_data, buffers.offset_of(product.a), *product.a_steps,
        product.b.base_data, buffers.offset_of(product.b), *product.b_steps,
        product.out.base_data, *route.arguments, reads=[product.a, product.b],
    )  # fmt: skip
    return True


def _panels(product: Product) -> None:
    """Compute it from panels: each matrix is packed first."""
    context, number = product.a.context, product.number
    high = 6 if np.dtype(number.scalar).itemsize <= 4 else 3
    rows, columns, inner = product.rows, product.columns, product.inner
    a = _pack(product, product.a, product.a_stack, product.a_steps, rows, high)
    b = _pack(product, product.b, product.b_stack, product.b_steps, columns, 16)
    wide = is_wide(a.size, b.size, product.out.size)
    kernel = programs.kernel(
        context, "matmul_panels.cl", "matmul", number, wide, 1,
        BATCH_=walk((), ((),), ("x",), "batch"), PANEL_ROWS=high, WIDTH=1, RUN=_RUN,
    )  # fmt: skip
    items = -(-rows // (high * _RUN)) * -(-columns // 16) * product.count
    kernel(items, rows, columns, inner, a.base_data, b.base_data, product.out.base_data)


def _pack(product: Product, x: Array, stack: Ints, steps: Ints, across: int, width: int) -> Array:
    context, number, inner = x.context, product.number, product.inner
    panels = -(-across // width)
    accumulator = accumulator_of(number)
    packed = buffers.new((product.count, panels, inner, width), DTYPES[accumulator.name], context)
    count = product.count * panels * inner
    route = walk(product.stack, (stack,), ("x",), "batch")
    wide = product.wide or is_wide(packed.size)
    kernel = programs.kernel(
        context, "matmul_panels.cl", "pack", number, wide, 64,
        BATCH_=route, WIDTH=width, PANEL_ROWS=1, RUN=1,
    )  # fmt: skip
    kernel.over(
        count, count, panels, across, inner,
        x.base_data, buffers.offset_of(x), *steps, packed.base_data, *route.arguments, reads=[x],
    )  # fmt: skip
    return packed


def _few_rows(product: Product, about: programs.Limits) -> None:
    """Compute a few rows, reading b once."""
    context, (a_row, _), (b_column, b_k) = product.a.context, product.a_steps, product.b_steps
    starts = buffers.offset_of(product.a), buffers.offset_of(product.b)
    columns, inner = product.columns, product.inner
    along_k = b_k == 1 or b_column != 1 != columns
    begins = (*starts, a_row, b_column, *product.a_stack, *product.b_stack)
    aligned = along_k and product.number.floating and not any(place % 8 for place in begins)
    if about.is_cpu:
        lanes = 1 if along_k else 64
    else:
        lanes = max(8, min(64, 1 << (inner // 8).bit_length())) if along_k else 256
    route = walk(product.stack, (product.a_stack, product.b_stack), ("a", "b"), "batch")
    max_across = 64 if about.is_cpu else 32  # neighbouring columns that the items of a group read
    kernel = programs.kernel(
        context, "matmul_few_rows.cl", "along_k" if along_k else "along_columns", product.number,
        product.wide, lanes, BATCH_=route, ROWS=product.rows, ALIGNED=aligned,
        MOST_ACROSS=max_across,
    )  # fmt: skip
    across = 1 if along_k else min(kernel.group, max_across)
    kernel(
        product.count * -(-columns // across), columns, inner,
        product.a.base_data, starts[0], a_row, product.b.base_data, starts[1],
        b_column if along_k else b_k, product.out.base_data, *route.arguments,
        reads=[product.a, product.b],
    )  # fmt: skip
