"""A model: a layer together with its parameters.

What a model is called with, as an array of the library that its parameters are in.

A shape of an example to show to somebody who has named none.

A model as a table: each layer with the shape it gives, its parameters and their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from anydevice.choose.scope import device as choose_device
from anydevice.core.device import Device
from anydevice.core.engine import Engine
from anydevice.core.text import format_size
from anydevice.core.trees import difference, first_leaf, leaves
from anydevice.engines import registry
from anydevice.engines.lookup import owner_of
from anydevice.errors import ConfigurationError
from anydevice.nn.layer import Array, Layer, Parameters, Run, Shape
from anydevice.nn.layers import Chain, TiedEmbedding, as_layer
from anydevice.ops.dispatch import primitives
from anydevice.transfer.moving import device_of, is_array, to_device
from anydevice.transfer.random.generator import rng
from anydevice.transfer.trees.containers import register_type

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


_NUMBERS = (int, float, np.number, np.bool_)


def parameters_device(parameters: Parameters) -> Device | None:
    """Where parameters are, served by their library; `None` where there are none."""
    place, owner = device_of(leaves(parameters)), owner_of(first_leaf(parameters))
    return None if place is None or owner is None else place.served_by(owner.name)


def kind_of(parameters: Parameters) -> type | None:
    """The type of the first parameter: arrays of this type are taken as they are."""
    first = first_leaf(parameters)
    return None if first is None else type(first)


def as_batch(x: Any, layer: Layer, input_shape: Shape, parameters: Parameters) -> Array:
    """What is given for a batch as an array that goes with the parameters.

    Arrays of NumPy and nests of numbers are placed where the parameters are, and floating numbers
    become their type. What is no array stays, and is left for the layer to refuse. Raises
    `ConfigurationError` for a single number, numbers that make no array, and an array of another
    library.
    """
    given = x
    if isinstance(x, list | tuple) and _is_of_numbers(x):
        x = _array_of(x, layer.takes_ids_below is not None, input_shape)
    elif isinstance(x, _NUMBERS):
        raise ConfigurationError(
            f"a model takes a batch, here of examples of the shape {input_shape}, and this is the "
            f"single number {x}",
            source="x",
        )
    first = first_leaf(parameters)
    if not (is_array(x) and is_array(first)):
        return x
    owner, wanted = owner_of(x), owner_of(first)
    assert owner is not None
    assert wanted is not None
    if owner is wanted and x is given:
        return x
    if owner.name != "numpy":
        theirs, mine = (registry.row_of(engine.name).label for engine in (owner, wanted))
        raise ConfigurationError(
            f"this is an array of {theirs}, and the model's parameters are of {mine}; move one of "
            "them with anydevice.to_device(…, device, convert=True)",
            source="x",
        )
    return _placed(x, first, wanted)


def _placed(x: Array, like: Array, owner: Engine) -> Array:
    """An array of NumPy where another one is; floating numbers become its type."""
    place = device_of(like)
    assert place is not None
    home = place.served_by(owner.name)
    xp, dtype = primitives(like), primitives(like).dtype(like)
    floating = primitives(x).dtype(x).kind == "float" and dtype.kind == "float"
    # Floating numbers become the parameters' type anyway: narrowing them is what was asked for.
    there = to_device(x, home, convert=True, narrow=floating)
    return xp.astype(there, dtype) if floating else there


def _is_of_numbers(x: Any) -> bool:
    """Whether a nest begins with a number, or with an array of NumPy, at some depth."""
    while isinstance(x, list | tuple) and x:
        x = x[0]
    return isinstance(x, (*_NUMBERS, list, tuple)) or type(x) is np.ndarray


def _array_of(x: Any, ids: bool, input_shape: Shape) -> Array:
    """A nest of numbers as an array: ids as int32 where they fit, all else as float32."""
    try:
        array = np.asarray(x)
        if not ids or array.dtype.kind not in "iu":
            return array.astype("float32")
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"these numbers make no batch of examples of the shape {input_shape}: {error}",
            source="x",
        ) from None
    small = array.astype("int32")
    return small if (small == array).all() else array


def likely_shape(layer: Layer) -> Shape:
    """A shape that the layer takes, or at least its first part, of those that are often met.

    >>> from anydevice import nn
    >>> likely_shape(nn.Conv2d(1, 8, 3)), likely_shape(nn.LayerNorm(64))
    ((1, 28, 28), (128, 64))
    """
    for shape in _often(layer):
        try:
            layer.output(shape)
        except ConfigurationError:
            continue
        return shape
    return likely_shape(layer.parts[0][1]) if layer.parts else (28, 28)


def _often(layer: Layer) -> Iterator[Shape]:
    if layer.takes_ids_below is not None:
        yield from ((128,), (16,), (1,))
        return
    yield from ((28, 28), (3, 28, 28))
    for features in _features(layer):
        yield (features, 28, 28)
        yield (features, 224, 224)
        yield from ((128, features), (16, features), (1, features))
        yield (features,)


def _features(layer: Layer) -> Iterator[int]:
    """The numbers of features and channels that the parts of a layer name, from the first on."""
    for name in ("inputs", "size"):
        value = getattr(layer, name, None)
        if isinstance(value, int):
            yield value
    for _, part in layer.parts:
        yield from _features(part)


_HEADINGS = ("model", "", "output", "parameters", "bytes")
_TO_THE_RIGHT = (3, 4)

Row = tuple[str, ...]


def table_of(layer: Layer, shape: Shape, parameters: Parameters) -> str:
    """The table of a layer that takes examples of this shape, with these parameters.

    Every layer of a chain has a row, also of one inside another; what is inside a block is counted
    with the block.
    """
    rows = [_HEADINGS, *_rows(layer, shape, parameters, "")]
    output = layer.output(shape)
    rows.append(_row(type(layer).__name__, f"{_sizes(shape)} → {_sizes(output)}", "", parameters))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _rows(layer: Layer, shape: Shape, parameters: Parameters, path: str) -> Iterator[Row]:
    if isinstance(layer, TiedEmbedding):
        yield _row(path, layer.label, _sizes(layer.output(shape)), parameters["weight"])
        inner = (*shape, layer.size)
        yield from _rows(layer.inside, inner, parameters["inside"], f"{path}.inside")
        return
    if not isinstance(layer, Chain):
        yield _row(path, layer.label, _sizes(layer.output(shape)), parameters)
        return
    for (step, part), own in zip(layer.parts, parameters, strict=True):
        yield from _rows(part, shape, own, path + step)
        shape = part.output(shape)


def _row(path: str, label: str, output: str, parameters: Parameters) -> Row:
    arrays = leaves(parameters)
    count = sum(math.prod(array.shape) for array in arrays)
    size = sum(math.prod(array.shape) * primitives(array).dtype(array).itemsize for array in arrays)
    return path, label, output, f"{count:,}", format_size(size)


def _sizes(shape: Shape) -> str:
    return "×".join(map(str, shape)) or "1"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        cell.rjust(width) if at in _TO_THE_RIGHT else cell.ljust(width)
        for at, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()
