"""Apple GPUs as macOS reports them; no framework and no array library is loaded."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from functools import partial

from anydevice._core.finding import BackendScan, Detail, Facts, RawDevice, Reason, compare_versions
from anydevice._machine.hardware import macos
from anydevice._machine.hardware.linux import as_number

_stopped_scan = partial(BackendScan.stopped, "metal")

OLDEST_FOR_TORCH = "12.3"
OLDEST_FOR_MLX = "13.5"

_SMALL_MACHINE = 36 * 2**30
_INTEGRATED = Reason("card_unsupported", "Metal needs Apple Silicon or a discrete GPU")
_ROSETTA = Reason(
    "translated_python",
    "this Python is an Intel build running under Rosetta",
    "arch -arm64 brew install python",
)
_UPDATE = "softwareupdate --list-full-installers"
_VIRTUAL = (
    "this is a virtual machine: its paravirtual GPU may be slow, refuse work or give wrong answers"
)
_CHIP = re.compile(r"Apple [AM]\d+")


def look(
    limit: float,
    *,
    run: macos.Run | None = None,
    platform: str = sys.platform,
    machine: str | None = None,
) -> BackendScan:
    """Return the GPUs that Metal drives, or why there are none, in `limit` seconds."""
    if platform != "darwin":
        return _stopped_scan("wrong_system", "Metal is only on macOS", present=False)
    ask = run if run is not None else macos.running_until(time.monotonic() + limit)
    system = macos.read_system(ask(macos.SYSTEM))
    processor = machine if machine is not None else os.uname().machine
    if system.get("hw.optional.arm64") == "1" or processor == "arm64":
        return _apple_silicon(system, ask)
    return _intel(system, ask)


def free_memory(index: int, facts: Facts, *, run: macos.Run | None = None) -> int | None:
    """Return the bytes that the GPU could get now; `None` for a card with its own memory."""
    if facts.memory_kind != "unified":
        return None
    ask = run if run is not None else macos.running_until(time.monotonic() + 1.0)
    return _free(facts.usable_memory, ask)


def _apple_silicon(system: Mapping[str, str], ask: macos.Run) -> BackendScan:
    model, cores = macos.read_accelerator(ask(macos.ACCELERATOR))
    brand = system.get("machdep.cpu.brand_string", "")
    # Under Rosetta the processor calls itself "VirtualApple"; the GPU keeps its name.
    chip = brand if brand.startswith("Apple ") else model or "Apple Silicon GPU"
    virtual = _is_virtual(system)
    total = as_number(system.get("hw.memsize"))
    usable, rule = _usable(total, as_number(system.get("iogpu.wired_limit_mb")))
    generation = _CHIP.match(chip)
    details: dict[str, Detail] = {"gpu_cores": cores, "usable_memory_is": rule}
    facts = Facts(
        name="Apple Paravirtual device" if virtual else chip,
        memory_kind="unified",
        total_memory=total,
        usable_memory=usable,
        free_memory=_free(usable, ask),
        architecture=generation[0] if generation else None,
        driver_version=system.get("kern.osproductversion"),
        details=details,
    )
    reason = _why_not(system)
    notes = [_VIRTUAL] if virtual else []
    if not system:
        notes.append("sysctl did not answer: memory and version of macOS are unknown")
    elif reason is None and _older(system, OLDEST_FOR_MLX):
        version = system["kern.osproductversion"]
        notes.append(f"mlx needs macOS {OLDEST_FOR_MLX} or newer; on {version} only torch serves")
    device = RawDevice(0, "gpu", facts, reason)
    return BackendScan("metal", present=True, devices=(device,), notes=tuple(notes))


def _usable(total: int | None, limit_in_mib: int | None) -> tuple[int | None, str]:
    if total is None:
        return None, "unknown"
    if limit_in_mib:
        return min(total, limit_in_mib * 2**20), "set by iogpu.wired_limit_mb"
    if total <= _SMALL_MACHINE:
        return total * 2 // 3, "an approximation: two thirds of the memory"
    return total * 3 // 4, "an approximation: three quarters of the memory"


def _free(usable: int | None, ask: macos.Run) -> int | None:
    available = macos.read_available_memory(ask(macos.PAGES))
    return available if available is None or usable is None else min(available, usable)


def _why_not(system: Mapping[str, str]) -> Reason | None:
    if system.get("sysctl.proc_translated") == "1":
        return _ROSETTA
    if _older(system, OLDEST_FOR_TORCH):
        version = system["kern.osproductversion"]
        needs = f"torch needs {OLDEST_FOR_TORCH} and mlx {OLDEST_FOR_MLX}"
        return Reason("system_too_old", f"macOS {version} is too old: {needs}", _UPDATE)
    return None


def _older(system: Mapping[str, str], needed: str) -> bool:
    version = system.get("kern.osproductversion", "")
    return version[:1].isdecimal() and compare_versions(version, needed) < 0


def _is_virtual(system: Mapping[str, str]) -> bool:
    return (
        system.get("kern.hv_vmm_present") == "1"
        or system.get("hw.model", "").startswith("VirtualMac")
        or "(Virtual)" in system.get("machdep.cpu.brand_string", "")
    )


def _intel(system: Mapping[str, str], ask: macos.Run) -> BackendScan:
    listed = macos.read_graphics(ask(macos.DISPLAYS))
    if listed is None:
        text = "system_profiler did not tell which graphics hardware this Mac has"
        return _stopped_scan("not_readable", text, "system_profiler SPDisplaysDataType")
    if not listed:
        return _stopped_scan("no_hardware", "this Mac has no GPU", present=False, stage="device")
    # Metal takes the card before the integrated GPU, so the cards are numbered first.
    ordered = sorted(listed, key=lambda graphics: not graphics.discrete)
    devices = tuple(_of_intel(index, graphics, system) for index, graphics in enumerate(ordered))
    notes = (
        ["the last torch for Intel Macs is 2.2, and mlx has none"] if ordered[0].discrete else []
    )
    if _is_virtual(system):
        notes.append(_VIRTUAL)
    return BackendScan("metal", present=True, devices=devices, notes=tuple(notes))


def _of_intel(index: int, graphics: macos.Graphics, system: Mapping[str, str]) -> RawDevice:
    facts = Facts(
        name=graphics.name,
        memory_kind="dedicated" if graphics.discrete else "unified",
        total_memory=graphics.memory,
        usable_memory=graphics.memory,
        driver_version=system.get("kern.osproductversion"),
    )
    if not graphics.discrete:
        return RawDevice(index, "gpu", facts, _INTEGRATED)
    return RawDevice(index, "gpu", facts, _why_not(system))
