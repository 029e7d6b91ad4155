"""The pairs of device and engine on which ops are verified and timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from anydevice.core.device import Device
from anydevice.core.engine import Engine
from anydevice.core.record import Record
from anydevice.discovery._discover import discover
from anydevice.discovery.examination import pairs_among
from anydevice.engines import registry
from anydevice.engines.lookup import place_of

Progress = Callable[[int, int, str], None]
"""Called before each step with how many are done, how many there are, and what comes now."""


class Runner(Record):
    """One engine on one device; `place` is where the device's data lies."""

    device: Device
    place: Device
    engine: str

    def load(self) -> Engine:
        """The engine; imports its library."""
        return registry.load(self.engine)

    def scope(self) -> AbstractContextManager[Any]:
        """A block in which the engine works on the device."""
        return scope_of(self.load(), self.place)

    def __str__(self) -> str:
        return f"{self.device} with {self.engine}"


def runner(device: Device, engine: str) -> Runner:
    """An engine on a device.

    >>> str(runner(Device("cpu"), "numpy"))
    'cpu with numpy'
    """
    return Runner(device, place_of(device.served_by(engine)), engine)


def find_runners(
    devices: Sequence[str | Device] = (), engines: Sequence[str] | None = None
) -> list[Runner]:
    """Every engine on every device of this machine, or those that are named.

    Raises `ConfigurationError` for an unknown name, and `DeviceNotFoundError` if this machine
    lacks what was named.
    """
    pairs = pairs_among(discover(), [str(device) for device in devices], engines)
    return [runner(device, engine) for device, engine in pairs]


def scope_of(engine: Engine, place: Device) -> AbstractContextManager[Any]:
    """A block in which an engine works there."""
    # MLX decides by the operation where it works; the others by where their arrays are.
    return engine.default_scope(place) if engine.shares_memory else nullcontext()
