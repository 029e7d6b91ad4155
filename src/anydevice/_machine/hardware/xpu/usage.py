"""The free memory of Intel's GPUs now; their load and heat are not read."""

from __future__ import annotations

import time
from functools import lru_cache

from anydevice._core.finding import Facts
from anydevice._machine.hardware.readers import DeviceProcess, Readings
from anydevice._machine.hardware.xpu.reader import begin


def readings(index: int, facts: Facts) -> Readings:
    """Return the free memory alone."""
    return Readings(free_memory=free_memory(index, facts))


def processes(index: int, facts: Facts) -> tuple[DeviceProcess, ...]:
    """Return no process."""
    return ()


def free_memory(index: int, facts: Facts) -> int | None:
    """Return the free bytes, `None` if unknown; cached for 0.25 s, as a child answers."""
    return _free_memory(int(time.monotonic() * 4)).get(facts.uuid)


@lru_cache(maxsize=1)
def _free_memory(quarter: int) -> dict[str | None, int | None]:
    return {device.facts.uuid: device.facts.free_memory for device in begin()(2.0).devices}
