"""Turns the answer of an OpenCL loader into devices, or into a reason and its fix."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from anydevice._core.child.parent import Outcome
from anydevice._core.finding import (
    BackendScan,
    Detail,
    Facts,
    Kind,
    RawDevice,
    Reason,
    compare_versions,
)
from anydevice._core.record import replace
from anydevice._machine.hardware import linux
from anydevice._machine.hardware.opencl.facts import (
    Driver,
    Loader,
    OpenCLMachine,
    registered_drivers,
    vendor_folders,
)

OLDEST = "1.2"

_stopped_scan = partial(BackendScan.stopped, "opencl")

POCL = "Portable Computing Language"

_CRASH_WITH_FLOAT64 = {(POCL, "3.0-rc2")}
"""Releases of drivers whose compiler crashes on some processors, or leaves kernels without a name,
when it compiles for float64."""

_GENERIC_CPU = "x86_64-unknown-linux-gnu-generic"
_NEWER_POCL = "install a newer PoCL, with its loader: conda install -c conda-forge pyopencl pocl"

_CPU_TYPE = 1 << 1
_UNKNOWN_UUIDS = ("", "0" * 32, "f" * 32)

Answer = Mapping[str, Any]
"""The answer of `driver_process/opencl.py`."""


def read_outcome(outcome: Outcome, loader: Loader, machine: OpenCLMachine) -> BackendScan:
    """Return the scan for a child that came back, with an answer or without one."""
    if outcome.how == "answered":
        return read_answer(outcome.answer, loader, machine)
    if outcome.how == "not_started":
        text = f"OpenCL could not be asked, because no child process started: {outcome.error}"
        present = bool(registered_drivers(loader, machine))
        return _stopped_scan("not_started", text, present=present)
    text = f"the OpenCL loader {loader.path} does not work: {outcome.sentence}"
    code = "driver_broken" if outcome.how == "failed" else outcome.how
    return _stopped_scan(code, text, repair(loader, machine))


def read_breakdown(
    together: Outcome,
    drivers: Sequence[Driver],
    outcomes: Sequence[Outcome],
    loader: Loader,
    machine: OpenCLMachine,
) -> BackendScan:
    """Return the scan after all drivers together failed, and each was asked alone."""
    if len(drivers) == 1:
        outcomes = (together,)
    pairs = list(zip(drivers, outcomes, strict=False))
    bad = [(driver, outcome) for driver, outcome in pairs if outcome.how != "answered"]
    good = [outcome.answer for _, outcome in pairs if outcome.how == "answered"]
    if bad:
        blamed = "; ".join(f"{driver} {outcome.sentence}" for driver, outcome in bad)
        names = " and ".join(driver.name for driver, _ in bad)
        text = f"{blamed}; remove or hide it, since it does so in every program that uses OpenCL"
    else:
        names = "one of its drivers" if drivers else "it"
        known = ", ".join(str(driver) for driver in drivers) or "none that could be named"
        text = f"the OpenCL loader {loader.path} {together.sentence}; its drivers: {known}"
        if good:
            text += "; each of them answers when it is alone"
    fix = hide([driver for driver, _ in bad], machine)
    does = "hangs" if together.how == "timed_out" else "crashes"
    devices = read_devices(
        [platform for answer in good for platform in answer["platforms"]], machine
    )
    unusable = f"listing the OpenCL devices {does}, because of {names}"
    scan = _stopped_scan(together.how, text, fix)
    return replace(scan, devices=_mark_unusable(devices, Reason(together.how, unusable, fix)))


def add_seen_elsewhere(
    scan: BackendScan, outcome: Outcome, system: Loader, machine: OpenCLMachine
) -> BackendScan:
    """Return the scan with the devices that only the system's loader shows, and not pyopencl's."""
    if outcome.how != "answered":
        return scan
    devices = read_devices(outcome.answer["platforms"], machine)
    if not devices:
        return scan
    text = f"only the system's loader {system.path} shows it, and pyopencl uses another"
    stopped = scan.reason and replace(scan.reason, fix=LINK_WITH_SYSTEM)
    unusable = _mark_unusable(devices, Reason("other_loader", text, LINK_WITH_SYSTEM))
    return replace(scan, present=True, devices=unusable, reason=stopped)


def _mark_unusable(devices: Sequence[RawDevice], reason: Reason) -> tuple[RawDevice, ...]:
    return tuple(device if device.reason else replace(device, reason=reason) for device in devices)


def read_answer(answer: Answer, loader: Loader, machine: OpenCLMachine) -> BackendScan:
    platforms = answer["platforms"]
    if answer["error"]:
        text = f"the OpenCL loader {loader.path}: {_describe_refusal('clGetPlatformIDs', answer)}"
        return _stopped_scan("driver_failed", text, repair(loader, machine))
    if not platforms:
        return _no_platform(loader, machine)
    devices = read_devices(platforms, machine)
    notes = tuple(
        f"{platform['name']}: {_describe_refusal('clGetDeviceIDs', platform)}"
        for platform in platforms
        if platform["error"]
    )
    if not devices:
        names = [platform["name"] for platform in platforms]
        text = "; ".join((f"OpenCL shows no device on {', '.join(names)}", *notes))
        fix = enable_rusticl(machine) if "rusticl" in names else None
        return _stopped_scan("no_device", text, fix, stage="device")
    releases = [(str(d.facts.details["platform"]), d.facts.driver_version or "") for d in devices]
    defects = (float64_defect(*release) for release in dict.fromkeys(releases))
    notes += tuple(defect.with_fix for defect in defects if defect)
    if all(device.kind == "cpu" for device in devices):
        card = card_without_driver(machine, vendor_folders(loader, machine)[0])
        if card is not None:
            notes += (f"there is an {card[0]} card, and no OpenCL driver shows it: {card[1]}",)
    return BackendScan("opencl", present=True, devices=devices, notes=notes)


def _describe_refusal(function: str, answer: Answer) -> str:
    return f"{function} returned {answer['error']}"


def float64_defect(platform: str, driver: str) -> Reason | None:
    """Return why a release of a driver must not compute in float64; `None` if it may.

    >>> float64_defect(POCL, "3.0-rc2").code, float64_defect(POCL, "6.0")
    ('driver_defect', None)
    """
    if (platform, driver) not in _CRASH_WITH_FLOAT64:
        return None
    name = "PoCL" if platform == POCL else platform
    text = f"{name} {driver} crashes on some processors when it compiles for float64, so OpenCL "
    fix = f"use float32, or install a later release of {name}"
    return Reason("driver_defect", f"{text}float64 is refused there", fix)


def unknown_processor(platform: str, driver: str, version: str) -> Reason | None:
    """Return why PoCL compiles nothing for this processor; `None` if it may.

    Before 4.0, PoCL names a processor that is newer than its compiler "generic", which that
    compiler refuses (issue 1049 of pocl/pocl).

    >>> text = "OpenCL 3.0 PoCL HSTR: pthread-x86_64-unknown-linux-gnu-generic"
    >>> unknown_processor(POCL, "3.0-rc2", text).code
    'driver_defect'
    """
    if platform != POCL or not version.endswith(_GENERIC_CPU):
        return None
    if compare_versions(driver, "4.0") >= 0:
        return None
    text = f"PoCL {driver} does not know this processor, which is newer, and cannot compile for it"
    return Reason("driver_defect", text, _NEWER_POCL)


def without_loader(machine: OpenCLMachine) -> BackendScan:
    """Return the scan for a machine that has no loader, with or without drivers."""
    drivers = registered_drivers(None, machine)
    names = ", ".join(str(driver) for driver in drivers)
    text = (
        f"no OpenCL loader is installed, though a driver is: {names}"
        if drivers
        else "no OpenCL loader and no driver is installed"
    )
    return _stopped_scan("loader_missing", text, GIVE_A_LOADER, present=bool(drivers))


def read_devices(platforms: Sequence[Answer], machine: OpenCLMachine) -> tuple[RawDevice, ...]:
    """Return every device of every platform, numbered in that order."""
    devices: list[RawDevice] = []
    for place, platform in enumerate(platforms):
        for number, device in enumerate(platform["devices"]):
            where: dict[str, Detail] = {
                "platform": platform["name"],
                "platform_index": place,
                "device_index": number,
            }
            devices.append(_read_device(len(devices), device, where, machine))
    return tuple(devices)


def _read_device(
    index: int, device: Answer, where: Mapping[str, Detail], machine: OpenCLMachine
) -> RawDevice:
    kind: Kind = "cpu" if (device["type"] or 0) & _CPU_TYPE else "gpu"
    version = re.match(r"OpenCL (\d+\.\d+)", device["version"])
    reason = None
    newer = f"install a newer OpenCL driver of {device['vendor'] or 'its vendor'}"
    if version is None:
        text = f"its driver does not say which OpenCL it serves: {device['version']!r}"
        reason = Reason("card_unsupported", text, newer)
    elif compare_versions(version[1], OLDEST) < 0:
        reason = Reason("driver_too_old", f"OpenCL {version[1]} is older than {OLDEST}", newer)
    else:
        reason = unknown_processor(str(where["platform"]), device["driver"], device["version"])
    board, free = device.get("board"), device.get("free_kib")
    platform = where["platform"]
    capability = device.get("capability") or (None, None)
    facts = Facts(
        name=board or device["name"],
        uuid=_uuid(device["uuid"], device["vendor_id"]),
        pci_address=_pci_address(device["pci"], device["vendor_id"], machine),
        memory_kind="host" if kind == "cpu" else "unified" if device["unified"] else "dedicated",
        # PoCL counts the memory of one moment, on machines whose memory grows and shrinks.
        total_memory=(machine.memory if kind == "cpu" else None) or device["memory"],
        usable_memory=device["memory"],
        free_memory=free if free is None else free * 1024,
        compute_capability=None if None in capability else "{}.{}".format(*capability),
        architecture=device["name"] if board else None,
        driver_version=device["driver"] or None,
        runtime_version=version[1] if version else None,
        details={
            **where,
            "vendor": device["vendor"],
            "compute_units": device["compute_units"],
            "max_work_group_size": device["work_group"],
            "half": device["half"],
            "double": device["double"] and not float64_defect(str(platform), device["driver"]),
        },
    )
    return RawDevice(index, kind, facts, reason)


def _uuid(digits: str, vendor: int | None) -> str | None:
    """Return the UUID as NVML writes it for an NVIDIA card; plain for others."""
    if digits in _UNKNOWN_UUIDS:
        return None
    ends = (0, 8, 12, 16, 20, 32)
    dashed = "-".join(digits[start:end] for start, end in pairwise(ends))
    return f"GPU-{dashed}" if vendor == linux.NVIDIA else dashed


def _pci_address(
    place: Sequence[int | None] | None, vendor: int | None, machine: OpenCLMachine
) -> str | None:
    if place is None:
        return None
    domain, *rest = place
    tail = f"{rest[0]:02x}:{rest[1]:02x}.{rest[2]:x}"
    if domain is not None:
        return f"{domain:04x}:{tail}"
    # A driver that leaves the domain out means the vendor's one card at that place, if it is one.
    matching = [card for card in machine.cards(vendor or 0) if card.endswith(f":{tail}")]
    return matching[0] if len(matching) == 1 else None


def _no_platform(loader: Loader, machine: OpenCLMachine) -> BackendScan:
    folders = vendor_folders(loader, machine)
    drivers = registered_drivers(loader, machine)
    card = card_without_driver(machine, folders[0])
    fix = give_a_driver(machine, folders[0], loader)
    if machine.system == "win32":
        text = "the OpenCL loader finds no driver in the registry"
    elif drivers:
        text = "no OpenCL driver shows a platform: " + "; ".join(
            f"{driver} is not there"
            if machine.library(driver.library) is None
            and not (loader.home and (loader.home / ".libs" / driver.library).is_file())
            else f"{driver} shows none"
            for driver in drivers
        )
    else:
        looked = " and ".join(str(folder) for folder in folders)
        text = f"no OpenCL driver is registered: no .icd file in {looked}"
    present = bool(drivers) or card is not None
    return _stopped_scan("driver_missing", text, fix, present=present)


GIVE_A_LOADER = "pip install pyopencl"
"""Installs a loader: pyopencl's wheels have one inside."""

LINK_WITH_SYSTEM = "pip install --force-reinstall --no-binary pyopencl pyopencl"
"""Makes pyopencl use the system's loader instead of one of its own."""

_NVIDIA_DRIVER = "libnvidia-opencl.so.1"
_DRIVERS = {
    linux.NVIDIA: ("NVIDIA", "nvidia-opencl-icd", f"the NVIDIA driver with its {_NVIDIA_DRIVER}"),
    linux.AMD: ("AMD", "rocm-opencl", "rocm-opencl, AMD's OpenCL driver"),
    linux.INTEL: ("Intel", "intel-opencl-icd", "Intel's compute runtime (intel-opencl-icd)"),
}
"""By the vendor of a card: its name, and its OpenCL driver as a package and in words."""
_RUSTICL_DRIVERS = {linux.INTEL: "iris", linux.AMD: "radeonsi", linux.NVIDIA: "nouveau"}


def card_without_driver(machine: OpenCLMachine, folder: Path) -> tuple[str, str] | None:
    """Return the first vendor with a card on the bus, and how to get its OpenCL driver."""
    if machine.cards(linux.NVIDIA) and machine.library(_NVIDIA_DRIVER):
        return "NVIDIA", _write(machine, folder / "nvidia.icd", _NVIDIA_DRIVER)
    for vendor, (name, package, driver) in _DRIVERS.items():
        if machine.cards(vendor):
            return name, _install(machine, package) or f"install {driver}"
    return None


def give_a_driver(machine: OpenCLMachine, folder: Path, loader: Loader | None) -> str:
    """Return how to install an OpenCL driver: for the machine's card, or else for its CPU."""
    card = card_without_driver(machine, folder)
    if card is not None:
        return card[1]
    if machine.system == "linux" and machine.architecture == "x86_64":
        # PoCL's wheel puts its driver beside the loader of pyopencl's, where only that one looks.
        wheel = "" if loader is not None and loader.home is not None else "pyopencl "
        return f"pip install {wheel}pocl-binary-distribution"
    return "install the OpenCL driver of your GPU's vendor"


def repair(loader: Loader, machine: OpenCLMachine) -> str:
    """Return how to replace a loader that does not load."""
    if loader.home is not None:
        return "pip install --force-reinstall pyopencl"
    command = _install(machine, "--reinstall ocl-icd-libopencl1")
    return command or "install your system's OpenCL loader again"


def hide(drivers: Sequence[Driver], machine: OpenCLMachine) -> str | None:
    """Return how to keep drivers from being loaded; `None` for no drivers."""
    commands = []
    for driver in drivers:
        if driver.file is not None and driver.variable is None:
            file = shlex.quote(str(driver.file))
            commands.append(f"{_sudo(machine, driver.file.parent)}mv {file} {file}.off")
    for variable in sorted({driver.variable for driver in drivers if driver.variable}):
        named = machine.environment.get(variable, "").split(os.pathsep)
        bad = {driver.library for driver in drivers if driver.variable == variable}
        others = os.pathsep.join(name for name in named if name and name not in bad)
        whole = variable != "OCL_ICD_FILENAMES" or not others
        commands.append(
            f"unset {variable}" if whole else f"export {variable}={shlex.quote(others)}"
        )
    return " && ".join(commands) or None


def enable_rusticl(machine: OpenCLMachine) -> str:
    """Return how to make Mesa's rusticl show devices, which its variable must name."""
    names = [name for vendor, name in _RUSTICL_DRIVERS.items() if machine.cards(vendor)]
    return f"export RUSTICL_ENABLE={','.join(names) or 'llvmpipe'}"


def _write(machine: OpenCLMachine, file: Path, line: str) -> str:
    sudo = _sudo(machine, file.parent)
    folder, target = shlex.quote(str(file.parent)), shlex.quote(str(file))
    return f"{sudo}mkdir -p {folder} && echo {line} | {sudo}tee {target}"


def _install(machine: OpenCLMachine, package: str) -> str | None:
    sudo = "" if machine.is_superuser else "sudo "
    return f"{sudo}apt install {package}" if machine.has_apt else None


def _sudo(machine: OpenCLMachine, folder: Path) -> str:
    return "" if machine.is_superuser or os.access(folder, os.W_OK) else "sudo "
