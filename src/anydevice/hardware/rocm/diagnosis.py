"""Why no AMD GPU can be used here, and what would mend it: each case its own answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from anydevice.core.finding import Sighting, Stage
from anydevice.hardware import linux
from anydevice.hardware import linux as pci
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
    reason: str, *, present: bool, stage: Stage = "driver", mend: str | None = None
) -> Sighting:
    """The sighting of a backend that stopped as a whole."""
    return Sighting("rocm", present=present, stage=stage, reason=reason, mend=mend)


def no_compute_driver(
    cards: tuple[str, ...], root: Path, environment: Mapping[str, str]
) -> Sighting:
    """There is no /dev/kfd: which of the possible causes it is."""
    if not cards:
        return _under_wsl(root, environment)
    which = _named(cards)
    if linux.in_container(root, environment):
        reason = f"{which} is in the machine, but this container has no /dev/kfd"
        return stopped(reason, present=True, mend=PASS_DEVICES)
    holder = pci.bound_driver(cards[0], root)
    if holder not in (None, "amdgpu"):
        reason = f"{which} is held by the driver {holder}, not by amdgpu"
        return stopped(reason, present=True)
    if exists(root / "sys/module/amdgpu"):
        reason = f"amdgpu drives {which}, but without its compute part: /dev/kfd is missing"
        has_apt = linux.uses_apt(linux.distribution(root))
        mend = "sudo apt install amdgpu-dkms" if has_apt else None
        return stopped(reason, present=True, mend=mend)
    reason = f"{which} is on the PCI bus, but the driver amdgpu is not loaded"
    return stopped(reason, present=True, mend=_install_driver(root))


def no_gpu_in_topology(
    cards: tuple[str, ...], withheld: int, root: Path, environment: Mapping[str, str]
) -> Sighting:
    """There is a /dev/kfd, but its topology shows this process no GPU."""
    if withheld:
        reason = f"no permission to read {_count(withheld, 'node')} of the GPU topology"
        return stopped(reason, present=True, mend=give_access(root, environment))
    if not cards:
        return stopped("/dev/kfd is there, but no AMD GPU is on the PCI bus", present=False)
    reason = f"{_named(cards)} is on the PCI bus, but the compute driver did not take it"
    mend = "sudo dmesg | grep -i -e amdgpu -e kfd"
    return stopped(reason, present=True, stage="device", mend=mend)


def give_access(root: Path, environment: Mapping[str, str]) -> str:
    """What lets this process open the device files that are closed to it."""
    return PASS_DEVICES if linux.in_container(root, environment) else _JOIN_GROUPS


def _under_wsl(root: Path, environment: Mapping[str, str]) -> Sighting:
    bridge = any(exists(folder / "lib/librocdxg.so") for folder in folders(root, environment))
    if not bridge:
        reason = (
            "under WSL an AMD GPU needs ROCm's bridge to Windows, librocdxg; it is not installed"
        )
        return stopped(reason, present=False)
    reason = (
        "ROCm under WSL reaches the GPU through /dev/dxg, which has no topology to read: "
        "anydevice cannot tell what is there"
    )
    return stopped(reason, present=True, stage="device")


def _named(cards: tuple[str, ...]) -> str:
    others = f" (and {len(cards) - 1} more)" if len(cards) > 1 else ""
    return f"the AMD GPU {cards[0]}{others}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _install_driver(root: Path) -> str:
    command = linux.fitting(_INSTALL, linux.distribution(root))
    return f"{command} && {_LOAD}" if command else _LOAD
