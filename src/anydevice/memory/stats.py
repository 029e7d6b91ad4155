"""Memory statistics of a device: its size, what is free, and what this process holds of it.

A library keeps memory that its arrays no longer need, and JAX takes most of a card at its start.
All of that is `reserved` and missing from `free`, but available to this process at once. So
pressure is judged by what is available: free memory, and reserved memory that is not in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from anydevice.choose.scope import device as choose_device
from anydevice.core.device import Device
from anydevice.core.engine import MemoryUse
from anydevice.core.record import NOTHING, Record
from anydevice.core.text import format_size
from anydevice.discovery._discover import discover
from anydevice.engines import registry
from anydevice.engines.lookup import place_of
from anydevice.errors import DeviceNotFoundError
from anydevice.hardware.linux import own_memory

Pressure = Literal["low", "medium", "high", "critical"]

_BELOW: dict[Pressure, float] = {"low": 0.6, "medium": 0.8, "high": 0.95}


class MemoryStats(Record):
    """The memory of one device at one moment, in bytes; `None` where nobody can tell.

    `total` is what the device has, `usable` what a process could ever get of it, `free` what
    nobody holds. `in_use`, `reserved` and `peak` are this process's: what its arrays lie in, what
    its libraries hold in all, and the most that was in use. Where several libraries share the
    device they are sums, and the peak is at most that, because theirs need not have been at one
    time. On the CPU all three are about the whole process, as the system counts it.

    `preallocated` says that a library took memory before any array needed it, as JAX does:
    `reserved` tells nothing of need then. `engines` has the numbers of each library.

    `pressure` says how much of `usable` is not `available`: "low" below 60 %, "medium" below
    80 %, "high" below 95 %, "critical" above.
    """

    device: str
    total: int | None
    usable: int | None
    free: int | None
    in_use: int | None
    reserved: int | None
    peak: int | None
    preallocated: bool = False
    engines: Mapping[str, MemoryUse] = NOTHING

    @property
    def available(self) -> int | None:
        """What this process can still have: what is free, and what it holds without using it.

        Where the driver does not tell what is free, all that nobody is known to use.
        """
        idle = max(0, (self.reserved or 0) - (self.in_use or 0))
        if self.free is not None:
            held = self.free + idle
            return held if self.usable is None else min(held, self.usable)
        return None if self.usable is None else max(0, self.usable - (self.in_use or 0))

    @property
    def pressure(self) -> Pressure | None:
        """How full the device is for this process, in a word; `None` where its size is unknown."""
        return pressure_of(self.usable, self.available)

    def to_dict(self) -> dict[str, object]:
        """The same as plain data, ready for JSON."""
        return {**super().to_dict(), "available": self.available, "pressure": self.pressure}

    def __hash__(self) -> int:
        return hash((self.device, self.free, self.in_use, self.reserved))

    def __str__(self) -> str:
        of = f"{format_size(self.usable)} usable"
        parts = [of if self.free is None else f"{format_size(self.free)} free of {of}"]
        if self.in_use is not None:
            parts.append(f"{format_size(self.in_use)} in use by this process")
        if self.reserved != self.in_use:
            ahead = ", taken ahead of need" if self.preallocated else ""
            parts.append(f"{format_size(self.reserved)} reserved{ahead}")
        if self.peak is not None:
            parts.append(f"peak {format_size(self.peak)}")
        if self.pressure is not None:
            parts.append(f"pressure {self.pressure}")
        return f"{self.device}: {', '.join(parts)}"


def memory_stats(device: Device | str | None = None) -> MemoryStats:
    """How much memory a device has, how much is free, and what this process holds of it.

    Without a device, of the one that `device()` chooses. Free memory is read anew. Only libraries
    that this process has imported are asked, and none is started for it.

    >>> stats = memory_stats("cpu")
    >>> stats.in_use <= stats.peak, stats.pressure in ("low", "medium", "high", "critical")
    (True, True)

    Raises `DeviceNotFoundError` where this machine has no such device, or a name is given and
    that device is not usable.
    """
    target = device if isinstance(device, Device) else choose_device(device)
    facts = target.facts
    engines = dict(_holders(target))
    if target.backend == "cpu":
        in_use, peak = own_memory()
        reserved = in_use
    else:
        in_use = sum(use.in_use for use in engines.values())
        reserved = sum(use.reserved for use in engines.values())
        peak = sum(use.in_use if use.peak is None else use.peak for use in engines.values())
    free = facts.free_memory
    return MemoryStats(
        device=str(target),
        total=facts.total_memory,
        usable=facts.obtainable_memory,
        free=_free_through_another_backend(target) if free is None else free,
        in_use=in_use,
        reserved=reserved,
        peak=peak,
        preallocated=any(use.preallocated for use in engines.values()),
        engines=engines,
    )


def pressure_of(usable: int | None, available: int | None) -> Pressure | None:
    """How full a device is, in a word.

    >>> pressure_of(100, 50), pressure_of(100, 40), pressure_of(100, 20), pressure_of(100, 5)
    ('low', 'medium', 'high', 'critical')
    """
    if not usable or available is None:
        return None
    taken = (usable - available) / usable
    return next((name for name, most in _BELOW.items() if taken < most), "critical")


def _holders(device: Device) -> Iterator[tuple[str, MemoryUse]]:
    """What each library that is imported holds of the device, where it counts."""
    started = {engine.name: engine for engine in registry.started_engines()}
    for name in registry.engines_for(device.backend):
        if name not in started:
            continue
        try:
            use = started[name].memory.use(place_of(device.served_by(name)))
        except DeviceNotFoundError:  # it is a build without this backend
            continue
        if use is not None:
            yield name, use


def _free_through_another_backend(device: Device) -> int | None:
    """The free memory of the same card as another backend tells it: OpenCL cannot."""
    known = (
        other.facts.free_memory
        for card in discover().cards
        if device in card
        for other in card
        if other != device
    )
    return next((free for free in known if free is not None), None)
