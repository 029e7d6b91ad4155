"""Rotary positions on OpenCL."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from anydevice.engines import opencl_programs as programs
from anydevice.engines import opencl_views as views
from anydevice.engines.opencl_indexing import extent, index_types, is_wide
from anydevice.engines.opencl_numbers import Number, dtype_of, number_of
from anydevice.engines.opencl_queues import queue_of_context


def rope(
    x: Any, positions: Any, theta: float, interleaved: bool, scaling: Mapping[str, Any] | None
) -> Any:
    """Each pair of numbers turned by its angle.

    `NotImplemented` where the frequencies are scaled other than by one factor.
    """
    factor = _factor(scaling)
    number = number_of(dtype_of(x), x.context)
    if factor is None or not number.floating or x.shape[-1] % 2:
        return NotImplemented
    out = views.new(x.shape, dtype_of(x), x.context)
    if not x.size:
        return out
    _, heads, tokens, size = x.shape
    steps, place = views.strides_of(x), views.strides_of(positions)
    start, place_start = views.offset_of(x), views.offset_of(positions)
    wide = is_wide(extent(start, x.shape, steps), x.size)
    whole = number_of(dtype_of(positions), x.context)
    kernel = _kernel(x.context, number, whole, interleaved, wide, programs.assumed)
    kernel.over(
        queue_of_context(x.context), x.size // 2, x.size // 2, heads, tokens, size // 2,
        x.base_data, start, *steps, positions.base_data, place_start,
        *(place if positions.ndim == 2 else (0, *place)),
        _frequencies(x.context, size, float(theta), factor).base_data, out.base_data,
        wait_for=views.events_of(x, positions),
    )  # fmt: skip
    return out


def _factor(scaling: Mapping[str, Any] | None) -> float | None:
    """What all frequencies are divided by; `None` where that is not all."""
    if scaling is None:
        return 1.0
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return 1.0
    return float(scaling["factor"]) if kind == "linear" else None


@lru_cache(maxsize=32)
def _frequencies(context: Any, size: int, theta: float, factor: float) -> Any:
    exponents = np.arange(0, size, 2, dtype=np.float64) / size
    return views.from_host((theta**-exponents / factor).astype(np.float32), context)


@lru_cache(maxsize=64)
def _kernel(
    context: Any,
    number: Number,
    whole: Number,
    interleaved: bool,
    wide: bool,
    assumed: programs.Assumed,
) -> programs.Kernel:
    types, index = index_types(wide)
    defines = {**types, **number.defines(), **whole.defines("PLACE_")}
    defines |= {"INTERLEAVED": int(interleaved)}
    scalars = [*[index] * 4, None, *[index] * 5, None, *[index] * 3, None, None]
    return programs.kernel(context, "rope.cl", "rope", defines, scalars, 256)
