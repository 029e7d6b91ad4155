"""What several unit tests need."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

_FAKED = ("torch", "jax", "jaxlib", "mlx", "mlx.core", "cupy", "pyopencl")


class Site:
    """A small site-packages folder, the only one on the search path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def distribution(self, name: str, version: str, entry_points: str | None = None) -> Path:
        """Metadata as an installer leaves it."""
        folder = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}")
        if entry_points is not None:
            (folder / "entry_points.txt").write_text(entry_points)
        return folder

    def package(self, name: str, version: str | None = None) -> Path:
        """A package that fails when it is imported, with metadata where a version is given."""
        folder = self.folder / name
        folder.mkdir()
        (folder / "__init__.py").write_text("raise ImportError('imported, but only looked at')\n")
        if version:
            self.distribution(name, version)
        return folder

    def torch(
        self,
        version: str,
        cuda: str | None = None,
        hip: str | None = None,
        library: bytes | None = None,
    ) -> Path:
        """PyTorch: its version file, and its library with the architectures somewhere inside."""
        folder = self.package("torch", version.partition("+")[0])
        (folder / "version.py").write_text(
            "from typing import Optional\n\n"
            "__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip']\n"
            f"__version__ = {version!r}\ndebug = False\n"
            f"cuda: Optional[str] = {cuda!r}\ngit_version = '0'\nhip: Optional[str] = {hip!r}\n"
        )
        (folder / "lib").mkdir()
        if library is not None:
            padding = b"\x7fELF\0 compute_sizes\0sm_\0asm_80\0" * 100
            (folder / "lib" / "libtorch_python.so").write_bytes(padding + library + padding)
        return folder

    def mlx(self, version: str, *backends: str) -> Path:
        """MLX, which is a namespace folder with a compiled module and a library in it."""
        folder = self.folder / "mlx"
        (folder / "lib").mkdir(parents=True)
        (folder / "core.cpython-311-x86_64-linux-gnu.so").touch()
        self.distribution("mlx", version)
        for backend in backends:
            self.distribution(f"mlx-{backend}", version)
            (folder / "lib" / "libmlx.so").touch()
        return folder


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """An empty site-packages folder in the place of the real ones."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    standard = [entry for entry in sys.path if entry and "site-packages" not in entry]
    standard = [entry for entry in standard if not (Path(entry) / "anydevice").is_dir()]
    monkeypatch.setattr(sys, "path", [str(folder), *standard])
    for name in _FAKED:
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    return Site(folder)
