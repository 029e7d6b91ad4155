"""The backends, as data: one row each, in the order in which they are chosen."""

from __future__ import annotations

from anydevice._core.finding import Kind, Tier
from anydevice._core.record import Record


class Backend(Record):
    """A kind of hardware with its driver, and its limitations."""

    name: str
    label: str
    kind: Kind
    vendor: str
    platforms: tuple[str, ...]
    engines: tuple[str, ...]
    tier: Tier
    tier_note: str
    blas: str
    runtime_compiler: str
    best_for: str
    requires: str


BACKENDS: dict[str, Backend] = {
    row.name: row
    for row in (
        Backend(
            name="cuda",
            label="CUDA",
            kind="gpu",
            vendor="NVIDIA",
            platforms=("Linux", "Windows"),
            engines=("torch", "jax", "cupy"),
            tier="stable",
            tier_note="measured on an NVIDIA H200",
            blas="cuBLAS",
            runtime_compiler="NVRTC, Triton",
            best_for="NVIDIA cards",
            requires="compute capability 5.0 or newer, a driver that serves CUDA 12 or newer",
        ),
        Backend(
            name="rocm",
            label="ROCm",
            kind="gpu",
            vendor="AMD",
            platforms=("Linux",),
            engines=("torch", "jax", "cupy"),
            tier="untested",
            tier_note="developed from recorded data, without hardware",
            blas="rocBLAS, hipBLASLt",
            runtime_compiler="hipRTC, Triton",
            best_for="AMD cards",
            requires="ROCm 5 or newer, a GCN 5, CDNA or RDNA architecture, Linux",
        ),
        Backend(
            name="metal",
            label="Metal",
            kind="gpu",
            vendor="Apple",
            platforms=("macOS",),
            engines=("mlx", "torch"),
            tier="untested",
            tier_note="experimental; developed from recorded data, without hardware",
            blas="Metal Performance Shaders",
            runtime_compiler="Metal Shading Language",
            best_for="Apple Silicon",
            requires="Apple Silicon, or an Intel Mac with a discrete GPU",
        ),
        Backend(
            name="xpu",
            label="XPU",
            kind="gpu",
            vendor="Intel",
            platforms=("Linux", "Windows"),
            engines=("torch",),
            tier="untested",
            tier_note="developed from documentation, without hardware",
            blas="oneMKL, oneDNN",
            runtime_compiler="SYCL, Triton",
            best_for="Intel's Arc and Data Center GPUs",
            requires="an Xe GPU, Level Zero 1.8 or newer; on Linux, the driver i915 or xe",
        ),
        Backend(
            name="tpu",
            label="TPU",
            kind="tpu",
            vendor="Google",
            platforms=("Linux",),
            engines=("jax",),
            tier="untested",
            tier_note="developed from recorded data, without hardware",
            blas="XLA",
            runtime_compiler="XLA",
            best_for="Google Cloud TPU virtual machines",
            requires="a Cloud TPU v2 or newer, Linux",
        ),
        Backend(
            name="opencl",
            label="OpenCL",
            kind="gpu",
            vendor="any",
            platforms=("Linux", "Windows", "macOS"),
            engines=("opencl",),
            tier="experimental",
            tier_note="runs on PoCL and on an NVIDIA H200",
            blas="anydevice's own kernels",
            runtime_compiler="OpenCL C",
            best_for="GPUs that nothing else drives",
            requires="an OpenCL 1.2 driver",
        ),
        Backend(
            name="cpu",
            label="CPU",
            kind="cpu",
            vendor="any",
            platforms=("Linux", "Windows", "macOS"),
            engines=("numpy", "torch", "jax", "mlx"),
            tier="stable",
            tier_note="always there",
            blas="OpenBLAS, oneMKL, Accelerate",
            runtime_compiler="XLA, TorchInductor",
            best_for="everywhere, and small work",
            requires="nothing",
        ),
    )
}

SAID_ELSEWHERE = {
    "mps": "metal",
    "apple": "metal",
    "hip": "rocm",
    "amd": "rocm",
    "amdgpu": "rocm",
    "nvidia": "cuda",
    "intel": "xpu",
    "cl": "opencl",
    "host": "cpu",
}
"""Other names of the backends, only for "did you mean"."""

NOT_YET = {"hpu": "Intel Gaudi accelerators"}
"""Backends of PyTorch that anydevice does not support yet."""

AUTO = "auto"
"""Stands for a device's name; the order of backends then decides."""

KINDS: tuple[Kind, ...] = ("cpu", "gpu", "tpu")
