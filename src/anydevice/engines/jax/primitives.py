"""The primitives on JAX, for arrays and for tracers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anydevice.core.dtypes import DType
from anydevice.core.engine import Absent
from anydevice.core.primitives import Primitives, Shape
from anydevice.engines.host import NARROWER, known_dtype, lacking

Axes = int | tuple[int, ...]
_BOOL, _FLOAT32 = np.dtype(bool), np.dtype(np.float32)
_NUMBERS = (bool, int, float)
_NO_64_BITS = Absent(
    "JAX's 64-bit numbers are off",
    instead="call anydevice.configure(x64=True) first, or write x64 = true in anydevice.toml",
    code="no_dtype",
)


def _one_program(function: Callable[..., Any], *static: int) -> Callable[..., Any]:
    """The function as one compiled program, of which the arguments at these places are constants.

    Called on arrays as they are, it starts in less time than the functions of `jax.numpy`, most of
    which are Python around such a program, or several. What is traced takes it in as it is.
    """
    program: Callable[..., Any] = jax.jit(function, static_argnums=static, inline=True)
    return program


_reshape = _one_program(lambda x, shape: jnp.reshape(x, shape), 1)
_transpose = _one_program(lambda x, axes: jnp.transpose(x, axes), 1)
_broadcast = _one_program(lambda x, shape: jnp.broadcast_to(x, shape), 1)
_astype = _one_program(lambda x, kind: x.astype(kind), 1)
_concatenate = _one_program(lambda arrays, axis: jnp.concatenate(arrays, axis), 1)
_part = _one_program(jax.lax.slice_in_dim, 1, 2, 3, 4)
_add = _one_program(lambda a, b: jnp.add(a, b))
_subtract = _one_program(lambda a, b: jnp.subtract(a, b))
_multiply = _one_program(lambda a, b: jnp.multiply(a, b))
_divide = _one_program(lambda a, b: jnp.divide(a, b))
_maximum = _one_program(lambda a, b: jnp.maximum(a, b))
_minimum = _one_program(lambda a, b: jnp.minimum(a, b))
_largest = _one_program(lambda x, axis, keepdims: jnp.max(x, axis, keepdims=keepdims), 1, 2)
_smallest = _one_program(lambda x, axis, keepdims: jnp.min(x, axis, keepdims=keepdims), 1, 2)


@_one_program
def _matmul(a: Any, b: Any) -> Any:
    # XLA adds up the products of 16-bit numbers in float32 and rounds once by itself; asking
    # for a float32 result would make the products of the gradient float32 ones, and slow.
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST if _wide(a) else None)


def _added_up(x: Any, axis: Axes, keepdims: bool = False) -> Any:
    kind = x.dtype
    if kind.itemsize == 2 and jnp.issubdtype(kind, jnp.floating):
        # Left to itself, XLA may add up parts of a long sum in 16 bits.
        return jnp.sum(x.astype(_FLOAT32), axis, keepdims=keepdims).astype(kind)
    # A sum of booleans is a count.
    return jnp.sum(x, axis, dtype=jnp.int32 if kind == _BOOL else kind, keepdims=keepdims)


_sum = _one_program(_added_up, 1, 2)


class JaxPrimitives:
    """Every primitive over `jax.Array`."""

    # Making

    def full(self, shape: Shape, value: float, dtype: DType, like: Any) -> Any:
        return jnp.full(shape, value, _theirs(dtype), device=_device(like))

    def arange(self, stop: int, dtype: DType, like: Any) -> Any:
        return jnp.arange(stop, dtype=_theirs(dtype), device=_device(like))

    def asarray(self, values: Any, like: Any) -> Any:
        _theirs(known_dtype(values.dtype))
        return jnp.array(values, device=_device(like))

    # Types and shapes

    def dtype(self, x: Any) -> DType:
        return known_dtype(x.dtype)

    def astype(self, x: Any, dtype: DType) -> Any:
        kind = _theirs(dtype)
        return x.astype(kind) if x.dtype == kind else _astype(x, kind)

    reshape = staticmethod(_reshape)

    def permute_dims(self, x: Any, axes: Sequence[int]) -> Any:
        return _transpose(x, tuple(axes))

    def broadcast_to(self, x: Any, shape: Shape) -> Any:
        return _broadcast(x, shape)

    def concat(self, arrays: Sequence[Any], axis: int) -> Any:
        return _concatenate(tuple(arrays), axis)

    def part(self, x: Any, axis: int, start: int, stop: int, step: int = 1) -> Any:
        return _part(x, start, stop, step, axis)

    # One array

    def abs(self, x: Any) -> Any:
        return jnp.abs(x)

    def negative(self, x: Any) -> Any:
        return jnp.negative(x)

    def sign(self, x: Any) -> Any:
        return jnp.sign(x)

    def floor(self, x: Any) -> Any:
        return jnp.floor(x)

    def exp(self, x: Any) -> Any:
        return jnp.exp(x)

    def log(self, x: Any) -> Any:
        return jnp.log(x)

    def sqrt(self, x: Any) -> Any:
        return jnp.sqrt(x)

    def rsqrt(self, x: Any) -> Any:
        return jax.lax.rsqrt(x)

    def sin(self, x: Any) -> Any:
        return jnp.sin(x)

    def cos(self, x: Any) -> Any:
        return jnp.cos(x)

    def tanh(self, x: Any) -> Any:
        return jnp.tanh(x)

    def sigmoid(self, x: Any) -> Any:
        return _sigmoid(x)

    def erf(self, x: Any) -> Any:
        return jax.lax.erf(x)

    def isnan(self, x: Any) -> Any:
        return jnp.isnan(x)

    def logical_not(self, x: Any) -> Any:
        return jnp.logical_not(x)

    # Two arrays, or an array and a number

    def add(self, a: Any, b: Any) -> Any:
        return _add(*_pair(a, b))

    def subtract(self, a: Any, b: Any) -> Any:
        return _subtract(*_pair(a, b))

    def multiply(self, a: Any, b: Any) -> Any:
        return _multiply(*_pair(a, b))

    def divide(self, a: Any, b: Any) -> Any:
        return _divide(*_pair(a, b))

    def pow(self, a: Any, b: Any) -> Any:
        return jnp.power(*_pair(a, b))

    def maximum(self, a: Any, b: Any) -> Any:
        return _maximum(*_pair(a, b))

    def minimum(self, a: Any, b: Any) -> Any:
        return _minimum(*_pair(a, b))

    def equal(self, a: Any, b: Any) -> Any:
        return jnp.equal(*_pair(a, b))

    def less(self, a: Any, b: Any) -> Any:
        return jnp.less(*_pair(a, b))

    def less_equal(self, a: Any, b: Any) -> Any:
        return jnp.less_equal(*_pair(a, b))

    def logical_and(self, a: Any, b: Any) -> Any:
        return jnp.logical_and(a, b)

    def logical_or(self, a: Any, b: Any) -> Any:
        return jnp.logical_or(a, b)

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        return jnp.where(condition, *_pair(a, b))

    # Along axes

    sum = staticmethod(_sum)

    def max(self, x: Any, axis: Axes, keepdims: bool = False) -> Any:
        return _largest(x, axis, keepdims)

    def min(self, x: Any, axis: Axes, keepdims: bool = False) -> Any:
        return _smallest(x, axis, keepdims)

    def argmax(self, x: Any, axis: int) -> Any:
        return jax.lax.argmax(x, axis % x.ndim, jnp.int32)

    def top_k(self, x: Any, k: int) -> tuple[Any, Any]:
        if jnp.issubdtype(x.dtype, jnp.floating):
            # XLA's order puts NaN behind all others where its sign is set.
            x = jnp.where(jnp.isnan(x), jnp.nan, x)
        largest, places = jax.lax.top_k(x, k)
        return largest, places.astype(jnp.int32)

    # Products and places

    matmul = staticmethod(_matmul)

    def take(self, x: Any, indices: Any, axis: int) -> Any:
        axis %= x.ndim
        if not x.shape[axis]:
            shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
            return jnp.full_like(x, _nothing(x), shape=shape)
        places = _outside_is_size(indices, x.shape[axis])
        return jnp.take(x, places, axis, mode="fill", fill_value=_nothing(x))

    def take_along_axis(self, x: Any, indices: Any, axis: int) -> Any:
        axis %= x.ndim
        if not x.shape[axis]:
            one = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
            shape = np.broadcast_shapes(one, indices.shape)
            return jnp.full_like(x, _nothing(x), shape=shape)
        places = _outside_is_size(indices, x.shape[axis])
        return jnp.take_along_axis(x, places, axis, mode="fill", fill_value=_nothing(x))

    def write(self, x: Any, new: Any, positions: Any) -> Any:
        traced = any(isinstance(part, jax.core.Tracer) for part in (x, new, positions))
        return (_written if traced else _written_in_place)(x, new, positions)


def _theirs(dtype: DType) -> Any:
    """NumPy's dtype for the row; JAX would narrow 64 bits with no more than a warning."""
    if dtype.name in NARROWER and not jax.config.jax_enable_x64:
        raise _NO_64_BITS.error()
    if dtype.packed and dtype.kind == "float":
        raise lacking("JAX", dtype)  # releases that know it take the whole process down
    return dtype.numpy()


def _device(like: Any) -> Any:
    """The one device of an array; what is traced or on several takes any array beside it."""
    if isinstance(like, jax.core.Tracer):
        return None
    devices = like.devices()
    return next(iter(devices)) if len(devices) == 1 else None


def _pair(a: Any, b: Any) -> tuple[Any, Any]:
    """The operands; a Python number becomes one that does not change the other's dtype."""
    if isinstance(b, _NUMBERS):
        return a, _number(b, a)
    if isinstance(a, _NUMBERS):
        return _number(a, b), b
    return a, b


def _number(value: float, beside: Any) -> Any:
    if jnp.issubdtype(beside.dtype, jnp.inexact):
        return value if type(value) is int else float(value)
    return bool(value) if beside.dtype == _BOOL else int(value)


def _nothing(x: Any) -> float | bool:
    """The value that is read at an index out of range."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return float("nan")
    return False if x.dtype == _BOOL else 0


def _wide(x: Any) -> bool:
    return bool(x.dtype.itemsize > 2)


def _outside_is_size(indices: Any, size: int) -> Any:
    """The indices, with the axis' size for each that is out of range: JAX counts negative ones."""
    if indices.dtype.itemsize < 4:
        indices = indices.astype(jnp.int32)  # so that the size is a number of its dtype
    inside = (indices >= 0) & (indices < size)
    return jnp.where(inside, indices, size).astype(jnp.int32)


def _sigmoid_in_float32(x: Any) -> Any:
    # XLA writes it out as several operations, each of which would round.
    return jax.nn.sigmoid(x if _wide(x) else x.astype(jnp.float32)).astype(x.dtype)


def _rows_written(x: Any, new: Any, positions: Any) -> Any:
    places = _outside_is_size(positions, x.shape[2])
    one = jax.vmap(lambda cache, rows, at: cache.at[:, at].set(rows, mode="drop"))
    return one(x, new, places)


_sigmoid = _one_program(_sigmoid_in_float32)
_written = _one_program(_rows_written)
_written_in_place: Callable[..., Any] = jax.jit(_rows_written, donate_argnums=0)

PRIMITIVES: Primitives = JaxPrimitives()
