"""Numbers beside arrays: Python's own, and those of NumPy, which are taken for the same."""

from __future__ import annotations

import sys
from typing import Any

from anydevice.core.dtypes import DTYPES
from anydevice.ops.dispatch import known

NUMBERS = (int, float, bool)

_MAKERS = {"bool": bool, "int": int, "uint": int, "float": float}


def plain_number(x: Any) -> Any:
    """A number of NumPy's as one of Python's, which has no element type; anything else as it is.

    >>> import numpy
    >>> plain_number(1 / numpy.sqrt(64)), plain_number(numpy.int8(3)), plain_number("text")
    (0.125, 3, 'text')
    """
    if type(x) in NUMBERS or known(x) is not None:
        return x
    maker = _maker_of(type(x))
    return x if maker is None else _MAKERS[maker](x)


def plain_numbers(*numbers: Any) -> tuple[Any, ...]:
    """Each of them as `plain_number` gives it."""
    return tuple([plain_number(x) for x in numbers])


def in_words(value: Any) -> str:
    """A value as an error shows it: numbers and texts themselves, of anything else the type.

    >>> import numpy
    >>> in_words(0.5), in_words(numpy.ones(3))
    ('0.5', 'a numpy.ndarray')
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return repr(value)
    return f"a {kind.__name__}" if kind.__module__ == "builtins" else _with_module(kind)


def _with_module(kind: type) -> str:
    return f"a {kind.__module__}.{kind.__name__}"


def _maker_of(kind: type) -> str | None:
    """What makes a Python number of NumPy's of this type; `None` where it is no such number."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not issubclass(kind, numpy.generic):
        return None
    row = DTYPES.get(numpy.dtype(kind).name)
    return row.kind if row is not None and row.kind in _MAKERS else None


# PyTorch's compiler runs this while it looks through the caller, and keeps the answer.
_maker_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
