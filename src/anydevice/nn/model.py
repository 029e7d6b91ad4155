"""A model: a layer together with its parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from anydevice.choose.scope import device as choose_device
from anydevice.core.device import Device
from anydevice.errors import ConfigurationError
from anydevice.nn.activations import as_layer
from anydevice.nn.chain import Chain
from anydevice.nn.layer import Array, Layer, Parameters, Run, Shape
from anydevice.nn.likely_shapes import likely_shape
from anydevice.nn.placing import as_batch, kind_of
from anydevice.nn.printing import table_of
from anydevice.nn.trees import difference, leaves
from anydevice.transfer.containers import register_type
from anydevice.transfer.moving import to_device
from anydevice.transfer.randomness import rng

_APPLIED = Run()


class Model:
    """A layer bound to its parameters: `model(x)` is what it gives for a batch.

    `input_shape` is that of one example, without the batch; it may be left out where the first
    layer says it. All shapes are checked at once, and a layer that does not fit is named. The
    parameters depend on the seed alone: they are the same on every engine and device. Without a
    `device`, they lie on the one that `anydevice.device()` chooses.

    >>> import anydevice, numpy
    >>> from anydevice import nn
    >>> cpu = anydevice.device("cpu", engine="numpy")
    >>> layer = nn.Chain(nn.Dense(64, 128), "relu", nn.Dense(128, 10))
    >>> model = nn.Model(layer, seed=0, device=cpu)
    >>> model(numpy.ones((2, 64), numpy.float32)).shape
    (2, 10)
    >>> print(model)
    model                 output  parameters     bytes
    [0]    Dense(64→128)  128          8,320  32.5 KiB
    [1]    relu           128              0       0 B
    [2]    Dense(128→10)  10           1,290   5.0 KiB
    Chain  64 → 10                     9,610  37.5 KiB

    A model is a tree: `device(model)` and `to_device(model, "cpu")` give a model there, and
    `device_of` and `to_numpy` take it. It never changes; `with_parameters` gives another.

    Raises `ConfigurationError` where shapes do not fit.
    """

    def __init__(
        self,
        layer: Layer | str,
        input_shape: int | Sequence[int] | None = None,
        seed: int = 0,
        device: Device | str | None = None,
    ) -> None:
        self.layer = as_layer(layer)
        self.input_shape = _shape_of(self.layer, input_shape)
        self.output_shape = self.layer.output(self.input_shape)
        # Drawn in the host's memory and moved together: many small copies would take longer.
        drawn = self.layer.initial(rng(seed, Device("cpu", 0, engine="numpy")))
        self.parameters: Parameters = to_device(drawn, choose_device(device))
        self._kind = kind_of(self.parameters)

    def __call__(self, x: Array) -> Array:
        """What the model gives for a batch, as in use and not in training.

        An array of the library that the parameters are in is taken as it is. One of NumPy, or a
        nest of numbers, is placed on their device first, and floating numbers become their type.

        >>> from anydevice import nn
        >>> nn.build(nn.Dense(2, 3), device="cpu")([[1.0, 2.0]]).shape
        (1, 3)

        Raises `ConfigurationError` for arrays of other libraries and of shapes that do not fit.
        """
        if type(x) is not self._kind:
            x = as_batch(x, self.layer, self.input_shape, self.parameters)
        return self.apply(self.parameters, x, _APPLIED)

    def apply(self, parameters: Parameters, x: Array, run: Run = _APPLIED) -> Array:
        """What its layer gives with these parameters; the function that gradients are taken of."""
        try:
            return self.layer.apply(parameters, x, run)
        except ConfigurationError:
            if hasattr(x, "shape"):
                self.layer.output(tuple(x.shape[1:]))  # says more, where it is the shape of x
            raise

    def with_parameters(self, parameters: Parameters) -> Model:
        """The model with other parameters in the same nest, of the same shapes.

        They may be on another device, and of another element type. Raises `ConfigurationError`,
        with the first place that differs.
        """
        found = difference(self.parameters, parameters)
        if found is not None:
            raise ConfigurationError(
                f"these are no parameters of this model: {found}", source="parameters"
            )
        return bound(self.layer, self.input_shape, parameters)

    def with_layer(self, layer: Layer) -> Model:
        """The model with a layer that takes the same parameters, such as one that recomputes."""
        return bound(layer, self.input_shape, self.parameters)

    @property
    def parameter_count(self) -> int:
        """How many numbers the parameters are."""
        return sum(math.prod(leaf.shape) for leaf in leaves(self.parameters))

    def __str__(self) -> str:
        return table_of(self.layer, self.input_shape, self.parameters)

    def __repr__(self) -> str:
        return f"Model({self.layer!r}, input_shape={self.input_shape})"


def build(
    *layers: Layer | str,
    input_shape: int | Sequence[int] | None = None,
    seed: int = 0,
    device: Device | str | None = None,
) -> Model:
    """A model of these layers, one behind the other; see `Model`.

    >>> from anydevice import nn
    >>> nn.build(nn.Dense(4, 8), "relu", nn.Dense(8, 2), device="cpu").output_shape
    (2,)
    """
    layer = layers[0] if len(layers) == 1 else Chain(*layers)
    return Model(layer, input_shape, seed, device)


def bound(layer: Layer, input_shape: Shape, parameters: Parameters) -> Model:
    """The model of a layer with parameters that are there already; draws none."""
    model = Model.__new__(Model)
    model.layer = layer
    model.input_shape = input_shape
    model.output_shape = layer.output(input_shape)
    model.parameters = parameters
    model._kind = kind_of(parameters)
    return model


def _shape_of(layer: Layer, given: int | Sequence[int] | None) -> Shape:
    shape = layer.input_shape if given is None else given
    if shape is None:
        raise ConfigurationError(
            f"{layer.label} takes examples of many shapes; name one, without the batch, as in "
            f"input_shape={likely_shape(layer)}",
            source="input_shape",
        )
    sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ConfigurationError(
            f"input_shape is the sizes of one example, without the batch, not {given!r}",
            source="input_shape",
        )
    return sizes


def _parts_of(model: Model) -> dict[str, Any]:
    return {"parameters": model.parameters}


def _model_again(model: Model, parts: dict[str, Any]) -> Model:
    return bound(model.layer, model.input_shape, parts["parameters"])


register_type(Model, _parts_of, _model_again)
