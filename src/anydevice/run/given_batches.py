"""A batch as somebody gives it: a pair of arrays of numbers, or an error with what to give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from anydevice.engines.ownership import owner_of
from anydevice.errors import ConfigurationError, TransferError, UnsupportedError
from anydevice.run.precision import cast

ABOUT_WHAT_IS_GIVEN = (ConfigurationError, TransferError, UnsupportedError)
"""Errors that a batch may be the reason for, and whose text gains by its number."""

_SHOWN = 6


def put_before(error: Exception, where: str) -> None:
    """Let the text of an error begin with where it was; twice is once."""
    text = str(error)
    if not text.startswith(where):
        error.args = (f"{where}: {text}", *error.args[1:])


def pair_of(batch: Any) -> tuple[Any, Any]:
    """The x and y of a batch, as arrays of numbers; raises `ConfigurationError` for anything else.

    >>> pair_of([[[1.0, 2.0]], [3]])
    (array([[1., 2.]], dtype=float32), array([3]))
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ConfigurationError(
            f"a batch is a pair (x, y), and this one is {_described(batch)}", source="data"
        )
    return of_numbers(batch[0], "x"), of_numbers(batch[1], "y")


def of_numbers(given: Any, name: str) -> Any:
    """What is given as arrays of numbers that every engine has: float64 becomes float32.

    Lists of numbers become NumPy arrays; whole numbers, and arrays that fit, stay what they are.
    Nests are looked through. Raises `ConfigurationError` for text and for rows of several lengths.
    """
    if isinstance(given, np.ndarray):
        return _of_host(given, name)
    owner = owner_of(given)
    if owner is not None:
        wide = owner.dtype_of(given).name == "float64"
        return cast(given, "float32") if wide else given
    if isinstance(given, list | tuple):
        return _of_rows(given, name)
    if isinstance(given, dict):
        return {key: of_numbers(each, f"{name}[{key!r}]") for key, each in given.items()}
    if isinstance(given, str) or hasattr(given, "__array__"):
        return _of_host(np.asarray(given), name)
    return given


def as_host_array(given: Any, name: str) -> Any:
    """One NumPy array of numbers, however wide. Raises as `of_numbers` does."""
    try:
        array = np.asarray(given)
    except ValueError:
        raise ConfigurationError(
            f"{name} is no array: its rows are not of one length", source=name
        ) from None
    _check_kind(array, name)
    return array


def _of_rows(given: Any, name: str) -> Any:
    first = given
    while isinstance(first, list | tuple) and first:
        first = first[0]
    if isinstance(first, bool | int | float | str | bytes | np.generic):
        return _of_host(as_host_array(given, name), name)
    parts = [of_numbers(each, f"{name}[{at}]") for at, each in enumerate(given)]
    return parts if isinstance(given, list) else tuple(parts)


def _of_host(array: Any, name: str) -> Any:
    _check_kind(array, name)
    if array.dtype.kind == "f" and array.dtype.itemsize > 4:
        with np.errstate(over="ignore"):  # what becomes infinite is found, and named, in training
            return array.astype(np.float32)
    return array


def _check_kind(array: Any, name: str) -> None:
    kind = array.dtype.kind
    if kind in "US" or (kind == "O" and array.size and isinstance(array.flat[0], str)):
        shown = f" ({array.item(0)!r}, …)" if array.size else ""
        raise ConfigurationError(
            f"{name} holds text{shown}; number what it names: "
            f"names, {name} = numpy.unique(texts, return_inverse=True)",
            source=name,
        )
    if kind in "OMm":
        what = "Python objects" if kind == "O" else "times"
        raise ConfigurationError(
            f"{name} holds {what}, not numbers; make it an array of numbers, as in "
            f'numpy.asarray({name}, "float32")',
            source=name,
        )


def _described(batch: Any) -> str:
    if isinstance(batch, Mapping):
        keys = [repr(key) for key in batch]
        few = ", ".join(keys[:_SHOWN]) + (", …" if len(keys) > _SHOWN else "")
        one, other = (keys * 2)[:2] if keys else ("'x'", "'y'")
        return f"a dict with the keys {few}; give two of them, as in (batch[{one}], batch[{other}])"
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {len(batch)}"
    if hasattr(batch, "shape"):
        return (
            f"an array of shape {tuple(batch.shape)}; nn.Batches(x, y, size=32) makes such pairs "
            "of two arrays"
        )
    return f"a {type(batch).__name__}"
