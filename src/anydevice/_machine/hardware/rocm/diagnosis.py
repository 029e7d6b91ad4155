"""From the files of AMD's driver to its GPUs, or to why none can be used and what fixes it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial

from anydevice._core.child.parent import ask
from anydevice._core.finding import (
    BackendScan,
    Detail,
    Facts,
    RawDevice,
    Reason,
    compare_versions,
)
from anydevice._core.record import replace
from anydevice._machine.engines.requirements import USE_ANOTHER
from anydevice._machine.hardware import linux
from anydevice._machine.hardware.linux import CardMachine
from anydevice._machine.hardware.rocm import facts
from anydevice._machine.hardware.rocm.facts import Gpu, Topology
from anydevice._machine.hardware.rocm.visible import visible

OLDEST_ROCM = "5.0"

_stopped_scan = partial(BackendScan.stopped, "rocm")

_SHARE_OF_CHILD = 0.6  # of the time that is left, so that a child that hangs stays a note
_PASS_DEVICES = (
    "docker run --device=/dev/kfd --device=/dev/dri --group-add video --group-add render …"
)

_JOIN_GROUPS = "sudo usermod -a -G render,video $USER"
_LOAD = "sudo modprobe amdgpu"
_INSTALL = {
    "ubuntu": "sudo apt install linux-firmware linux-modules-extra-$(uname -r)",
    "debian": "sudo apt install firmware-amd-graphics",
    "fedora": "sudo dnf install kernel-modules amd-gpu-firmware",
    "rhel": "sudo dnf install kernel-modules linux-firmware",
    "suse": "sudo zypper install kernel-firmware-amdgpu",
    "arch": "sudo pacman -S linux-firmware",
}


def scan_files(machine: CardMachine, deadline: float) -> BackendScan:
    """Return the scan; amdsmi is asked for missing facts if there is time until `deadline`."""
    root, environment = machine.root, machine.environment
    if not os.path.exists(root / "dev/kfd"):
        return _no_compute_driver(machine)
    topology = facts.topology(root)
    if not topology.gpus:
        return _no_gpu_in_topology(machine, topology.withheld)
    left = visible([gpu.uuid for gpu in topology.gpus], environment)
    if left.reason is not None:
        return BackendScan("rocm", present=True, stage="device", reason=left.reason)
    shown = [topology.gpus[position] for position in left.positions]
    version = facts.rocm_version(root, environment)
    devices, notes = _devices(shown, version, machine, deadline)
    notes = [*left.notes, *_notes(topology, shown, version, environment), *notes]
    scan = BackendScan("rocm", present=True, devices=tuple(devices), notes=tuple(notes))
    reason = _why_none(scan, version, machine)
    if reason is None:
        return scan
    unusable = (
        device if device.reason else replace(device, reason=reason) for device in scan.devices
    )
    return replace(scan, devices=tuple(unusable), stage="driver", reason=reason)


def _why_none(scan: BackendScan, version: str | None, machine: CardMachine) -> Reason | None:
    if version is not None and compare_versions(version, OLDEST_ROCM) < 0:
        text = f"ROCm {version} is too old; anydevice needs ROCm {OLDEST_ROCM} or newer"
        return Reason("driver_too_old", text, "sudo amdgpu-install --usecase=rocm")
    if not machine.accessible(machine.root / "dev/kfd"):
        return _no_permission("/dev/kfd", machine)
    reasons = [device.reason for device in scan.devices]
    closed = all(
        reason and reason.code in ("no_permission", "not_in_container") for reason in reasons
    )
    return reasons[0] if reasons and closed else None


def _no_permission(file: str, machine: CardMachine) -> Reason:
    return Reason("no_permission", f"no permission to open {file}", _give_access(machine))


def _devices(
    gpus: list[Gpu], version: str | None, machine: CardMachine, deadline: float
) -> tuple[list[RawDevice], list[str]]:
    names = [facts.product_name(gpu, machine.root) for gpu in gpus]
    driver = facts.driver_version(machine.root)
    answers: dict[str, dict[str, str]] = {}
    notes: list[str] = []
    if driver is None or None in names:
        answers, notes = _ask_amdsmi(machine, deadline)
    override = _override(machine.environment)
    devices = []
    for index, (gpu, name) in enumerate(zip(gpus, names, strict=True)):
        memory = facts.memory_of(gpu, machine.root)
        also = answers.get(gpu.pci_address, {})
        details: dict[str, Detail] = {**memory.details}
        if override is not None:
            details["architecture_override"] = override
        product = name or also.get("name") or facts.PRODUCTS.get(gpu.device_id)
        known = Facts(
            name=product or f"AMD {gpu.architecture or 'unknown'} GPU",
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
        devices.append(RawDevice(index, "gpu", known, _unfit(gpu, machine)))
    return devices, notes


def _unfit(gpu: Gpu, machine: CardMachine) -> Reason | None:
    old = facts.too_old(gpu.architecture)
    if old is not None:
        return Reason("card_too_old", old, USE_ANOTHER)
    if gpu.render_minor is None:
        return None
    node = f"dev/dri/renderD{gpu.render_minor}"
    if not os.path.exists(machine.root / node):
        text = f"/{node} of this GPU is missing"
        return Reason("not_in_container", text, _PASS_DEVICES)
    if not machine.accessible(machine.root / node):
        return _no_permission(f"/{node}", machine)
    return None


def _notes(
    topology: Topology, shown: list[Gpu], version: str | None, environment: Mapping[str, str]
) -> list[str]:
    notes = []
    if topology.withheld:
        notes.append(
            f"{topology.withheld} node(s) of the GPU topology may not be read by this process"
        )
    if version is None:
        notes.append("ROCm itself is not installed; a library must bring its own copy of it")
    written = environment.get("HSA_OVERRIDE_GFX_VERSION")
    if written:
        effect = _override(environment)
        what = f"the runtime takes every GPU for {effect}" if effect else "this is no version"
        notes.append(f"HSA_OVERRIDE_GFX_VERSION={written}: {what}")
    young = [gpu.architecture for gpu in shown if not facts.too_old(gpu.architecture)]
    cautions = [facts.caution(architecture) for architecture in dict.fromkeys(young)]
    return notes + [text for text in cautions if text is not None]


def _override(environment: Mapping[str, str]) -> str | None:
    parts = environment.get("HSA_OVERRIDE_GFX_VERSION", "").split(".")
    if len(parts) != 3 or not all(part.isdecimal() and len(part) <= 2 for part in parts):
        return None
    major, minor, stepping = (int(part) for part in parts)
    return facts.gfx_name(major * 10000 + minor * 100 + stepping)


def _ask_amdsmi(
    machine: CardMachine, deadline: float
) -> tuple[dict[str, dict[str, str]], list[str]]:
    folder = facts.amdsmi_folder(machine.root, machine.environment)
    limit = (deadline - time.monotonic()) * _SHARE_OF_CHILD
    if folder is None or limit <= 0:
        return {}, []
    outcome = ask("amdsmi", {"folder": str(folder)}, limit=limit, environment=machine.environment)
    if outcome.how != "answered":
        return {}, [f"amdsmi did not tell more of the GPUs: {outcome.sentence}"]
    return outcome.answer, []


def _no_compute_driver(machine: CardMachine) -> BackendScan:
    """Return the scan of a machine without /dev/kfd, with its cause."""
    root = machine.root
    if not machine.cards:
        return _under_wsl(machine)
    which = _name_cards(machine.cards)
    if linux.in_container(root, machine.environment):
        text = f"{which} is in the machine, but this container has no /dev/kfd"
        return _stopped_scan("not_in_container", text, _PASS_DEVICES)
    holder = linux.bound_driver(machine.cards[0], root)
    if holder not in (None, "amdgpu"):
        text = f"{which} is held by the driver {holder}, not by amdgpu"
        return _stopped_scan("driver_not_loaded", text)
    if os.path.exists(root / "sys/module/amdgpu"):
        text = f"amdgpu drives {which}, but without its compute part: /dev/kfd is missing"
        has_apt = linux.uses_apt(linux.distribution(root))
        fix = "sudo apt install amdgpu-dkms" if has_apt else None
        return _stopped_scan("driver_missing", text, fix)
    text = f"{which} is on the PCI bus, but the driver amdgpu is not loaded"
    command = linux.fitting(_INSTALL, linux.distribution(root))
    return _stopped_scan("driver_not_loaded", text, f"{command} && {_LOAD}" if command else _LOAD)


def _no_gpu_in_topology(machine: CardMachine, withheld: int) -> BackendScan:
    """Return the scan of a machine whose topology shows this process no GPU."""
    if withheld:
        nodes = "1 node" if withheld == 1 else f"{withheld} nodes"
        text = f"no permission to read {nodes} of the GPU topology"
        return _stopped_scan("no_permission", text, _give_access(machine))
    if not machine.cards:
        text = "/dev/kfd is there, but no AMD GPU is on the PCI bus"
        return _stopped_scan("no_hardware", text, present=False)
    text = f"{_name_cards(machine.cards)} is on the PCI bus, but the compute driver did not take it"
    return _stopped_scan("no_device", text, "sudo dmesg | grep -i -e amdgpu -e kfd", stage="device")


def _give_access(machine: CardMachine) -> str:
    """Return how to let this process open the device files that are closed to it."""
    inside = linux.in_container(machine.root, machine.environment)
    return _PASS_DEVICES if inside else _JOIN_GROUPS


def _under_wsl(machine: CardMachine) -> BackendScan:
    folders = facts.folders(machine.root, machine.environment)
    if not any(os.path.exists(folder / "lib/librocdxg.so") for folder in folders):
        text = "under WSL an AMD GPU needs ROCm's bridge to Windows, librocdxg; it is not installed"
        return _stopped_scan("driver_missing", text, present=False)
    text = (
        "ROCm under WSL reaches the GPU through /dev/dxg, which has no topology to read: "
        "anydevice cannot tell what is there"
    )
    return _stopped_scan("not_readable", text, stage="device")


def _name_cards(cards: tuple[str, ...]) -> str:
    others = f" (and {len(cards) - 1} more)" if len(cards) > 1 else ""
    return f"the AMD GPU {cards[0]}{others}"
