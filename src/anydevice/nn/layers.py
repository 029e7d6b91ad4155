"""Layers that work on the features of each place by itself, and those that only arrange."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from anydevice import ops
from anydevice.nn import settings
from anydevice.nn.activations import ACTIVATIONS, refuse_unknown
from anydevice.nn.initializers import Constant, Initializer, Normal, initializer_of
from anydevice.nn.layer import Array, Layer, Parameters, Run, Shape

if TYPE_CHECKING:
    from anydevice.transfer.randomness import Random

_ONES, _ZEROS = Constant(1.0), Constant(0.0)


class Dense(Layer):
    """`x · weightᵀ + bias` over the last axis, and an activation after it where one is named.

    Its parameters are `weight` (outputs, inputs) and `bias` (outputs,).

    >>> Dense(128, 10).output((5, 128)), Dense(128, 10).label
    ((5, 10), 'Dense(128→10)')
    """

    inputs: int
    outputs: int
    bias: bool = True
    activation: str | None = None
    initializer: Initializer | str = "lecun"

    @property
    def label(self) -> str:
        return f"Dense({self.inputs}→{self.outputs})"

    @property
    def input_shape(self) -> Shape:
        return (self.inputs,)

    def settings_fit(self) -> None:
        self.whole_numbers(inputs=self.inputs, outputs=self.outputs)
        settings.truths(self, bias=self.bias)
        initializer_of(self.initializer)
        if self.activation is not None:
            refuse_unknown(self.activation)

    def output(self, shape: Shape) -> Shape:
        self.takes_features(shape, self.inputs)
        return (*shape[:-1], self.outputs)

    def initial(self, generator: Random) -> Parameters:
        sizes = self.inputs, self.outputs
        make = initializer_of(self.initializer)
        parameters = {"weight": make(generator, (self.outputs, self.inputs), *sizes)}
        if self.bias:
            parameters["bias"] = _ZEROS(generator, (self.outputs,), *sizes)
        return parameters

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        y = ops.linear(x, parameters["weight"], parameters["bias"] if self.bias else None)
        return y if self.activation is None else ACTIVATIONS[self.activation](y)


class Embedding(Layer):
    """A row of features for each whole number; its parameter is `weight` (rows, size).

    >>> Embedding(1000, 64).output((20,))
    (20, 64)
    """

    rows: int
    size: int
    initializer: Initializer | str = Normal(0.02)

    @property
    def label(self) -> str:
        return f"Embedding({self.rows}→{self.size})"

    @property
    def takes_ids_below(self) -> int:
        return self.rows

    def settings_fit(self) -> None:
        self.whole_numbers(rows=self.rows, size=self.size)
        initializer_of(self.initializer)

    def output(self, shape: Shape) -> Shape:
        return (*shape, self.size)

    def initial(self, generator: Random) -> Parameters:
        make = initializer_of(self.initializer)
        return {"weight": make(generator, (self.rows, self.size), self.size, self.rows)}

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        return ops.embedding(parameters["weight"], x)


class PositionEmbedding(Layer):
    """Adds a learned row to the features of each place; its parameter is `weight` (tokens, size).

    It takes (…, tokens, size) with as many tokens as it has rows, or fewer.

    >>> PositionEmbedding(128, 64).output((20, 64))
    (20, 64)
    """

    tokens: int
    size: int
    initializer: Initializer | str = Normal(0.02)

    @property
    def label(self) -> str:
        return f"PositionEmbedding({self.tokens}×{self.size})"

    def settings_fit(self) -> None:
        self.whole_numbers(tokens=self.tokens, size=self.size)
        initializer_of(self.initializer)

    def output(self, shape: Shape) -> Shape:
        self.takes_features(shape, self.size)
        if len(shape) < 2:
            raise self.misfit(f"got the shape {shape}, and it takes (tokens, {self.size})")
        if shape[-2] > self.tokens:
            raise self.misfit(f"got {shape[-2]} tokens, and it has {self.tokens} positions")
        return shape

    def initial(self, generator: Random) -> Parameters:
        make = initializer_of(self.initializer)
        return {"weight": make(generator, (self.tokens, self.size), self.size, self.tokens)}

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        return ops.add(x, ops.part(parameters["weight"], 0, 0, x.shape[-2]))


class LayerNorm(Layer):
    """Features with the mean 0 and the variance 1, then scaled and shifted.

    Its parameters are `weight` and `bias`, (size,) both.
    """

    size: int
    eps: float = 1e-5
    bias: bool = True

    @property
    def label(self) -> str:
        return f"LayerNorm({self.size})"

    def settings_fit(self) -> None:
        self.whole_numbers(size=self.size)
        settings.numbers(self, eps=self.eps)
        settings.truths(self, bias=self.bias)

    def output(self, shape: Shape) -> Shape:
        self.takes_features(shape, self.size)
        return shape

    def initial(self, generator: Random) -> Parameters:
        parameters = {"weight": _ONES(generator, (self.size,), 1, 1)}
        if self.bias:
            parameters["bias"] = _ZEROS(generator, (self.size,), 1, 1)
        return parameters

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        bias = parameters["bias"] if self.bias else None
        return ops.layernorm(x, parameters["weight"], bias, self.eps)


class RMSNorm(Layer):
    """Features whose squares have the mean 1, then scaled; its parameter is `weight` (size,)."""

    size: int
    eps: float = 1e-6

    @property
    def label(self) -> str:
        return f"RMSNorm({self.size})"

    def settings_fit(self) -> None:
        self.whole_numbers(size=self.size)
        settings.numbers(self, eps=self.eps)

    def output(self, shape: Shape) -> Shape:
        self.takes_features(shape, self.size)
        return shape

    def initial(self, generator: Random) -> Parameters:
        return {"weight": _ONES(generator, (self.size,), 1, 1)}

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        return ops.rmsnorm(x, parameters["weight"], self.eps)


class Flatten(Layer):
    """All numbers of an example in one row.

    >>> Flatten().output((3, 4, 5))
    (60,)
    """

    def output(self, shape: Shape) -> Shape:
        return (math.prod(shape),)

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        return ops.reshape(x, (x.shape[0], math.prod(x.shape[1:])))
