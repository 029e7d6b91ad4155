"""The engine of an array, and the device that its data is on."""

from __future__ import annotations

from typing import Any

from anydevice.core import hooks
from anydevice.core.device import Device
from anydevice.core.engine import Engine
from anydevice.engines import registry
from anydevice.engines.library_settings import virtual_cpus

_owners: dict[type, Engine | None] = {}


def owner_of(x: Any) -> Engine | None:
    """The engine whose array `x` is; `None` if it is not an array of any imported library."""
    kind = type(x)
    if kind.__module__ == "builtins":
        return None
    if kind not in _owners:
        engines = (registry.load(name) for name in registry.loaded_engines())
        _owners[kind] = next((engine for engine in engines if engine.owns(x)), None)
    return _owners[kind]


def forget() -> None:
    """Look up the engine of every array again."""
    _owners.clear()


def place_of(device: Device) -> Device:
    """The device itself; for a fake one, the CPU device that stands in for it in another process.

    JAX can be told to show several CPU devices, and then each fake device has one of its own.
    """
    standing = device.standing
    if standing is None or not standing.facts.details.get("fake"):
        return device
    index = device.index % virtual_cpus() if device.engine == "jax" else 0
    return Device("cpu", index, engine=device.engine)


def native(device: Device, engine: str) -> Any:
    """The library's own object for a device: `torch.device("cuda", 1)`, a `jax.Device`, …

    Raises `DeviceNotFoundError` if the library does not see the device.
    """
    return registry.load(engine).native(device)


hooks.native.register(native)
