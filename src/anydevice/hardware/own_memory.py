"""How much of the machine's memory this process holds, and the most that it ever held."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from anydevice.hardware.kernel_files import read_table


def own_memory(
    root: Path = Path("/"), *, system: str = sys.platform
) -> tuple[int | None, int | None]:
    """Resident bytes of this process, now and at most; `None` where the system does not tell.

    >>> now, peak = own_memory()
    >>> 0 < now <= peak
    True
    """
    if system.startswith("linux"):
        table = read_table(root / "proc/self/status")
        now, peak = table.get("VmRSS"), table.get("VmHWM")
    else:
        now, peak = _by_psutil(system)
    # The kernel brings its counters up to date one after the other.
    return now, now if peak is None else max(peak, now or 0)


def _by_psutil(system: str) -> tuple[int | None, int | None]:
    try:
        import psutil
    except ImportError:
        return None, None
    told: Any = psutil.Process().memory_info()
    if system == "win32":
        return told.rss, getattr(told, "peak_wset", None)
    import resource

    # macOS counts it in bytes, the other systems with this call in KiB.
    unit = 1 if system == "darwin" else 1024
    return told.rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
