"""From what a loader shows to what we say of it: pure, so that recorded answers can test it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from anydevice.core.facts import Detail, Facts, MemoryKind, compare_versions
from anydevice.core.finding import Kind, Seen, Sighting
from anydevice.hardware import opencl_mends as mends
from anydevice.hardware import pci
from anydevice.hardware.opencl_loaders import (
    Loader,
    Machine,
    registered_drivers,
    vendor_folders,
)

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
            mend=mends.repair(loader, machine),
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
        mend=mends.GIVE_A_LOADER,
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
    card = mends.card_without_driver(machine, folders[0])
    mend = mends.give_a_driver(machine, folders[0], loader)
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
        mend = mends.enable_rusticl(machine)
    return Sighting("opencl", present=True, stage="device", reason=reason, mend=mend)


def _card_left_out(loader: Loader, machine: Machine) -> tuple[str, ...]:
    card = mends.card_without_driver(machine, vendor_folders(loader, machine)[0])
    if card is None:
        return ()
    return (f"there is an {card[0]} card, and no OpenCL driver shows it: {card[1]}",)
