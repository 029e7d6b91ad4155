"""Reductions: sums, means, the largest and smallest elements and their indices."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from anydevice.core.primitives import Primitives
from anydevice.ops.arguments import (
    INT32,
    axes_of,
    axis_of,
    in_words,
    integer,
    is_finite,
    python_number,
    wide,
    wrong,
    wrong_shapes,
)
from anydevice.ops.dispatch import (
    Array,
    explain,
    known_float,
    own_version,
    primitives,
    run,
    run2,
    run3,
)

Axes = int | Sequence[int] | None


def sum(x: Array, axis: Axes = None, keepdims: bool = False) -> Array:  # noqa: A001  as everywhere
    """The sums along one or several axes, or over all; of the dtype of x.

    16-bit numbers are added up in float32, and booleans are counted as int32.
    `keepdims` leaves each axis that is summed over with the size 1.

    >>> import numpy
    >>> sum(numpy.ones((2, 3)), axis=1).tolist(), sum(numpy.ones((2, 3))).tolist()
    ([3.0, 3.0], 6.0)
    """
    xp = known_float(x)
    if xp is None:
        xp = primitives(x, "sum")
        if xp.dtype(x).kind == "bool":
            x = run2(xp.astype, xp.astype, x, INT32)
    axes: int | tuple[int, ...]
    if type(axis) is int:
        axes = axis_of("sum", x, axis)
    else:
        axes = axes_of("sum", x, axis)
        if not axes:
            return x
    try:
        return xp.sum(x, axes, keepdims)
    except Exception as error:
        explain(error, x=x)
        raise


def mean(x: Array, axis: Axes = None, keepdims: bool = False) -> Array:
    """The means along one or several axes, or over all.

    Of the dtype of x for floating-point arrays, computed in float32 for those of 16 bits; float32
    for integers. The mean of nothing is NaN.

    >>> import numpy
    >>> mean(numpy.array([[1.0, 2.0], [3.0, 6.0]]), axis=-1).tolist()
    [1.5, 4.5]
    """
    own = own_version(x, "mean", _mean)
    axes = (axis_of("mean", x, axis),) if type(axis) is int else axes_of("mean", x, axis)
    return run3(own, _mean, x, axes, keepdims)


def var(x: Array, axis: Axes = None, keepdims: bool = False, correction: float = 0.0) -> Array:
    """The variances along one or several axes, or over all; dtypes as in `mean`.

    The sum of the squares of n differences from the mean is divided by n - `correction`: 1 gives
    the unbiased estimate from a sample. Where nothing is left to divide by, the result is NaN, or
    infinite.

    >>> import numpy
    >>> var(numpy.array([[1.0, 3.0], [2.0, 6.0]]), axis=1).tolist()
    [1.0, 4.0]
    """
    own = own_version(x, "var", _var)
    correction = _correction("var", correction)
    return run(own, _var, x, axes_of("var", x, axis), keepdims, correction)


def std(x: Array, axis: Axes = None, keepdims: bool = False, correction: float = 0.0) -> Array:
    """The standard deviations along one or several axes, or over all: the roots of `var`.

    >>> import numpy
    >>> std(numpy.array([[1.0, 3.0], [2.0, 6.0]]), axis=1, correction=0).tolist()
    [1.0, 2.0]
    """
    own = own_version(x, "std", _std)
    correction = _correction("std", correction)
    return run(own, _std, x, axes_of("std", x, axis), keepdims, correction)


def max(x: Array, axis: Axes = None, keepdims: bool = False) -> Array:  # noqa: A001  as everywhere
    """The largest along one or several axes, or of all; NaN propagates.

    Raises `ConfigurationError` if an axis has no elements.

    >>> import numpy
    >>> max(numpy.array([[1.0, 2.0], [3.0, 6.0]]), axis=0).tolist()
    [3.0, 6.0]
    """
    xp = primitives(x, "max")
    axes: int | tuple[int, ...]
    if type(axis) is int:
        axes = _filled_axis("max", x, axis)
    else:
        axes = _filled("max", x, axis)
        if not axes:
            return x
    try:
        return xp.max(x, axes, keepdims)
    except Exception as error:
        explain(error, x=x)
        raise


def min(x: Array, axis: Axes = None, keepdims: bool = False) -> Array:  # noqa: A001  as everywhere
    """The smallest along one or several axes, or of all; NaN propagates.

    Raises `ConfigurationError` if an axis has no elements.

    >>> import numpy
    >>> min(numpy.array([[1.0, 2.0], [3.0, 6.0]]), axis=0).tolist()
    [1.0, 2.0]
    """
    xp = primitives(x, "min")
    axes: int | tuple[int, ...]
    if type(axis) is int:
        axes = _filled_axis("min", x, axis)
    else:
        axes = _filled("min", x, axis)
        if not axes:
            return x
    try:
        return xp.min(x, axes, keepdims)
    except Exception as error:
        explain(error, x=x)
        raise


def argmax(x: Array, axis: int = -1) -> Array:
    """The index of the largest along an axis, the first of equal ones, as int32 without that axis.

    NaN counts as the largest.

    >>> import numpy
    >>> argmax(numpy.array([[1.0, 2.0, 2.0], [3.0, 0.0, numpy.nan]])).tolist()
    [1, 2]
    """
    own = own_version(x, "argmax", _argmax)
    at = _filled_axis("argmax", x, axis)
    return run2(own, _argmax, x, at)


def top_k(x: Array, k: int) -> tuple[Array, Array]:
    """The k largest along the last axis, largest first, and their indices as int32.

    Both have the shape of x with k in place of the last axis. NaN counts as the largest.

    >>> import numpy
    >>> values, places = top_k(numpy.array([3.0, 1.0, 4.0, 1.5]), 2)
    >>> values.tolist(), places.tolist()
    ([4.0, 3.0], [2, 0])
    """
    own = own_version(x, "top_k", _top_k)
    last = axis_of("top_k", x, -1)
    k = integer("top_k", "k", k)
    if not 1 <= k <= x.shape[last]:
        raise wrong_shapes("top_k", f"k, which is {k}, is from 1 to the size of the last axis", x=x)
    return run2(own, _top_k, x, k)


def _filled_axis(op: str, x: Array, axis: int) -> int:
    """The axis counted from the front, where it has elements."""
    shape = x.shape
    at = axis + len(shape) if type(axis) is int and axis < 0 else axis
    if type(at) is not int or not 0 <= at < len(shape) or shape[at] == 0:
        at = axis_of(op, x, axis)
        _filled(op, x, axis)
    return at


def _filled(op: str, x: Array, axis: Axes) -> tuple[int, ...]:
    axes = axes_of(op, x, axis)
    if any(x.shape[one] == 0 for one in axes):
        which = "x" if axis is None else f"axis {axis}"
        raise wrong_shapes(op, f"{which} has elements", x=x)
    return axes


def _mean(x: Array, axes: tuple[int, ...], keepdims: bool) -> Array:
    xp = primitives(x)
    dtype = xp.dtype(x)
    if dtype.kind == "complex":
        raise wrong("mean", f"there is none for {dtype}; take the real and imaginary parts")
    total = xp.astype(x, wide(dtype))
    if axes:
        total = xp.sum(total, axes, keepdims)
        total = xp.divide(total, float(prod(tuple(x.shape[one] for one in axes))))
    return xp.astype(total, dtype) if dtype.kind == "float" else total


def _var(x: Array, axes: tuple[int, ...], keepdims: bool, correction: float) -> Array:
    xp = primitives(x)
    dtype = xp.dtype(x)
    found = _squared_spread(xp, "var", x, axes, keepdims, correction)
    return xp.astype(found, dtype) if dtype.kind == "float" else found


def _std(x: Array, axes: tuple[int, ...], keepdims: bool, correction: float) -> Array:
    xp = primitives(x)
    dtype = xp.dtype(x)
    found = xp.sqrt(_squared_spread(xp, "std", x, axes, keepdims, correction))
    return xp.astype(found, dtype) if dtype.kind == "float" else found


def _squared_spread(
    xp: Primitives, op: str, x: Array, axes: tuple[int, ...], keepdims: bool, correction: float
) -> Array:
    """The variance, in the dtype in which it is computed."""
    dtype = xp.dtype(x)
    if dtype.kind == "complex":
        raise wrong(op, f"there is none for {dtype}; take the real and imaginary parts")
    y, count = xp.astype(x, wide(dtype)), float(prod([x.shape[one] for one in axes]))
    off = xp.subtract(y, xp.divide(xp.sum(y, axes, True), count) if axes else y)
    squares = xp.multiply(off, off)
    total = xp.sum(squares, axes, keepdims) if axes else squares
    return xp.divide(total, count - correction if count > correction else 0.0)


def _correction(op: str, correction: float) -> float:
    number = python_number(correction)
    if not is_finite(number):
        raise wrong(op, f"correction is a finite number, but it is {in_words(number)}")
    return float(number)


def _argmax(x: Array, axis: int) -> Array:
    return primitives(x).argmax(x, axis)


def _top_k(x: Array, k: int) -> tuple[Array, Array]:
    return primitives(x).top_k(x, k)
