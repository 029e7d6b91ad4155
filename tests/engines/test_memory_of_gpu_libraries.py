"""Memory of libraries on accelerators that are not here, with a stand-in for the library's calls.

On a machine that has one, the contract tests do the same with the real thing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from anydevice.core.device import Device
from anydevice.core.engine import Engine, MemoryUse
from anydevice.engines import registry

GIB = 2**30
CARD = Device("cuda", 0)


class Card:
    """What PyTorch's module for CUDA would do on a card of 100 GiB."""

    def __init__(self, *, started: bool) -> None:
        self.started = started
        self.share = 1.0
        self.emptied = 0
        self.peak = 9
        self.waiting: list[Callable[[], None]] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        import torch

        for name, stand_in in {
            "is_initialized": lambda: self.started,
            "memory_allocated": lambda device: 5,
            "memory_reserved": lambda device: 8,
            "max_memory_allocated": lambda device: self.peak,
            "reset_peak_memory_stats": lambda device: setattr(self, "peak", 5),
            "get_device_properties": lambda device: type("P", (), {"total_memory": 100 * GIB}),
            "set_per_process_memory_fraction": lambda share, device: setattr(self, "share", share),
            "get_per_process_memory_fraction": lambda device: self.share,
            "_lazy_call": lambda call: call() if self.started else self.waiting.append(call),
            "device": lambda device: torch.no_grad(),
            "empty_cache": lambda: setattr(self, "emptied", self.emptied + 1),
        }.items():
            patch.setattr(torch.cuda, name, stand_in, raising=False)  # old ones lack some

    def start(self) -> None:
        self.started = True
        for call in self.waiting:
            call()


@pytest.fixture
def torch_engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """PyTorch with a card and Metal, as far as our file for it knows."""
    import torch

    from anydevice.engines.torch import memory as facet

    engine = registry.load("torch")
    kinds = {"cuda": torch.device("cuda", 0), "metal": torch.device("mps")}
    monkeypatch.setattr(type(engine), "native", lambda self, device: kinds[device.backend])
    monkeypatch.setattr(facet, "_limits", {})
    monkeypatch.setattr(facet, "_shares_before", {})
    return engine


def test_a_card_is_counted_and_limited(
    torch_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(started=True)
    card.install(monkeypatch)
    memory = torch_engine.memory
    assert memory.use(CARD) == MemoryUse(in_use=5, reserved=8, peak=9)
    memory.reset_peak(CARD)
    assert memory.set_limit(CARD, 60 * GIB) is None
    assert memory.use(CARD) == MemoryUse(in_use=5, reserved=8, peak=5, limit=60 * GIB)
    assert card.share == pytest.approx(0.6)
    memory.set_limit(CARD, 600 * GIB)
    assert card.share == 1.0
    memory.set_limit(CARD, 10 * GIB)
    memory.set_limit(CARD, None)
    assert (card.share, memory.use(CARD)) == (1.0, MemoryUse(5, 8, 5))
    memory.release(CARD)
    assert card.emptied == 1


def test_a_limit_does_not_start_a_card_but_waits_for_it(
    torch_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(started=False)
    card.install(monkeypatch)
    memory = torch_engine.memory
    assert memory.set_limit(CARD, None) is None
    assert card.waiting == []
    memory.set_limit(CARD, 60 * GIB)
    memory.set_limit(CARD, 75 * GIB)
    memory.release(CARD)
    memory.reset_peak(CARD)
    assert memory.use(CARD) == MemoryUse(0, 0, 0, 75 * GIB)
    assert (card.share, card.emptied, card.peak) == (1.0, 0, 9)
    card.start()
    assert card.share == pytest.approx(0.75)


def test_the_share_of_a_card_is_that_of_before_when_the_limit_is_lifted(
    torch_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    card = Card(started=True)
    card.install(monkeypatch)
    card.share = 0.5
    memory = torch_engine.memory
    for limit in (60 * GIB, 40 * GIB, None):
        memory.set_limit(CARD, limit)
    assert card.share == 0.5
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    for limit in (60 * GIB, None):
        memory.set_limit(CARD, limit)
    assert card.share == 1.0
    later = Card(started=False)
    later.install(monkeypatch)
    later.share = 0.5
    for limit in (60 * GIB, None):
        memory.set_limit(CARD, limit)
    later.start()
    assert later.share == 0.5


def test_the_limit_of_cupy_is_that_of_before_when_it_is_lifted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Pool:
        limit = 7 * GIB

        def set_limit(self, size: int) -> None:
            self.limit = size

        def get_limit(self) -> int:
            return self.limit

    pool = Pool()
    library: Any = ModuleType("cupy")
    library.get_default_memory_pool = lambda: pool
    engine: Any = ModuleType("anydevice.engines.cupy.arrays")
    engine.ENGINE = SimpleNamespace(native=lambda device: nullcontext())
    monkeypatch.setitem(sys.modules, "cupy", library)
    monkeypatch.setitem(sys.modules, "anydevice.engines.cupy.arrays", engine)
    monkeypatch.delitem(sys.modules, "anydevice.engines.cupy.memory", raising=False)
    memory = import_module("anydevice.engines.cupy.memory").CupyMemory()
    monkeypatch.delitem(sys.modules, "anydevice.engines.cupy.memory")
    memory.set_limit(CARD, None)
    assert pool.limit == 7 * GIB
    for limit in (60 * GIB, 40 * GIB):
        memory.set_limit(CARD, limit)
        assert pool.limit == limit
    memory.set_limit(CARD, None)
    assert pool.limit == 7 * GIB


def test_metal_is_counted_and_limited(
    torch_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    metal, done = Device("metal"), []
    for name, stand_in in {
        "current_allocated_memory": lambda: 5,
        "driver_allocated_memory": lambda: 8,
        "recommended_max_memory": lambda: 10 * GIB,
        "set_per_process_memory_fraction": done.append,
        "empty_cache": lambda: done.append("emptied"),
    }.items():
        monkeypatch.setattr(torch.mps, name, stand_in)
    memory = torch_engine.memory
    memory.set_limit(metal, 6 * GIB)
    assert memory.use(metal) == MemoryUse(in_use=5, reserved=8, limit=6 * GIB)
    memory.set_limit(metal, 60 * GIB)
    memory.set_limit(metal, None)
    memory.reset_peak(metal)
    memory.release(metal)
    assert done == [pytest.approx(0.6), 2.0, 1.7, "emptied"]


@pytest.mark.parametrize(
    ("message", "out"),
    [
        ("MPS backend out of memory (MPS allocated: 9 GiB). Tried to allocate 1 GiB", True),
        ("CUDA error: out of memory", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("CUDA driver error: out of memory", True),
        ("HIP out of memory. Tried to allocate 2.00 GiB", True),
        ("Triton Error [CUDA]: out of memory", True),
        ("Invalid buffer size: 20.00 GiB", True),
        ("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: not enough memory: you", True),
        ("cuFFT error: CUFFT_ALLOC_FAILED", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("the user ran out of memory cards", False),
        ("not enough memory was reserved", False),
    ],
)
def test_errors_of_torch(message: str, out: bool) -> None:
    import torch

    memory = registry.load("torch").memory
    assert memory.ran_out(RuntimeError(message)) is out
    assert memory.ran_out(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert not memory.ran_out(ValueError(message))


def test_a_class_of_torchs_own_may_say_it_in_other_words() -> None:
    from torch.distributed import DistBackendError

    memory = registry.load("torch").memory
    assert memory.ran_out(DistBackendError("NCCL error: Cuda failure 'out of memory'"))
    assert not memory.ran_out(DistBackendError("NCCL error: timed out"))


class Counting:
    """A device of JAX that counts what it holds."""

    platform = "gpu"

    def __init__(self, **counted: int) -> None:
        self.counted = {"bytes_in_use": 3, **counted}

    def memory_stats(self) -> dict[str, int]:
        return self.counted


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    from anydevice.engines.jax import memory as facet

    def engine_with(**counted: int) -> Engine:
        engine = registry.load("jax")
        monkeypatch.setattr(type(engine), "native", lambda self, device: Counting(**counted))
        facet._preallocates.cache_clear()
        return engine

    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)
    return engine_with


@pytest.mark.parametrize(
    ("variable", "value", "preallocated"),
    [
        ("UNRELATED", "1", True),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "true", True),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false", False),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform", False),
    ],
)
def test_what_jax_took_at_its_start_is_told_from_use(
    counting: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    preallocated: bool,
) -> None:
    monkeypatch.setenv(variable, value)
    memory = counting(pool_bytes=8, peak_bytes_in_use=4, bytes_limit=9).memory
    assert memory.use(CARD) == MemoryUse(3, 8, peak=4, limit=9, preallocated=preallocated)


def test_what_jax_does_not_count_is_left_out(counting: Callable[..., Engine]) -> None:
    memory = counting(bytes_limit=0).memory
    assert memory.use(CARD) == MemoryUse(3, 3, preallocated=True)


def test_jax_on_a_gpu_has_taken_its_limit(counting: Callable[..., Engine]) -> None:
    memory = counting(bytes_limit=75 * GIB).memory
    assert memory.set_limit(CARD, int(75.5 * GIB)) is None
    for limit in (60 * GIB, None):
        said = memory.set_limit(CARD, limit)
        assert said is not None
        assert "has already started, and may hold 75.0 GiB of cuda:0" in said
        assert "before JAX is first used" in said
    assert "on GPUs only" in str(memory.set_limit(Device("tpu"), GIB))
    assert memory.set_limit(Device("tpu"), None) is None
    memory.release(CARD)
    memory.reset_peak(CARD)


@pytest.mark.parametrize(
    ("message", "out"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 20.00GiB.", True),
        ("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in hbm", True),
        ("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY", True),
        ("RESOURCE_EXHAUSTED: too many requests", False),
        ("INVALID_ARGUMENT: shapes", False),
    ],
)
def test_errors_of_jax(message: str, out: bool) -> None:
    import jax

    memory = registry.load("jax").memory
    assert memory.ran_out(jax.errors.JaxRuntimeError(message)) is out
    plainly = out and message.startswith("RESOURCE_EXHAUSTED: ")
    assert memory.ran_out(RuntimeError(message)) is plainly
    assert not memory.ran_out(RuntimeError(f"it said {message}"))


def test_nobody_takes_the_error_of_another_for_its_own() -> None:
    """The first engine that knows an error is the one that is asked about the device."""
    errors: dict[str, Any] = {}
    for name in ("numpy", "torch", "jax", "opencl", "mlx"):
        engine = registry.load(name)
        try:
            engine.empty((2**22, 2**24), _float32(), engine.devices()[0])
        except Exception as error:
            errors[name] = error
    assert len(errors) == 5
    for name, failure in errors.items():
        others = [n for n in errors if n != name and registry.load(n).memory.ran_out(failure)]
        assert others == []


def _float32() -> Any:
    from anydevice.core.dtypes import as_dtype

    return as_dtype("float32")
