"""Sums, products, largest and smallest along axes, where the largest are, and rows in order."""

from __future__ import annotations

from functools import cache
from math import prod

import numpy as np
from pyopencl.array import Array

from anydevice._core.dtypes import DTYPES
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
from anydevice._engines.opencl.kernels.programs import (
    INT32,
    Number,
    accumulator_of,
    dtype_of,
    number_of,
)

_JOINED = {
    "sum": "((a) + (b))",
    "prod": "((a) * (b))",
    "max": "((a) > (b) || (a) != (a) ? (a) : (b))",
    "min": "((a) < (b) || (a) != (a) ? (a) : (b))",
}
_LANES = 256
_SEGMENT = 8192
"""The least terms that are worth a second pass over the sums of segments."""


def axes_of(axis: int | tuple[int, ...], rank: int) -> Ints:
    """Return the axes counted from 0, sorted; raises `ValueError` for unknown or repeated ones."""
    named = axis if isinstance(axis, tuple) else (axis,)
    for one in named:
        if not -rank <= one < rank:
            raise ValueError(f"there is no axis {one} in an array of {rank} axes")
    axes = tuple(sorted({one % rank for one in named}))
    if len(axes) != len(named):
        raise ValueError(f"an axis is named twice in {named}")
    return axes


def reduce(kind: str, x: Array, axis: int | tuple[int, ...], keepdims: bool = False) -> Array:
    """Return `sum`, `prod`, `max` or `min` along axes; raises `ValueError` for `max` of nothing."""
    axes = axes_of(axis, x.ndim)
    dtype = dtype_of(x)
    number = number_of(dtype, x.context)
    outer = tuple(size for at, size in enumerate(x.shape) if at not in axes)
    gone = tuple(x.shape[at] for at in axes)
    shape = outer
    if keepdims:
        shape = tuple(1 if at in axes else size for at, size in enumerate(x.shape))
    if kind in ("max", "min") and not prod(gone) and prod(outer):
        raise ValueError(f"the {kind} of no elements: axes {axes} of an array {x.shape}")
    if not prod(gone):
        return filled(shape, number.scalar(kind == "prod"), dtype, number, x.context)
    out = buffers.new(shape, dtype, x.context)
    if prod(outer):
        own = buffers.strides_of(x)
        strides = tuple(step for at, step in enumerate(own) if at not in axes)
        _run(kind, x, outer, strides, gone, tuple(own[at] for at in axes), number, out)
    return out


def _run(
    kind: str,
    x: Array,
    outer: Ints,
    strides: Ints,
    gone: Ints,
    steps: Ints,
    number: Number,
    out: Array,
) -> None:
    """Reduce in one pass, or in two if there are fewer results than processors."""
    outer, (strides,) = buffers.collapsed(outer, strides)
    gone, (steps,) = buffers.collapsed(gone, steps)
    outputs, count = prod(outer), prod(gone)
    about = programs.limits(x.context)
    side_by_side = bool(strides and steps and abs(strides[-1]) < abs(steps[-1]))
    together = not about.is_cpu and about.work_group > 1 and count >= 32 and not side_by_side
    lanes = min(_LANES, about.work_group) if together else 1
    room = about.processors * (4 if about.is_cpu else 2048) // (outputs * lanes)
    segments = max(1, min(room, count // _SEGMENT))
    chunk = -(-count // segments)
    segments = -(-count // chunk)
    result, stored = out, number_of(dtype_of(out), x.context)
    if segments > 1:
        stored = accumulator_of(number)
        result = buffers.new((outputs, segments), DTYPES[stored.name], x.context)
    start = buffers.offset_of(x)
    far = extent(start, outer + gone, strides + steps)
    across, along = walk(outer, (strides,), ("x",), "output"), walk(gone, (steps,), ("x",), "term")
    kernel = programs.kernel(
        x.context, "reduce.cl", "reduce", number, is_wide(far), _LANES if together else 64,
        RESULT_=stored, KEPT_=across, RUN_=along, COOPERATE=together,
        **{"JOIN_TWO(a, b)": _JOINED[kind]}, NEUTRAL=_neutral(kind, number),
    )  # fmt: skip
    units = outputs * segments
    arguments = (units, segments, count, chunk, x.base_data, start, result.base_data)
    sizes = (*across.sizes, *along.sizes, *across.strides, *along.strides)
    (kernel if together else kernel.over)(units, *arguments, *sizes, reads=[x])
    if segments > 1:
        _run(kind, result, (outputs,), (segments,), (segments,), (1,), stored, out)


@cache
def _neutral(kind: str, number: Number) -> str:
    """Return the neutral element: joined with any number, it gives that number."""
    if kind in ("sum", "prod"):
        return str(int(kind == "prod"))
    if number.floating:
        return "-INFINITY" if kind == "max" else "INFINITY"
    least, most = np.iinfo(number.scalar).min, np.iinfo(number.scalar).max
    bits = int(least if kind == "max" else most) % 2 ** (8 * np.dtype(number.scalar).itemsize)
    return f"(({number.number}){bits}UL)"


def argmax(x: Array, axis: int) -> Array:
    """Return the index of the largest element; raises `ValueError` if the axis has none."""
    (at,) = axes_of(axis, x.ndim)
    outer, own = x.shape[:at] + x.shape[at + 1 :], buffers.strides_of(x)
    out = buffers.new(outer, INT32, x.context)
    if not out.size:
        return out
    if not x.size:
        raise ValueError(f"the largest of no elements: axis {axis} of an array {x.shape}")
    number = number_of(dtype_of(x), x.context)
    if buffers.is_plain(x) and at == x.ndim - 1 and not programs.limits(x.context).is_cpu:
        _top(x, 1, number, None, out)
        return out
    shape, (strides,) = buffers.collapsed(outer, own[:at] + own[at + 1 :])
    start, count, step = buffers.offset_of(x), x.shape[at], own[at]
    far = extent(start, (*shape, count), (*strides, step))
    route = walk(shape, (strides,), ("x",), "output")
    kernel = programs.kernel(
        x.context, "largest.cl", "argmax", number, is_wide(far), 64, KEPT_=route
    )
    arguments = (out.size, count, step, x.base_data, start, out.base_data)
    kernel.over(out.size, *arguments, *route.arguments, reads=[x])
    return out


def top_k(x: Array, k: int) -> tuple[Array, Array]:
    """Return the `k` largest of the last axis, largest first, and their indices."""
    if not x.ndim or not 0 <= k <= x.shape[-1]:
        raise ValueError(f"there are no {k} largest along the last axis of an array {x.shape}")
    dtype = dtype_of(x)
    number = number_of(dtype, x.context)
    shape = (*x.shape[:-1], k)
    values, places = buffers.new(shape, dtype, x.context), buffers.new(shape, INT32, x.context)
    if values.size:
        _top(plain(x), k, number, values, places)
    return values, places


def _top(x: Array, k: int, number: Number, values: Array, places: Array) -> None:
    about = programs.limits(x.context)
    count, start = x.shape[-1], buffers.offset_of(x)
    wide = is_wide(start + x.size)
    lanes = 16 if about.is_cpu else min(_LANES, 2 ** max(5, (count - 1).bit_length()))
    kernel = programs.kernel(
        x.context, "largest.cl", "top_k", number, wide, lanes,
        KEPT_=walk((), ((),), ("x",), "output"), KEEP_VALUES=values is not None,
    )  # fmt: skip
    results = (places.base_data if values is None else values.base_data, places.base_data)
    kernel(x.size // count, count, k, x.base_data, start, *results, reads=[x])


_RUN = 16
"""Elements that one work item sorts."""


def in_order(x: Array, descending: bool) -> tuple[Array, Array]:
    """Sort the last axis by a stable merge sort; return the elements and their indices."""
    dtype, rows, count = dtype_of(x), plain(x), x.shape[-1]
    pairs = [
        (buffers.new(x.shape, dtype, x.context), buffers.new(x.shape, INT32, x.context))
        for _ in range(2 if count > _RUN else 1)
    ]
    if not x.size:
        return pairs[0]
    number, start = number_of(dtype, x.context), buffers.offset_of(rows)
    wide = is_wide(start + 2 * x.size)
    runs, (values, places) = -(-count // _RUN), pairs[0]
    units = x.size // count * runs
    sort_runs, merge_runs = (
        programs.kernel(x.context, "sort.cl", name, number, wide, 64, DESCENDING=descending)
        for name in ("sort_runs", "merge_runs")
    )
    arguments = (units, count, runs, _RUN, rows.base_data, start)
    sort_runs.over(units, *arguments, values.base_data, places.base_data, reads=[rows])
    width = _RUN
    while width < count:
        pairs.reverse()
        to_values, to_places = pairs[0]
        arrays = (values, places, to_values, to_places)
        pointers = [array.base_data for array in arrays]
        merge_runs.over(x.size, x.size, count, width, *pointers, reads=[values, places])
        (values, places), width = pairs[0], 2 * width
    return values, places
