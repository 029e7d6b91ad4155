"""The usage of every card of the machine: memory, load, heat, power, and its processes."""

from __future__ import annotations

from collections.abc import Sequence

from anydevice.core.device import Device
from anydevice.core.record import Record
from anydevice.discovery._discover import discover
from anydevice.discovery.examination import prepare
from anydevice.hardware.readers import DeviceProcess, Readings, processes, readings
from anydevice.memory.stats import Pressure, pressure_of
from anydevice.settings.preferences import check_wish

Card = tuple[Device, ...]
"""One card by all its names: seen through CUDA and through OpenCL it is one."""


class DeviceUsage(Record):
    """The usage of one card at one moment; sizes are bytes, `None` if unknown.

    `also` are the other names of the card. Of the CPU, `processes` are only the largest.
    """

    device: str
    name: str
    total: int | None
    usable: int | None
    readings: Readings
    processes: tuple[DeviceProcess, ...] = ()
    also: tuple[str, ...] = ()

    @property
    def free(self) -> int | None:
        return self.readings.free_memory

    @property
    def taken(self) -> int | None:
        """The memory that all processes together hold."""
        if self.usable is None or self.free is None:
            return None
        return max(0, self.usable - self.free)

    def share_of(self, size: int | None) -> float | None:
        """A size as a share of the usable memory."""
        return size / self.usable if size is not None and self.usable else None

    @property
    def pressure(self) -> Pressure | None:
        """How full it is; memory that a process holds without using it counts as taken."""
        return pressure_of(self.usable, self.free)

    def to_dict(self) -> dict[str, object]:
        """The same as plain data, ready for JSON."""
        plain = super().to_dict()
        readings = plain.pop("readings")
        return {
            **plain,
            "free": readings.pop("free_memory"),
            "pressure": self.pressure,
            **readings,
        }


def cards_among(names: Sequence[str] = ()) -> tuple[Card, ...]:
    """Every card that a driver shows, usable or not, or those that are named.

    Left out, unless named, are a driver's view of the CPU and the CPU's further names. Raises
    `ConfigurationError` for an unknown name, and `DeviceNotFoundError` for one that this machine
    lacks.

    >>> [str(card[0]) for card in cards_among(["cpu"])]
    ['cpu']
    """
    asked = [name.strip().lower() for name in names]
    for name in asked:
        check_wish(name, "--device")
    report = discover()
    shown = [
        device
        for device in prepare(report, names).report.devices
        if device.kind != "cpu"
        or str(device) in ("cpu", *asked)
        or (asked and device.backend != "cpu")
    ]
    return tuple(card for card in report.cards if any(device in shown for device in card))


def usage_of(card: Card) -> DeviceUsage:
    """The usage of a card now. Never raises."""
    device = card[0]
    standing = device.standing
    assert standing is not None
    facts = standing.facts
    return DeviceUsage(
        device=str(device),
        name=facts.name,
        total=facts.total_memory,
        usable=facts.obtainable_memory,
        readings=readings(device.backend, device.index, facts),
        processes=processes(device.backend, device.index, facts),
        also=tuple(str(other) for other in card[1:]),
    )
