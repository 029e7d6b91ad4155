"""The CPU: always there, always usable, and as large as this process may use it.

On Linux everything is read from `/proc` and `/sys`, and the limits of control groups count: a
container with 4 GiB on a machine of 64 has 4. On macOS `sysctl` is asked, on Windows the registry;
both know their free memory through psutil, which Linux does not need.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anydevice._core.finding import BackendScan, Detail, Facts, MemoryKind, RawDevice
from anydevice._core.record import Record
from anydevice._core.text import format_size
from anydevice._machine.hardware import linux
from anydevice._machine.hardware.cpu import facts as cpu
from anydevice._machine.hardware.cpu.facts import Processor
from anydevice._machine.hardware.linux import as_cpu_set, as_number, read_table, read_text

_ROOT = Path("/")


class Host:
    """Questions to a system without `/proc`; tests answer them from recordings."""

    def machine(self) -> str:
        """Return the instruction set, as the system spells it: "x86_64", "arm64", "AMD64"."""
        if hasattr(os, "uname"):
            return os.uname().machine
        import platform

        return platform.machine()

    def run(self, command: Sequence[str], limit: float) -> str | None:
        """Return a command's output; `None` if it does not start or takes longer than `limit`."""
        from anydevice._machine.hardware.macos import running_until

        return running_until(time.monotonic() + limit)(command)

    def memory(self) -> tuple[int, int] | None:
        """Return physical and available memory, in bytes."""
        import psutil

        memory = psutil.virtual_memory()
        return int(memory.total), int(memory.available)

    def core_counts(self) -> tuple[int | None, int | None]:
        """Return the numbers of physical and logical cores."""
        import psutil

        return psutil.cpu_count(logical=False), os.cpu_count()

    def allowed(self) -> int | None:
        """Return the number of processors that this process may run on, or `None`."""
        import psutil

        affinity = getattr(psutil.Process(), "cpu_affinity", None)  # macOS has none
        return len(affinity()) if affinity else None

    def registry_name(self) -> str | None:
        """Return the processor's name in the registry of Windows; `None` elsewhere."""
        try:
            import winreg
        except ImportError:
            return None
        registry: Any = winreg
        try:
            with registry.OpenKey(
                registry.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
            ) as key:
                return str(registry.QueryValueEx(key, "ProcessorNameString")[0])
        except OSError:
            return None

    def has_feature(self, number: int) -> bool:
        """Whether Windows says that the processor has this feature; false elsewhere."""
        import ctypes

        libraries: Any = getattr(ctypes, "windll", None)
        return libraries is not None and bool(libraries.kernel32.IsProcessorFeaturePresent(number))


class _Share(Record):
    """How much of the machine this process may use, and why if it is not all."""

    processors: int
    physical_cores: int
    cores: float
    total: int | None
    usable: int | None
    free: int | None
    notes: tuple[str, ...] = ()


def look(
    limit: float = 5.0, *, root: Path = _ROOT, system: str = sys.platform, host: Host | None = None
) -> BackendScan:
    """Return the CPU as one device with index 0. Never raises; what cannot be read is unknown.

    `details` has `physical_cores`, `logical_cores`, `usable_cores` (1.5 under a quota of one and a
    half), `simd`, and `threads`: how many a library should start, which is never more than the
    physical cores that this process may use. A limit that a control group or an affinity mask sets
    is in the notes too.
    """
    host = host or Host()
    try:
        return _look(limit, root, system, host)
    except Exception as error:
        # The CPU is the fallback of all others: it stays usable, and the failure becomes a note.
        note = f"the CPU's facts could not be read ({type(error).__name__}: {error})"
        facts = Facts(name="unknown processor", memory_kind="host", details={"threads": 1})
        return _scan(facts, (note,))


def free_memory(
    index: int,
    facts: Facts,
    *,
    root: Path = _ROOT,
    system: str = sys.platform,
    host: Host | None = None,
) -> int | None:
    """Return the memory that is free now, in bytes, within every limit; `None` if unknown."""
    del index
    if system.startswith("linux"):
        available = _available(read_table(root / "proc/meminfo"))
        return _least(available, linux.cgroup_free_memory(root), facts.usable_memory)
    sizes = (host or Host()).memory()
    return None if sizes is None else _least(sizes[1], facts.usable_memory)


def _look(limit: float, root: Path, system: str, host: Host) -> BackendScan:
    machine = host.machine()
    kind: MemoryKind = "host"
    if system.startswith("linux"):
        processor = cpu.read_linux(root, machine)
        share = _share_on_linux(root, processor)
    elif system == "darwin":
        from anydevice._machine.hardware.macos import read_system

        values = read_system(host.run(["/usr/sbin/sysctl", *cpu.SYSCTL_NAMES], limit))
        processor = cpu.read_macos(values, machine)
        share = _share_elsewhere(host, processor, as_number(values.get("hw.memsize")))
        # By name, because a program translated by Rosetta believes that it runs on an Intel CPU.
        kind = "unified" if processor.name.startswith("Apple") else "host"
    else:
        physical, logical = host.core_counts()
        name = host.registry_name()
        processor = cpu.read_windows(name, host.has_feature, physical, logical, machine)
        share = _share_elsewhere(host, processor, None)
    facts = Facts(
        name=processor.name,
        memory_kind=kind,
        total_memory=share.total,
        usable_memory=share.usable,
        free_memory=share.free,
        architecture=processor.architecture,
        details=_details(processor, share),
    )
    return _scan(facts, share.notes)


def _scan(facts: Facts, notes: tuple[str, ...]) -> BackendScan:
    return BackendScan("cpu", present=True, devices=(RawDevice(0, "cpu", facts),), notes=notes)


def _details(processor: Processor, share: _Share) -> dict[str, Detail]:
    details: dict[str, Detail] = {
        "physical_cores": processor.physical_cores,
        "logical_cores": max(processor.logical_cores, share.processors),
        "usable_cores": share.cores,
        "simd": processor.simd,
    }
    most = share.physical_cores
    if processor.performance_cores:
        # Work is split evenly: all others would wait for an efficiency core.
        details["performance_cores"] = processor.performance_cores
        most = min(most, processor.performance_cores)
    # Rounded down: threads that spin while they wait would eat up the rest of a quota.
    details["threads"] = max(1, min(int(share.cores), most))
    return details


def _share_on_linux(root: Path, processor: Processor) -> _Share:
    limits = linux.cgroup_limits(root)
    meminfo = read_table(root / "proc/meminfo")
    total = meminfo.get("MemTotal")
    usable = _least(total, limits.memory.limit if limits.memory else None)
    allowed = _allowed_processors(root, limits.processors)
    processors = len(allowed) or processor.logical_cores
    # Two threads of one core count once: they share the units that do the arithmetic.
    physical_cores = sum(1 for core in processor.cores if core & allowed)
    cores = float(min(processors, limits.cores or processors))
    notes = []
    if limits.memory and usable == limits.memory.limit and usable != total:
        size = format_size(usable) + (f" of {format_size(total)}" if total else "")
        notes.append(f"a cgroup limits memory to {size} ({limits.memory.source})")
    if processors < processor.logical_cores:
        notes.append(
            f"this process may run on {processors} of {processor.logical_cores} processors"
        )
    if cores < processors:
        notes.append(f"a cgroup limits processor time to {cores:g} of {processors} processors")
    return _Share(
        processors=processors,
        physical_cores=physical_cores or min(processor.physical_cores, processors),
        cores=cores,
        total=total,
        usable=usable,
        free=_least(_available(meminfo), limits.memory_free, usable),
        notes=tuple(notes),
    )


def _allowed_processors(root: Path, cpuset: frozenset[int] | None) -> frozenset[int]:
    allowed = None
    # The mask belongs to a thread; the first file has the calling one.
    for file in ("proc/thread-self/status", "proc/self/status"):
        status = read_text(root / file) or ""
        mask = next((x for x in status.splitlines() if x.startswith("Cpus_allowed_list:")), "")
        allowed = as_cpu_set(mask.partition(":")[2])
        if allowed is not None:
            break
    # The mask may name processors that are switched off.
    sets = [
        processors for processors in (allowed, cpuset, cpu.online_processors(root)) if processors
    ]
    return frozenset.intersection(*sets) if sets else frozenset()


def _share_elsewhere(host: Host, processor: Processor, total: int | None) -> _Share:
    sizes = host.memory()
    total = total or (sizes[0] if sizes else None)
    processors = host.allowed() or processor.logical_cores
    notes: tuple[str, ...] = ()
    if processors < processor.logical_cores:
        notes = (f"this process may run on {processors} of {processor.logical_cores} processors",)
    return _Share(
        processors=processors,
        physical_cores=min(processor.physical_cores, processors),
        cores=float(processors),
        total=total,
        usable=total,
        free=_least(sizes[1], total) if sizes else None,
        notes=notes,
    )


def _available(meminfo: dict[str, int]) -> int | None:
    if "MemAvailable" in meminfo:
        return meminfo["MemAvailable"]
    if "MemFree" not in meminfo:
        return None
    # Kernels before 3.14 do not add it up themselves; shared memory is in the cache but stays.
    shared = meminfo.get("Shmem", 0)
    cached = sum(meminfo.get(name, 0) for name in ("Buffers", "Cached", "SReclaimable"))
    return meminfo["MemFree"] + max(0, cached - shared)


def _least(*amounts: int | None) -> int | None:
    known = [amount for amount in amounts if amount is not None]
    return max(0, min(known)) if known else None
