"""Parameters of a decoder: of files, or random ones for tests and measurements without files."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from anydevice import ops
from anydevice._core.array import Array
from anydevice._core.device import Device, not_driven
from anydevice._core.dtypes import DTYPES, DType, as_dtype
from anydevice._formats.load import load_joined
from anydevice._llm.description import Description
from anydevice._llm.weights import Parameter, TreePath, parameters_of, plan_parameters, tree_of
from anydevice._machine.choose.scope import one_device
from anydevice._machine.engines import registry
from anydevice._nn.random_choice import folded_seed, mixed
from anydevice._ops.dispatch import primitives

INT32, FLOAT32 = DTYPES["int32"], DTYPES["float32"]
BY_ROW, BY_COLUMN = 0x243F6A89, 0x13198A2F  # odd numbers without a pattern


def load_parameters(
    folder: Any, description: Description, device: Device, dtype: object = None, **options: Any
) -> dict[str, Any]:
    """Load the parameters of a decoder onto a device, from a folder or a GGUF file."""
    return tree_of(load_joined(plan_parameters(folder, description, dtype, **options), device))


def random_parameters(
    description: Description, seed: int = 0, device: Device | None = None, dtype: object = "float32"
) -> dict[str, Any]:
    """Create random parameters on a device; the same seed gives the same numbers everywhere.

    Matrices are uniform and keep the variance of their inputs, norms are near 1, and biases near 0.
    Beside the parameters there are a few copies of one array in memory.
    """
    target = one_device(device)
    if target.engine is None:
        raise not_driven(target)
    engine, wanted = registry.load(target.engine), as_dtype(dtype)
    like = engine.place(np.zeros((1, 1), "float32"), target)
    arrays: dict[TreePath, Any] = {}
    for number, parameter in enumerate(parameters_of(description)):
        kind = FLOAT32 if parameter.wide else wanted
        array = random_array(parameter, description, folded_seed(seed), number, kind, like)
        engine.finish(array)
        arrays[parameter.path] = array
    return tree_of(arrays)


def random_array(
    parameter: Parameter,
    description: Description,
    seed: int,
    number: int,
    dtype: DType,
    like: Array,
) -> Array:
    xp, shape = primitives(like), parameter.shape
    columns = shape[-1] if len(shape) > 1 else 1
    rows = prod(shape) // columns

    def hash_axis(size: int, shape: tuple[int, int], factor: int) -> Array:
        positions = ops.reshape(xp.arange(size, INT32, like), shape)
        key = folded_seed(seed * 1_000_003 + number)
        return mixed(ops.add(ops.multiply(positions, factor), key))

    down = hash_axis(rows, (rows, 1), BY_ROW)
    numbers = mixed(ops.add(down, hash_axis(columns, (1, columns), BY_COLUMN)))
    values = ops.multiply(ops.astype(numbers, "float32"), 2.0**-31)  # from -1 to 1
    middle, width = distribution(parameter, description)
    values = ops.add(ops.multiply(values, width), middle)
    return ops.reshape(ops.astype(values, dtype), shape)


def distribution(parameter: Parameter, description: Description) -> tuple[float, float]:
    """Return the center and the half width of the uniform distribution of a parameter."""
    path, unit = parameter.path, 3**0.5  # half width of a uniform distribution of variance 1
    if path == ("embedding",):
        return 0.0, unit
    if path[-1] == "weight" and "norm" in str(path[-2]):
        return (0.0 if description.norm == "rms1" else 1.0), 0.1 * unit
    if len(parameter.shape) == 1 or str(path[-1]).endswith("bias"):
        return 0.0, 0.1 * unit
    return 0.0, unit * parameter.shape[-1] ** -0.5
