"""Why no AMD GPU can be used here, and what fixes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from anydevice.core.finding import Reason, Sighting, Stage
from anydevice.hardware import linux
from anydevice.hardware.linux import exists
from anydevice.hardware.rocm.facts import folders

PASS_DEVICES = (
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


def stopped(
    code: str, text: str, fix: str | None = None, *, present: bool = True, stage: Stage = "driver"
) -> Sighting:
    """The sighting of a backend that stopped as a whole."""
    return Sighting("rocm", present=present, stage=stage, reason=Reason(code, text, fix))


def no_compute_driver(
    cards: tuple[str, ...], root: Path, environment: Mapping[str, str]
) -> Sighting:
    """There is no /dev/kfd: which of the possible causes it is."""
    if not cards:
        return _under_wsl(root, environment)
    which = _named(cards)
    if linux.in_container(root, environment):
        text = f"{which} is in the machine, but this container has no /dev/kfd"
        return stopped("not_in_container", text, PASS_DEVICES)
    holder = linux.bound_driver(cards[0], root)
    if holder not in (None, "amdgpu"):
        text = f"{which} is held by the driver {holder}, not by amdgpu"
        return stopped("driver_not_loaded", text)
    if exists(root / "sys/module/amdgpu"):
        text = f"amdgpu drives {which}, but without its compute part: /dev/kfd is missing"
        has_apt = linux.uses_apt(linux.distribution(root))
        fix = "sudo apt install amdgpu-dkms" if has_apt else None
        return stopped("driver_missing", text, fix)
    text = f"{which} is on the PCI bus, but the driver amdgpu is not loaded"
    return stopped("driver_not_loaded", text, _install_driver(root))


def no_gpu_in_topology(
    cards: tuple[str, ...], withheld: int, root: Path, environment: Mapping[str, str]
) -> Sighting:
    """There is a /dev/kfd, but its topology shows this process no GPU."""
    if withheld:
        nodes = "1 node" if withheld == 1 else f"{withheld} nodes"
        text = f"no permission to read {nodes} of the GPU topology"
        return stopped("no_permission", text, give_access(root, environment))
    if not cards:
        text = "/dev/kfd is there, but no AMD GPU is on the PCI bus"
        return stopped("no_hardware", text, present=False)
    text = f"{_named(cards)} is on the PCI bus, but the compute driver did not take it"
    return stopped("no_device", text, "sudo dmesg | grep -i -e amdgpu -e kfd", stage="device")


def give_access(root: Path, environment: Mapping[str, str]) -> str:
    """What lets this process open the device files that are closed to it."""
    return PASS_DEVICES if linux.in_container(root, environment) else _JOIN_GROUPS


def _under_wsl(root: Path, environment: Mapping[str, str]) -> Sighting:
    bridge = any(exists(folder / "lib/librocdxg.so") for folder in folders(root, environment))
    if not bridge:
        text = "under WSL an AMD GPU needs ROCm's bridge to Windows, librocdxg; it is not installed"
        return stopped("driver_missing", text, present=False)
    text = (
        "ROCm under WSL reaches the GPU through /dev/dxg, which has no topology to read: "
        "anydevice cannot tell what is there"
    )
    return stopped("not_readable", text, stage="device")


def _named(cards: tuple[str, ...]) -> str:
    others = f" (and {len(cards) - 1} more)" if len(cards) > 1 else ""
    return f"the AMD GPU {cards[0]}{others}"


def _install_driver(root: Path) -> str:
    command = linux.fitting(_INSTALL, linux.distribution(root))
    return f"{command} && {_LOAD}" if command else _LOAD
