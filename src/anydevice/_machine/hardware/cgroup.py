"""Limits that the control groups of Linux set: memory, processor time, processors.

A process is in one control group (v2), or in one for each controller (v1), or both (hybrid). Every
group on the way up can set a limit of its own, and the tightest one holds. Which folder is ours
stands in `/proc/self/cgroup`; where the trees are mounted, and which part of them, stands in
`/proc/self/mountinfo`: nothing is assumed about `/sys/fs/cgroup`.

Of the limits on memory, `memory.max` (v1: `memory.limit_in_bytes`) is hard. `memory.high` counts as
a limit too: above it the kernel reclaims and throttles without end, and since tensors are anonymous
memory that only swap could take, a program that goes there hardly moves any more. The soft limit of
v1 does not count: it matters only while others are short of memory. Swap is never counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from anydevice._core.record import Record
from anydevice._machine.hardware import linux

Controller = Literal["memory", "cpu", "cpuset"]

_UNLIMITED = 2**60
"""v1 writes "no limit" as the last page below 2**63; no machine has an exbibyte."""

_ESCAPED = re.compile(r"\\([0-7]{3})")


class MemoryLimit(Record):
    """A limit on memory, in bytes, and the file that sets it.

    `free` is what is left of it now, page cache that can be given back included; `None` if the
    group does not show what it uses.
    """

    limit: int
    free: int | None
    source: str


class CgroupLimits(Record):
    """The limits of all control groups of this process; `None` if they set none.

    `memory` is the tightest limit, `memory_free` the least that any group has left. `cores` is the
    processor time as a number of cores, 1.5 for a quota of 150 ms in every 100 ms. `processors` are
    those that its cpuset allows.
    """

    memory: MemoryLimit | None = None
    memory_free: int | None = None
    cores: float | None = None
    processors: frozenset[int] | None = None


def read_limits(root: Path = Path("/")) -> CgroupLimits:
    """The limits on this process, or on the one whose `/proc` and `/sys` lie under `root`.

    Never raises: a group that cannot be read sets no limit that could be known.
    """
    trees = _Trees.read(root)
    memory = _memory_limits(trees)
    quotas = (_quota(folder, version) for folder, version in trees.levels("cpu"))
    return CgroupLimits(
        memory=min(memory, key=lambda each: each.limit, default=None),
        memory_free=_least_free(memory),
        cores=min((quota for quota in quotas if quota is not None), default=None),
        processors=_processors(trees),
    )


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes of memory that the groups leave now; `None` if none of them limits it."""
    return _least_free(_memory_limits(_Trees.read(root)))


def _least_free(limits: list[MemoryLimit]) -> int | None:
    return min((each.free for each in limits if each.free is not None), default=None)


def _memory_limits(trees: _Trees) -> list[MemoryLimit]:
    limits: list[MemoryLimit] = []
    for position, (folder, version) in enumerate(trees.levels("memory")):
        if version == 2:
            limits += _memory_of_v2(folder)
        # Without it, what a group uses is not charged to its parent.
        elif position == 0 or linux.read_number(folder / "memory.use_hierarchy") != 0:
            limits += _memory_of_v1(folder, own=position == 0)
    return limits


def _memory_of_v2(folder: Path) -> Iterator[MemoryLimit]:
    found = {name: linux.read_number(folder / name) for name in ("memory.max", "memory.high")}
    if not any(found.values()):
        return
    table = linux.read_table(folder / "memory.stat")
    reclaimable = _sum(table, "inactive_file", "active_file", "slab_reclaimable")
    used = linux.read_number(folder / "memory.current")
    for name, limit in found.items():
        # A zero in memory.high asks for reclaim once; it does not mean that nothing may be used.
        if limit is not None and 0 < limit < _UNLIMITED:
            yield MemoryLimit(limit, _left(limit, used, reclaimable), str(folder / name))


def _memory_of_v1(folder: Path, *, own: bool) -> Iterator[MemoryLimit]:
    limit = linux.read_number(folder / "memory.limit_in_bytes")
    limited = limit is not None and 0 < limit < _UNLIMITED
    if not (limited or own):
        return
    table = linux.read_table(folder / "memory.stat")
    # The names with "total_" include the groups below, as the usage does.
    reclaimable = _sum(table, "total_inactive_file", "total_active_file") or _sum(
        table, "inactive_file", "active_file"
    )
    if limit is not None and limited:
        used = linux.read_number(folder / "memory.usage_in_bytes")
        source = str(folder / "memory.limit_in_bytes")
        yield MemoryLimit(limit, _left(limit, used, reclaimable), source)
    above = table.get("hierarchical_memory_limit")
    # Of groups above what is mounted here, only this line of our own group tells.
    if own and above is not None and 0 < above < min(limit or _UNLIMITED, _UNLIMITED):
        yield MemoryLimit(above, None, f"{folder / 'memory.stat'}: hierarchical_memory_limit")


def _sum(table: dict[str, int], *names: str) -> int:
    return sum(table.get(name, 0) for name in names)


def _left(limit: int, used: int | None, reclaimable: int) -> int | None:
    if used is None:
        return None
    return max(0, limit - used + min(reclaimable, used))


def _quota(folder: Path, version: int) -> float | None:
    if version == 2:
        words = (linux.read_text(folder / "cpu.max") or "").split()
        quota = linux.as_number(words[0]) if words else None
        period = linux.as_number(words[1]) if len(words) > 1 else 100_000
    else:
        quota = linux.read_number(folder / "cpu.cfs_quota_us")
        period = linux.read_number(folder / "cpu.cfs_period_us")
    if quota is None or period is None or quota <= 0 or period <= 0:
        return None
    return quota / period


def _processors(trees: _Trees) -> frozenset[int] | None:
    # The effective set of a group is already cut to those of its parents.
    for folder, version in trees.levels("cpuset"):
        name = "cpuset.cpus.effective" if version == 2 else "cpuset.effective_cpus"
        allowed = linux.as_cpu_set(linux.read_text(folder / name))
        if allowed is not None:
            return allowed
    return None


class _Mount(Record):
    version: int
    controllers: frozenset[str]
    subtree: str
    """The path inside the tree of groups that is visible at `folder`."""
    folder: Path

    def shows(self, group: str) -> bool:
        if ".." in group.split("/"):
            return False
        return f"{group}/".startswith(f"{self.subtree.rstrip('/')}/")

    def upward(self, group: str) -> Iterator[Path]:
        """The folders of a group and its parents, up to the mount."""
        # Inside a container the group may be named as the host names it, and not exist here: what
        # does exist is then the part that belongs to the container, at the mount itself.
        below = group[len(self.subtree.rstrip("/")) :] if self.shows(group) else ""
        parts = [part for part in below.split("/") if part]
        for depth in range(len(parts), -1, -1):
            folder = self.folder.joinpath(*parts[:depth])
            if linux.exists(folder):
                yield folder


class _Trees(Record):
    """Where this process stands in the trees of control groups."""

    groups: dict[str, str]
    """Our group by controller of v1; that of v2 under the empty name."""
    mounts: tuple[_Mount, ...]

    @classmethod
    def read(cls, root: Path) -> _Trees:
        return cls(_own_groups(root), tuple(_mounts(root)))

    def levels(self, controller: Controller) -> Iterator[tuple[Path, int]]:
        """The folders of our group and its parents, as far as they are mounted, and the version."""
        for version, key in ((1, controller), (2, "")):
            group = self.groups.get(key, "/")
            candidates = [
                mount
                for mount in self.mounts
                if mount.version == version and (version == 2 or controller in mount.controllers)
            ]
            if candidates:
                # Of several mounts of one tree, the one that shows our group and most parents.
                best = min(candidates, key=lambda each: (not each.shows(group), len(each.subtree)))
                yield from ((folder, version) for folder in best.upward(group))


def _own_groups(root: Path) -> dict[str, str]:
    groups: dict[str, str] = {}
    for line in (linux.read_text(root / "proc/self/cgroup") or "").splitlines():
        _, first, rest = line.partition(":")
        names, second, group = rest.partition(":")
        if first and second and group.startswith("/"):
            # A group whose folder was deleted under a running process is marked so by the kernel.
            group = group.removesuffix(" (deleted)")
            groups.update(dict.fromkeys(names.split(","), group))
    return groups


def _mounts(root: Path) -> Iterator[_Mount]:
    text = linux.read_text(root / "proc/self/mountinfo")
    if text is None:
        yield from _usual_mounts(root)
    for line in (text or "").splitlines():
        left, _, right = line.partition(" - ")
        place, kind = left.split(" "), right.split(" ")
        if len(place) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        yield _Mount(
            version=2 if kind[0] == "cgroup2" else 1,
            controllers=frozenset(kind[2].split(",")),
            subtree=_unescape(place[3]),
            folder=root / _unescape(place[4]).lstrip("/"),
        )


def _usual_mounts(root: Path) -> Iterator[_Mount]:
    folder = root / "sys/fs/cgroup"
    if linux.exists(folder / "cgroup.controllers"):
        yield _Mount(2, frozenset(), "/", folder)
    for name in ("memory", "cpu", "cpuset"):
        if linux.exists(folder / name):
            yield _Mount(1, frozenset({name}), "/", folder / name)


def _unescape(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)
