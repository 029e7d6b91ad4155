"""Attention on OpenCL: by work items on CPUs, by groups for few queries, by tiles for many."""

from __future__ import annotations

from functools import partial
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
)
from anydevice._engines.opencl.kernels.programs import Number, accumulator_of, dtype_of, number_of

_FEW_QUERIES = 16
_KEYS_OF_SEGMENT = 256
_TILED_SIZES = (32, 64, 128)
_LARGEST_SIZE = 512
_TILE = 32


class Variant(Record):
    """All that the text of a kernel depends on."""

    number: Number
    size: int
    repeat: int
    masked: bool
    lengths: Number | None
    aligned: bool
    wide: bool

    def defines(self, prefix: str) -> dict[str, object]:
        """Return the definitions in kernels, all without the prefix."""
        return {
            "SIZE": self.size,
            "REPEAT": self.repeat,
            "HAS_MASK": self.masked,
            "HAS_LENGTHS": self.lengths is not None,
            "LENGTH_ELEMENT": "int" if self.lengths is None else self.lengths.element,
            "WIDTH": 8 if self.aligned else 1,
        }


def attention(
    q: Array, k: Array, v: Array, causal: bool, scale: float | None, mask: Array | None,
    window: int | None, lengths: Array | None, soft_cap: float | None = None,
    sinks: Array | None = None,
) -> Array:  # fmt: skip
    """Return the values, weighted by the softmax of the scores; zeros for a query that sees no key.

    `NotImplemented` for integers, several dtypes, heads of more than 512 numbers, values of another
    size than keys, soft caps and sinks.
    """
    if soft_cap is not None or sinks is not None:
        return NotImplemented
    context, size = q.context, q.shape[-1]
    number = number_of(dtype_of(q), context)
    if (
        not number.floating
        or not q.dtype == k.dtype == v.dtype
        or not 0 < size <= _LARGEST_SIZE
        or v.shape[-1] != size
    ):
        return NotImplemented
    out = buffers.new(q.shape, dtype_of(q), context)
    if not q.size:
        return out
    # The numbers of each head in one piece.
    q, k, v = (x if 1 in (buffers.strides_of(x)[-1], size) else plain(x) for x in (q, k, v))
    if not k.size:
        return filled(q.shape, number.scalar(0), dtype_of(q), number, context)
    _run(q, k, v, causal, size**-0.5 if scale is None else scale, mask, window, lengths, out)
    return out


def _run(
    q: Array, k: Array, v: Array, causal: bool, scale: float, mask: Array | None,
    window: int | None, lengths: Array | None, out: Array,
) -> None:  # fmt: skip
    batch, heads, queries, size = q.shape
    keys = k.shape[2]
    context, number = q.context, number_of(dtype_of(q), q.context)
    starts = [buffers.offset_of(x) for x in (q, k, v)]
    steps = [buffers.strides_of(x)[:3] for x in (q, k, v)]
    far = max(
        extent(start, (*x.shape[:3], size), (*step, 1))
        for x, start, step in zip((q, k, v), starts, steps, strict=True)
    )
    arguments: list[Any] = [heads, queries, keys, (window or 0) if causal else -1]
    arguments.append(number.scalar(scale))
    for x, start, step in zip((q, k, v), starts, steps, strict=True):
        arguments += (x.base_data, start, *step)
    arguments.append(out.base_data)
    kind = None
    if lengths is not None:
        kind = number_of(dtype_of(lengths), context)
        arguments += (lengths.base_data, buffers.offset_of(lengths), *buffers.strides_of(lengths))
    if mask is not None:
        shape = (batch, heads, queries, keys)
        if mask.ndim == 2:  # (batch, keys): all heads and queries alike
            of_batch, of_key = buffers.broadcast_strides(mask, (batch, keys))
            across: Ints = (of_batch, 0, 0, of_key)
        else:
            across = buffers.broadcast_strides(mask, shape)
        arguments += (mask.base_data, buffers.offset_of(mask), *across)
        far = max(far, extent(buffers.offset_of(mask), shape, across))
    places = (size, *starts, *(step for strides in steps for step in strides))
    variant = Variant(
        number, size, heads // k.shape[1], mask is not None, kind,
        not any(place % 8 for place in places), is_wide(far),
    )  # fmt: skip
    arrays = [x for x in (q, k, v, lengths, mask) if x is not None]
    _start(variant, out, keys, arguments, arrays)


def _start(
    variant: Variant, out: Array, keys: int, arguments: list[Any], reads: list[Array]
) -> None:
    """Start the kernel that suits the device and the number of queries."""
    context, (batch, heads, queries, size) = out.context, out.shape
    about = programs.limits(context)
    rows = batch * heads * queries
    kernel = partial(
        programs.kernel, context, "attention.cl", number=variant.number, wide=variant.wide,
        VARIANT=variant,
    )  # fmt: skip
    if not about.is_cpu and queries > _FEW_QUERIES and _tiles_fit(variant, about):
        by_tile = programs.kernel_in_one_size(
            context, ("attention.cl", "attention_tiles.cl"), "attention_by_tile", variant.number,
            variant.wide, size, VARIANT=variant,
        )  # fmt: skip
        if by_tile is not None:
            by_tile(batch * heads * -(-queries // _TILE), *arguments, reads=reads)
            return
    if about.is_cpu or about.work_group < 16:
        kernel("attention_by_item", group=1).over(rows, rows, *arguments, reads=reads)
        return
    wanted = -(-4 * about.processors // rows)
    segments = max(1, min(wanted, keys // _KEYS_OF_SEGMENT, 64))
    accumulator = DTYPES[accumulator_of(variant.number).name]
    shares = buffers.new(
        (rows * segments, size + 2) if segments > 1 else (1,), accumulator, context
    )
    by_query = kernel("attention_by_query", group=128)
    by_query(rows * segments, segments, shares.base_data, *arguments, reads=reads)
    if segments > 1:
        join = kernel("join_segments", group=128)
        join.over(out.size, out.size, segments, shares.base_data, out.base_data)


def _tiles_fit(variant: Variant, about: programs.Limits) -> bool:
    itemsize = np.dtype(variant.number.scalar).itemsize
    needed = (2 * _TILE * (variant.size + 1) + _TILE * (_TILE + 4)) * itemsize
    fits = variant.size <= about.work_group and needed <= about.local_memory
    return fits and variant.size in _TILED_SIZES
