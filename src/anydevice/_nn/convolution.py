"""Layers over images (channels, height, width) and sequences (channels, length)."""

from __future__ import annotations

import math
from operator import ge
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from anydevice import _ops as ops
from anydevice._core.array import Array
from anydevice._nn.initializers import Initial, draw_weight
from anydevice._nn.layer import (
    Check,
    Flag,
    Inferred,
    Layer,
    OptionalSize,
    OptionalSizes,
    Padding,
    Paddings,
    Pair,
    Parameters,
    Run,
    Shape,
    Size,
    Sizes,
    channels_first,
    features_last,
    setting_error,
)
from anydevice._nn.layers import ACTIVATIONS, OptionalFunction
from anydevice._ops.dispatch import own_version, primitives
from anydevice._ops.dispatch import run as run_op
from anydevice._ops.products import shifted_views

if TYPE_CHECKING:
    from anydevice._arrays.random.generator import Random


class _Convolution(Layer):
    """The base class of convolutions with kernels of `size`."""

    inputs: Inferred
    outputs: Size
    size: Sizes
    stride: Sizes = 1
    padding: Paddings = 0
    bias: Flag = True
    activation: OptionalFunction = None
    initializer: Initial = "lecun"
    groups: OptionalSize = None

    inferred = ("inputs", 0)
    _axes = 2

    @property
    def label(self) -> str:
        size = _size_text(self.size, self._axes)
        return f"{type(self).__name__}({self.inputs}→{self.outputs}, {size})"

    def initial(self, generator: Random) -> Parameters:
        kernel, groups = _pair(self.size)[: self._axes], self.groups or 1
        shape = (self.outputs, self.inputs // groups, *kernel)
        fans = math.prod(shape[1:]), self.outputs * math.prod(kernel) // groups
        return draw_weight(self.initializer, generator, shape, fans, self.bias * self.outputs)

    def _convolve(self, x: Array, *operands: Any) -> Array:
        if self.groups is None:
            return ops.conv2d(x, *operands)
        own = own_version(x, "grouped_conv2d", _grouped_conv2d)
        return run_op(own, _grouped_conv2d, x, *operands, self.groups)


def _grouped_conv2d(
    x: Array, weight: Array, bias: Array | None, stride: Pair, padding: Pair, groups: int
) -> Array:
    filters, (high, wide) = weight.shape[0], weight.shape[2:]
    x = ops.pad(x, ((0, 0), (0, 0), *[(size, size) for size in padding]))
    parts = list(shifted_views(primitives(x), x, (high, wide), stride))
    batch, _, *places = parts[0].shape
    columns = ops.reshape(ops.stack(parts, 2), (batch, groups, -1, math.prod(places)))
    y = ops.matmul(ops.reshape(weight, (groups, filters // groups, -1)), columns)
    y = ops.reshape(y, (batch, filters, *places))
    return y if bias is None else ops.add(y, ops.reshape(bias, (filters, 1, 1)))


class Conv2d(_Convolution):
    """A 2-d convolution with kernels of `size`; `padding` zeros are added on each side.

    Its parameters are `weight` (outputs, inputs, height, width) and `bias` (outputs,). `size`,
    `stride` and `padding` are numbers, or one for the height and one for the width. With `groups`,
    an output sees the inputs of its group alone: a depthwise convolution has as many as inputs.

    >>> Conv2d(1, 8, 3, padding=1).output((1, 28, 28))
    (8, 28, 28)
    """

    def output(self, shape: Shape) -> Shape:
        _check_image(self, shape)
        _check_channels(self, shape)
        windows = _windows(self, shape, self.size, self.stride, self.padding)
        return channels_first((self.outputs, *windows))

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        bias = parameters["bias"] if self.bias else None
        windows = _pair(self.stride), _pair(self.padding)
        y = self._convolve(x, parameters["weight"], bias, *windows)
        return y if self.activation is None else ACTIVATIONS[self.activation](y)


class Conv1d(_Convolution):
    """A 1-d convolution with kernels of `size`; `padding` zeros are added on each side.

    An example is (channels, length). Its parameters are `weight` (outputs, inputs, size) and `bias`
    (outputs,).

    >>> Conv1d(4, 8, 3, stride=2, padding=1).output((4, 100))
    (8, 50)
    """

    size: Size
    stride: Size = 1
    padding: Padding = 0

    _axes = 1

    def output(self, shape: Shape) -> Shape:
        length = _length(self, shape, self.size, self.stride, self.padding)
        _check_channels(self, shape)
        return channels_first((self.outputs, length))

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        # As images of one row.
        image, kernels = (
            ops.reshape(operand, (*operand.shape[:2], 1, *operand.shape[2:]))
            for operand in (x, parameters["weight"])
        )
        bias = parameters["bias"] if self.bias else None
        y = self._convolve(image, kernels, bias, (1, self.stride), (0, self.padding))
        y = ops.reshape(y, (*y.shape[:2], y.shape[3]))
        return y if self.activation is None else ACTIVATIONS[self.activation](y)


class ConvTranspose2d(Layer):
    """The transpose of a 2-d convolution, which makes images larger.

    Each element adds its multiple of a kernel of `size` to the output, `stride` apart from the
    next one; `padding` is cut off on each side, and `output_padding`, less than the stride, is
    added at the end. Its parameters are `weight` (inputs, outputs, height, width) and `bias`
    (outputs,).

    >>> ConvTranspose2d(8, 4, 2, stride=2).output((8, 14, 14))
    (4, 28, 28)
    """

    inputs: Inferred
    outputs: Size
    size: Sizes
    stride: Sizes = 1
    padding: Paddings = 0
    output_padding: Paddings = 0
    bias: Flag = True
    activation: OptionalFunction = None
    initializer: Initial = "lecun"

    inferred = ("inputs", 0)

    @property
    def label(self) -> str:
        return f"ConvTranspose2d({self.inputs}→{self.outputs}, {_size_text(self.size)})"

    def settings_fit(self) -> None:
        strides = _pair(self.stride)
        if any(map(ge, _pair(self.output_padding), strides)):
            wanted = f"less than the stride of {_size_text(strides)}"
            raise setting_error(self, "output_padding", wanted, self.output_padding)

    def output(self, shape: Shape) -> Shape:
        _check_image(self, shape)
        _check_channels(self, shape)
        settings = (self.size, self.stride, self.padding, self.output_padding)
        sizes = tuple(
            (length - 1) * step + size - 2 * cut + more
            for length, size, step, cut, more in zip(shape[1:], *map(_pair, settings), strict=True)
        )
        if min(sizes) < 1:
            raise self.misfit(
                f"got an image of {shape[1]}×{shape[2]}, and its padding leaves nothing of it"
            )
        return channels_first((self.outputs, *sizes))

    def initial(self, generator: Random) -> Parameters:
        (high, wide), (down, along) = _pair(self.size), _pair(self.stride)
        # The number of kernel elements that add up to an element of the output.
        met = max(1, high * wide // (down * along))
        fans = self.inputs * met, self.outputs * high * wide
        shape = (self.inputs, self.outputs, high, wide)
        return draw_weight(self.initializer, generator, shape, fans, self.bias * self.outputs)

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        bias = parameters["bias"] if self.bias else None
        y = ops.conv_transpose2d(
            x, parameters["weight"], bias, self.stride, self.padding, self.output_padding
        )
        return y if self.activation is None else ACTIVATIONS[self.activation](y)


class _Pool(Layer):
    """The base class of poolings over windows of `size`; the default `stride` is `size`."""

    size: Sizes
    stride: OptionalSizes = None

    _op = staticmethod(ops.max_pool2d)
    _axes = 2

    @property
    def label(self) -> str:
        return f"{type(self).__name__}({_size_text(self.size, self._axes)})"

    def output(self, shape: Shape) -> Shape:
        _check_image(self, shape)
        stride = self.size if self.stride is None else self.stride
        return channels_first((shape[0], *_windows(self, shape, self.size, stride, 0)))

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        return self._op(x, self.size, self.stride)


class _Pool1d(_Pool):
    """The base class of poolings of sequences, which are images of one row."""

    size: Size
    stride: OptionalSize = None

    _axes = 1

    def output(self, shape: Shape) -> Shape:
        length = _length(self, shape, self.size, self.stride or self.size)
        self.takes_axis(shape, "channels")
        return channels_first((shape[0], length))

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        image = ops.reshape(x, (*x.shape[:2], 1, x.shape[2]))
        y = self._op(image, (1, self.size), (1, self.stride or self.size))
        return ops.reshape(y, (*y.shape[:2], y.shape[3]))


class MaxPool2d(_Pool):
    """The largest element of each window.

    >>> MaxPool2d(2).output((8, 28, 28))
    (8, 14, 14)
    """


class AvgPool2d(_Pool):
    """The mean of each window.

    >>> AvgPool2d(7).output((8, 28, 28))
    (8, 4, 4)
    """

    _op = staticmethod(ops.avg_pool2d)


class MaxPool1d(_Pool1d):
    """The largest element of each window of a sequence (channels, length).

    >>> MaxPool1d(2).output((8, 100))
    (8, 50)
    """


class AvgPool1d(_Pool1d):
    """The mean of each window of a sequence (channels, length)."""

    _op = staticmethod(ops.avg_pool2d)


class Upsample(Layer):
    """Images (channels, height, width) or sequences (channels, length), `factor` times as large.

    Each element is repeated, or with `linear` interpolated between the centres of elements.

    >>> Upsample(2).output((8, 14, 14)), Upsample(3, linear=True).output((8, 10))
    ((8, 28, 28), (8, 30))
    """

    factor: Size
    linear: Flag = False

    def output(self, shape: Shape) -> Shape:
        if len(shape) not in (2, 3):
            raise self.misfit(f"got the shape {shape}, expected (channels, height, width)")
        self.takes_axis(shape, "channels")
        return channels_first((shape[0], *[size * self.factor for size in shape[1:]]))

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        xp = primitives(x)
        for _ in range(x.ndim - 2):
            size = x.shape[-1]
            at = (np.arange(size * self.factor) + 0.5) / self.factor - 0.5
            at = np.clip(at if self.linear else np.round(at), 0, size - 1)
            shares = np.maximum(1 - np.abs(at[:, None] - np.arange(size)), 0)
            weight = xp.astype(xp.asarray(shares.astype(np.float32), x), xp.dtype(x))
            x = ops.permute(ops.linear(x, weight), (0, 1, x.ndim - 1, *range(2, x.ndim - 1)))
        return x


Over = Annotated[
    Literal["positions"] | None, Check('None or "positions"', lambda x: x in (None, "positions"))
]


class _GlobalPool(Layer):
    """The base class of poolings over all axes but the channels, or but the features."""

    over: Over = None

    def output(self, shape: Shape) -> Shape:
        if len(shape) < 2:
            images = "(channels, height, width) or (channels, length)"
            wanted = "(positions, features)" if self.over else images
            raise self.misfit(f"got the shape {shape}, expected {wanted}")
        axis, advice = "channels", 'give over="positions"'
        if self.over is not None:
            axis, advice = "features", "leave over= out"
        self.takes_axis(shape, axis, advice)
        return features_last(shape[-1:] if self.over else shape[:1])

    def _axes(self, x: Array) -> tuple[int, ...]:
        return tuple(range(2, x.ndim) if self.over is None else range(1, x.ndim - 1))


class GlobalAvgPool(_GlobalPool):
    """The mean of each channel, of images or of sequences.

    With `over="positions"` it is the mean of each feature of (positions, features), such as the
    output of an `Embedding`, `Attention` or `LSTM`.

    >>> GlobalAvgPool().output((8, 7, 7)), GlobalAvgPool().output((8, 100))
    ((8,), (8,))
    >>> GlobalAvgPool(over="positions").output((100, 8))
    (8,)
    """

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        return ops.mean(x, self._axes(x))


class GlobalMaxPool(_GlobalPool):
    """The largest element of each channel, of images or of sequences.

    >>> GlobalMaxPool().output((8, 7, 7)), GlobalMaxPool().output((8, 100))
    ((8,), (8,))
    """

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        return ops.max(x, self._axes(x))


def _check_channels(layer: _Convolution | ConvTranspose2d, shape: Shape) -> None:
    layer.takes_axis(shape, "channels")
    if layer.activation == "softmax":
        advice = 'put nn.Transpose() and "softmax" after it instead'
        layer.takes_axis(channels_first(shape), "features", advice)
    if shape[0] != layer.inputs:
        raise layer.misfit(f"got {shape[0]} channels")
    groups = getattr(layer, "groups", None) or 1
    if layer.inputs % groups or layer.outputs % groups:
        raise layer.misfit(f"{groups} groups do not divide its channels")


def _pair(value: int | Pair) -> Pair:
    return (value, value) if isinstance(value, int) else value


def _size_text(size: int | Pair, axes: int = 2) -> str:
    return "×".join(map(str, _pair(size)[:axes]))


def _check_image(layer: Layer, shape: Shape) -> None:
    if len(shape) != 3:
        raise layer.misfit(f"got the shape {shape}, expected (channels, height, width)")
    layer.takes_axis(shape, "channels")


def _length(layer: Layer, shape: Shape, size: int, stride: int, padding: int = 0) -> int:
    """Return the number of windows along a sequence."""
    if len(shape) != 2:
        raise layer.misfit(f"got the shape {shape}, expected (channels, length)")
    room = shape[1] + 2 * padding
    if room < size:
        raise layer.misfit(f"got a length of {shape[1]}, which its windows do not fit")
    return (room - size) // stride + 1


def _windows(
    layer: Layer, shape: Shape, size: int | Pair, stride: int | Pair, padding: int | Pair
) -> Shape:
    """Return the number of windows along the height and the width."""
    sizes, steps, around = _pair(size), _pair(stride), _pair(padding)
    room = [length + 2 * pad for length, pad in zip(shape[1:], around, strict=True)]
    if room[0] < sizes[0] or room[1] < sizes[1]:
        raise layer.misfit(f"got an image of {shape[1]}×{shape[2]}, which its windows do not fit")
    return tuple(
        (have - one) // step + 1 for have, one, step in zip(room, sizes, steps, strict=True)
    )
