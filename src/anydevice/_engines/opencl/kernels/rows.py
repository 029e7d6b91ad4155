"""Softmax, the two norms and rotary positions on OpenCL: each row is read once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import pyopencl as cl
from pyopencl.array import Array

from anydevice._engines.opencl import buffers
from anydevice._engines.opencl.kernels import programs
from anydevice._engines.opencl.kernels.elementwise import extent, is_wide, plain
from anydevice._engines.opencl.kernels.programs import Number, dtype_of, number_of

_PER_ITEM = 128
"""Numbers that a work item may keep in registers. On an NVIDIA card, softmax then runs at 0.85 of
the speed of a copy, and at 0.6 if it reads rows twice."""


def softmax(x: Array, axis: int) -> Array:
    """Return the softmax along the last axis; `NotImplemented` for any other."""
    if not x.ndim or axis % x.ndim != x.ndim - 1:
        return NotImplemented
    return _rows("softmax", x)


def rmsnorm(x: Array, weight: Array, eps: float) -> Array:
    return _rows("rmsnorm", x, [weight], eps)


def layernorm(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    return _rows("layernorm", x, [weight, bias], eps)


def _rows(
    name: str, x: Array, factors: list[Array] | None = None, eps: float | None = None
) -> Array:
    factors = factors or []
    given = [factor for factor in factors if factor is not None]
    number = number_of(dtype_of(x), x.context)
    if not number.floating or any(factor.dtype != x.dtype for factor in given):
        return NotImplemented
    x, given = plain(x), [plain(factor) for factor in given]
    out = buffers.new(x.shape, dtype_of(x), x.context)
    if not x.size:
        return out
    columns, starts = x.shape[-1], [buffers.offset_of(factor) for factor in (x, *given)]
    about = programs.limits(x.context)
    widest = 4 if number.element in ("float", "double") and not about.is_cpu else 8
    aligned = not any(place % widest for place in (columns, *starts))
    present = tuple(factor is not None for factor in factors)
    kernel = _kernel(name, number, x.context, columns, widest if aligned else 1, present)
    arguments: list[Any] = [columns, x.base_data, np.array(starts[0], np.int64), out.base_data]
    for factor in factors:
        # A kernel that uses no weight gets some memory all the same: not every driver takes none.
        source = x if factor is None else plain(factor)
        arguments += (source.base_data, np.array(buffers.offset_of(source), np.int64))
    arguments += [] if eps is None else [number.scalar(eps)]
    kernel(x.size // columns, *arguments, reads=[x, *given])
    return out


@lru_cache(maxsize=256)
def _kernel(
    name: str,
    number: Number,
    context: cl.Context,
    columns: int,
    width: int,
    present: tuple[bool, ...],
) -> programs.Kernel:
    about = programs.limits(context)
    pieces = columns // width
    group = 1 if about.is_cpu else min(1024, max(32, 1 << (-(-pieces // 4) - 1).bit_length()))
    group = min(group, 1 << (about.work_group.bit_length() - 1))
    while True:
        items = 1 << (-(-pieces // group) - 1).bit_length()
        in_registers = items if not about.is_cpu and items * width <= _PER_ITEM else 0
        defines = {"WIDTH": width, "ITEMS": in_registers}
        defines |= {"HAS_WEIGHT": any(present[:1]), "HAS_BIAS": any(present[1:])}
        made = programs.exact_kernel(context, "rows.cl", name, number, False, defines, group)
        if made is not None:
            return made
        group //= 2


def rope(
    x: Array, positions: Array, theta: float, interleaved: bool, scaling: Mapping[str, Any] | None,
    length: Array | None = None,
) -> Array:  # fmt: skip
    """Rotate each pair of numbers; `NotImplemented` if more than one factor scales frequencies."""
    scaling = scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    number = number_of(dtype_of(x), x.context)
    if kind not in ("default", "linear") or not number.floating or x.shape[-1] % 2:
        return NotImplemented
    factor = float(scaling["factor"]) if kind == "linear" else 1.0
    out = buffers.new(x.shape, dtype_of(x), x.context)
    if not x.size:
        return out
    _, heads, tokens, size = x.shape
    steps, place = buffers.strides_of(x), buffers.strides_of(positions)
    start, place_start = buffers.offset_of(x), buffers.offset_of(positions)
    wide = is_wide(extent(start, x.shape, steps), x.size)
    integer = number_of(dtype_of(positions), x.context)
    kernel = programs.kernel(
        x.context, "rope.cl", "rope", number, wide, 256, PLACE_=integer, INTERLEAVED=interleaved
    )
    kernel.over(
        x.size // 2, x.size // 2, heads, tokens, size // 2,
        x.base_data, start, *steps, positions.base_data, place_start,
        *(place if positions.ndim == 2 else (0, *place)),
        _frequencies(x.context, size, float(theta), factor).base_data, out.base_data,
        reads=[x, positions],
    )  # fmt: skip
    return out


@lru_cache(maxsize=32)
def _frequencies(context: cl.Context, size: int, theta: float, factor: float) -> Array:
    exponents = np.arange(0, size, 2, dtype=np.float64) / size
    return buffers.from_host((theta**-exponents / factor).astype(np.float32), context)
