"""Along axes: sums, means, extremes, their indices and order, softmax and norms."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from anydevice._core.array import Array, ArrayT
from anydevice._core.engine import Absent
from anydevice._core.primitives import PrimitivesOf
from anydevice._machine.engines.registry import owner_of
from anydevice._ops.arguments import (
    INT32,
    axes_of,
    axis_of,
    in_words,
    integer,
    is_finite,
    python_number,
    require_one_dtype,
    require_one_library,
    wide,
    widened,
    wrong,
    wrong_shapes,
)
from anydevice._ops.dispatch import (
    compiled,
    float_primitives,
    float_version,
    known_bool,
    known_float,
    own_version,
    primitives,
    run,
    run2,
    run3,
    run_primitive,
    version_for_dtype,
    version_for_mixed_dtypes,
)
from anydevice._ops.elementwise import document, floor_divide, remainder
from anydevice._ops.manipulation import concat, flip, padded, reshape, slice_axis, take

Axes = int | Sequence[int] | None


def sum(x: ArrayT, axis: Axes = None, keepdims: bool = False) -> ArrayT:  # noqa: A001  as everywhere
    """Return the sum along one or several axes, or over the whole array, in the dtype of x.

    16-bit numbers are added up in float32, and booleans are counted as int32.
    `keepdims` leaves each axis that is summed over with the size 1.

    >>> sum(numpy.ones((2, 3)), axis=1).tolist(), sum(numpy.ones((2, 3))).tolist()
    ([3.0, 3.0], 6.0)
    """
    xp = known_float(x)
    if xp is None:
        xp, x = primitives(x, "sum"), _numbers(x)
    axes = axis_of("sum", x, axis) if type(axis) is int else axes_of("sum", x, axis)
    return x if axes == () else run_primitive(xp.sum, x, axes, keepdims)


def prod(x: ArrayT, axis: Axes = None, keepdims: bool = False) -> ArrayT:
    """Return the product along one or several axes, or over the whole array; dtypes as in `sum`.

    The product of no elements is 1.

    >>> prod(numpy.array([[1, 2], [3, 4]]), axis=1).tolist()
    [2, 12]
    """
    own = own_version(x, "prod", _prod)
    axes = axes_of("prod", x, axis)
    x = _numbers(x)
    return run3(own, _prod, x, axes, keepdims) if axes else x


def vector_norm(
    x: ArrayT,
    axis: Axes = None,
    keepdims: bool = False,
    ord: float = 2,  # noqa: A002  as in the array API standard
) -> ArrayT:
    """Return the norm along one or several axes, or over all: `sum(abs(x) ** ord) ** (1 / ord)`.

    Of the dtype of x, computed in float32 for 16-bit numbers. With `ord` infinity it is the largest
    magnitude, with minus infinity the smallest, and with 0 the number of elements that are not 0.
    Where the 2-norm is 0, so is its gradient.

    >>> x = numpy.array([[3.0, -4.0], [0.0, 0.0]])
    >>> vector_norm(x, axis=1).tolist(), vector_norm(x, ord=numpy.inf).tolist()
    ([5.0, 0.0], 4.0)
    """
    own = float_version(x, "vector_norm", _vector_norm)
    power = python_number(ord)
    if type(power) not in (int, float) or power != power:
        raise wrong("vector_norm", f"ord must be a number, not {in_words(power)}")
    axes = axes_of("vector_norm", x, axis)
    if builtins.abs(power) == math.inf:
        _nonempty_axes("vector_norm", x, axis)
    return run(own, _vector_norm, x, axes, keepdims, float(power))


def cumulative_prod(x: ArrayT, axis: int = -1, include_initial: bool = False) -> ArrayT:
    """Return the running products along an axis, with `include_initial` from 1 on, as `prod`.

    >>> cumulative_prod(numpy.array([1, 2, 3, 4])).tolist()
    [1, 2, 6, 24]
    """
    own = own_version(x, "cumulative_prod", _cumulative_prod)
    at = axis_of("cumulative_prod", x, axis)
    products = run2(own, _cumulative_prod, _numbers(x), at)
    return padded(primitives(products), products, at, 1, 0, 1) if include_initial else products


def cumulative_sum(x: ArrayT, axis: int = -1, include_initial: bool = False) -> ArrayT:
    """Return the running sums along an axis; dtypes as in `sum`.

    With `include_initial` they start with 0.

    >>> cumulative_sum(numpy.array([1, 2, 3])).tolist()
    [1, 3, 6]
    >>> cumulative_sum(numpy.array([1, 2, 3]), include_initial=True).tolist()
    [0, 1, 3, 6]
    """
    own = own_version(x, "cumulative_sum", _cumulative_sum)
    at = axis_of("cumulative_sum", x, axis)
    sums = run2(own, _cumulative_sum, _numbers(x), at)
    return padded(primitives(sums), sums, at, 1, 0) if include_initial else sums


def var(x: ArrayT, axis: Axes = None, keepdims: bool = False, correction: float = 0.0) -> ArrayT:
    """Return the variance along one or several axes, or over the whole array; dtypes as in `mean`.

    The sum of the squares of n differences from the mean is divided by n - `correction`: 1 gives
    the unbiased estimate from a sample. Where nothing is left to divide by, the result is NaN, or
    infinite.

    >>> var(numpy.array([[1.0, 3.0], [2.0, 6.0]]), axis=1).tolist()
    [1.0, 4.0]
    """
    own = own_version(x, "var", _var)
    correction = _correction("var", correction)
    return run(own, _var, x, axes_of("var", x, axis), keepdims, correction)


def std(x: ArrayT, axis: Axes = None, keepdims: bool = False, correction: float = 0.0) -> ArrayT:
    """Return the standard deviation along one or several axes, or over all: the root of `var`.

    >>> std(numpy.array([[1.0, 3.0], [2.0, 6.0]]), axis=1, correction=0).tolist()
    [1.0, 2.0]
    """
    own = own_version(x, "std", _std)
    correction = _correction("std", correction)
    return run(own, _std, x, axes_of("std", x, axis), keepdims, correction)


def max(x: ArrayT, axis: Axes = None, keepdims: bool = False) -> ArrayT:  # noqa: A001  as everywhere
    """Return the largest element along one or several axes, or of the whole array; NaN propagates.

    Raises `ConfigurationError` if an axis has no elements.

    >>> max(numpy.array([[1.0, 2.0], [3.0, 6.0]]), axis=0).tolist()
    [3.0, 6.0]
    """
    xp = primitives(x, "max")
    axes = _filled_axis("max", x, axis) if type(axis) is int else _nonempty_axes("max", x, axis)
    return x if axes == () else run_primitive(xp.max, x, axes, keepdims)


def min(x: ArrayT, axis: Axes = None, keepdims: bool = False) -> ArrayT:  # noqa: A001  as everywhere
    """Return the smallest element along one or several axes, or of the whole array; NaN propagates.

    Raises `ConfigurationError` if an axis has no elements.

    >>> min(numpy.array([[1.0, 2.0], [3.0, 6.0]]), axis=0).tolist()
    [1.0, 2.0]
    """
    xp = primitives(x, "min")
    axes = _filled_axis("min", x, axis) if type(axis) is int else _nonempty_axes("min", x, axis)
    return x if axes == () else run_primitive(xp.min, x, axes, keepdims)


def argmax(x: ArrayT, axis: int = -1) -> ArrayT:
    """Return the index of the largest element along an axis, as int32; the axis is removed.

    Of equal elements it is the first. NaN counts as the largest.

    >>> argmax(numpy.array([[1.0, 2.0, 2.0], [3.0, 0.0, numpy.nan]])).tolist()
    [1, 2]
    """
    own = own_version(x, "argmax", _argmax)
    return run2(own, _argmax, x, _filled_axis("argmax", x, axis))


def argmin(x: ArrayT, axis: int = -1) -> ArrayT:
    """Return the index of the smallest element along an axis, as int32; the axis is removed.

    Of equal elements it is the first. NaN counts as the smallest.

    >>> argmin(numpy.array([[3.0, 2.0, 2.0], [3.0, 0.0, numpy.nan]])).tolist()
    [1, 2]
    """
    own = own_version(x, "argmin", _argmin)
    return run2(own, _argmin, x, _filled_axis("argmin", x, axis))


def sort(x: ArrayT, axis: int = -1, descending: bool = False) -> ArrayT:
    """Sort the elements along an axis: the smallest first, or with `descending` the largest.

    NaN counts as the largest. Equal elements stay in their order: the sort is stable.

    >>> sort(numpy.array([3.0, numpy.nan, 1.0])).tolist()
    [1.0, 3.0, nan]
    """
    own = own_version(x, "sort", _sort)
    return run3(own, _sort, x, axis_of("sort", x, axis), bool(descending))


def argsort(x: ArrayT, axis: int = -1, descending: bool = False) -> ArrayT:
    """Return the indices, as int32, that put the elements along an axis into the order of `sort`.

    Equal elements keep their order, also with `descending`.

    >>> argsort(numpy.array([2, 1, 2, 3])).tolist()
    [1, 0, 2, 3]
    >>> argsort(numpy.array([2, 1, 2, 3]), descending=True).tolist()
    [3, 0, 2, 1]
    """
    own = own_version(x, "argsort", _argsort)
    return run3(own, _argsort, x, axis_of("argsort", x, axis), bool(descending))


def searchsorted(x1: ArrayT, x2: ArrayT, side: str = "left") -> ArrayT:
    """Return where in the sorted vector `x1` each element of x2 is to be put: int32 indices.

    With `side` "left" it comes before equal ones, with "right" behind them. NaN counts as infinity.

    >>> searchsorted(numpy.array([1, 3, 3, 5]), numpy.array([3, 6])).tolist()
    [1, 4]
    """
    primitives(x1, "searchsorted", "x1")
    require_one_dtype("searchsorted", x1=x1, x2=x2)
    if x1.ndim != 1 or side not in ("left", "right"):
        raise wrong_shapes("searchsorted", "x1 must be a vector, side 'left' or 'right'", x1=x1)
    return run3(
        own_version(x1, "searchsorted", _search_sorted), _search_sorted, x1, x2, side == "left"
    )


def nonzero(x: ArrayT) -> tuple[ArrayT, ...]:
    """Return the int32 indices of elements other than 0, for each axis; compiled code has none.

    >>> [at.tolist() for at in nonzero(numpy.array([[0, 5], [7, 0]]))]
    [[0, 1], [1, 0]]
    """
    primitives(x, "nonzero")
    if not x.ndim:
        raise wrong_shapes("nonzero", "x must have axes", x=x)
    return run_primitive(_nonzero, x)


def unique_values(x: ArrayT) -> ArrayT:
    """Return the different elements, in order, each NaN one; compiled code has none.

    >>> unique_values(numpy.array([3, 1, 3])).tolist()
    [1, 3]
    """
    primitives(x, "unique_values")
    return run_primitive(_unique_values, x)


def top_k(x: ArrayT, k: int) -> tuple[ArrayT, ArrayT]:
    """Return the k largest elements along the last axis, in descending order, and int32 indices.

    Both have the shape of x with k in place of the last axis. NaN counts as the largest.

    >>> values, places = top_k(numpy.array([3.0, 1.0, 4.0, 1.5]), 2)
    >>> values.tolist(), places.tolist()
    ([4.0, 3.0], [2, 0])
    """
    own = own_version(x, "top_k", _top_k)
    last = axis_of("top_k", x, -1)
    k = integer("top_k", "k", k)
    if not 1 <= k <= x.shape[last]:
        raise wrong_shapes("top_k", f"k = {k} must be from 1 to the size of the last axis", x=x)
    return run2(own, _top_k, x, k)


def _filled_axis(op: str, x: Array, axis: int) -> int:
    """Return the axis counted from the front, where it has elements."""
    shape = x.shape
    at = axis + len(shape) if type(axis) is int and axis < 0 else axis
    if type(at) is not int or not 0 <= at < len(shape) or shape[at] == 0:
        at = axis_of(op, x, axis)
        _nonempty_axes(op, x, axis)
    return at


def _nonempty_axes(op: str, x: Array, axis: Axes) -> tuple[int, ...]:
    axes = axes_of(op, x, axis)
    if 0 in [x.shape[one] for one in axes]:
        which = "x" if axis is None else f"axis {axis}"
        raise wrong_shapes(op, f"{which} must have elements", x=x)
    return axes


def _mean(x: ArrayT, axes: tuple[int, ...], keepdims: bool) -> ArrayT:
    xp = primitives(x)
    dtype = xp.dtype(x)
    if dtype.kind == "complex":
        raise wrong("mean", f"there is none for {dtype}; take the real and imaginary parts")
    total = xp.astype(x, wide(dtype))
    if axes:
        total = xp.sum(total, axes, keepdims)
        total = xp.divide(total, float(math.prod(tuple(x.shape[one] for one in axes))))
    return xp.astype(total, dtype) if dtype.kind == "float" else total


def _var(x: ArrayT, axes: tuple[int, ...], keepdims: bool, correction: float) -> ArrayT:
    return _spread("var", x, axes, keepdims, correction)


def _std(x: ArrayT, axes: tuple[int, ...], keepdims: bool, correction: float) -> ArrayT:
    return _spread("std", x, axes, keepdims, correction)


def _spread(op: str, x: ArrayT, axes: tuple[int, ...], keepdims: bool, correction: float) -> ArrayT:
    """Return the variance, or its root for the op std, by two passes over the array."""
    xp = primitives(x)
    dtype = xp.dtype(x)
    if dtype.kind == "complex":
        raise wrong(op, f"there is none for {dtype}; take the real and imaginary parts")
    y, count = xp.astype(x, wide(dtype)), float(math.prod([x.shape[one] for one in axes]))
    off = xp.subtract(y, xp.divide(xp.sum(y, axes, True), count) if axes else y)
    squares = xp.multiply(off, off)
    total = xp.sum(squares, axes, keepdims) if axes else squares
    spread = xp.divide(total, count - correction if count > correction else 0.0)
    spread = xp.sqrt(spread) if op == "std" else spread
    return xp.astype(spread, dtype) if dtype.kind == "float" else spread


def _correction(op: str, correction: float) -> float:
    number = python_number(correction)
    if not is_finite(number):
        raise wrong(op, f"correction must be a finite number, not {in_words(number)}")
    return float(number)


def _argmax(x: ArrayT, axis: int) -> ArrayT:
    return primitives(x).argmax(x, axis)


def _top_k(x: ArrayT, k: int) -> tuple[ArrayT, ArrayT]:
    return primitives(x).top_k(x, k)


def _argmin(x: ArrayT, axis: int) -> ArrayT:
    """Return the index of the largest of the negated numbers."""
    xp = primitives(x)
    dtype = xp.dtype(x)
    if dtype.kind == "bool":
        return xp.argmax(xp.logical_not(x), axis)
    if dtype.kind == "float":
        return xp.argmax(xp.negative(x), axis)
    return xp.argmax(xp.subtract(-1 if dtype.kind == "int" else 2**dtype.bits - 1, x), axis)


def _numbers(x: ArrayT) -> ArrayT:
    """Return booleans as int32, any other array unchanged."""
    if known_bool(x) is None:
        return x
    xp = primitives(x)
    return run2(xp.astype, xp.astype, x, INT32)


def _without(x: Array, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape without some axes."""
    return tuple([size for at, size in enumerate(x.shape) if at not in axes])


def _prod(x: ArrayT, axes: tuple[int, ...], keepdims: bool) -> ArrayT:
    xp = primitives(x)
    y = widened(xp, x)
    for axis in axes:  # multiply one half by the other until one element is left
        size = y.shape[axis]
        if not size:
            shape = (*y.shape[:axis], 1, *y.shape[axis + 1 :])
            y = xp.full(shape, 1, xp.dtype(y), y)
        while size > 1:
            half = size // 2
            last = xp.slice_axis(y, axis, 2 * half, size)
            upper = xp.slice_axis(y, axis, half, 2 * half)
            y = xp.multiply(xp.slice_axis(y, axis, 0, half), upper)
            y = xp.concat([y, last], axis) if size % 2 else y
            size -= half
    return xp.astype(y if keepdims else xp.reshape(y, _without(x, axes)), xp.dtype(x))


def _any(x: ArrayT, axes: tuple[int, ...], keepdims: bool) -> ArrayT:
    xp = primitives(x)
    true = x if known_bool(x) is not None else xp.logical_not(xp.equal(x, 0))
    return xp.less(0, xp.sum(xp.astype(true, INT32), axes, keepdims)) if axes else true


def _all(x: ArrayT, axes: tuple[int, ...], keepdims: bool) -> ArrayT:
    xp = primitives(x)
    false = xp.logical_not(x) if known_bool(x) is not None else xp.equal(x, 0)
    count = xp.sum(xp.astype(false, INT32), axes, keepdims) if axes else xp.astype(false, INT32)
    return xp.equal(count, 0)


def _logsumexp(x: ArrayT, axes: tuple[int, ...], keepdims: bool) -> ArrayT:
    xp = primitives(x)
    dtype, y = xp.dtype(x), widened(xp, x)
    if not axes:
        return x
    if 0 in x.shape:
        full = tuple([1 if at in axes else size for at, size in enumerate(x.shape)])
        shape = full if keepdims else _without(x, axes)
        return xp.full(shape, -math.inf, dtype, x)
    largest = xp.max(y, axes, True)
    finite = xp.where(xp.less(xp.abs(largest), math.inf), largest, 0.0)
    total = xp.log(xp.sum(xp.exp(xp.subtract(y, finite)), axes, keepdims))
    finite = finite if keepdims else xp.reshape(finite, tuple(total.shape))
    return xp.astype(xp.add(total, finite), dtype)


def _vector_norm(x: ArrayT, axes: tuple[int, ...], keepdims: bool, power: float) -> ArrayT:
    xp = primitives(x)
    sizes = xp.abs(widened(xp, x))
    added: Callable[[ArrayT], ArrayT] = lambda y: xp.sum(y, axes, keepdims) if axes else y  # noqa: E731
    if not axes and power:
        norm = sizes
    elif power == math.inf:
        norm = xp.max(sizes, axes, keepdims)
    elif power == -math.inf:
        norm = xp.min(sizes, axes, keepdims)
    elif power == 0:
        norm = added(xp.astype(xp.logical_not(xp.equal(sizes, 0)), xp.dtype(sizes)))
    elif power == 1:
        norm = added(sizes)
    elif power == 2:
        total = added(xp.multiply(sizes, sizes))
        nothing = xp.equal(total, 0)  # where the root has no slope
        norm = xp.where(nothing, total, xp.sqrt(xp.where(nothing, 1.0, total)))
    else:
        norm = xp.pow(added(xp.pow(sizes, power)), 1 / power)
    return xp.astype(norm, xp.dtype(x))


def _cumulative_sum(x: ArrayT, axis: int) -> ArrayT:
    return _scan(x, axis, primitives(x).add)


def _cumulative_prod(x: ArrayT, axis: int) -> ArrayT:
    return _scan(x, axis, primitives(x).multiply)


def _scan(x: ArrayT, axis: int, join: Callable[[ArrayT, ArrayT], ArrayT]) -> ArrayT:
    """Double the length of the sums in each step: the prefix sum of Hillis and Steele."""
    xp = primitives(x)
    sums, size, done = widened(xp, x), x.shape[axis], 1
    while done < size:
        later = xp.slice_axis(sums, axis, done, size)
        later = join(later, xp.slice_axis(sums, axis, 0, size - done))
        sums, done = xp.concat([xp.slice_axis(sums, axis, 0, done), later], axis), 2 * done
    return xp.astype(sums, xp.dtype(x))


def _search_sorted(x1: ArrayT, x2: ArrayT, left: bool) -> ArrayT:
    """Search by halves: each step adds a power of two to the indices, or not."""
    xp, size = primitives(x1), x1.shape[0]
    if known_float(x1) is not None:
        x1, x2 = (xp.where(xp.isnan(x), math.inf, x) for x in (x1, x2))
    at, before = xp.full(tuple(x2.shape), 0, INT32, x1), xp.less if left else xp.less_equal
    for power in reversed(range(size.bit_length())):
        more = xp.add(at, 1 << power)
        smaller = before(xp.take(x1, xp.subtract(more, 1), 0), x2)
        at = xp.where(xp.logical_and(smaller, xp.less_equal(more, size)), more, at)
    return at


def _nonzero(x: ArrayT) -> tuple[ArrayT, ...]:
    engine: Any = owner_of(x)
    if engine.is_traced(x):
        what = "the size of this result depends on the numbers, which compiled code does not have"
        raise Absent(what, "use where, or a sum of conditions").error()
    is_zero = primitives(x).equal(reshape(x, (math.prod(x.shape),)), False)
    count = is_zero.shape[0] - int(engine.to_host(sum(is_zero)))
    rest, indices = slice_axis(argsort(is_zero), 0, 0, count), []
    for size in reversed(x.shape):
        indices.append(remainder(rest, size))
        rest = floor_divide(rest, size)
    return tuple(indices[::-1])


def _unique_values(x: ArrayT) -> ArrayT:
    xp, ordered = primitives(x), sort(reshape(x, (math.prod(x.shape),)))
    size = ordered.shape[0]
    if size < 2:
        return ordered
    same = xp.equal(slice_axis(ordered, 0, 1, size), slice_axis(ordered, 0, 0, size - 1))
    (others,) = nonzero(xp.logical_not(same))
    return concat([slice_axis(ordered, 0, 0, 1), take(ordered, xp.add(others, 1))])


def _sort(x: ArrayT, axis: int, descending: bool) -> ArrayT:
    return primitives(x).take_along_axis(x, argsort(x, axis, descending), axis)


_PAIRS_AT_ONCE = 1 << 24


def _argsort(x: ArrayT, axis: int, descending: bool) -> ArrayT:
    """Sort by rank: compare all pairs, and count the elements before each."""
    xp = primitives(x)
    if descending:
        order = flip(argsort(flip(x, axis), axis), axis)
        return xp.subtract(x.shape[axis] - 1, order)
    axes = tuple([at for at in range(x.ndim) if at != axis])
    size, rows = x.shape[axis], math.prod([x.shape[at] for at in axes])
    y = xp.reshape(xp.permute_dims(x, (*axes, axis)), (rows, size))
    index = xp.broadcast_to(xp.arange(size, INT32, x), (rows, size))
    ranks = xp.full((rows, size), 0, INT32, x)
    block = builtins.max(1, _PAIRS_AT_ONCE // builtins.max(1, rows * size))
    for start in range(0, size, block):
        stop = builtins.min(size, start + block)
        ahead = _is_before(xp, y, index, start, stop)
        ranks = xp.add(ranks, xp.sum(xp.astype(ahead, INT32), 2))
    places = xp.reshape(index, (rows, 1, size, 1))
    room = xp.full((rows, 1, size, 1), 0, INT32, x)
    order = xp.write(room, places, ranks)
    moved = xp.reshape(order, tuple([x.shape[at] for at in (*axes, axis)]))
    back = sorted(range(x.ndim), key=(*axes, axis).__getitem__)
    return xp.permute_dims(moved, back)


def _is_before(xp: PrimitivesOf[ArrayT], y: ArrayT, index: ArrayT, start: int, stop: int) -> ArrayT:
    """Whether the elements from `start` to `stop` come before each: (rows, size, stop - start)."""
    rows, size = y.shape
    many, few = (rows, size, 1), (rows, 1, stop - start)
    one, other = xp.reshape(y, many), xp.reshape(xp.slice_axis(y, 1, start, stop), few)
    at, also = xp.reshape(index, many), xp.reshape(xp.slice_axis(index, 1, start, stop), few)
    smaller, same = xp.less(other, one), xp.equal(other, one)
    if xp.dtype(y).kind == "float":
        last, also_last = xp.isnan(one), xp.isnan(other)
        smaller = xp.logical_or(smaller, xp.logical_and(last, xp.logical_not(also_last)))
        same = xp.logical_or(same, xp.logical_and(last, also_last))
    return xp.logical_or(smaller, xp.logical_and(same, xp.less(also, at)))


def _count_nonzero(x: ArrayT, axes: tuple[int, ...], keepdims: bool) -> ArrayT:
    xp = primitives(x)
    counted = xp.astype(xp.logical_not(xp.equal(x, False)), INT32)
    return xp.sum(counted, axes, keepdims) if axes else counted


class Reduction(Protocol):
    """The type of an op along one or several axes, or over the whole array."""

    def __call__(self, x: ArrayT, axis: Axes = None, keepdims: bool = False) -> ArrayT: ...


def _reduction(
    name: str, meaning: str, given: str, result: str, definition: Callable[..., Any],
    version: Callable[..., Any] = own_version,
) -> Reduction:  # fmt: skip
    def op(x: ArrayT, axis: Axes = None, keepdims: bool = False) -> ArrayT:
        own = version(x, name, definition)
        axes = (axis_of(name, x, axis),) if type(axis) is int else axes_of(name, x, axis)
        return cast("ArrayT", run3(own, definition, x, axes, keepdims))

    example = f"numpy.array({given}), axis=1"
    return cast(
        "Reduction", document(op, name, f"{meaning}, along axes or in all", example, result)
    )


all = _reduction(  # noqa: A001  as everywhere
    "all", "whether all elements are not 0; NaN is not", "[[1, 2], [0, 1]]", "[True, False]", _all
)
any = _reduction(  # noqa: A001  as everywhere
    "any", "whether any element is not 0; NaN is not", "[[0, 2], [0, 0]]", "[True, False]", _any
)
count_nonzero = _reduction(
    "count_nonzero", "how many elements are not 0: int32", "[[1, 0], [2, 3]]", "[1, 2]",
    _count_nonzero,
)  # fmt: skip
logsumexp = _reduction(
    "logsumexp", "the logarithm of the sum of `exp(x)`, without overflow; -inf of no elements",
    "[[1000.0, -numpy.inf], [0, -1000]]", "[1000.0, 0.0]", _logsumexp, float_version,
)  # fmt: skip
mean = _reduction(
    "mean", "the mean, computed in float32 at least; float32 of integers and NaN of no elements",
    "[[1.0, 2.0], [3.0, 6.0]]", "[1.5, 4.5]", _mean,
)  # fmt: skip


@compiled
def softmax(x: ArrayT, axis: int = -1) -> ArrayT:
    """Return `exp(x)` divided by its sum along an axis, of the same shape and dtype.

    Computed in float32 for 16-bit numbers, and without overflow. A row that is minus infinity
    throughout, or has an infinity in it, gives NaN.

    >>> softmax(numpy.array([[0.0, 0.0], [1000.0, -1000.0]])).tolist()
    [[0.5, 0.5], [1.0, 0.0]]
    """
    own = float_version(x, "softmax", _softmax)
    count = x.ndim
    known = type(axis) is int and -count <= axis < count
    at = axis % count if known else axis_of("softmax", x, axis)
    result = own(x, at)
    return _softmax(x, at) if result is NotImplemented else result


@compiled
def log_softmax(x: ArrayT, axis: int = -1) -> ArrayT:
    """Return the logarithm of `softmax`, exact where softmax itself would be rounded to 0.

    >>> log_softmax(numpy.array([1000.0, 0.0])).tolist()
    [0.0, -1000.0]
    """
    own = float_version(x, "log_softmax", _log_softmax)
    count = x.ndim
    known = type(axis) is int and -count <= axis < count
    at = axis % count if known else axis_of("log_softmax", x, axis)
    result = own(x, at)
    return _log_softmax(x, at) if result is NotImplemented else result


def rmsnorm(x: ArrayT, weight: ArrayT, eps: float = 1e-6) -> ArrayT:
    """Return `x / sqrt(mean(x²) + eps) × weight` along the last axis, of the shape and dtype of x.

    x is (…, size) and weight (size,). Computed in float32 for 16-bit numbers and rounded once.

    >>> rmsnorm(numpy.array([[3.0, 4.0]]), numpy.ones(2), eps=0.0).round(3).tolist()
    [[0.849, 1.131]]
    """
    dtype = getattr(x, "dtype", None)
    own = version_for_dtype(x, dtype, "rmsnorm", _rmsnorm)
    size = x.shape[-1:]
    alike = type(weight) is type(x) and weight.shape == size and weight.dtype == dtype and size
    if not alike:
        _refuse_misfit("rmsnorm", x, "weight", weight)
        own = version_for_mixed_dtypes(own, _rmsnorm)
    if type(eps) is not float:
        eps = _small_number("rmsnorm", eps)
    return run3(own, _rmsnorm, x, weight, eps)


def layernorm(x: ArrayT, weight: ArrayT | None, bias: ArrayT | None, eps: float = 1e-5) -> ArrayT:
    """Return `(x - mean) / sqrt(variance + eps) × weight + bias` along the last axis.

    x is (…, size), weight and bias (size,) or `None`; the result has the shape and dtype of x.
    Computed in float32 for 16-bit numbers and rounded once.

    >>> layernorm(numpy.array([[1.0, 3.0]]), None, None, eps=0.0).tolist()
    [[-1.0, 1.0]]
    """
    dtype = getattr(x, "dtype", None)
    own = version_for_dtype(x, dtype, "layernorm", _layernorm)
    kind, size = type(x), x.shape[-1:]
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is None:
            continue
        if type(vector) is kind and vector.shape == size and vector.dtype == dtype and size:
            continue
        _refuse_misfit("layernorm", x, name, vector)
        own = version_for_mixed_dtypes(own, _layernorm)
    if type(eps) is not float:
        eps = _small_number("layernorm", eps)
    return run(own, _layernorm, x, weight, bias, eps)


def _refuse_misfit(op: str, x: Array, name: str, vector: Array) -> None:
    """Refuse a vector that does not go with x; another floating-point dtype is allowed."""
    require_one_library(op, "x", x, name, vector)
    if vector.dtype != x.dtype:
        float_primitives(op, vector)
    size, sizes = vector.shape, x.shape
    if len(size) != 1 or not sizes or size[0] != sizes[-1]:
        rule = f"{name} must be as long as the last axis of x"
        raise wrong_shapes(op, rule, x=x, **{name: vector})


def _small_number(op: str, eps: float) -> float:
    number = python_number(eps)
    if type(number) is not float and type(number) is not int:
        raise wrong(op, f"eps must be a number, not {in_words(number)}")
    return float(number)


def _softmax(x: ArrayT, axis: int) -> ArrayT:
    xp = primitives(x)
    if not x.shape[axis]:
        return x
    raised = xp.exp(_below_zero(xp, widened(xp, x), axis))
    return xp.astype(xp.divide(raised, xp.sum(raised, axis, True)), xp.dtype(x))


def _log_softmax(x: ArrayT, axis: int) -> ArrayT:
    xp = primitives(x)
    if not x.shape[axis]:
        return x
    lowered = _below_zero(xp, widened(xp, x), axis)
    total = xp.log(xp.sum(xp.exp(lowered), axis, True))
    return xp.astype(xp.subtract(lowered, total), xp.dtype(x))


def _below_zero(xp: PrimitivesOf[ArrayT], x: ArrayT, axis: int) -> ArrayT:
    return xp.subtract(x, xp.max(x, axis, True))


def _rmsnorm(x: ArrayT, weight: ArrayT, eps: float) -> ArrayT:
    xp = primitives(x)
    y = widened(xp, x)
    scale = xp.rsqrt(xp.add(_mean_of_last(xp, xp.multiply(y, y)), eps))
    scaled = xp.multiply(xp.multiply(y, scale), xp.astype(weight, xp.dtype(y)))
    return xp.astype(scaled, xp.dtype(x))


def _layernorm(x: ArrayT, weight: ArrayT | None, bias: ArrayT | None, eps: float) -> ArrayT:
    xp = primitives(x)
    y = widened(xp, x)
    y = xp.subtract(y, _mean_of_last(xp, y))
    y = xp.multiply(y, xp.rsqrt(xp.add(_mean_of_last(xp, xp.multiply(y, y)), eps)))
    if weight is not None:
        y = xp.multiply(y, xp.astype(weight, xp.dtype(y)))
    if bias is not None:
        y = xp.add(y, xp.astype(bias, xp.dtype(y)))
    return xp.astype(y, xp.dtype(x))


def _mean_of_last(xp: PrimitivesOf[ArrayT], x: ArrayT) -> ArrayT:
    return xp.divide(xp.sum(x, -1, True), float(x.shape[-1]))
