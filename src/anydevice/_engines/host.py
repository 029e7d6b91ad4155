"""Host arrays before a copy: made contiguous, narrowed if asked, or rejected."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any

import numpy as np

from anydevice._core.dtypes import DTYPES, DType, as_dtype
from anydevice._core.engine import Absent
from anydevice._core.text import warn
from anydevice.errors import ConfigurationError, UnsupportedError

Array = np.ndarray[Any, Any]

NARROWER = {"float64": "float32", "complex128": "complex64", "int64": "int32", "uint64": "uint32"}
"""The 64-bit dtypes, and what each becomes in a library that has none."""

_warned = False


@lru_cache(maxsize=256)
def known_dtype(spec: object) -> DType:
    """Return the row of a library's own dtype; raises `UnsupportedError` if there is none."""
    try:
        return as_dtype(spec)
    except ConfigurationError as error:
        instead = f"convert the array to one of {', '.join(DTYPES)}"
        raise no_dtype(f"{spec} is not a dtype that can be moved", instead) from error


def no_dtype(what: str, instead: str) -> UnsupportedError:
    """Return the error for a dtype that a library cannot store or compute with."""
    return Absent(what, instead, code="no_dtype").error()


def lacking(library: str, dtype: DType) -> UnsupportedError:
    """Return the error for a dtype that a library does not have at all."""
    return no_dtype(f"{library} has no {dtype}", "convert the array, or use another engine")


def plain(x: Array) -> Array:
    """Return the array in C order, native byte order and aligned, copied only if needed."""
    _refuse_lossy(x)
    if x.flags.c_contiguous and x.flags.aligned and x.dtype.isnative:
        return np.asarray(x)
    return private(x)


def private(x: Array) -> Array:
    """Return the same as `plain`, always in new memory."""
    _refuse_lossy(x)
    return np.array(x, dtype=x.dtype.newbyteorder("="), order="C")


def _refuse_lossy(x: Array) -> None:
    known_dtype(x.dtype)  # raises if no device has it
    if isinstance(x, np.ma.MaskedArray):
        raise Absent(
            "a masked array would lose its mask", instead="call its filled() method first"
        ).error()


def narrowed(
    x: Array, lacks: Collection[str], *, why: str, remedy: str, narrow: bool = False
) -> Array:
    """Return the array in a dtype of a library that `lacks` some: see `Engine.place`."""
    wide = known_dtype(x.dtype).name
    if wide not in lacks:
        return x
    small = NARROWER[wide]
    if x.dtype.kind in "iu":
        return _narrowed_integers(x, small, why=why, remedy=remedy, narrow=narrow)
    if not narrow:
        raise no_dtype(
            f"{why}, so this {wide} array would be rounded to {small}",
            f"{remedy}, or pass narrow=True to have it rounded",
        )
    try:
        with np.errstate(over="raise", under="ignore", invalid="ignore"):
            return x.astype(small)
    except FloatingPointError as error:
        raise no_dtype(
            f"{why}, and this {wide} array holds numbers that are too large for {small}",
            f"{remedy}; narrow=True rounds, but never to infinity",
        ) from error


def _narrowed_integers(x: Array, small: str, *, why: str, remedy: str, narrow: bool) -> Array:
    limits = np.iinfo(small)
    if x.size and (x.min() < limits.min or x.max() > limits.max):
        raise no_dtype(
            f"{why}, and this {x.dtype.name} array holds numbers that do not fit {small}",
            f"{remedy}; narrow=True rounds floats, but changes no integer",
        )
    global _warned
    if not narrow and not _warned:
        _warned = True
        fitting = f"{x.dtype.name} arrays whose numbers fit become {small}"
        warn(f"{why}: {fitting}; {remedy}, or pass narrow=True (this is said once)")
    return x.astype(small)


def forget_warning() -> None:
    """Warn again when integers are narrowed next."""
    global _warned
    _warned = False
