"""The processes that hold most of a machine's own memory, and what they compute."""

from __future__ import annotations

import os
import time
from pathlib import Path

from anydevice.core.locking import ForkSafeLock
from anydevice.hardware.cpu_model import online_processors
from anydevice.hardware.kernel_files import as_number, read_text
from anydevice.hardware.process_names import command_name, name_of
from anydevice.hardware.readings import DeviceProcess

_ROOT = Path("/")
_MOST = 16


class ProcessMeter:
    """The largest processes of one machine; loads are those since the last question."""

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._lock = ForkSafeLock()
        self._before: dict[tuple[int, int], tuple[float, int]] = {}

    def read(self) -> tuple[DeviceProcess, ...]:
        """The processes that hold most, the largest first; load is `None` when first seen."""
        page = os.sysconf("SC_PAGE_SIZE")
        sizes = {pid: size * page for pid in self._all() if (size := self._pages(pid))}
        largest = sorted(sizes, key=lambda pid: -sizes[pid])[:_MOST]
        with self._lock.native:
            seen: dict[tuple[int, int], tuple[float, int]] = {}
            loads = {pid: self._load(pid, seen) for pid in largest}
            self._before = seen
        return tuple(
            DeviceProcess(
                pid, name_of(pid, root=self._root, system="linux"), sizes[pid], loads[pid]
            )
            for pid in largest
        )

    def _all(self) -> list[int]:
        try:
            return [int(name) for name in os.listdir(self._root / "proc") if name.isdecimal()]
        except OSError:
            return []

    def _pages(self, pid: int) -> int | None:
        words = (read_text(self._root / "proc" / str(pid) / "statm") or "").split()
        return as_number(words[1]) if len(words) > 1 else None

    def _load(self, pid: int, seen: dict[tuple[int, int], tuple[float, int]]) -> float | None:
        text = read_text(self._root / "proc" / str(pid) / "stat") or ""
        # The name, in brackets, may hold spaces and brackets; the numbers come after the last one.
        words = text.rpartition(")")[2].split()
        if len(words) < 20:
            return None
        ticks, started = int(words[11]) + int(words[12]), int(words[19])
        now = time.monotonic()
        # A number may belong to another process by now; when that one started tells.
        seen[pid, started] = (now, ticks)
        then, before = self._before.get((pid, started), (now, ticks))
        if now <= then:
            return None
        processors = len(online_processors(self._root) or ()) or os.cpu_count() or 1
        spent = (ticks - before) / os.sysconf("SC_CLK_TCK")
        return min(1.0, max(0.0, spent / (now - then) / processors))


DEFAULT_METER = ProcessMeter()


def by_psutil() -> tuple[DeviceProcess, ...]:
    """The largest processes where there is no `/proc`; those of other users may be missing."""
    try:
        import psutil
    except ImportError:
        return ()
    found = []
    for process in psutil.process_iter(["pid", "name", "cmdline", "memory_info"]):
        told = process.info
        if told["memory_info"] is not None:
            name = command_name(told["cmdline"] or []) or told["name"] or f"pid {told['pid']}"
            found.append(DeviceProcess(told["pid"], name, told["memory_info"].rss))
    return tuple(sorted(found, key=lambda process: -(process.memory or 0))[:_MOST])
