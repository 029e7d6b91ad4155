"""Layers over images: an example is (channels, height, width)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anydevice import ops
from anydevice.nn.initializers import Constant, Initializer, initializer_of
from anydevice.nn.layer import Array, Layer, Parameters, Run, Shape, check_booleans, check_integers
from anydevice.nn.layers import ACTIVATIONS, check_activation

if TYPE_CHECKING:
    from anydevice.transfer.random.generator import Random

Pair = tuple[int, int]

_ZEROS = Constant(0.0)


class Conv2d(Layer):
    """A 2-d convolution with kernels of `size`; `padding` zeros are added on each side.

    Its parameters are `weight` (outputs, inputs, height, width) and `bias` (outputs,). `size`,
    `stride` and `padding` are numbers, or one for the height and one for the width.

    >>> Conv2d(1, 8, 3, padding=1).output((1, 28, 28))
    (8, 28, 28)
    """

    inputs: int
    outputs: int
    size: int | Pair
    stride: int | Pair = 1
    padding: int | Pair = 0
    bias: bool = True
    activation: str | None = None
    initializer: Initializer | str = "lecun"

    @property
    def label(self) -> str:
        return f"Conv2d({self.inputs}→{self.outputs}, {_shown(self.size)})"

    def settings_fit(self) -> None:
        check_integers(self, inputs=self.inputs, outputs=self.outputs)
        _pairs(self, 1, size=self.size, stride=self.stride)
        _pairs(self, 0, padding=self.padding)
        check_booleans(self, bias=self.bias)
        initializer_of(self.initializer)
        if self.activation is not None:
            check_activation(self.activation)

    def output(self, shape: Shape) -> Shape:
        _check_image(self, shape)
        if shape[0] != self.inputs:
            raise self.misfit(f"got {shape[0]} channels")
        return (self.outputs, *_windows(self, shape, self.size, self.stride, self.padding))

    def initial(self, generator: Random) -> Parameters:
        high, wide = _pair(self.size)
        counts = self.inputs * high * wide, self.outputs * high * wide
        make = initializer_of(self.initializer)
        shape = (self.outputs, self.inputs, high, wide)
        parameters = {"weight": make(generator, shape, *counts)}
        if self.bias:
            parameters["bias"] = _ZEROS(generator, (self.outputs,), *counts)
        return parameters

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        bias = parameters["bias"] if self.bias else None
        y = ops.conv2d(x, parameters["weight"], bias, self.stride, self.padding)
        return y if self.activation is None else ACTIVATIONS[self.activation](y)


class _Pool(Layer):
    """The base class of poolings over windows of `size`; the default `stride` is `size`."""

    size: int | Pair
    stride: int | Pair | None = None

    @property
    def label(self) -> str:
        return f"{type(self).__name__}({_shown(self.size)})"

    def settings_fit(self) -> None:
        _pairs(self, 1, size=self.size)
        if self.stride is not None:
            _pairs(self, 1, stride=self.stride)

    def output(self, shape: Shape) -> Shape:
        _check_image(self, shape)
        stride = self.size if self.stride is None else self.stride
        return (shape[0], *_windows(self, shape, self.size, stride, 0))


class MaxPool2d(_Pool):
    """The largest element of each window.

    >>> MaxPool2d(2).output((8, 28, 28))
    (8, 14, 14)
    """

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        return ops.max_pool2d(x, self.size, self.stride)


class AvgPool2d(_Pool):
    """The mean of each window.

    >>> AvgPool2d(7).output((8, 28, 28))
    (8, 4, 4)
    """

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        return ops.avg_pool2d(x, self.size, self.stride)


def _pair(value: int | Pair) -> Pair:
    return (value, value) if isinstance(value, int) else value


def _pairs(layer: Layer, least: int, **fields: int | Pair) -> None:
    for name, value in fields.items():
        both = value if isinstance(value, tuple) and len(value) == 2 else (value,)
        for one in both:
            check_integers(layer, least, **{name: one})


def _shown(size: int | Pair) -> str:
    return "×".join(map(str, _pair(size)))


def _check_image(layer: Layer, shape: Shape) -> None:
    if len(shape) != 3:
        raise layer.misfit(f"got the shape {shape}, expected (channels, height, width)")


def _windows(
    layer: Layer, shape: Shape, size: int | Pair, stride: int | Pair, padding: int | Pair
) -> Shape:
    """The number of windows along the height and the width."""
    sizes, steps, around = _pair(size), _pair(stride), _pair(padding)
    room = [length + 2 * pad for length, pad in zip(shape[1:], around, strict=True)]
    if room[0] < sizes[0] or room[1] < sizes[1]:
        raise layer.misfit(f"got an image of {shape[1]}×{shape[2]}, which its windows do not fit")
    return tuple(
        (have - one) // step + 1 for have, one, step in zip(room, sizes, steps, strict=True)
    )
