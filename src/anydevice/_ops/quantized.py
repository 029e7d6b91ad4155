"""Quantized weights: their numbers, and products with them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from anydevice._core.array import Array, ArrayT
from anydevice._core.dtypes import DTYPES, as_dtype
from anydevice._core.primitives import PrimitivesOf
from anydevice._core.quantized import QuantizedWeight, low_bits
from anydevice._ops.arguments import (
    in_words,
    require_integers,
    require_one_dtype,
    require_one_library,
    widened,
    wrong,
    wrong_shapes,
)
from anydevice._ops.dispatch import float_version, own_version, primitives, run, run3

if TYPE_CHECKING:
    from anydevice._core.array import HostArray

FLOAT32, INT32 = DTYPES["float32"], DTYPES["int32"]

BLOCK = 2**24
"""Elements of a matrix that are dequantized at a time: 64 MiB of float32."""


def dequantize(
    weight: QuantizedWeight, dtype: object = "float32", rows: ArrayT | None = None
) -> Array:
    """Return the numbers of a quantized weight, computed in float32.

    With `rows`, integers of any shape, return only these rows of the first axis, as `take` does:
    the rows of an embedding, or the matrices of experts.

    >>> import numpy
    >>> codes, scales = numpy.array([[0x98], [0x7F]], "uint8"), numpy.ones((2, 1), "float16")
    >>> weight = QuantizedWeight("q4_0", (2, 2), 4, 2, codes, scales, zero=8)
    >>> dequantize(weight).tolist(), dequantize(weight, rows=numpy.array([1])).tolist()
    ([[0.0, 1.0], [7.0, -1.0]], [[7.0, -1.0]])
    """
    _require_quantized("dequantize", weight)
    wanted = as_dtype(dtype)
    if wanted.kind != "float" or wanted.packed:
        raise wrong("dequantize", f"dtype must be a floating-point one, not {wanted}")
    xp = primitives(weight.codes, "dequantize", "weight")
    if rows is not None:
        require_integers("dequantize", "rows", rows, weight.codes, "weight")
        arrays = {name: xp.take(x, rows, 0) for name, x in weight.arrays.items()}
        weight = weight.with_arrays(arrays, (*rows.shape, *weight.shape[1:]))
    own = own_version(weight.codes, "dequantize", _dequantize)
    try:
        return xp.astype(run(own, _dequantize, weight), wanted)
    except Exception:
        _require_shapes("dequantize", weight)
        raise


def quantized_linear(x: ArrayT, weight: QuantizedWeight, bias: ArrayT | None = None) -> ArrayT:
    """Return `x · weightᵀ + bias`, of the dtype of x, with a quantized weight.

    x is (…, in), weight (out, in), bias (out,) or `None`; the result is (…, out). By definition,
    the weight is dequantized in float32, and products are added up in float32.

    >>> import numpy
    >>> codes, scales = numpy.array([[0x98], [0x7F]], "uint8"), numpy.ones((2, 1), "float16")
    >>> weight = QuantizedWeight("q4_0", (2, 2), 4, 2, codes, scales, zero=8)
    >>> quantized_linear(numpy.array([[1.0, 2.0]], "float32"), weight).tolist()
    [[2.0, 5.0]]
    """
    own = float_version(x, "quantized_linear", _quantized_linear)
    _require_quantized("quantized_linear", weight)
    if type(weight.codes) is not type(x):
        require_one_library("quantized_linear", "x", x, "weight", weight.codes)
    if weight.ndim != 2 or not x.shape or x.shape[-1] != weight.shape[1]:
        rule = "weight must be (out, in) and x (…, in)"
        raise wrong_shapes("quantized_linear", rule, x=x, weight=weight)
    if bias is not None:
        require_one_dtype("quantized_linear", x=x, bias=bias)
        if tuple(bias.shape) != weight.shape[:1]:
            raise wrong_shapes("quantized_linear", "bias must be (out,)", weight=weight, bias=bias)
    try:
        return run3(own, _quantized_linear, x, weight, bias)
    except Exception:
        _require_shapes("quantized_linear", weight)
        raise


def _require_quantized(op: str, weight: Any) -> None:
    if not isinstance(weight, QuantizedWeight):
        raise wrong(op, f"weight must be a QuantizedWeight, not {in_words(weight)}")


def _require_shapes(op: str, weight: QuantizedWeight) -> None:
    """Raise `ConfigurationError` for an array whose shape does not fit the weight's."""
    for name, shape in weight.array_shapes().items():
        array = weight.arrays.get(name)
        if array is not None and tuple(array.shape) != shape:
            rule = f"{name} of {weight!r} must have the shape {shape}"
            raise wrong_shapes(op, rule, **{name: array})


def slice_rows(weight: QuantizedWeight, start: int, stop: int) -> QuantizedWeight:
    """Return the rows from `start` up to `stop` of the first axis."""
    xp = primitives(weight.codes)
    arrays = {name: xp.slice_axis(x, 0, start, stop) for name, x in weight.arrays.items()}
    return weight.with_arrays(arrays, (stop - start, *weight.shape[1:]))


def row_blocks(weight: QuantizedWeight, size: int = BLOCK) -> Iterator[QuantizedWeight]:
    """Yield the weight in blocks of rows with at most `size` elements, or one row."""
    rows = weight.shape[0]
    step = max(1, size // max(1, math.prod(weight.shape[1:])))
    if rows <= step:
        yield weight
        return
    for start in range(0, rows, step):
        yield slice_rows(weight, start, min(rows, start + step))


def _quantized_linear(x: ArrayT, weight: QuantizedWeight, bias: ArrayT | None) -> ArrayT:
    xp = primitives(x)
    columns = weight.shape[1]
    flat = widened(xp, xp.reshape(x, (math.prod(x.shape[:-1]), columns)))
    own = own_version(weight.codes, "dequantize", _dequantize)
    parts: list[ArrayT] = []
    for block in row_blocks(weight):
        numbers: Any = run(own, _dequantize, block)
        columns_first = xp.permute_dims(xp.astype(numbers, xp.dtype(flat)), (1, 0))
        parts.append(xp.matmul(flat, columns_first))
    product = parts[0] if len(parts) == 1 else xp.concat(parts, 1)
    if bias is not None:
        product = xp.add(product, xp.astype(bias, xp.dtype(product)))
    return xp.reshape(xp.astype(product, xp.dtype(x)), (*x.shape[:-1], weight.shape[0]))


def _dequantize(weight: QuantizedWeight) -> Array:
    """Return the numbers in float32."""
    xp = primitives(weight.codes)
    codes = _unpack_codes(weight.codes, weight.high, weight.bits)
    if weight.table is None:
        numbers = xp.astype(codes, FLOAT32)
        numbers = xp.subtract(numbers, float(weight.zero)) if weight.zero else numbers
    else:
        levels = xp.asarray(_host_array(weight.table), weight.codes)
        numbers = xp.take(levels, xp.astype(codes, INT32), 0)
    blocks = (*weight.shape[:-1], weight.shape[-1] // weight.block, weight.block)
    scales = _scales(xp, weight.scales, weight.super_scales)
    numbers = xp.multiply(xp.reshape(numbers, blocks), scales)
    if weight.minimums is not None:
        numbers = xp.add(numbers, _scales(xp, weight.minimums, weight.super_minimums))
    return xp.reshape(numbers, weight.shape)


def _host_array(values: tuple[float, ...]) -> HostArray:
    import numpy as np

    return np.asarray(values, np.float32)


def _scales(xp: PrimitivesOf[Array], scales: Array, factors: Array | None) -> Array:
    """Return the scales of blocks in float32, (…, blocks, 1)."""
    wide = xp.astype(scales, FLOAT32)
    if factors is not None:
        grouped = xp.reshape(wide, (*factors.shape, scales.shape[-1] // factors.shape[-1]))
        wide = xp.multiply(grouped, xp.reshape(xp.astype(factors, FLOAT32), (*factors.shape, 1)))
    return xp.reshape(wide, (*scales.shape, 1))


def _unpack_codes(codes: Array, high: Array | None, bits: int) -> Array:
    """Return the codes of `bits` bits in float32, (…, columns); see `QuantizedWeight`."""
    low = low_bits(bits)
    numbers = _split_bytes(codes, low)
    if high is None:
        return numbers
    xp = primitives(codes)
    return xp.add(numbers, xp.multiply(_split_bytes(high, bits - low), float(1 << low)))


def _split_bytes(packed: Array, bits: int) -> Array:
    """Return the numbers of `bits` bits in bytes, the lowest first, in float32."""
    xp = primitives(packed)
    rest, parts = xp.astype(packed, FLOAT32), []
    for _ in range(8 // bits - 1):
        above = xp.floor(xp.multiply(rest, 2.0**-bits))
        parts.append(xp.subtract(rest, xp.multiply(above, float(1 << bits))))
        rest = above
    parts.append(rest)
    columns = [xp.reshape(part, (*packed.shape, 1)) for part in parts]
    joined = columns[0] if len(columns) == 1 else xp.concat(columns, len(packed.shape))
    return xp.reshape(joined, (*packed.shape[:-1], packed.shape[-1] * len(parts)))
