"""Settings that reach into the array libraries: environment variables, 64 bits, compiling.

Each function returns a sentence for everything that came too late to matter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any


def set_variables(variables: Mapping[str, str]) -> list[str]:
    """Put variables into the environment; flags in `XLA_FLAGS` are merged, ours winning."""
    late = []
    for name, value in variables.items():
        value = merge_flags(os.environ.get(name, ""), value) if name == "XLA_FLAGS" else value
        if os.environ.get(name) == value:
            continue
        os.environ[name] = value
        for prefixes, started, library in _READ_AT_START:
            if name.startswith(prefixes) and started():
                late.append(
                    f"{name} was set too late: {library} has already started and read its "
                    "environment. Call configure() before the first use of the library"
                )
        for prefixes, module, library in _READ_AT_IMPORT:
            if name.startswith(prefixes) and module in sys.modules:
                late.append(
                    f"{name} was set too late: {library} is imported already, and reads it only "
                    "once. Call configure() before the library is imported"
                )
    return late


def set_x64(on: bool) -> list[str]:
    """64-bit numbers in JAX, whether it is imported already or later."""
    os.environ["JAX_ENABLE_X64"] = "1" if on else "0"
    _update_jax("jax_enable_x64", on)
    return []


def set_jit(on: bool) -> list[str]:
    """Compiling in JAX and torch on or off; off makes their code run line by line."""
    os.environ["JAX_DISABLE_JIT"] = "0" if on else "1"
    os.environ["TORCHDYNAMO_DISABLE"] = "0" if on else "1"
    _update_jax("jax_disable_jit", not on)
    dynamo = sys.modules.get("torch._dynamo.config")
    if dynamo is not None:
        dynamo.disable = not on  # type: ignore[attr-defined]
    return []


def merge_flags(old: str, new: str) -> str:
    """Flags of both texts; of a flag that is in both, the new one.

    >>> merge_flags("--xla_a=1 --xla_b=2", "--xla_b=3 --xla_c")
    '--xla_a=1 --xla_b=3 --xla_c'
    """
    merged = {flag.split("=", 1)[0]: flag for flag in (*old.split(), *new.split())}
    return " ".join(merged.values())


def jax_started() -> bool:
    """Whether this process has started JAX's backends; asks only what is imported already."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bool(bridge.backends_are_initialized())


def torch_cuda_started() -> bool:
    """Whether torch has started CUDA in this process; asks only what is imported already."""
    torch_cuda = sys.modules.get("torch.cuda")
    return torch_cuda is not None and bool(torch_cuda.is_initialized())


def virtual_cpus() -> int:
    """How many CPU devices JAX is told to show; 1 unless someone asked for more.

    Read from the settings, without starting JAX.
    """
    config = getattr(sys.modules.get("jax"), "config", None)
    asked = getattr(config, "jax_num_cpu_devices", None)
    if asked is None or asked < 1:
        flag = "--xla_force_host_platform_device_count="
        flags = os.environ.get("XLA_FLAGS", "").split()
        texts = [text.removeprefix(flag) for text in flags if text.startswith(flag)]
        texts += [os.environ.get("JAX_NUM_CPU_DEVICES", "")]
        asked = next((int(text) for text in texts if text.isdigit()), 1)
    return max(1, int(asked))


def _update_jax(option: str, value: bool) -> None:
    jax: Any = sys.modules.get("jax")
    if jax is not None:
        jax.config.update(option, value)


_READ_AT_START: tuple[tuple[tuple[str, ...], Callable[[], bool], str], ...] = (
    (("XLA_", "JAX_", "TF_GPU", "LIBTPU"), jax_started, "JAX"),
    (("CUDA_VISIBLE", "CUDA_DEVICE_ORDER", "PYTORCH_"), torch_cuda_started, "torch"),
    (("CUDA_VISIBLE", "CUDA_DEVICE_ORDER"), jax_started, "JAX"),
)

_READ_AT_IMPORT = (
    (("CUPY_GPU_MEMORY_LIMIT", "CUPY_ACCELERATORS", "CUPY_CUDA_"), "cupy", "CuPy"),
    (("CUDA_VISIBLE", "CUDA_DEVICE_ORDER"), "cupy", "CuPy"),
    (("PYOPENCL_NO_CACHE", "PYOPENCL_HOME"), "pyopencl", "PyOpenCL"),
    (("OCL_ICD_", "OPENCL_VENDOR_PATH", "POCL_"), "pyopencl", "PyOpenCL"),
    (("MLX_DISABLE_COMPILE", "MLX_BFS_", "MLX_MAX_", "MLX_METAL_"), "mlx.core", "MLX"),
)
"""What a library reads once: when it is imported, or soon after. The rest of theirs is read anew
each time it is needed."""
