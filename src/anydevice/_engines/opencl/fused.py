"""Faster versions of composite ops on OpenCL: our own kernels, used where they were verified."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from pyopencl.array import Array

from anydevice._engines import trust
from anydevice._engines.opencl.arrays import ENGINE
from anydevice._engines.opencl.kernels import quantized, reductions, rows
from anydevice._engines.opencl.kernels.attention import attention
from anydevice._engines.opencl.kernels.programs import dtype_of
from anydevice._engines.opencl.primitives import PRIMITIVES, computed


def silu(x: Array) -> Array:
    """Return `x · sigmoid(x)`, rounded once; `NotImplemented` for integers."""
    return computed("silu", x) if dtype_of(x).kind == "float" else NotImplemented


def swiglu(gate: Array, up: Array) -> Array:
    """Return `silu(gate) · up`, rounded once; `NotImplemented` for integers and several dtypes."""
    if dtype_of(gate).kind != "float" or gate.dtype != up.dtype:
        return NotImplemented
    return computed("swiglu", gate, up)


def _sort_with_index(x: Array, axis: int, descending: bool) -> tuple[Array, Array]:
    """Return the elements sorted along an axis, and their indices before that."""
    order = [at for at in range(x.ndim) if at != axis] + [axis]
    result = reductions.in_order(PRIMITIVES.permute_dims(x, order), descending)
    back = sorted(range(x.ndim), key=order.__getitem__)
    values, places = (PRIMITIVES.permute_dims(array, back) for array in result)
    return values, places


KERNELS: Mapping[str, Callable[..., Any]] = {
    "softmax": rows.softmax,
    "rmsnorm": rows.rmsnorm,
    "layernorm": rows.layernorm,
    "silu": silu,
    "swiglu": swiglu,
    "rope": rows.rope,
    "attention": attention,
    "quantized_linear": quantized.quantized_linear,
    "dequantize": quantized.dequantize,
}
"""The kernels by the names of their ops, called with all arguments of the op, in their order."""


_devices: dict[Any, str] = {}
"""The name of each context's device in the table of trust."""


def _where_trusted(name: str, kernel: Callable[..., Array]) -> Callable[..., Any]:
    @wraps(kernel)
    def run(x: Any, *others: Any) -> Any:
        array, dtype = (x, dtype_of(x).name) if isinstance(x, Array) else (x.codes, "float32")
        device = _devices.get(array.context)
        if device is None:
            device = _devices[array.context] = str(ENGINE.devices_of(array)[0])
        trusted = trust.is_trusted(name, dtype, device)
        return kernel(x, *others) if trusted else NotImplemented

    return run


FUSED: Mapping[str, Callable[..., Any]] = {
    "argsort": lambda x, axis, descending: _sort_with_index(x, axis, descending)[1],
    "floor_divide": lambda a, b: computed("floor_divide", a, b),
    "prod": lambda x, axes, keepdims: reductions.reduce("prod", x, axes, keepdims),
    "round": lambda x: computed("round", x),
    "sort": lambda x, axis, descending: _sort_with_index(x, axis, descending)[0],
    **{name: _where_trusted(name, kernel) for name, kernel in KERNELS.items()},
}
"""Primitives, and our kernels; a kernel that is not trusted returns `NotImplemented`."""
