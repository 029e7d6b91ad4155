"""The load, heat and power of the CPU now, and the processes that hold most of its memory."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

from anydevice._core.finding import Facts
from anydevice._core.locks import ForkSafeLock
from anydevice._core.record import Record
from anydevice._machine.hardware import linux
from anydevice._machine.hardware.cpu.facts import online_processors
from anydevice._machine.hardware.cpu.reader import free_memory
from anydevice._machine.hardware.readers import DeviceProcess, Readings

_ROOT = Path("/")
_MOST = 16
_SHORT, _TOO_SHORT, _TOO_LONG_AGO = 0.05, 0.03, 10.0
_ABOUT_CPUS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cputhermal", "soc_thermal")
_PACKAGE = ("Tctl", "Tdie", "Package id 0")
_ZONES = ("x86_pkg_temp", "cpu-thermal", "cpu_thermal", "soc-thermal", "soc_thermal")


def readings(
    index: int,
    facts: Facts,
    *,
    root: Path = _ROOT,
    system: str = sys.platform,
    meter: Meter | None = None,
) -> Readings:
    """Return the readings of all processors of this machine together."""
    free = free_memory(index, facts, root=root, system=system)
    if not system.startswith("linux"):
        psutil = linux.psutil()
        percent = psutil.cpu_percent(interval=_SHORT) if psutil else None
        return Readings(load=None if percent is None else percent / 100, free_memory=free)
    load, power = (meter or _meter).read()
    limits = [linux.scaled(p / "constraint_0_power_limit_uw", 1e6) for p in _packages(root)]
    known = [limit for limit in limits if limit]
    policies = (root / "sys/devices/system/cpu/cpufreq").glob("policy*")
    clocks = [linux.read_number(policy / "scaling_cur_freq") for policy in policies]
    return Readings(
        load=load,
        free_memory=free,
        temperature=_temperature(root),
        power=power,
        power_limit=sum(known) if power is not None and known else None,
        clock=max((clock / 1000 for clock in clocks if clock), default=None),
    )


def processes(
    index: int, facts: Facts, *, system: str = sys.platform, meter: ProcessMeter | None = None
) -> tuple[DeviceProcess, ...]:
    """Return the processes with the most memory, and their share of all processors."""
    del index, facts
    if not system.startswith("linux"):
        return _processes_by_psutil()
    return (meter or _process_meter).read()


class _Moment(Record):
    """The counters at one time: ticks of all processors, and microjoules by package."""

    at: float
    busy: int
    all: int
    energy: dict[str, int]


class Meter:
    """The load and power of one machine; `root` is where its files are."""

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._lock = ForkSafeLock()
        self._before: _Moment | None = None
        self._load: float | None = None
        self._power: float | None = None

    def read(self) -> tuple[float | None, float | None]:
        """Return load as a fraction, and watts, since the last call; `None` if unknown."""
        with self._lock.native:
            before = self._before
            if before is None or time.monotonic() - before.at > _TOO_LONG_AGO:
                before = self._moment()
                time.sleep(_SHORT)
            now = self._moment()
            # Ticks are hundredths of a second: of a shorter time they tell nothing.
            if now.at - before.at >= _TOO_SHORT:
                ticks, busy = now.all - before.all, now.busy - before.busy
                self._load = min(1.0, max(0.0, busy / ticks)) if ticks > 0 else None
                self._power = self._watts(before, now)
                self._before = now
            return self._load, self._power

    def _moment(self) -> _Moment:
        text = linux.read_text(self._root / "proc/stat", limit=4096) or ""
        words = text.partition("\n")[0].split()
        # user nice system idle iowait irq softirq steal; guests are counted in user already.
        ticks = [int(word) for word in words[1:9] if word.isdecimal()]
        idle = sum(ticks[3:5])
        counters = {p.name: linux.read_number(p / "energy_uj") for p in _packages(self._root)}
        energy = {name: count for name, count in counters.items() if count is not None}
        return _Moment(time.monotonic(), sum(ticks) - idle, sum(ticks), energy)

    def _watts(self, before: _Moment, now: _Moment) -> float | None:
        if not now.energy or now.energy.keys() != before.energy.keys():
            return None
        total = 0
        for package in _packages(self._root):
            used = now.energy.get(package.name, 0) - before.energy.get(package.name, 0)
            if used < 0:  # the counter has started again
                used += linux.read_number(package / "max_energy_range_uj") or 0
            total += max(0, used)
        return total / 1e6 / (now.at - before.at)


class ProcessMeter:
    """The largest processes of one machine; loads are those since the last question."""

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._lock = ForkSafeLock()
        self._before: dict[tuple[int, int], tuple[float, int]] = {}

    def read(self) -> tuple[DeviceProcess, ...]:
        """Return the processes with the most memory; a new one has no load yet."""
        page = os.sysconf("SC_PAGE_SIZE")
        pids = linux.numbers_in(self._root / "proc")
        sizes = {pid: size * page for pid in pids if (size := self._pages(pid))}
        largest = sorted(sizes, key=lambda pid: -sizes[pid])[:_MOST]
        with self._lock.native:
            ticks: dict[tuple[int, int], tuple[float, int]] = {}
            loads = {pid: self._load(pid, ticks) for pid in largest}
            self._before = ticks
        return tuple(
            DeviceProcess(
                pid, linux.name_of(pid, root=self._root, system="linux"), sizes[pid], loads[pid]
            )
            for pid in largest
        )

    def _pages(self, pid: int) -> int | None:
        words = (linux.read_text(self._root / "proc" / str(pid) / "statm") or "").split()
        return linux.as_number(words[1]) if len(words) > 1 else None

    def _load(self, pid: int, counts: dict[tuple[int, int], tuple[float, int]]) -> float | None:
        text = linux.read_text(self._root / "proc" / str(pid) / "stat") or ""
        # The name, in brackets, may hold spaces and brackets; the numbers come after the last one.
        words = text.rpartition(")")[2].split()
        if len(words) < 20:
            return None
        ticks, started = int(words[11]) + int(words[12]), int(words[19])
        now = time.monotonic()
        # A number may belong to another process by now; when that one started tells.
        counts[pid, started] = (now, ticks)
        then, before = self._before.get((pid, started), (now, ticks))
        if now <= then:
            return None
        processors = len(online_processors(self._root) or ()) or os.cpu_count() or 1
        spent = (ticks - before) / os.sysconf("SC_CLK_TCK")
        return min(1.0, max(0.0, spent / (now - then) / processors))


def _processes_by_psutil() -> tuple[DeviceProcess, ...]:
    """Return the largest processes of a system without `/proc`, as far as they are visible."""
    psutil = linux.psutil()
    if psutil is None:
        return ()
    processes = []
    for process in psutil.process_iter(["pid", "name", "cmdline", "memory_info"]):
        info = process.info
        if info["memory_info"] is not None:
            name = linux.command_name(info["cmdline"] or []) or info["name"] or f"pid {info['pid']}"
            processes.append(DeviceProcess(info["pid"], name, info["memory_info"].rss))
    return tuple(sorted(processes, key=lambda process: -(process.memory or 0))[:_MOST])


_meter = Meter()
_process_meter = ProcessMeter()


def _packages(root: Path) -> list[Path]:
    """Return the energy counters of whole processor packages."""
    folder = root / "sys/class/powercap"
    names = sorted(n for n in linux.names_in(folder) if re.fullmatch(r"intel-rapl:[^:]*", n))
    # The whole system is counted beside its packages where a maker connected it.
    return [folder / n for n in names if linux.read_line(folder / n / "name").startswith("package")]


def _temperature(root: Path) -> float | None:
    for sensors in linux.monitors(root / "sys/class/hwmon"):
        if linux.read_line(sensors / "name") in _ABOUT_CPUS:
            return linux.temperature(sensors, _PACKAGE)
    zones = sorted((root / "sys/class/thermal").glob("thermal_zone*"))
    types = {linux.read_line(zone / "type"): zone for zone in zones}
    named = next((types[name] for name in _ZONES if name in types), None)
    return None if named is None else linux.scaled(named / "temp", 1000)
