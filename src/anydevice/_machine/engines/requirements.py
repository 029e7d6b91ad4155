"""The packages that bring a backend to an engine, and where each fits: one dated table.

Checked on 18 November 2026 with PyTorch 2.15, JAX 0.10 and CuPy 14; PyTorch's indexes on 18
September, at 2.14, the last release in cu126 (issue 190385 of pytorch/pytorch). Sources:

- PyTorch: RELEASE.md of pytorch/pytorch, "Release Compatibility Matrix" and "PyTorch CUDA Support
  Matrix" of 2.9 to 2.14. Its index cu132 serves the same drivers and cards as cu130.
  AMD: `PYTORCH_ROCM_ARCH` in .ci/docker/almalinux/build.sh, without gfx900 and gfx906, for which
  ROCm 7 has no BLAS. Intel: docs.pytorch.org/docs/stable/notes/get_start_xpu.html.
- Drivers of NVIDIA: docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html.
- Drivers of AMD: notes of ROCm 7.2.4, "User space, driver, and firmware dependent changes".
- JAX: docs.jax.dev/en/latest/installation.html, and the extras of the package jax 0.10.2.
- CuPy: docs.cupy.dev/en/stable/install.html.
"""

from __future__ import annotations

from collections.abc import Mapping

from anydevice._core.finding import compare_versions
from anydevice._core.record import Record

INDEXES = "https://download.pytorch.org/whl/"
"""The folder of PyTorch's wheel indexes."""

DRIVERS = {"12": "525", "13": "580"}
"""The first NVIDIA driver that serves each major release of CUDA."""

JETSON = ("5.3", "6.2", "7.2", "8.7")
"""Compute capabilities of Jetson boards before Thor, for which only NVIDIA itself builds."""

USE_ANOTHER = "use OpenCL (pip install pyopencl) or the CPU"
"""The way out where no supported release fits the card, the driver or the system."""


class Requirement(Record):
    """One specification for pip that brings a backend to an engine, and where it fits.

    `oldest` is the lower bound of our own extra. `cards` has the architectures with code, as
    compilers name them, for each platform that it is published for; empty ones mean all. `index` is
    one of PyTorch's wheel indexes, `newest` the last release in it. `runtime` is the release of
    CUDA or ROCm that the driver must serve, and `newest_python` the last Python that it fits.
    """

    spec: str
    oldest: str
    cards: Mapping[str, tuple[str, ...]]
    index: str = ""
    newest: str = ""
    runtime: str = ""
    newest_python: tuple[int, int] | None = None

    @property
    def is_supported(self) -> bool:
        """Whether there is a release that our extra allows."""
        return not self.newest or compare_versions(self.newest, self.oldest) >= 0


LINUX, LINUX_ARM, WINDOWS, MAC = "Linux x86-64", "Linux arm64", "Windows x86-64", "macOS arm64"
EVERYWHERE = (LINUX, LINUX_ARM, WINDOWS, "Windows arm64", MAC, "macOS x86-64")


def _on(*platforms: str, cards: tuple[str, ...] = ()) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(platforms, cards)


_JAX, _CUPY, _MLX = "0.9", "14", "0.32.1"
_PC = (LINUX, WINDOWS)
_FROM_MAXWELL = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
_FROM_TURING = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
_SERVERS = ("sm_80", "sm_90", "sm_100", "sm_120")
_RDNA = ("gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1200", "gfx1201")
_ROCM_6 = ("gfx908", "gfx90a", "gfx942", *_RDNA)
_ROCM_7 = (*_ROCM_6, "gfx950", "gfx1150", "gfx1151")
_CUDA_13 = _on(*_PC, cards=_FROM_TURING) | _on(LINUX_ARM, cards=(*_SERVERS, "sm_110"))
_CUDA_12_8 = _on(*_PC, cards=_FROM_TURING) | _on(LINUX_ARM, cards=_SERVERS)
_CUDA_12_6 = _on(*_PC, cards=_FROM_MAXWELL) | _on(LINUX_ARM, cards=("sm_80", "sm_90"))


def _torch(
    cards: Mapping[str, tuple[str, ...]],
    index: str = "",
    newest: str = "",
    runtime: str = "",
    newest_python: tuple[int, int] | None = None,
) -> Requirement:
    return Requirement("torch", "2.11", cards, index, newest, runtime, newest_python)


REQUIREMENTS: dict[tuple[str, str], tuple[Requirement, ...]] = {
    ("torch", "cuda"): (
        _torch(_CUDA_13, "cu130", "2.14", "13", (3, 15)),
        _torch(_CUDA_12_6, "cu126", "2.14", "12", (3, 15)),
        # For cards that CUDA 12.6 does not know, with a driver that does not serve CUDA 13.
        _torch(_CUDA_12_8, "cu128", "2.11", "12", (3, 14)),
    ),
    ("jax", "cuda"): tuple(
        Requirement(f"jax[cuda{cuda}]", _JAX, _on(LINUX, LINUX_ARM, cards=(oldest,)), runtime=cuda)
        for cuda, oldest in (("13", "compute_75"), ("12", "compute_52"))
    ),
    ("cupy", "cuda"): tuple(
        Requirement(
            f"cupy-cuda{cuda}x[ctk]", _CUPY, _on(*_PC, LINUX_ARM, cards=(oldest,)), runtime=cuda
        )
        for cuda, oldest in (("13", "compute_75"), ("12", "compute_50"))
    ),
    # PyTorch brings its own ROCm, for which the driver must be of `runtime` or newer; the others
    # use the ROCm of the machine, which must be of this major release.
    ("torch", "rocm"): (
        _torch(_on(LINUX, cards=_ROCM_7), "rocm7.2", "2.13", "6.3.3", (3, 14)),
        _torch(_on(LINUX, cards=_ROCM_6), "rocm6.4", "2.9", "6.2", (3, 14)),
    ),
    ("jax", "rocm"): (
        Requirement("jax[rocm7-local]", "0.10", _on(LINUX, cards=_ROCM_7), runtime="7"),
    ),
    ("cupy", "rocm"): (
        Requirement("cupy-rocm-7-0", _CUPY, _on(LINUX, cards=_ROCM_7), runtime="7"),
    ),
    ("torch", "xpu"): (_torch(_on(*_PC), "xpu", "2.14", newest_python=(3, 15)),),
    ("mlx", "metal"): (Requirement("mlx", _MLX, _on(MAC)),),
    ("torch", "metal"): (_torch(_on(MAC)),),
    ("opencl", "opencl"): (Requirement("pyopencl", "2024.3", _on(*EVERYWHERE)),),
    ("jax", "tpu"): (Requirement("jax[tpu]", _JAX, _on(LINUX)),),
    ("numpy", "cpu"): (Requirement("numpy", "2.0", _on(*EVERYWHERE)),),
    ("torch", "cpu"): (
        _torch(_on(MAC)),
        _torch(_on(*_PC, LINUX_ARM, "Windows arm64"), "cpu", "2.14", newest_python=(3, 15)),
    ),
    ("jax", "cpu"): (Requirement("jax", _JAX, _on(*_PC, LINUX_ARM, MAC)),),
    ("mlx", "cpu"): (
        Requirement("mlx", _MLX, _on(MAC)),
        Requirement("mlx[cpu]", _MLX, _on(LINUX, LINUX_ARM)),
    ),
}
"""The requirements of each engine and backend, in order of choice."""
