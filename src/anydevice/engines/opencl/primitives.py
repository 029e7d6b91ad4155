"""The primitives on OpenCL: views where nothing is computed, kernels of our own for all else."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import pyopencl.array as cl_array

from anydevice.core.dtypes import DType
from anydevice.core.engine import Absent
from anydevice.core.primitives import Primitives, Shape
from anydevice.engines.host import plain as plain_host
from anydevice.engines.opencl import arrays as views
from anydevice.engines.opencl.kernels import indexing as opencl_places
from anydevice.engines.opencl.kernels import products as opencl_products
from anydevice.engines.opencl.kernels import reductions as opencl_reductions
from anydevice.engines.opencl.kernels.elementwise import (
    expression,
    filled,
    gives_truth,
    reading,
    run,
)
from anydevice.engines.opencl.kernels.programs import (
    BOOL,
    bits_of,
    dtype_of,
    number_of,
    scalar,
    scalar_bits,
)


def computed(operation: str, *operands: Any) -> Any:
    """The result of an elementwise operation on arrays, or on an array and numbers.

    Raises `UnsupportedError` where the operation is not defined for the type of the arrays, or
    they have several types.
    """
    arrays = [x for x in operands if isinstance(x, cl_array.Array)]
    dtype, context = same_dtype(operation, *arrays), arrays[0].context
    number = number_of(dtype, context)
    text = expression(operation, number).replace("NUMBER", number.number)
    shape = views.broadcast_shape(*(x.shape for x in arrays))
    readings, extras = {}, []
    for name, x in zip("ab", operands, strict=False):
        if isinstance(x, cl_array.Array):
            readings[name] = reading(x, number, shape)
        else:
            extras.append((name, number, scalar(x, dtype, number)))
    result = BOOL if gives_truth(operation) else dtype
    out = views.new(shape, result, context)
    stored = number_of(result, context)
    return run(f"STORE(pr, ir, ({text}));", readings, out, stored, extras=extras)


def same_dtype(operation: str, *arrays: Any) -> DType:
    """The element type of arrays.

    Raises `UnsupportedError` where they have several.
    """
    first = arrays[0].dtype
    for x in arrays:
        if x.dtype != first:
            raise Absent(
                f"OpenCL computes no {operation} of {first} and {x.dtype}",
                instead="convert one of the arrays to the type of the other",
            ).error()
    return dtype_of(arrays[0])


class OpenclPrimitives:
    """Computes on the device of its operands, and returns before the device has done so."""

    def full(self, shape: Shape, value: float, dtype: DType, like: Any) -> Any:
        number = bits_of(dtype)
        return filled(tuple(shape), scalar_bits(value, dtype), dtype, number, like.context)

    def arange(self, stop: int, dtype: DType, like: Any) -> Any:
        number = number_of(dtype, like.context)
        out = views.new((max(0, stop),), dtype, like.context)
        return run(f"STORE(pr, ir, ({number.number})item);", {}, out, number)

    def asarray(self, values: Any, like: Any) -> Any:
        return views.from_host(plain_host(np.asarray(values)), like.context)

    def dtype(self, x: Any) -> DType:
        return dtype_of(x)

    def astype(self, x: Any, dtype: DType) -> Any:
        own = dtype_of(x)
        if own == dtype:
            return x
        number, result = number_of(own, x.context), number_of(dtype, x.context)
        out = views.new(x.shape, dtype, x.context)
        value = f"({result.number})a" if dtype != BOOL else "a"
        if number.number == "double" and dtype.bits == 16 and result.floating:
            value = "narrowed(a)"
        return run(f"STORE(pr, ir, {value});", {"a": reading(x, number, x.shape)}, out, result)

    def reshape(self, x: Any, shape: Shape) -> Any:
        shape = tuple(shape)
        if -1 in shape:
            known = prod(size for size in shape if size != -1)
            missing = x.size // known if known else 0
            shape = tuple(missing if size == -1 else size for size in shape)
        if prod(shape) != x.size:
            raise ValueError(f"an array {x.shape} cannot be given the shape {shape}")
        return opencl_places.reshaped(x, shape)

    def permute_dims(self, x: Any, axes: Sequence[int]) -> Any:
        order = tuple(axis % x.ndim for axis in axes)
        if sorted(order) != list(range(x.ndim)):
            raise ValueError(f"{tuple(axes)} is no order of the axes of an array {x.shape}")
        shape, own = tuple(x.shape[axis] for axis in order), views.strides_of(x)
        return views.view(x, shape, tuple(own[axis] for axis in order), views.offset_of(x))

    def broadcast_to(self, x: Any, shape: Shape) -> Any:
        shape = tuple(shape)
        return views.view(x, shape, views.broadcast_strides(x, shape), views.offset_of(x))

    def concat(self, arrays: Sequence[Any], axis: int) -> Any:
        same_dtype("concat", *arrays)
        return opencl_places.concat(arrays, axis)

    def part(self, x: Any, axis: int, start: int, stop: int, step: int = 1) -> Any:
        return opencl_places.part(x, axis, start, stop, step)

    def abs(self, x: Any) -> Any:
        return computed("abs", x)

    def negative(self, x: Any) -> Any:
        return computed("negative", x)

    def sign(self, x: Any) -> Any:
        return computed("sign", x)

    def floor(self, x: Any) -> Any:
        return computed("floor", x)

    def exp(self, x: Any) -> Any:
        return computed("exp", x)

    def log(self, x: Any) -> Any:
        return computed("log", x)

    def sqrt(self, x: Any) -> Any:
        return computed("sqrt", x)

    def rsqrt(self, x: Any) -> Any:
        return computed("rsqrt", x)

    def sin(self, x: Any) -> Any:
        return computed("sin", x)

    def cos(self, x: Any) -> Any:
        return computed("cos", x)

    def tanh(self, x: Any) -> Any:
        return computed("tanh", x)

    def sigmoid(self, x: Any) -> Any:
        return computed("sigmoid", x)

    def erf(self, x: Any) -> Any:
        return computed("erf", x)

    def isnan(self, x: Any) -> Any:
        return computed("isnan", x)

    def logical_not(self, x: Any) -> Any:
        return computed("logical_not", x)

    def add(self, a: Any, b: Any) -> Any:
        return computed("add", a, b)

    def subtract(self, a: Any, b: Any) -> Any:
        return computed("subtract", a, b)

    def multiply(self, a: Any, b: Any) -> Any:
        return computed("multiply", a, b)

    def divide(self, a: Any, b: Any) -> Any:
        return computed("divide", a, b)

    def pow(self, a: Any, b: Any) -> Any:
        return computed("pow", a, b)

    def maximum(self, a: Any, b: Any) -> Any:
        return computed("maximum", a, b)

    def minimum(self, a: Any, b: Any) -> Any:
        return computed("minimum", a, b)

    def equal(self, a: Any, b: Any) -> Any:
        return computed("equal", a, b)

    def less(self, a: Any, b: Any) -> Any:
        return computed("less", a, b)

    def less_equal(self, a: Any, b: Any) -> Any:
        return computed("less_equal", a, b)

    def logical_and(self, a: Any, b: Any) -> Any:
        return computed("logical_and", a, b)

    def logical_or(self, a: Any, b: Any) -> Any:
        return computed("logical_or", a, b)

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        """The elements are copied as bits: any type will do."""
        arrays = [x for x in (a, b) if isinstance(x, cl_array.Array)]
        dtype, context = same_dtype("where", *arrays), arrays[0].context
        bits = bits_of(dtype)
        shape = views.broadcast_shape(condition.shape, *(x.shape for x in arrays))
        readings, extras = {}, []
        for name, x in zip("ab", (a, b), strict=True):
            if isinstance(x, cl_array.Array):
                readings[name] = reading(x, bits, shape)
            else:
                extras.append((name, bits, scalar_bits(x, dtype)))
        readings["c"] = reading(condition, number_of(dtype_of(condition), context), shape)
        out = views.new(shape, dtype, context)
        return run("pr[ir] = c != 0 ? a : b;", readings, out, bits, extras=extras)

    def sum(self, x: Any, axis: int | tuple[int, ...], keepdims: bool = False) -> Any:
        return opencl_reductions.reduce("sum", x, axis, keepdims)

    def max(self, x: Any, axis: int | tuple[int, ...], keepdims: bool = False) -> Any:
        return opencl_reductions.reduce("max", x, axis, keepdims)

    def min(self, x: Any, axis: int | tuple[int, ...], keepdims: bool = False) -> Any:
        return opencl_reductions.reduce("min", x, axis, keepdims)

    def argmax(self, x: Any, axis: int) -> Any:
        return opencl_reductions.argmax(x, axis)

    def top_k(self, x: Any, k: int) -> tuple[Any, Any]:
        return opencl_reductions.top_k(x, k)

    def matmul(self, a: Any, b: Any) -> Any:
        same_dtype("matmul", a, b)
        return opencl_products.matmul(a, b)

    def take(self, x: Any, indices: Any, axis: int) -> Any:
        return opencl_places.take(x, indices, axis)

    def take_along_axis(self, x: Any, indices: Any, axis: int) -> Any:
        return opencl_places.take_along_axis(x, indices, axis)

    def write(self, x: Any, new: Any, positions: Any) -> Any:
        return opencl_places.write(x, new, positions)


PRIMITIVES: Primitives = OpenclPrimitives()
