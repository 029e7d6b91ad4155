"""The load, heat and power of the CPU now, and the processes that hold most of its memory."""

from __future__ import annotations

import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from anydevice._core.finding import Facts
from anydevice._core.locks import ForkSafeLock
from anydevice._core.record import Record
from anydevice._machine.hardware import linux
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
        import psutil

        return Readings(load=psutil.cpu_percent(interval=_SHORT) / 100, free_memory=free)
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


_known_processes: set[Any] = set()
"""Processes that the last call returned; psutil measures their load since then."""


def processes(index: int, facts: Facts) -> tuple[DeviceProcess, ...]:
    """Return the processes with the most memory, and their CPU load since the previous call."""
    import psutil

    global _known_processes
    del index, facts
    infos = [(x, x.info["memory_info"]) for x in psutil.process_iter(["memory_info"])]
    sizes = {process: info.rss for process, info in infos if info is not None and info.rss}
    largest = sorted(sizes, key=lambda process: -sizes[process])[:_MOST]
    results = []
    for process in largest:
        load = None
        with suppress(psutil.Error):  # it has ended, or is another user's
            share = process.cpu_percent() / 100 / (psutil.cpu_count() or 1)
            load = min(1.0, share) if process in _known_processes else None
        name = linux.name_of(process.pid)
        results.append(DeviceProcess(process.pid, name, sizes[process], load))
    _known_processes = set(largest)
    return tuple(results)


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


_meter = Meter()


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
