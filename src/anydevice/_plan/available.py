"""The memory that each device has for a model now, and which devices share one memory."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from anydevice._core.backends import KINDS
from anydevice._core.device import Device, parse_place
from anydevice._core.finding import Facts, same_card
from anydevice._core.record import Record
from anydevice._machine.choose.scope import device_from_library
from anydevice._machine.discovery.discover import Report, discover, kept_report
from anydevice._machine.discovery.discover import devices as usable_devices
from anydevice._machine.engines import registry
from anydevice._machine.settings.config import current
from anydevice._plan.overheads import CONTEXT
from anydevice.errors import ConfigurationError, DeviceNotFoundError

DeviceNames = str | Device | Iterable[Any] | None
"""Devices as a caller names them: one or several, objects or names, or all that are usable."""

_SHARING = ("unified", "host")
_RECENT = 0.5
"""Seconds for which the free memory that discovery read is not read again."""

_looked: tuple[Report, float] | None = None


class AvailableMemory(Record):
    """The memory that this process may still take of a device, in bytes.

    `free` is what is free now, and what the libraries of this process hold without using it.
    `limit` is what they may still take of the amount that `configure(memory=…)` allows, `None`
    if nothing was set.
    """

    device: Device
    free: int
    limit: int | None = None
    facts: Facts = Facts("unknown")

    @property
    def bytes(self) -> int:
        """The bytes that a model may need there in all.

        A driver's context is part of what a model needs, but does not count for the limit.
        """
        return self.free if self.limit is None else min(self.free, self.limit + CONTEXT)

    def shares_memory_with(self, other: AvailableMemory) -> bool:
        """Whether both take from one memory: two views of a card, or of the host."""
        if self.device == other.device or same_card(self.facts, other.facts):
            return True
        return self.facts.memory_kind in _SHARING and other.facts.memory_kind in _SHARING


def look_ahead() -> None:
    """Discover the machine now, in a thread, while a model's files are read."""
    global _looked
    if kept_report() is None:
        _looked = discover(), time.monotonic()


def available_memory(names: DeviceNames) -> tuple[tuple[AvailableMemory, ...], tuple[str, ...]]:
    """Return the memory of each device, the CPU's last, and notes on those that do not tell it.

    Without `names` they are all usable devices of this machine; one that is seen through two
    backends counts once. Raises `DeviceNotFoundError` if a device that is named is not usable.
    """
    recent = kept_report() is None or (
        _looked is not None and _looked[0] is discover() and time.monotonic() - _looked[1] < _RECENT
    )
    devices = _all_devices() if names is None else _named_devices(names)
    found: list[AvailableMemory] = []
    notes: list[str] = []
    for device in sorted(devices, key=lambda device: device.backend == "cpu"):
        memory = _memory_of(device, recent)
        if memory is None:
            notes.append(f"{device} does not tell how much memory it has: it is not counted")
        else:
            found.append(memory)
    return tuple(found), tuple(notes)


def _all_devices() -> tuple[Device, ...]:
    first = (next((each for each in card if each.usable), None) for card in discover().cards)
    # The processor seen once more through OpenCL is only used by name.
    return _one_processor(
        device
        for device in first
        if device is not None and (device.kind != "cpu" or device.backend == "cpu")
    )


def _one_processor(devices: Iterable[Device]) -> tuple[Device, ...]:
    """Return the devices without the extra CPU devices of JAX."""
    return tuple(device for device in devices if device.backend != "cpu" or not device.index)


def _named_devices(names: str | Device | Iterable[Any]) -> tuple[Device, ...]:
    several = isinstance(names, Iterable) and not isinstance(names, str | Device)
    listed: Iterable[Any] = names if several else (names,)  # type: ignore[assignment]
    devices = tuple(dict.fromkeys(device for name in listed for device in _devices_of(name)))
    for device in devices:
        if not device.usable:
            raise DeviceNotFoundError(
                f"{device} is not usable: {device.why_not}; anydevice.devices() lists what is",
                tuple(discover()),
            )
    if not devices:
        raise ConfigurationError("no device is named; leave devices out to use all", "devices")
    return devices


def _devices_of(name: Any) -> tuple[Device, ...]:
    if isinstance(name, Device):
        return (name,)
    if not isinstance(name, str):
        device = device_from_library(name)
        if device is None:
            raise ConfigurationError(
                f"{name!r} is not a device; write a Device or a name such as 'cuda:0'", "devices"
            )
        return (device,)
    if name not in KINDS and parse_place(name)[1] is not None:
        return (Device(name),)
    found = _one_processor(usable_devices(name))
    if name in KINDS and not found:
        raise DeviceNotFoundError(
            f"no {name} of this machine is usable; anydevice.devices() lists what is",
            tuple(discover()),
        )
    return found or (Device(name),)


def _memory_of(device: Device, recent: bool) -> AvailableMemory | None:
    status = device.status
    assert status is not None
    facts, in_use = status.facts, 0
    if recent and not registry.loaded_engines():
        # Discovery has just read what is free: asking the driver again would take as long again.
        free = facts.free_memory
    else:
        from anydevice._arrays.memory.stats import (
            memory_stats,  # a plan on the command line needs none
        )

        stats = memory_stats(device)
        free, in_use = stats.available, stats.in_use or 0
    amounts = [n for n in (free, facts.usable_memory, facts.total_memory) if n is not None]
    if not amounts:
        return None
    limit = _limit(device)
    left = None if limit is None else max(0, limit - in_use)
    return AvailableMemory(device, min(amounts), left, facts)


def _limit(device: Device) -> int | None:
    """The memory that the settings allow this process; the CPU's libraries keep to no limit."""
    config, origins = current()
    if "memory" not in origins or device.kind == "cpu":
        return None
    from anydevice._machine.choose.limits import limit_of  # rarely needed, and slow to load

    return limit_of(device, config)
