"""The one command that would mend OpenCL on this machine.

From what a loader shows to what we say of it: pure, so that recorded answers can test it.

What the outcome of asking an OpenCL loader means: pure, so that recordings can test it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from anydevice.core.finding import Detail, Facts, Kind, MemoryKind, Seen, Sighting, compare_versions
from anydevice.core.record import replace
from anydevice.hardware import linux as pci
from anydevice.hardware.driver_process.parent import Outcome
from anydevice.hardware.opencl.facts import (
    Driver,
    Loader,
    Machine,
    registered_drivers,
    vendor_folders,
)

INTEL = 0x8086

GIVE_A_LOADER = 'pip install "anydevice[opencl]"'
"""What brings a loader: pyopencl's wheels have one inside."""

LINK_WITH_SYSTEM = "pip install --force-reinstall --no-binary pyopencl pyopencl"
"""What makes pyopencl use the system's loader instead of one of its own."""

_NVIDIA_DRIVER = "libnvidia-opencl.so.1"
_RUSTICL_DRIVERS = {INTEL: "iris", pci.AMD: "radeonsi", pci.NVIDIA: "nouveau"}


def card_without_driver(machine: Machine, folder: Path) -> tuple[str, str] | None:
    """For the first vendor with a card on the bus: who it is, and what gives it an OpenCL driver.

    `None` where no known card is there. `folder` is where the loader looks for `.icd` files.
    """
    if machine.cards(pci.NVIDIA):
        if machine.library(_NVIDIA_DRIVER):
            return "NVIDIA", _write(machine, folder / "nvidia.icd", _NVIDIA_DRIVER)
        command = _install(machine, "nvidia-opencl-icd")
        return "NVIDIA", command or f"install the NVIDIA driver with its {_NVIDIA_DRIVER}"
    if machine.cards(pci.AMD):
        command = _install(machine, "rocm-opencl")
        return "AMD", command or "install rocm-opencl, AMD's OpenCL driver"
    if machine.cards(INTEL):
        command = _install(machine, "intel-opencl-icd")
        return "Intel", command or "install Intel's compute runtime (intel-opencl-icd)"
    return None


def give_a_driver(machine: Machine, folder: Path, loader: Loader | None) -> str:
    """What gives this machine its first OpenCL driver: for its card, or else for its CPU."""
    card = card_without_driver(machine, folder)
    if card is not None:
        return card[1]
    if machine.system == "linux" and machine.architecture == "x86_64":
        # PoCL's wheel puts its driver beside the loader of pyopencl's, where only that one looks.
        wheel = "" if loader is not None and loader.home is not None else "pyopencl "
        return f"pip install {wheel}pocl-binary-distribution"
    return "install the OpenCL driver of your GPU's vendor"


def repair(loader: Loader, machine: Machine) -> str:
    """What replaces a loader that does not load."""
    if loader.home is not None:
        return "pip install --force-reinstall pyopencl"
    command = _install(machine, "--reinstall ocl-icd-libopencl1")
    return command or "install your system's OpenCL loader again"


def hide(drivers: Sequence[Driver], machine: Machine) -> str | None:
    """What keeps these drivers from being loaded; `None` for no drivers."""
    commands = [
        _move_away(driver.file, machine)
        for driver in drivers
        if driver.file is not None and driver.variable is None
    ]
    for variable in sorted({driver.variable for driver in drivers if driver.variable}):
        named = machine.environment.get(variable, "").split(os.pathsep)
        bad = {driver.library for driver in drivers if driver.variable == variable}
        kept = os.pathsep.join(name for name in named if name and name not in bad)
        whole = variable != "OCL_ICD_FILENAMES" or not kept
        commands.append(f"unset {variable}" if whole else f"export {variable}={shlex.quote(kept)}")
    return " && ".join(commands) or None


def enable_rusticl(machine: Machine) -> str:
    """What makes Mesa's rusticl show devices: it shows none that its variable does not name."""
    names = [name for vendor, name in _RUSTICL_DRIVERS.items() if machine.cards(vendor)]
    return f"export RUSTICL_ENABLE={','.join(names) or 'llvmpipe'}"


def _move_away(icd: Path, machine: Machine) -> str:
    file = shlex.quote(str(icd))
    return f"{_sudo(machine, icd.parent)}mv {file} {file}.off"


def _write(machine: Machine, file: Path, line: str) -> str:
    sudo = _sudo(machine, file.parent)
    folder, target = shlex.quote(str(file.parent)), shlex.quote(str(file))
    return f"{sudo}mkdir -p {folder} && echo {line} | {sudo}tee {target}"


def _install(machine: Machine, package: str) -> str | None:
    sudo = "" if machine.is_superuser else "sudo "
    return f"{sudo}apt install {package}" if machine.has_apt else None


def _sudo(machine: Machine, folder: Path) -> str:
    return "" if machine.is_superuser or os.access(folder, os.W_OK) else "sudo "


OLDEST = "1.2"

_CPU_TYPE = 1 << 1
_UNKNOWN_UUIDS = ("", "0" * 32, "f" * 32)

Answer = Mapping[str, Any]
"""What `asks/opencl.py` returns."""


def read_answer(answer: Answer, loader: Loader, machine: Machine) -> Sighting:
    """The sighting for a loader that answered."""
    platforms = answer["platforms"]
    if answer["error"]:
        return Sighting(
            "opencl",
            present=True,
            stage="driver",
            reason=f"the OpenCL loader {loader.path}: {refusal('clGetPlatformIDs', answer)}",
            mend=repair(loader, machine),
        )
    if not platforms:
        return _no_platform(loader, machine)
    devices = read_devices(platforms, machine)
    notes = tuple(
        f"{platform['name']}: {refusal('clGetDeviceIDs', platform)}"
        for platform in platforms
        if platform["error"]
    )
    if not devices:
        return _no_device(platforms, machine, notes)
    if all(device.kind == "cpu" for device in devices):
        notes += _card_left_out(loader, machine)
    return Sighting("opencl", present=True, devices=devices, notes=notes)


def refusal(function: str, answer: Answer) -> str:
    """A call that returned an error code, in words."""
    return f"{function} returned {answer['error']}"


def without_loader(machine: Machine) -> Sighting:
    """The sighting for a machine that has no loader, with or without drivers."""
    drivers = registered_drivers(None, machine)
    if not drivers:
        reason = "no OpenCL loader and no driver is installed"
    else:
        names = ", ".join(str(driver) for driver in drivers)
        reason = f"no OpenCL loader is installed, though a driver is: {names}"
    return Sighting(
        "opencl",
        present=bool(drivers),
        stage="driver",
        reason=reason,
        mend=GIVE_A_LOADER,
    )


def read_devices(platforms: Sequence[Answer], machine: Machine) -> tuple[Seen, ...]:
    """Every device of every platform, numbered in that order."""
    seen: list[Seen] = []
    for place, platform in enumerate(platforms):
        for number, device in enumerate(platform["devices"]):
            where: dict[str, Detail] = {
                "platform": platform["name"],
                "platform_index": place,
                "device_index": number,
            }
            seen.append(_read_device(len(seen), device, where, machine))
    return tuple(seen)


def _read_device(index: int, device: Answer, where: Mapping[str, Detail], machine: Machine) -> Seen:
    kind: Kind = "cpu" if (device["type"] or 0) & _CPU_TYPE else "gpu"
    version = re.match(r"OpenCL (\d+\.\d+)", device["version"])
    reason = mend = None
    if version is None:
        reason = f"its driver does not say which OpenCL it serves: {device['version']!r}"
    elif compare_versions(version[1], OLDEST) < 0:
        reason = f"OpenCL {version[1]} is older than {OLDEST}"
    if reason is not None:
        mend = f"install a newer OpenCL driver of {device['vendor'] or 'its vendor'}"
    board, free = device.get("board"), device.get("free_kib")
    capability = device.get("capability") or (None, None)
    facts = Facts(
        name=board or device["name"],
        uuid=_uuid(device["uuid"], device["vendor_id"]),
        pci_address=_pci_address(device["pci"], device["vendor_id"], machine),
        memory_kind=_memory_kind(kind, device["unified"]),
        total_memory=device["memory"],
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
            "double": device["double"],
        },
    )
    return Seen(index, kind, facts, reason, mend)


def _memory_kind(kind: Kind, unified: bool) -> MemoryKind:
    if kind == "cpu":
        return "host"
    return "unified" if unified else "dedicated"


def _uuid(digits: str, vendor: int | None) -> str | None:
    """As NVML writes it for an NVIDIA card, so that the two can be compared; plain for others."""
    if digits in _UNKNOWN_UUIDS:
        return None
    ends = (0, 8, 12, 16, 20, 32)
    dashed = "-".join(digits[start:end] for start, end in pairwise(ends))
    return f"GPU-{dashed}" if vendor == pci.NVIDIA else dashed


def _pci_address(
    place: Sequence[int | None] | None, vendor: int | None, machine: Machine
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


def _no_platform(loader: Loader, machine: Machine) -> Sighting:
    folders = vendor_folders(loader, machine)
    drivers = registered_drivers(loader, machine)
    card = card_without_driver(machine, folders[0])
    mend = give_a_driver(machine, folders[0], loader)
    if machine.system == "win32":
        reason = "the OpenCL loader finds no driver in the registry"
    elif drivers:
        reason = "no OpenCL driver shows a platform: " + "; ".join(
            f"{driver} is not there"
            if _is_missing(driver.library, loader, machine)
            else f"{driver} shows none"
            for driver in drivers
        )
    else:
        looked = " and ".join(str(folder) for folder in folders)
        reason = f"no OpenCL driver is registered: no .icd file in {looked}"
    return Sighting(
        "opencl",
        present=bool(drivers) or card is not None,
        stage="driver",
        reason=reason,
        mend=mend,
    )


def _is_missing(library: str, loader: Loader, machine: Machine) -> bool:
    beside = loader.home is not None and (loader.home / ".libs" / library).is_file()
    return not beside and machine.library(library) is None


def _no_device(platforms: Sequence[Answer], machine: Machine, notes: tuple[str, ...]) -> Sighting:
    names = ", ".join(platform["name"] for platform in platforms)
    reason = "; ".join((f"OpenCL shows no device on {names}", *notes))
    mend = None
    if any(platform["name"] == "rusticl" for platform in platforms):
        mend = enable_rusticl(machine)
    return Sighting("opencl", present=True, stage="device", reason=reason, mend=mend)


def _card_left_out(loader: Loader, machine: Machine) -> tuple[str, ...]:
    card = card_without_driver(machine, vendor_folders(loader, machine)[0])
    if card is None:
        return ()
    return (f"there is an {card[0]} card, and no OpenCL driver shows it: {card[1]}",)


def read_outcome(outcome: Outcome, loader: Loader, machine: Machine) -> Sighting:
    """The sighting for a child that came back, with an answer or without one."""
    if outcome.how == "answered":
        return read_answer(outcome.answer, loader, machine)
    if outcome.how == "not started":
        return Sighting(
            "opencl",
            present=bool(registered_drivers(loader, machine)),
            stage="driver",
            reason=f"OpenCL could not be asked, because no child process started: {outcome.error}",
        )
    return Sighting(
        "opencl",
        present=True,
        stage="driver",
        reason=f"the OpenCL loader {loader.path} does not work: {outcome.sentence}",
        mend=repair(loader, machine),
    )


def read_breakdown(
    together: Outcome,
    drivers: Sequence[Driver],
    outcomes: Sequence[Outcome],
    loader: Loader,
    machine: Machine,
) -> Sighting:
    """The sighting after all drivers together crashed or hung, and each was asked alone.

    `outcomes` belongs to `drivers`, one for one; it is empty where they were not asked.
    """
    if len(drivers) == 1:
        outcomes = (together,)
    pairs = list(zip(drivers, outcomes, strict=False))
    bad = [(driver, outcome) for driver, outcome in pairs if outcome.how != "answered"]
    good = [outcome.answer for _, outcome in pairs if outcome.how == "answered"]
    if bad:
        blamed = "; ".join(f"{driver} {outcome.sentence}" for driver, outcome in bad)
        names = " and ".join(driver.name for driver, _ in bad)
        reason = f"{blamed}; remove or hide it, since it does so in every program that uses OpenCL"
    else:
        names = "one of its drivers" if drivers else "it"
        known = ", ".join(str(driver) for driver in drivers) or "none that could be named"
        reason = f"the OpenCL loader {loader.path} {together.sentence}; its drivers: {known}"
        if good:
            reason += "; each of them answers when it is alone"
    mend = hide([driver for driver, _ in bad], machine)
    does = "hangs" if together.how == "timed out" else "crashes"
    devices = read_devices([each for answer in good for each in answer["platforms"]], machine)
    unusable = f"listing the OpenCL devices {does}, because of {names}"
    return Sighting(
        "opencl",
        present=True,
        devices=_made_unusable(devices, unusable, mend),
        stage="driver",
        reason=reason,
        mend=mend,
    )


def add_seen_elsewhere(
    sighting: Sighting, outcome: Outcome, system: Loader, machine: Machine
) -> Sighting:
    """What the system's loader shows, where the loader that pyopencl uses shows nothing."""
    if outcome.how != "answered":
        return sighting
    devices = read_devices(outcome.answer["platforms"], machine)
    if not devices:
        return sighting
    reason = f"only the system's loader {system.path} shows it, and pyopencl uses another"
    return replace(
        sighting,
        present=True,
        devices=_made_unusable(devices, reason, LINK_WITH_SYSTEM),
        mend=LINK_WITH_SYSTEM,
    )


def _made_unusable(devices: Sequence[Seen], reason: str, mend: str | None) -> tuple[Seen, ...]:
    return tuple(
        device if device.reason else replace(device, reason=reason, mend=mend) for device in devices
    )
