"""Ops that change shapes, order and element types, and compute nothing."""

from __future__ import annotations

from collections.abc import Sequence

from anydevice.core.dtypes import DType, as_dtype
from anydevice.ops.dispatch import Array, primitives
from anydevice.ops.numbers import plain_number
from anydevice.ops.shapes import axis_of, same_type, size_of, wrong, wrong_shapes


def reshape(x: Array, shape: int | Sequence[int]) -> Array:
    """The elements in C order in another shape, in which one size may be -1: what is left.

    >>> import numpy
    >>> reshape(numpy.arange(6), (2, -1)).tolist()
    [[0, 1, 2], [3, 4, 5]]
    """
    xp = primitives(x, "reshape")
    if not isinstance(shape, tuple):
        shape = plain_number(shape)
    asked = (shape,) if isinstance(shape, int) else tuple(shape)
    count, known = size_of(x.shape), size_of(asked)
    if asked and min(asked) < 0:
        one_left = min(asked) == -1 and asked.count(-1) == 1 and known != 0
        fits = one_left and count % known == 0
    else:
        fits = known == count
    if not fits:
        raise wrong_shapes("reshape", f"{asked} has as many elements as x", x=x)
    return xp.reshape(x, asked)


def permute(x: Array, axes: Sequence[int]) -> Array:
    """The axes in another order: axis n of the result is axis `axes[n]` of x.

    >>> import numpy
    >>> permute(numpy.ones((2, 3, 4)), (2, 0, 1)).shape
    (4, 2, 3)
    """
    xp = primitives(x, "permute")
    order = tuple(axis_of("permute", x, axis) for axis in axes)
    if sorted(order) != list(range(len(x.shape))):
        raise wrong_shapes("permute", f"{tuple(axes)} names each axis of x once", x=x)
    return xp.permute_dims(x, order)


def concat(arrays: Sequence[Array], axis: int = 0) -> Array:
    """Arrays one behind the other along an axis that they have; elsewhere their sizes are one.

    >>> import numpy
    >>> concat([numpy.ones((2, 1)), numpy.zeros((2, 2))], axis=1).tolist()
    [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    """
    if not len(arrays):
        raise wrong("concat", "there are no arrays; it takes one or more")
    first = arrays[0]
    xp = primitives(first, "concat")
    at = axis_of("concat", first, axis)
    for other in arrays[1:]:
        same_type("concat", first, another=other)
        if (
            len(other.shape) != len(first.shape)
            or other.shape[:at] != first.shape[:at]
            or other.shape[at + 1 :] != first.shape[at + 1 :]
        ):
            rule = f"the arrays have one shape but for axis {axis}"
            raise wrong_shapes("concat", rule, first=first, another=other)
    return xp.concat(arrays, at)


def part(x: Array, axis: int, start: int, stop: int, step: int = 1) -> Array:
    """x[start:stop:step] at an axis, with 0 <= start <= stop <= its size and step >= 1.

    >>> import numpy
    >>> part(numpy.arange(10), 0, 1, 8, 3).tolist()
    [1, 4, 7]
    """
    xp = primitives(x, "part")
    at = axis_of("part", x, axis)
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
    asked = tuple(shape)
    own = tuple(x.shape)
    if len(own) > len(asked) or any(
        size not in (1, wanted) for size, wanted in zip(own[::-1], asked[::-1], strict=False)
    ):
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
