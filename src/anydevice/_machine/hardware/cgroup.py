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

import os
import re
from collections.abc import Collection
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
    """Return the limits on this process, or on the one whose `/proc` and `/sys` are under `root`.

    Never raises: a group that cannot be read sets no limit that could be known.
    """
    trees = _Trees.read(root)
    memory = _memory_limits(trees)
    quotas = (_quota(folder, version) for folder, version in trees.levels("cpu"))
    return CgroupLimits(
        memory=min(memory, key=lambda limit: limit.limit, default=None),
        memory_free=_least_free(memory),
        cores=min((quota for quota in quotas if quota is not None), default=None),
        processors=_processors(trees),
    )


def free_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that the groups leave now; `None` if none of them limits it."""
    return _least_free(_memory_limits(_Trees.read(root)))


def _least_free(limits: list[MemoryLimit]) -> int | None:
    return min((limit.free for limit in limits if limit.free is not None), default=None)


def _memory_limits(trees: _Trees) -> list[MemoryLimit]:
    limits: list[MemoryLimit] = []
    for position, (folder, version) in enumerate(trees.levels("memory")):
        if version == 2:
            limits += _memory_of_v2(folder)
        # Without it, what a group uses is not charged to its parent.
        elif position == 0 or linux.read_number(folder / "memory.use_hierarchy") != 0:
            limits += _memory_of_v1(folder, own=position == 0)
    return limits


def _memory_of_v2(folder: Path) -> list[MemoryLimit]:
    hard, high = folder / "memory.max", folder / "memory.high"
    sizes = {hard: linux.read_number(hard), high: linux.read_number(high)}
    if not any(sizes.values()):
        return []
    table = linux.read_table(folder / "memory.stat")
    reclaimable = _sum(table, "inactive_file", "active_file", "slab_reclaimable")
    used = linux.read_number(folder / "memory.current")
    # A zero in memory.high asks for reclaim once; it does not mean that nothing may be used.
    return [
        MemoryLimit(limit, _free_below(limit, used, reclaimable), str(file))
        for file, limit in sizes.items()
        if limit is not None and 0 < limit < _UNLIMITED
    ]


def _memory_of_v1(folder: Path, *, own: bool) -> list[MemoryLimit]:
    file = folder / "memory.limit_in_bytes"
    limit = linux.read_number(file)
    if limit is not None and not 0 < limit < _UNLIMITED:
        limit = None
    if limit is None and not own:
        return []
    table = linux.read_table(folder / "memory.stat")
    limits = []
    if limit is not None:
        # The names with "total_" include the groups below, as the usage does.
        reclaimable = _sum(table, "total_inactive_file", "total_active_file") or _sum(
            table, "inactive_file", "active_file"
        )
        used = linux.read_number(folder / "memory.usage_in_bytes")
        limits.append(MemoryLimit(limit, _free_below(limit, used, reclaimable), str(file)))
    above = table.get("hierarchical_memory_limit", _UNLIMITED)
    # Only this line of our own group tells of the groups above the mount.
    if own and 0 < above < (limit or _UNLIMITED):
        source = f"{folder / 'memory.stat'}: hierarchical_memory_limit"
        limits.append(MemoryLimit(above, None, source))
    return limits


def _sum(table: dict[str, int], *names: str) -> int:
    return sum(table.get(name, 0) for name in names)


def _free_below(limit: int, used: int | None, reclaimable: int) -> int | None:
    return None if used is None else max(0, limit - used + min(reclaimable, used))


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


class _Trees(Record):
    """The position of this process in the trees of control groups.

    `groups` has its group by controller of v1, and its group of v2 under the empty name. A mount
    is the version, the controllers, the part of the tree that it shows, and its folder.
    """

    groups: dict[str, str]
    mounts: tuple[tuple[int, Collection[str], str, Path], ...]

    @classmethod
    def read(cls, root: Path) -> _Trees:
        """Read the files of `/proc` under `root`."""
        text = linux.read_text(root / "proc/self/mountinfo")
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
    for line in (linux.read_text(root / "proc/self/cgroup") or "").splitlines():
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
