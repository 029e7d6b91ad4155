"""Ops that change shapes, order and element types, and compute nothing."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, TypeGuard

from anydevice.core.dtypes import DType, as_dtype
from anydevice.core.primitives import Shape
from anydevice.ops.dispatch import Array, primitives
from anydevice.ops.numbers import in_words
from anydevice.ops.shapes import axis_of, same_type, shape_of, whole_number, wrong, wrong_shapes


def reshape(x: Array, shape: int | Sequence[int]) -> Array:
    """The elements in C order in another shape, in which one size may be -1: what is left.

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
    return xp.reshape(x, shape)


def permute(x: Array, axes: Sequence[int]) -> Array:
    """The axes in another order: axis n of the result is axis `axes[n]` of x.

    >>> import numpy
    >>> permute(numpy.ones((2, 3, 4)), (2, 0, 1)).shape
    (4, 2, 3)
    """
    xp = primitives(x, "permute")
    if type(axes) is not tuple or not _in_order(axes, x.ndim):
        axes = _from_the_front(x, axes)
    return xp.permute_dims(x, axes)


def concat(arrays: Sequence[Array], axis: int = 0) -> Array:
    """Arrays one behind the other along an axis that they have; elsewhere their sizes are one.

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
        alike = type(other) is kind and other.dtype == dtype
        if not alike:
            same_type("concat", first, another=other)
        if other.shape != shape:
            _refuse_unlike(first, other, at)
    return xp.concat(arrays, at)


def part(x: Array, axis: int, start: int, stop: int, step: int = 1) -> Array:
    """x[start:stop:step] at an axis, with 0 <= start <= stop <= its size and step >= 1.

    >>> import numpy
    >>> part(numpy.arange(10), 0, 1, 8, 3).tolist()
    [1, 4, 7]
    """
    xp = primitives(x, "part")
    at = axis_of("part", x, axis)
    if not type(start) is type(stop) is type(step) is int:
        start, stop = whole_number("part", "start", start), whole_number("part", "stop", stop)
        step = whole_number("part", "step", step)
    if not 0 <= start <= stop <= x.shape[at] or step < 1:
        rule = f"{start}:{stop}:{step} is a range of axis {axis}, counted from the front"
        raise wrong_shapes("part", rule, x=x)
    return xp.part(x, at, start, stop, step)


def broadcast_to(x: Array, shape: Sequence[int]) -> Array:
    """The array repeated along new axes at the front and along axes of size 1.

    >>> import numpy
    >>> broadcast_to(numpy.array([1, 2]), (2, 2)).tolist()
    [[1, 2], [1, 2]]
    """
    xp = primitives(x, "broadcast_to")
    own = x.shape
    if _ends_with(shape, own):
        return xp.broadcast_to(x, shape)
    asked = shape_of("broadcast_to", shape)
    pairs = zip(own[::-1], asked[::-1], strict=False)
    fits = all(size == wanted or size == 1 for size, wanted in pairs)
    if len(own) > len(asked) or not fits or (asked and min(asked) < 0):
        raise wrong_shapes("broadcast_to", f"x can be repeated to {asked}", x=x)
    return xp.broadcast_to(x, asked)


def astype(x: Array, dtype: str | DType | object) -> Array:
    """The same numbers as another element type; x itself where it is of that type.

    `dtype` is a name, such as `"bfloat16"`, or any library's own object for a type. Floating
    numbers are rounded to the nearest; as whole numbers they lose what is behind the point.

    >>> import numpy
    >>> astype(numpy.array([1.5, 2.5]), "int32").tolist()
    [1, 2]
    """
    return primitives(x, "astype").astype(x, as_dtype(dtype))


def _in_order(axes: Sequence[int], count: int) -> bool:
    """Whether these are all so many axes, counted from the front, in any order."""
    found = 0
    for axis in axes:
        if type(axis) is not int or not 0 <= axis < count:
            return False
        found |= 1 << axis
    return len(axes) == count and found == (1 << count) - 1


def _from_the_front(x: Array, axes: Sequence[int]) -> tuple[int, ...]:
    """The axes counted from the front; refused where they are not each axis of x once."""
    if not isinstance(axes, (tuple, list)):
        raise wrong("permute", f"axes are a tuple of whole numbers, but here {in_words(axes)}")
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
    """Refuse a shape that x does not have, unless one size in it is -1 and the others fit."""
    rest = -prod(shape)
    one_left = shape.count(-1) == 1 and min(shape) == -1 and rest
    if not one_left or prod(x.shape) % rest:
        raise wrong_shapes("reshape", f"{shape} has as many elements as x", x=x)
