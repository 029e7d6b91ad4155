"""Ops: computations with one signature and one meaning on every engine.

>>> ops.softmax(numpy.array([[1.0, 1.0]])).tolist()
[[0.5, 0.5]]

An op takes arrays of any engine and returns arrays of the same, on the same device. Importing this
module imports no array library. Wrong shapes and dtypes are a `ConfigurationError` that names them,
and a library that runs out of memory is an `OutOfMemoryError` that says what to try.
"""

from typing import TYPE_CHECKING

from anydevice._ops import *  # noqa: F403  each name is listed once, there
from anydevice._ops import __all__ as _ops
from anydevice._ops import namespace as namespace
from anydevice._ops import permute as permute_dims
from anydevice._ops import power as pow  # noqa: A004  the name of the array API standard

__all__ = [*_ops, "namespace", "permute_dims", "pow"]


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # type checkers would take it for a promise of any name
    from anydevice._ops import __getattr__ as __getattr__
