"""Softmax and the two norms on OpenCL: one group of work items reads a row once."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from anydevice.engines import opencl_programs as programs
from anydevice.engines import opencl_views as views
from anydevice.engines.opencl_elementwise import plain
from anydevice.engines.opencl_numbers import Number, dtype_of, number_of
from anydevice.engines.opencl_queues import queue_of_context

_PER_ITEM = 128
"""The numbers that a work item may keep. Softmax over rows that 256 items of an NVIDIA card can
just keep runs at 0.85 of the speed of a copy, and at 0.6 of it where the rows are read twice."""


def softmax(x: Any, axis: int) -> Any:
    """The softmax along the last axis; `NotImplemented` for any other."""
    if not x.ndim or axis % x.ndim != x.ndim - 1:
        return NotImplemented
    return _rows("softmax", x)


def rmsnorm(x: Any, weight: Any, eps: float) -> Any:
    """The rows scaled to a mean square of 1, times the weight."""
    return _rows("rmsnorm", x, [weight], eps)


def layernorm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    """The rows moved to a mean of 0 and scaled to a variance of 1, times weight, plus bias."""
    return _rows("layernorm", x, [weight, bias], eps)


def _rows(name: str, x: Any, factors: list[Any] | None = None, eps: float | None = None) -> Any:
    factors = factors or []
    given = [each for each in factors if each is not None]
    number = number_of(dtype_of(x), x.context)
    if not number.floating or any(each.dtype != x.dtype for each in given):
        return NotImplemented
    x, given = plain(x), [plain(each) for each in given]
    out = views.new(x.shape, dtype_of(x), x.context)
    if not x.size:
        return out
    columns, starts = x.shape[-1], [views.offset_of(each) for each in (x, *given)]
    about = programs.limits(x.context)
    widest = 4 if number.element in ("float", "double") and not about.is_cpu else 8
    aligned = not any(place % widest for place in (columns, *starts))
    present = tuple(each is not None for each in factors)
    kernel = _kernel(name, number, x.context, columns, widest if aligned else 1, present,
                     programs.assumed)  # fmt: skip
    arguments: list[Any] = [columns, x.base_data, starts[0], out.base_data]
    for each in factors:
        # A kernel that uses no weight gets some memory all the same: not every driver takes none.
        source = x if each is None else plain(each)
        arguments += (source.base_data, views.offset_of(source))
    arguments += [] if eps is None else [eps]
    events = views.events_of(x, *given)
    kernel(queue_of_context(x.context), x.size // columns, *arguments, wait_for=events)
    return out


@lru_cache(maxsize=256)
def _kernel(
    name: str,
    number: Number,
    context: Any,
    columns: int,
    width: int,
    present: tuple[bool, ...],
    assumed: programs.Assumed,
) -> programs.Kernel:
    about = programs.limits(context)
    pieces = columns // width
    group = 1 if about.is_cpu else min(1024, max(32, 1 << (-(-pieces // 4) - 1).bit_length()))
    group = min(group, 1 << (about.work_group.bit_length() - 1))
    factors: list[Any] = [None, np.int64] * len(present)
    eps: list[Any] = [number.scalar] if present else []
    scalars = [np.int32, None, np.int64, None, *factors, *eps]
    while True:
        items = 1 << (-(-pieces // group) - 1).bit_length()
        kept = items if not about.is_cpu and items * width <= _PER_ITEM else 0
        defines = {**number.defines(), "WIDTH": width, "ITEMS": kept}
        defines |= {
            "HAS_WEIGHT": int(any(present[:1])),
            "HAS_BIAS": int(any(present[1:])),
        }
        found = programs.exact_kernel(context, "rows.cl", name, defines, scalars, group)
        if found is not None:
            return found
        group //= 2
