"""What a device does at this moment, where its driver tells: load, heat, power, and who uses it.

One file a backend does the reading; each loads when it is first asked. Nothing here raises for
what a driver does not tell: that is `None`, or no processes.

Which reader looks at which backend; each loads when it first looks.

Loading them takes longer than most of them look, and can be done while a driver is being asked.
"""

from __future__ import annotations

from collections.abc import Callable

from anydevice.core import hooks
from anydevice.core.finding import Facts, Sighting
from anydevice.core.hooks import load
from anydevice.core.record import Record, as_dict, replace


class Readings(Record):
    """One device at one moment; `None` is what the driver does not tell.

    `load` is the share of time that it computed, `memory_load` the share that its memory was
    being read or written, `fan` the share of the fan's full speed: fractions, 1.0 is all of it.
    `free_memory` is bytes, `temperature` °C, `power` and `power_limit` are watts, `clock` is MHz.

    >>> Readings(load=0.5).temperature is None
    True
    """

    load: float | None = None
    memory_load: float | None = None
    free_memory: int | None = None
    temperature: float | None = None
    power: float | None = None
    power_limit: float | None = None
    fan: float | None = None
    clock: float | None = None

    def to_dict(self) -> dict[str, object]:
        """The same as plain data, ready for JSON."""
        return as_dict(self)


class DeviceProcess(Record):
    """A process that uses a device, with the bytes it holds there and its share of the load.

    `name` is the program, for an interpreter with its script ("python train.py"); "pid 1234"
    where the system hides it, and "another container" where there is no such process in this one.
    """

    pid: int
    name: str
    memory: int | None = None
    load: float | None = None

    def to_dict(self) -> dict[str, object]:
        """The same as plain data, ready for JSON."""
        return as_dict(self)


_TELL_USAGE = ("cuda", "rocm", "metal", "cpu")


def readings(backend: str, index: int, facts: Facts) -> Readings:
    """What the device with these facts does now. Never raises.

    >>> 0 <= readings("cpu", 0, Facts("some processor")).load <= 1
    True
    """
    if facts.details.get("fake"):
        return Readings(free_memory=facts.free_memory)
    if backend not in _TELL_USAGE:
        return Readings()
    read: Readings = load(_target(backend, "readings"))(index, facts)
    return read


def processes(backend: str, index: int, facts: Facts) -> tuple[DeviceProcess, ...]:
    """Who uses the device with these facts, the one that holds most memory first. Never raises.

    Of the CPU, only the processes that hold most are told. A driver that does not list processes,
    and one that hides those of other users or containers, gives fewer, or none.
    """
    if backend not in _TELL_USAGE or facts.details.get("fake"):
        return ()
    found: tuple[DeviceProcess, ...] = load(_target(backend, "processes"))(index, facts)
    return found


def _target(backend: str, function: str) -> str:
    return f"anydevice.hardware.{backend}.usage:{function}"


Look = Callable[[float], Sighting]
"""A reader: looks at the machine for at most so many seconds, and never raises."""

Begin = Callable[[], Look]
"""Starts what a reader can start, and returns the rest of it."""


def _asking_children(backend: str) -> Begin:
    def begin() -> Look:
        look: Look = load(f"anydevice.hardware.{backend}.reader:begin")()
        return look

    return begin


def _reading_files(backend: str) -> Begin:
    def look(limit: float) -> Sighting:
        sighting: Sighting = load(f"anydevice.hardware.{backend}.reader:look")(limit)
        return sighting

    return lambda: look


# Those that ask a child come first, so that it works while the others load.
READERS: dict[str, Begin] = {
    "opencl": _asking_children("opencl"),
    "cuda": _asking_children("cuda"),
    "cpu": _reading_files("cpu"),
    "rocm": _reading_files("rocm"),
    "tpu": _reading_files("tpu"),
    "metal": _reading_files("metal"),
}

_TELL_FREE_MEMORY = ("cuda", "rocm", "metal", "cpu")


def free_memory(backend: str, index: int, facts: Facts) -> Facts:
    """The same facts with the free memory of this moment, where the backend can tell."""
    if backend not in _TELL_FREE_MEMORY:
        return facts
    now: int | None = load(f"anydevice.hardware.{backend}.reader:free_memory")(index, facts)
    return facts if now is None else replace(facts, free_memory=now)


hooks.free_memory.register(free_memory)
