"""Turns kernel files and the answer of Level Zero into devices, or into a reason and its fix."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from anydevice._core.child.parent import Outcome
from anydevice._core.finding import BackendScan, Facts, RawDevice, Reason, compare_versions
from anydevice._core.record import replace
from anydevice._machine.engines.installed import distributions
from anydevice._machine.hardware import linux
from anydevice._machine.hardware.linux import CardMachine

OLDEST_LOADER = "1.8.0"
"""SYCL, through which PyTorch computes, refuses an older loader of Level Zero."""

_UNINITIALIZED, _NO_PERMISSION = 0x78000001, 0x70010000
_MASK = "ZE_AFFINITY_MASK"

_JOIN_GROUP = "sudo usermod -a -G render $USER"
_PASS_DEVICES = "docker run --device=/dev/dri --group-add render …"
_INSTALL = {
    "debian": "sudo apt install libze1 libze-intel-gpu1",
    "fedora": "sudo dnf install oneapi-level-zero intel-level-zero",
    "arch": "sudo pacman -S level-zero-loader intel-compute-runtime",
}

_OLD = "before Xe"
_GENERATIONS = {
    digits: name
    for name, identities in (
        (_OLD, "01 04 0a 0c 0d 0f 16 19 1a 22 31 3e 45 4e 59 5a 87 8a 9b"),
        *(("Xe-LP", "46 49 4c 9a a7"), ("Xe-HPG", "56"), ("Xe-HPC", "0b"), ("Xe-LPG", "7d b6")),
        *(("Xe2", "64 e2"), ("Xe3", "b0 fd")),
    )
    for digits in identities.split()
}
"""Generations by the first digits of a device id (include/drm/intel/pciids.h of Linux)."""


def interpret(machine: CardMachine, outcome: Outcome) -> BackendScan:
    """Return the scan of the backend that follows from the files and from Level Zero."""
    shown = [_card(address, machine) for address in machine.cards]
    closed = [_too_old(facts) or _why_closed(facts, machine) for facts in shown]
    ordered = sorted(filter(None, closed), key=lambda why: why.code == "card_too_old")
    reason = ordered[0] if shown and all(closed) else _why_silent(outcome, machine)
    if reason is None:
        devices = tuple(_devices(outcome.answer["devices"], machine))
        notes = (*(why.with_fix for why in ordered), *_notes(devices, machine))
        return BackendScan("xpu", present=True, devices=devices, notes=notes)
    return BackendScan(
        "xpu",
        present=bool(shown) or outcome.how not in ("answered", "not_started"),
        devices=tuple(RawDevice(index, "gpu", facts) for index, facts in enumerate(shown)),
        stage="device" if reason.code in ("card_too_old", "hidden", "no_device") else "driver",
        reason=reason,
    )


def _card(address: str, machine: CardMachine) -> Facts:
    """Return the facts of a card that the kernel's files tell."""
    folder = machine.root / linux.DEVICES / address
    identity = linux.read_line(folder / "device").removeprefix("0x").zfill(4)
    window = None
    with suppress(ValueError, IndexError):  # the third line is BAR 2, through which memory is seen
        first, last, _ = (linux.read_text(folder / "resource") or "").splitlines()[2].split()
        window = int(last, 16) - int(first, 16) + 1
    return Facts(
        name=f"Intel GPU {identity}",
        pci_address=address,
        memory_kind="unified" if address == "0000:00:02.0" else "dedicated",
        architecture=_GENERATIONS.get(identity[:2]),
        details={
            "device_id": identity,
            "kernel_driver": linux.bound_driver(address, machine.root),
            "mappable_memory": window,
        },
    )


def _too_old(facts: Facts) -> Reason | None:
    text = f"{facts.name} is older than Xe, the oldest generation that PyTorch drives"
    return Reason("card_too_old", text) if facts.architecture == _OLD else None


def _why_closed(facts: Facts, machine: CardMachine) -> Reason | None:
    """Return why this process cannot reach a card; `None` if its device file opens."""
    card, driver = f"{facts.name} at {facts.pci_address}", facts.details["kernel_driver"]
    if driver not in ("i915", "xe"):
        text = f"{card} needs the driver i915 or xe, and has {driver or 'none'}"
        return Reason("driver_not_loaded", text, None if driver else "sudo modprobe -a i915 xe")
    nodes = linux.names_in(machine.root / linux.DEVICES / str(facts.pci_address) / "drm")
    node = next((name for name in sorted(nodes) if name.startswith("render")), "renderD128")
    inside = _PASS_DEVICES if linux.in_container(machine.root, machine.environment) else None
    if not os.path.exists(machine.root / "dev/dri" / node):
        return Reason("not_in_container", f"/dev/dri/{node} of {card} is missing", inside)
    if not machine.accessible(machine.root / "dev/dri" / node):
        text = f"no permission to open /dev/dri/{node} of {card}"
        return Reason("no_permission", text, inside or _JOIN_GROUP)
    return None


def _why_silent(outcome: Outcome, machine: CardMachine) -> Reason | None:
    """Return why Level Zero shows no GPU; `None` if it shows one."""
    fix = linux.fitting(_INSTALL, linux.distribution(machine.root))
    fix = fix or "install Intel's graphics driver with Level Zero"
    if outcome.how != "answered":
        broken = fix if outcome.how in ("crashed", "failed") else None
        return Reason(outcome.how, f"Level Zero {outcome.sentence}", broken)
    answer, mask = outcome.answer, machine.environment.get(_MASK)
    version, error = answer.get("loader_version"), answer.get("error", 0)
    if answer["problem"]:
        code, text = "driver_broken", f"its loader does not load: {answer['problem']}"
    elif answer["library"] is None:
        code, text = "loader_missing", "its loader is not installed"
    elif version and compare_versions(version, OLDEST_LOADER) < 0:
        code, text = "driver_too_old", f"its loader {version} is older than {OLDEST_LOADER}"
    elif error == _NO_PERMISSION:
        code, text, fix = "no_permission", "it may not open the GPU", _JOIN_GROUP
    elif error not in (0, _UNINITIALIZED):
        code, text = "driver_failed", f"zeInit returned {error:#x}"
    elif answer["devices"]:
        return None
    elif mask is not None:
        code, text, fix = "hidden", f"{_MASK}={mask} hides every GPU", f"unset {_MASK}"
    elif error:
        code, text = "driver_missing", "its loader finds no driver"
    else:
        code, text = "no_device", "it shows no GPU"
    return Reason(code, f"Level Zero: {text}", fix)


def _devices(rows: list[Any], machine: CardMachine) -> Iterator[RawDevice]:
    """Yield the GPUs as PyTorch counts them: integrated ones only where there is no other."""
    places = sorted((row["integrated"], place) for place, row in enumerate(rows))
    for index, (is_integrated, place) in enumerate(places):
        facts = _facts(rows[place], machine)
        reason = _too_old(facts)
        if reason is None and is_integrated and not places[0][0]:
            text = "PyTorch leaves out the processor's GPU where a card is visible"
            reason = Reason("not_driven", text, f"export {_MASK}={place}")
        yield RawDevice(index, "gpu", facts, reason)


def _facts(row: Mapping[str, Any], machine: CardMachine) -> Facts:
    digits, memory, free = row["uuid"], row["memory"], row["free"]
    if row["integrated"]:
        free = linux.read_table(machine.root / "proc/meminfo").get("MemAvailable")
    address = "{:04x}:{:02x}:{:02x}.{:x}".format(*row["pci"]) if row["pci"] else None
    card, identity = _card(address or "unknown", machine), f"{row['device']:04x}"
    return replace(
        card,
        name=row["name"].replace("(R)", "").replace("(TM)", ""),
        uuid="-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])),
        pci_address=address,
        memory_kind="unified" if row["integrated"] else "dedicated",
        total_memory=memory,
        free_memory=free if None in (free, memory) else min(free, memory),
        architecture=_GENERATIONS.get(identity[:2]),
        driver_version=row["driver"],
        runtime_version=row["api"],
        details={**card.details, "device_id": identity},
    )


def _notes(devices: tuple[RawDevice, ...], machine: CardMachine) -> Iterator[str]:
    for variable in (_MASK, "ONEAPI_DEVICE_SELECTOR"):
        if machine.environment.get(variable):
            yield f"{variable}={machine.environment[variable]} chooses among the GPUs"
    for facts in (device.facts for device in devices if device.reason is None):
        if facts.memory_kind == "dedicated" and facts.details["mappable_memory"] == 256 * 2**20:
            text = "only 256 MiB of its memory can be mapped at a time"
            yield f"{facts.name}: {text} (fix: switch on Resizable BAR in the firmware)"
        if facts.architecture == "Xe-LP":
            yield f"{facts.name}: PyTorch is not tested on Xe-LP, the generation before Arc"
    extension = distributions().get("intel-extension-for-openxla")
    if extension:
        yield f"JAX may drive it, too, through intel-extension-for-openxla {extension}: not tested"
