"""Memory of a device: its size, the free part, the part of this process, and its release."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Literal
from weakref import WeakSet

from anydevice._core.device import Device
from anydevice._core.engine import MemoryUse
from anydevice._core.record import NOTHING, Record
from anydevice._core.text import format_size
from anydevice._machine.choose.scope import one_device
from anydevice._machine.discovery.discover import discover
from anydevice._machine.engines import registry
from anydevice._machine.hardware.linux import own_memory, reset_own_peak
from anydevice.errors import DeviceNotFoundError

Pressure = Literal["low", "medium", "high", "critical"]

_on_release: list[Callable[[Device], None]] = []

_BELOW: dict[Pressure, float] = {"low": 0.6, "medium": 0.8, "high": 0.95}


class MemoryStats(Record):
    """The memory of one device at one moment, in bytes; `None` if unknown.

    `total` is the memory of the device, `usable` the part that a process may use, `free` is
    unallocated memory. `in_use`, `reserved` and `peak` are those of this process: the memory of its
    arrays, all memory held by its libraries, and the highest `in_use`. With several libraries they
    are sums, so `peak` is an upper bound. On the CPU the system counts the whole process.

    `preallocated` means that a library allocated memory before any array needed it, as JAX does:
    `reserved` then says nothing about what is needed. `engines` has the numbers of each library.

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
        """Free and cached memory; if free memory is unknown, all that is not known to be in use."""
        idle = max(0, (self.reserved or 0) - (self.in_use or 0))
        if self.free is not None:
            reserved = self.free + idle
            return reserved if self.usable is None else min(reserved, self.usable)
        return None if self.usable is None else max(0, self.usable - (self.in_use or 0))

    @property
    def pressure(self) -> Pressure | None:
        """How full the device is for this process, in a word; `None` if its size is unknown."""
        return pressure_of(self.usable, self.available)

    def to_dict(self) -> dict[str, object]:
        """Return the same as plain data, ready for JSON."""
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
    """Return the memory of a device: its size, the free part, and the part of this process.

    The default is `device()`. Free memory is read again at each call. Only imported libraries
    count, and none is started.

    >>> stats = memory_stats("cpu")
    >>> stats.in_use <= stats.peak, stats.pressure in ("low", "medium", "high", "critical")
    (True, True)

    Raises `DeviceNotFoundError` if there is no such device, or a named one is not usable.
    """
    target = device if isinstance(device, Device) else one_device(device)
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


class PeakMeter:
    """The peak of memory in use on a device since the meter was made, and the use `before`."""

    def __init__(self, device: Device) -> None:
        self._counter = _ProcessCounter() if device.backend == "cpu" else _LibraryCounter(device)
        self.before, peak = self._counter.read()
        self._stale = None if self._counter.is_reset else peak

    @property
    def peak(self) -> int | None:
        """The highest memory; `None` if unknown, such as where an earlier peak was higher."""
        _, peak = self._counter.read()
        return None if peak == self._stale else peak


class _ProcessCounter:
    """The memory of this process now, and its peak since the counter was made."""

    def __init__(self) -> None:
        self._highest = 0
        _, peak = own_memory(since_reset=True)
        for counter in list(_counters):  # the system forgets their peak now
            counter._highest = max(counter._highest, peak or 0)
        self.is_reset = reset_own_peak()
        _counters.add(self)

    def read(self) -> tuple[int | None, int | None]:
        in_use, peak = own_memory(since_reset=True)
        return in_use, None if peak is None else max(peak, self._highest)


_counters: WeakSet[_ProcessCounter] = WeakSet()


class _LibraryCounter:
    """The memory that libraries hold on a device now, and the peak since the counter was made."""

    def __init__(self, device: Device) -> None:
        self._device = device
        for name, _ in _holders(device):
            registry.load(name).memory.reset_peak(device)
        in_use, peak = self.read()
        self.is_reset = in_use == peak

    def read(self) -> tuple[int | None, int | None]:
        uses = [use for _, use in _holders(self._device)]
        if not uses:
            return None, None
        # A library that does not count peaks, and holds nothing, may have held little.
        peaks = [0 if use.peak is None and not use.reserved else use.peak for use in uses]
        known = [peak for peak in peaks if peak is not None]
        return sum(use.in_use for use in uses), sum(known) if len(known) == len(uses) else None


def on_release(give_back: Callable[[Device], None]) -> Callable[[Device], None]:
    """Also call a function whenever a device's memory is released; used as a decorator."""
    _on_release.append(give_back)
    return give_back


def release(device: Device | str | None = None) -> None:
    """Release cached memory of a device, or of all devices.

    Array libraries cache the memory of deleted arrays, and copies to a CUDA device cache pinned
    host memory. Other libraries and programs cannot use either until it is released. Memory in use
    stays, and so does what JAX preallocated: it keeps that until its process ends. Later
    allocations and copies have to allocate again, so call this only when memory is short.

    >>> anydevice.release("cpu")

    Imports and starts no library. Raises `DeviceNotFoundError` if the given device is not usable.
    """
    place = None if device is None else one_device(device)
    for engine in registry.started_engines():
        for known in engine.devices():
            if place is None or known == place:
                for give_back in _on_release:
                    give_back(known)
                engine.memory.release(known)


def free_what_failed() -> None:
    """Release the memory of a call that ran out of it, after `clear_frames` of its error."""
    gc.collect()
    release()


def pressure_of(usable: int | None, available: int | None) -> Pressure | None:
    if not usable or available is None:
        return None
    taken = (usable - available) / usable
    return next((name for name, most in _BELOW.items() if taken < most), "critical")


def _holders(device: Device) -> Iterator[tuple[str, MemoryUse]]:
    """Yield the memory that each imported library holds on the device, if the library counts it."""
    started = {engine.name: engine for engine in registry.started_engines()}
    status = device.status
    driving = status.engines if status else ()  # of a backend that only a probe knows
    for name in dict.fromkeys((*driving, *registry.engines_for(device.backend))):
        if name not in started:
            continue
        try:
            use = started[name].memory.use(device)
        except DeviceNotFoundError:  # it is a build without this backend
            continue
        if use is not None:
            yield name, use


def _free_through_another_backend(device: Device) -> int | None:
    """Return the free memory of the same card from another backend; OpenCL does not report it."""
    known = (
        other.facts.free_memory
        for card in discover().cards
        if device in card
        for other in card
        if other != device
    )
    return next((free for free in known if free is not None), None)
