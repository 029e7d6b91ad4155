"""Control groups: trees of files as kernels and containers show them, and real groups here."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
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
from tests.machine.tree import Tree
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
NO_LIMIT_V1 = "9223372036854771712\n"


class Groups(Tree):
    """A `/proc` and `/sys` of a process, written file by file."""

    def v2(self, group: str, mounts: str = V2_MOUNT) -> Groups:
        return self.write({"proc/self/cgroup": f"0::{group}\n", "proc/self/mountinfo": mounts})

    def v1(self, group: str, mounts: str = V1_MOUNTS) -> Groups:
        groups = V1_GROUPS.format(group)
        return self.write({"proc/self/cgroup": groups, "proc/self/mountinfo": mounts})

    def group(self, folder: str, **files: str) -> Groups:
        """Files of one group; `memory__max="…"` is written to `memory.max`."""
        place = f"sys/fs/cgroup/{folder}".rstrip("/")
        (self.root / place).mkdir(parents=True, exist_ok=True)
        return self.write({f"{place}/{n.replace('__', '.')}": f"{t}\n" for n, t in files.items()})

    def limits(self) -> CgroupLimits:
        return cgroup_limits(self.root)


@pytest.fixture
def tree(tmp_path: Path) -> Groups:
    return Groups(tmp_path)


def memory(limits: CgroupLimits) -> int | None:
    return limits.memory.limit if limits.memory else None


def test_without_any_control_group(tree: Groups) -> None:
    assert tree.limits() == CgroupLimits()
    assert cgroup_free_memory(tree.root) is None


def test_v2_plain(tree: Groups) -> None:
    tree.v2("/user.slice/job.scope").group(
        "user.slice/job.scope",
        memory__max=str(4 * GIB),
        memory__high="max",
        memory__current=str(GIB),
        memory__stat="anon 500\nfile 900",
        cpu__max="150000 100000",
    )
    limits = tree.limits()
    assert memory(limits) == 4 * GIB
    assert limits.memory_free == 3 * GIB
    assert limits.cores == 1.5
    assert limits.memory.source.endswith("user.slice/job.scope/memory.max")
    assert cgroup_free_memory(tree.root) == 3 * GIB


def test_v2_without_limits(tree: Groups) -> None:
    tree.v2("/a").group("a", memory__max="max", memory__high="max", cpu__max="max 100000")
    assert tree.limits() == CgroupLimits()


def test_v2_a_parent_is_tighter(tree: Groups) -> None:
    tree.v2("/pod/container")
    tree.group("pod/container", memory__max=str(8 * GIB), cpu__max="400000 100000")
    tree.group("pod", memory__max=str(2 * GIB), memory__current=str(GIB), cpu__max="50000 100000")
    tree.group("", memory__stat="")
    limits = tree.limits()
    assert (memory(limits), limits.memory_free, limits.cores) == (2 * GIB, GIB, 0.5)


def test_v2_a_neighbour_fills_the_parent(tree: Groups) -> None:
    """The own group has most of its room left, but shares a parent that is nearly full."""
    tree.v2("/pod/mine")
    tree.group("pod/mine", memory__max=str(2 * GIB), memory__current="0")
    tree.group("pod", memory__max=str(4 * GIB), memory__current=str(4 * GIB - 100 * MIB))
    assert memory(tree.limits()) == 2 * GIB
    assert tree.limits().memory_free == 100 * MIB


def test_v2_page_cache_counts_as_free(tree: Groups) -> None:
    stat = f"anon {GIB}\nshmem {GIB}\ninactive_file {GIB}\nactive_file {MIB}\n"
    tree.v2("/a").group(
        "a",
        memory__max=str(4 * GIB),
        memory__current=str(3 * GIB + 3 * MIB),
        memory__stat=f"{stat}slab_reclaimable {2 * MIB}\nslab_unreclaimable 5",
    )
    assert tree.limits().memory_free == 2 * GIB


def test_v2_more_cache_than_usage_is_not_more_than_the_limit(tree: Groups) -> None:
    """The two files are read at different moments."""
    tree.v2("/a").group(
        "a", memory__max="1000", memory__current="400", memory__stat="inactive_file 9000"
    )
    assert tree.limits().memory_free == 1000


def test_v2_usage_above_the_limit_leaves_nothing(tree: Groups) -> None:
    tree.v2("/a").group("a", memory__max="1000", memory__current="4000")
    assert tree.limits().memory_free == 0


def test_v2_memory_high_is_a_limit(tree: Groups) -> None:
    tree.v2("/a").group(
        "a", memory__max=str(4 * GIB), memory__high=str(3 * GIB), memory__current=str(GIB)
    )
    limits = tree.limits()
    assert (memory(limits), limits.memory_free) == (3 * GIB, 2 * GIB)
    assert limits.memory.source.endswith("memory.high")


def test_v2_a_zero_in_memory_high_is_none(tree: Groups) -> None:
    tree.v2("/a").group("a", memory__max=str(GIB), memory__high="0")
    assert memory(tree.limits()) == GIB
    assert tree.limits().memory_free is None


def test_v2_controller_hidden_in_the_own_group(tree: Groups) -> None:
    tree.v2("/outer/inner").group("outer/inner", cgroup__procs="1")
    tree.group("outer", memory__max=str(GIB), cpu__max="200000 100000")
    assert (memory(tree.limits()), tree.limits().cores) == (GIB, 2.0)


def test_a_container_that_sees_itself_as_the_root(tree: Groups) -> None:
    tree.v2("/").group("", memory__max=str(GIB), cpu__max="100000 100000")
    assert (memory(tree.limits()), tree.limits().cores) == (GIB, 1.0)


def test_a_container_whose_group_has_the_host_s_name(tree: Groups) -> None:
    """The path is the host's and does not exist here; the limits sit at the mount."""
    tree.v2("/system.slice/docker-4f5.scope").group("", memory__max=str(GIB))
    assert memory(tree.limits()) == GIB


def test_a_mount_that_shows_only_a_part(tree: Groups) -> None:
    mounts = "30 23 0:26 /docker/4f5 /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
    tree.v2("/docker/4f5/job", mounts)
    tree.group("job", memory__max=str(2 * GIB)).group("", memory__max=str(GIB))
    assert memory(tree.limits()) == GIB
    tree.v2("/docker/4f55", mounts)
    assert memory(tree.limits()) == GIB


@pytest.mark.parametrize("group", ["/../../other", "/.."])
def test_a_group_outside_of_the_namespace(tree: Groups, group: str) -> None:
    tree.v2(group).group("", memory__max=str(GIB))
    assert memory(tree.limits()) == GIB


def test_of_several_mounts_the_one_that_shows_most(tree: Groups) -> None:
    mounts = (
        "29 23 0:26 /other /mnt/other rw - cgroup2 cgroup2 rw\n"
        "30 23 0:26 /pod /mnt/pod rw - cgroup2 cgroup2 rw\n" + V2_MOUNT
    )
    tree.v2("/pod/mine", mounts).group("pod/mine", memory__max=str(3 * GIB))
    tree.group("", memory__max=str(2 * GIB))
    tree.write({"mnt/pod/mine/memory.max": "5", "mnt/other/memory.max": "6"})
    assert memory(tree.limits()) == 2 * GIB


def test_a_mount_elsewhere_with_a_space_in_its_name(tree: Groups) -> None:
    tree.v2("/a", "30 23 0:26 / /mnt/my\\040groups rw - cgroup2 none rw\n")
    tree.write({"mnt/my groups/a/memory.max": f"{GIB}\n"})
    assert memory(tree.limits()) == GIB


def test_a_group_that_was_deleted_under_the_process(tree: Groups) -> None:
    tree.v2("/a/b (deleted)").group("a", memory__max=str(GIB))
    assert memory(tree.limits()) == GIB


def test_v1_with_limits(tree: Groups) -> None:
    tree.v1("/docker/4f5")
    tree.group(
        "memory/docker/4f5",
        memory__limit_in_bytes=str(4 * GIB),
        memory__usage_in_bytes=str(3 * GIB),
        memory__soft_limit_in_bytes=str(MIB),
        memory__stat=f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file {MIB}\n"
        f"hierarchical_memory_limit {4 * GIB}",
    )
    tree.group("memory", memory__limit_in_bytes=NO_LIMIT_V1.strip())
    tree.group("cpu,cpuacct/docker/4f5", cpu__cfs_quota_us="250000", cpu__cfs_period_us="100000")
    tree.group("cpuset/docker/4f5", cpuset__effective_cpus="0-1,4")
    limits = tree.limits()
    assert (memory(limits), limits.memory_free) == (4 * GIB, 2 * GIB + MIB)
    assert limits.cores == 2.5
    assert limits.processors == {0, 1, 4}


def test_v1_without_limits(tree: Groups) -> None:
    tree.v1("/")
    tree.group("memory", memory__limit_in_bytes=NO_LIMIT_V1.strip())
    tree.group("cpu,cpuacct", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert tree.limits() == CgroupLimits()


def test_v1_statistics_of_the_group_alone(tree: Groups) -> None:
    tree.v1("/a").group(
        "memory/a",
        memory__limit_in_bytes="1000",
        memory__usage_in_bytes="900",
        memory__stat="inactive_file 100\nactive_file 50",
    )
    assert tree.limits().memory_free == 250


def test_v1_a_limit_above_what_is_mounted(tree: Groups) -> None:
    mounts = "33 31 0:30 /kubepods/pod1/c1 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    tree.v1("/kubepods/pod1/c1", mounts).group(
        "memory",
        memory__limit_in_bytes=NO_LIMIT_V1.strip(),
        memory__stat=f"hierarchical_memory_limit {2 * GIB}",
    )
    limits = tree.limits()
    assert (memory(limits), limits.memory_free) == (2 * GIB, None)


def test_v1_parents_count_only_with_hierarchy(tree: Groups) -> None:
    tree.v1("/outer/inner").group("memory/outer/inner", memory__limit_in_bytes=str(4 * GIB))
    tree.group("memory/outer", memory__limit_in_bytes=str(GIB), memory__use_hierarchy="0")
    assert memory(tree.limits()) == 4 * GIB
    tree.group("memory/outer", memory__use_hierarchy="1")
    assert memory(tree.limits()) == GIB


def test_hybrid(tree: Groups) -> None:
    """Memory in v1, processor time in v2."""
    mounts = V1_MOUNTS + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    tree.v1("/a", mounts)
    groups = (tree.root / "proc/self/cgroup").read_text() + "0::/b\n"
    tree.write({"proc/self/cgroup": groups})
    tree.group("memory/a", memory__limit_in_bytes=str(GIB))
    tree.group("unified/b", cpu__max="300000 100000", cpuset__cpus__effective="2-3")
    limits = tree.limits()
    assert (memory(limits), limits.cores, limits.processors) == (GIB, 3.0, {2, 3})


def test_mounts_that_are_hidden(tree: Groups) -> None:
    tree.write({"proc/self/cgroup": "0::/\n"})
    tree.group("", cgroup__controllers="memory", memory__max=str(GIB))
    assert memory(tree.limits()) == GIB


def test_mounts_of_v1_that_are_hidden(tree: Groups) -> None:
    tree.write({"proc/self/cgroup": V1_GROUPS.format("/")})
    tree.group("memory", memory__limit_in_bytes=str(GIB))
    assert memory(tree.limits()) == GIB


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("", None),
        ("garbage", None),
        ("0 100000", None),
        ("50000", 0.5),
        ("50000 0", None),
        ("50000 x", None),
        ("-5 100000", None),
        ("99999999999999999999999999 1", None),
    ],
)
def test_a_garbled_quota(tree: Groups, text: str, cores: float | None) -> None:
    tree.v2("/a").group("a", cpu__max=text)
    assert tree.limits().cores == cores


@pytest.mark.parametrize("text", ["", "lots", "-1", "1e9", "\x00\xff", "0"])
def test_a_garbled_memory_limit(tree: Groups, text: str) -> None:
    tree.v2("/a").group("a", memory__max=text, memory__current="1")
    assert tree.limits() == CgroupLimits()
    tree.v1("/a").group("memory/a", memory__limit_in_bytes=text, memory__stat=text)
    assert tree.limits() == CgroupLimits()


@pytest.mark.parametrize(
    "text", ["", "no colon", "0:/a", "0::relative", "x", "0::\n", "\x00", "::::"]
)
def test_a_garbled_list_of_groups(tree: Groups, text: str) -> None:
    tree.v2("/").group("", memory__max=str(GIB)).write({"proc/self/cgroup": text})
    assert memory(tree.limits()) == GIB


@pytest.mark.parametrize("text", ["", "x", "1 2 3 - cgroup2", "- cgroup2 a b", " - - - "])
def test_garbled_mounts(tree: Groups, text: str) -> None:
    tree.v2("/").group("", memory__max=str(GIB)).write({"proc/self/mountinfo": text})
    assert tree.limits() == CgroupLimits()


def test_a_folder_where_a_file_should_be(tree: Groups) -> None:
    tree.v2("/a").group("a/memory.max").group("a/cpu.max").group("a/cpuset.cpus.effective")
    assert tree.limits() == CgroupLimits()


def test_small_files(tmp_path: Path) -> None:
    table = tmp_path / "table"
    table.write_text("MemTotal:  10 kB\nHugePages: 3\nempty\nword two\n")
    assert read_table(table) == {"MemTotal": 10240, "HugePages": 3}
    assert read_text(table, limit=8) == "MemTotal"
    assert read_text("a\0b") is None
    assert read_number(tmp_path) is None
    assert as_cpu_set("3-1") is None
    assert as_cpu_set("0-99999999") is None


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


def ask_inside(groups: list[Path], scratch: Path) -> dict[str, Any]:
    places = json.dumps([str(folder) for folder in groups])
    told: dict[str, Any] = json.loads(output_of("-c", CHILD, places, str(scratch)))
    return told


def test_a_real_group(limited_groups: list[Path], tmp_path: Path) -> None:
    told = ask_inside(limited_groups, tmp_path / "scratch")
    assert told["usable"] == 256 * MIB
    assert 128 * MIB < told["free"] <= 256 * MIB
    assert told["free"] - told["filled"] == pytest.approx(64 * MIB, abs=8 * MIB)
    assert (told["cores"], told["threads"]) == (0.5, 1)
    assert told["notes"][0].startswith("a cgroup limits memory to 256.0 MiB of ")
    assert told["notes"][-1].startswith("a cgroup limits processor time to 0.5 of ")


def test_page_cache_in_a_real_group(limited_groups: list[Path], tmp_path: Path) -> None:
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, check=True)
    if kind.stdout.strip() in (b"tmpfs", b"ramfs"):
        pytest.skip("temporary files are kept in memory here, which is no page cache")
    told = ask_inside(limited_groups, tmp_path / "scratch")
    assert told["cached"] == pytest.approx(told["filled"], abs=16 * MIB)
