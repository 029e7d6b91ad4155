"""CuPy's own versions of composite ops: chains of elementwise steps that it makes one kernel of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import cupy
import numpy as np

_FULL = (np.dtype(np.float32), np.dtype(np.float64))


@cupy.fuse(kernel_name="anydevice_silu")  # type: ignore[untyped-decorator,unused-ignore]
def _silu_at_once(x: Any) -> Any:
    return x / (cupy.exp(-x) + 1)


@cupy.fuse(kernel_name="anydevice_swiglu")  # type: ignore[untyped-decorator,unused-ignore]
def _swiglu_at_once(gate: Any, up: Any) -> Any:
    return gate / (cupy.exp(-gate) + 1) * up


def _silu(x: Any) -> Any:
    if x.dtype not in _FULL:  # of 16 bits, which the definition rounds only once
        return NotImplemented
    with x.device:
        return _silu_at_once(x)


def _swiglu(gate: Any, up: Any) -> Any:
    if gate.dtype not in _FULL or up.dtype != gate.dtype:
        return NotImplemented
    with gate.device:
        return _swiglu_at_once(gate, up)


FUSED: Mapping[str, Callable[..., Any]] = {
    "flip": cupy.flip,
    "silu": _silu,
    "swiglu": _swiglu,
}
