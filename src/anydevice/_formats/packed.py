"""Nested values with tensors, such as the state of an optimizer, as tensors by name and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from anydevice._core.files import parse_json
from anydevice._core.quantized import QuantizedWeight

_FIELDS = ("scheme", "shape", "bits", "block", "zero", "table")
_PLAIN = (bool, int, float, str, type(None))


class PackedTree(dict[str, Any]):
    """Tensors by name; `text` is JSON of the structure, with names in place of the tensors."""

    text: str = "null"


def packed(value: Any) -> PackedTree:
    """Return a nested value of dicts, lists, tuples, numbers, text and tensors, ready for a file.

    >>> tensors = packed({"state": {0: {"step": numpy.ones(())}}, "betas": (0.9, 0.99)})
    >>> list(tensors), unpacked(tensors)["betas"]
    (['0'], (0.9, 0.99))
    """
    tensors = PackedTree()
    tensors.text = json.dumps(_describe(value, tensors))
    return tensors


def unpacked(tensors: PackedTree) -> Any:
    """Return the value that `packed` took; raises `ValueError` or `LookupError` for damage."""
    return _fill(parse_json(tensors.text.encode(), finite=False), tensors)


def _describe(value: Any, tensors: dict[str, Any]) -> Any:
    if isinstance(value, _PLAIN):
        return {"is": value}
    if isinstance(value, Mapping):
        return {"dict": [[_describe(k, tensors), _describe(x, tensors)] for k, x in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_describe(part, tensors) for part in value]}
    if isinstance(value, QuantizedWeight):
        fields = {name: getattr(value, name) for name in _FIELDS}
        return {"weight": _describe([fields, value.arrays], tensors)}
    if hasattr(value, "shape"):
        name = str(len(tensors))
        tensors[name] = value
        return {"tensor": name}
    raise TypeError(f"{type(value).__name__} cannot be saved")


def _fill(described: Any, tensors: Mapping[str, Any]) -> Any:
    ((kind, inside),) = described.items()
    if kind == "is":
        return inside
    if kind == "tensor":
        return tensors[inside]
    if kind == "weight":
        fields, arrays = _fill(inside, tensors)
        return QuantizedWeight(**fields, **arrays)
    if kind == "dict":
        return {_fill(key, tensors): _fill(x, tensors) for key, x in inside}
    parts = [_fill(part, tensors) for part in inside]
    return parts if kind == "list" else tuple(parts)
