"""Reads what the tools of macOS print; an unreadable value is `None` or empty."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Sequence

from anydevice._core.child.parent import own_environment
from anydevice._core.record import Record
from anydevice._machine.hardware.linux import as_number

Run = Callable[[Sequence[str]], str | None]
"""Runs a command and gives what it printed, or `None` if it could not be run in time."""

SYSTEM = (
    "/usr/sbin/sysctl",
    "hw.memsize",
    "hw.model",
    "hw.optional.arm64",
    "iogpu.wired_limit_mb",
    "kern.hv_vmm_present",
    "kern.osproductversion",
    "machdep.cpu.brand_string",
    "sysctl.proc_translated",
)
ACCELERATOR = ("/usr/sbin/ioreg", "-rd1", "-c", "AGXAccelerator")
DISPLAYS = ("/usr/sbin/system_profiler", "SPDisplaysDataType", "-json")
PAGES = ("/usr/bin/vm_stat",)

_CORES = re.compile(r'"gpu-core-count"\s*=\s*(\d+)')
_MODEL = re.compile(r'"model"\s*=\s*"([^"]+)"')
_PAGE_SIZE = re.compile(r"page size of (\d+) bytes")
_PAGES = re.compile(r"^Pages (free|inactive|speculative|purgeable):\s*(\d+)\.", re.MULTILINE)
_SIZE = re.compile(r"(\d+)\s*(MB|GB)")
_UNITS = {"MB": 2**20, "GB": 2**30}
_MAKERS_OF_CARDS = ("amd", "_ati", "0x1002", "nvidia", "0x10de", "radeon", "geforce")


class Graphics(Record):
    """One entry of the system's list of graphics hardware; `memory` in bytes."""

    name: str
    discrete: bool
    memory: int | None


def running_until(deadline: float) -> Run:
    """Return a function that runs commands until `deadline` and returns what they printed."""

    def run(command: Sequence[str]) -> str | None:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=own_environment(),
                timeout=left,
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.decode("utf-8", "replace") or None

    return run


def read_system(printed: str | None) -> dict[str, str]:
    """Names and values from the lines "name: value" of sysctl.

    >>> read_system("hw.optional.arm64: 1")
    {'hw.optional.arm64': '1'}
    """
    pairs = (line.partition(": ") for line in (printed or "").splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs if value}


def read_accelerator(printed: str | None) -> tuple[str | None, int | None]:
    """Return model and number of cores of an Apple GPU, from the I/O registry."""
    model, cores = _MODEL.search(printed or ""), _CORES.search(printed or "")
    return model[1] if model else None, as_number(cores[1]) if cores else None


def read_graphics(printed: str | None) -> list[Graphics] | None:
    """Return the graphics hardware of the system profile; `None` if it cannot be read."""
    import json  # only old Macs need it

    try:
        entries = json.loads(printed or "")["SPDisplaysDataType"]
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(entries, list):
        return None
    return [_graphics(entry) for entry in entries if isinstance(entry, dict)]


def _graphics(entry: dict[str, object]) -> Graphics:
    name = str(entry.get("sppci_model") or entry.get("_name") or "unknown GPU")
    maker = f"{entry.get('spdisplays_vendor', '')} {name}".lower()
    sizes = [str(entry.get(f"spdisplays_vram{kind}", "")) for kind in ("", "_shared", "_dynamic")]
    size = next((match for match in map(_SIZE.search, sizes) if match), None)
    return Graphics(
        name=name,
        discrete=any(word in maker for word in _MAKERS_OF_CARDS),
        memory=int(size[1]) * _UNITS[size[2]] if size else None,
    )


def read_available_memory(printed: str | None) -> int | None:
    """Return the bytes that are free without swapping, from the counts of vm_stat."""
    size = _PAGE_SIZE.search(printed or "")
    counts = dict(_PAGES.findall(printed or ""))
    if size is None or "free" not in counts:
        return None
    return int(size[1]) * sum(int(count) for count in counts.values())
