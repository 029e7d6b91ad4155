"""Nested values with tensors, such as the state of an optimizer, as tensors by name and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from anydevice._core.files import parse_json

_PLAIN = (bool, int, float, str, type(None))


class Packed(dict[str, Any]):
    """Tensors by name; `text` is JSON of all else, in which the names stand for the tensors."""

    text: str = "null"


def packed(value: Any) -> Packed:
    """Return a nested value of dicts, lists, tuples, numbers, text and tensors, ready for a file.

    >>> import numpy
    >>> found = packed({"state": {0: {"step": numpy.ones(())}}, "betas": (0.9, 0.99)})
    >>> list(found), unpacked(found)["betas"]
    (['0'], (0.9, 0.99))
    """
    found = Packed()
    found.text = json.dumps(_describe(value, found))
    return found


def unpacked(found: Packed) -> Any:
    """Return the value that `packed` took.

    Raises `ValueError` or `LookupError` for a damaged one.
    """
    return _fill(parse_json(found.text.encode(), finite=False), found)


def _describe(value: Any, found: dict[str, Any]) -> Any:
    if isinstance(value, _PLAIN):
        return {"is": value}
    if isinstance(value, Mapping):
        return {"dict": [[_describe(k, found), _describe(x, found)] for k, x in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_describe(each, found) for each in value]}
    if hasattr(value, "shape"):
        name = str(len(found))
        found[name] = value
        return {"tensor": name}
    raise TypeError(f"{type(value).__name__} cannot be saved")


def _fill(described: Any, found: Mapping[str, Any]) -> Any:
    ((kind, inside),) = described.items()
    if kind == "is":
        return inside
    if kind == "tensor":
        return found[inside]
    if kind == "dict":
        return {_fill(key, found): _fill(x, found) for key, x in inside}
    parts = [_fill(each, found) for each in inside]
    return parts if kind == "list" else tuple(parts)
