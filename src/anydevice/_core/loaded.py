"""Whether a library is loaded; the only place that asks, so that nothing imports one."""

from __future__ import annotations

import sys
from types import ModuleType


def is_loaded(module: str) -> bool:
    """Whether a module is imported already.

    >>> is_loaded("sys"), is_loaded("a library that is not installed")
    (True, False)
    """
    return sys.modules.get(module) is not None


def is_of(value: object, module: str, name: str) -> bool:
    """Whether a value is an instance of a library's class; False if the library is not imported.

    >>> from collections import OrderedDict
    >>> is_of(OrderedDict(), "collections", "OrderedDict"), is_of(3, "torch", "Tensor")
    (True, False)
    """
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def loaded_library(module: str) -> ModuleType | None:
    """Return a module if it is imported already, else `None`."""
    return sys.modules.get(module)
