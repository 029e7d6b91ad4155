"""NumPy's version of the primitives: plain, exact about dtypes, and silent about infinities."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any, ParamSpec

import numpy as np
from numpy._core.umath import _extobj_contextvar, _make_extobj

from anydevice._core.dtypes import DTYPES, DType
from anydevice._core.primitives import PrimitivesOf, Shape
from anydevice._engines.host import known_dtype
from anydevice._engines.primitives import Axes, BasePrimitives, functions_of, missing_value

Array = np.ndarray[Any, Any]
P = ParamSpec("P")

_ADDED_UP: Callable[..., Any] = np.add.reduce
"""The function behind `np.sum`, called directly."""

# Warnings are turned off by hand: `with np.errstate(all="ignore")` builds its settings each time,
# which adds 0.85 µs to every op in bench/calling_ops.py and takes max and min over its bar of 2 µs.
_silence: Callable[[], Any] = partial(_extobj_contextvar.set, _make_extobj(all="ignore"))
_restore: Callable[[Any], Any] = _extobj_contextvar.reset


def _silent(function: Callable[P, Any]) -> Callable[P, Array]:
    """Return the function without warnings, and its result as an array even without axes."""

    @wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> Array:
        before = _silence()
        try:
            return np.asarray(function(*arguments, **named))
        finally:
            _restore(before)

    return call


def is_narrow(x: Array) -> bool:
    """Whether these are floating-point numbers of 16 bits or fewer."""
    return x.dtype.itemsize < 4 and known_dtype(x.dtype).kind == "float"


def wide(x: Array) -> Array:
    """Return floating-point numbers of 16 bits or fewer as `float32`, all else as it is."""
    return x.astype(np.float32) if is_narrow(x) else x


def _one(function: Callable[[Array], Any]) -> Callable[[Array], Array]:
    """Return a function of one array that is computed in `float32` for 16-bit numbers."""

    def call(x: Array) -> Array:
        before = _silence()
        try:
            return _array(function(x if x.dtype.itemsize >= 4 else wide(x)), x.dtype)
        finally:
            _restore(before)

    return call


def _two(function: Callable[[Array, Array], Any]) -> Callable[[Any, Any], Array]:
    """Return a function of two arrays, or of an array and a number that takes over its dtype."""

    def call(a: Any, b: Any) -> Array:
        if type(a) is not np.ndarray or type(b) is not np.ndarray:
            a, b = _alike(a, b)
        before = _silence()
        try:
            result = function(a, b)
        finally:
            _restore(before)
        return result if type(result) is np.ndarray else np.asarray(result)

    return call


def _array(result: Any, dtype: Any) -> Array:
    """Return a result as an array of this dtype, also where it has no axes."""
    if type(result) is np.ndarray and result.dtype is dtype:
        return result
    return np.asarray(result).astype(dtype, copy=False)


@cache
def _theirs(name: str) -> Any:
    return DTYPES[name].numpy()


def _alike(a: Any, b: Any) -> tuple[Array, Array]:
    if not isinstance(b, np.ndarray):
        return a, np.asarray(b, a.dtype)
    if not isinstance(a, np.ndarray):
        return np.asarray(a, b.dtype), b
    return a, b


_LONG_ROW = 1024
"""Above this number of elements, partitioning is faster than sorting."""


class NumpyPrimitives(
    BasePrimitives[Array], one=functions_of(np, _one), two=functions_of(np, _two)
):
    """The primitives over `numpy.ndarray`; `bfloat16` is the one of ml_dtypes."""

    def full(self, shape: Shape, value: float, dtype: DType, like: Any) -> Array:
        return np.full(shape, value, dtype.numpy())

    def arange(self, stop: int, dtype: DType, like: Any) -> Array:
        return np.arange(stop).astype(dtype.numpy(), copy=False)

    def asarray(self, values: Any, like: Any) -> Array:
        return np.asarray(values)

    @_silent
    def astype(self, x: Array, dtype: DType) -> Any:
        return x.astype(_theirs(dtype.name), copy=False)

    permute_dims = staticmethod(np.transpose)
    broadcast_to = staticmethod(np.broadcast_to)
    concat = staticmethod(np.concatenate)

    def reshape(self, x: Array, shape: Shape) -> Array:
        return np.reshape(x, shape)

    rsqrt = staticmethod(_one(lambda x: 1 / np.sqrt(x)))
    floor = staticmethod(_one(lambda x: np.floor(x) if x.dtype.kind == "f" else x))
    divide = staticmethod(_two(lambda a, b: np.true_divide(a, b).astype(a.dtype, copy=False)))

    @_silent
    def sigmoid(self, x: Array) -> Any:
        y = wide(x)
        small = np.exp(-np.abs(y))  # never overflows, and keeps the digits of small results
        return (np.where(y < 0, small, 1) / (1 + small)).astype(x.dtype, copy=False)

    @_silent
    def erf(self, x: Array) -> Any:
        return _erf(x).astype(x.dtype, copy=False)

    def isnan(self, x: Array) -> Array:
        return np.asarray(np.isnan(x))

    def logical_not(self, x: Array) -> Array:
        return np.asarray(np.logical_not(x))

    def where(self, condition: Array, a: Any, b: Any) -> Array:
        if type(a) is np.ndarray and type(b) is np.ndarray:
            return np.where(condition, a, b)
        return self._where_a_number(condition, a, b)

    @_silent
    def _where_a_number(self, condition: Array, a: Any, b: Any) -> Any:
        return np.where(condition, *_alike(a, b))

    def sum(self, x: Array, axis: Axes, keepdims: bool = False) -> Array:
        y = x if x.dtype.itemsize >= 4 else wide(x)
        before = _silence()
        try:
            return _array(_ADDED_UP(y, axis, y.dtype, keepdims=keepdims), x.dtype)
        finally:
            _restore(before)

    @_silent
    def max(self, x: Array, axis: Axes, keepdims: bool = False) -> Any:
        return np.max(x, axis=axis, keepdims=keepdims)

    @_silent
    def min(self, x: Array, axis: Axes, keepdims: bool = False) -> Any:
        return np.min(x, axis=axis, keepdims=keepdims)

    @_silent
    def argmax(self, x: Array, axis: int) -> Any:
        return np.argmax(wide(x), axis).astype(np.int32)

    @_silent
    def _descending(self, x: Array) -> Any:
        # Sorting backwards twice leaves equal numbers in the order in which they stand, and puts
        # NaN, which NumPy sorts last, first.
        order = np.argsort(wide(x)[..., ::-1], axis=-1, kind="stable")[..., ::-1]
        return x.shape[-1] - 1 - order

    @_silent
    def _largest(self, x: Array, k: int) -> Any:
        """Return the first k of `_descending`, and sort only elements that may be among them."""
        rows = wide(x).reshape(-1, x.shape[-1])
        least = np.partition(rows, rows.shape[-1] - k, axis=-1)[:, -k]
        index = np.empty((len(rows), k), np.int32)
        for number, row in enumerate(rows):
            candidates = np.isnan(row) if np.isnan(least[number]) else ~(row < least[number])
            places = np.flatnonzero(candidates)
            index[number] = places[self._descending(row[places])[:k]]
        return index.reshape(*x.shape[:-1], k)

    def top_k(self, x: Array, k: int) -> tuple[Array, Array]:
        long_rows = x.shape[-1] > _LONG_ROW and 4 * k <= x.shape[-1]
        places = self._largest(x, k) if long_rows else self._descending(x)[..., :k]
        return np.take_along_axis(x, places, -1), places.astype(np.int32)

    def matmul(self, a: Array, b: Array) -> Array:
        before = _silence()
        try:
            if a.dtype.itemsize >= 4:
                return _array(np.matmul(a, b), a.dtype)
            return _array(np.matmul(wide(a), wide(b)), a.dtype)
        finally:
            _restore(before)

    def take(self, x: Array, indices: Array, axis: int) -> Array:
        axis %= x.ndim
        outside = _outside(indices, x.shape[axis])
        if not outside.any():
            return np.asarray(np.take(x, indices, axis))
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        result = np.full(before + indices.shape + after, missing_value(self.dtype(x)), x.dtype)
        inside = ~outside
        result[(slice(None),) * axis + (inside,)] = np.take(x, indices[inside], axis)
        return result

    def take_along_axis(self, x: Array, indices: Array, axis: int) -> Array:
        axis %= x.ndim
        outside = _outside(indices, x.shape[axis])
        if not outside.any():
            return np.take_along_axis(x, indices, axis)
        if not x.shape[axis]:
            return self._missing_along_axis(x, indices, axis)
        elements = np.take_along_axis(x, np.where(outside, 0, indices), axis)
        return np.where(outside, np.asarray(missing_value(self.dtype(x)), x.dtype), elements)

    def write(self, x: Array, new: Array, positions: Array) -> Array:
        result = x if x.flags.writeable else x.copy()
        batch, token = np.nonzero(~_outside(positions, x.shape[2]))
        result[batch, :, positions[batch, token]] = new[batch, :, token]
        return result


def _outside(indices: Array, size: int) -> Array:
    return np.asarray((indices < 0) | (indices >= size))


_CENTRES = 16
"""Centres of the series of the error function in each unit."""

_ONE_FROM = 6
"""From here on, the error function is 1 in `float64`."""

_BLOCK = 1 << 14
"""Elements of a block, which stay in the cache from one term to the next."""


@cache
def _series() -> Array:
    """Return the Taylor series of the error function around each centre, by Hermite polynomials."""
    centre = np.arange(_ONE_FROM * _CENTRES + 1) / _CENTRES
    before, hermite = np.zeros_like(centre), np.ones_like(centre)
    slope = 2 / math.sqrt(math.pi) * np.exp(-centre * centre)
    rows = [np.array([math.erf(c) for c in centre])]
    for power in range(1, 10):
        rows.append(slope * hermite / math.factorial(power))
        before, hermite = hermite, -2 * centre * hermite - 2 * (power - 1) * before
    return np.stack(rows)


def _erf(x: Array) -> Array:
    """Return the error function: to all digits for `float64`, else to 9 or more."""
    terms = _series() if x.dtype == np.float64 else _series()[:6]
    flat = x.reshape(-1)
    result = np.empty(flat.shape)
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK].astype(np.float64)
        size = np.abs(block)
        nearest = np.rint(np.fmin(size, _ONE_FROM) * _CENTRES).astype(np.intp)
        away = np.minimum(size, _ONE_FROM) - nearest / _CENTRES
        total = terms[-1][nearest]
        for row in terms[-2::-1]:
            total *= away
            total += row[nearest]
        np.copysign(total, block, out=result[start : start + _BLOCK])
    return result.reshape(x.shape)


PRIMITIVES: PrimitivesOf[Array] = NumpyPrimitives()
