"""Files as the kernel and drivers of a machine show them."""

from __future__ import annotations

from pathlib import Path
from typing import Self


def write_file(root: Path, name: str, content: str | bytes = "") -> Path:
    """Write a file, and the folders above it, below the root of a made-up machine."""
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


class Tree:
    """A machine as files below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, files: dict[str, str]) -> Self:
        for name, text in files.items():
            write_file(self.root, name, text)
        return self
