"""The array library of the walkthrough in CONTRIBUTING.md: NumPy inside, another outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from anydevice._engines.numpy.primitives import PRIMITIVES
from anydevice.extend import known_dtype


class Array:
    """An array that NumPy does not take for one of its own."""

    __array__ = None

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self._values = values
        self.dtype, self.shape = values.dtype, values.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def numpy(self) -> np.ndarray[Any, Any]:
        return self._values.copy()


def array(values: Any) -> Array:
    return Array(np.array(values))


def empty(shape: tuple[int, ...], dtype: Any) -> Array:
    return Array(np.empty(shape, dtype))


def full(shape: tuple[int, ...], value: float, dtype: Any) -> Array:
    return Array(np.full(shape, value, dtype))


def arange(stop: int, dtype: Any) -> Array:
    return Array(np.arange(stop).astype(dtype))


def astype(x: Array, dtype: Any) -> Array:
    return Array(PRIMITIVES.astype(x._values, known_dtype(dtype)))


def __getattr__(name: str) -> Callable[..., Any]:
    """Every other function: NumPy's primitive, on what is inside."""
    primitive = getattr(PRIMITIVES, name)

    def function(*arguments: Any, **named: Any) -> Any:
        return _wrapped(primitive(*map(_unwrapped, arguments), **named))

    return function


def _unwrapped(x: Any) -> Any:
    if isinstance(x, list):
        return [_unwrapped(each) for each in x]
    return x._values if isinstance(x, Array) else x


def _wrapped(result: Any) -> Any:
    return tuple(map(Array, result)) if isinstance(result, tuple) else Array(result)
