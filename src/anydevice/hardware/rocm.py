"""AMD GPUs through the files of their driver; no library of ROCm is loaded in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from anydevice.core.facts import Facts
from anydevice.core.finding import Sighting
from anydevice.hardware import pci
from anydevice.hardware.kernel_files import exists

_ROOT = Path("/")
_TRACES = ("dev/kfd", "dev/dxg")


def may_open(path: Path) -> bool:
    """Whether this process may read and write a device file."""
    return os.access(path, os.R_OK | os.W_OK)


def look(
    limit: float,
    *,
    root: Path = _ROOT,
    environment: Mapping[str, str] | None = None,
    accessible: Callable[[Path], bool] = may_open,
    platform: str = sys.platform,
) -> Sighting:
    """The AMD GPUs of this machine, or why there are none, within `limit` seconds. Never raises.

    The other arguments are for recordings: another root of the file system, other variables, who
    may open a device file, and the name of the system as Python writes it.
    """
    if not platform.startswith("linux"):
        system = {"win32": "Windows", "darwin": "macOS"}.get(platform, platform)
        return _absent(f"ROCm needs Linux; this is {system}")
    cards = pci.cards(pci.AMD, root)
    if not cards and not any(exists(root / trace) for trace in _TRACES):
        return _absent("no AMD GPU on the PCI bus")
    from anydevice.hardware.rocm_sighting import Place, look_within

    place = Place(root, os.environ if environment is None else environment, accessible, cards)
    return look_within(limit, place)


def free_memory(index: int, facts: Facts, *, root: Path = _ROOT) -> int | None:
    """The free bytes of the GPU at this moment, or `None` where its driver does not tell."""
    from anydevice.hardware import rocm_memory

    if facts.pci_address is None:
        return None
    now = rocm_memory.counters(facts.pci_address, root)
    if facts.memory_kind == "unified":
        return rocm_memory.free_of_shared(facts.usable_memory, facts.details.get("pool"), now)
    return rocm_memory.free_of_card(facts.total_memory, now)


def _absent(reason: str) -> Sighting:
    return Sighting("rocm", present=False, stage="driver", reason=reason)
