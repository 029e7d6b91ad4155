"""Where things are moved to: a device with its engine, looked up once and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anydevice.choose import discovery
from anydevice.choose.scope import device as choose_device
from anydevice.core.device import Device
from anydevice.core.engine import Engine
from anydevice.engines import registry
from anydevice.engines.places import place_of
from anydevice.errors import DeviceNotFoundError

IsThere = Callable[[Any], bool]


class Target:
    """A device that is usable, and the engine that serves it.

    `place` is where data really goes (a fake device keeps it on the CPU), `engines` are the
    libraries whose arrays can live there.
    """

    def __init__(self, device: Device) -> None:
        if device.engine is None:
            raise DeviceNotFoundError(f"no installed library drives {device}: {device.why_not}")
        standing = device.standing
        self.device = device
        self.place = place_of(device)
        self.engine: Engine = registry.load(device.engine)
        self.engines = frozenset(standing.engines if standing else (device.engine,))
        self.already_there: dict[type, IsThere] = {}
        """A quick test, by the type of an array, whether one of that type is here already."""
        self.from_host: set[type] = set()
        """Types of arrays that lie on the host, and become the engine's."""

    def keeps(self, owner: Engine) -> bool:
        """Whether an array of that library stays in it when it is sent here."""
        return owner.name == self.engine.name or (
            owner.name != "numpy" and owner.name in self.engines
        )

    def remember_host(self, array: Any, owner: Engine) -> None:
        """Take note that arrays of this type are the host's, and have to be placed."""
        if owner.name == "numpy":
            self.from_host.add(type(array))

    def remember(self, array: Any, owner: Engine) -> None:
        """Take note of how to tell quickly that an array of this type is here already."""
        kind = type(array)
        if kind in self.already_there:
            return
        native = owner.native(self.place)
        if owner.name == "numpy":
            self.already_there[kind] = lambda x: True
        elif hasattr(array, "device") and array.device == native:
            self.already_there[kind] = lambda x: bool(x.device == native)


_kept: dict[tuple[str, int, str | None], tuple[object, Target]] = {}


def target_of(device: Device | str) -> Target:
    """The target for a device or its name.

    Raises `DeviceNotFoundError` where the device is not usable.
    """
    if not isinstance(device, Device):
        return target_of(choose_device(device))
    key = (device._backend, device._index, device._engine)
    known = _kept.get(key)
    if known is not None and known[0] is discovery.kept_report():
        return known[1]
    usable = device if device.usable else choose_device(device)
    target = Target(usable)
    _kept[key] = (discovery.discover(), target)
    return target
