"""The CPU reader: files in the form that kernels and systems write them, and this machine."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from anydevice._core.finding import BackendScan, Facts
from anydevice._machine.hardware.cpu import facts as cpu_model
from anydevice._machine.hardware.cpu import reader as cpu
from anydevice._machine.hardware.cpu.facts import read_linux, read_windows, tidy_name
from tests.machine.tree import Tree
from tests.programs import output_of
from tests.reasons import text_of

GIB = 2**30
RECORDED = Path(__file__).parents[3] / "recorded" / "cpu"
MEMINFO = (
    f"MemTotal: {64 * 2**20} kB\nMemFree: {8 * 2**20} kB\nMemAvailable: {48 * 2**20} kB\n"
    f"Buffers: {2**20} kB\nCached: {30 * 2**20} kB\nSwapFree: {99 * 2**20} kB\n"
    f"Shmem: {4 * 2**20} kB\nSReclaimable: {2 * 2**20} kB\n"
)

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="compares with Linux itself")


class Linux(Tree):
    """A Linux machine as files."""

    def processors(self, siblings: Sequence[str], *, file: str = "core_cpus_list") -> Linux:
        """One text a processor: those that share its core."""
        files = {f"cpu{number}/topology/{file}": text for number, text in enumerate(siblings)}
        return self.write(
            {"online": f"0-{len(siblings) - 1}", **files}, folder="sys/devices/system/cpu"
        )

    def allowed(self, processors: str) -> Linux:
        text = f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t{processors}"
        return self.write({"proc/self/status": text})

    def group(self, files: dict[str, str | int]) -> Linux:
        mounts = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
        self.write({"proc/self/cgroup": "0::/job", "proc/self/mountinfo": mounts})
        return self.write(files, "sys/fs/cgroup/job")

    def look(self, machine: str = "x86_64") -> BackendScan:
        return cpu.look(1.0, root=self.root, system="linux", host=Answers(machine))

    def facts(self, machine: str = "x86_64") -> Facts:
        return self.look(machine).devices[0].facts


class Answers(cpu.Host):
    """A host that answers from a recording, and knows nothing that is not in it."""

    def __init__(
        self, machine: str, *, output: str | None = None, features: Sequence[int] = (), **known: Any
    ) -> None:
        unknown = {"memory": None, "core_counts": (None, None), "allowed": None}
        answers = {"machine": machine, **unknown, "registry_name": None, **known}
        for method, answer in answers.items():
            setattr(self, method, lambda answer=answer: answer)
        self.has_feature = features.__contains__
        self._output = output
        self.commands: list[Sequence[str]] = []

    def run(self, command: Sequence[str], limit: float) -> str | None:
        self.commands.append(command)
        return self._output


@pytest.fixture
def tree(tmp_path: Path) -> Linux:
    return Linux(tmp_path).write({"proc/meminfo": MEMINFO})


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def test_a_server_with_two_threads_a_core(tree: Linux) -> None:
    tree.write({"proc/cpuinfo": recorded("sapphire-rapids.cpuinfo")})
    tree.processors(["0-1", "0-1", "2-3", "2-3"]).allowed("0-3")
    scan = tree.look()
    assert (scan.backend, scan.present, scan.stage) == ("cpu", True, None)
    assert scan.notes == ()
    (seen,) = scan.devices
    assert (seen.index, seen.kind, text_of(seen)) == (0, "cpu", None)
    facts = seen.facts
    assert facts.name == "Intel Xeon Platinum 8481C"
    assert facts.architecture == "x86-64-v4 (AVX-512, AMX)"
    assert facts.memory_kind == "host"
    assert (facts.total_memory, facts.usable_memory) == (64 * GIB, 64 * GIB)
    assert facts.free_memory == 48 * GIB
    assert (facts.uuid, facts.driver_version, facts.runtime_version) == (None, None, None)
    assert dict(facts.details) == {
        "physical_cores": 2,
        "logical_cores": 4,
        "usable_cores": 4.0,
        "simd": "AVX-512, VNNI, BF16, FP16, AMX",
        "threads": 2,
    }


def test_topology_of_virtual_machines_and_older_kernels(tree: Linux, tmp_path: Path) -> None:
    tree.write({"proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC-Rome Processor\n\n"})
    tree.write({"sys/devices/system/cpu/online": "0-3"})
    facts = tree.facts()
    assert (facts.name, facts.details["threads"]) == ("AMD EPYC-Rome", 4)
    assert facts.details["physical_cores"] == facts.details["logical_cores"] == 4
    tree.processors(["0,2", "1,3", "0,2", "1,3"], file="thread_siblings_list")
    assert tree.facts().details["physical_cores"] == 2
    alone = Linux(tmp_path / "alone").write({"proc/cpuinfo": recorded("sapphire-rapids.cpuinfo")})
    details = alone.facts().details
    assert (details["physical_cores"], details["logical_cores"]) == (2, 4)


def test_the_processors_that_a_process_may_use(tree: Linux) -> None:
    tree.processors(["0-1", "0-1", "2-3", "2-3", "4-5", "4-5"])
    scan = tree.allowed("0-2,9").look()
    details = scan.devices[0].facts.details
    assert (details["usable_cores"], details["threads"]) == (3.0, 2)
    assert scan.notes == ("this process may run on 3 of 6 processors",)
    tree.write({"proc/thread-self/status": "Cpus_allowed_list:\t3"})
    assert tree.facts().details["usable_cores"] == 1.0  # the asking thread's mask comes first
    shutil.rmtree(tree.root / "proc")
    tree.group({"cpuset.cpus.effective": "1-2"})
    assert tree.facts().details["usable_cores"] == 2.0  # the mask is hidden


@pytest.mark.parametrize(
    ("quota", "cores", "threads"),
    [("150000 100000", 1.5, 1), ("50000 100000", 0.5, 1), ("300000 100000", 3.0, 2)],
)
def test_a_quota(tree: Linux, quota: str, cores: float, threads: int) -> None:
    tree.processors(["0-1", "0-1", "2-3", "2-3"]).allowed("0-3").group({"cpu.max": quota})
    scan = tree.look()
    details = scan.devices[0].facts.details
    assert (details["usable_cores"], details["threads"]) == (cores, threads)
    assert scan.notes == (f"a cgroup limits processor time to {cores:g} of 4 processors",)


def test_limits_of_memory_and_limits_beyond_the_machine(tree: Linux) -> None:
    tree.processors(["0", "1"]).group({"cpu.max": "900000 100000"})
    tree.group({"memory.max": 100 * GIB, "memory.current": GIB})
    facts = tree.facts()
    assert facts.details["usable_cores"] == 2.0
    assert (facts.usable_memory, facts.free_memory) == (64 * GIB, 48 * GIB)
    assert tree.look().notes == ()
    tree.group({"memory.max": 4 * GIB})
    facts, source = tree.facts(), tree.root / "sys/fs/cgroup/job/memory.max"
    assert (facts.total_memory, facts.usable_memory) == (64 * GIB, 4 * GIB)
    assert tree.look().notes == (f"a cgroup limits memory to 4.0 GiB of 64.0 GiB ({source})",)
    assert facts.free_memory == 3 * GIB
    assert cpu.free_memory(0, facts, root=tree.root, system="linux") == 3 * GIB
    tree.write({"proc/meminfo": ""})
    (source.parent / "memory.current").unlink()
    facts = tree.facts()
    assert (facts.total_memory, facts.usable_memory, facts.free_memory) == (None, 4 * GIB, 4 * GIB)
    assert tree.look().notes[0].startswith("a cgroup limits memory to 4.0 GiB (")


def test_free_memory_is_read_anew_and_never_above_what_is_usable(tree: Linux) -> None:
    facts = tree.facts()
    tree.write({"proc/meminfo": MEMINFO.replace(str(48 * 2**20), str(5 * 2**20))})
    assert cpu.free_memory(0, facts, root=tree.root, system="linux") == 5 * GIB
    limited = Facts(name="x", usable_memory=GIB)
    assert cpu.free_memory(0, limited, root=tree.root, system="linux") == GIB


def test_a_kernel_that_does_not_add_up_available_memory(tree: Linux) -> None:
    """Free, buffers, cache and reclaimable slab, without shared memory; and no swap."""
    old = "\n".join(x for x in MEMINFO.splitlines() if not x.startswith("MemAvailable"))
    tree.write({"proc/meminfo": old})
    assert tree.facts().free_memory == (8 + 1 + 30 + 2 - 4) * GIB


def test_nothing_can_be_read(tmp_path: Path) -> None:
    scan = Linux(tmp_path).look("riscv64")
    facts = scan.devices[0].facts
    assert (facts.name, facts.architecture) == ("riscv64", "riscv64")
    assert (facts.total_memory, facts.usable_memory, facts.free_memory) == (None, None, None)
    assert facts.details["threads"] == 1
    assert cpu.free_memory(0, facts, root=tmp_path, system="linux") is None


def test_every_file_is_garbled(tree: Linux) -> None:
    tree.processors(["0", "1"]).allowed("0").group({"memory.max": 1})
    tree.write({"proc/cpuinfo": ""})
    for file in tree.root.rglob("*"):
        if file.is_file():
            file.write_bytes(b"\x00::: -- \xff")
    facts = tree.facts()
    assert (facts.name, facts.total_memory) == ("x86_64", None)
    assert facts.details["threads"] == 1


def test_processors_that_only_the_mask_tells(tmp_path: Path) -> None:
    details = Linux(tmp_path).allowed("0-3").facts().details
    assert (details["logical_cores"], details["usable_cores"]) == (4, 4.0)


def test_an_unforeseen_error_leaves_the_cpu_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cpu.Host, "machine")
    scan = cpu.look(1.0)
    assert (scan.present, scan.stage) == (True, None)
    assert scan.devices[0].facts.name == "unknown processor"
    assert scan.notes[0].startswith("the CPU's facts could not be read (AttributeError: ")


@pytest.mark.parametrize(
    ("machine", "file", "name", "architecture", "simd"),
    [
        ("aarch64", "grace.cpuinfo", "Neoverse-V2", "aarch64 (SVE2)", "SVE2, BF16, I8MM"),
        ("aarch64", "rk3588.cpuinfo", "Cortex-A76 + Cortex-A55", "aarch64 (NEON)", "NEON"),
        ("x86_64", "epyc-vm.cpuinfo", "AMD EPYC", "x86-64-v3 (AVX2)", "AVX2"),
    ],
)
def test_recorded_processors(
    tree: Linux, machine: str, file: str, name: str, architecture: str, simd: str
) -> None:
    facts = tree.write({"proc/cpuinfo": recorded(file)}).facts(machine)
    assert (facts.name, facts.architecture) == (name, architecture)
    assert facts.details["simd"] == simd


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("CPU implementer\t: 0x41\nCPU part\t: 0xfff", "ARM implementer 0x41 part 0xfff"),
        ("CPU implementer\t: what\nCPU part\t: 0xd4f", "ARM implementer what part 0xd4f"),
        ("CPU part\t: 0xd4f", "ARM implementer unknown part 0xd4f"),
        ("CPU implementer\t: 0x61\nCPU part\t: 0x035", "Apple M2 Pro"),
        ("model name\t: ARMv8 rev 3\nCPU implementer: 0x41\nCPU part: 0xd08", "Cortex-A72"),
        ("cpu\t\t: POWER9 (architected), altivec", "POWER9 (architected), altivec"),
        ("", "aarch64"),
    ],
)
def test_names_that_must_be_put_together(tree: Linux, text: str, name: str) -> None:
    tree.write({"proc/cpuinfo": text})
    assert read_linux(tree.root, "aarch64").name == name
    assert read_linux(tree.root / "nothing", "").name == "unknown processor"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("AMD Ryzen 7 7700 8-Core Processor", "AMD Ryzen 7 7700"),
        ("AMD Ryzen 7 PRO 4750U with Radeon Graphics", "AMD Ryzen 7 PRO 4750U"),
        ("AMD Ryzen AI 9 HX 370 w/ Radeon 890M", "AMD Ryzen AI 9 HX 370"),
        ("AMD EPYC 9B14 96-Core Processor", "AMD EPYC 9B14"),
        ("AMD EPYC Processor (with IBPB)", "AMD EPYC"),
        ("AMD EPYC", "AMD EPYC"),
        ("AMD FX(tm)-8350 Eight-Core Processor", "AMD FX-8350"),
        ("Intel(R) Core(TM)2 Duo CPU     E8400  @ 3.00GHz", "Intel Core2 Duo E8400"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "Intel Xeon"),
        ("Intel(R) Core(TM) i7-10750H CPU @ 2.60GHz", "Intel Core i7-10750H"),
        ("12th Gen Intel(R) Core(TM) i7-12700H", "Intel Core i7-12700H"),
        ("Intel(R) Core(TM) Ultra 7 155H", "Intel Core Ultra 7 155H"),
        ("Intel Xeon Processor (Skylake, IBRS)", "Intel Xeon (Skylake, IBRS)"),
        ("QEMU Virtual CPU version 2.5+", "QEMU Virtual CPU version 2.5+"),
        ("Common KVM processor", "Common KVM processor"),
        ("Apple M2 Pro", "Apple M2 Pro"),
        ("CPU", "CPU"),
        ("", ""),
    ],
)
def test_tidy_names(written: str, read: str) -> None:
    assert tidy_name(written) == read


@pytest.mark.parametrize(
    ("flags", "architecture"),
    [
        ("sse2", "x86-64 (SSE2)"),
        ("", "x86-64"),
        ("sse2 cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3", "x86-64-v2 (SSE4.2)"),
        ("sse2 cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3 avx", "x86-64-v2 (AVX)"),
        ("avx512f avx512bw avx512cd avx512dq avx512vl", "x86-64 (AVX-512)"),
    ],
)
def test_levels(tree: Linux, flags: str, architecture: str) -> None:
    tree.write({"proc/cpuinfo": f"processor: 0\nflags\t: {flags}\n"})
    assert read_linux(tree.root, "x86_64").architecture == architecture


def look_at_mac(machine: str, file: str, **known: Any) -> tuple[Facts, Answers]:
    host = Answers(machine, output=recorded(file), **known)
    return cpu.look(1.0, system="darwin", host=host).devices[0].facts, host


def test_apple_silicon() -> None:
    facts, host = look_at_mac("arm64", "macos-m2-pro.sysctl", memory=(32 * GIB, 20 * GIB))
    assert (facts.name, facts.architecture) == ("Apple M2 Pro", "arm64 (NEON)")
    assert facts.memory_kind == "unified"
    assert (facts.total_memory, facts.free_memory) == (32 * GIB, 20 * GIB)
    assert dict(facts.details) == {
        "physical_cores": 12,
        "logical_cores": 12,
        "usable_cores": 12.0,
        "simd": "NEON",
        "performance_cores": 8,
        "threads": 8,
    }
    assert host.commands[0][0] == "/usr/sbin/sysctl"
    assert cpu.free_memory(0, facts, system="darwin", host=host) == 20 * GIB


def test_other_macs() -> None:
    facts, host = look_at_mac("arm64", "macos-m4.sysctl")
    assert facts.architecture == "arm64 (NEON, SME)"
    assert (facts.total_memory, facts.free_memory) == (16 * GIB, None)
    assert cpu.free_memory(0, facts, system="darwin", host=host) is None
    facts, _ = look_at_mac("x86_64", "macos-intel.sysctl", memory=(32 * GIB, GIB))
    assert (facts.name, facts.architecture) == ("Intel Core i9-9980HK", "x86-64-v3 (AVX2)")
    assert (facts.memory_kind, facts.details["threads"]) == ("host", 8)
    silent = cpu.look(1.0, system="darwin", host=Answers("arm64")).devices[0].facts
    assert (silent.name, silent.total_memory, silent.details["threads"]) == ("arm64", None, 1)


def test_windows() -> None:
    host = Answers(
        "AMD64",
        memory=(16 * GIB, 9 * GIB),
        core_counts=(8, 16),
        allowed=4,
        registry_name="AMD Ryzen 7 7700 8-Core Processor             ",
        features=(10, 38, 39, 40, 41),
    )
    scan = cpu.look(1.0, system="win32", host=host)
    facts = scan.devices[0].facts
    assert (facts.name, facts.architecture) == ("AMD Ryzen 7 7700", "x86-64-v4 (AVX-512)")
    assert (facts.total_memory, facts.usable_memory) == (16 * GIB, 16 * GIB)
    assert facts.free_memory == 9 * GIB
    assert (facts.details["usable_cores"], facts.details["threads"]) == (4.0, 4)
    assert scan.notes == ("this process may run on 4 of 16 processors",)


def test_windows_on_arm() -> None:
    processor = read_windows("Snapdragon(R) X Elite", (19).__eq__, None, None, "ARM64")
    assert (processor.name, processor.architecture) == ("Snapdragon X Elite", "arm64 (NEON)")
    assert (processor.physical_cores, processor.logical_cores) == (1, 1)


@linux_only
def test_another_system_through_psutil() -> None:
    facts = cpu.look(1.0, system="freebsd14").devices[0].facts
    assert facts.name == os.uname().machine
    assert facts.total_memory == psutil.virtual_memory().total
    assert facts.details["usable_cores"] == len(psutil.Process().cpu_affinity())


def test_a_system_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", SimpleNamespace(Process=SimpleNamespace))
    assert cpu.Host().allowed() is None


def test_commands() -> None:
    host = cpu.Host()
    assert host.run(["sh", "-c", "echo hw.memsize: 5; exit 1"], 5.0) == "hw.memsize: 5\n"
    assert host.run(["sleep", "9"], 0.05) is None
    assert host.run(["/nowhere/sysctl"], 1.0) is None


def test_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, tuple[str, int]] = {"ProcessorNameString": ("Intel N100", 1)}

    def query(key: object, name: str) -> tuple[str, int]:
        if name not in values:
            raise FileNotFoundError(2, "The system cannot find the file specified")
        return values[name]

    registry = SimpleNamespace(
        HKEY_LOCAL_MACHINE=1, OpenKey=lambda hive, path: nullcontext(), QueryValueEx=query
    )
    monkeypatch.setitem(sys.modules, "winreg", registry)
    assert cpu.Host().registry_name() == "Intel N100"
    values.clear()
    assert cpu.Host().registry_name() is None
    monkeypatch.setitem(sys.modules, "winreg", None)
    assert cpu.Host().registry_name() is None


def test_features_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = SimpleNamespace(IsProcessorFeaturePresent=lambda number: int(number == 40))
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel), raising=False)
    assert cpu.Host().has_feature(40)
    assert not cpu.Host().has_feature(41)
    monkeypatch.delattr(ctypes, "windll")
    assert not cpu.Host().has_feature(40)


def test_the_machine_where_the_system_has_no_uname(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = platform.machine()
    monkeypatch.delattr(os, "uname")
    assert cpu.Host().machine() == expected


@linux_only
def test_this_machine_against_psutil_and_its_own_tools() -> None:
    if not (shutil.which("free") and shutil.which("nproc")):
        pytest.skip("no free and nproc here to compare with")
    facts = cpu.look(5.0).devices[0].facts
    said = psutil.virtual_memory()
    assert facts.total_memory == said.total
    assert 0 < facts.free_memory <= facts.usable_memory <= said.total
    assert facts.free_memory <= said.available + 2**28
    assert facts.details["logical_cores"] == psutil.cpu_count()
    assert facts.details["physical_cores"] == (psutil.cpu_count(logical=False) or os.cpu_count())
    usable = facts.details["usable_cores"]
    assert isinstance(usable, float)
    assert (
        usable
        <= int(subprocess.check_output(["env", "-u", "OMP_NUM_THREADS", "nproc"]))
        == len(os.sched_getaffinity(0))
    )
    free = subprocess.check_output(["free", "-b"], text=True).splitlines()[1].split()
    assert facts.total_memory == int(free[1])


QUICK = """
import sys, time
from anydevice._machine.hardware.cpu import reader as cpu
times = []
for _ in range(20):
    start = time.process_time(); cpu.look(); times.append(time.process_time() - start)
print(min(times), sorted({'psutil', 'numpy', 'ctypes', 'platform'} & set(sys.modules)))
"""


@linux_only
def test_it_is_quick_and_imports_nothing_heavy() -> None:
    seconds, _, heavy = output_of("-I", "-c", QUICK).strip().partition(" ")
    assert heavy == "[]"
    assert float(seconds) < 0.010


BOUND = """
import ctypes
import os
import platform
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from anydevice._machine.hardware.cpu import reader as cpu
details = cpu.look().devices[0].facts.details
print(details['usable_cores'] <= 1, details['threads'])
"""


def test_the_affinity_of_this_process_is_obeyed() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system has no affinity masks that a process may set")
    assert output_of("-c", BOUND) == "True 1\n"


def test_a_large_machine_is_read_in_time(tree: Linux) -> None:
    """Two sockets of 96 cores with two threads each: one file a core, and one block of cpuinfo."""
    siblings = [f"{n % 192},{n % 192 + 192}" for n in range(384)]
    tree.processors(siblings).allowed("0-383")
    block = recorded("sapphire-rapids.cpuinfo").split("\n\n")[0]
    blocks = [block.replace("processor\t: 0", f"processor\t: {n}") for n in range(384)]
    tree.write({"proc/cpuinfo": "\n\n".join(blocks)})
    times = []
    for _ in range(5):
        start = time.process_time()
        facts = tree.facts()
        times.append(time.process_time() - start)
    assert facts.details["physical_cores"] == facts.details["threads"] == 192
    assert min(times) < 0.05
    assert cpu_model.online_processors(tree.root) == frozenset(range(384))
