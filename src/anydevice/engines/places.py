"""Where a device's data really lies: there, unless the device is a fake one for tests."""

from __future__ import annotations

from anydevice.core.device import Device
from anydevice.engines import effects


def place_of(device: Device) -> Device:
    """The device itself; for a fake one, the CPU device that stands in for it.

    JAX can be told to show several CPU devices, and then each fake device has one of its own.
    """
    standing = device.standing
    if standing is None or not standing.facts.details.get("fake"):
        return device
    index = device.index % effects.virtual_cpus() if device.engine == "jax" else 0
    return Device("cpu", index, engine=device.engine)
