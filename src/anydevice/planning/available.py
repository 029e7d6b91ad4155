"""The room that each device has for a model at this moment, and which devices share one memory."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from anydevice.choose.scope import device_from_library
from anydevice.core.backends import KINDS
from anydevice.core.device import Device, parse_place
from anydevice.core.finding import Facts, same_card
from anydevice.core.record import Record
from anydevice.discovery._discover import devices as usable_devices
from anydevice.discovery._discover import discover, kept_report
from anydevice.discovery.report import Report
from anydevice.engines import registry
from anydevice.errors import ConfigurationError, DeviceNotFoundError
from anydevice.planning.overheads import CONTEXT
from anydevice.settings.config import current

Places = str | Device | Iterable[Any] | None
"""Devices as a caller names them: one or several, objects or names, or all that are usable."""

_SHARING = ("unified", "host")
_ONE_MOMENT = 0.5
"""Seconds for which what discovery read of free memory is not read again."""

_looked: tuple[Report, float] | None = None


class Room(Record):
    """What this process may still take of a device, in bytes.

    `free` is what the device has left for it: what is free now, and what the libraries of this
    process hold already without using it. `limit` is what they may still take of the amount that
    `configure(memory=…)` allows, `None` where nothing was set.
    """

    device: Device
    free: int
    limit: int | None = None
    facts: Facts = Facts("unknown")

    @property
    def room(self) -> int:
        """The bytes that a model may need there in all.

        A driver's context is part of what a model needs, and lies outside of the limit.
        """
        return self.free if self.limit is None else min(self.free, self.limit + CONTEXT)

    def shares_memory_with(self, other: Room) -> bool:
        """Whether what one takes the other has no longer: two views of a card, or of the host."""
        if self.device == other.device or same_card(self.facts, other.facts):
            return True
        return self.facts.memory_kind in _SHARING and other.facts.memory_kind in _SHARING


def look_ahead() -> None:
    """Look at the machine now, for `rooms_of` soon: in a thread, while a model's files are read."""
    global _looked
    if kept_report() is None:
        _looked = discover(), time.monotonic()


def rooms_of(places: Places) -> tuple[tuple[Room, ...], tuple[str, ...]]:
    """The room of each device, the CPU's last, and a sentence for each that cannot be counted.

    Without `places` they are all usable devices of this machine; one that is seen through two
    backends counts once. Raises `DeviceNotFoundError` where a device that is named is not usable.
    """
    just_now = kept_report() is None or _was_just_now()
    devices = _everything() if places is None else _named(places)
    devices = tuple(sorted(devices, key=lambda device: device.backend == "cpu"))
    rooms: list[Room] = []
    notes: list[str] = []
    for device in devices:
        room = _room(device, just_now)
        if room is None:
            notes.append(f"{device} does not tell how much memory it has: it is not counted")
        else:
            rooms.append(room)
    return tuple(rooms), tuple(notes)


def _was_just_now() -> bool:
    if _looked is None or _looked[0] is not discover():
        return False
    return time.monotonic() - _looked[1] < _ONE_MOMENT


def _everything() -> tuple[Device, ...]:
    cards = discover().cards
    first = [next((device for device in card if device.usable), None) for card in cards]
    # The processor seen once more through OpenCL is only used by name.
    return _one_processor(
        device
        for device in first
        if device is not None and (device.kind != "cpu" or device.backend == "cpu")
    )


def _one_processor(devices: Iterable[Device]) -> tuple[Device, ...]:
    """The devices without the further ones that JAX may make of the one processor."""
    return tuple(device for device in devices if device.backend != "cpu" or not device.index)


def _named(places: str | Device | Iterable[Any]) -> tuple[Device, ...]:
    each: Iterable[Any] = (places,)
    if isinstance(places, Iterable) and not isinstance(places, str | Device):
        each = places
    found: dict[Device, None] = {}
    for place in each:
        for device in _devices_of(place):
            if not device.usable:
                raise DeviceNotFoundError(
                    f"{device} is not usable: {device.why_not}; anydevice.devices() lists what is",
                    tuple(discover()),
                )
            found[device] = None
    if not found:
        raise ConfigurationError("no device is named; leave devices out to use all", "devices")
    return tuple(found)


def _devices_of(place: Any) -> tuple[Device, ...]:
    if isinstance(place, Device):
        return (place,)
    if not isinstance(place, str):
        device = device_from_library(place)
        if device is None:
            raise ConfigurationError(
                f"{place!r} is not a device; write a Device or a name such as 'cuda:0'", "devices"
            )
        return (device,)
    if place in KINDS or parse_place(place)[1] is None:
        return _one_processor(usable_devices(place)) or (_missing(place),)
    return (Device(place),)


def _missing(name: str) -> Device:
    if name in KINDS:
        raise DeviceNotFoundError(
            f"no {name} of this machine is usable; anydevice.devices() lists what is",
            tuple(discover()),
        )
    return Device(name)


def _room(device: Device, just_now: bool) -> Room | None:
    standing = device.standing
    assert standing is not None
    facts, in_use = standing.facts, 0
    if just_now and not registry.loaded_engines():
        # Discovery has just read what is free: asking the driver again would take as long again.
        available = facts.free_memory
    else:
        from anydevice.memory.stats import memory_stats  # a plan on the command line needs none

        stats = memory_stats(device)
        available, in_use = stats.available, stats.in_use or 0
    amounts = [n for n in (available, facts.usable_memory, facts.total_memory) if n is not None]
    if not amounts:
        return None
    limit = _limit(device)
    return Room(device, min(amounts), None if limit is None else max(0, limit - in_use), facts)


def _limit(device: Device) -> int | None:
    """What the settings allow this process in all; the CPU's libraries keep to no limit."""
    config, origins = current()
    if "memory" not in origins or device.kind == "cpu":
        return None
    from anydevice.choose.limits import limit_of  # rarely needed, and slow to load

    return limit_of(device, config)
