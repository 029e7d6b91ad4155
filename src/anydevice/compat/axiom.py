"""Axiom.jl's backends, models and timing, spelled in Python over anydevice.

>>> from anydevice.compat import axiom
>>> with axiom.with_backend(axiom.CPUBackend()):
...     axiom.current_backend()
CPUBackend()

A backend is callable where Julia pipes: `x |> CUDABackend(0)` is `CUDABackend(0)(x)`. The block
of `@with_backend` is a `with` statement, and a function that ends in `!` there has no mark here:
what it changed there, it returns here. The models are in `axiom_models`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from anydevice.bench.functions import DeviceTiming
from anydevice.bench.functions import benchmark as time_on_devices
from anydevice.check.warming import warm_up as make_kernels_ready
from anydevice.choose.choice import accelerators_passed_over
from anydevice.choose.discovery import devices, discover
from anydevice.choose.scope import device, set_device, use_device, why
from anydevice.compat.axiom_models import Adam as Adam
from anydevice.compat.axiom_models import CrossEntropyLoss as CrossEntropyLoss
from anydevice.compat.axiom_models import Dense as Dense
from anydevice.compat.axiom_models import chain as chain
from anydevice.compat.axiom_models import compile as compile  # noqa: A004 - its name
from anydevice.compat.axiom_models import enable_checkpointing as enable_checkpointing
from anydevice.compat.axiom_models import gelu as gelu
from anydevice.compat.axiom_models import is_finite as is_finite
from anydevice.compat.axiom_models import load_model as load_model
from anydevice.compat.axiom_models import prove as prove
from anydevice.compat.axiom_models import relu as relu
from anydevice.compat.axiom_models import save_model as save_model
from anydevice.compat.axiom_models import sigmoid as sigmoid
from anydevice.compat.axiom_models import softmax as softmax
from anydevice.compat.axiom_models import tanh as tanh
from anydevice.compat.axiom_models import train as train
from anydevice.core.device import Device
from anydevice.memory.releasing import release
from anydevice.transfer.moving import synchronize, to_device, to_numpy


class AbstractBackend(Device):
    """What every backend of Axiom is: an anydevice `Device`, equal to the one of the same place."""

    __slots__ = ()
    _of_backend: str

    def __init__(self, index: int = 0, *, engine: str | None = None) -> None:
        super().__init__(self._of_backend, index, engine=engine)

    def __repr__(self) -> str:
        shown = "" if self.kind == "cpu" and not self.index else self.index
        return f"{type(self).__name__}({shown})"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.index, self._engine)


class CPUBackend(AbstractBackend):
    """The CPU, which is always there. Axiom calls it `JuliaBackend`."""

    __slots__ = ()
    _of_backend = "cpu"


class CUDABackend(AbstractBackend):
    """An NVIDIA GPU by its index."""

    __slots__ = ()
    _of_backend = "cuda"


class ROCmBackend(AbstractBackend):
    """An AMD GPU by its index."""

    __slots__ = ()
    _of_backend = "rocm"


class MetalBackend(AbstractBackend):
    """An Apple GPU by its index."""

    __slots__ = ()
    _of_backend = "metal"


JuliaBackend = CPUBackend

_SPELLED = {kind._of_backend: kind for kind in (CUDABackend, ROCmBackend, MetalBackend, CPUBackend)}


def detect_gpu() -> AbstractBackend | None:
    """The GPU to use, or `None` where none is usable.

    Nothing has to be registered: a backend is there as soon as its driver answers and a library
    that drives it is installed.
    """
    found = why([name for name in _SPELLED if name != "cpu"]).device
    return None if found is None else _SPELLED[found.backend](found.index, engine=found.engine)


def set_backend(backend: Device | str | None) -> Device:
    """Make this the backend of the whole process, and return it.

    `None`, which is what `detect_gpu()` gives on a machine without a GPU, means the CPU, with a
    warning that says why. Raises `DeviceNotFoundError` where the backend is not usable; the former
    one then stays.
    """
    if backend is None:
        warnings.warn(f"using the CPU: {_why_no_gpu()}", stacklevel=2)
    chosen = set_device(CPUBackend() if backend is None else backend)
    assert chosen is not None
    return _spelled(chosen)


def current_backend() -> Device:
    """Where work goes now: the block's backend, else the process's, else the best of the machine.

    Without any choice it may end at the CPU, with one warning that says why.
    """
    return _spelled(device())


@contextmanager
def with_backend(backend: Device | str) -> Iterator[Device]:
    """A block, or a decorated function, in which `current_backend()` is this one.

    Data is carried from block to block by applying the backend to it:
    `with with_backend(CUDABackend(0)) as gpu: predictions = model(gpu(batch))`. Raises
    `DeviceNotFoundError` on entering where the backend is not usable.
    """
    with use_device(backend) as chosen:
        yield _spelled(chosen)


def cuda_available() -> bool:
    """Whether an NVIDIA GPU is usable here."""
    return bool(devices("cuda"))


def rocm_available() -> bool:
    """Whether an AMD GPU is usable here."""
    return bool(devices("rocm"))


def metal_available() -> bool:
    """Whether an Apple GPU is usable here."""
    return bool(devices("metal"))


def backend_to_gpu(backend: Device | str, x: Any) -> Any:
    """Every array in `x` on that backend; what is there already is not copied.

    From one GPU to another it goes directly: there is no need for `backend_to_cpu` in between.
    """
    return to_device(x, backend)


def backend_to_cpu(backend: Device | str, x: Any) -> Any:
    """Every array in `x` back on the CPU; `backend` is where it comes from, and need not be."""
    return to_device(x, "cpu")


def backend_synchronize(backend: Device | str) -> None:
    """Wait until everything that was started on that backend has ended."""
    synchronize(backend)


def reclaim(backend: Device | str | None = None) -> None:
    """Give memory that no array uses back, of one backend or of all; there, `CUDA.reclaim()`."""
    release(backend)


def forward(model: Callable[..., Any], x: Any) -> Any:
    """What the model gives for x, where they are."""
    return model(x)


def benchmark(function: Callable[..., Any], *arguments: Any, limit: float = 1.0) -> DeviceTiming:
    """The seconds of one call with these arguments on the current backend.

    Arrays and models among them are moved there first, and every call is waited for: there is
    nothing to synchronize. `first` is the first call, which compiles. Calling goes on for `limit`
    seconds; where it fails, `reason` says why.
    """
    here = current_backend()
    return time_on_devices(function, *arguments, devices=[here], limit=limit)[str(here)]


def warm_up(model: Callable[..., Any], *arguments: Any) -> Any:
    """The model's result for these arguments on the current backend, complete.

    What is compiled on a first call is compiled after it, so that the next one is not slow; so are
    our own kernels, which are checked as well.
    """
    here = current_backend()
    make_kernels_ready(here)
    moved, there = to_device((model, arguments), here)
    result = moved(*there)
    to_numpy(result)  # waits, also for a library that computes only what is asked for
    return result


def _spelled(chosen: Device) -> Device:
    """The device under Axiom's name; one that Axiom has no name for stays as it is."""
    kind = _SPELLED.get(chosen.backend)
    return kind(chosen.index, engine=chosen.engine) if kind else chosen


def _why_no_gpu() -> str:
    stopped = accelerators_passed_over(tuple(discover()))
    usable = [str(found) for found in devices() if found.kind != "cpu"]
    others = [f"no backend was given, although there is {', '.join(usable)}"] if usable else []
    return "; ".join((*stopped, *others)) or "no accelerator is in this machine"


def _rebuild(kind: type[AbstractBackend], index: int, engine: str | None) -> AbstractBackend:
    return kind(index, engine=engine)
