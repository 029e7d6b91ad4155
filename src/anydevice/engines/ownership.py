"""Whose array is this? Asks only the libraries that are imported already."""

from __future__ import annotations

from typing import Any

from anydevice.core.engine import Engine
from anydevice.engines import registry

_owners: dict[type, Engine | None] = {}


def owner_of(x: Any) -> Engine | None:
    """The engine whose array `x` is; `None` where it is not an array of any imported library."""
    kind = type(x)
    if kind.__module__ == "builtins":
        return None
    if kind not in _owners:
        engines = (registry.load(name) for name in registry.loaded_engines())
        _owners[kind] = next((engine for engine in engines if engine.owns(x)), None)
    return _owners[kind]
