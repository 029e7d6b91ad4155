"""Layers one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anydevice.errors import ConfigurationError
from anydevice.nn.activations import as_layer
from anydevice.nn.layer import Array, Layer, Parameters, Run, Shape

if TYPE_CHECKING:
    from anydevice.transfer.randomness import Random


class Chain(Layer):
    """Layers of which each takes what the one before it gives; names stand for activations.

    Its parameters are a list with those of each layer.

    >>> from anydevice.nn.layers import Dense
    >>> chain = Chain(Dense(64, 128), "relu", Dense(128, 10))
    >>> chain.output((64,)), len(chain.layers)
    ((10,), 3)
    >>> Chain(Dense(64, 128), "relu", Dense(64, 10)).output((64,))
    Traceback (most recent call last):
    anydevice.nn.layer.MisfitError: Chain[2] Dense(64→10): got 128 features
    """

    layers: tuple[Layer, ...]

    def __init__(self, *given: Layer | str, layers: Sequence[Layer | str] = ()) -> None:
        super().__init__(tuple([as_layer(layer) for layer in (*given, *layers)]))

    @property
    def parts(self) -> Sequence[tuple[str, Layer]]:
        return [(f"[{at}]", layer) for at, layer in enumerate(self.layers)]

    @property
    def input_shape(self) -> Shape | None:
        return self.layers[0].input_shape

    def settings_fit(self) -> None:
        if not self.layers:
            raise ConfigurationError("Chain: there are no layers; it takes one or more")

    def output(self, shape: Shape) -> Shape:
        for step, layer in self.parts:
            shape = self.output_of(step, layer, shape)
        return shape

    def initial(self, generator: Random) -> Parameters:
        # A generator for each, so that a layer's numbers do not depend on the sizes before it.
        own = generator.split(len(self.layers))
        return [layer.initial(one) for layer, one in zip(self.layers, own, strict=True)]

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        for (step, layer), own in zip(self.parts, parameters, strict=True):
            x = run.through(step, layer, own, x)
        return x
