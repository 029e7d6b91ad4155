"""Reads `/proc` and `/sys` of Linux, where any file may be missing or garbled, and gives `None`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from anydevice._core.record import Record

NVIDIA = 0x10DE
AMD = 0x1002
INTEL = 0x8086

DEVICES = "sys/bus/pci/devices"
"""The folder, below the root, that has one folder a device of the PCI bus."""

ELSEWHERE = "another container"

_DISPLAY = 0x03
_PROCESSING_ACCELERATOR = 0x12

_CONTAINER_FILES = (".dockerenv", "run/.containerenv")
_CONTAINER_VARIABLES = ("container", "KUBERNETES_SERVICE_HOST")
_CONTAINER_GROUPS = ("docker", "kubepods", "containerd", "libpod", "lxc")

# A limit has at most 20 digits; int() raises for very long texts.
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


def read_number(path: Path | str) -> int | None:
    """Return the integer that a file holds; `None` if it holds anything else ("max", nothing)."""
    return as_number(read_text(path, limit=64))


def as_number(text: str | None) -> int | None:
    """Return the integer that a text holds, or `None`.

    >>> as_number(" 4096 "), as_number("-1"), as_number("max"), as_number("1_000")
    (4096, -1, None, None)
    """
    match = _INTEGER.fullmatch(text or "")
    return int(match[1]) if match else None


def read_table(path: Path | str) -> dict[str, int]:
    """Return the lines "name number" of a file, without colons, "kB" made bytes."""
    table: dict[str, int] = {}
    for name, number, rest in _ROW.findall(read_text(path) or ""):
        table[name.rstrip(":")] = int(number) * 1024 if rest.strip() == "kB" else int(number)
    return table


def as_cpu_set(text: str | None) -> frozenset[int] | None:
    """Parse the kernel's list of processors, "0-3,8"; `None` if it is empty or garbled."""
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
    """Return the names of this Linux, in lower case, then those it is like; any SUSE is "suse"."""
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
    """Return the PCI addresses of a vendor's graphics and accelerator cards, sorted."""
    addresses = []
    classes = (_DISPLAY,) if vendor == INTEL else (_DISPLAY, _PROCESSING_ACCELERATOR)
    for name in sorted(names_in(root / DEVICES)):
        entry = root / DEVICES / name
        with suppress(OSError, ValueError):  # it may be unplugged after the listing
            if int((entry / "vendor").read_text(), 16) == vendor:
                device_class = int((entry / "class").read_text(), 16) >> 16
                if device_class in classes:
                    addresses.append(name)
    return tuple(addresses)


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
        import psutil

        try:
            process = psutil.Process(pid)
            return command_name(process.cmdline()) or str(process.name())
        except Exception:  # it ended or is hidden: psutil's own errors, or OSError
            return f"pid {pid}"
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


_earlier_peak = 0
"""The highest memory of this process before its peak was last reset."""


def own_memory(
    root: Path = Path("/"), *, system: str = sys.platform, since_reset: bool = False
) -> tuple[int | None, int | None]:
    """Return the resident bytes of this process, now and at its peak; `None` if unknown."""
    if system.startswith("linux"):
        table = read_table(root / "proc/self/status")
        now, peak = table.get("VmRSS"), table.get("VmHWM")
    else:
        now, peak = _by_psutil(system)
    earlier = 0 if since_reset else _earlier_peak
    # The kernel brings its counters up to date one after the other.
    return now, now if peak is None else max(peak, now or 0, earlier)


def reset_own_peak() -> bool:
    """Start the peak of this process again; return whether the system can do that."""
    global _earlier_peak
    _, peak = own_memory()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    _earlier_peak = peak or 0
    return True


def _by_psutil(system: str) -> tuple[int | None, int | None]:
    import psutil

    memory: Any = psutil.Process().memory_info()
    if system == "win32":
        return memory.rss, getattr(memory, "peak_wset", None)
    import resource

    # macOS counts it in bytes, the other systems with this call in KiB.
    unit = 1 if system == "darwin" else 1024
    return memory.rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


Controller = Literal["memory", "cpu", "cpuset"]

_UNLIMITED = 2**60
"""v1 writes "no limit" as the last page below 2**63; no machine has an exbibyte."""

_ESCAPED = re.compile(r"\\([0-7]{3})")


class MemoryLimit(Record):
    """A limit in bytes and its file; `free` is left now, with page cache, `None` if unknown."""

    limit: int
    free: int | None
    source: str


class CardMachine(Record):
    """The files and permissions of the machine or a recording; `cards` are PCI addresses."""

    root: Path
    environment: Mapping[str, str]
    accessible: Callable[[Path], bool]
    cards: tuple[str, ...]


class CgroupLimits(Record):
    """The limits of all control groups of this process; `None` if they set none.

    A process is in one control group (v2), or in one for each controller (v1), or both (hybrid).
    Every group on the way up can set a limit, and the tightest one holds. `memory.high` counts as
    much as `memory.max`: above it the kernel throttles, and tensors are anonymous memory that only
    swap could take. The soft limit of v1 and swap do not count.

    `memory` is the tightest limit, `memory_free` the least that any group has left. `cores` is the
    processor time as a number of cores, 1.5 for a quota of 150 ms in every 100 ms. `processors` are
    those that its cpuset allows.
    """

    memory: MemoryLimit | None = None
    memory_free: int | None = None
    cores: float | None = None
    processors: frozenset[int] | None = None


def cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """Return the limits of this process's control groups; never raises."""
    trees = _Trees.read(root)
    memory = _memory_limits(trees)
    quotas = (_quota(folder, version) for folder, version in trees.levels("cpu"))
    # The effective set of a group is already cut to those of its parents.
    names = {1: "cpuset.effective_cpus", 2: "cpuset.cpus.effective"}
    sets = (folder / names[version] for folder, version in trees.levels("cpuset"))
    processors = (as_cpu_set(read_text(file)) for file in sets)
    return CgroupLimits(
        memory=min(memory, key=lambda limit: limit.limit, default=None),
        memory_free=_least_free(memory),
        cores=min((quota for quota in quotas if quota is not None), default=None),
        processors=next(filter(None, processors), None),
    )


def cgroup_free_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that the control groups leave now; `None` without a limit."""
    return _least_free(_memory_limits(_Trees.read(root)))


def _least_free(limits: list[MemoryLimit]) -> int | None:
    return min((limit.free for limit in limits if limit.free is not None), default=None)


def _memory_limits(trees: _Trees) -> list[MemoryLimit]:
    limits: list[MemoryLimit] = []
    for position, (folder, version) in enumerate(trees.levels("memory")):
        if version == 2:
            limits += _memory_of_v2(folder)
        # Without it, a group's use is not charged to its parent.
        elif position == 0 or read_number(folder / "memory.use_hierarchy") != 0:
            limits += _memory_of_v1(folder, own=position == 0)
    return limits


def _memory_of_v2(folder: Path) -> list[MemoryLimit]:
    hard, high = folder / "memory.max", folder / "memory.high"
    sizes = {hard: read_number(hard), high: read_number(high)}
    if not any(sizes.values()):
        return []
    table = read_table(folder / "memory.stat")
    names = ("inactive_file", "active_file", "slab_reclaimable")
    reclaimable = sum(table.get(name, 0) for name in names)
    used = read_number(folder / "memory.current")
    # A zero in memory.high asks for reclaim once; it does not mean that nothing may be used.
    return [
        MemoryLimit(limit, _free_below(limit, used, reclaimable), str(file))
        for file, limit in sizes.items()
        if limit is not None and 0 < limit < _UNLIMITED
    ]


def _memory_of_v1(folder: Path, *, own: bool) -> list[MemoryLimit]:
    file = folder / "memory.limit_in_bytes"
    limit = read_number(file)
    if limit is not None and not 0 < limit < _UNLIMITED:
        limit = None
    if limit is None and not own:
        return []
    table = read_table(folder / "memory.stat")
    limits = []
    if limit is not None:
        # The names with "total_" include the groups below, as the usage does.
        names = ("inactive_file", "active_file")
        with_children = sum(table.get(f"total_{name}", 0) for name in names)
        reclaimable = with_children or sum(table.get(name, 0) for name in names)
        used = read_number(folder / "memory.usage_in_bytes")
        limits.append(MemoryLimit(limit, _free_below(limit, used, reclaimable), str(file)))
    above = table.get("hierarchical_memory_limit", _UNLIMITED)
    # Only this line of our own group tells of the groups above the mount.
    if own and 0 < above < (limit or _UNLIMITED):
        source = f"{folder / 'memory.stat'}: hierarchical_memory_limit"
        limits.append(MemoryLimit(above, None, source))
    return limits


def _free_below(limit: int, used: int | None, reclaimable: int) -> int | None:
    return None if used is None else max(0, limit - used + min(reclaimable, used))


def _quota(folder: Path, version: int) -> float | None:
    if version == 2:
        words = (read_text(folder / "cpu.max") or "").split()
        quota = as_number(words[0]) if words else None
        period = as_number(words[1]) if len(words) > 1 else 100_000
    else:
        quota = read_number(folder / "cpu.cfs_quota_us")
        period = read_number(folder / "cpu.cfs_period_us")
    if quota is None or period is None or quota <= 0 or period <= 0:
        return None
    return quota / period


class _Trees(Record):
    """The groups of this process in the trees of control groups (v2 as ""), and their mounts."""

    groups: dict[str, str]
    mounts: tuple[tuple[int, Collection[str], str, Path], ...]

    @classmethod
    def read(cls, root: Path) -> _Trees:
        """Read the files of `/proc` under `root`."""
        text = read_text(root / "proc/self/mountinfo")
        mounts = _usual_mounts(root) if text is None else _parse_mounts(root, text)
        return cls(_own_groups(root), tuple(mounts))

    def levels(self, controller: Controller) -> list[tuple[Path, int]]:
        """Return the folders of our group and its parents up to the mount, with the version."""
        levels = []
        for version, key in ((1, controller), (2, "")):
            group = self.groups.get(key, "/")
            candidates = []
            for mounted, controllers, subtree, folder in self.mounts:
                if mounted == version and (version == 2 or controller in controllers):
                    top = subtree.rstrip("/")
                    shows = ".." not in group.split("/") and f"{group}/".startswith(f"{top}/")
                    candidates.append((not shows, len(top), folder))
            if candidates:
                # Of several mounts of one tree, the one that shows our group and most parents. In
                # a container our group may have the host's name and be shown by none: the
                # container's own part is then at the mount itself.
                hidden, top_length, folder = min(candidates)
                parts = "" if hidden else group[top_length:].strip("/")
                for place in (folder / parts, *(folder / parts).parents):
                    if os.path.exists(place):
                        levels.append((place, version))
                    if place == folder:
                        break
        return levels


def _own_groups(root: Path) -> dict[str, str]:
    groups: dict[str, str] = {}
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, first, rest = line.partition(":")
        names, second, group = rest.partition(":")
        if first and second and group.startswith("/"):
            # A group whose folder was deleted under a running process is marked so by the kernel.
            group = group.removesuffix(" (deleted)")
            groups.update(dict.fromkeys(names.split(","), group))
    return groups


def _parse_mounts(root: Path, text: str) -> list[tuple[int, Collection[str], str, Path]]:
    mounts: list[tuple[int, Collection[str], str, Path]] = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        place, kind = left.split(" "), right.split(" ")
        if len(place) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        if "\\" in left:
            place = [_ESCAPED.sub(lambda match: chr(int(match[1], 8)), word) for word in place]
        version = 2 if kind[0] == "cgroup2" else 1
        mounts.append((version, kind[2].split(","), place[3], root / place[4].lstrip("/")))
    return mounts


def _usual_mounts(root: Path) -> list[tuple[int, Collection[str], str, Path]]:
    folder = root / "sys/fs/cgroup"
    names = [name for name in ("memory", "cpu", "cpuset") if os.path.exists(folder / name)]
    mounts: list[tuple[int, Collection[str], str, Path]] = [
        (1, (name,), "/", folder / name) for name in names
    ]
    if os.path.exists(folder / "cgroup.controllers"):
        mounts.append((2, (), "/", folder))
    return mounts
