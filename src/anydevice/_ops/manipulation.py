"""Ops that make arrays, and that rearrange, convert, read and write elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import Any, TypeGuard

from anydevice._core.array import Array, ArrayT
from anydevice._core.dtypes import DType, as_dtype
from anydevice._core.primitives import PrimitivesOf, Shape
from anydevice._ops.arguments import (
    INT32,
    NUMBERS,
    axes_of,
    axis_of,
    broadcasts,
    finite_numbers,
    fit_number,
    in_words,
    integer,
    is_finite,
    pair_of,
    python_number,
    require_integers,
    require_one_dtype,
    shape_of,
    wide,
    widened,
    wrong,
    wrong_shapes,
)
from anydevice._ops.dispatch import (
    explain,
    number_version,
    own_version,
    primitives,
    run2,
    run3,
    run_primitive,
    wrong_dtype,
)
from anydevice._ops.elementwise import floor_divide

Axes = int | Sequence[int] | None
Kind = str | DType | object
"""A dtype: by name, ours, or any library's own."""


def reshape(x: ArrayT, shape: int | Sequence[int]) -> ArrayT:
    """Return the elements in C order in another shape; one size may be -1 and is inferred.

    >>> reshape(numpy.arange(6), (2, -1)).tolist()
    [[0, 1, 2], [3, 4, 5]]
    """
    xp = primitives(x, "reshape")
    if type(shape) is not tuple or (1 in shape and bool in map(type, shape)):
        shape = shape_of("reshape", shape)
    count = math.prod(shape)
    if type(count) is not int:
        shape = shape_of("reshape", shape)
    if count != math.prod(x.shape) or (shape and min(shape) < 0):
        rest = -math.prod(shape)
        one_left = shape.count(-1) == 1 and min(shape) == -1 and rest
        if not one_left or math.prod(x.shape) % rest:
            raise wrong_shapes("reshape", f"the shape {shape} must have as many elements as x", x=x)
    return run_primitive(xp.reshape, x, shape)


def permute(x: ArrayT, axes: Sequence[int]) -> ArrayT:
    """Return the axes in another order: axis n of the result is axis `axes[n]` of x.

    >>> permute(numpy.ones((2, 3, 4)), (2, 0, 1)).shape
    (4, 2, 3)
    """
    xp = primitives(x, "permute")
    if type(axes) is not tuple or not _in_order(axes, x.ndim):
        if not isinstance(axes, (tuple, list)):
            raise wrong("permute", f"axes must be a tuple of integers, not {in_words(axes)}")
        order = tuple([axis_of("permute", x, axis) for axis in axes])
        if not len(order) == len(set(order)) == x.ndim:
            raise wrong_shapes("permute", f"{tuple(axes)} must name each axis of x once", x=x)
        axes = order
    return run_primitive(xp.permute_dims, x, axes)


def concat(arrays: Sequence[ArrayT], axis: int = 0) -> ArrayT:
    """Concatenate arrays along an existing axis; all other sizes must be equal.

    >>> concat([numpy.ones((2, 1)), numpy.zeros((2, 2))], axis=1).tolist()
    [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    """
    _require_arrays("concat", arrays)
    first = arrays[0]
    xp = primitives(first, "concat")
    kind, dtype, shape = type(first), first.dtype, first.shape
    at = axis if type(axis) is int and 0 <= axis < len(shape) else axis_of("concat", first, axis)
    for other in arrays[1:]:
        if type(other) is not kind or other.dtype != dtype:
            require_one_dtype("concat", first=first, another=other)
        if other.shape != shape:
            own, its = tuple(shape), tuple(other.shape)
            if own[:at] != its[:at] or own[at + 1 :] != its[at + 1 :] or len(own) != len(its):
                rule = f"the arrays must have the same shape except for axis {at}"
                raise wrong_shapes("concat", rule, first=first, another=other)
    try:
        return xp.concat(arrays, at)
    except Exception as error:
        explain(error, arrays=arrays)
        raise


def stack(arrays: Sequence[ArrayT], axis: int = 0) -> ArrayT:
    """Return arrays of one shape side by side along a new axis.

    >>> stack([numpy.array([1, 2]), numpy.array([3, 4])], axis=1).tolist()
    [[1, 3], [2, 4]]
    """
    _require_arrays("stack", arrays)
    first = arrays[0]
    own = own_version(first, "stack", _stack)
    kind, dtype, shape = type(first), first.dtype, first.shape
    for other in arrays[1:]:
        if type(other) is not kind or other.dtype != dtype:
            require_one_dtype("stack", first=first, another=other)
        if other.shape != shape:
            rule = "the arrays must have the same shape"
            raise wrong_shapes("stack", rule, first=first, another=other)
    return run2(own, _stack, arrays, _new_axis("stack", first, "each array", axis))


def split(x: ArrayT, sections: int | Sequence[int], axis: int = 0) -> list[ArrayT]:
    """Return the array cut into pieces along an axis: a list of arrays.

    `sections` is the number of equal pieces, or a list of indices at which to cut.

    >>> [piece.tolist() for piece in split(numpy.arange(6), 3)]
    [[0, 1], [2, 3], [4, 5]]
    >>> [piece.tolist() for piece in split(numpy.arange(6), [1, 4])]
    [[0], [1, 2, 3], [4, 5]]
    """
    xp = primitives(x, "split")
    at = axis_of("split", x, axis)
    size = x.shape[at]
    if isinstance(sections, tuple | list):
        cuts = [0, *(integer("split", "an index", cut) for cut in sections), size]
        if any(one > other for one, other in pairwise(cuts)):
            rule = f"the indices {list(sections)} must be in order and within axis {axis}"
            raise wrong_shapes("split", rule, x=x)
    else:
        pieces = integer("split", "sections", sections, "or a list of them")
        if pieces < 1 or size % pieces:
            rule = f"axis {axis} must divide into {pieces} equal pieces"
            raise wrong_shapes("split", rule, x=x)
        cuts = list(range(0, size + 1, size // pieces)) if size else [0] * (pieces + 1)
    try:
        return [xp.slice_axis(x, at, start, stop) for start, stop in pairwise(cuts)]
    except Exception as error:
        explain(error, x=x)
        raise


def expand_dims(x: ArrayT, axis: int = 0) -> ArrayT:
    """Return x with a new axis of size 1 at this place of the result.

    >>> expand_dims(numpy.ones((2, 3)), 1).shape
    (2, 1, 3)
    """
    primitives(x, "expand_dims")
    at = _new_axis("expand_dims", x, "x", axis)
    return reshape(x, (*x.shape[:at], 1, *x.shape[at:]))


def squeeze(x: ArrayT, axis: int | Sequence[int]) -> ArrayT:
    """Return x without these axes, which must have the size 1.

    >>> squeeze(numpy.ones((2, 1, 3)), 1).shape
    (2, 3)
    """
    primitives(x, "squeeze")
    axes = axes_of("squeeze", x, axis)
    if any(x.shape[at] != 1 for at in axes):
        raise wrong_shapes("squeeze", f"each axis of {axis} must have the size 1", x=x)
    return reshape(x, tuple([size for at, size in enumerate(x.shape) if at not in axes]))


def moveaxis(x: ArrayT, source: int | Sequence[int], destination: int | Sequence[int]) -> ArrayT:
    """Return x with axes moved to other places; all others stay in their order.

    >>> moveaxis(numpy.ones((2, 3, 4)), 0, -1).shape
    (3, 4, 2)
    """
    primitives(x, "moveaxis")
    first, last = axes_of("moveaxis", x, source), axes_of("moveaxis", x, destination)
    if len(first) != len(last):
        raise wrong("moveaxis", "source and destination must have as many axes")
    order = [at for at in range(x.ndim) if at not in first]
    for place, at in sorted(zip(last, first, strict=True)):
        order.insert(place, at)
    return permute(x, tuple(order))


def matrix_transpose(x: ArrayT) -> ArrayT:
    """Return matrices (…, m, n) as (…, n, m).

    >>> matrix_transpose(numpy.ones((5, 2, 3))).shape
    (5, 3, 2)
    """
    _matrices("matrix_transpose", x)
    return moveaxis(x, -1, -2)


def repeat(x: ArrayT, repeats: int, axis: int | None = None) -> ArrayT:
    """Return each slice of an axis several times in a row, or each element of the flat array.

    >>> repeat(numpy.array([1, 2]), 2).tolist()
    [1, 1, 2, 2]
    """
    flat, at = _along("repeat", x, axis)
    if (count := integer("repeat", "repeats", repeats)) < 0:
        raise wrong("repeat", f"repeats must be 0 or more, not {count}")
    ids = arange(flat.shape[at] * count, like=flat, dtype="int32")
    return take(flat, floor_divide(ids, max(1, count)), at)


def roll(x: ArrayT, shift: int | Sequence[int], axis: Axes = None) -> ArrayT:
    """Return the elements moved along axes, or in the flat array; the last ones come first.

    >>> roll(numpy.array([1, 2, 3, 4]), 1).tolist()
    [4, 1, 2, 3]
    """
    result, one = _along("roll", x, None if axis is None else 0)
    axes, shifts = (one,) if axis is None else axes_of("roll", x, axis), shape_of("roll", shift)
    if len(shifts) not in (1, len(axes)):
        raise wrong("roll", f"shift must be one integer, or one for each axis, not {shifts}")
    for at, step in zip(axes, shifts * (len(axes) // len(shifts)), strict=True):
        cut = -step % max(1, result.shape[at])
        result = concat(split(result, [cut], at)[::-1], at)
    return reshape(result, tuple(x.shape))


def tile(x: ArrayT, repetitions: int | Sequence[int]) -> ArrayT:
    """Return copies of the array side by side: how many along each axis, counted from the last.

    >>> tile(numpy.array([1, 2]), (2, 2)).tolist()
    [[1, 2, 1, 2], [1, 2, 1, 2]]
    """
    primitives(x, "tile")
    counts = shape_of("tile", repetitions)
    if min(counts, default=0) < 0:
        raise wrong("tile", f"repetitions must be 0 or more, not {counts}")
    pairs = [*zip_longest(counts[::-1], x.shape[::-1], fillvalue=1)][::-1]
    apart = reshape(x, tuple([n for _, size in pairs for n in (1, size)]))
    copies = broadcast_to(apart, tuple([n for pair in pairs for n in pair]))
    return reshape(copies, tuple([count * size for count, size in pairs]))


def unstack(x: ArrayT, axis: int = 0) -> tuple[ArrayT, ...]:
    """Return the slices of an axis, each without it.

    >>> [row.tolist() for row in unstack(numpy.array([[1, 2], [3, 4]]))]
    [[1, 2], [3, 4]]
    """
    primitives(x, "unstack")
    at = axis_of("unstack", x, axis)
    pieces = split(x, x.shape[at], at) if x.shape[at] else []
    return tuple([squeeze(piece, at) for piece in pieces])


def broadcast_arrays(*arrays: ArrayT) -> list[ArrayT]:
    """Return the arrays, repeated to the shape to which they broadcast together.

    >>> [x.shape for x in broadcast_arrays(numpy.ones((2, 1)), numpy.ones(3))]
    [(2, 3), (2, 3)]
    """
    _require_arrays("broadcast_arrays", arrays)
    shape: Shape = ()
    for x in arrays:
        primitives(x, "broadcast_arrays")
        if not broadcasts(shape, x.shape):
            raise wrong_shapes("broadcast_arrays", f"all must broadcast with {shape}", x=x)
        pairs = zip_longest(shape[::-1], x.shape[::-1], fillvalue=1)
        shape = tuple([n if m == 1 else m for m, n in pairs])[::-1]
    return [broadcast_to(x, shape) for x in arrays]


def meshgrid(*arrays: ArrayT, indexing: str = "xy") -> list[ArrayT]:
    """Return the coordinates of a grid; with "xy", the first vector is along the second axis.

    >>> [x.tolist() for x in meshgrid(numpy.array([1, 2]), numpy.array([3, 4]), indexing="ij")]
    [[[1, 1], [2, 2]], [[3, 4], [3, 4]]]
    """
    _require_arrays("meshgrid", arrays)
    for x in arrays:
        primitives(x, "meshgrid")
        if x.ndim != 1 or indexing not in ("xy", "ij"):
            raise wrong_shapes("meshgrid", "all must be vectors, indexing 'xy' or 'ij'", x=x)
    axes, swaps = [*range(len(arrays))], indexing == "xy" and len(arrays) > 1
    order = [1, 0, *axes[2:]] if swaps else axes
    shapes = [[-1 if axis == at else 1 for axis in axes] for at in order]
    return broadcast_arrays(*map(reshape, arrays, shapes))


def tril(x: ArrayT, k: int = 0) -> ArrayT:
    """Return matrices with zeros above a diagonal, `k` above the main one.

    >>> tril(numpy.ones((2, 2))).tolist()
    [[1.0, 0.0], [1.0, 1.0]]
    """
    _matrices("tril", x)
    return run3(_triangle, _triangle, x, integer("tril", "k", k), 1)


def triu(x: ArrayT, k: int = 0) -> ArrayT:
    """Return matrices with zeros below a diagonal, `k` above the main one.

    >>> triu(numpy.ones((2, 2))).tolist()
    [[1.0, 1.0], [0.0, 1.0]]
    """
    _matrices("triu", x)
    return run3(_triangle, _triangle, x, integer("triu", "k", k), -1)


def pad(x: ArrayT, widths: int | Sequence[tuple[int, int]], value: float = 0) -> ArrayT:
    """Return the array with elements of one value added before and after it.

    `widths` says how many: one integer for all sides, or a pair (before, after) for each axis.

    >>> pad(numpy.array([[1, 2]]), [(0, 1), (2, 0)]).tolist()
    [[0, 0, 1, 2], [0, 0, 0, 0]]
    """
    own = own_version(x, "pad", _pad)
    sides = _sides_of(x, widths)
    number = _number_in("pad", "value", value, primitives(x).dtype(x), "cast x before")
    return run3(own, _pad, x, sides, number)


def diff(x: ArrayT, axis: int = -1, n: int = 1) -> ArrayT:
    """Return the n-th differences of neighbouring elements along an axis, in the dtype of x.

    >>> diff(numpy.array([1, 4, 9, 16])).tolist(), diff(numpy.array([1, 4, 9, 16]), n=2).tolist()
    ([3, 5, 7], [2, 2])
    """
    own = number_version(x, "diff", _diff)
    at, times = axis_of("diff", x, axis), integer("diff", "n", n)
    if times < 0:
        raise wrong("diff", f"n must be 0 or more, not {times}")
    return run3(own, _diff, x, at, times)


def slice_axis(x: ArrayT, axis: int, start: int, stop: int, step: int = 1) -> ArrayT:
    """Return `x[start:stop:step]` along an axis; `0 <= start <= stop <= size` and `step >= 1`.

    >>> slice_axis(numpy.arange(10), 0, 1, 8, 3).tolist()
    [1, 4, 7]
    """
    xp = primitives(x, "slice_axis")
    at = axis_of("slice_axis", x, axis)
    if not type(start) is type(stop) is type(step) is int:
        start, stop = integer("slice_axis", "start", start), integer("slice_axis", "stop", stop)
        step = integer("slice_axis", "step", step)
    if not 0 <= start <= stop <= x.shape[at] or step < 1:
        rule = f"{start}:{stop}:{step} must be a range within axis {axis}, counted from the front"
        raise wrong_shapes("slice_axis", rule, x=x)
    return run_primitive(xp.slice_axis, x, at, start, stop, step)


def broadcast_to(x: ArrayT, shape: Sequence[int]) -> ArrayT:
    """Return the array repeated along new axes at the front and along axes of size 1.

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
            raise wrong_shapes("broadcast_to", f"x must broadcast to {shape}", x=x)
    return run_primitive(xp.broadcast_to, x, shape)


def flip(x: ArrayT, axis: Axes = None) -> ArrayT:
    """Return the elements in reverse order along one or several axes, or along all.

    >>> flip(numpy.array([[1, 2], [3, 4]]), axis=1).tolist()
    [[2, 1], [4, 3]]
    """
    own = own_version(x, "flip", _flip)
    return run2(own, _flip, x, axes_of("flip", x, axis))


def astype(x: ArrayT, dtype: Kind) -> ArrayT:
    """Return the same numbers in another dtype; x itself if it has that dtype.

    `dtype` is a name, such as `"bfloat16"`, or any library's own dtype. Floating-point numbers are
    rounded to the nearest; conversion to integers truncates.

    >>> astype(numpy.array([1.5, 2.5]), "int32").tolist()
    [1, 2]
    """
    xp, wanted = primitives(x, "astype"), as_dtype(dtype)
    return run_primitive(xp.astype, x, wanted)


def one_hot(x: ArrayT, num_classes: int, dtype: Kind = "float32") -> ArrayT:
    """Return a new last axis of this size, with 1 at the index that x has there and 0 elsewhere.

    A negative or too large index gives only zeros.

    >>> one_hot(numpy.array([1, 0, 5]), 3).tolist()
    [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    own = own_version(x, "one_hot", _one_hot)
    require_integers("one_hot", "x", x)
    classes = integer("one_hot", "num_classes", num_classes)
    if classes < 0:
        raise wrong("one_hot", f"num_classes must be 0 or more, not {classes}")
    return run3(own, _one_hot, x, classes, as_dtype(dtype))


def zeros_like(x: ArrayT, dtype: Kind | None = None) -> ArrayT:
    """Return zeros in the shape of x, on its device, and in its dtype unless another is given.

    >>> zeros_like(numpy.array([[1.5, 2.5]])).tolist()
    [[0.0, 0.0]]
    """
    return _full("zeros_like", None, 0, x, dtype)


def ones_like(x: ArrayT, dtype: Kind | None = None) -> ArrayT:
    """Return ones in the shape of x, on its device, and in its dtype unless another is given.

    >>> ones_like(numpy.array([[1.5, 2.5]])).tolist()
    [[1.0, 1.0]]
    """
    return _full("ones_like", None, 1, x, dtype)


def full_like(x: ArrayT, value: float, dtype: Kind | None = None) -> ArrayT:
    """Return one value in the shape of x, on its device, and in its dtype unless another is given.

    >>> full_like(numpy.array([1, 2]), 7).tolist()
    [7, 7]
    """
    return _full("full_like", None, value, x, dtype)


def zeros(shape: int | Sequence[int], *, like: ArrayT, dtype: Kind | None = None) -> ArrayT:
    """Return zeros on the device of the array `like`, in its dtype unless another is given.

    >>> zeros((2, 2), like=numpy.array([1.5])).tolist()
    [[0.0, 0.0], [0.0, 0.0]]
    """
    return _full("zeros", shape, 0, like, dtype)


def ones(shape: int | Sequence[int], *, like: ArrayT, dtype: Kind | None = None) -> ArrayT:
    """Return ones on the device of the array `like`, in its dtype unless another is given.

    >>> ones(3, like=numpy.array([1.5]), dtype="int32").tolist()
    [1, 1, 1]
    """
    return _full("ones", shape, 1, like, dtype)


def full(
    shape: int | Sequence[int], value: float, *, like: ArrayT, dtype: Kind | None = None
) -> ArrayT:
    """Return an array of one value on the device of `like`, in its dtype unless another is given.

    >>> full((1, 2), numpy.inf, like=numpy.array([1.5])).tolist()
    [[inf, inf]]
    """
    return _full("full", shape, value, like, dtype)


def arange(
    start: float,
    stop: float | None = None,
    step: float = 1,
    *,
    like: ArrayT,
    dtype: Kind | None = None,
) -> ArrayT:
    """Return the numbers from `start` to before `stop`, `step` apart; `arange(stop)` starts at 0.

    They are on the device of the array `like`, in its dtype unless another is given.

    >>> arange(3, like=numpy.array([1.5])).tolist()
    [0.0, 1.0, 2.0]
    >>> arange(5, 0, -2, like=numpy.array([1])).tolist()
    [5, 3, 1]
    """
    xp, kind = _kind_like("arange", like, "like", dtype)
    if kind.kind not in ("int", "uint", "float"):
        raise wrong_dtype("arange", kind, "integers or floating-point numbers; give a dtype")
    first, last = (0, start) if stop is None else (start, stop)
    bounds = tuple(map(python_number, (first, last, step)))
    if not all(map(is_finite, bounds)) or not bounds[2]:
        rule = "start, stop and step must be finite numbers, and step must not be 0"
        raise wrong("arange", f"{rule}, but they are {', '.join(map(in_words, bounds))}")
    first, last, step = bounds
    exact = float not in map(type, bounds)
    count = max(0, -((first - last) // step) if exact else math.ceil((last - first) / step))
    ends = (first, first + (count - 1) * step) if count else ()
    for number in (*ends, *(bound for bound in bounds if type(bound) is float)):
        fit_number("arange", number, kind, "the array", "give another dtype")
    return run_primitive(_count_from, xp, first, step, count, kind, like)


def linspace(
    start: float, stop: float, num: int, *, like: ArrayT, dtype: Kind | None = None
) -> ArrayT:
    """Return `num` numbers from `start` to `stop`, both included, on the device of `like`.

    >>> linspace(0, 1, 5, like=numpy.ones(1)).tolist()
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    kind = _kind_like("linspace", like, "like", dtype)[1]
    if kind.kind != "float":
        raise wrong_dtype("linspace", kind, "floating-point numbers; give a dtype")
    ends = finite_numbers("linspace", "", lambda number: True, start=start, stop=stop)
    if (count := integer("linspace", "num", num)) < 0:
        raise wrong("linspace", f"num must be 0 or more, not {count}")
    return run_primitive(_line, like, *ends, count, kind)


def eye(
    rows: int, columns: int | None = None, *, k: int = 0, like: ArrayT, dtype: Kind | None = None
) -> ArrayT:
    """Return a matrix with ones on a diagonal, `k` above the main one, and zeros elsewhere.

    It is square if `columns` is not given, on the device of the array `like`, and in its dtype
    unless another is given.

    >>> eye(2, 3, like=numpy.array([1.5])).tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    xp, kind = _kind_like("eye", like, "like", dtype)
    high = integer("eye", "rows", rows)
    wide = high if columns is None else integer("eye", "columns", columns)
    above = integer("eye", "k", k)
    if high < 0 or wide < 0:
        raise wrong("eye", f"rows and columns must be 0 or more, not {high} and {wide}")
    try:
        down = xp.reshape(xp.arange(high, INT32, like), (high, 1))
        return xp.astype(xp.equal(xp.add(down, above), xp.arange(wide, INT32, like)), kind)
    except Exception as error:
        explain(error, like=like)
        raise


def embedding(weight: ArrayT, ids: ArrayT) -> ArrayT:
    """Return the row of `weight` (rows, size) for each id: ids of any shape, result (…, size).

    An id that is negative or too large gives a row of NaN.

    >>> embedding(numpy.array([[1.0, 2.0], [3.0, 4.0]]), numpy.array([[1, 0], [0, 7]])).tolist()
    [[[3.0, 4.0], [1.0, 2.0]], [[1.0, 2.0], [nan, nan]]]
    """
    own = own_version(weight, "embedding", _embedding)
    require_integers("embedding", "ids", ids, weight, "weight")
    if len(weight.shape) != 2:
        raise wrong_shapes("embedding", "weight must be (rows, size)", weight=weight)
    return run2(own, _embedding, weight, ids)


def take(x: ArrayT, indices: ArrayT, axis: int = 0) -> ArrayT:
    """Return the slices of x at these indices; the axis is replaced by the shape of `indices`.

    An index that is negative or too large gives NaN, or 0 if x is not floating-point.

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


def take_along_axis(x: ArrayT, indices: ArrayT, axis: int = -1) -> ArrayT:
    """Return the elements of x at indices along an axis; it gets the size it has in `indices`.

    `indices` has as many axes as x; the other ones have the sizes of x, or 1, which broadcasts. An
    index that is negative or too large gives NaN, or 0 if x is not floating-point.

    >>> take_along_axis(numpy.array([[5, 6], [7, 8]]), numpy.array([[1], [0]])).tolist()
    [[6], [7]]
    """
    xp = primitives(x, "take_along_axis")
    require_integers("take_along_axis", "indices", indices, x)
    at = axis_of("take_along_axis", x, axis)
    sizes, full = tuple(indices.shape), tuple(x.shape)
    pairs = enumerate(zip(sizes, full, strict=False))
    if len(sizes) != len(full) or any(m not in (1, n) for one, (m, n) in pairs if one != at):
        rule = f"except for axis {axis}, indices must have the shape of x, or 1 in place of a size"
        raise wrong_shapes("take_along_axis", rule, x=x, indices=indices)
    try:
        return xp.take_along_axis(x, indices, at)
    except Exception as error:
        explain(error, x=x, indices=indices)
        raise


def cache_write(cache: ArrayT, new: ArrayT, positions: ArrayT) -> ArrayT:
    """Return the cache with new rows in it; `cache` itself must not be used afterwards.

    cache is (batch, heads, keys, size), new (batch, heads, tokens, size). A token replaces the key
    at its position, in (tokens,) or (batch, tokens); those outside of the cache are left out.

    >>> cache = numpy.zeros((1, 1, 4, 1))
    >>> cache_write(cache, numpy.array([[[[5.0], [6.0]]]]), numpy.array([2, 9])).ravel().tolist()
    [0.0, 0.0, 5.0, 0.0]
    """
    own = own_version(cache, "cache_write", _cache_write)
    require_one_dtype("cache_write", cache=cache, new=new)
    require_integers("cache_write", "positions", positions, cache, "cache")
    cache_shape, new_shape = tuple(cache.shape), tuple(new.shape)
    fits = len(cache_shape) == len(new_shape) == 4 and cache_shape[:2] == new_shape[:2]
    if not fits or cache_shape[3] != new_shape[3]:
        rule = "cache must be (batch, heads, keys, size) and new (batch, heads, tokens, size)"
        raise wrong_shapes("cache_write", rule, cache=cache, new=new)
    if tuple(positions.shape) not in ((new_shape[2],), (new_shape[0], new_shape[2])):
        rule = "positions must be (tokens,) or (batch, tokens)"
        raise wrong_shapes("cache_write", rule, new=new, positions=positions)
    return run3(own, _cache_write, cache, new, positions)


def _new_axis(op: str, x: Array, name: str, axis: int) -> int:
    """Return the place of a new axis, counted from the front."""
    count, at = len(x.shape) + 1, axis if type(axis) is int else integer(op, "axis", axis)
    if not -count <= at < count:
        rule = f"axis {at} must be from {-count} to {count - 1}"
        raise wrong_shapes(op, rule, **{name: x})
    return at % count


def _along(op: str, x: ArrayT, axis: int | None) -> tuple[ArrayT, int]:
    """Return the array and an axis; without one, the flat array."""
    primitives(x, op)
    return (reshape(x, (math.prod(x.shape),)), 0) if axis is None else (x, axis_of(op, x, axis))


def _matrices(op: str, x: Array) -> None:
    primitives(x, op)
    if x.ndim < 2:
        raise wrong_shapes(op, "x must have rows and columns", x=x)


def _triangle(x: ArrayT, above: int, side: int) -> ArrayT:
    xp, (high, wide) = primitives(x), x.shape[-2:]
    row = xp.reshape(xp.arange(high, INT32, x), (high, 1))
    off = xp.subtract(xp.subtract(xp.arange(wide, INT32, x), row), above)
    return xp.where(xp.less(0, xp.multiply(off, side)), 0, x)


def _line(like: ArrayT, first: float, last: float, count: int, dtype: DType) -> ArrayT:
    xp = primitives(like)
    share = xp.divide(xp.astype(xp.arange(count, INT32, like), wide(dtype)), max(1.0, count - 1.0))
    rest = xp.multiply(xp.subtract(1.0, share), float(first))  # exact at both ends
    return xp.astype(xp.add(rest, xp.multiply(share, float(last))), dtype)


def _in_order(axes: Sequence[int], count: int) -> bool:
    """Whether these are all `count` axes, counted from the front, in any order."""
    present = 0
    for axis in axes:
        if type(axis) is not int or not 0 <= axis < count:
            return False
        present |= 1 << axis
    return len(axes) == count and present == (1 << count) - 1


def _ends_with(shape: Any, own: Shape) -> TypeGuard[Shape]:
    """Whether `shape` is a tuple of sizes that ends with the sizes of `own`."""
    if type(shape) is not tuple or len(shape) < len(own):
        return False
    for size in shape:
        if type(size) is not int or size < 0:
            return False
    return not own or shape[-len(own) :] == own


def _require_arrays(op: str, arrays: Sequence[Array]) -> None:
    if not isinstance(arrays, (tuple, list)):
        rule = f"it takes a list of arrays, not {in_words(arrays)}"
        raise wrong(op, f"{rule}; write {op}([x, y])")
    if not arrays:
        raise wrong(op, "it needs at least one array")


def _sides_of(x: Array, widths: int | Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the numbers of elements to add before and after each axis."""
    count, one = len(x.shape), python_number(widths)
    pairs = [(one, one)] * count if type(one) is int else one
    if not isinstance(pairs, tuple | list) or not all(isinstance(x, tuple | list) for x in pairs):
        rule = "widths must be an integer, or (before, after) for each axis"
        raise wrong("pad", f"{rule}, not {in_words(widths)}")
    sides = tuple([pair_of("pad", "each of widths", pair, 0) for pair in pairs])
    if len(sides) != count:
        rule = f"widths must have one (before, after) for each axis and has {len(sides)}"
        raise wrong_shapes("pad", rule, x=x)
    return sides


def _number_in(
    op: str, name: str, value: float, dtype: DType, advice: str = "give another dtype"
) -> float:
    """Return `value` as a Python number that `dtype` holds."""
    number: float = python_number(value)
    if type(number) not in NUMBERS:
        raise wrong(op, f"{name} must be a number, not {in_words(number)}")
    return fit_number(op, number, dtype, "the array", advice)


def _kind_like(
    op: str, like: ArrayT, name: str, dtype: Kind | None
) -> tuple[PrimitivesOf[ArrayT], DType]:
    xp = primitives(like, op, name)
    return xp, xp.dtype(like) if dtype is None else as_dtype(dtype)


def _full(
    op: str, shape: int | Sequence[int] | None, value: float, like: ArrayT, dtype: Kind | None
) -> ArrayT:
    xp, kind = _kind_like(op, like, "x" if shape is None else "like", dtype)
    sizes = tuple(like.shape) if shape is None else shape_of(op, shape)
    if shape is not None and sizes and min(sizes) < 0:
        raise wrong(op, f"a shape must have no negative sizes, but it is {sizes}")
    number = _number_in(op, "value", value, kind)
    return run_primitive(xp.full, sizes, number, kind, like)


def _count_from(
    xp: PrimitivesOf[ArrayT], start: float, step: float, count: int, dtype: DType, like: ArrayT
) -> ArrayT:
    if dtype.kind == "uint" and step < 0:  # which has no negative step to multiply by
        return flip(_count_from(xp, start + (count - 1) * step, -step, count, dtype, like), 0)
    if dtype.bits >= 32 and (start, step) == (0, 1):
        return xp.arange(count, dtype, like)
    inside = dtype if dtype.kind != "float" and dtype.bits >= 32 else INT32
    numbers = xp.arange(count, inside, like)
    if dtype.kind == "float":
        numbers = xp.astype(numbers, wide(dtype))
    numbers = numbers if step == 1 else xp.multiply(numbers, step)
    numbers = numbers if not start else xp.add(numbers, start)
    return xp.astype(numbers, dtype)


def padded(
    xp: PrimitivesOf[ArrayT], x: ArrayT, axis: int, before: int, after: int, value: float = 0
) -> ArrayT:
    """Pad an axis before and after it; negative widths cut elements off."""
    if before < 0 or after < 0:
        x = xp.slice_axis(x, axis, max(0, -before), x.shape[axis] + min(0, after))
    shape, dtype = x.shape, xp.dtype(x)
    sides = [
        [xp.full((*shape[:axis], count, *shape[axis + 1 :]), value, dtype, x)] if count > 0 else []
        for count in (before, after)
    ]
    return xp.concat([*sides[0], x, *sides[1]], axis) if sides[0] or sides[1] else x


def _pad(x: ArrayT, sides: tuple[tuple[int, int], ...], value: float) -> ArrayT:
    xp = primitives(x)
    for axis, (before, after) in enumerate(sides):
        x = padded(xp, x, axis, before, after, value)
    return x


def _stack(arrays: Sequence[ArrayT], axis: int) -> ArrayT:
    xp, shape = primitives(arrays[0]), arrays[0].shape
    between = (*shape[:axis], 1, *shape[axis:])
    return xp.concat([xp.reshape(x, between) for x in arrays], axis)


def _diff(x: ArrayT, axis: int, times: int) -> ArrayT:
    xp = primitives(x)
    y = widened(xp, x) if times > 1 else x
    for _ in range(min(times, x.shape[axis])):
        size = y.shape[axis]
        y = xp.subtract(xp.slice_axis(y, axis, 1, size), xp.slice_axis(y, axis, 0, size - 1))
    return xp.astype(y, xp.dtype(x)) if times > 1 else y


def _one_hot(x: ArrayT, classes: int, dtype: DType) -> ArrayT:
    xp = primitives(x)
    inside = xp.dtype(x) if xp.dtype(x).bits >= 32 else INT32
    places = xp.reshape(xp.astype(x, inside), (*x.shape, 1))
    return xp.astype(xp.equal(places, xp.arange(classes, inside, x)), dtype)


def _flip(x: ArrayT, axes: tuple[int, ...]) -> ArrayT:
    xp = primitives(x)
    for axis in axes:
        size = x.shape[axis]
        x = xp.take(x, xp.subtract(size - 1, xp.arange(size, INT32, x)), axis)
    return x


def _embedding(weight: ArrayT, ids: ArrayT) -> ArrayT:
    return primitives(weight).take(weight, ids, 0)


def _cache_write(cache: ArrayT, new: ArrayT, positions: ArrayT) -> ArrayT:
    xp = primitives(cache)
    batch, _, tokens, _ = new.shape
    return xp.write(cache, new, xp.broadcast_to(positions, (batch, tokens)))
