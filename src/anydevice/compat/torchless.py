"""Torchless's backends, transfer of tensors and operations, spelled in Python over anydevice.

>>> from anydevice.compat.torchless import BackendPreference, init_backend
>>> init_backend(BackendPreference.CPU).name()
'CPU'

What is a `Result` there is a value or an exception here: `DeviceNotFoundError` where the backend
is not usable or has no room, with the reason for every device that was looked at.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from anydevice import ops
from anydevice.choose.scope import device, make_request
from anydevice.core.backends import BACKENDS
from anydevice.core.choice import Choice, choose
from anydevice.core.device import Device
from anydevice.core.finding import Finding
from anydevice.core.record import Record, replace
from anydevice.core.text import format_size
from anydevice.discovery._discover import devices, discover, free_memory
from anydevice.errors import ConfigurationError, DeviceNotFoundError, TransferError
from anydevice.planning.estimates import estimate_inference
from anydevice.transfer.moving import device_of, is_array, to_device, to_numpy
from anydevice.transfer.weights.loading import load_weights

_ORDER = ("cuda", "rocm", "metal", "opencl", "cpu")


class BackendPreference(Enum):
    """The best backend of this machine (`AUTO`), or one by name; both spellings are the same."""

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
    """A backend that is ready for use; `device` is the device of it to put data on."""

    device: Device

    def name(self) -> str:
        """Its name as people write it: "CUDA", "ROCm", "Metal", "OpenCL" or "CPU"."""
        return _label(self.device.backend)

    def to_device_1d(self, vector: Any) -> Any:
        """A vector on this backend; raises `TransferError` for what has not one dimension."""
        return to_device(_of_dimensions(1, vector), self.device)

    def to_device_2d(self, matrix: Any) -> Any:
        """A matrix on this backend; raises `TransferError` for what has not two dimensions."""
        return to_device(_of_dimensions(2, matrix), self.device)

    def load_weights(self, path: str | os.PathLike[str], dtype: object = None) -> dict[str, Any]:
        """A model's tensors by name, from its safetensors files straight onto this backend."""
        return load_weights(path, self.device, dtype)

    # The six operations; see `anydevice.ops` for shapes and types. Arrays are moved first.

    def matmul(self, a: Any, b: Any) -> Any:
        """The products of matrices, computed on this backend."""
        return ops.matmul(*self._here(a, b))

    def rmsnorm(self, x: Any, weight: Any, eps: float = 1e-6) -> Any:
        """The last axis of x divided by its root mean square, times the weight."""
        x, weight = self._here(x, weight)
        return ops.rmsnorm(x, weight, eps)

    def softmax(self, x: Any, axis: int = -1) -> Any:
        """Weights along an axis that add up to 1."""
        (x,) = self._here(x)
        return ops.softmax(x, axis)

    def silu(self, x: Any) -> Any:
        """`x × sigmoid(x)`."""
        return ops.silu(*self._here(x))

    def rope(self, x: Any, positions: Any, **options: Any) -> Any:
        """Pairs of elements turned by their position; `theta`, `interleaved` and `scaling`."""
        return ops.rope(*self._here(x, positions), **options)

    def attention(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """Each query's weighted mean of the values; `causal`, `mask`, `lengths` and the others."""
        *arrays, moved = self._here(q, k, v, options)
        return ops.attention(*arrays, **moved)

    def _here(self, *arguments: Any) -> Any:
        return to_device(arguments, self.device)


@dataclass(frozen=True, eq=False)
class UnifiedTensor:
    """A tensor, or a whole model as a nest of them, wherever it is."""

    data: Any

    @property
    def device(self) -> Device | None:
        """Where it is; `None` where it holds no array."""
        return device_of(self.data)

    def to_device(self, backend: Backend | Device | str) -> UnifiedTensor:
        """The same on a backend; what is there already is not copied."""
        place = backend.device if isinstance(backend, Backend) else backend
        return UnifiedTensor(to_device(self.data, place))

    def to_host(self) -> Any:
        """The data in NumPy's arrays."""
        return to_numpy(self.data)


def init_backend(preference: BackendPreference = BackendPreference.AUTO) -> Backend:
    """The backend that is asked for.

    `AUTO` takes what a block, the environment or a file asks for if it is usable, else the first
    usable one of CUDA, ROCm, Metal, OpenCL and CPU. A warning says why what was asked for is
    passed over, or, where it ends at the CPU, what is wrong with the accelerators that are here.

    Raises `DeviceNotFoundError` where a backend that is asked for by name is not usable.
    """
    return _init(preference, 0)


def init_backend_with_memory_check(preference: BackendPreference, required_bytes: int) -> Backend:
    """The same, but only of devices with so many bytes of free memory.

    Raises `DeviceNotFoundError`, which says what each device has, where none has the room.
    """
    return _init(preference, required_bytes)


class InferenceMemory(Record):
    """What running a model takes, in bytes; `total_gb()` is the total as Torchless prints it."""

    weights_bytes: int
    kv_cache_bytes: int
    activation_bytes: int
    total_bytes: int

    def total_gb(self) -> float:
        """The total in units of 1024³ bytes, which Torchless calls GB."""
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
    """The memory that a model of this shape takes, for one sequence; the arguments in this order.

    >>> estimate = estimate_inference_memory(4096, 14336, 32, 32000, 32, 8, 4096, 4)
    >>> estimate.weights_bytes, 27 < estimate.total_gb() < 36
    (28966928896, True)

    `total_bytes` goes into `init_backend_with_memory_check`. It has the overhead of the process in
    it, which the parts have not. Raises `ConfigurationError` for numbers that cannot be.
    """
    types = {1: "float8_e4m3fn", 2: "float16", 4: "float32", 8: "float64"}
    if bytes_per_element not in types:
        raise ConfigurationError(
            f"an element has 1, 2, 4 or 8 bytes, not {bytes_per_element!r}", "bytes_per_element"
        )
    found = estimate_inference(
        hidden=hidden_size,
        intermediate=intermediate_size,
        layers=num_layers,
        vocabulary=vocab_size,
        heads=num_heads,
        kv_heads=num_kv_heads,
        context=max_seq_len,
        dtype=types[bytes_per_element],
    )
    return InferenceMemory(
        found.weights, found.kv_cache, found.activations + found.logits, found.total
    )


def discover_backends() -> tuple[Finding, ...]:
    """What is known of every backend, usable or not, in order of choice."""
    found = {finding.backend: finding for finding in discover()}
    known = (found.pop(name) for name in _ORDER if name in found)
    return (*known, *found.values())


def print_backend_summary() -> None:
    """Print every backend with its devices and memory, or with its error, and the best one."""
    print("\n".join(_summary()))


def _init(preference: BackendPreference, min_free: int) -> Backend:
    if preference is not BackendPreference.AUTO:
        return Backend(device(preference.value, min_free=min_free))
    choice = _automatically(min_free)
    chosen, passed_over = choice.device, choice.passed_over
    if chosen is None:
        reasons = "; ".join(step.outcome for step in passed_over)
        raise DeviceNotFoundError(f"no backend is usable: {reasons}", tuple(discover()))
    unmet = [s.outcome for s in passed_over if chosen.kind == "cpu" or s.source != "configure"]
    if unmet:
        warnings.warn(f"using {chosen}: {'; '.join(unmet)}", stacklevel=3)
    return Backend(chosen)


def _automatically(min_free: int) -> Choice:
    """What is asked for somewhere, else the first usable one in Torchless's order."""
    request = make_request(None, engine=None, min_free=min_free)
    # An OpenCL device that is the CPU itself would come before the CPU, and is slower.
    only_the_cpu = {found.kind for found in devices("opencl")} == {"cpu"}
    ours = (name for name in _ORDER if name != "opencl" or not only_the_cpu)
    request = replace(request, order=(*request.order, *ours))
    return choose(request, discover().findings, free_memory)


def _summary() -> Iterator[str]:
    yield "Backends of this machine"
    for finding in discover_backends():
        tier = "" if finding.tier == "stable" else f" ({finding.tier})"
        yield f"{'✓' if finding.usable else '✗'} {_label(finding.backend)}{tier}"
        for found in finding.devices:
            yield f"    [{found.index}] {_described(found)}"
        if not finding.usable:
            reason = finding.reason or "not in this machine"
            yield f"    Error: {reason} (stage: {finding.stage})"
            if finding.mend:
                yield f"    Mend: {finding.mend}"
    best = _automatically(0).device
    yield f"\nRecommended: {_label(best.backend) if best else 'nothing'}"


def _described(found: Device) -> str:
    facts = found.facts
    parts = [f"{facts.name}: {format_size(facts.total_memory)}"]
    if facts.free_memory is not None:
        parts.append(f"{format_size(facts.free_memory)} free")
    if facts.memory_kind == "unified":
        parts.append("unified memory")
    return ", ".join(parts)


def _of_dimensions(number: int, array: Any) -> Any:
    if not is_array(array) or array.ndim != number:
        shape = f"an array of shape {tuple(array.shape)}" if is_array(array) else repr(array)
        raise TransferError(
            f"to_device_{number}d takes an array with {number} dimension{'s' * (number > 1)}, not "
            f"{shape}; UnifiedTensor.to_device() takes any"
        )
    return array


def _label(backend: str) -> str:
    return BACKENDS[backend].label if backend in BACKENDS else backend
