"""Torchless's backends, transfer, operations and language models, in Python over anydevice.

>>> from anydevice.compat.torchless import BackendPreference, init_backend
>>> init_backend(BackendPreference.CPU).name()
'CPU'

Where Torchless returns an error, this raises `DeviceNotFoundError`, with a reason for every device.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import anydevice
from anydevice import (
    ConfigurationError,
    Device,
    DeviceNotFoundError,
    Finding,
    TransferError,
    llm,
    ops,
)
from anydevice._arrays.move import is_array
from anydevice._bench.language_models import bench_text
from anydevice._core.backends import BACKENDS
from anydevice._core.choice import choose
from anydevice._core.record import Record, replace
from anydevice._core.text import warn
from anydevice._machine.choose.scope import make_request
from anydevice._machine.discovery.discover import free_memory

if TYPE_CHECKING:
    from anydevice.llm import LanguageModel

_ORDER = ("cuda", "rocm", "metal", "opencl", "cpu")


class BackendPreference(Enum):
    """The best backend (`AUTO`), or one by name, in Python's spelling or Torchless's own."""

    AUTO = "auto"
    CUDA = "cuda"
    ROCM = "rocm"
    METAL = "metal"
    OPENCL = "opencl"
    CPU = "cpu"

    Auto = AUTO
    Cuda = CUDA
    Rocm = ROCM
    Metal = METAL
    OpenCL = OPENCL
    Cpu = CPU


class Backend(Record):
    """A usable backend; its operations are those of `anydevice.ops`, and move their arrays here."""

    device: Device

    def name(self) -> str:
        """Return the usual spelling: "CUDA", "ROCm", "Metal", "OpenCL" or "CPU"."""
        backend = self.device.backend
        return BACKENDS[backend].label if backend in BACKENDS else backend

    def to_device_1d(self, vector: Any) -> Any:
        """Move a vector here; raises `TransferError` if it has not one dimension."""
        return self._here(_of_dimensions(1, vector))[0]

    def to_device_2d(self, matrix: Any) -> Any:
        """Move a matrix here; raises `TransferError` if it has not two dimensions."""
        return self._here(_of_dimensions(2, matrix))[0]

    def load_weights(self, path: str | os.PathLike[str], dtype: object = None) -> dict[str, Any]:
        """Load the tensors of safetensors files by name, straight onto this backend."""
        return anydevice.load_weights(path, self.device, dtype)

    def load_model(
        self, path: str | os.PathLike[str], *, context: int | None = None, dtype: object = None
    ) -> LanguageModel:
        """Load the language model of a folder or a GGUF file to this backend."""
        return llm.load(path, self.device, dtype, context)

    def matmul(self, a: Any, b: Any) -> Any:
        return ops.matmul(*self._here(a, b))

    def rmsnorm(self, x: Any, weight: Any, eps: float = 1e-6) -> Any:
        x, weight = self._here(x, weight)
        return ops.rmsnorm(x, weight, eps)

    def softmax(self, x: Any, axis: int = -1) -> Any:
        return ops.softmax(self._here(x)[0], axis)

    def silu(self, x: Any) -> Any:
        return ops.silu(*self._here(x))

    def rope(self, x: Any, positions: Any, **options: Any) -> Any:
        """Rotate `x`, with the options of `ops.rope`."""
        return ops.rope(*self._here(x, positions), **options)

    def attention(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """Compute attention, with the options of `ops.attention`."""
        *arrays, moved = self._here(q, k, v, options)
        return ops.attention(*arrays, **moved)

    def _here(self, *arguments: Any) -> Any:
        return anydevice.to_device(arguments, self.device)


@dataclass(frozen=True, eq=False)
class UnifiedTensor:
    """A tensor, or a tree of tensors such as a model, on any device."""

    data: Any

    @property
    def device(self) -> Device | None:
        """The device, or `None` without an array."""
        return anydevice.device_of(self.data)

    def to_device(self, backend: Backend | Device | str) -> UnifiedTensor:
        """Return the tensor on a backend, without a copy if it is there already."""
        target = backend.device if isinstance(backend, Backend) else backend
        return UnifiedTensor(anydevice.to_device(self.data, target))

    def to_host(self) -> Any:
        """Return the data in NumPy arrays."""
        return anydevice.to_numpy(self.data)


def init_backend(preference: BackendPreference = BackendPreference.AUTO) -> Backend:
    """Return the requested backend; raise `DeviceNotFoundError` if it is not usable.

    `AUTO` takes the device of a block, the environment or a file if it is usable, else the first
    usable one of CUDA, ROCm, Metal, OpenCL and CPU. It warns if it passes over a preference, or
    over an accelerator for the CPU.
    """
    return init_backend_with_memory_check(preference, 0)


def init_backend_with_memory_check(preference: BackendPreference, required_bytes: int) -> Backend:
    """Choose as `init_backend`, with this much free memory.

    Raises `DeviceNotFoundError` with the free memory of each device.
    """
    if preference is not BackendPreference.AUTO:
        return Backend(anydevice.device(preference.value, min_free=required_bytes))
    request = make_request(None, engine=None, min_free=required_bytes)
    # An OpenCL device that is the CPU itself would come before the CPU, and is slower.
    only_the_cpu = {device.kind for device in anydevice.devices("opencl")} == {"cpu"}
    ours = (name for name in _ORDER if name != "opencl" or not only_the_cpu)
    request, findings = replace(request, order=(*request.order, *ours)), tuple(anydevice.discover())
    choice = choose(request, findings, free_memory)
    chosen, passed_over = choice.device, choice.passed_over
    if chosen is None:
        reasons = "; ".join(step.outcome for step in passed_over)
        raise DeviceNotFoundError(f"no backend is usable: {reasons}", findings)
    unmet = [s.outcome for s in passed_over if chosen.kind == "cpu" or s.source != "configure"]
    if unmet:
        warn(f"using {chosen}: {'; '.join(unmet)}")
    return Backend(chosen)


class InferenceMemory(Record):
    """The memory to run a model, in bytes."""

    weights_bytes: int
    kv_cache_bytes: int
    activation_bytes: int
    total_bytes: int

    def total_gb(self) -> float:
        """Return the total in units of 1024³ bytes, which Torchless calls GB."""
        return self.total_bytes / 2**30


def estimate_inference_memory(
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    vocab_size: int,
    num_heads: int,
    num_kv_heads: int,
    max_seq_len: int,
    bytes_per_element: int,
) -> InferenceMemory:
    """Estimate the memory to run a model of this shape on one sequence.

    >>> estimate = estimate_inference_memory(4096, 14336, 32, 32000, 32, 8, 4096, 4)
    >>> estimate.weights_bytes, 27 < estimate.total_gb() < 36
    (28966928896, True)

    `total_bytes` includes the overhead of the process. Impossible shapes raise
    `ConfigurationError`.
    """
    dtypes = {1: "float8_e4m3fn", 2: "float16", 4: "float32", 8: "float64"}
    if bytes_per_element not in dtypes:
        raise ConfigurationError(
            f"an element has 1, 2, 4 or 8 bytes, not {bytes_per_element!r}", "bytes_per_element"
        )
    estimate = anydevice.estimate_inference(
        hidden=hidden_size,
        intermediate=intermediate_size,
        layers=num_layers,
        vocabulary=vocab_size,
        heads=num_heads,
        kv_heads=num_kv_heads,
        context=max_seq_len,
        dtype=dtypes[bytes_per_element],
    )
    activations = estimate.activations + estimate.logits
    return InferenceMemory(estimate.weights, estimate.kv_cache, activations, estimate.total)


class Performance(Record):
    """Tokens a second: of a prompt that is processed, and of a text that is generated."""

    prompt: float
    generation: float


def measure_performance(model: LanguageModel, prompt_tokens: int = 128) -> Performance:
    """Measure a loaded model; `ConfigurationError` if the prompt fills the model's context."""
    [speed] = bench_text(model, [prompt_tokens], ceilings=()).speeds
    return Performance(speed.prefill, speed.decode)


def discover_backends() -> tuple[Finding, ...]:
    """Return the finding of every backend, usable or not, in order of choice."""
    return tuple(anydevice.discover())


def print_backend_summary() -> None:
    """Print every backend with its devices or its error, and the recommended one."""
    print(anydevice.discover())


def _of_dimensions(number: int, array: Any) -> Any:
    if not is_array(array) or array.ndim != number:
        shape = f"an array of shape {tuple(array.shape)}" if is_array(array) else repr(array)
        raise TransferError(
            f"to_device_{number}d takes an array with {number} dimension{'s' * (number > 1)}, not "
            f"{shape}; UnifiedTensor.to_device() takes any"
        )
    return array
