"""Intel GPUs, through the files of their kernel driver and through Level Zero in a child."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from anydevice._core.child.parent import start
from anydevice._core.finding import BackendScan, Facts
from anydevice._machine.hardware import linux


def begin(root: Path = Path("/")) -> Callable[[float], BackendScan]:
    """Ask Level Zero where there are traces of a GPU; return the function that waits for it."""
    cards = linux.cards(linux.INTEL, root)
    loader = "ze_loader.dll" if sys.platform == "win32" else "libze_loader.so.1"
    system = os.environ.get("SYSTEMROOT", "C:/Windows")
    if not (cards or any(map(os.path.exists, (f"{root}/dev/dxg", f"{system}/System32/{loader}")))):
        text = "no Intel GPU that Level Zero may drive"
        return lambda limit: BackendScan.stopped("xpu", "no_hardware", text, present=False)
    question = start("level_zero", {"libraries": [loader]})

    def finish(limit: float) -> BackendScan:
        # Loaded while the child is at work.
        from anydevice._machine.hardware.xpu.diagnosis import interpret

        machine = linux.CardMachine(root, dict(os.environ), linux.may_open, cards)
        return interpret(machine, question.finish(limit))

    return finish


def free_memory(index: int, facts: Facts) -> int | None:
    """Return the free bytes; `None` if unknown. Cached for 0.25 s, as a child process answers."""
    return _free_memory(int(time.monotonic() * 4)).get(facts.uuid)


@lru_cache(maxsize=1)
def _free_memory(quarter: int) -> dict[str | None, int | None]:
    return {device.facts.uuid: device.facts.free_memory for device in begin()(2.0).devices}
