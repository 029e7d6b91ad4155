"""What the CPU and AMD's GPUs do, from trees of the files that Linux shows; and names."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from anydevice._core.finding import Facts
from anydevice._machine.hardware import linux
from anydevice._machine.hardware.cpu import usage as readings_cpu
from anydevice._machine.hardware.cpu.usage import Meter
from anydevice._machine.hardware.linux import name_of, own_memory
from anydevice._machine.hardware.readers import DeviceProcess, Readings, processes, readings
from anydevice._machine.hardware.rocm import reader as rocm
from anydevice._machine.hardware.rocm import usage as readings_amd
from tests.machine.tree import Tree, write_file

RECORDED = Path(__file__).parents[2] / "recorded" / "rocm"
MIB = 2**20
SENSORS = "sys/bus/pci/devices/0000:03:00.0/hwmon/hwmon4"
CARD = "sys/bus/pci/devices/0000:03:00.0"

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads the real /proc")


# ---------------------------------------------------------------- which backend tells what


def test_backends_that_tell_nothing_and_fake_devices() -> None:
    nothing = Facts("some device", free_memory=7)
    fake = Facts("fake", free_memory=7, details={"fake": True})
    told = [(name, nothing, None) for name in ("opencl", "tpu", "made-up")]
    told += [(name, fake, 7) for name in ("cuda", "cpu", "opencl")]
    for backend, facts, free in [*told, ("metal", Facts("a card"), None)]:
        assert readings(backend, 0, facts) == Readings(free_memory=free)
        assert processes(backend, 0, facts) == ()


def test_plain_data() -> None:
    assert Readings(load=0.5, power=100.0).to_dict() == {
        "load": 0.5,
        "memory_load": None,
        "free_memory": None,
        "temperature": None,
        "power": 100.0,
        "power_limit": None,
        "fan": None,
        "clock": None,
    }
    assert DeviceProcess(1, "x").to_dict() == {"pid": 1, "name": "x", "memory": None, "load": None}


# ---------------------------------------------------------------- AMD


@pytest.fixture
def radeon(tmp_path: Path) -> tuple[Path, Facts]:
    """The root and the facts of an RX 7900 XTX that is at work."""
    content = tomllib.loads((RECORDED / "rx7900xtx.toml").read_text())["files"]
    tree = Tree(tmp_path).write({path: text.strip("\n") for path, text in content.items()})
    tree.write({"gpu_busy_percent": 97, "mem_busy_percent": 33}, CARD)
    tree.write({"power/runtime_status": "active"}, CARD)
    tree.write({"temp1_input": 54000, "temp1_label": "edge", "name": "amdgpu"}, SENSORS)
    tree.write({"temp2_input": 71000, "temp2_label": "junction", "pwm1": 51}, SENSORS)
    tree.write({"power1_average": 303_000_000, "power1_cap": 339_000_000}, SENSORS)
    tree.write({"pwm1_max": 255, "freq1_input": 2_411_000_000}, SENSORS)
    seen = rocm.look(
        20, root=tmp_path, environment={}, accessible=lambda path: True, platform="linux"
    )
    return tmp_path, seen.devices[0].facts


def test_what_a_radeon_does(radeon: tuple[Path, Facts]) -> None:
    root, facts = radeon
    assert facts.pci_address == "0000:03:00.0"
    assert readings_amd.readings(0, facts, root=root) == Readings(
        load=0.97,
        memory_load=0.33,
        free_memory=25753026560 - 1287651328,
        temperature=54.0,
        power=303.0,
        power_limit=339.0,
        fan=0.2,
        clock=2411.0,
    )


def test_an_accelerator_without_an_edge_and_without_fans(radeon: tuple[Path, Facts]) -> None:
    root, facts = radeon
    for name in ("temp1_input", "power1_average", "pwm1", "pwm1_max"):
        (root / SENSORS / name).unlink()
    write_file(root, f"{SENSORS}/power1_input", 140_000_000)
    read = readings_amd.readings(0, facts, root=root)
    assert (read.temperature, read.power, read.fan) == (71.0, 140.0, None)


def test_a_gpu_that_sleeps_is_not_woken(radeon: tuple[Path, Facts]) -> None:
    root, facts = radeon
    write_file(root, f"{CARD}/power/runtime_status", "suspended")
    read = readings_amd.readings(0, facts, root=root)
    assert read == Readings(load=0.0, free_memory=25753026560 - 1287651328)


def test_a_driver_that_tells_nothing(tmp_path: Path) -> None:
    facts = Facts("some GPU", pci_address="0000:03:00.0")
    assert readings_amd.readings(0, facts, root=tmp_path) == Readings()
    assert readings_amd.readings(0, Facts("some GPU"), root=tmp_path) == Readings()
    assert readings_amd.processes(0, facts, root=tmp_path) == ()
    assert readings("rocm", 0, Facts("some GPU")) == Readings()


def test_who_computes_on_a_radeon(radeon: tuple[Path, Facts]) -> None:
    root, facts = radeon
    kfd = {"4242/vram_60124": 300 * MIB, "4242/vram_31402": 5 * MIB, "4343/vram_60124": 900 * MIB}
    Tree(root).write({**kfd, "4444/vram_31402": 1, "4444/pasid": 32770}, "sys/class/kfd/kfd/proc")
    Tree(root).write({"4242/comm": "train", "4343/comm": "a stranger"}, "proc")
    (root / "proc/4343/fd").mkdir()
    (root / "proc/4343/fd/3").symlink_to("/dev/null")
    assert readings_amd.processes(0, facts, root=root) == (
        DeviceProcess(4343, "pid 4343", 900 * MIB),
        DeviceProcess(4242, "train", 300 * MIB),
    )


# ---------------------------------------------------------------- the CPU


RAPL = {"energy_uj": 1_000_000, "max_energy_range_uj": 5_000_000}


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """A machine with two packages; its counters are written anew by `later`."""
    tree = Tree(tmp_path)
    tree.write({"stat": "cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 2 3"}, "proc")
    tree.write({"meminfo": "MemTotal: 1000 kB\nMemAvailable:  400 kB"}, "proc")
    for number, name in enumerate(["package-0", "package-1", "psys"]):
        limited = {**RAPL, "name": name, "constraint_0_power_limit_uw": 150_000_000}
        tree.write(limited, f"sys/class/powercap/intel-rapl:{number}")
    tree.write({"name": "core", "energy_uj": 77}, "sys/class/powercap/intel-rapl:0:0")
    tree.write({"name": "nvme", "temp1_input": 20000}, "sys/class/hwmon/hwmon0")
    tree.write({"name": "coretemp", "temp1_input": 61000}, "sys/class/hwmon/hwmon1")
    tree.write({"temp1_label": "Package id 0"}, "sys/class/hwmon/hwmon1")
    clocks = {"policy0/scaling_cur_freq": 800_000, "policy1/scaling_cur_freq": 3_700_000}
    tree.write(clocks, "sys/devices/system/cpu/cpufreq")
    return tmp_path


class Clock:
    """A clock whose sleeping lets the machine's counters go on."""

    def __init__(self, root: Path) -> None:
        self.root, self.now, self.slept = root, 1000.0, 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept += 1
        self.later(seconds, busy=25, idle=75)

    def later(self, seconds: float, *, busy: int = 0, idle: int = 0, energy: int = 0) -> None:
        self.now += seconds
        words = (self.root / "proc/stat").read_text().splitlines()[0].split()
        words[1], words[4] = str(int(words[1]) + busy), str(int(words[4]) + idle)
        write_file(self.root, "proc/stat", " ".join(words))
        for package in (self.root / "sys/class/powercap").glob("intel-rapl:?"):
            file = package / "energy_uj"
            file.write_text(str((int(file.read_text()) + energy) % 5_000_000))


@pytest.fixture
def clock(server: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(server)
    monkeypatch.setattr(readings_cpu, "time", made)
    return made


def test_what_a_server_does(server: Path, clock: Clock) -> None:
    meter = Meter(server)

    def read() -> Readings:
        return readings_cpu.readings(0, Facts("x"), root=server, system="linux", meter=meter)

    first = read()
    assert first == Readings(
        load=0.25,
        free_memory=400 * 1024,
        temperature=61.0,
        power=0.0,
        power_limit=300.0,
        clock=3700.0,
    )
    clock.later(2.0, busy=150, idle=50, energy=4_500_000)  # both counters start again
    second = read()
    assert (second.load, second.power) == (0.75, 4.5)
    clock.later(0.001, busy=1)  # too short to tell
    assert (read().load, read().power) == (0.75, 4.5)
    clock.later(100.0, busy=10_000)  # too long ago to be about now
    assert (read().load, clock.slept) == (0.25, 2)


def test_energy_that_only_the_superuser_may_read(server: Path, clock: Clock) -> None:
    for file in (server / "sys/class/powercap").glob("*/energy_uj"):
        file.unlink()
    clock.later = lambda *args, **kwargs: setattr(clock, "now", clock.now + 1)  # type: ignore[method-assign]
    meter = Meter(server)
    read = readings_cpu.readings(0, Facts("x"), root=server, system="linux", meter=meter)
    assert (read.power, read.power_limit, read.load) == (None, None, None)


@pytest.mark.parametrize(("kind", "degrees"), [("x86_pkg_temp", 48.5), ("battery", None)])
def test_a_machine_with_thermal_zones(tmp_path: Path, kind: str, degrees: float | None) -> None:
    def read() -> Readings:
        meter = Meter(tmp_path)
        return readings_cpu.readings(0, Facts("x"), root=tmp_path, system="linux", meter=meter)

    assert read() == Readings()  # everything is hidden
    Tree(tmp_path).write({"type": kind, "temp": 48500}, "sys/class/thermal/thermal_zone0")
    assert read().temperature == degrees


def test_the_load_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings_cpu, "_MOST", 10**6)
    command = [sys.executable, "-c", "while True: pass"]

    def read() -> DeviceProcess:
        return next(x for x in processes("cpu", 0, Facts("x")) if x.pid == child.pid)

    with subprocess.Popen(command) as child:
        try:
            first = read()
            while not (now := read()).load:  # it may wait for a processor
                time.sleep(0.05)
        finally:
            child.kill()
    assert first.load is None
    assert now.load is not None
    assert 0 < now.load <= 1
    assert now.name == linux.command_name(command)


@on_linux
def test_this_machine() -> None:
    facts = Facts("this one")
    read = readings("cpu", 0, facts)
    assert 0 <= read.load <= 1
    assert read.free_memory > 0
    found = processes("cpu", 0, facts)
    assert 0 < len(found) <= 16
    sizes = [process.memory or 0 for process in found]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_where_there_is_no_proc(system: str) -> None:
    read = readings_cpu.readings(0, Facts("x"), system=system)
    assert 0 <= read.load <= 1


# ---------------------------------------------------------------- names, and this process


@on_linux
def test_the_name_of_this_process() -> None:
    assert "python" in name_of(os.getpid())
    assert name_of(os.getpid(), opens=("/dev/",)) == name_of(os.getpid())
    assert name_of(os.getpid(), system="darwin") == name_of(os.getpid())


def test_a_number_that_nobody_here_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "in_container", lambda root, environment: False)
    assert name_of(77, root=tmp_path, system="linux") == "pid 77"
    monkeypatch.setattr(linux, "in_container", lambda root, environment: True)
    assert name_of(77, root=tmp_path, system="linux") == "another container"


def test_a_pid_of_another_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "in_container", lambda root, environment: True)
    write_file(tmp_path, "proc/77/comm", "nginx")
    (tmp_path / "proc/77/fd").mkdir()
    (tmp_path / "proc/77/fd/1").symlink_to("/dev/null")
    (tmp_path / "proc/77/fd/2").write_text("no link: closed in between")

    def name() -> str:
        return name_of(77, opens=("/dev/nvidia", "/dev/dxg"), root=tmp_path, system="linux")

    assert name() == "another container"
    (tmp_path / "proc/77/fd/9").symlink_to("/dev/nvidia0")
    assert name() == "nginx"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["/usr/bin/python3.12", "-X", "dev", "-W", "error", "train.py"], "python3.12 train.py"),
        (["python", "-c", "print(1)", "word"], "python"),
        (["python", "-m"], "python"),
        (["python", ""], "python"),
        (["sshd: me [priv]"], "sshd:"),
        (["julia", "--project", "fit.jl"], "julia fit.jl"),
        ([""], ""),
        ([], ""),
    ],
)
def test_names_of_commands(words: list[str], name: str) -> None:
    assert linux.command_name(words) == name


def test_what_this_process_holds() -> None:
    for system in ("linux", "darwin", "win32", "freebsd"):
        if system == sys.platform or system != "linux":
            now, peak = own_memory(system=system)
            assert now is not None
            assert 0 < now <= peak


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert own_memory(tmp_path, system="linux") == (None, None)
