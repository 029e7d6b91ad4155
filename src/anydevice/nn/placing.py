"""What a model is called with, as an array of the library that its parameters are in."""

from __future__ import annotations

from typing import Any

import numpy as np

from anydevice.core.device import Device
from anydevice.core.engine import Engine
from anydevice.engines import registry
from anydevice.engines.ownership import owner_of
from anydevice.errors import ConfigurationError
from anydevice.nn.layer import Array, Layer, Parameters, Shape
from anydevice.nn.trees import first_leaf, leaves
from anydevice.ops.dispatch import primitives
from anydevice.transfer.moving import device_of, is_array, to_device

_NUMBERS = (int, float, np.number, np.bool_)


def home_of_parameters(parameters: Parameters) -> Device | None:
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
