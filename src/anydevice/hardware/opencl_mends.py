"""The one command that would mend OpenCL on this machine."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from anydevice.hardware import pci
from anydevice.hardware.opencl_loaders import Driver, Loader, Machine

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
