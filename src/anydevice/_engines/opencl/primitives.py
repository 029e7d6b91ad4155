"""The primitives on OpenCL: views where nothing is computed, kernels of our own for all else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
from pyopencl.array import Array

from anydevice._core.dtypes import DType
from anydevice._core.primitives import Primitives, Shape
from anydevice._engines.host import no_dtype
from anydevice._engines.host import plain as plain_host
from anydevice._engines.opencl import buffers
from anydevice._engines.opencl.kernels import indexing, products, reductions
from anydevice._engines.opencl.kernels.elementwise import (
    Reading,
    expression,
    filled,
    gives_booleans,
    reading,
    run,
)
from anydevice._engines.opencl.kernels.programs import (
    BOOL,
    Number,
    bits_of,
    dtype_of,
    number_of,
    scalar,
    scalar_bits,
)
from anydevice._engines.primitives import BasePrimitives


def computed(operation: str, *operands: Any) -> Any:
    """Compute an elementwise operation; raises `UnsupportedError` for a dtype that lacks it."""
    arrays = [x for x in operands if isinstance(x, Array)]
    dtype, context = same_dtype(operation, *arrays), arrays[0].context
    number = number_of(dtype, context)
    text = expression(operation, number).replace("NUMBER", number.number)
    shape = buffers.broadcast_shape(*(x.shape for x in arrays))
    readings, extras = _operands(
        operands, number, shape, partial(scalar, dtype=dtype, number=number)
    )
    result = BOOL if gives_booleans(operation) else dtype
    out = buffers.new(shape, result, context)
    stored = number_of(result, context)
    return run(f"STORE(pr, ir, ({text}));", readings, out, stored, extras=extras)


def _operands(
    operands: Sequence[Any], number: Number, shape: Shape, as_argument: Callable[[Any], Any]
) -> tuple[dict[str, Reading], list[tuple[str, Number, Any]]]:
    """Return the arrays `a` and `b` to read, and the numbers among them as arguments."""
    named = list(zip("ab", operands, strict=False))
    arrays = {name: reading(x, number, shape) for name, x in named if isinstance(x, Array)}
    return arrays, [(name, number, as_argument(x)) for name, x in named if name not in arrays]


def same_dtype(operation: str, *arrays: Array) -> DType:
    """Return the dtype of arrays; raises `UnsupportedError` if they have several."""
    first = arrays[0].dtype
    for x in arrays:
        if x.dtype != first:
            what = f"OpenCL computes no {operation} of {first} and {x.dtype}"
            raise no_dtype(what, "convert one of the arrays to the dtype of the other")
    return dtype_of(arrays[0])


class OpenclPrimitives(
    BasePrimitives[Array], one=partial(partial, computed), two=partial(partial, computed)
):
    """Computes on the device of its operands, and returns before the device has done so."""

    def full(self, shape: Shape, value: float, dtype: DType, like: Array) -> Array:
        number = bits_of(dtype)
        return filled(tuple(shape), scalar_bits(value, dtype), dtype, number, like.context)

    def arange(self, stop: int, dtype: DType, like: Array) -> Array:
        number = number_of(dtype, like.context)
        out = buffers.new((max(0, stop),), dtype, like.context)
        return run(f"STORE(pr, ir, ({number.number})item);", {}, out, number)

    def asarray(self, values: Any, like: Array) -> Array:
        return buffers.from_host(plain_host(np.asarray(values)), like.context)

    def astype(self, x: Array, dtype: DType) -> Array:
        own = dtype_of(x)
        if own == dtype:
            return x
        number, result = number_of(own, x.context), number_of(dtype, x.context)
        out = buffers.new(x.shape, dtype, x.context)
        value = f"({result.number})a" if dtype != BOOL else "a"
        if number.number == "double" and dtype.bits == 16 and result.floating:
            value = "narrowed(a)"
        return run(f"STORE(pr, ir, {value});", {"a": reading(x, number, x.shape)}, out, result)

    def reshape(self, x: Array, shape: Shape) -> Array:
        shape = tuple(shape)
        if -1 in shape:
            known = prod(size for size in shape if size != -1)
            missing = x.size // known if known else 0
            shape = tuple(missing if size == -1 else size for size in shape)
        if prod(shape) != x.size:
            raise ValueError(f"an array {x.shape} cannot be given the shape {shape}")
        return indexing.reshaped(x, shape)

    def permute_dims(self, x: Array, axes: Sequence[int]) -> Array:
        order = tuple(axis % x.ndim for axis in axes)
        if sorted(order) != list(range(x.ndim)):
            raise ValueError(f"{tuple(axes)} is no order of the axes of an array {x.shape}")
        shape, own = tuple(x.shape[axis] for axis in order), buffers.strides_of(x)
        return buffers.view(x, shape, tuple(own[axis] for axis in order), buffers.offset_of(x))

    def broadcast_to(self, x: Array, shape: Shape) -> Array:
        shape = tuple(shape)
        return buffers.view(x, shape, buffers.broadcast_strides(x, shape), buffers.offset_of(x))

    def concat(self, arrays: Sequence[Array], axis: int) -> Array:
        same_dtype("concat", *arrays)
        return indexing.concat(arrays, axis)

    slice_axis = staticmethod(indexing.slice_axis)

    def where(self, condition: Array, a: Array, b: Array) -> Array:
        """Select elements of `a` or `b`; they are copied as bits, in any dtype."""
        arrays = [x for x in (a, b) if isinstance(x, Array)]
        dtype, context = same_dtype("where", *arrays), arrays[0].context
        bits = bits_of(dtype)
        shape = buffers.broadcast_shape(condition.shape, *(x.shape for x in arrays))
        readings, extras = _operands((a, b), bits, shape, partial(scalar_bits, dtype=dtype))
        readings["c"] = reading(condition, number_of(dtype_of(condition), context), shape)
        out = buffers.new(shape, dtype, context)
        return run("pr[ir] = c != 0 ? a : b;", readings, out, bits, extras=extras)

    sum = staticmethod(partial(reductions.reduce, "sum"))
    max = staticmethod(partial(reductions.reduce, "max"))
    min = staticmethod(partial(reductions.reduce, "min"))
    argmax = staticmethod(reductions.argmax)
    top_k = staticmethod(reductions.top_k)

    def matmul(self, a: Array, b: Array) -> Array:
        same_dtype("matmul", a, b)
        return products.matmul(a, b)

    take = staticmethod(indexing.take)
    take_along_axis = staticmethod(indexing.take_along_axis)
    write = staticmethod(indexing.write)


PRIMITIVES: Primitives = OpenclPrimitives()
