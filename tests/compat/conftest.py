"""Fixtures for the tests of `anydevice.compat`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from anydevice._core.finding import BackendScan, Facts, RawDevice
from anydevice._machine.discovery import discover as discovery
from anydevice._machine.engines import library_settings as effects
from anydevice._machine.settings import config as settings
from anydevice.compat import artifex

_LIBRARIES = ("torch", "jax", "jaxlib", "mlx", "mlx.core", "cupy", "pyopencl")


@pytest.fixture(autouse=True)
def as_before(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty home; afterwards the environment, JAX's switches and the global manager again."""
    environment = dict(os.environ)
    monkeypatch.setattr(artifex, "_global", None)
    discovery.forget_report()
    yield
    settings.forget_changes()
    effects.set_x64(False)
    effects.set_jit(True)
    os.environ.clear()
    os.environ.update(environment)
    discovery.forget_report()


@pytest.fixture
def card() -> BackendScan:
    """An NVIDIA card whose driver answers; whether a library drives it, discovery must find out."""
    facts = Facts(
        name="NVIDIA RTX 4070",
        uuid="GPU-0",
        total_memory=12 * 2**30,
        usable_memory=12 * 2**30,
        free_memory=11 * 2**30,
        compute_capability="8.9",
        driver_version="560.35",
        runtime_version="12.6",
    )
    return BackendScan("cuda", present=True, devices=(RawDevice(0, "gpu", facts),))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of site-packages, in which no array library but NumPy is installed."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    standard = [entry for entry in sys.path if entry and "site-packages" not in entry]
    monkeypatch.setattr(sys, "path", [str(folder), *standard])
    for name in _LIBRARIES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    return folder


def install(site: Path, package: str, distribution: str, version: str) -> None:
    """Leave what an installer leaves: a package that must not be imported, and its metadata."""
    (site / package).mkdir()
    (site / package / "__init__.py").write_text("raise ImportError('this is only looked at')\n")
    (site / f"{distribution.replace('-', '_')}-{version}.dist-info").mkdir()
    importlib.invalidate_caches()


@pytest.fixture
def cupy_for_cuda(site: Path) -> None:
    """CuPy's build for CUDA 12, as far as it can be seen without importing it."""
    install(site, "cupy", "cupy-cuda12x", "13.3.0")
