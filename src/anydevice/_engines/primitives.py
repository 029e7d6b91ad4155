"""The primitives that engines share, written once over what a library's own module has."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import numpy as np

from anydevice._core.dtypes import DTYPES, DType
from anydevice._core.primitives import OPTIONAL_ONE, OPTIONAL_TWO
from anydevice._engines.host import known_dtype

A = TypeVar("A")
Axes = int | tuple[int, ...]
Function = Callable[..., Any]

_ONE_ARRAY = (
    "abs", "negative", "sign", "floor", "exp", "log", "sqrt", "rsqrt", "sin", "cos", "tanh",
    "sigmoid", "erf", "isnan", "logical_not",
)  # fmt: skip
_TWO_ARRAYS = (
    "add", "subtract", "multiply", "divide", "pow", "maximum", "minimum", "equal", "less",
    "less_equal", "logical_and", "logical_or",
)  # fmt: skip
_NAMES_IN_NUMPY = {"pow": "power", "permute_dims": "transpose", "atan2": "arctan2"}
_NAMES_IN_NUMPY |= {name: f"arc{name[1:]}" for name in OPTIONAL_ONE if name[0] == "a"}
_NAMES_IN_NUMPY |= {f"bitwise_{side}_shift": f"{side}_shift" for side in ("left", "right")}


def functions_of(xp: Any, wrap: Callable[[Function], Function] | None = None) -> Function:
    """Return a function from the name of a primitive to the function of a NumPy-like module."""

    def make(name: str) -> Function:
        theirs = _NAMES_IN_NUMPY.get(name, name)
        function: Function = getattr(xp, theirs if hasattr(xp, theirs) else name)
        return function if wrap is None else wrap(function)

    return make


def _compute_wide(function: Function) -> Function:
    """Return a method that computes 16-bit numbers in float32, and rounds once."""

    def run(self: Any, *operands: Any) -> Any:
        dtype = next(self.dtype(x) for x in operands if hasattr(x, "dtype"))
        if dtype.kind != "float" or dtype.bits >= 32:
            return function(*operands)
        wide = [self.astype(x, DTYPES["float32"]) if hasattr(x, "dtype") else x for x in operands]
        return self.astype(function(*wide), dtype)

    return run


class BasePrimitives(Generic[A]):
    """Primitives of one engine: a subclass adds what is missing here, and replaces what differs.

    The elementwise ones are static functions. For each that the class does not define, `one` and
    `two` make it from its name; an optional one only if the library has it. `take` and
    `take_along_axis` are for libraries that do not check indices, and need the three private
    functions: all indices are read, clamped to the axis, and elements that were out of range are
    replaced.
    """

    abs: Callable[..., A]
    negative: Callable[..., A]
    sign: Callable[..., A]
    floor: Callable[..., A]
    exp: Callable[..., A]
    log: Callable[..., A]
    sqrt: Callable[..., A]
    rsqrt: Callable[..., A]
    sin: Callable[..., A]
    cos: Callable[..., A]
    tanh: Callable[..., A]
    sigmoid: Callable[..., A]
    erf: Callable[..., A]
    isnan: Callable[..., A]
    logical_not: Callable[..., A]
    add: Callable[..., A]
    subtract: Callable[..., A]
    multiply: Callable[..., A]
    divide: Callable[..., A]
    pow: Callable[..., A]
    maximum: Callable[..., A]
    minimum: Callable[..., A]
    equal: Callable[..., A]
    less: Callable[..., A]
    less_equal: Callable[..., A]
    logical_and: Callable[..., A]
    logical_or: Callable[..., A]
    full: Callable[..., A]
    reshape: Callable[..., A]
    where: Callable[..., A]
    _clamp: Callable[..., tuple[A, A]]
    """Return which indices of any integer dtype are within a size, and all clamped to it."""
    _take: Callable[..., A]
    _take_along_axis: Callable[..., A]

    def __init_subclass__(cls, *, one: Function, two: Function) -> None:
        for names, make in ((_ONE_ARRAY, one), (_TWO_ARRAYS, two)):
            for name in names:
                if name not in vars(cls):
                    setattr(cls, name, staticmethod(make(name)))
        for optional, make in ((OPTIONAL_ONE, one), (OPTIONAL_TWO, two)):
            for name in optional:
                with suppress(AttributeError):
                    setattr(cls, name, _compute_wide(vars(cls).get(name) or make(name)))

    def dtype(self, x: Any) -> DType:
        return known_dtype(x.dtype)

    def slice_axis(self, x: Any, axis: int, start: int, stop: int, step: int = 1) -> A:
        return x[(slice(None),) * (axis % x.ndim) + (slice(start, stop, step),)]

    def take(self, x: Any, indices: Any, axis: int) -> A:
        axis %= x.ndim
        before, size, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
        nothing = missing_value(self.dtype(x))
        if not size:
            return self.full((*before, *indices.shape, *after), nothing, self.dtype(x), x)
        inside, safe = self._clamp(indices, size)
        elements = self._take(x, safe, axis)
        shape = (*indices.shape, *(1,) * len(after))
        return self.where(self.reshape(inside, shape), elements, nothing)

    def take_along_axis(self, x: Any, indices: Any, axis: int) -> A:
        axis %= x.ndim
        if not x.shape[axis]:
            return self._missing_along_axis(x, indices, axis)
        inside, safe = self._clamp(indices, x.shape[axis])
        elements = self._take_along_axis(x, safe, axis)
        return self.where(inside, elements, missing_value(self.dtype(x)))

    def _missing_along_axis(self, x: Any, indices: Any, axis: int) -> A:
        """Return the result of `take_along_axis` on an axis without elements."""
        shape = np.broadcast_shapes((*x.shape[:axis], 1, *x.shape[axis + 1 :]), indices.shape)
        return self.full(shape, missing_value(self.dtype(x)), self.dtype(x), x)


def missing_value(dtype: DType) -> float:
    """Return the element for an index out of range: NaN, or `False`, which is 0 for integers."""
    return math.nan if dtype.kind in ("float", "complex") else False
