"""2-d convolutions, as one matrix product, and pooling."""

from __future__ import annotations

from collections.abc import Iterator

from anydevice._core.array import Array, ArrayT
from anydevice._core.primitives import PrimitivesOf
from anydevice._ops.arguments import pair_of, require_one_dtype, widened, wrong, wrong_shapes
from anydevice._ops.dispatch import (
    explain,
    float_version,
    own_version,
    primitives,
    run,
    run3,
    version_for_dtype,
)
from anydevice._ops.manipulation import flip, padded
from anydevice._ops.products import biased

Pair = tuple[int, int]
_ONE_STEP, _NO_ZEROS = (1, 1), (0, 0)


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

    >>> import numpy
    >>> conv2d(numpy.ones((1, 2, 4, 4)), numpy.ones((3, 2, 3, 3)), padding=1)[0, 0].tolist()[0]
    [8.0, 12.0, 12.0, 8.0]
    """
    dtype = getattr(x, "dtype", None)
    own = version_for_dtype(x, dtype, "conv2d", _conv2d)
    if type(weight) is not type(x) or weight.dtype != dtype:
        require_one_dtype("conv2d", x=x, weight=weight)
    image, filters = x.shape, weight.shape
    if len(image) != 4 or len(filters) != 4 or image[1] != filters[1]:
        rule = (
            "x must be (batch, channels, height, width), weight (filters, channels, height, width)"
        )
        raise wrong_shapes("conv2d", rule, x=x, weight=weight)
    if bias is not None:
        require_one_dtype("conv2d", x=x, bias=bias)
        if bias.shape != filters[:1]:
            raise wrong_shapes("conv2d", "bias must be (filters,)", weight=weight, bias=bias)
    steps, zeros = _ONE_STEP, _NO_ZEROS
    if stride != 1 or type(stride) is not int:
        steps = pair_of("conv2d", "stride", stride, 1)
    if padding != 0 or type(padding) is not int:
        zeros = pair_of("conv2d", "padding", padding, 0)
    high, wide = image[2] + 2 * zeros[0], image[3] + 2 * zeros[1]
    if not (0 < filters[2] <= high and 0 < filters[3] <= wide):
        rule = f"filters must be at least (1, 1) and not larger than x with its padding of {zeros}"
        raise wrong_shapes("conv2d", rule, x=x, weight=weight)
    try:
        result = own(x, weight, bias, steps, zeros)
        return _conv2d(x, weight, bias, steps, zeros) if result is NotImplemented else result
    except Exception as error:
        explain(error, x=x, weight=weight, bias=bias)
        raise


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

    >>> import numpy
    >>> x, weight = numpy.array([[[[1.0, 2.0]]]]), numpy.ones((1, 1, 1, 3))
    >>> conv_transpose2d(x, weight, stride=2).tolist()
    [[[[1.0, 1.0, 3.0, 2.0, 2.0]]]]
    """
    op = "conv_transpose2d"
    own = float_version(x, op, _conv_transpose2d)
    require_one_dtype(op, x=x, weight=weight)
    image, filters = x.shape, weight.shape
    if len(image) != 4 or len(filters) != 4 or image[1] != filters[0]:
        rule = (
            "x must be (batch, channels, height, width), weight (channels, filters, height, width)"
        )
        raise wrong_shapes(op, rule, x=x, weight=weight)
    if bias is not None:
        require_one_dtype(op, x=x, bias=bias)
        if bias.shape != filters[1:2]:
            raise wrong_shapes(op, "bias must be (filters,)", weight=weight, bias=bias)
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

    >>> import numpy
    >>> max_pool2d(numpy.arange(16.0).reshape(1, 1, 4, 4), 2).tolist()
    [[[[5.0, 7.0], [13.0, 15.0]]]]
    """
    own = own_version(x, "max_pool2d", _max_pool2d)
    window, steps = _windows_of("max_pool2d", x, size, stride)
    return run3(own, _max_pool2d, x, window, steps)


def avg_pool2d(x: ArrayT, size: int | Pair, stride: int | Pair | None = None) -> ArrayT:
    """Return the mean of each window of an image; shapes as in `max_pool2d`.

    >>> import numpy
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
    image = _pad_sides(xp, x, padding)
    parts = list(_shifted_views(xp, image, (high, wide), stride))
    batch, _, out_high, out_wide = parts[0].shape
    apart = [xp.reshape(part, (batch, channels, 1, out_high, out_wide)) for part in parts]
    taken = channels * high * wide
    columns = xp.reshape(xp.concat(apart, 2), (batch, taken, out_high * out_wide))
    rows = xp.reshape(weight, (filters, taken))
    if bias is not None:  # the sum with it must be rounded only once
        rows, columns = widened(xp, rows), widened(xp, columns)
        bias = xp.reshape(bias, (filters, 1))
    product = biased(xp, xp.matmul(rows, columns), bias, x)
    return xp.reshape(product, (batch, filters, out_high, out_wide))


def _conv_transpose2d(
    x: ArrayT, weight: ArrayT, bias: ArrayT | None, stride: Pair, padding: Pair, more: Pair
) -> ArrayT:
    """Get the convolution of x, with zeros between its elements, with the filters turned around."""
    xp = primitives(x)
    for axis, step, cut, extra in zip((2, 3), stride, padding, more, strict=True):
        around = weight.shape[axis] - 1 - cut
        x = padded(xp, _spread(xp, x, axis, step), axis, around, around + extra)
    return conv2d(x, xp.permute_dims(flip(weight, (2, 3)), (1, 0, 2, 3)), bias)


def _spread(xp: PrimitivesOf[ArrayT], x: ArrayT, axis: int, step: int) -> ArrayT:
    """`step - 1` zeros between the elements of an axis."""
    if step == 1:
        return x
    before, size, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    zeros = xp.full((*before, size, step - 1, *after), 0, xp.dtype(x), x)
    apart = xp.concat([xp.reshape(x, (*before, size, 1, *after)), zeros], axis + 1)
    together = xp.reshape(apart, (*before, size * step, *after))
    return xp.slice_axis(together, axis, 0, (size - 1) * step + 1)


def _pad_sides(xp: PrimitivesOf[ArrayT], x: ArrayT, padding: Pair) -> ArrayT:
    for axis, count in zip((2, 3), padding, strict=True):
        x = padded(xp, x, axis, count, count)
    return x


def _shifted_views(
    xp: PrimitivesOf[ArrayT], x: ArrayT, window: Pair, stride: Pair
) -> Iterator[ArrayT]:
    """For each place in a window, the elements that all windows have there."""
    ends = [size - window[n] + 1 for n, size in enumerate(x.shape[2:])]
    for down in range(window[0]):
        rows = xp.slice_axis(x, 2, down, down + ends[0], stride[0])
        for along in range(window[1]):
            yield xp.slice_axis(rows, 3, along, along + ends[1], stride[1])


def _max_pool2d(x: ArrayT, size: Pair, stride: Pair) -> ArrayT:
    xp = primitives(x)
    largest, *others = _shifted_views(xp, x, size, stride)
    for other in others:
        largest = xp.maximum(largest, other)
    return largest


def _avg_pool2d(x: ArrayT, size: Pair, stride: Pair) -> ArrayT:
    xp = primitives(x)
    total, *others = _shifted_views(xp, widened(xp, x), size, stride)
    for other in others:
        total = xp.add(total, other)
    return xp.astype(xp.divide(total, float(size[0] * size[1])), xp.dtype(x))
