"""Ops that rearrange, convert, read and write elements."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, TypeGuard

from anydevice.core.dtypes import DType, as_dtype
from anydevice.core.primitives import Shape
from anydevice.ops.arguments import (
    INT32,
    axes_of,
    axis_of,
    in_words,
    integer,
    require_integers,
    require_one_dtype,
    shape_of,
    wrong,
    wrong_shapes,
)
from anydevice.ops.dispatch import Array, explain, own_version, primitives, run2, run3

Axes = int | Sequence[int] | None


def reshape(x: Array, shape: int | Sequence[int]) -> Array:
    """The elements in C order in another shape; one size may be -1 and is inferred.

    >>> import numpy
    >>> reshape(numpy.arange(6), (2, -1)).tolist()
    [[0, 1, 2], [3, 4, 5]]
    """
    xp = primitives(x, "reshape")
    if type(shape) is not tuple or (1 in shape and bool in map(type, shape)):
        shape = shape_of("reshape", shape)
    count = prod(shape)
    if type(count) is not int:
        shape = shape_of("reshape", shape)
    if count != prod(x.shape) or (shape and min(shape) < 0):
        _refuse_misfit(x, shape)
    try:
        return xp.reshape(x, shape)
    except Exception as error:
        explain(error, x=x)
        raise


def permute(x: Array, axes: Sequence[int]) -> Array:
    """The axes in another order: axis n of the result is axis `axes[n]` of x.

    >>> import numpy
    >>> permute(numpy.ones((2, 3, 4)), (2, 0, 1)).shape
    (4, 2, 3)
    """
    xp = primitives(x, "permute")
    if type(axes) is not tuple or not _in_order(axes, x.ndim):
        axes = _from_the_front(x, axes)
    try:
        return xp.permute_dims(x, axes)
    except Exception as error:
        explain(error, x=x)
        raise


def concat(arrays: Sequence[Array], axis: int = 0) -> Array:
    """Concatenate arrays along an existing axis; all other sizes must be equal.

    >>> import numpy
    >>> concat([numpy.ones((2, 1)), numpy.zeros((2, 2))], axis=1).tolist()
    [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    """
    if not isinstance(arrays, (tuple, list)):
        rule = f"it takes a list of arrays, but here is {in_words(arrays)}"
        raise wrong("concat", f"{rule}; write concat([x, y])")
    if not arrays:
        raise wrong("concat", "there are no arrays; it takes one or more")
    first = arrays[0]
    xp = primitives(first, "concat")
    kind, dtype, shape = type(first), first.dtype, first.shape
    at = axis if type(axis) is int and 0 <= axis < len(shape) else axis_of("concat", first, axis)
    for other in arrays[1:]:
        if type(other) is not kind or other.dtype != dtype:
            require_one_dtype("concat", first=first, another=other)
        if other.shape != shape:
            _refuse_unlike(first, other, at)
    try:
        return xp.concat(arrays, at)
    except Exception as error:
        explain(error, arrays=arrays)
        raise


def part(x: Array, axis: int, start: int, stop: int, step: int = 1) -> Array:
    """x[start:stop:step] at an axis, with 0 <= start <= stop <= its size and step >= 1.

    >>> import numpy
    >>> part(numpy.arange(10), 0, 1, 8, 3).tolist()
    [1, 4, 7]
    """
    xp = primitives(x, "part")
    at = axis_of("part", x, axis)
    if not type(start) is type(stop) is type(step) is int:
        start, stop = integer("part", "start", start), integer("part", "stop", stop)
        step = integer("part", "step", step)
    if not 0 <= start <= stop <= x.shape[at] or step < 1:
        rule = f"{start}:{stop}:{step} is a range of axis {axis}, counted from the front"
        raise wrong_shapes("part", rule, x=x)
    try:
        return xp.part(x, at, start, stop, step)
    except Exception as error:
        explain(error, x=x)
        raise


def broadcast_to(x: Array, shape: Sequence[int]) -> Array:
    """The array repeated along new axes at the front and along axes of size 1.

    >>> import numpy
    >>> broadcast_to(numpy.array([1, 2]), (2, 2)).tolist()
    [[1, 2], [1, 2]]
    """
    xp = primitives(x, "broadcast_to")
    own = x.shape
    if not _ends_with(shape, own):
        shape = shape_of("broadcast_to", shape)
        pairs = zip(own[::-1], shape[::-1], strict=False)
        fits = all(size == wanted or size == 1 for size, wanted in pairs)
        if len(own) > len(shape) or not fits or (shape and min(shape) < 0):
            raise wrong_shapes("broadcast_to", f"x can be repeated to {shape}", x=x)
    try:
        return xp.broadcast_to(x, shape)
    except Exception as error:
        explain(error, x=x)
        raise


def flip(x: Array, axis: Axes = None) -> Array:
    """The elements in reverse order along one or several axes, or along all.

    >>> import numpy
    >>> flip(numpy.array([[1, 2], [3, 4]]), axis=1).tolist()
    [[2, 1], [4, 3]]
    """
    own = own_version(x, "flip", _flip)
    return run2(own, _flip, x, axes_of("flip", x, axis))


def astype(x: Array, dtype: str | DType | object) -> Array:
    """The same numbers in another dtype; x itself if it has that dtype.

    `dtype` is a name, such as `"bfloat16"`, or any library's own dtype. Floating-point numbers are
    rounded to the nearest; conversion to integers truncates.

    >>> import numpy
    >>> astype(numpy.array([1.5, 2.5]), "int32").tolist()
    [1, 2]
    """
    xp, wanted = primitives(x, "astype"), as_dtype(dtype)
    try:
        return xp.astype(x, wanted)
    except Exception as error:
        explain(error, x=x)
        raise


def embedding(weight: Array, ids: Array) -> Array:
    """The row of `weight` for each id: weight (rows, size), ids of any shape, result (…, size).

    An id that is negative or too large gives a row of NaN.

    >>> import numpy
    >>> embedding(numpy.array([[1.0, 2.0], [3.0, 4.0]]), numpy.array([[1, 0], [0, 7]])).tolist()
    [[[3.0, 4.0], [1.0, 2.0]], [[1.0, 2.0], [nan, nan]]]
    """
    own = own_version(weight, "embedding", _embedding)
    require_integers("embedding", "ids", ids, weight, "weight")
    if len(weight.shape) != 2:
        raise wrong_shapes("embedding", "weight is (rows, size)", weight=weight)
    return run2(own, _embedding, weight, ids)


def take(x: Array, indices: Array, axis: int = 0) -> Array:
    """The slices of x at these indices; the axis is replaced by the shape of `indices`.

    An index that is negative or too large gives NaN, or 0 if x is not floating-point.

    >>> import numpy
    >>> take(numpy.array([5, 6, 7]), numpy.array([2, 0, 3])).tolist()
    [7, 5, 0]
    """
    xp = primitives(x, "take")
    require_integers("take", "indices", indices, x)
    at = axis_of("take", x, axis)
    try:
        return xp.take(x, indices, at)
    except Exception as error:
        explain(error, x=x, indices=indices)
        raise


def cache_write(cache: Array, new: Array, positions: Array) -> Array:
    """The cache with new rows in it; `cache` itself must not be used afterwards.

    cache is (batch, heads, keys, size), new (batch, heads, tokens, size); positions, (tokens,) or
    (batch, tokens), says which key each token is. Positions outside of the cache are left out.

    >>> import numpy
    >>> cache = numpy.zeros((1, 1, 4, 1))
    >>> cache_write(cache, numpy.array([[[[5.0], [6.0]]]]), numpy.array([2, 9])).ravel().tolist()
    [0.0, 0.0, 5.0, 0.0]
    """
    own = own_version(cache, "cache_write", _cache_write)
    require_one_dtype("cache_write", cache=cache, new=new)
    require_integers("cache_write", "positions", positions, cache, "cache")
    kept, given = tuple(cache.shape), tuple(new.shape)
    if len(kept) != 4 or len(given) != 4 or kept[:2] != given[:2] or kept[3] != given[3]:
        rule = "cache is (batch, heads, keys, size) and new (batch, heads, tokens, size)"
        raise wrong_shapes("cache_write", rule, cache=cache, new=new)
    if tuple(positions.shape) not in ((given[2],), (given[0], given[2])):
        rule = "positions is (tokens,) or (batch, tokens)"
        raise wrong_shapes("cache_write", rule, new=new, positions=positions)
    return run3(own, _cache_write, cache, new, positions)


def _in_order(axes: Sequence[int], count: int) -> bool:
    """Whether these are all `count` axes, counted from the front, in any order."""
    found = 0
    for axis in axes:
        if type(axis) is not int or not 0 <= axis < count:
            return False
        found |= 1 << axis
    return len(axes) == count and found == (1 << count) - 1


def _from_the_front(x: Array, axes: Sequence[int]) -> tuple[int, ...]:
    """The axes counted from the front; raises an error unless they are each axis of x once."""
    if not isinstance(axes, (tuple, list)):
        raise wrong("permute", f"axes are a tuple of integers, but here {in_words(axes)}")
    order = tuple([axis_of("permute", x, axis) for axis in axes])
    if not len(order) == len(set(order)) == x.ndim:
        raise wrong_shapes("permute", f"{tuple(axes)} names each axis of x once", x=x)
    return order


def _ends_with(shape: Any, own: Shape) -> TypeGuard[Shape]:
    """Whether a shape is plain numbers that end with all those of another."""
    if type(shape) is not tuple or len(shape) < len(own):
        return False
    for size in shape:
        if type(size) is not int or size < 0:
            return False
    return not own or shape[-len(own) :] == own


def _refuse_unlike(first: Array, other: Array, at: int) -> None:
    own, its = tuple(first.shape), tuple(other.shape)
    if own[:at] != its[:at] or own[at + 1 :] != its[at + 1 :] or len(own) != len(its):
        rule = f"the arrays have one shape but for axis {at}"
        raise wrong_shapes("concat", rule, first=first, another=other)


def _refuse_misfit(x: Array, shape: Shape) -> None:
    """Raise an error unless x fits the shape with one size of -1 inferred."""
    rest = -prod(shape)
    one_left = shape.count(-1) == 1 and min(shape) == -1 and rest
    if not one_left or prod(x.shape) % rest:
        raise wrong_shapes("reshape", f"{shape} has as many elements as x", x=x)


def _flip(x: Array, axes: tuple[int, ...]) -> Array:
    xp = primitives(x)
    for axis in axes:
        size = x.shape[axis]
        x = xp.take(x, xp.subtract(size - 1, xp.arange(size, INT32, x)), axis)
    return x


def _embedding(weight: Array, ids: Array) -> Array:
    return primitives(weight).take(weight, ids, 0)


def _cache_write(cache: Array, new: Array, positions: Array) -> Array:
    xp = primitives(cache)
    batch, _, tokens, _ = new.shape
    return xp.write(cache, new, xp.broadcast_to(positions, (batch, tokens)))
