"""Attention on OpenCL: by work items on CPUs, by groups for few queries, by tiles for many."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pyopencl as cl
from pyopencl.array import Array

from anydevice._core.dtypes import DTYPES
from anydevice._core.record import Record
from anydevice._engines.opencl import buffers
from anydevice._engines.opencl.buffers import Ints
from anydevice._engines.opencl.kernels import programs
from anydevice._engines.opencl.kernels.elementwise import (
    extent,
    filled,
    index_types,
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
    arguments: list[Any] = [heads, queries, keys, (window or 0) if causal else -1, scale]
    for x, start, step in zip((q, k, v), starts, steps, strict=True):
        arguments += (x.base_data, start, *step)
    arguments.append(out.base_data)
    kind = None
    if lengths is not None:
        kind = number_of(dtype_of(lengths), context)
        arguments += (lengths.base_data, buffers.offset_of(lengths), *buffers.strides_of(lengths))
    if mask is not None:
        across = _mask_strides(mask, (batch, heads, queries, keys))
        arguments += (mask.base_data, buffers.offset_of(mask), *across)
        far = max(far, extent(buffers.offset_of(mask), (batch, heads, queries, keys), across))
    places = (size, *starts, *(step for strides in steps for step in strides))
    variant = Variant(
        number, size, heads // k.shape[1], mask is not None, kind,
        not any(place % 8 for place in places), is_wide(far),
    )  # fmt: skip
    arrays = [x for x in (q, k, v, lengths, mask) if x is not None]
    _start(variant, out, keys, arguments, arrays)


def _mask_strides(mask: Array, shape: Ints) -> Ints:
    if mask.ndim == 2:  # (batch, keys): all heads and queries alike
        batch, keys = buffers.broadcast_strides(mask, (shape[0], shape[3]))
        return batch, 0, 0, keys
    return buffers.broadcast_strides(mask, shape)


def _start(
    variant: Variant, out: Array, keys: int, arguments: list[Any], reads: list[Array]
) -> None:
    """Start the kernel that suits the device and the number of queries."""
    context, (batch, heads, queries, size) = out.context, out.shape
    about = programs.limits(context)
    rows = batch * heads * queries
    if not about.is_cpu and queries > _FEW_QUERIES and _tiles_fit(variant, about):
        kernel = _tile_kernel(context, variant)
        if kernel is not None:
            kernel(batch * heads * -(-queries // _TILE), *arguments, reads=reads)
            return
    if about.is_cpu or about.work_group < 16:
        by_item = _kernel(context, variant, "attention_by_item")
        by_item.over(rows, rows, *arguments, reads=reads)
        return
    wanted = -(-4 * about.processors // rows)
    segments = max(1, min(wanted, keys // _KEYS_OF_SEGMENT, 64))
    accumulator = DTYPES[accumulator_of(variant.number).name]
    shares = buffers.new(
        (rows * segments, size + 2) if segments > 1 else (1,), accumulator, context
    )
    by_query = _kernel(context, variant, "attention_by_query")
    by_query(rows * segments, segments, shares.base_data, *arguments, reads=reads)
    if segments > 1:
        join = _kernel(context, variant, "join_segments")
        join.over(out.size, out.size, segments, shares.base_data, out.base_data)


def _tiles_fit(variant: Variant, about: programs.Limits) -> bool:
    itemsize = np.dtype(variant.number.scalar).itemsize
    needed = (2 * _TILE * (variant.size + 1) + _TILE * (_TILE + 4)) * itemsize
    fits = variant.size <= about.work_group and needed <= about.local_memory
    return fits and variant.size in _TILED_SIZES


def _defines(variant: Variant) -> tuple[dict[str, object], Any, list[Any]]:
    """Get the definitions of a kernel, the dtype of an index, and the dtypes of the arguments."""
    types, index = index_types(variant.wide)
    defines = {**types, **variant.number.defines()}
    defines |= {
        "SIZE": variant.size,
        "REPEAT": variant.repeat,
        "HAS_MASK": int(variant.masked),
        "HAS_LENGTHS": int(variant.lengths is not None),
        "WIDTH": 8 if variant.aligned else 1,
    }
    operand = [None, index, index, index, index]
    scalars = [index, index, index, index, variant.number.scalar, *operand * 3, None]
    if variant.lengths is not None:
        defines["LENGTH_ELEMENT"] = variant.lengths.element
        scalars += [None, index, index]
    if variant.masked:
        scalars += [None, index, index, index, index, index]
    return defines, index, scalars


@lru_cache(maxsize=512)
def _kernel(context: cl.Context, variant: Variant, name: str) -> programs.Kernel:
    defines, index, scalars = _defines(variant)
    arguments, group = {
        "attention_by_item": ([index, *scalars], 1),
        "attention_by_query": ([index, None, *scalars], 128),
        "join_segments": ([index, index, None, None], 128),
    }[name]
    return programs.kernel(context, "attention.cl", name, defines, arguments, group)


@lru_cache(maxsize=256)
def _tile_kernel(context: cl.Context, variant: Variant) -> programs.Kernel | None:
    defines, _, scalars = _defines(variant)
    files = ("attention.cl", "attention_tiles.cl")
    return programs.exact_kernel(
        context, files, "attention_by_tile", defines, scalars, variant.size
    )
