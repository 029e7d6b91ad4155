"""Quantized weights by kernels of our own: codes of 2, 4 and 8 bits without a table."""

from __future__ import annotations

from math import prod
from typing import Any

from pyopencl.array import Array

from anydevice._core.dtypes import DTYPES
from anydevice._core.quantized import SUPER_BLOCK, QuantizedWeight
from anydevice._engines.opencl import buffers
from anydevice._engines.opencl.kernels import programs
from anydevice._engines.opencl.kernels.elementwise import is_wide, plain
from anydevice._engines.opencl.kernels.programs import Kernel, dtype_of, number_of

_FEW_ROWS = 8
_FLOAT32 = DTYPES["float32"]


def quantized_linear(x: Array, weight: QuantizedWeight, bias: Array | None) -> Array:
    """Multiply a few rows; `NotImplemented` for more, a bias, float64 and other weights."""
    rows, columns = weight.shape
    count, number = prod(x.shape[:-1]), number_of(dtype_of(x), x.context)
    if bias is not None or not 0 < count <= _FEW_ROWS or number.number != "float":
        return NotImplemented
    about = programs.limits(x.context)
    lanes = 1 if about.is_cpu else max(8, min(64, columns // weight.block))
    kernel = _kernel("multiply", weight, number, lanes, count)
    if kernel is None:
        return NotImplemented
    x = plain(x)
    out = buffers.new((*x.shape[:-1], rows), dtype_of(x), x.context)
    arrays, arguments = _arguments(weight)
    kernel(
        rows, columns // weight.block, rows, x.base_data, buffers.offset_of(x), *arguments,
        out.base_data, reads=[x, *arrays],
    )  # fmt: skip
    return out


def dequantize(weight: QuantizedWeight) -> Array:
    """Return the numbers in float32; `NotImplemented` for other weights."""
    codes: Any = weight.codes
    kernel = _kernel("dequantize", weight, number_of(_FLOAT32, codes.context), 64, 1)
    if kernel is None:
        return NotImplemented
    out = buffers.new(weight.shape, _FLOAT32, codes.context)
    arrays, arguments = _arguments(weight)
    kernel.over(codes.size, codes.size, *arguments, out.base_data, reads=arrays)
    return out


def _kernel(
    name: str, weight: QuantizedWeight, number: Any, lanes: int, rows: int
) -> Kernel | None:
    """Return a kernel for the layout of a weight, if there is one."""
    codes: Any = weight.codes
    kind = dtype_of(weight.scales).name
    is_super = weight.super_scales is not None
    known = weight.bits in (2, 4, 8) and weight.table is None and weight.block % 4 == 0
    if not known or not codes.size or kind not in ("int8", "float16", "float32"):
        return None
    shapes = weight.array_shapes()
    if any(tuple(x.shape) != shapes[name] for name, x in weight.arrays.items()):
        return None  # the definition reports it
    if (kind == "int8") != is_super or (is_super and SUPER_BLOCK % weight.block):
        return None
    if weight.minimums is not None and dtype_of(weight.minimums).name != kind:
        return None
    return programs.kernel(
        codes.context, "quantized.cl", name, number,
        is_wide(prod(weight.shape) + max(map(buffers.offset_of, weight.arrays.values()))),
        lanes, BITS=weight.bits, BLOCK=weight.block, ZERO=weight.zero, SUPER=is_super,
        WIDE_SCALES=kind == "float32", MINIMUMS=weight.minimums is not None, ROWS=rows,
    )  # fmt: skip


def _arguments(weight: QuantizedWeight) -> tuple[list[Array], list[Any]]:
    """Return the arrays of a weight, and the buffers and starts that the kernels take."""
    arrays = {name: plain(x) for name, x in weight.arrays.items()}
    arguments: list[Any] = []
    for name in ("codes", "scales", "super_scales", "minimums", "super_minimums"):
        source = arrays.get(name, arrays["codes"])  # not every driver takes no memory
        arguments += (source.base_data, buffers.offset_of(source))
    return list(arrays.values()), arguments
