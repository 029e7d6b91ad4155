"""Settings that reach into the array libraries: environment variables, 64 bits, compiling."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

from anydevice._core.hooks import is_loaded, loaded_library


class Variables:
    """The environment variables that one setting has set in this process.

    A variable that somebody else has changed since is theirs: it is left as it is.

    >>> ours = Variables()
    >>> ours.put({"SOME_SWITCH": "1"})
    ['SOME_SWITCH']
    >>> ours.put({}), "SOME_SWITCH" in os.environ
    (['SOME_SWITCH'], False)
    """

    def __init__(self) -> None:
        self._put: dict[str, str | None] = {}
        self._before: dict[str, str | None] = {}

    def __bool__(self) -> bool:
        return bool(self._put)

    def __iter__(self) -> Iterator[tuple[str, str | None, str | None]]:
        """Each variable with its value, and its value without these settings."""
        return ((name, value, self._before[name]) for name, value in self._put.items())

    def before(self, name: str) -> str | None:
        """Return the value that a variable would have without this setting, or `None`."""
        now = os.environ.get(name)
        ours = name in self._put and now == self._put[name]
        return self._before[name] if ours else now

    def put(self, variables: Mapping[str, str | None]) -> list[str]:
        """Set exactly these variables, put earlier ones back, and return the names that changed."""
        changed = []
        for name in dict.fromkeys((*self._put, *variables)):
            before = self.before(name)
            value = variables.get(name) if name in variables else before
            if name in variables:
                self._put[name], self._before[name] = value, before
            else:
                del self._put[name], self._before[name]
            if os.environ.get(name) != value:
                changed.append(name)
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
        return changed


_variables = Variables()


class _Switch:
    """One option of a library with its variable: turned, and turned back to how it was."""

    def __init__(self, variable: str, module: str, option: str, write: Callable[[Any, bool], None]):
        self._variable, self._variables = variable, Variables()
        self._module, self._read, self._write = module, attrgetter(option), write
        self._before: bool | None = None

    def turn(self, on: bool | None) -> None:
        """Turn the switch, in the library too if it is imported; `None` turns it back."""
        library = loaded_library(self._module)
        turned = bool(self._variables)
        if on is None and not turned:
            return
        if not turned:
            self._before = None if library is None else self._read(library)
        self._variables.put({} if on is None else {self._variable: "1" if on else "0"})
        if on is None:
            # A library that was imported since has read our variable, and not the one before.
            now = os.environ.get(self._variable, "").lower()
            on = now in _ON if self._before is None else self._before
        if library is not None:
            self._write(library, on)


_ON = ("1", "on", "t", "true", "y", "yes")


def _jax_switch(variable: str) -> _Switch:
    option = variable.lower()
    return _Switch(
        variable, "jax", f"config.{option}", lambda jax, on: jax.config.update(option, on)
    )


_X64 = _jax_switch("JAX_ENABLE_X64")
_NOT_COMPILING = (
    _jax_switch("JAX_DISABLE_JIT"),
    _Switch(
        "TORCHDYNAMO_DISABLE",
        "torch._dynamo.config",
        "disable",
        lambda dynamo, on: setattr(dynamo, "disable", on),
    ),
)


HARMLESS = frozenset(
    [
        "CUBLAS_WORKSPACE_CONFIG",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_DEVICE_ORDER",
        "CUDA_LAUNCH_BLOCKING",
        "CUPY_GPU_MEMORY_LIMIT",
        "CUPY_TF32",
        "JAX_DEBUG_INFS",
        "JAX_DEBUG_NANS",
        "JAX_DEFAULT_MATMUL_PRECISION",
        "JAX_DISABLE_JIT",
        "JAX_ENABLE_X64",
        "JAX_LOG_COMPILES",
        "JAX_NUM_CPU_DEVICES",
        "JAX_TRACEBACK_FILTERING",
        "MKL_NUM_THREADS",
        "MLX_DISABLE_COMPILE",
        "NUMEXPR_NUM_THREADS",
        "NVIDIA_TF32_OVERRIDE",
        "OMP_NUM_THREADS",
        "ONEDNN_MAX_CPU_ISA",
        "OPENBLAS_NUM_THREADS",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ENABLE_MPS_FALLBACK",
        "PYTORCH_HIP_ALLOC_CONF",
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO",
        "PYTORCH_MPS_LOW_WATERMARK_RATIO",
        "TF_CPP_MIN_LOG_LEVEL",
        "TOKENIZERS_PARALLELISM",
        "TORCHDYNAMO_DISABLE",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "VECLIB_MAXIMUM_THREADS",
        "XLA_PYTHON_CLIENT_ALLOCATOR",
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
    ]
)
"""Variables that a project may set: numbers and switches, which lead to no file and no program."""

HARMLESS_FLAGS = frozenset(
    [
        "xla_allow_excess_precision",
        "xla_backend_optimization_level",
        "xla_cpu_enable_fast_math",
        "xla_cpu_enable_fast_min_max",
        "xla_cpu_max_isa",
        "xla_cpu_multi_thread_eigen",
        "xla_cpu_prefer_vector_width",
        "xla_force_host_platform_device_count",
        "xla_gpu_all_reduce_combine_threshold_bytes",
        "xla_gpu_autotune_level",
        "xla_gpu_deterministic_ops",
        "xla_gpu_enable_command_buffer",
        "xla_gpu_enable_cublaslt",
        "xla_gpu_enable_fast_min_max",
        "xla_gpu_enable_latency_hiding_scheduler",
        "xla_gpu_enable_triton_gemm",
        "xla_gpu_exclude_nondeterministic_ops",
        "xla_gpu_graph_min_graph_size",
        "xla_gpu_memory_limit_slop_factor",
        "xla_gpu_strict_conv_algorithm_picker",
        "xla_gpu_triton_gemm_any",
    ]
)
"""The flags that a project may have in `XLA_FLAGS`."""

_PLAIN = re.compile(r"[\w.,:+\[\]-]*", re.ASCII)
"""A value that is no path."""

_FLAG = re.compile(r"--(\w+)(?:=[\w.,+-]*)?", re.ASCII)


def harmless(variables: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the variables that a project may set, and the names of the others.

    >>> harmless({"OMP_NUM_THREADS": "4", "LD_PRELOAD": "./x.so", "XLA_FLAGS": "--xla_dump_to=x"})
    ({'OMP_NUM_THREADS': '4'}, ['LD_PRELOAD', 'XLA_FLAGS --xla_dump_to'])
    """
    allowed: dict[str, Any] = {}
    refused = []
    for name, value in variables.items():
        if name == "XLA_FLAGS" and isinstance(value, str):
            good = []
            for flag in value.split():
                match = _FLAG.fullmatch(flag)
                if match and match[1] in HARMLESS_FLAGS:
                    good.append(flag)
                else:
                    refused.append(f"{name} {flag.partition('=')[0]}")
            if good:
                allowed[name] = " ".join(good)
        elif name in HARMLESS and (not isinstance(value, str) or _PLAIN.fullmatch(value)):
            allowed[name] = value
        else:
            refused.append(name)
    return allowed, refused


def set_variables(variables: Mapping[str, str], *, for_children: bool = True) -> list[str]:
    """Set variables, and put earlier ones back; return a sentence for each that came too late."""
    flags = variables.get("XLA_FLAGS")
    if flags is not None:
        merged = merge_flags(_variables.before("XLA_FLAGS") or "", flags)
        variables = {**variables, "XLA_FLAGS": merged}
    late = []
    changed = _variables.put(variables)
    if changed or variables:
        from anydevice._core.child import parent

        parent.withheld = () if for_children else tuple(_variables)
    for name in changed:
        done = "set" if name in variables else "put back"
        for prefixes, started, library in _READ_AT_START:
            if name.startswith(prefixes) and started():
                late.append(
                    f"{name} was {done} too late: {library} has already started and read its "
                    "environment. Call configure() before the first use of the library"
                )
        for prefixes, module, library in _READ_AT_IMPORT:
            if name.startswith(prefixes) and is_loaded(module):
                late.append(
                    f"{name} was {done} too late: {library} is imported already, and reads it only "
                    "once. Call configure() before the library is imported"
                )
    return late


def set_x64(on: bool | None) -> None:
    """Turn 64-bit numbers in JAX on or off, now or when it is imported; `None` restores them."""
    _X64.turn(on)


def set_jit(on: bool | None) -> None:
    """Turn compiling in JAX and torch on or off; `None` restores what was before."""
    for switch in _NOT_COMPILING:
        switch.turn(None if on is None else not on)


_THREAD_VARIABLES = (
    "MKL_NUM_THREADS",
    "NPROC",  # JAX's, and the next one of later releases
    "PJRT_NPROC",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "POCL_MAX_PTHREAD_COUNT",  # the next one of later releases
    "POCL_CPU_MAX_CU_COUNT",
)
_thread_variables = Variables()
_threads_before: dict[str, int] = {}
"""The number of threads that a library had before it was set here."""


def set_threads(count: int | None) -> list[str]:
    """Set the threads of each library on the CPU; return a sentence for each that is too late."""
    values = {} if count is None else dict.fromkeys(_THREAD_VARIABLES, str(count))
    changed = _thread_variables.put(values)
    started = {"JAX": jax_started(), "PyOpenCL": is_loaded("pyopencl")}
    torch, numpy = loaded_library("torch"), loaded_library("numpy")
    if torch is not None:
        _set_running("torch", count, torch.get_num_threads, torch.set_num_threads)
    if numpy is not None:
        functions = _openblas(Path(str(numpy.__file__)).parent)
        started["NumPy's BLAS"] = functions is None
        if functions is not None:
            _set_running("numpy", count, *functions)
    return [
        f"threads comes too late for {library}, which has started already. Call configure() "
        "before the first use of the library"
        for library, is_late in started.items()
        if is_late and changed
    ]


def _set_running(
    library: str, count: int | None, read: Callable[[], int], write: Callable[[int], None]
) -> None:
    if count is not None:
        _threads_before.setdefault(library, read())
        write(count)
    elif library in _threads_before:
        write(_threads_before.pop(library))


def _openblas(numpy: Path) -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """Return the functions of NumPy's own OpenBLAS that read and set its number of threads."""
    for path in (*numpy.parent.glob("numpy.libs/*openblas*"), *numpy.glob(".dylibs/*openblas*")):
        library = ctypes.CDLL(str(path))  # the one that NumPy has loaded
        for name in ("scipy_openblas_{}_num_threads64_", "openblas_{}_num_threads64_"):
            if hasattr(library, name.format("set")):
                return getattr(library, name.format("get")), getattr(library, name.format("set"))
    return None


def merge_flags(old: str, new: str) -> str:
    """Return the flags of both texts; where a flag is in both, the new one.

    >>> merge_flags("--xla_a=1 --xla_b=2", "--xla_b=3 --xla_c")
    '--xla_a=1 --xla_b=3 --xla_c'
    """
    merged = {flag.split("=", 1)[0]: flag for flag in (*old.split(), *new.split())}
    return " ".join(merged.values())


def jax_started() -> bool:
    """Whether this process has started JAX's backends; asks only what is imported already."""
    bridge = loaded_library("jax._src.xla_bridge")
    return bridge is not None and bool(bridge.backends_are_initialized())


def torch_started() -> bool:
    """Whether torch has started a GPU in this process; asks only what is imported already."""
    modules = (loaded_library("torch.cuda"), loaded_library("torch.xpu"))
    return any(module is not None and module.is_initialized() for module in modules)


def virtual_cpus() -> int:
    """Return how many CPU devices JAX is set to show, 1 by default; does not start JAX."""
    config = getattr(loaded_library("jax"), "config", None)
    count = getattr(config, "jax_num_cpu_devices", None)
    if count is None or count < 1:
        flag = "--xla_force_host_platform_device_count="
        flags = os.environ.get("XLA_FLAGS", "").split()
        texts = [text.removeprefix(flag) for text in flags if text.startswith(flag)]
        texts += [os.environ.get("JAX_NUM_CPU_DEVICES", "")]
        count = next((int(text) for text in texts if text.isdigit()), 1)
    return max(1, int(count))


@contextmanager
def enough_virtual_cpus(count: int) -> Iterator[None]:
    """Have JAX show `count` CPU devices in the block and its processes, unless it has started."""
    jax = loaded_library("jax")
    if jax is None or jax_started() or virtual_cpus() > 1:
        yield
        return
    variables, before = Variables(), jax.config.jax_num_cpu_devices
    variables.put({"JAX_NUM_CPU_DEVICES": str(count)})
    jax.config.update("jax_num_cpu_devices", count)
    try:
        yield
    finally:
        variables.put({})
        if not jax_started():
            jax.config.update("jax_num_cpu_devices", before)


_READ_AT_START: tuple[tuple[tuple[str, ...], Callable[[], bool], str], ...] = (
    (("XLA_", "JAX_", "TF_GPU", "LIBTPU"), jax_started, "JAX"),
    (("CUDA_VISIBLE", "CUDA_DEVICE_ORDER", "PYTORCH_", "ZE_", "ONEAPI_"), torch_started, "torch"),
    (("CUDA_VISIBLE", "CUDA_DEVICE_ORDER"), jax_started, "JAX"),
)

_READ_AT_IMPORT = (
    (("CUPY_GPU_MEMORY_LIMIT", "CUPY_ACCELERATORS", "CUPY_CUDA_"), "cupy", "CuPy"),
    (("CUDA_VISIBLE", "CUDA_DEVICE_ORDER"), "cupy", "CuPy"),
    (("PYOPENCL_NO_CACHE", "PYOPENCL_HOME"), "pyopencl", "PyOpenCL"),
    (("OCL_ICD_", "OPENCL_VENDOR_PATH", "POCL_"), "pyopencl", "PyOpenCL"),
    (("MLX_DISABLE_COMPILE", "MLX_BFS_", "MLX_MAX_", "MLX_METAL_"), "mlx.core", "MLX"),
)
"""Variables that a library reads once, when it is imported or soon after. Others are read each time
they are needed."""
