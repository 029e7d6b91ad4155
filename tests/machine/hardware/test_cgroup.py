"""Control groups: trees of files as kernels and containers show them, and real groups here."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from anydevice._machine.hardware import linux
from anydevice._machine.hardware.linux import (
    CgroupLimits,
    as_cpu_set,
    cgroup_free_memory,
    cgroup_limits,
    read_number,
    read_table,
    read_text,
)
from tests.machine.tree import Tree, write_file
from tests.programs import output_of

GIB = 2**30
MIB = 2**20

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:10 - cgroup cgroup rw,cpu,cpuacct\n"
    "33 31 0:30 / /sys/fs/cgroup/memory rw shared:11 - cgroup cgroup rw,memory\n"
    "34 31 0:31 / /sys/fs/cgroup/cpuset rw shared:12 - cgroup cgroup rw,cpuset\n"
)
V1_GROUPS = "5:cpuset:{0}\n4:memory:{0}\n2:cpu,cpuacct:{0}\n1:name=systemd:{0}\n"
NO_LIMIT_V1 = 9223372036854771712


class Groups(Tree):
    """A `/proc` and `/sys` of a process, written file by file."""

    def v2(self, group: str, mounts: str = V2_MOUNT) -> Groups:
        return self.write({"proc/self/cgroup": f"0::{group}", "proc/self/mountinfo": mounts})

    def v1(self, group: str, mounts: str = V1_MOUNTS) -> Groups:
        groups = V1_GROUPS.format(group)
        return self.write({"proc/self/cgroup": groups, "proc/self/mountinfo": mounts})

    def group(self, files: Mapping[str, str | int]) -> Groups:
        """Write files of groups, named from the usual mount on."""
        return self.write(files, "sys/fs/cgroup")

    def limits(self) -> CgroupLimits:
        return cgroup_limits(self.root)

    def memory(self) -> tuple[int | None, int | None]:
        """Return the limit and what is free below it."""
        limits = self.limits()
        return limits.memory.limit if limits.memory else None, limits.memory_free


@pytest.fixture
def tree(tmp_path: Path) -> Groups:
    return Groups(tmp_path)


def test_without_any_control_group(tree: Groups) -> None:
    assert tree.limits() == CgroupLimits()
    assert cgroup_free_memory(tree.root) is None


V2_FILES = {
    "memory.max": 4 * GIB,
    "memory.high": "max",
    "memory.current": GIB,
    "memory.stat": "anon 500\nfile 900",
    "cpu.max": "150000 100000",
}


def test_limits_of_v2(tree: Groups) -> None:
    tree.v2("/user.slice/job.scope").write(V2_FILES, "sys/fs/cgroup/user.slice/job.scope")
    limits = tree.limits()
    assert (*tree.memory(), limits.cores) == (4 * GIB, 3 * GIB, 1.5)
    assert limits.memory.source.endswith("user.slice/job.scope/memory.max")
    assert cgroup_free_memory(tree.root) == 3 * GIB
    tree.v2("/a").group({"a/memory.max": "max", "a/memory.high": "max", "a/cpu.max": "max 100000"})
    assert tree.limits() == CgroupLimits()


def test_the_tightest_group_above_counts(tree: Groups) -> None:
    tree.v2("/pod/mine").group(
        {"pod/mine/memory.max": 8 * GIB, "pod/mine/cpu.max": "400000 100000"}
    )
    tree.group({"pod/memory.max": 2 * GIB, "pod/memory.current": GIB, "memory.stat": ""})
    tree.group({"pod/cpu.max": "50000 100000"})
    assert (*tree.memory(), tree.limits().cores) == (2 * GIB, GIB, 0.5)
    # The own group has most of its room left, but shares a parent that is nearly full.
    tree.group({"pod/mine/memory.max": 2 * GIB, "pod/mine/memory.current": 0})
    tree.group({"pod/memory.max": 4 * GIB, "pod/memory.current": 4 * GIB - 100 * MIB})
    assert tree.memory() == (2 * GIB, 100 * MIB)


CACHE = (
    f"anon {GIB}\nshmem {GIB}\ninactive_file {GIB}\nactive_file {MIB}\n"
    f"slab_reclaimable {2 * MIB}\nslab_unreclaimable 5"
)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        # Page cache counts as free.
        ({"max": 4 * GIB, "current": 3 * GIB + 3 * MIB, "stat": CACHE}, (4 * GIB, 2 * GIB)),
        # The two files are read at different moments.
        ({"max": 1000, "current": 400, "stat": "inactive_file 9000"}, (1000, 1000)),
        ({"max": 1000, "current": 4000}, (1000, 0)),
        ({"max": GIB, "high": 0}, (GIB, None)),
    ],
)
def test_free_in_v2(
    tree: Groups, files: dict[str, str | int], expected: tuple[int, int | None]
) -> None:
    tree.v2("/a").group({f"a/memory.{name}": content for name, content in files.items()})
    assert tree.memory() == expected


def test_memory_high_is_a_limit(tree: Groups) -> None:
    tree.v2("/a").group(
        {"a/memory.max": 4 * GIB, "a/memory.high": 3 * GIB, "a/memory.current": GIB}
    )
    assert tree.memory() == (3 * GIB, 2 * GIB)
    assert tree.limits().memory.source.endswith("memory.high")


@pytest.mark.parametrize(
    ("group", "place"),
    [
        ("/outer/inner", "outer/"),  # the controller is hidden in the own group
        ("/", ""),  # a container that sees itself as the root
        ("/system.slice/docker-4f5.scope", ""),  # a path of the host, which is not here
        ("/../../other", ""),  # outside of the namespace
        ("/..", ""),
        ("/a/b (deleted)", "a/"),
    ],
)
def test_where_the_limits_of_a_group_are(tree: Groups, group: str, place: str) -> None:
    tree.v2(group).group({f"{place}memory.max": GIB, f"{place}cpu.max": "200000 100000"})
    if place == "outer/":
        tree.group({"outer/inner/cgroup.procs": 1})
    assert (tree.memory()[0], tree.limits().cores) == (GIB, 2.0)


def test_a_mount_that_shows_only_a_part(tree: Groups) -> None:
    mounts = "30 23 0:26 /docker/4f5 /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
    tree.v2("/docker/4f5/job", mounts).group({"job/memory.max": 2 * GIB, "memory.max": GIB})
    assert tree.memory()[0] == GIB
    tree.v2("/docker/4f55", mounts)
    assert tree.memory()[0] == GIB


def test_of_several_mounts_the_one_that_shows_most(tree: Groups) -> None:
    mounts = (
        "29 23 0:26 /other /mnt/other rw - cgroup2 cgroup2 rw\n"
        "30 23 0:26 /pod /mnt/pod rw - cgroup2 cgroup2 rw\n" + V2_MOUNT
    )
    tree.v2("/pod/mine", mounts).group({"pod/mine/memory.max": 3 * GIB, "memory.max": 2 * GIB})
    tree.write({"mnt/pod/mine/memory.max": 5, "mnt/other/memory.max": 6})
    assert tree.memory()[0] == 2 * GIB


def test_a_mount_elsewhere_with_a_space_in_its_name(tree: Groups) -> None:
    tree.v2("/a", "30 23 0:26 / /mnt/my\\040groups rw - cgroup2 none rw\n")
    tree.write({"mnt/my groups/a/memory.max": GIB})
    assert tree.memory()[0] == GIB


def test_limits_of_v1(tree: Groups) -> None:
    memory, cpu = "memory/docker/4f5/memory", "cpu,cpuacct/docker/4f5/cpu.cfs"
    stat = f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file {MIB}\n"
    tree.v1("/docker/4f5").group({"memory/memory.limit_in_bytes": NO_LIMIT_V1})
    tree.group({f"{memory}.limit_in_bytes": 4 * GIB, f"{memory}.usage_in_bytes": 3 * GIB})
    tree.group({f"{memory}.soft_limit_in_bytes": MIB})
    tree.group({f"{memory}.stat": f"{stat}hierarchical_memory_limit {4 * GIB}"})
    tree.group({f"{cpu}_quota_us": 250000, f"{cpu}_period_us": 100000})
    tree.group({"cpuset/docker/4f5/cpuset.effective_cpus": "0-1,4"})
    assert tree.memory() == (4 * GIB, 2 * GIB + MIB)
    assert (tree.limits().cores, tree.limits().processors) == (2.5, {0, 1, 4})
    tree.v1("/")
    tree.group({"cpu,cpuacct/cpu.cfs_quota_us": -1, "cpu,cpuacct/cpu.cfs_period_us": 100000})
    assert tree.limits() == CgroupLimits()


def test_v1_statistics_of_the_group_alone(tree: Groups) -> None:
    tree.v1("/a").group(
        {
            "memory/a/memory.limit_in_bytes": 1000,
            "memory/a/memory.usage_in_bytes": 900,
            "memory/a/memory.stat": "inactive_file 100\nactive_file 50",
        }
    )
    assert tree.memory()[1] == 250


def test_v1_a_limit_above_what_is_mounted(tree: Groups) -> None:
    mounts = "33 31 0:30 /kubepods/pod1/c1 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    tree.v1("/kubepods/pod1/c1", mounts).group({"memory/memory.limit_in_bytes": NO_LIMIT_V1})
    tree.group({"memory/memory.stat": f"hierarchical_memory_limit {2 * GIB}"})
    assert tree.memory() == (2 * GIB, None)


def test_v1_parents_count_only_with_hierarchy(tree: Groups) -> None:
    tree.v1("/outer/inner").group({"memory/outer/inner/memory.limit_in_bytes": 4 * GIB})
    tree.group({"memory/outer/memory.limit_in_bytes": GIB, "memory/outer/memory.use_hierarchy": 0})
    assert tree.memory()[0] == 4 * GIB
    tree.group({"memory/outer/memory.use_hierarchy": 1})
    assert tree.memory()[0] == GIB


def test_memory_in_v1_and_processor_time_in_v2(tree: Groups) -> None:
    tree.v1("/a", V1_MOUNTS + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n")
    tree.write({"proc/self/cgroup": V1_GROUPS.format("/a") + "0::/b"})
    tree.group({"memory/a/memory.limit_in_bytes": GIB, "unified/b/cpu.max": "300000 100000"})
    tree.group({"unified/b/cpuset.cpus.effective": "2-3"})
    limits = tree.limits()
    assert (tree.memory()[0], limits.cores, limits.processors) == (GIB, 3.0, {2, 3})


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/", {"cgroup.controllers": "memory", "memory.max": GIB}),
        (V1_GROUPS.format("/"), {"memory/memory.limit_in_bytes": GIB}),
    ],
)
def test_mounts_that_are_hidden(tree: Groups, groups: str, files: dict[str, str | int]) -> None:
    tree.write({"proc/self/cgroup": groups}).group(files)
    assert tree.memory()[0] == GIB


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        *(("", None), ("garbage", None), ("0 100000", None), ("50000", 0.5), ("50000 0", None)),
        *(("50000 x", None), ("-5 100000", None), ("99999999999999999999999999 1", None)),
    ],
)
def test_a_garbled_quota(tree: Groups, text: str, cores: float | None) -> None:
    tree.v2("/a").group({"a/cpu.max": text})
    assert tree.limits().cores == cores


@pytest.mark.parametrize("text", ["", "lots", "-1", "1e9", "\x00\xff", "0"])
def test_a_garbled_memory_limit(tree: Groups, text: str) -> None:
    tree.v2("/a").group({"a/memory.max": text, "a/memory.current": 1})
    assert tree.limits() == CgroupLimits()
    tree.v1("/a").group({"memory/a/memory.limit_in_bytes": text, "memory/a/memory.stat": text})
    assert tree.limits() == CgroupLimits()


@pytest.mark.parametrize(
    ("file", "texts", "limit"),
    [
        ("cgroup", ["", "no colon", "0:/a", "0::relative", "x", "0::\n", "\x00", "::::"], GIB),
        ("mountinfo", ["", "x", "1 2 3 - cgroup2", "- cgroup2 a b", " - - - "], None),
    ],
)
def test_garbled_lists(tree: Groups, file: str, texts: list[str], limit: int | None) -> None:
    tree.v2("/").group({"memory.max": GIB})
    for text in texts:
        write_file(tree.root, f"proc/self/{file}", text)
        assert tree.memory()[0] == limit, text
        assert limit or tree.limits() == CgroupLimits(), text


def test_a_folder_where_a_file_should_be(tree: Groups) -> None:
    tree.v2("/a")
    for name in ("memory.max", "cpu.max", "cpuset.cpus.effective"):
        (tree.root / "sys/fs/cgroup/a" / name).mkdir(parents=True)
    assert tree.limits() == CgroupLimits()


def test_small_files(tmp_path: Path) -> None:
    table = write_file(tmp_path, "table", "MemTotal:  10 kB\nHugePages: 3\nempty\nword two\n")
    assert read_table(table) == {"MemTotal": 10240, "HugePages": 3}
    assert read_text(table, limit=8) == "MemTotal"
    assert (read_text("a\0b"), read_number(tmp_path)) == (None, None)
    assert (as_cpu_set("3-1"), as_cpu_set("0-99999999")) == (None, None)


# What follows makes real control groups, where this process may.

CHILD = """
import json, mmap, os, pathlib, sys
for folder in json.loads(sys.argv[1]):
    pathlib.Path(folder, "cgroup.procs").write_text(str(os.getpid()))
from anydevice._machine.hardware.cpu import reader as cpu
seen = cpu.look()
facts = seen.devices[0].facts
block = mmap.mmap(-1, 64 << 20)
for page in range(0, 64 << 20, 4096):
    block[page] = 1
filled = cpu.free_memory(0, facts)
with open(sys.argv[2], "wb") as file:
    for _ in range(48):
        file.write(bytes(1 << 20))
    file.flush()
    os.fsync(file.fileno())
cached = cpu.free_memory(0, facts)
print(json.dumps({
    "usable": facts.usable_memory, "free": facts.free_memory, "filled": filled, "cached": cached,
    "cores": facts.details["usable_cores"], "threads": facts.details["threads"],
    "notes": list(seen.notes),
}))
"""

LIMITS = {
    ("memory", 1): ("memory.limit_in_bytes", str(256 * MIB)),
    ("memory", 2): ("memory.max", str(256 * MIB)),
    ("cpu", 1): ("cpu.cfs_quota_us", "50000"),
    ("cpu", 2): ("cpu.max", "50000 100000"),
}


@pytest.fixture
def limited_groups() -> Iterator[list[Path]]:
    """Groups below ours with 256 MiB and half a processor, removed afterwards."""
    trees = linux._Trees.read(Path("/"))
    made: list[Path] = []
    try:
        for controller in ("memory", "cpu"):
            levels = trees.levels(controller)
            if not levels:
                pytest.skip(f"no control group limits {controller} here")
            parent, version = levels[0]
            folder = parent / f"anydevice-test-{os.getpid()}"
            if folder not in made:
                folder.mkdir()
                made.append(folder)
            file, value = LIMITS[controller, version]
            (folder / file).write_text(value)
        yield made
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    finally:
        for folder in made:
            folder.rmdir()


def test_a_real_group(limited_groups: list[Path], tmp_path: Path) -> None:
    places = json.dumps([str(folder) for folder in limited_groups])
    told: dict[str, Any] = json.loads(output_of("-c", CHILD, places, str(tmp_path / "scratch")))
    assert told["usable"] == 256 * MIB
    assert 128 * MIB < told["free"] <= 256 * MIB
    assert told["free"] - told["filled"] == pytest.approx(64 * MIB, abs=8 * MIB)
    assert (told["cores"], told["threads"]) == (0.5, 1)
    assert told["notes"][0].startswith("a cgroup limits memory to 256.0 MiB of ")
    assert told["notes"][-1].startswith("a cgroup limits processor time to 0.5 of ")
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, check=True)
    if kind.stdout.strip() in (b"tmpfs", b"ramfs"):
        pytest.skip("files here are memory, not page cache")
    assert told["cached"] == pytest.approx(told["filled"], abs=16 * MIB)
