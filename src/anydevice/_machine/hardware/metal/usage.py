"""The free memory of Apple's GPUs now; macOS shows their load only to the superuser."""

from __future__ import annotations

from anydevice._core.finding import Facts
from anydevice._machine.hardware.metal.reader import free_memory as free_memory
from anydevice._machine.hardware.readers import DeviceProcess, Readings


def readings(index: int, facts: Facts) -> Readings:
    """Return the free memory; load, heat and power are told to the superuser alone."""
    return Readings(free_memory=free_memory(index, facts))


def processes(index: int, facts: Facts) -> tuple[DeviceProcess, ...]:
    """Return no process: macOS does not tell who uses the GPU."""
    return ()
