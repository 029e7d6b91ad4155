"""The primitives on JAX, for arrays and for tracers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from anydevice._core.dtypes import DType
from anydevice._core.primitives import Primitives, Shape
from anydevice._engines.host import NARROWER, known_dtype, lacking
from anydevice._engines.jax.arrays import NO_64_BITS
from anydevice._engines.primitives import Axes, BasePrimitives, functions_of, missing_value

_BOOL, _FLOAT32 = np.dtype(bool), np.dtype(np.float32)
_NUMBERS = (bool, int, float)


def _one_program(function: Callable[..., Array], static: Sequence[int] = ()) -> Callable[..., Any]:
    """Compile as one program, which starts faster than `jax.numpy`; `static` are constants."""
    return jax.jit(function, static_argnums=tuple(static), inline=True)


def _two(function: Callable[[Array, Array], Array]) -> Callable[..., Any]:
    """Return the primitive of two arrays, or of an array and a number."""
    return lambda a, b: function(*_pair(a, b))


_transpose = _one_program(lambda x, axes: jnp.transpose(x, axes), [1])
_astype = _one_program(lambda x, kind: x.astype(kind), [1])
_concatenate = _one_program(lambda arrays, axis: jnp.concatenate(arrays, axis), [1])
_slice_axis = _one_program(jax.lax.slice_in_dim, [1, 2, 3, 4])


@_one_program
def _matmul(a: Array, b: Array) -> Array:
    # XLA sums products of 16-bit numbers in float32 and rounds once by itself; asking for a float32
    # result would make the products of the gradient float32, and slow.
    if _wide(a):
        return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    if min(a.ndim, b.ndim) < 2 or 1 in (a.shape[-2], b.shape[-1]):
        # For vectors on GPUs, XLA multiplies and adds in the result's dtype.
        return jnp.matmul(a, b, preferred_element_type=_FLOAT32).astype(a.dtype)
    return jnp.matmul(a, b)


@_one_program
def _sigmoid(x: Array) -> Array:
    # XLA compiles it to several operations, each of which would round.
    return jax.nn.sigmoid(x if _wide(x) else x.astype(jnp.float32)).astype(x.dtype)


@partial(_one_program, static=(1, 2))
def _sum(x: Array, axis: Axes, keepdims: bool = False) -> Array:
    kind = x.dtype
    if kind.itemsize == 2 and jnp.issubdtype(kind, jnp.floating):
        # Left to itself, XLA may add up parts of a long sum in 16 bits.
        return jnp.sum(x.astype(_FLOAT32), axis, keepdims=keepdims).astype(kind)
    # A sum of booleans is a count.
    return jnp.sum(x, axis, dtype=jnp.int32 if kind == _BOOL else kind, keepdims=keepdims)


_PASSED_OVER = 1024
"""Elements of a row from which on XLA passes NaN over."""


def _extreme(function: Callable[..., Array]) -> Callable[..., Any]:
    """Compile `jnp.max` or `jnp.min`, with NaN, which XLA on a CPU passes over in long rows."""

    def run(x: Array, axis: Axes, keepdims: bool = False) -> Array:
        result = function(x, axis, keepdims=keepdims)
        if x.size < _PASSED_OVER * result.size or not jnp.issubdtype(x.dtype, jnp.floating):
            return result
        return jnp.where(jnp.isnan(x).any(axis, keepdims=keepdims), jnp.nan, result)

    return _one_program(run, [1, 2])


class JaxPrimitives(
    BasePrimitives[Array],
    one=functions_of(jnp),
    two=functions_of(jnp, lambda function: _two(_one_program(lambda a, b: function(a, b)))),
):
    def full(self, shape: Shape, value: float, dtype: DType, like: Array) -> Array:
        return jnp.full(shape, value, _theirs(dtype), device=_device(like))

    def arange(self, stop: int, dtype: DType, like: Array) -> Array:
        return jnp.arange(stop, dtype=_theirs(dtype), device=_device(like))

    def asarray(self, values: Any, like: Array) -> Array:
        _theirs(known_dtype(values.dtype))
        return jnp.array(values, device=_device(like))

    def astype(self, x: Array, dtype: DType) -> Array:
        kind = _theirs(dtype)
        return x.astype(kind) if x.dtype == kind else _astype(x, kind)

    reshape = staticmethod(_one_program(lambda x, shape: jnp.reshape(x, shape), [1]))
    broadcast_to = staticmethod(_one_program(lambda x, shape: jnp.broadcast_to(x, shape), [1]))

    def permute_dims(self, x: Array, axes: Sequence[int]) -> Array:
        return _transpose(x, tuple(axes))

    def concat(self, arrays: Sequence[Array], axis: int) -> Array:
        return _concatenate(tuple(arrays), axis)

    def slice_axis(self, x: Array, axis: int, start: int, stop: int, step: int = 1) -> Array:
        return _slice_axis(x, start, stop, step, axis)

    rsqrt = staticmethod(jax.lax.rsqrt)
    sigmoid = staticmethod(_sigmoid)
    erf = staticmethod(jax.lax.erf)
    pow = staticmethod(_two(jnp.power))  # not compiled: it reads an integer exponent

    def where(self, condition: Array, a: Array, b: Array) -> Array:
        return jnp.where(condition, *_pair(a, b))

    sum = staticmethod(_sum)
    max = staticmethod(_extreme(jnp.max))
    min = staticmethod(_extreme(jnp.min))

    def argmax(self, x: Array, axis: int) -> Array:
        return jax.lax.argmax(x, axis % x.ndim, jnp.int32)

    def top_k(self, x: Array, k: int) -> tuple[Array, Array]:
        if jnp.issubdtype(x.dtype, jnp.floating):
            # XLA's order puts NaN behind all others where its sign is set.
            x = jnp.where(jnp.isnan(x), jnp.nan, x)
        largest, places = jax.lax.top_k(x, k)
        return largest, places.astype(jnp.int32)

    matmul = staticmethod(_matmul)

    def take(self, x: Array, indices: Array, axis: int) -> Array:
        axis %= x.ndim
        nothing = missing_value(self.dtype(x))
        if not x.shape[axis]:
            shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
            return jnp.full_like(x, nothing, shape=shape)
        positions = _outside_is_size(indices, x.shape[axis])
        return jnp.take(x, positions, axis, mode="fill", fill_value=nothing)

    def take_along_axis(self, x: Array, indices: Array, axis: int) -> Array:
        axis %= x.ndim
        if not x.shape[axis]:
            return self._missing_along_axis(x, indices, axis)
        positions, nothing = _outside_is_size(indices, x.shape[axis]), missing_value(self.dtype(x))
        return jnp.take_along_axis(x, positions, axis, mode="fill", fill_value=nothing)

    def write(self, x: Array, new: Array, positions: Array) -> Array:
        traced = any(isinstance(part, jax.core.Tracer) for part in (x, new, positions))
        return (_write if traced else _written_in_place)(x, new, positions)


def _theirs(dtype: DType) -> Any:
    """Return NumPy's dtype for the row; JAX itself would narrow 64 bits with a mere warning."""
    if dtype.name in NARROWER and not jax.config.jax_enable_x64:
        raise NO_64_BITS.error()
    if dtype.packed and dtype.kind == "float":
        raise lacking("JAX", dtype)  # releases that know it take the whole process down
    return dtype.numpy()


def _device(like: Array) -> Any:
    """Return the device of an array; `None` if it is traced or on several devices."""
    if isinstance(like, jax.core.Tracer):
        return None
    devices = like.devices()
    return next(iter(devices)) if len(devices) == 1 else None


def _pair(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the operands; a Python number keeps the other operand's dtype."""
    if isinstance(b, _NUMBERS):
        return a, _number(b, a)
    if isinstance(a, _NUMBERS):
        return _number(a, b), b
    return a, b


def _number(value: float, beside: Any) -> Any:
    if jnp.issubdtype(beside.dtype, jnp.inexact):
        return value if type(value) is int else float(value)
    return bool(value) if beside.dtype == _BOOL else int(value)


def _wide(x: Array) -> bool:
    return bool(x.dtype.itemsize > 2)


def _outside_is_size(indices: Array, size: int) -> Array:
    """Return the indices, with `size` for those out of range: JAX counts negative ones."""
    if indices.dtype.itemsize < 4:
        indices = indices.astype(jnp.int32)  # so that the size is a number of its dtype
    inside = (indices >= 0) & (indices < size)
    return jnp.where(inside, indices, size).astype(jnp.int32)


def _rows_written(x: Array, new: Array, positions: Array) -> Array:
    places = _outside_is_size(positions, x.shape[2])
    one = jax.vmap(lambda cache, rows, at: cache.at[:, at].set(rows, mode="drop"))
    return one(x, new, places)


_write = _one_program(_rows_written)
_written_in_place: Callable[..., Any] = jax.jit(_rows_written, donate_argnums=0)

PRIMITIVES: Primitives = JaxPrimitives()
