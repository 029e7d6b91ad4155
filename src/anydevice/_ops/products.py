"""Products of matrices, quantized ones too, Einstein sums, 2-d convolutions, and pooling."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from string import ascii_letters
from typing import TYPE_CHECKING, Any

from anydevice._core.array import Array, ArrayT
from anydevice._core.dtypes import as_dtype
from anydevice._core.primitives import PrimitivesOf
from anydevice._core.quantized import QuantizedWeight, low_bits
from anydevice._ops.arguments import (
    FLOAT32,
    INT32,
    axes_of,
    broadcasts,
    in_words,
    integer,
    pair_of,
    python_number,
    require_integers,
    require_one_dtype,
    require_one_library,
    widened,
    wrong,
    wrong_shapes,
)
from anydevice._ops.dispatch import (
    compiled,
    float_version,
    number_primitives,
    number_version,
    own_version,
    primitives,
    run,
    run3,
    run_primitive,
    version_for_dtype,
)
from anydevice._ops.manipulation import flip, moveaxis, padded

if TYPE_CHECKING:
    from anydevice._core.array import HostArray


@compiled
def matmul(a: ArrayT, b: ArrayT) -> ArrayT:
    """Return the products of matrices (…, m, k) and (…, k, n): (…, m, n), of their dtype.

    The axes before the last two broadcast. 16-bit numbers are added up in float32 and rounded
    once.

    >>> matmul(numpy.ones((5, 2, 3)), numpy.ones((3, 4))).shape
    (5, 2, 4)
    """
    own = number_version(a, "matmul", _matmul)
    if type(b) is not type(a) or a.dtype != b.dtype:
        require_one_dtype("matmul", a=a, b=b)
    left, right = a.shape, b.shape
    if len(left) < 2 or len(right) < 2:
        raise wrong_shapes("matmul", "both must have rows and columns", a=a, b=b)
    if left[-1] != right[-2]:
        raise wrong_shapes("matmul", "a must have as many columns as b has rows", a=a, b=b)
    if len(left) > 2 and len(right) > 2 and not broadcasts(left[:-2], right[:-2]):
        raise wrong_shapes("matmul", "the axes before the last two must broadcast", a=a, b=b)
    result = own(a, b)
    return _matmul(a, b) if result is NotImplemented else result


def linear(x: ArrayT, weight: ArrayT, bias: ArrayT | None = None) -> ArrayT:
    """Return `x · weightᵀ + bias`, of the dtype of x.

    x is (…, in), weight (out, in), bias (out,) or `None`; the result is (…, out).

    >>> linear(numpy.ones((2, 3)), numpy.ones((4, 3)), numpy.arange(4.0)).tolist()
    [[3.0, 4.0, 5.0, 6.0], [3.0, 4.0, 5.0, 6.0]]
    """
    own = number_version(x, "linear", _linear)
    if type(weight) is not type(x) or x.dtype != weight.dtype:
        require_one_dtype("linear", x=x, weight=weight)
    shape, sizes = weight.shape, x.shape
    if len(shape) != 2 or not sizes or sizes[-1] != shape[1]:
        raise wrong_shapes("linear", "weight must be (out, in) and x (…, in)", x=x, weight=weight)
    if bias is not None:
        if type(bias) is not type(x) or x.dtype != bias.dtype:
            require_one_dtype("linear", x=x, bias=bias)
        if len(bias.shape) != 1 or bias.shape[0] != shape[0]:
            raise wrong_shapes("linear", "bias must be (out,)", weight=weight, bias=bias)
    return run3(own, _linear, x, weight, bias)


@compiled
def outer(a: ArrayT, b: ArrayT) -> ArrayT:
    """Return the outer product of two vectors: (size of a, size of b).

    >>> outer(numpy.array([1, 2]), numpy.array([3, 4, 5])).tolist()
    [[3, 4, 5], [6, 8, 10]]
    """
    xp = number_primitives("outer", a)
    if type(b) is not type(a) or b.dtype != a.dtype:
        require_one_dtype("outer", a=a, b=b)
    if len(a.shape) != 1 or len(b.shape) != 1:
        raise wrong_shapes("outer", "both must be vectors", a=a, b=b)
    return xp.multiply(xp.reshape(a, (a.shape[0], 1)), b)


def einsum(subscripts: str, *arrays: ArrayT) -> ArrayT:
    """Compute an Einstein summation: products of elements, summed over axes that the result lacks.

    `subscripts` names the axes of each array by letters, and after `->` those of the result;
    without it, the result has all letters that occur once, in alphabetical order. `...` stands for
    any axes, which broadcast. A letter that occurs twice in one array takes its diagonal. Arrays
    are multiplied from left to right; 16-bit numbers are added up in float32 and rounded once.

    >>> einsum("ij,j->i", numpy.array([[1, 2], [3, 4]]), numpy.array([1, 10])).tolist()
    [21, 43]
    >>> einsum("ii", numpy.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
    5.0
    """
    if type(subscripts) is not str:
        raise wrong("einsum", f"subscripts must be a string, not {in_words(subscripts)}")
    if not arrays:
        raise wrong("einsum", f"there are no arrays for {subscripts!r}")
    number_primitives("einsum", arrays[0])
    require_one_dtype("einsum", **{f"array {n}": x for n, x in enumerate(arrays)})
    return run_primitive(_einsum, subscripts, arrays)


def vecdot(a: ArrayT, b: ArrayT, axis: int = -1) -> ArrayT:
    """Return the sums of products along an axis, counted from behind; the others broadcast.

    >>> vecdot(numpy.array([[1, 2], [3, 4]]), numpy.array([1, 10])).tolist()
    [21, 43]
    """
    number_primitives("vecdot", a)
    require_one_dtype("vecdot", a=a, b=b)
    at = integer("vecdot", "axis", axis)
    if not -min(a.ndim, b.ndim) <= at < 0 or a.shape[at] != b.shape[at]:
        raise wrong_shapes("vecdot", f"axis {at}, below 0, must have one size in both", a=a, b=b)
    return einsum("...i,...i->...", moveaxis(a, at, -1), moveaxis(b, at, -1))


def tensordot(a: ArrayT, b: ArrayT, axes: int | Sequence[Sequence[int]] = 2) -> ArrayT:
    """Return products, summed over the last axes of a and the first of b, or over pairs of axes.

    >>> tensordot(numpy.ones((2, 3)), numpy.ones((3, 4)), axes=([1], [0])).tolist()
    [[3.0, 3.0, 3.0, 3.0], [3.0, 3.0, 3.0, 3.0]]
    """
    number_primitives("tensordot", a)
    require_one_dtype("tensordot", a=a, b=b)
    count = python_number(axes)
    pairs = (range(-count, 0), range(count)) if type(count) is int else axes
    if not isinstance(pairs, tuple | list) or len(pairs) != 2:
        raise wrong("tensordot", "axes must be an integer, or axes of a and as many of b")
    ours, theirs = (axes_of("tensordot", x, [*at]) for x, at in zip((a, b), pairs, strict=True))
    if [a.shape[at] for at in ours] != [b.shape[at] for at in theirs]:
        raise wrong_shapes("tensordot", "the axes of each pair must have one size", a=a, b=b)
    left, right = ascii_letters[: a.ndim], [*ascii_letters[a.ndim : a.ndim + b.ndim]]
    for own, other in zip(ours, theirs, strict=True):
        right[other] = left[own]
    rest = [name for name in (*left, *right) if (name in left) != (name in right)]
    return einsum(f"{left},{''.join(right)}->{''.join(rest)}", a, b)


def _add_bias(
    xp: PrimitivesOf[ArrayT], product: ArrayT, bias: ArrayT | None, like: ArrayT
) -> ArrayT:
    """Return a product and its bias, rounded to the dtype of `like`."""
    if bias is not None:
        product = xp.add(product, xp.astype(bias, xp.dtype(product)))
    return xp.astype(product, xp.dtype(like))


def _matmul(a: ArrayT, b: ArrayT) -> ArrayT:
    return primitives(a).matmul(a, b)


def _linear(x: ArrayT, weight: ArrayT, bias: ArrayT | None) -> ArrayT:
    xp = primitives(x)
    outputs, inputs = weight.shape
    rows = xp.reshape(x, (math.prod(x.shape[:-1]), inputs))
    columns = xp.permute_dims(weight, (1, 0))
    if bias is not None:  # the sum with it must be rounded only once
        rows, columns = widened(xp, rows), widened(xp, columns)
    product = _add_bias(xp, xp.matmul(rows, columns), bias, x)
    return xp.reshape(product, (*x.shape[:-1], outputs))


def _einsum(subscripts: str, arrays: Sequence[ArrayT]) -> ArrayT:
    terms, result = _axes_of(subscripts, arrays)
    xp, dtype = primitives(arrays[0]), primitives(arrays[0]).dtype(arrays[0])
    sizes = _sizes_of(subscripts, terms, arrays)
    left, names = _diagonal(xp, arrays[0], terms[0])
    # Two arrays without an axis to sum over first: one product, which rounds once by itself.
    plain = len(arrays) == 2 and all(
        len(set(one)) == len(one) and set(one) <= {*other, *result}
        for one, other in (terms, terms[::-1])
    )
    left = left if plain else widened(xp, left)
    for n, x in enumerate(arrays[1:], 1):
        needed = {*result, *(name for term in terms[n + 1 :] for name in term)}
        left, names = _sum_unneeded(xp, left, names, {*needed, *terms[n]})
        right, also = _diagonal(xp, x if plain else widened(xp, x), terms[n])
        right, also = _sum_unneeded(xp, right, also, {*needed, *names})
        left, names = _product(xp, left, names, right, also, needed, sizes)
    left, names = _sum_unneeded(xp, left, names, set(result))
    return xp.astype(_transpose(xp, left, [names.index(name) for name in result]), dtype)


Names = tuple[str, ...]


def _axes_of(subscripts: str, arrays: Sequence[Array]) -> tuple[list[Names], Names]:
    """Return the names of the axes of each array, and of the result; those of `...` are numbers."""
    operands, arrow, wanted = subscripts.replace(" ", "").partition("->")
    texts = operands.split(",")
    if len(texts) != len(arrays):
        rule = f"{subscripts!r} is for {len(texts)} arrays, not {len(arrays)}"
        raise wrong("einsum", rule)
    terms: list[Names] = []
    for text, x in zip(texts, arrays, strict=True):
        before, dots, after = text.partition("...")
        rest = len(x.shape) - len(before) - len(after)
        letters = before + after
        if letters and not letters.isalpha():
            raise wrong("einsum", f"axes must be letters, or '...' once, not {text!r}")
        if rest < 0 or (rest and not dots):
            raise wrong_shapes("einsum", f"{text!r} must have a letter for each axis", x=x)
        several = tuple([str(at - rest) for at in range(rest)])
        terms.append((*before, *several, *after))
    everything = [name for term in terms for name in term]
    numbers = sorted({name for name in everything if not name.isalpha()}, key=int)
    if not arrow:
        once = sorted(name for name in everything if name.isalpha() and everything.count(name) == 1)
        return terms, (*numbers, *once)
    before, dots, after = wanted.partition("...")
    result = (*before, *(numbers if dots else ()), *after)
    if len(set(result)) != len(result) or not {*before, *after} <= set(everything):
        rule = "the result must have each axis once, and only axes of the arrays"
        raise wrong("einsum", f"{rule}, but it is {wanted!r} in {subscripts!r}")
    return terms, result


def _sizes_of(subscripts: str, terms: Sequence[Names], arrays: Sequence[Array]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for term, x in zip(terms, arrays, strict=True):
        for name, size in zip(term, x.shape, strict=True):
            known = sizes.setdefault(name, size)
            if known != size and (name.isalpha() or 1 not in (known, size)):
                what = f"axis {name!r}" if name.isalpha() else "an axis of '...'"
                raise wrong("einsum", f"{what} of {subscripts!r} has two sizes: {known} and {size}")
            sizes[name] = size if known == 1 else known
    return sizes


def _diagonal(xp: PrimitivesOf[ArrayT], x: ArrayT, names: Names) -> tuple[ArrayT, Names]:
    """Return the diagonal over all axes of one name; they become one axis, the last."""
    for name in dict.fromkeys(names):
        while names.count(name) > 1:
            one = names.index(name)
            other = names.index(name, one + 1)
            order = [at for at in range(len(names)) if at not in (one, other)]
            size, around = x.shape[one], tuple([x.shape[at] for at in order])
            square = xp.permute_dims(x, (*order, one, other))
            row = xp.reshape(square, (*around, size * size))
            x = xp.slice_axis(row, len(around), 0, size * size, size + 1) if size else row
            names = (*[names[at] for at in order], name)
    return x, names


def _sum_unneeded(
    xp: PrimitivesOf[ArrayT], x: ArrayT, names: Names, needed: set[str]
) -> tuple[ArrayT, Names]:
    """Sum over the axes that no later array and not the result needs."""
    gone = tuple([at for at, name in enumerate(names) if name not in needed])
    if not gone:
        return x, names
    return xp.sum(x, gone), tuple([name for name in names if name in needed])


def _product(
    xp: PrimitivesOf[ArrayT],
    a: ArrayT,
    a_names: Names,
    b: ArrayT,
    b_names: Names,
    needed: set[str],
    sizes: Mapping[str, int],
) -> tuple[ArrayT, Names]:
    """Multiply two arrays, and sum over the axes of both that are not needed later."""
    shared = [name for name in a_names if name in b_names]
    batch = [name for name in shared if name in needed]
    inner = [name for name in shared if name not in needed]
    rows = [name for name in a_names if name not in shared]
    columns = [name for name in b_names if name not in shared]
    names = (*batch, *rows, *columns)
    if not inner or xp.dtype(a).kind != "float":  # libraries have no such product of integers
        left = _arrange_axes(xp, a, a_names, [*names, *inner], sizes, columns)
        right = _arrange_axes(xp, b, b_names, [*names, *inner], sizes, rows)
        product = xp.multiply(left, right)
        axes = tuple(range(len(names), len(names) + len(inner)))
        return (xp.sum(product, axes) if axes else product), names
    high, deep, wide = (
        math.prod([sizes[name] for name in some]) for some in (rows, inner, columns)
    )
    first = (math.prod([sizes[name] for name in batch]),) if batch else ()
    left = _arrange_axes(xp, a, a_names, [*batch, *rows, *inner], sizes)
    right = _arrange_axes(xp, b, b_names, [*batch, *inner, *columns], sizes)
    product = xp.matmul(
        xp.reshape(left, (*first, high, deep)), xp.reshape(right, (*first, deep, wide))
    )
    return xp.reshape(product, tuple([sizes[name] for name in names])), names


def _arrange_axes(
    xp: PrimitivesOf[ArrayT],
    x: ArrayT,
    names: Names,
    order: Sequence[str],
    sizes: Mapping[str, int],
    missing: Sequence[str] = (),
) -> ArrayT:
    """Return the axes in `order`; one in `missing` has size 1, and the others are broadcast."""
    present = [name for name in order if name in names]
    turned = _transpose(xp, x, [names.index(name) for name in present])
    if missing:
        shape = [1 if name in missing else turned.shape[present.index(name)] for name in order]
        return xp.reshape(turned, tuple(shape))
    return xp.broadcast_to(turned, tuple([sizes[name] for name in order]))


def _transpose(xp: PrimitivesOf[ArrayT], x: ArrayT, axes: Sequence[int]) -> ArrayT:
    return x if list(axes) == sorted(axes) else xp.permute_dims(x, tuple(axes))


Pair = tuple[int, int]


def conv2d(
    x: ArrayT,
    weight: ArrayT,
    bias: ArrayT | None = None,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
) -> ArrayT:
    """Return the 2-d convolution of images with filters, in the dtype of x.

    x is (batch, channels, height, width), weight (filters, channels, kernel height, kernel width),
    bias (filters,) or `None`; `padding` zeros are added on each side. The result is
    (batch, filters, out height, out width), where out = (size + 2 padding - kernel) // stride + 1.
    This is a cross-correlation: filters are not flipped.

    >>> conv2d(numpy.ones((1, 2, 4, 4)), numpy.ones((3, 2, 3, 3)), padding=1)[0, 0].tolist()[0]
    [8.0, 12.0, 12.0, 8.0]
    """
    dtype = getattr(x, "dtype", None)
    own = version_for_dtype(x, dtype, "conv2d", _conv2d)
    _check_images("conv2d", "filters, channels", x, weight, bias)
    image, filters = x.shape, weight.shape
    steps, zeros = pair_of("conv2d", "stride", stride, 1), pair_of("conv2d", "padding", padding, 0)
    high, wide = image[2] + 2 * zeros[0], image[3] + 2 * zeros[1]
    if not (0 < filters[2] <= high and 0 < filters[3] <= wide):
        rule = f"filters must be at least (1, 1) and not larger than x with its padding of {zeros}"
        raise wrong_shapes("conv2d", rule, x=x, weight=weight)
    return run(own, _conv2d, x, weight, bias, steps, zeros)


def _check_images(op: str, axes: str, x: Array, weight: Array, bias: Array | None) -> None:
    """Refuse operands that do not go together; `axes` are the first two of the weight."""
    if type(weight) is not type(x) or weight.dtype != x.dtype:
        require_one_dtype(op, x=x, weight=weight)
    own = axes.split(", ").index("filters")
    if len(x.shape) != 4 or len(weight.shape) != 4 or x.shape[1] != weight.shape[1 - own]:
        rule = f"x must be (batch, channels, height, width), weight ({axes}, height, width)"
        raise wrong_shapes(op, rule, x=x, weight=weight)
    if bias is not None:
        require_one_dtype(op, x=x, bias=bias)
        if bias.shape != weight.shape[own : own + 1]:
            raise wrong_shapes(op, "bias must be (filters,)", weight=weight, bias=bias)


def conv_transpose2d(
    x: ArrayT,
    weight: ArrayT,
    bias: ArrayT | None = None,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
    output_padding: int | Pair = 0,
) -> ArrayT:
    """Return the transpose of `conv2d`, which maps its results back to the size of its images.

    x is (batch, channels, height, width), weight (channels, filters, kernel height, kernel width),
    bias (filters,) or `None`. Each element of x adds its multiple of a filter to the result, the
    next one `stride` further; `padding` rows and columns are cut off on each side. The result is
    (batch, filters, out height, out width), where out = (size - 1) stride - 2 padding + kernel +
    output_padding. `conv2d` maps several sizes to the same one: `output_padding`, smaller than the
    stride, chooses among them.

    >>> x, weight = numpy.array([[[[1.0, 2.0]]]]), numpy.ones((1, 1, 1, 3))
    >>> conv_transpose2d(x, weight, stride=2).tolist()
    [[[[1.0, 1.0, 3.0, 2.0, 2.0]]]]
    """
    op = "conv_transpose2d"
    own = float_version(x, op, _conv_transpose2d)
    _check_images(op, "channels, filters", x, weight, bias)
    image, filters = x.shape, weight.shape
    steps, cut = pair_of(op, "stride", stride, 1), pair_of(op, "padding", padding, 0)
    more = pair_of(op, "output_padding", output_padding, 0)
    if more[0] >= steps[0] or more[1] >= steps[1]:
        raise wrong(op, f"output_padding must be smaller than the stride of {steps}, not {more}")
    sizes = [(image[2 + n] - 1) * steps[n] + filters[2 + n] + more[n] for n in (0, 1)]
    filled = image[2] and image[3] and filters[2] and filters[3]
    if not filled or sizes[0] <= 2 * cut[0] or sizes[1] <= 2 * cut[1]:
        rule = f"something must be left after a padding of {cut} is cut off"
        raise wrong_shapes(op, rule, x=x, weight=weight)
    return run(own, _conv_transpose2d, x, weight, bias, steps, cut, more)


def max_pool2d(x: ArrayT, size: int | Pair, stride: int | Pair | None = None) -> ArrayT:
    """Return the largest element of each window of an image; NaN propagates.

    x is (batch, channels, height, width); the windows are `size` high and wide and `stride` apart;
    the default stride is `size`. The result is (batch, channels, out height, out width), where
    out = (input - size) // stride + 1: a remainder at the end is ignored.

    >>> max_pool2d(numpy.arange(16.0).reshape(1, 1, 4, 4), 2).tolist()
    [[[[5.0, 7.0], [13.0, 15.0]]]]
    """
    own = own_version(x, "max_pool2d", _max_pool2d)
    window, steps = _windows_of("max_pool2d", x, size, stride)
    return run3(own, _max_pool2d, x, window, steps)


def avg_pool2d(x: ArrayT, size: int | Pair, stride: int | Pair | None = None) -> ArrayT:
    """Return the mean of each window of an image; shapes as in `max_pool2d`.

    >>> avg_pool2d(numpy.arange(16.0).reshape(1, 1, 4, 4), 2).tolist()
    [[[[2.5, 4.5], [10.5, 12.5]]]]
    """
    own = float_version(x, "avg_pool2d", _avg_pool2d)
    window, steps = _windows_of("avg_pool2d", x, size, stride)
    return run3(own, _avg_pool2d, x, window, steps)


def _windows_of(
    op: str, x: Array, size: int | Pair, stride: int | Pair | None
) -> tuple[Pair, Pair]:
    window = pair_of(op, "size", size, 1)
    steps = window if stride is None else pair_of(op, "stride", stride, 1)
    shape = x.shape
    if len(shape) != 4:
        raise wrong_shapes(op, "x must be (batch, channels, height, width)", x=x)
    if shape[2] < window[0] or shape[3] < window[1]:
        raise wrong_shapes(op, f"windows of {window} must not be larger than x", x=x)
    return window, steps


def _conv2d(x: ArrayT, weight: ArrayT, bias: ArrayT | None, stride: Pair, padding: Pair) -> ArrayT:
    xp = primitives(x)
    filters, channels, high, wide = weight.shape
    image = padded(xp, padded(xp, x, 2, padding[0], padding[0]), 3, padding[1], padding[1])
    parts = list(shifted_views(xp, image, (high, wide), stride))
    batch, _, out_high, out_wide = parts[0].shape
    apart = [xp.reshape(part, (batch, channels, 1, out_high, out_wide)) for part in parts]
    taken = channels * high * wide
    columns = xp.reshape(xp.concat(apart, 2), (batch, taken, out_high * out_wide))
    rows = xp.reshape(weight, (filters, taken))
    if bias is not None:  # the sum with it must be rounded only once
        rows, columns = widened(xp, rows), widened(xp, columns)
        bias = xp.reshape(bias, (filters, 1))
    product = _add_bias(xp, xp.matmul(rows, columns), bias, x)
    return xp.reshape(product, (batch, filters, out_high, out_wide))


def _conv_transpose2d(
    x: ArrayT, weight: ArrayT, bias: ArrayT | None, stride: Pair, padding: Pair, more: Pair
) -> ArrayT:
    """Convolve x, with zeros between its elements, with the flipped filters."""
    xp = primitives(x)
    for axis, step, cut, extra in zip((2, 3), stride, padding, more, strict=True):
        around = weight.shape[axis] - 1 - cut
        x = padded(xp, _spread(xp, x, axis, step), axis, around, around + extra)
    return conv2d(x, xp.permute_dims(flip(weight, (2, 3)), (1, 0, 2, 3)), bias)


def _spread(xp: PrimitivesOf[ArrayT], x: ArrayT, axis: int, step: int) -> ArrayT:
    """Put `step - 1` zeros between the elements of an axis."""
    if step == 1:
        return x
    before, size, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    zeros = xp.full((*before, size, step - 1, *after), 0, xp.dtype(x), x)
    apart = xp.concat([xp.reshape(x, (*before, size, 1, *after)), zeros], axis + 1)
    together = xp.reshape(apart, (*before, size * step, *after))
    return xp.slice_axis(together, axis, 0, (size - 1) * step + 1)


def shifted_views(
    xp: PrimitivesOf[ArrayT], x: ArrayT, window: Pair, stride: Pair
) -> Iterator[ArrayT]:
    """Yield, for each position in a window, the elements of all windows at that position."""
    ends = [size - window[n] + 1 for n, size in enumerate(x.shape[2:])]
    for down in range(window[0]):
        rows = xp.slice_axis(x, 2, down, down + ends[0], stride[0])
        for along in range(window[1]):
            yield xp.slice_axis(rows, 3, along, along + ends[1], stride[1])


def _max_pool2d(x: ArrayT, size: Pair, stride: Pair) -> ArrayT:
    xp = primitives(x)
    largest, *others = shifted_views(xp, x, size, stride)
    for other in others:
        largest = xp.maximum(largest, other)
    return largest


def _avg_pool2d(x: ArrayT, size: Pair, stride: Pair) -> ArrayT:
    xp = primitives(x)
    total, *others = shifted_views(xp, widened(xp, x), size, stride)
    for other in others:
        total = xp.add(total, other)
    return xp.astype(xp.divide(total, float(size[0] * size[1])), xp.dtype(x))


BLOCK = 2**24
"""Elements of a matrix that are dequantized at a time: 64 MiB of float32."""


def dequantize(
    weight: QuantizedWeight, dtype: object = "float32", rows: ArrayT | None = None
) -> Array:
    """Return the numbers of a quantized weight, computed in float32.

    With `rows`, integers of any shape, return only these rows of the first axis, as `take` does:
    the rows of an embedding, or the matrices of experts.

    >>> from anydevice._core.quantized import QuantizedWeight
    >>> codes, scales = numpy.array([[0x98], [0x7F]], "uint8"), numpy.ones((2, 1), "float16")
    >>> weight = QuantizedWeight("q4_0", (2, 2), 4, 2, codes, scales, zero=8)
    >>> dequantize(weight).tolist(), dequantize(weight, rows=numpy.array([1])).tolist()
    ([[0.0, 1.0], [7.0, -1.0]], [[7.0, -1.0]])
    """
    _require_quantized("dequantize", weight)
    wanted = as_dtype(dtype)
    if wanted.kind != "float" or wanted.packed:
        raise wrong("dequantize", f"dtype must be a floating-point one, not {wanted}")
    xp = primitives(weight.codes, "dequantize", "weight")
    if rows is not None:
        require_integers("dequantize", "rows", rows, weight.codes, "weight")
        arrays = {name: xp.take(x, rows, 0) for name, x in weight.arrays.items()}
        weight = weight.with_arrays(arrays, (*rows.shape, *weight.shape[1:]))
    own = own_version(weight.codes, "dequantize", _dequantize)
    try:
        return xp.astype(run(own, _dequantize, weight), wanted)
    except Exception:
        _require_shapes("dequantize", weight)
        raise


def quantized_linear(x: ArrayT, weight: QuantizedWeight, bias: ArrayT | None = None) -> ArrayT:
    """Return `x · weightᵀ + bias`, of the dtype of x, with a quantized weight.

    x is (…, in), weight (out, in), bias (out,) or `None`; the result is (…, out). By definition,
    the weight is dequantized in float32, and products are added up in float32.

    >>> from anydevice._core.quantized import QuantizedWeight
    >>> codes, scales = numpy.array([[0x98], [0x7F]], "uint8"), numpy.ones((2, 1), "float16")
    >>> weight = QuantizedWeight("q4_0", (2, 2), 4, 2, codes, scales, zero=8)
    >>> quantized_linear(numpy.array([[1.0, 2.0]], "float32"), weight).tolist()
    [[2.0, 5.0]]
    """
    own = float_version(x, "quantized_linear", _quantized_linear)
    _require_quantized("quantized_linear", weight)
    if type(weight.codes) is not type(x):
        require_one_library("quantized_linear", "x", x, "weight", weight.codes)
    if weight.ndim != 2 or not x.shape or x.shape[-1] != weight.shape[1]:
        rule = "weight must be (out, in) and x (…, in)"
        raise wrong_shapes("quantized_linear", rule, x=x, weight=weight)
    if bias is not None:
        require_one_dtype("quantized_linear", x=x, bias=bias)
        if tuple(bias.shape) != weight.shape[:1]:
            raise wrong_shapes("quantized_linear", "bias must be (out,)", weight=weight, bias=bias)
    try:
        return run3(own, _quantized_linear, x, weight, bias)
    except Exception:
        _require_shapes("quantized_linear", weight)
        raise


def _require_quantized(op: str, weight: Any) -> None:
    if not isinstance(weight, QuantizedWeight):
        raise wrong(op, f"weight must be a QuantizedWeight, not {in_words(weight)}")


def _require_shapes(op: str, weight: QuantizedWeight) -> None:
    """Raise `ConfigurationError` for an array whose shape does not fit the weight's."""
    for name, shape in weight.array_shapes().items():
        array = weight.arrays.get(name)
        if array is not None and tuple(array.shape) != shape:
            rule = f"{name} of {weight!r} must have the shape {shape}"
            raise wrong_shapes(op, rule, **{name: array})


def row_blocks(weight: QuantizedWeight) -> Iterator[QuantizedWeight]:
    """Yield the weight in blocks of rows with at most `BLOCK` elements, or one row."""
    rows = weight.shape[0]
    step = max(1, BLOCK // max(1, math.prod(weight.shape[1:])))
    if rows <= step:
        yield weight
        return
    for start in range(0, rows, step):
        yield slice_rows(weight, start, min(rows, start + step))


def slice_rows(weight: QuantizedWeight, start: int, stop: int) -> QuantizedWeight:
    """Return the rows from `start` up to `stop` of the first axis."""
    xp = primitives(weight.codes)
    arrays = {name: xp.slice_axis(x, 0, start, stop) for name, x in weight.arrays.items()}
    return weight.with_arrays(arrays, (stop - start, *weight.shape[1:]))


def _quantized_linear(x: ArrayT, weight: QuantizedWeight, bias: ArrayT | None) -> ArrayT:
    xp = primitives(x)
    columns = weight.shape[1]
    flat = widened(xp, xp.reshape(x, (math.prod(x.shape[:-1]), columns)))
    own = own_version(weight.codes, "dequantize", _dequantize)
    parts: list[ArrayT] = []
    for block in row_blocks(weight):
        numbers: Any = run(own, _dequantize, block)
        columns_first = xp.permute_dims(xp.astype(numbers, xp.dtype(flat)), (1, 0))
        parts.append(xp.matmul(flat, columns_first))
    product = parts[0] if len(parts) == 1 else xp.concat(parts, 1)
    if bias is not None:
        product = xp.add(product, xp.astype(bias, xp.dtype(product)))
    return xp.reshape(xp.astype(product, xp.dtype(x)), (*x.shape[:-1], weight.shape[0]))


def _dequantize(weight: QuantizedWeight) -> Array:
    """Return the numbers in float32."""
    xp = primitives(weight.codes)
    codes = _unpack_codes(weight.codes, weight.high, weight.bits)
    if weight.table is None:
        numbers = xp.astype(codes, FLOAT32)
        numbers = xp.subtract(numbers, float(weight.zero)) if weight.zero else numbers
    else:
        levels = xp.asarray(_host_array(weight.table), weight.codes)
        numbers = xp.take(levels, xp.astype(codes, INT32), 0)
    blocks = (*weight.shape[:-1], weight.shape[-1] // weight.block, weight.block)
    scales = _scales(xp, weight.scales, weight.super_scales)
    numbers = xp.multiply(xp.reshape(numbers, blocks), scales)
    if weight.minimums is not None:
        numbers = xp.add(numbers, _scales(xp, weight.minimums, weight.super_minimums))
    return xp.reshape(numbers, weight.shape)


def _host_array(values: tuple[float, ...]) -> HostArray:
    import numpy as np

    return np.asarray(values, np.float32)


def _scales(xp: PrimitivesOf[Array], scales: Array, factors: Array | None) -> Array:
    """Return the scales of blocks in float32, (…, blocks, 1)."""
    wide = xp.astype(scales, FLOAT32)
    if factors is not None:
        grouped = xp.reshape(wide, (*factors.shape, scales.shape[-1] // factors.shape[-1]))
        wide = xp.multiply(grouped, xp.reshape(xp.astype(factors, FLOAT32), (*factors.shape, 1)))
    return xp.reshape(wide, (*scales.shape, 1))


def _unpack_codes(codes: Array, high: Array | None, bits: int) -> Array:
    """Return the codes of `bits` bits in float32, (…, columns); see `QuantizedWeight`."""
    low = low_bits(bits)
    numbers = _split_bytes(codes, low)
    if high is None:
        return numbers
    xp = primitives(codes)
    return xp.add(numbers, xp.multiply(_split_bytes(high, bits - low), float(1 << low)))


def _split_bytes(packed: Array, bits: int) -> Array:
    """Return the numbers of `bits` bits in bytes, the lowest first, in float32."""
    xp = primitives(packed)
    rest, parts = xp.astype(packed, FLOAT32), []
    for _ in range(8 // bits - 1):
        above = xp.floor(xp.multiply(rest, 2.0**-bits))
        parts.append(xp.subtract(rest, xp.multiply(above, float(1 << bits))))
        rest = above
    parts.append(rest)
    columns = [xp.reshape(part, (*packed.shape, 1)) for part in parts]
    joined = columns[0] if len(columns) == 1 else xp.concat(columns, len(packed.shape))
    return xp.reshape(joined, (*packed.shape[:-1], packed.shape[-1] * len(parts)))
