"""AMD GPUs through the files of their driver; no library of ROCm is loaded in this process."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from anydevice._core.finding import BackendScan, Facts
from anydevice._machine.hardware import linux

_ROOT = Path("/")
_TRACES = ("dev/kfd", "dev/dxg")


def look(
    limit: float,
    *,
    root: Path = _ROOT,
    environment: Mapping[str, str] | None = None,
    accessible: Callable[[Path], bool] = linux.may_open,
    platform: str = sys.platform,
) -> BackendScan:
    """Return the AMD GPUs of this machine, or why there are none, in `limit` seconds."""
    if not platform.startswith("linux"):
        system = {"win32": "Windows", "darwin": "macOS"}.get(platform, platform)
        text = f"ROCm needs Linux; this is {system}"
        return BackendScan.stopped("rocm", "wrong_system", text, present=False)
    cards = linux.cards(linux.AMD, root)
    if not cards and not any(os.path.exists(root / trace) for trace in _TRACES):
        text = "no AMD GPU on the PCI bus"
        return BackendScan.stopped("rocm", "no_hardware", text, present=False)
    # Most machines have none, and need not wait for the rest to load.
    from anydevice._machine.hardware.rocm.diagnosis import scan_files

    environment = os.environ if environment is None else environment
    machine = linux.CardMachine(root, environment, accessible, cards)
    return scan_files(machine, time.monotonic() + limit)


def free_memory(index: int, facts: Facts, *, root: Path = _ROOT) -> int | None:
    """Return the free bytes of the GPU at this moment, or `None` if its driver does not tell."""
    from anydevice._machine.hardware.rocm.facts import counters, free_of_card, free_of_shared

    if facts.pci_address is None:
        return None
    now = counters(facts.pci_address, root)
    if facts.memory_kind == "unified":
        return free_of_shared(facts.usable_memory, facts.details.get("pool"), now)
    return free_of_card(facts.total_memory, now)
