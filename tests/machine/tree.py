"""Files as the kernel and drivers of a machine show them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self


def write_file(root: Path, name: str, content: str | int | bytes = "") -> Path:
    """Write a file, and the folders above it, below the root of a made-up machine."""
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else str(content).encode())
    return file


def plug_card(root: Path, address: str, vendor: str, device_class: str = "0x030000") -> Path:
    """Put a function of a card on the PCI bus; return its folder."""
    entry = f"sys/bus/pci/devices/{address}"
    write_file(root, f"{entry}/vendor", f"{vendor}\n")
    return write_file(root, f"{entry}/class", f"{device_class}\n").parent


class Tree:
    """A machine as files below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, files: Mapping[str, str | int], folder: str = "") -> Self:
        """Write these files, each with a line's end."""
        for name, content in files.items():
            write_file(self.root / folder, name, f"{content}\n")
        return self
