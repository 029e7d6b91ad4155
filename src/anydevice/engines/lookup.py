"""The one sentence for a device that a library does not see.

Where a device's data really lies: there, unless the device is a fake one for tests.

Whose array is this? Asks only the libraries that are imported already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anydevice.core.device import Device
from anydevice.core.engine import Engine
from anydevice.engines import library_settings as effects
from anydevice.engines import registry
from anydevice.errors import DeviceNotFoundError


def not_seen(library: str, device: Device, seen: Sequence[Device]) -> DeviceNotFoundError:
    """The error for a device that a library does not have, with those that it has."""
    have = ", ".join(map(str, seen)) or "no device"
    return DeviceNotFoundError(f"{library} has no {device}; it sees {have}")


def place_of(device: Device) -> Device:
    """The device itself; for a fake one, the CPU device that stands in for it.

    JAX can be told to show several CPU devices, and then each fake device has one of its own.
    """
    standing = device.standing
    if standing is None or not standing.facts.details.get("fake"):
        return device
    index = device.index % effects.virtual_cpus() if device.engine == "jax" else 0
    return Device("cpu", index, engine=device.engine)


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
