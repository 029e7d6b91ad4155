"""AMD GPUs through the files of their driver; no library of ROCm is loaded in this process."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from anydevice.core.finding import Detail, Facts, Reason, Seen, Sighting, compare_versions
from anydevice.core.record import Record, replace
from anydevice.hardware import linux
from anydevice.hardware.driver_process.parent import ask
from anydevice.hardware.linux import exists
from anydevice.hardware.rocm import diagnosis
from anydevice.hardware.rocm.facts import (
    Gpu,
    Topology,
    amdsmi_folder,
    caution,
    counters,
    driver_version,
    free_of_card,
    free_of_shared,
    gfx_name,
    last_resort_name,
    memory_of,
    product_name,
    rocm_version,
    too_old,
    topology,
)
from anydevice.hardware.rocm.visible import visible

OLDEST_ROCM = "5.0"

_ROOT = Path("/")
_TRACES = ("dev/kfd", "dev/dxg")
_SHARE_OF_CHILD = 0.6  # of the time that is left, so that a child that hangs stays a note


class AmdMachine(Record):
    """Where to look, and with what permissions: the machine itself, or a recording of one.

    `cards` are the PCI addresses of AMD's cards.
    """

    root: Path
    environment: Mapping[str, str]
    accessible: Callable[[Path], bool]
    cards: tuple[str, ...]


def may_open(path: Path) -> bool:
    """Whether this process may read and write a device file."""
    return os.access(path, os.R_OK | os.W_OK)


def look(
    limit: float,
    *,
    root: Path = _ROOT,
    environment: Mapping[str, str] | None = None,
    accessible: Callable[[Path], bool] = may_open,
    platform: str = sys.platform,
) -> Sighting:
    """The AMD GPUs of this machine, or why there are none, within `limit` seconds. Never raises.

    The other arguments are for recordings: another root of the file system, other variables, who
    may open a device file, and the name of the system as Python writes it.
    """
    if not platform.startswith("linux"):
        system = {"win32": "Windows", "darwin": "macOS"}.get(platform, platform)
        text = f"ROCm needs Linux; this is {system}"
        return diagnosis.stopped("wrong_system", text, present=False)
    cards = linux.cards(linux.AMD, root)
    if not cards and not any(exists(root / trace) for trace in _TRACES):
        return diagnosis.stopped("no_hardware", "no AMD GPU on the PCI bus", present=False)
    environment = os.environ if environment is None else environment
    return look_within(limit, AmdMachine(root, environment, accessible, cards))


def free_memory(index: int, facts: Facts, *, root: Path = _ROOT) -> int | None:
    """The free bytes of the GPU at this moment, or `None` where its driver does not tell."""
    if facts.pci_address is None:
        return None
    now = counters(facts.pci_address, root)
    if facts.memory_kind == "unified":
        return free_of_shared(facts.usable_memory, facts.details.get("pool"), now)
    return free_of_card(facts.total_memory, now)


def look_within(limit: float, machine: AmdMachine) -> Sighting:
    """The sighting, within `limit` seconds. Never raises."""
    # A wedged driver can hold a read of its files for ever; the thread that waits is left behind.
    answers: list[Sighting] = []

    def work() -> None:
        try:
            answers.append(_look(machine, time.monotonic() + limit))
        except Exception as error:
            text = f"reading the driver's files failed: {type(error).__name__}: {error}"
            answers.append(diagnosis.stopped("reading_failed", text))

    worker = threading.Thread(target=work, name="anydevice-rocm", daemon=True)
    worker.start()
    worker.join(limit)
    if answers:
        return answers[0]
    text = f"timed out: the driver's files could not be read within {limit:g} s"
    return diagnosis.stopped("timed_out", text, "sudo dmesg | grep -i amdgpu")


def _look(machine: AmdMachine, deadline: float) -> Sighting:
    root, environment, cards = machine.root, machine.environment, machine.cards
    if not exists(root / "dev/kfd"):
        return diagnosis.no_compute_driver(cards, root, environment)
    seen = topology(root)
    if not seen.gpus:
        return diagnosis.no_gpu_in_topology(cards, seen.withheld, root, environment)
    left = visible([gpu.uuid for gpu in seen.gpus], environment)
    if left.reason is not None:
        return Sighting("rocm", present=True, stage="device", reason=left.reason)
    shown = [seen.gpus[position] for position in left.positions]
    version = rocm_version(root, environment)
    devices, notes = _devices(shown, version, machine, deadline)
    notes = [*left.notes, *_notes(seen, shown, version, environment), *notes]
    sighting = Sighting("rocm", present=True, devices=tuple(devices), notes=tuple(notes))
    reason = _why_none(sighting, version, machine)
    return sighting if reason is None else _stopped_with_devices(sighting, reason)


def _why_none(sighting: Sighting, version: str | None, machine: AmdMachine) -> Reason | None:
    if version is not None and compare_versions(version, OLDEST_ROCM) < 0:
        text = f"ROCm {version} is too old; anydevice needs ROCm {OLDEST_ROCM} or newer"
        return Reason("driver_too_old", text, "sudo amdgpu-install --usecase=rocm")
    if not machine.accessible(machine.root / "dev/kfd"):
        return _no_permission("/dev/kfd", machine)
    closed = [
        device.reason
        for device in sighting.devices
        if device.reason and device.reason.code in ("no_permission", "not_in_container")
    ]
    if closed and len(closed) == len(sighting.devices):
        return closed[0]
    return None


def _stopped_with_devices(sighting: Sighting, reason: Reason) -> Sighting:
    devices = tuple(
        device if device.reason else replace(device, reason=reason) for device in sighting.devices
    )
    return replace(sighting, devices=devices, stage="driver", reason=reason)


def _no_permission(file: str, machine: AmdMachine) -> Reason:
    fix = diagnosis.give_access(machine.root, machine.environment)
    return Reason("no_permission", f"no permission to open {file}", fix)


def _devices(
    gpus: list[Gpu], version: str | None, machine: AmdMachine, deadline: float
) -> tuple[list[Seen], list[str]]:
    names = [product_name(gpu, machine.root) for gpu in gpus]
    driver = driver_version(machine.root)
    told: dict[str, dict[str, str]] = {}
    notes: list[str] = []
    if driver is None or None in names:
        told, notes = _ask_amdsmi(machine, deadline)
    override = _override(machine.environment)
    devices = []
    for index, (gpu, name) in enumerate(zip(gpus, names, strict=True)):
        memory = memory_of(gpu, machine.root)
        also = told.get(gpu.pci_address, {})
        details: dict[str, Detail] = {**memory.details}
        if override is not None:
            details["architecture_override"] = override
        facts = Facts(
            name=name or also.get("name") or last_resort_name(gpu),
            uuid=gpu.uuid,
            pci_address=gpu.pci_address,
            memory_kind=memory.kind,
            total_memory=memory.total,
            usable_memory=memory.usable,
            free_memory=memory.free,
            architecture=gpu.architecture,
            driver_version=driver or also.get("driver") or None,
            runtime_version=version,
            details=details,
        )
        devices.append(Seen(index, "gpu", facts, _unfit(gpu, machine)))
    return devices, notes


def _unfit(gpu: Gpu, machine: AmdMachine) -> Reason | None:
    old = too_old(gpu.architecture)
    if old is not None:
        return Reason("card_too_old", old)
    if gpu.render_minor is None:
        return None
    node = f"dev/dri/renderD{gpu.render_minor}"
    if not exists(machine.root / node):
        text = f"/{node} of this GPU is missing"
        return Reason("not_in_container", text, diagnosis.PASS_DEVICES)
    if not machine.accessible(machine.root / node):
        return _no_permission(f"/{node}", machine)
    return None


def _notes(
    seen: Topology, shown: list[Gpu], version: str | None, environment: Mapping[str, str]
) -> list[str]:
    notes = []
    if seen.withheld:
        notes.append(f"{seen.withheld} node(s) of the GPU topology may not be read by this process")
    if version is None:
        notes.append("ROCm itself is not installed; a library must bring its own copy of it")
    written = environment.get("HSA_OVERRIDE_GFX_VERSION")
    if written:
        effect = _override(environment)
        what = f"the runtime takes every GPU for {effect}" if effect else "this is no version"
        notes.append(f"HSA_OVERRIDE_GFX_VERSION={written}: {what}")
    young = [gpu.architecture for gpu in shown if not too_old(gpu.architecture)]
    cautions = [caution(architecture) for architecture in dict.fromkeys(young)]
    return notes + [caution for caution in cautions if caution is not None]


def _override(environment: Mapping[str, str]) -> str | None:
    parts = environment.get("HSA_OVERRIDE_GFX_VERSION", "").split(".")
    if len(parts) != 3 or not all(part.isdecimal() and len(part) <= 2 for part in parts):
        return None
    major, minor, stepping = (int(part) for part in parts)
    return gfx_name(major * 10000 + minor * 100 + stepping)


def _ask_amdsmi(
    machine: AmdMachine, deadline: float
) -> tuple[dict[str, dict[str, str]], list[str]]:
    folder = amdsmi_folder(machine.root, machine.environment)
    limit = (deadline - time.monotonic()) * _SHARE_OF_CHILD
    if folder is None or limit <= 0:
        return {}, []
    outcome = ask("amdsmi", {"folder": str(folder)}, limit=limit, environment=machine.environment)
    if outcome.how != "answered":
        return {}, [f"amdsmi did not tell more of the GPUs: {outcome.sentence}"]
    return outcome.answer, []
