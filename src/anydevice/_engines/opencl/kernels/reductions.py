"""Sums, products, largest and smallest along axes, where the largest are, and rows in order."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np
import pyopencl as cl
from pyopencl.array import Array

from anydevice._core.dtypes import DTYPES
from anydevice._engines.opencl import buffers
from anydevice._engines.opencl.buffers import Ints
from anydevice._engines.opencl.kernels import programs
from anydevice._engines.opencl.kernels.elementwise import (
    Walk,
    extent,
    filled,
    index_types,
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
    kernel, routes = _kernel(
        kind, x.context, number, stored, outer, strides, gone, steps, together,
        is_wide(far),
    )  # fmt: skip
    units = outputs * segments
    arguments = (units, segments, count, chunk, x.base_data, start, result.base_data)
    sizes = (*routes[0].sizes, *routes[1].sizes, *routes[0].strides, *routes[1].strides)
    (kernel if together else kernel.over)(units, *arguments, *sizes, reads=[x])
    if segments > 1:
        _run(kind, result, (outputs,), (segments,), (segments,), (1,), stored, out)


@lru_cache(maxsize=1024)
def _kernel(
    kind: str, context: cl.Context, number: Number, stored: Number,
    kept: Ints, strides: Ints, gone: Ints, steps: Ints, together: bool, wide: bool,
) -> tuple[programs.Kernel, tuple[Walk, Walk]]:  # fmt: skip
    types, index = index_types(wide)
    outer, inner = walk(kept, (strides,), ("x",), "output"), walk(gone, (steps,), ("x",), "term")
    defines: dict[str, object] = {
        **types,
        **number.defines(),
        **stored.defines("RESULT_"),
        **outer.defines("KEPT_"),
        **inner.defines("RUN_"),
        "COOPERATE": int(together),
        "JOIN_TWO(a, b)": _JOINED[kind],
        "NEUTRAL": _neutral(kind, number),
    }
    walks = len(outer.arguments + inner.arguments)
    scalars = [*[index] * 4, None, index, None, *[index] * walks]
    group = _LANES if together else 64
    return programs.kernel(context, "reduce.cl", "reduce", defines, scalars, group), (outer, inner)


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
    kernel = _argmax(x.context, number, route, is_wide(far))
    arguments = (out.size, count, step, x.base_data, start, out.base_data)
    kernel.over(out.size, *arguments, *route.arguments, reads=[x])
    return out


@lru_cache(maxsize=256)
def _argmax(context: cl.Context, number: Number, route: Walk, wide: bool) -> programs.Kernel:
    types, index = index_types(wide)
    defines = {**types, **number.defines(), **route.defines("KEPT_")}
    defines |= {"FLOATING": int(number.floating)}
    scalars = [index, index, index, None, index, None, *[index] * len(route.arguments)]
    return programs.kernel(context, "largest.cl", "argmax", defines, scalars, 64)


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
    kernel = _top_kernel(x.context, number, lanes, values is not None, wide)
    results = (places.base_data if values is None else values.base_data, places.base_data)
    kernel(x.size // count, count, k, x.base_data, start, *results, reads=[x])


@lru_cache(maxsize=256)
def _top_kernel(
    context: cl.Context, number: Number, lanes: int, values: bool, wide: bool
) -> programs.Kernel:
    types, index = index_types(wide)
    defines = {**types, **number.defines(), "FLOATING": int(number.floating)}
    defines |= {"KEPT_SIZES": "", "KEPT_STRIDES": "", "KEPT_OFFSETS": "INDEX output_at_x = 0;"}
    defines |= {"KEEP_VALUES": int(values)}
    scalars = [index, index, None, index, None, None]
    return programs.kernel(context, "largest.cl", "top_k", defines, scalars, lanes)


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
    kernel = _sort_kernel(x.context, number, "sort_runs", descending, wide)
    arguments = (units, count, runs, _RUN, rows.base_data, start)
    kernel.over(units, *arguments, values.base_data, places.base_data, reads=[rows])
    kernel = _sort_kernel(x.context, number, "merge_runs", descending, wide)
    width = _RUN
    while width < count:
        pairs.reverse()
        to_values, to_places = pairs[0]
        arrays = (values, places, to_values, to_places)
        pointers = [array.base_data for array in arrays]
        kernel.over(x.size, x.size, count, width, *pointers, reads=[values, places])
        (values, places), width = pairs[0], 2 * width
    return values, places


@lru_cache(maxsize=256)
def _sort_kernel(
    context: cl.Context, number: Number, name: str, descending: bool, wide: bool
) -> programs.Kernel:
    types, index = index_types(wide)
    defines = {**types, **number.defines(), "FLOATING": int(number.floating)}
    defines |= {"DESCENDING": int(descending)}
    scalars = [index] * 4 + [None, index, None, None]
    if name == "merge_runs":
        scalars = [index] * 3 + [None] * 4
    return programs.kernel(context, "sort.cl", name, defines, scalars, 64)
