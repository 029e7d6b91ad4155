"""The primitives on MLX. They run on its default device: every device sees an array's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from threading import local
from typing import Any

import mlx.core as mx
import numpy as np

from anydevice._core.dtypes import DType
from anydevice._core.primitives import PrimitivesOf, Shape
from anydevice._engines.mlx.arrays import from_host, native_dtype
from anydevice._engines.primitives import Axes, BasePrimitives, functions_of

_FLOATING = frozenset({mx.float16, mx.bfloat16, mx.float32, mx.float64})
_HALF = frozenset({mx.float16, mx.bfloat16})
_AS_INDEX = frozenset({mx.int32, mx.int64})
_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
_CPU = mx.Device(mx.cpu, 0)
_ERF_TERMS = 120
_ERF_IS_ONE = 6.0

under_way = local()
"""`gradients`: how many are being taken, one inside the other, in this thread."""


def _two(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return the function, in which a number takes the dtype of the array beside it."""

    def call(a: mx.array | float, b: mx.array | float) -> Any:
        if isinstance(b, mx.array):
            return function(a if isinstance(a, mx.array) else _number(a, b), b)
        return function(a, _number(b, a))

    return call


def _extreme(
    function: Callable[..., mx.array], on_host: Callable[..., Any]
) -> Callable[..., mx.array]:
    def call(x: mx.array, axis: Axes, keepdims: bool = False) -> Any:
        if not x.size:
            return _of_nothing(on_host, x, axis, keepdims)
        return function(x, axis=axis, keepdims=keepdims)

    return call


_LONG_ROW = 1024
"""Above this number of elements, partitioning is faster than sorting."""


class MlxPrimitives(BasePrimitives[mx.array], one=functions_of(mx), two=functions_of(mx, _two)):
    """MLX's own functions, and composed ones where it has none or its float64 is inexact."""

    reshape = staticmethod(mx.reshape)
    permute_dims = staticmethod(mx.transpose)
    broadcast_to = staticmethod(mx.broadcast_to)

    matmul = staticmethod(mx.matmul)

    def full(self, shape: Shape, value: float, dtype: DType, like: mx.array) -> mx.array:
        # MLX does not make `bool` of a number.
        return mx.full(shape, value, dtype=native_dtype(dtype)).astype(native_dtype(dtype))

    def arange(self, stop: int, dtype: DType, like: mx.array) -> mx.array:
        return mx.arange(stop, dtype=native_dtype(dtype))

    def asarray(self, values: Any, like: mx.array) -> mx.array:
        return from_host(values)

    def astype(self, x: mx.array, dtype: DType) -> mx.array:
        target = native_dtype(dtype)
        return x if x.dtype == target else x.astype(target)

    def concat(self, arrays: Sequence[mx.array], axis: int) -> mx.array:
        return mx.concatenate(list(arrays), axis=axis)

    def sign(self, x: mx.array) -> mx.array:
        plain = mx.sign(x)
        # MLX gives 0 for NaN.
        return mx.where(mx.isnan(x), x, plain) if x.dtype in _FLOATING else plain

    def exp(self, x: mx.array) -> mx.array:
        return mx.power(math.e, x) if x.dtype == mx.float64 else mx.exp(x)

    def sin(self, x: mx.array) -> Any:
        return _sin_in_full(x) if x.dtype == mx.float64 else mx.sin(x)

    def cos(self, x: mx.array) -> Any:
        return _cos_in_full(x) if x.dtype == mx.float64 else mx.cos(x)

    def sigmoid(self, x: mx.array) -> mx.array:
        if x.dtype == mx.float64:
            return 1 / (1 + self.exp(-x))
        # With float16, MLX takes small results for 0.
        return mx.sigmoid(x.astype(mx.float32)).astype(x.dtype) if x.itemsize < 4 else mx.sigmoid(x)

    def erf(self, x: mx.array) -> mx.array:
        return self._erf_in_full(x) if x.dtype == mx.float64 else mx.erf(x)

    def _erf_in_full(self, x: mx.array) -> mx.array:
        """Return the series of erf with terms of one sign, which loses no digits to cancelling."""
        near = mx.clip(x, -_ERF_IS_ONE, _ERF_IS_ONE)
        square = near * near
        total = mx.ones_like(near)
        for term in range(_ERF_TERMS, 0, -1):
            total = 1 + total * square * (2 / (2 * term + 1))
        share = 2 / math.sqrt(math.pi) * near * self.exp(-square) * total
        return mx.clip(share, -1.0, 1.0)

    @staticmethod
    def log10(x: mx.array) -> mx.array:
        return mx.log(x) / math.log(10) if x.dtype == mx.float64 else mx.log10(x)

    @staticmethod
    def tan(x: mx.array) -> Any:
        sine: Any = _sin_in_full(x) if x.dtype == mx.float64 else mx.tan(x)
        return sine / _cos_in_full(x) if x.dtype == mx.float64 else sine

    @staticmethod
    def copysign(a: mx.array | float, b: mx.array | float) -> mx.array:
        a, b = _both(a, b)
        bits = mx.stop_gradient(b).view(mx.int64 if b.dtype == mx.float64 else mx.int32)
        return mx.where(bits < 0, -mx.abs(a), mx.abs(a))

    @staticmethod
    def hypot(a: mx.array | float, b: mx.array | float) -> mx.array:
        a, b = map(mx.abs, _both(a, b))
        large = mx.maximum(a, b)
        share = mx.minimum(a, b) / mx.where(large == 0, 1, large)
        is_infinite = mx.logical_or(a == math.inf, b == math.inf)
        return mx.where(is_infinite, math.inf, large * mx.sqrt(1 + share * share))

    @staticmethod
    def logaddexp(a: mx.array, b: mx.array) -> mx.array:
        small = mx.power(math.e, -mx.abs(a - b))
        return mx.where(a == b, a + math.log(2), mx.maximum(a, b) + mx.log1p(small))

    def where(self, condition: mx.array, a: mx.array | float, b: mx.array | float) -> mx.array:
        like = a if isinstance(a, mx.array) else b
        assert isinstance(like, mx.array)
        x, y = (one if isinstance(one, mx.array) else _number(one, like) for one in (a, b))
        return mx.where(condition, x, y)

    def sum(self, x: mx.array, axis: Axes, keepdims: bool = False) -> mx.array:
        dtype = mx.int32 if x.dtype == mx.bool_ else x.dtype
        if not x.size:
            return _of_nothing(np.sum, x, axis, keepdims).astype(dtype)
        wide = x.astype(mx.float32) if dtype in _HALF else x
        # MLX itself widens integers of few bits.
        return mx.sum(wide, axis=axis, keepdims=keepdims).astype(dtype)

    max = staticmethod(_extreme(mx.max, np.max))
    min = staticmethod(_extreme(mx.min, np.min))

    def argmax(self, x: mx.array, axis: int) -> mx.array:
        if not x.size:
            return _of_nothing(np.max, x, axis, False).astype(mx.int32)
        if x.dtype in _FLOATING and (mx.default_device() != _CPU or _cpu_passes_over_nan()):
            return _argmax_of_numbers_and_others(x, axis)
        return mx.argmax(x, axis=axis).astype(mx.int32)

    def top_k(self, x: mx.array, k: int) -> tuple[mx.array, mx.array]:
        size = x.shape[-1]
        if size > _LONG_ROW and 4 * k <= size and x.size:
            # The k largest in any order, NaN among them, and then only these in order.
            largest = mx.argpartition(x, size - k, axis=-1)[..., size - k :]
            places = mx.sort(largest.astype(mx.int32), axis=-1)
            values, order = self._in_order(mx.take_along_axis(x, places, axis=-1), k)
            return values, mx.take_along_axis(places, order, axis=-1)
        return self._in_order(x, k)

    def _in_order(self, x: mx.array, k: int) -> tuple[mx.array, mx.array]:
        # Sorted backwards and reversed, equal elements keep their order, and NaN comes first.
        size = x.shape[-1]
        order = mx.argsort(x[..., ::-1], axis=-1)[..., ::-1]
        places = (size - 1) - order[..., :k].astype(mx.int32)
        return mx.take_along_axis(x, places, axis=-1), places

    _take = staticmethod(mx.take)

    def _take_along_axis(self, x: mx.array, safe: mx.array, axis: int) -> mx.array:
        shape = (*x.shape[:axis], safe.shape[axis], *x.shape[axis + 1 :])
        return mx.take_along_axis(x, mx.broadcast_to(safe, shape), axis)

    def _clamp(self, indices: mx.array, size: int) -> tuple[mx.array, mx.array]:
        indices = _as_index(indices)
        safe = mx.clip(indices, 0, size - 1)
        return mx.equal(safe, indices), safe

    def write(self, x: mx.array, new: mx.array, positions: mx.array) -> mx.array:
        """See the protocol. One row for each batch goes into the memory of `x`."""
        positions = _as_index(positions)
        inside = mx.logical_and(positions >= 0, positions < x.shape[2])
        # `under_way` knows of gradients by `AUTODIFF`; `mx.grad` refuses the write in place.
        if new.shape[2] == 1 and x.size and not getattr(under_way, "gradients", 0):
            return _written_in_place(x, new, positions, inside)
        # Rows out of range go to an extra row: MLX would write outside of the array.
        keys = x.shape[2]
        room = mx.concatenate([x, mx.zeros_like(new[:, :, :1])], axis=2)
        rows = mx.where(inside, positions, keys)[:, None, :, None]
        return mx.put_along_axis(room, rows, new, axis=2)[:, :, :keys]


def _written_in_place(x: mx.array, new: mx.array, positions: mx.array, inside: Any) -> mx.array:
    """Replace one row of each batch, where it is inside, by exact products and sums of bits."""
    batch, heads, keys, size = x.shape
    bits = _BITS[x.dtype.size]
    head = mx.arange(batch * heads).reshape(batch, heads) * keys
    row = mx.reshape(head + mx.clip(positions, 0, keys - 1), (-1,))
    goes = mx.reshape(mx.broadcast_to(inside, (batch, heads)), (-1, 1))
    rows = mx.reshape(x.view(bits), (-1, size))
    rows = rows.at[row].multiply(mx.logical_not(goes).astype(bits))
    rows = rows.at[row].add(mx.where(goes, mx.reshape(new.view(bits), (-1, size)), 0))
    return mx.reshape(rows, x.shape).view(x.dtype)


# With gradients of their own: those of the tangent would be only as exact as float32.
@mx.custom_function
def _sin_in_full(x: mx.array) -> mx.array:
    half = mx.tan(x / 2)
    return 2 * half / (1 + half * half)


@mx.custom_function
def _cos_in_full(x: mx.array) -> mx.array:
    square = mx.square(mx.tan(x / 2))
    return (1 - square) / (1 + square)


_sin_in_full.vjp(lambda x, change, _: change * _cos_in_full(x))
_cos_in_full.vjp(lambda x, change, _: -change * _sin_in_full(x))


def _of_nothing(
    function: Callable[..., mx.array], x: mx.array, axis: Axes, keepdims: bool
) -> mx.array:
    """Return the reduction of an array without elements, on which MLX may hang."""
    left = function(np.zeros(x.shape, np.int8), axis=axis, keepdims=keepdims)
    return mx.zeros(left.shape, dtype=x.dtype)


def _number(value: float, beside: Any) -> float:
    """Return the number in a type that keeps the dtype of the array beside it."""
    if beside.dtype in _FLOATING or beside.dtype == mx.complex64:
        return value
    return bool(value) if beside.dtype == mx.bool_ else int(value)


def _both(*operands: mx.array | float) -> list[mx.array]:
    """Return the operands as arrays of one dtype."""
    (dtype, *_) = [x.dtype for x in operands if isinstance(x, mx.array)]
    return [x if isinstance(x, mx.array) else mx.array(x, dtype) for x in operands]


def _as_index(indices: mx.array) -> mx.array:
    """Return the indices in a dtype that holds the size of any axis and negative numbers."""
    return indices if indices.dtype in _AS_INDEX else indices.astype(mx.int64)


@cache
def _cpu_passes_over_nan() -> bool:
    """Whether the CPU, too, finds the largest number beside NaN: up to MLX 0.32.2 it does."""
    return bool(mx.argmax(mx.array([0.0, math.nan]), stream=_CPU).item() == 0)


def _argmax_of_numbers_and_others(x: mx.array, axis: int) -> mx.array:
    """Return the index of the first NaN, where there is any: MLX's GPU kernel passes it over."""
    others = mx.isnan(x)
    first = mx.argmax(others, axis=axis)
    largest = mx.argmax(x, axis=axis)
    return mx.where(mx.any(others, axis=axis), first, largest).astype(mx.int32)


PRIMITIVES = MlxPrimitives()
_CONFORMS: PrimitivesOf[mx.array] = PRIMITIVES
