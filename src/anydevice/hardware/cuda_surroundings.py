"""What the files of a machine tell of NVIDIA cards and their driver, without asking the driver."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from anydevice.core.record import Record
from anydevice.hardware import linux, pci
from anydevice.hardware.kernel_files import read_table, read_text

_WSL_LIBRARIES = "/usr/lib/wsl/lib"
_TEGRA_LIBRARIES = "/usr/lib/aarch64-linux-gnu/tegra"


class Surroundings(Record):
    """The platform, and the traces that NVIDIA hardware and drivers leave in its files.

    `system` is `sys.platform`; `cards` are PCI addresses and `holders` the kernel drivers that
    hold them; `nodes` are device files; `module` is the loaded kernel module's version; `tegra`
    is a Jetson's release, "L4T 36.3.0"; `distribution` has the names of this Linux.
    """

    system: str
    cards: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    module: str | None = None
    tegra: str | None = None
    container: bool = False
    wsl: bool = False
    distribution: tuple[str, ...] = ()
    available_memory: int | None = None


def read(
    environment: Mapping[str, str], root: Path = Path("/"), system: str = sys.platform
) -> Surroundings:
    """The surroundings as the files under `root` tell them; on Windows they tell nothing."""
    if system != "linux":
        return Surroundings(system)
    cards = pci.cards(pci.NVIDIA, root)
    holders = {pci.bound_driver(card, root) for card in cards}
    return Surroundings(
        system=system,
        cards=cards,
        holders=tuple(sorted(holder for holder in holders if holder)),
        nodes=_nodes(root),
        module=_module_version(read_text(root / "proc/driver/nvidia/version") or ""),
        tegra=_tegra_release(read_text(root / "etc/nv_tegra_release") or ""),
        container=linux.in_container(root, environment),
        wsl="microsoft" in (read_text(root / "proc/sys/kernel/osrelease") or "").lower(),
        distribution=linux.distribution(root),
        available_memory=available_memory(root),
    )


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes of the machine's own memory that a program could still get; `None` if untold."""
    return read_table(root / "proc/meminfo").get("MemAvailable")


def nvml_libraries(around: Surroundings, environment: Mapping[str, str]) -> list[str]:
    """The names under which NVML may be found, in the order to try them."""
    if around.system == "win32":
        windows = environment.get("WINDIR", r"C:\Windows")
        programs = environment.get("ProgramFiles", r"C:\Program Files")
        return [
            rf"{windows}\System32\nvml.dll",
            rf"{programs}\NVIDIA Corporation\NVSMI\nvml.dll",
        ]
    return _linux_libraries("libnvidia-ml.so.1", around)


def driver_libraries(around: Surroundings) -> list[str]:
    """The names under which the CUDA driver may be found, in the order to try them."""
    return ["nvcuda.dll"] if around.system == "win32" else _linux_libraries("libcuda.so.1", around)


def _linux_libraries(name: str, around: Surroundings) -> list[str]:
    folders = []
    if around.wsl:
        folders.append(_WSL_LIBRARIES)
    if around.tegra:
        folders.append(_TEGRA_LIBRARIES)
    return [name, *(f"{folder}/{name}" for folder in folders)]


def _nodes(root: Path) -> tuple[str, ...]:
    try:
        names = [entry.name for entry in (root / "dev").iterdir()]
    except OSError:
        return ()
    ours = re.compile(r"nvidia\d+|nvidiactl|nvidia-uvm|nvhost-gpu|nvgpu|nvmap|dxg")
    return tuple(sorted(f"/dev/{name}" for name in names if ours.fullmatch(name)))


def _module_version(text: str) -> str | None:
    match = re.search(r"Kernel Module\D*(?:x86_64|aarch64)?\s+(\d+(?:\.\d+)+)", text)
    return match[1] if match else None


def _tegra_release(text: str) -> str | None:
    match = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", text)
    return f"L4T {match[1]}.{match[2]}" if match else None
