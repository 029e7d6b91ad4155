"""The readers of all backends: their devices, and the usage of each device now."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from anydevice._core import hooks
from anydevice._core.finding import BackendScan, Facts
from anydevice._core.record import Record

Look = Callable[[float], BackendScan]
"""A reader: reads the machine within a limit in seconds. Discovery handles errors and hangs."""

Begin = Callable[[], Look]
"""Starts what a reader can start, and returns the rest of it."""


class Readings(Record):
    """One device at one moment; `None` is what the driver does not tell.

    `load` is the share of time that it computed, `memory_load` the share that its memory was
    being read or written, `fan` the share of the fan's full speed: fractions, 1.0 is all of it.
    `free_memory` is bytes, `temperature` °C, `power` and `power_limit` are watts, `clock` is MHz.
    """

    load: float | None = None
    memory_load: float | None = None
    free_memory: int | None = None
    temperature: float | None = None
    power: float | None = None
    power_limit: float | None = None
    fan: float | None = None
    clock: float | None = None


class DeviceProcess(Record):
    """A process that uses a device, with the bytes it holds there and its share of the load.

    `name` is the program, for an interpreter with its script ("python train.py"); "pid 1234"
    where the system hides it, and "another container" where there is no such process in this one.
    """

    pid: int
    name: str
    memory: int | None = None
    load: float | None = None


class Usage(Protocol):
    """The functions of a backend's `usage.py`."""

    def readings(self, index: int, facts: Facts) -> Readings: ...

    def processes(self, index: int, facts: Facts) -> tuple[DeviceProcess, ...]: ...


def readings(backend: str, index: int, facts: Facts) -> Readings:
    """Return the load, heat and power of a device now. Never raises: what is not told is `None`."""
    if facts.details.get("fake"):
        return Readings(free_memory=facts.free_memory)
    if backend in USAGE:
        return USAGE[backend]().readings(index, facts)
    ask = FREE_MEMORY.get(backend)
    return Readings(free_memory=None if ask is None else ask()(index, facts))


def processes(backend: str, index: int, facts: Facts) -> tuple[DeviceProcess, ...]:
    """Return the processes on a device, those with most memory first, as far as it lists them."""
    if backend not in USAGE or facts.details.get("fake"):
        return ()
    return USAGE[backend]().processes(index, facts)


def _begin(backend: str) -> Look:
    """Ask a backend's question in a child now, and return the function that waits for it."""
    look: Look = hooks.load(f"anydevice._machine.hardware.{backend}.reader:begin")()
    return look


def _look(backend: str, limit: float) -> BackendScan:
    scan: BackendScan = hooks.load(f"anydevice._machine.hardware.{backend}.reader:look")(limit)
    return scan


# Readers with a child come first: the child works while the others load.
READERS: dict[str, Begin] = {name: partial(_begin, name) for name in ("opencl", "cuda", "xpu")} | {
    name: partial(partial, _look, name) for name in ("cpu", "rocm", "tpu", "metal")
}

USAGE: dict[str, Callable[[], Usage]] = {
    name: partial(hooks.load, f"anydevice._machine.hardware.{name}.usage")
    for name in ("cpu", "cuda", "rocm")
}
"""The modules that show how much of a backend is in use."""

FREE_MEMORY: dict[str, Callable[[], Callable[[int, Facts], int | None]]] = {
    name: partial(hooks.load, f"anydevice._machine.hardware.{name}.{file}:free_memory")
    for file, names in (("usage", ("cuda", "rocm")), ("reader", ("cpu", "metal", "xpu")))
    for name in names
}
"""The functions that read the free memory of a device; macOS and Intel tell no other usage."""
