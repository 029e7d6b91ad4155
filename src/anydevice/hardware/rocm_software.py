"""What is installed of ROCm: its version, the driver's version, product names, amdsmi."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from anydevice.core.facts import version_numbers
from anydevice.hardware import pci
from anydevice.hardware.kernel_files import exists, read_text
from anydevice.hardware.kfd import Gpu
from anydevice.hardware.rocm_targets import PRODUCTS

_VERSION = re.compile(r"\d+(?:\.\d+)+")
_NAME_TABLES = ("usr/share/libdrm/amdgpu.ids", "opt/amdgpu/share/libdrm/amdgpu.ids")


def folders(root: Path, environment: Mapping[str, str]) -> list[Path]:
    """Where ROCm may be installed, most binding first: ROCM_PATH, /opt/rocm, newest /opt/rocm-*."""
    places = [root / "opt/rocm"]
    if environment.get("ROCM_PATH"):
        places.insert(0, root / environment["ROCM_PATH"].lstrip("/"))
    numbered = (root / "opt").glob("rocm-*")
    newest_first = sorted(numbered, key=lambda f: version_numbers(f.name[5:]), reverse=True)
    return places + newest_first


def rocm_version(root: Path, environment: Mapping[str, str]) -> str | None:
    """The version of the installed ROCm, such as "6.2.4"; `None` where none is installed."""
    for folder in folders(root, environment):
        match = _VERSION.search(read_text(folder / ".info/version") or "")
        if match:
            return match[0]
    return None


def driver_version(root: Path) -> str | None:
    """The version of amdgpu where AMD's own packages brought it, else that of the Linux kernel."""
    for file in ("sys/module/amdgpu/version", "proc/sys/kernel/osrelease"):
        text = (read_text(root / file) or "").strip()
        if text:
            return text
    return None


def product_name(gpu: Gpu, root: Path) -> str | None:
    """What the card calls itself, or the name that libdrm's table has for it."""
    device = root / pci.DEVICES / gpu.pci_address
    own = (read_text(device / "product_name") or "").strip()
    return own or _name_in_table(gpu, (read_text(device / "revision") or "").strip(), root)


def last_resort_name(gpu: Gpu) -> str:
    """A name for a GPU that nothing on this machine can name."""
    return PRODUCTS.get(gpu.device_id) or f"AMD {gpu.architecture or 'unknown'} GPU"


def _name_in_table(gpu: Gpu, revision: str, root: Path) -> str | None:
    wanted = (f"{gpu.device_id:04x}", revision.lower().removeprefix("0x").zfill(2))
    for file in _NAME_TABLES:
        for line in (read_text(root / file) or "").splitlines():
            columns = [column.strip() for column in line.split(",", 2)]
            if len(columns) == 3 and (columns[0].lower(), columns[1].lower()) == wanted:
                return columns[2]
    return None


def amdsmi_folder(root: Path, environment: Mapping[str, str]) -> Path | None:
    """The folder from which the Python package `amdsmi` can be imported, if it is there."""
    places = [folder / "share/amd_smi" for folder in folders(root, environment)]
    if root == Path("/"):
        places += [Path(entry) for entry in sys.path if entry]
    return next((place for place in places if exists(place / "amdsmi/__init__.py")), None)
