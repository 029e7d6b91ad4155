"""Reading `/proc` and `/sys` of Linux: small files, PCI cards, sensors, names of processes.

Any file may be missing or garbled. What cannot be read is `None`: a reader that meets it says
"unknown" and goes on.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

NVIDIA = 0x10DE
AMD = 0x1002

DEVICES = "sys/bus/pci/devices"
"""The folder, below the root, that has one folder a device of the PCI bus."""

ELSEWHERE = "another container"

_DISPLAY = 0x03
_PROCESSING_ACCELERATOR = 0x12

_CONTAINER_FILES = (".dockerenv", "run/.containerenv")
_CONTAINER_VARIABLES = ("container", "KUBERNETES_SERVICE_HOST")
_CONTAINER_GROUPS = ("docker", "kubepods", "containerd", "libpod", "lxc")

# A limit has at most 20 digits; int() refuses very long texts with an error of its own.
_INTEGER = re.compile(r"\s*(-?[0-9]{1,20})\s*")
_ROW = re.compile(r"^[^\S\n]*(\S+)[^\S\n]+(-?[0-9]{1,20})(?!\S)(.*)$", re.MULTILINE)

_LONGEST_COMMAND = 4096
_INTERPRETERS = ("python", "pypy", "julia")
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def read_text(path: Path | str, *, limit: int = -1) -> str | None:
    """Return a file's text, or its first `limit` bytes; `None` if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            content = file.read(limit)
    except (OSError, ValueError):
        return None
    return (content or b"").decode("utf-8", "replace")


def read_line(path: Path | str) -> str:
    """Return the file's text without the blanks around it; empty if it cannot be read."""
    return (read_text(path) or "").strip()


def names_in(folder: Path | str) -> list[str]:
    """Return the names of a folder's entries; none where it cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def numbers_in(folder: Path | str) -> list[int]:
    """Return the entries of a folder whose names are numbers, sorted."""
    return sorted(int(name) for name in names_in(folder) if name.isdecimal())


def psutil() -> Any:
    """Return the module psutil, which knows systems without `/proc`; `None` if it is missing."""
    try:
        import psutil
    except ImportError:
        return None
    return psutil


def read_number(path: Path | str) -> int | None:
    """Return the integer that a file holds; `None` if it holds anything else ("max", nothing)."""
    try:
        with open(path, "rb", buffering=0) as file:
            match = _INTEGER.fullmatch((file.read(64) or b"").decode("utf-8", "replace"))
    except (OSError, ValueError):
        return None
    return int(match[1]) if match else None


def as_number(text: str | None) -> int | None:
    """Return the integer that a text holds, or `None`.

    >>> as_number(" 4096 "), as_number("-1"), as_number("max"), as_number("1_000")
    (4096, -1, None, None)
    """
    match = _INTEGER.fullmatch(text or "")
    return int(match[1]) if match else None


def read_table(path: Path | str) -> dict[str, int]:
    """Return a file of lines "name number", such as `memory.stat`; other lines are ignored.

    A colon after the name is dropped, and a unit "kB" after the number makes it bytes.
    """
    table: dict[str, int] = {}
    for name, number, rest in _ROW.findall(read_text(path) or ""):
        table[name.rstrip(":")] = int(number) * 1024 if rest.strip() == "kB" else int(number)
    return table


def as_cpu_set(text: str | None) -> frozenset[int] | None:
    """Parse the kernel's list of processors, "0-3,8"; `None` if it is empty or garbled.

    >>> sorted(as_cpu_set("0-2,8") or ()), as_cpu_set("all")
    ([0, 1, 2, 8], None)
    """
    numbers: set[int] = set()
    for part in (text or "").strip().split(","):
        first, _, last = part.partition("-")
        low = as_number(first)
        high = as_number(last) if last else low
        if low is None or high is None or not 0 <= low <= high < 65536:
            return None
        numbers.update(range(low, high + 1))
    return frozenset(numbers)


def may_open(path: Path) -> bool:
    """Whether this process may read and write a device file."""
    return os.access(path, os.R_OK | os.W_OK)


def in_container(root: Path, environment: Mapping[str, str]) -> bool:
    """Whether this process runs in a container, by the marks that the usual ones leave."""
    if any(os.path.exists(root / file) for file in _CONTAINER_FILES):
        return True
    if any(environment.get(name) for name in _CONTAINER_VARIABLES):
        return True
    groups = read_text(root / "proc/1/cgroup") or ""
    return any(word in groups for word in _CONTAINER_GROUPS)


def distribution(root: Path) -> tuple[str, ...]:
    """Return the names of this Linux, its own first and then those it is like.

    They are in lower case, and every SUSE is "suse".
    """
    entries: dict[str, str] = {}
    for line in (read_text(root / "etc/os-release") or "").splitlines():
        key, _, value = line.partition("=")
        entries[key] = value.strip().strip("\"'")
    names = f"{entries.get('ID', '')} {entries.get('ID_LIKE', '')}".lower()
    return tuple("suse" if "suse" in name else name for name in names.split())


def uses_apt(names: Iterable[str]) -> bool:
    """Whether a Linux of these names is Debian or one of its descendants.

    >>> uses_apt(["mint", "ubuntu", "debian"]), uses_apt(["fedora"])
    (True, False)
    """
    return not {"debian", "ubuntu"}.isdisjoint(names)


def fitting(commands: Mapping[str, str], names: Iterable[str]) -> str | None:
    """Return the command for the first of these names that has one; `None` if none does.

    >>> fitting({"debian": "sudo apt install clinfo"}, ["mint", "ubuntu", "debian"])
    'sudo apt install clinfo'
    """
    return next((commands[name] for name in names if name in commands), None)


def cards(vendor: int, root: Path = Path("/")) -> tuple[str, ...]:
    """Return the PCI addresses of a vendor's cards, such as "0000:00:06.0", sorted.

    A card counts by its class: a display controller (3D controllers are among them) or a
    processing accelerator; a card's audio function does not. Empty where the machine has no such
    card, and where the system has no `sys/bus/pci/devices` under `root`.
    """
    folder = root / DEVICES
    return tuple(sorted(name for name in names_in(folder) if _is_card(folder / name, vendor)))


def _is_card(entry: Path, vendor: int) -> bool:
    if _number(entry / "vendor") != vendor:
        return False
    device_class = _number(entry / "class")
    return device_class is not None and device_class >> 16 in (_DISPLAY, _PROCESSING_ACCELERATOR)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(), 16)
    except (OSError, ValueError):
        # A card may be unplugged between the listing and the reading.
        return None


def bound_driver(address: str, root: Path = Path("/")) -> str | None:
    """Return the kernel driver of a card, such as "nvidia" or "vfio-pci", or `None`."""
    try:
        return (root / DEVICES / address / "driver").readlink().name
    except OSError:
        return None


def normal_address(written: str) -> str:
    """Return a PCI address as the kernel writes it, however a vendor's library does.

    >>> normal_address("00000000:00:06.0"), normal_address("0000:0B:00.0")
    ('0000:00:06.0', '0000:0b:00.0')
    """
    domain, colon, rest = written.strip().lower().partition(":")
    if len(domain) == 8 and domain.startswith("0000"):
        domain = domain[4:]
    return domain + colon + rest


def monitors(folder: Path) -> list[Path]:
    """Return the folders of sensors in a folder, in the order of their numbers."""
    names = [name for name in names_in(folder) if name.startswith("hwmon")]
    return [folder / name for name in sorted(names, key=lambda name: (len(name), name))]


def scaled(path: Path, divisor: float) -> float | None:
    """Return the number in a file, divided; `None` if there is none."""
    number = read_number(path)
    return None if number is None else number / divisor


def temperature(sensors: Path, labels: Sequence[str] = ()) -> float | None:
    """Return °C of the first of these labels that the sensors have, else of their first sensor."""
    degrees_of: dict[str, float] = {}
    for number in range(1, 9):
        degrees = scaled(sensors / f"temp{number}_input", 1000)
        if degrees is not None:
            degrees_of.setdefault(read_line(sensors / f"temp{number}_label"), degrees)
    named = (degrees_of[label] for label in labels if label in degrees_of)
    return next(named, next(iter(degrees_of.values()), None))


def name_of(
    pid: int, *, opens: tuple[str, ...] = (), root: Path = Path("/"), system: str = sys.platform
) -> str:
    """Return the program of a process, for an interpreter with its script: "python train.py".

    `opens` is how device files begin of which the process must have one open ("/dev/nvidia").
    A driver may tell process numbers of the host; in a container, such a number belongs to no
    process, or to one that has none of these files open.
    """
    if not system.startswith("linux"):
        return _name_by_psutil(pid)
    folder = root / "proc" / str(pid)
    if not os.path.exists(folder) or (opens and _has_open(folder, opens) is False):
        return ELSEWHERE if in_container(root, os.environ) else f"pid {pid}"
    words = (read_text(folder / "cmdline", limit=_LONGEST_COMMAND) or "").split("\0")
    return command_name(words) or read_line(folder / "comm") or f"pid {pid}"


def command_name(words: list[str]) -> str:
    """Return a command's name: its program, and the script if the program interprets one.

    >>> command_name(["/usr/bin/python3", "-u", "/srv/train.py", "--fast"])
    'python3 train.py'
    >>> command_name(["python", "-m", "torch.distributed.run"]), command_name(["/bin/cat", "file"])
    ('python torch.distributed.run', 'cat')
    """
    program = os.path.basename(words[0].partition(" ")[0]) if words else ""
    if not program.startswith(_INTERPRETERS):
        return program
    rest = iter(words[1:])
    for word in rest:
        if word in _WITH_VALUE:
            next(rest, None)
        elif word == "-m":
            return f"{program} {next(rest, '')}".strip()
        elif word == "-c":
            break
        elif word and not word.startswith("-"):
            return f"{program} {os.path.basename(word)}"
    return program


def _has_open(folder: Path, beginnings: tuple[str, ...]) -> bool | None:
    """Whether the process has such a file open; `None` if that is hidden from this user."""
    try:
        descriptors = list((folder / "fd").iterdir())
    except OSError:
        return None
    for descriptor in descriptors:
        with suppress(OSError):  # closed in between
            if os.readlink(descriptor).startswith(beginnings):
                return True
    return False


def _name_by_psutil(pid: int) -> str:
    try:
        process = psutil().Process(pid)
        return command_name(process.cmdline()) or str(process.name())
    except Exception:  # gone, hidden, or no psutil: errors of its own, and those of the system
        return f"pid {pid}"


def own_memory(
    root: Path = Path("/"), *, system: str = sys.platform
) -> tuple[int | None, int | None]:
    """Return the resident bytes of this process, now and at its peak; `None` if unknown.

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
    processes = psutil()
    if processes is None:
        return None, None
    memory: Any = processes.Process().memory_info()
    if system == "win32":
        return memory.rss, getattr(memory, "peak_wset", None)
    import resource

    # macOS counts it in bytes, the other systems with this call in KiB.
    unit = 1 if system == "darwin" else 1024
    return memory.rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
