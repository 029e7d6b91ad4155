"""The one table through which a lower layer reaches a higher one, imported on first use.

A device is callable, and moving is a layer above it; the public names load when they are first
touched; an engine loads when it is first needed. All of that passes here, so that this is the
only place of the project that imports by name.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # `import typing` would take longer than the rest of `import anydevice`
if TYPE_CHECKING:
    from typing import Any

_UPWARD = {
    "discover": "anydevice.discovery._discover:discover",
    "added_backends": "anydevice.discovery._discover:added_backends",
    "forget_warnings": "anydevice.choose.scope:forget_warnings",
    "set_process_device": "anydevice.choose.scope:set_process_device",
    "standing": "anydevice.discovery._discover:standing_of",
    "choose_engine": "anydevice.choose.measurements:engine_of",
    "check": "anydevice.discovery.check:check",
    "free_memory": "anydevice.hardware.readers:free_memory",
    "native": "anydevice.engines.registry:native",
    "check_budget": "anydevice.memory.limits:check_budget",
    "set_budget": "anydevice.memory.limits:set_budget",
    "to_device": "anydevice.transfer.moving:to_device",
    "trust_kernels": "anydevice.check.trusted_kernels:load_into_table",
}

_reached: dict[str, Any] = {}


def load(target: str) -> Any:
    """The object at `"package.module:name"`, imported now if it was not yet.

    >>> load("anydevice.errors:AnyDeviceError").__name__
    'AnyDeviceError'
    """
    module, _, name = target.partition(":")
    found = import_module(module)
    return getattr(found, name) if name else found


def reach(name: str) -> Any:
    """The function of a higher layer that the table knows as `name`."""
    if name not in _reached:
        _reached[name] = load(_UPWARD[name])
    return _reached[name]
