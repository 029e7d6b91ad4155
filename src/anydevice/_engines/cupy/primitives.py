"""The primitives on CuPy.

A kernel runs on the current device whatever arrays it is given, so each primitive makes the device
of its first array the current one. CuPy has `bfloat16` since release 14, though not in every
function: where elements only change places they go as `uint16`, which has the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import cupy
import cupyx
import numpy as np
from cupy import ndarray
from cupyx.scipy import special

from anydevice._core.dtypes import DType
from anydevice._core.primitives import Primitives, Shape
from anydevice._engines.host import known_dtype, lacking
from anydevice._engines.primitives import Axes, BasePrimitives, functions_of


def _there(function: Callable[..., ndarray]) -> Callable[..., Any]:
    """Return the function or method, run on the device of the first array among its arguments."""

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        first = arguments[1] if isinstance(arguments[0], CupyPrimitives) else arguments[0]
        arrays = first if isinstance(first, list | tuple) else arguments
        index = next(x.data.device_id for x in arrays if isinstance(x, ndarray))
        if index == cupy.cuda.runtime.getDevice():
            return function(*arguments, **named)
        with cupy.cuda.Device(index):
            return function(*arguments, **named)

    return call


def _one(function: Callable[[ndarray], ndarray]) -> Callable[..., Any]:
    """Return a function of one array that is computed in `float32` for 16-bit numbers."""
    return _there(lambda x: function(_wide(x)).astype(x.dtype, copy=False))


def _two(function: Callable[[ndarray, ndarray], ndarray]) -> Callable[..., Any]:
    """Return a function of two arrays, or of an array and a number that takes over its dtype."""
    return _there(lambda a, b: function(*_alike(a, b)))


def _extreme(on_host: Callable[..., Any], function: Callable[..., ndarray]) -> Callable[..., Any]:
    """Return `max` or `min`; without elements, NumPy gives the shape, or raises."""

    def call(x: ndarray, axis: Axes, keepdims: bool = False) -> Any:
        if not x.size:
            left = on_host(np.empty(x.shape), axis=axis, keepdims=keepdims)
            return cupy.empty(left.shape, x.dtype)
        return function(_wide(x), axis=axis, keepdims=keepdims).astype(x.dtype, copy=False)

    return _there(call)


class CupyPrimitives(
    BasePrimitives[ndarray], one=functions_of(cupy, _one), two=functions_of(cupy, _two)
):
    def full(self, shape: Shape, value: float, dtype: DType, like: ndarray) -> ndarray:
        with like.device:
            return cupy.full(shape, value, _native(dtype))

    def arange(self, stop: int, dtype: DType, like: ndarray) -> ndarray:
        with like.device:
            return cupy.arange(stop).astype(_native(dtype), copy=False)

    def asarray(self, values: Any, like: ndarray) -> ndarray:
        made_of = np.ascontiguousarray(values).reshape(values.shape)
        with like.device:
            made = cupy.empty(values.shape, _native(known_dtype(values.dtype)))
            made.set(made_of)
            return made

    @_there
    def astype(self, x: ndarray, dtype: DType) -> ndarray:
        return x.astype(_native(dtype), copy=False)

    reshape = staticmethod(_there(cupy.reshape))
    permute_dims = staticmethod(cupy.transpose)
    broadcast_to = staticmethod(cupy.broadcast_to)

    @_there
    def concat(self, arrays: Sequence[ndarray], axis: int) -> ndarray:
        joined = cupy.concatenate([_bits(x) for x in arrays], axis)
        return joined.view(arrays[0].dtype)

    rsqrt = staticmethod(_one(cupyx.rsqrt))
    sigmoid = staticmethod(_one(special.expit))
    erf = staticmethod(_one(special.erf))
    logical_not = staticmethod(_there(cupy.logical_not))
    divide = staticmethod(
        _two(lambda a, b: cupy.true_divide(a, b).astype(_type_of(a, b), copy=False))
    )

    @_there
    def isnan(self, x: ndarray) -> ndarray:
        return cupy.isnan(x) if _is_floating(x) else cupy.zeros(x.shape, np.bool_)

    @_there
    def pow(self, a: ndarray, b: ndarray) -> ndarray:
        a, b = _alike(a, b)
        dtype = _type_of(a, b)
        return cupy.power(_wide(a), _wide(b)).astype(dtype, copy=False)

    @_there
    def where(self, condition: ndarray, a: ndarray, b: ndarray) -> ndarray:
        a, b = _alike(a, b)
        dtype = _type_of(a, b)
        chosen = cupy.where(condition, _bits(a), _bits(b))
        return chosen.view(dtype) if _is_bfloat16(dtype) else chosen.astype(dtype, copy=False)

    @_there
    def sum(self, x: ndarray, axis: Axes, keepdims: bool = False) -> ndarray:
        wide = _wide(x)
        dtype = np.int32 if x.dtype == np.bool_ else wide.dtype
        total = cupy.sum(wide, axis=axis, dtype=dtype, keepdims=keepdims)
        return total if x.dtype == np.bool_ else total.astype(x.dtype, copy=False)

    max = staticmethod(_extreme(np.max, cupy.max))
    min = staticmethod(_extreme(np.min, cupy.min))

    @_there
    def argmax(self, x: ndarray, axis: int) -> ndarray:
        if not x.size:  # NumPy gives the shape, or raises
            return cupy.asarray(np.argmax(np.empty(x.shape), axis)).astype(np.int32)
        largest = cupy.argmax(_wide(x), axis)
        if _is_floating(x):
            # Which of several NaNs is found first is left open by CuPy.
            others = cupy.isnan(x)
            largest = cupy.where(others.any(axis), cupy.argmax(others, axis), largest)
        return largest.astype(np.int32)

    @_there
    def top_k(self, x: ndarray, k: int) -> tuple[ndarray, ndarray]:
        if not x.size:
            empty = cupy.empty((*x.shape[:-1], min(k, x.shape[-1])), x.dtype)
            return empty, empty.astype(np.int32)
        # The sort is stable, so that the first of equal ones comes first where the keys descend.
        places = cupy.argsort(~ordered(x), axis=-1)[..., :k]
        return self.take_along_axis(x, places, -1), places.astype(np.int32)

    @_there
    def matmul(self, a: ndarray, b: ndarray) -> ndarray:
        shape = None
        if b.ndim == 2 and a.ndim > 2:
            # One large product: CuPy would make a batch of them, each with the same matrix.
            shape = (*a.shape[:-1], b.shape[-1])
            a = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
        dtype = a.dtype
        if max(a.ndim, b.ndim) > 2 or a.shape[0] == b.shape[1] == 1:
            # CuPy sends batches of `bfloat16` to a kernel for integers, and rounds each product of
            # a row and a column before it adds them up.
            a, b = _wide(a), _wide(b)
        product = cupy.matmul(a, b).astype(dtype, copy=False)
        return product if shape is None else product.reshape(shape)

    take = _there(BasePrimitives.take)
    take_along_axis = _there(BasePrimitives.take_along_axis)

    def _take(self, x: ndarray, safe: ndarray, axis: int) -> ndarray:
        return cupy.take(_bits(x), safe, axis).view(x.dtype)

    def _take_along_axis(self, x: ndarray, safe: ndarray, axis: int) -> ndarray:
        shape = (*x.shape[:axis], safe.shape[axis], *x.shape[axis + 1 :])
        return cupy.take_along_axis(_bits(x), cupy.broadcast_to(safe, shape), axis).view(x.dtype)

    def _clamp(self, indices: ndarray, size: int) -> tuple[ndarray, ndarray]:
        wide = indices.astype(np.int64, copy=False)
        safe = cupy.clip(wide, 0, size - 1)
        return safe == wide, safe

    @_there
    def write(self, x: ndarray, new: ndarray, positions: ndarray) -> ndarray:
        """Write into `x` and return it; rows out of range repeat another write of their batch."""
        if not new.size or not x.size:
            return x
        inside, safe = self._clamp(positions, x.shape[2])
        batch = cupy.arange(x.shape[0])[:, None]
        token = cupy.arange(new.shape[2])[None, :]
        source = cupy.where(inside, token, cupy.argmax(inside, 1)[:, None])
        target = cupy.take_along_axis(safe, source, 1)
        old, fresh = _bits(x), _bits(new)
        somewhere = inside.any(1)[:, None, None, None]
        old[batch, :, target] = cupy.where(
            somewhere, fresh[batch, :, source], old[batch, :, target]
        )
        return x


def _native(dtype: DType) -> Any:
    if dtype.module != "numpy" and dtype.name != "bfloat16":
        raise lacking("CuPy", dtype)
    return dtype.numpy()


def _is_floating(x: ndarray) -> bool:
    return known_dtype(x.dtype).kind == "float"


def _is_bfloat16(dtype: Any) -> bool:
    return bool(dtype.name == "bfloat16")


def _wide(x: ndarray) -> ndarray:
    """Return floating-point numbers of 16 bits as `float32`, all else as it is."""
    if not isinstance(x, ndarray):
        return x
    narrow = x.dtype.itemsize == 2 and _is_floating(x)
    return x.astype(np.float32) if narrow else x


def _type_of(a: ndarray, b: ndarray) -> Any:
    return a.dtype if isinstance(a, ndarray) else b.dtype


def _alike(a: ndarray, b: ndarray) -> tuple[ndarray, ndarray]:
    """Return the operands; a Python number keeps the other operand's dtype."""
    if not isinstance(b, ndarray):
        return a, _number(b, a)
    if not isinstance(a, ndarray):
        return _number(a, b), b
    return a, b


def _number(value: float, beside: Any) -> Any:
    if _is_bfloat16(beside.dtype):  # for NumPy's rules, a number of Python's is wider than it
        return cupy.full((), value, beside.dtype)
    return float(value) if _is_floating(beside) else beside.dtype.type(value)


def _bits(x: ndarray) -> ndarray:
    """Return `bfloat16` as `uint16`, so that elements can be moved; all else as it is."""
    is_array = isinstance(x, ndarray)
    return x.view(np.uint16) if is_array and _is_bfloat16(x.dtype) else x


def ordered(x: ndarray) -> ndarray:
    """Return integers that sort like the elements; NaN is the largest."""
    if not _is_floating(x):
        return x.view(np.uint8) if x.dtype == np.bool_ else x
    wide = _wide(x) + 0.0  # without the sign of a zero
    bits = wide.view(np.int32 if wide.dtype.itemsize == 4 else np.int64)
    facts = np.iinfo(bits.dtype)
    # Of negative numbers, all bits but the sign have to be turned over.
    keys = bits ^ ((bits >> (facts.bits - 1)) & facts.max)
    return cupy.where(cupy.isnan(wide), facts.max, keys)


PRIMITIVES: Primitives = CupyPrimitives()
