"""AMD GPUs through the files of their driver; no library of ROCm is loaded in this process.

What the files of the AMD driver say of its GPUs, where there are traces of any.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from anydevice.core.finding import Detail, Facts, Seen, Sighting, compare_versions
from anydevice.core.record import Record, replace
from anydevice.hardware import linux as pci
from anydevice.hardware.driver_process.parent import ask
from anydevice.hardware.linux import exists
from anydevice.hardware.rocm import diagnosis as rocm_absent
from anydevice.hardware.rocm import facts as rocm_memory
from anydevice.hardware.rocm import facts as rocm_software
from anydevice.hardware.rocm import facts as rocm_targets
from anydevice.hardware.rocm.facts import Gpu, Topology, gfx_name, topology
from anydevice.hardware.rocm.visible import visible

_ROOT = Path("/")
_TRACES = ("dev/kfd", "dev/dxg")


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
        return _absent(f"ROCm needs Linux; this is {system}")
    cards = pci.cards(pci.AMD, root)
    if not cards and not any(exists(root / trace) for trace in _TRACES):
        return _absent("no AMD GPU on the PCI bus")

    place = Place(root, os.environ if environment is None else environment, accessible, cards)
    return look_within(limit, place)


def free_memory(index: int, facts: Facts, *, root: Path = _ROOT) -> int | None:
    """The free bytes of the GPU at this moment, or `None` where its driver does not tell."""
    from anydevice.hardware.rocm import facts as rocm_memory

    if facts.pci_address is None:
        return None
    now = rocm_memory.counters(facts.pci_address, root)
    if facts.memory_kind == "unified":
        return rocm_memory.free_of_shared(facts.usable_memory, facts.details.get("pool"), now)
    return rocm_memory.free_of_card(facts.total_memory, now)


def _absent(reason: str) -> Sighting:
    return Sighting("rocm", present=False, stage="driver", reason=reason)


OLDEST_ROCM = "5.0"

_SHARE_OF_CHILD = 0.6  # of the time that is left, so that a child that hangs stays a note


class Place(Record):
    """Where to look, and with what permissions: the machine itself, or a recording of one.

    `cards` are the PCI addresses of AMD's cards.
    """

    root: Path
    environment: Mapping[str, str]
    accessible: Callable[[Path], bool]
    cards: tuple[str, ...]


def look_within(limit: float, place: Place) -> Sighting:
    """The sighting, within `limit` seconds. Never raises."""
    # A wedged driver can hold a read of its files for ever; the thread that waits is left behind.
    answers: list[Sighting] = []

    def work() -> None:
        try:
            answers.append(_look(place, time.monotonic() + limit))
        except Exception as error:
            reason = f"reading the driver's files failed: {type(error).__name__}: {error}"
            answers.append(rocm_absent.stopped(reason, present=True))

    worker = threading.Thread(target=work, name="anydevice-rocm", daemon=True)
    worker.start()
    worker.join(limit)
    if answers:
        return answers[0]
    reason = f"timed out: the driver's files could not be read within {limit:g} s"
    return rocm_absent.stopped(reason, present=True, mend="sudo dmesg | grep -i amdgpu")


def _look(place: Place, deadline: float) -> Sighting:
    root, environment, cards = place.root, place.environment, place.cards
    if not exists(root / "dev/kfd"):
        return rocm_absent.no_compute_driver(cards, root, environment)
    seen = topology(root)
    if not seen.gpus:
        return rocm_absent.no_gpu_in_topology(cards, seen.withheld, root, environment)
    left = visible([gpu.uuid for gpu in seen.gpus], environment)
    if left.reason is not None:
        return rocm_absent.stopped(left.reason, present=True, stage="device", mend=left.mend)
    shown = [seen.gpus[position] for position in left.positions]
    version = rocm_software.rocm_version(root, environment)
    devices, notes = _devices(shown, version, place, deadline)
    notes = [*left.notes, *_notes(seen, shown, version, environment), *notes]
    sighting = Sighting("rocm", present=True, devices=tuple(devices), notes=tuple(notes))
    stop = _why_none(sighting, version, place)
    return sighting if stop is None else _stopped_with_devices(sighting, *stop)


def _why_none(
    sighting: Sighting, version: str | None, place: Place
) -> tuple[str, str | None] | None:
    if version is not None and compare_versions(version, OLDEST_ROCM) < 0:
        reason = f"ROCm {version} is too old; anydevice needs ROCm {OLDEST_ROCM} or newer"
        return reason, "sudo amdgpu-install --usecase=rocm"
    if not place.accessible(place.root / "dev/kfd"):
        return _no_permission("/dev/kfd", place)
    # Of the reasons against a single GPU, only a closed device file has a mend.
    closed = [device for device in sighting.devices if device.reason and device.mend]
    if closed and len(closed) == len(sighting.devices):
        return str(closed[0].reason), closed[0].mend
    return None


def _stopped_with_devices(sighting: Sighting, reason: str, mend: str | None) -> Sighting:
    devices = tuple(
        device if device.reason else replace(device, reason=reason, mend=mend)
        for device in sighting.devices
    )
    return replace(sighting, devices=devices, stage="driver", reason=reason, mend=mend)


def _no_permission(file: str, place: Place) -> tuple[str, str]:
    mend = rocm_absent.give_access(place.root, place.environment)
    return f"no permission to open {file}", mend


def _devices(
    gpus: list[Gpu], version: str | None, place: Place, deadline: float
) -> tuple[list[Seen], list[str]]:
    names = [rocm_software.product_name(gpu, place.root) for gpu in gpus]
    driver = rocm_software.driver_version(place.root)
    told: dict[str, dict[str, str]] = {}
    notes: list[str] = []
    if driver is None or None in names:
        told, notes = _ask_amdsmi(place, deadline)
    override = _override(place.environment)
    devices = []
    for index, (gpu, name) in enumerate(zip(gpus, names, strict=True)):
        memory = rocm_memory.memory_of(gpu, place.root)
        also = told.get(gpu.pci_address, {})
        details: dict[str, Detail] = {**memory.details}
        if override is not None:
            details["architecture_override"] = override
        facts = Facts(
            name=name or also.get("name") or rocm_software.last_resort_name(gpu),
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
        devices.append(Seen(index, "gpu", facts, *_unfit(gpu, place)))
    return devices, notes


def _unfit(gpu: Gpu, place: Place) -> tuple[str | None, str | None]:
    too_old = rocm_targets.too_old(gpu.architecture)
    if too_old is not None or gpu.render_minor is None:
        return too_old, None
    node = f"dev/dri/renderD{gpu.render_minor}"
    if not exists(place.root / node):
        return f"/{node} of this GPU is missing", rocm_absent.PASS_DEVICES
    if not place.accessible(place.root / node):
        return _no_permission(f"/{node}", place)
    return None, None


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
    young = [gpu.architecture for gpu in shown if not rocm_targets.too_old(gpu.architecture)]
    cautions = [rocm_targets.caution(architecture) for architecture in dict.fromkeys(young)]
    return notes + [caution for caution in cautions if caution is not None]


def _override(environment: Mapping[str, str]) -> str | None:
    parts = environment.get("HSA_OVERRIDE_GFX_VERSION", "").split(".")
    if len(parts) != 3 or not all(part.isdecimal() and len(part) <= 2 for part in parts):
        return None
    major, minor, stepping = (int(part) for part in parts)
    return gfx_name(major * 10000 + minor * 100 + stepping)


def _ask_amdsmi(place: Place, deadline: float) -> tuple[dict[str, dict[str, str]], list[str]]:
    folder = rocm_software.amdsmi_folder(place.root, place.environment)
    limit = (deadline - time.monotonic()) * _SHARE_OF_CHILD
    if folder is None or limit <= 0:
        return {}, []
    outcome = ask("amdsmi", {"folder": str(folder)}, limit=limit, environment=place.environment)
    if outcome.how != "answered":
        return {}, [f"amdsmi did not tell more of the GPUs: {outcome.sentence}"]
    return outcome.answer, []
