"""What each op must give, in float64 NumPy: the one reference for every engine.

It is written from the ops' definitions and calls none of them. Arrays come in as float64, int64 or
bool; no function changes what it is given. What an infinite or undefined number leads to follows
from the arithmetic of IEEE 754, so these functions run with NumPy's warnings off:

>>> import numpy
>>> call("softmax", numpy.array([0.0, numpy.inf]))
array([nan, nan])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from anydevice.check.reference_layers import LAYERS
from anydevice.check.reference_updates import UPDATES
from anydevice.core.dtypes import as_dtype
from anydevice.errors import ConfigurationError

Array = Any
Axis = int | Sequence[int] | None

_ERF = np.vectorize(math.erf, otypes=[np.float64])


def call(op: str, *arguments: Any, **options: Any) -> Any:
    """What the op must give for these float64, int64 and bool arrays.

    Raises `ConfigurationError` for a name that no op has.
    """
    if op not in REFERENCES:
        raise ConfigurationError(
            f"there is no op {op!r}; the ops are {', '.join(sorted(REFERENCES))}", "op"
        )
    with np.errstate(all="ignore"):
        return REFERENCES[op](*arguments, **options)


# One array


def _rsqrt(x: Array) -> Array:
    return 1 / np.sqrt(x)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)


def _gelu(x: Array, approximate: bool = False) -> Array:
    if approximate:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return 0.5 * x * (1 + np.tanh(inner))
    return 0.5 * x * (1 + _ERF(x / math.sqrt(2)))


def _swiglu(gate: Array, up: Array) -> Array:
    return _silu(gate) * up


# Along axes


def _axes(axis: Axis) -> int | tuple[int, ...] | None:
    return axis if axis is None or isinstance(axis, int) else tuple(axis)


def _along(function: Callable[..., Array]) -> Callable[..., Array]:
    def reduce(x: Array, axis: Axis = None, keepdims: bool = False) -> Array:
        return function(x, axis=_axes(axis), keepdims=keepdims)

    return reduce


def _argmax(x: Array, axis: int = -1) -> Array:
    return np.argmax(x, axis)  # the first of equal ones, and what is not a number before all


def _top_k(x: Array, k: int) -> tuple[Array, Array]:
    # By size, what is not a number first; equal ones stay in their order.
    order = np.argsort(-x, axis=-1, kind="stable")
    undefined = np.take_along_axis(np.isnan(x), order, -1)
    first = np.argsort(~undefined, axis=-1, kind="stable")
    chosen = np.take_along_axis(order, first, -1)[..., :k]
    return np.take_along_axis(x, chosen, -1), chosen


# Shapes and types


def _take(x: Array, indices: Array, axis: int = 0) -> Array:
    axis %= x.ndim
    size = x.shape[axis]
    inside = (indices >= 0) & (indices < size)
    missing = np.nan if x.dtype.kind == "f" else 0
    before, after = (1,) * axis, (1,) * (x.ndim - axis - 1)
    shape = x.shape[:axis] + indices.shape + x.shape[axis + 1 :]
    if size == 0:
        return np.full(shape, missing, x.dtype)
    taken = np.take(x, np.where(inside, indices, 0), axis)
    return np.where(inside.reshape(before + indices.shape + after), taken, missing).astype(x.dtype)


def _part(x: Array, axis: int, start: int, stop: int, step: int = 1) -> Array:
    return np.moveaxis(np.moveaxis(x, axis, 0)[start:stop:step], 0, axis)


def _astype(x: Array, dtype: Any) -> Array:
    """The same numbers; those that become whole ones lose what is behind the point."""
    row = as_dtype(dtype)
    if row.kind == "bool":
        return x != 0
    if row.kind in ("int", "uint"):
        return np.trunc(x).astype(np.int64)
    return np.asarray(x, np.float64)


REFERENCES: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "power": np.power,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": np.equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "where": np.where,
    "negative": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "floor": np.floor,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "rsqrt": _rsqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "erf": _ERF,
    "isnan": np.isnan,
    "logical_not": np.logical_not,
    "relu": lambda x: np.maximum(x, 0),
    "silu": _silu,
    "gelu": _gelu,
    "swiglu": _swiglu,
    "sum": _along(np.sum),
    "mean": _along(np.mean),
    "max": _along(np.max),
    "min": _along(np.min),
    "argmax": _argmax,
    "top_k": _top_k,
    "take": _take,
    "reshape": np.reshape,
    "permute": np.transpose,
    "concat": lambda arrays, axis=0: np.concatenate(arrays, axis),
    "part": _part,
    "broadcast_to": np.broadcast_to,
    "astype": _astype,
    **LAYERS,
    **UPDATES,
}
"""Every public op by name, with the arguments that it takes."""
