"""The load, heat and power of AMD GPUs now, from the files of their driver."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from anydevice._core.finding import Facts
from anydevice._machine.hardware import linux
from anydevice._machine.hardware.readers import DeviceProcess, Readings
from anydevice._machine.hardware.rocm.facts import NODES, topology
from anydevice._machine.hardware.rocm.reader import free_memory as free_memory

_ROOT = Path("/")
_PROCESSES = "sys/class/kfd/kfd/proc"
_SENSORS = ("edge", "junction")


def readings(index: int, facts: Facts, *, root: Path = _ROOT) -> Readings:
    """Return the readings of the GPU at this PCI address; a partition has the whole card's."""
    if facts.pci_address is None:
        return Readings()
    device = root / linux.DEVICES / facts.pci_address
    free = free_memory(index, facts, root=root)
    if linux.read_line(device / "power/runtime_status") == "suspended":
        # Asking its sensors would wake it.
        return Readings(load=0.0, free_memory=free)
    sensors = next(iter(linux.monitors(device / "hwmon")), device / "hwmon")
    power = linux.scaled(sensors / "power1_average", 1e6)
    fan, full = linux.read_number(sensors / "pwm1"), linux.read_number(sensors / "pwm1_max") or 255
    return Readings(
        load=linux.scaled(device / "gpu_busy_percent", 100),
        memory_load=linux.scaled(device / "mem_busy_percent", 100),
        free_memory=free,
        temperature=linux.temperature(sensors, _SENSORS),
        power=linux.scaled(sensors / "power1_input", 1e6) if power is None else power,
        power_limit=linux.scaled(sensors / "power1_cap", 1e6),
        fan=None if fan is None else fan / full,
        clock=linux.scaled(sensors / "freq1_input", 1e6),
    )


def processes(index: int, facts: Facts, *, root: Path = _ROOT) -> tuple[DeviceProcess, ...]:
    """Return the processes that compute on the GPU; those that only draw are not listed."""
    del index
    names = {
        f"vram_{number}"
        for gpu in topology(root).gpus
        if gpu.pci_address == facts.pci_address and gpu.uuid in (None, facts.uuid)
        if (number := linux.read_number(root / NODES / str(gpu.node) / "gpu_id"))
    }
    memory: dict[int, int] = {}
    for pid in linux.numbers_in(root / _PROCESSES):
        sizes = [linux.read_number(root / _PROCESSES / str(pid) / name) for name in sorted(names)]
        known = [size for size in sizes if size is not None]
        if known:
            memory[pid] = sum(known)
    name = partial(linux.name_of, opens=("/dev/kfd",), root=root, system="linux")
    largest = sorted(memory, key=lambda pid: -memory[pid])
    return tuple(DeviceProcess(pid, name(pid), memory[pid]) for pid in largest)
