"""Arrays of PyTorch and their memory, on accelerators that are not here by a stand-in.

On a machine that has one, the contract tests do the same with the real thing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from anydevice._core.device import Device
from anydevice._core.dtypes import as_dtype
from anydevice._core.engine import Engine, MemoryUse
from anydevice._machine.engines import registry
from anydevice.errors import UnsupportedError
from tests.comparing import COPIED, assert_same_values

torch = pytest.importorskip("torch")
GIB = 2**30
CARD = Device("cuda", 0)
engine = registry.load("torch")
CPU = Device("cpu")


class Card:
    """What PyTorch's module for CUDA, or for Intel's GPUs, would do on a card of 100 GiB."""

    def __init__(self, patch: pytest.MonkeyPatch, *, started: bool, backend: str = "cuda") -> None:
        self.started = started
        self.share = 1.0
        self.emptied = 0
        self.peak = 9
        self.waiting: list[Callable[[], None]] = []
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
            module = getattr(torch, backend)
            patch.setattr(module, name, stand_in, raising=False)  # old ones lack some

    def start(self) -> None:
        self.started = True
        for call in self.waiting:
            call()


@pytest.fixture
def torch_engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """PyTorch with a card and Metal, as far as our file for it knows."""
    from anydevice._engines.torch import memory as facet

    engine = registry.load("torch")
    kinds = {"cuda": torch.device("cuda", 0), "metal": torch.device("mps")}
    kinds["xpu"] = torch.device("xpu", 0)
    monkeypatch.setattr(type(engine), "native", lambda self, device: kinds[device.backend])
    monkeypatch.setattr(facet, "_limits", {})
    monkeypatch.setattr(facet, "_shares_before", {})
    return engine


@pytest.mark.parametrize("backend", ["cuda", "xpu"])
def test_memory_of_a_card(
    torch_engine: Engine, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    card = Card(monkeypatch, started=True, backend=backend)
    place, memory = Device(backend), torch_engine.memory
    assert memory.use(place) == MemoryUse(in_use=5, reserved=8, peak=9)
    memory.reset_peak(place)
    assert memory.set_limit(place, 60 * GIB) is None
    assert memory.use(place) == MemoryUse(in_use=5, reserved=8, peak=5, limit=60 * GIB)
    assert card.share == pytest.approx(0.6)
    memory.set_limit(place, 600 * GIB)
    assert card.share == 1.0
    memory.set_limit(place, 10 * GIB)
    memory.set_limit(place, None)
    assert (card.share, memory.use(place)) == (1.0, MemoryUse(5, 8, 5))
    memory.release(place)
    assert card.emptied == 1


@pytest.mark.parametrize("backend", ["cuda", "xpu"])
def test_a_limit_starts_no_card(
    torch_engine: Engine, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    card = Card(monkeypatch, started=False, backend=backend)
    place, memory = Device(backend), torch_engine.memory
    assert memory.set_limit(place, None) is None
    assert card.waiting == []
    memory.set_limit(place, 60 * GIB)
    memory.set_limit(place, 75 * GIB)
    memory.release(place)
    memory.reset_peak(place)
    assert memory.use(place) == MemoryUse(0, 0, 0, 75 * GIB)
    assert (card.share, card.emptied, card.peak) == (1.0, 0, 9)
    card.start()
    assert card.share == pytest.approx(0.75)


def test_lifting_a_limit(torch_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, started=True)
    card.share = 0.5
    memory = torch_engine.memory
    for limit in (60 * GIB, 40 * GIB, None):
        memory.set_limit(CARD, limit)
    assert card.share == 0.5
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    for limit in (60 * GIB, None):
        memory.set_limit(CARD, limit)
    assert card.share == 1.0
    later = Card(monkeypatch, started=False)
    later.share = 0.5
    for limit in (60 * GIB, None):
        memory.set_limit(CARD, limit)
    later.start()
    assert later.share == 0.5


def test_memory_of_metal(torch_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
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
        ("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)", True),
        ("Triton Error [CUDA]: out of memory", True),
        ("Invalid buffer size: 20.00 GiB", True),
        ("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: not enough memory: you", True),
        ("cuFFT error: CUFFT_ALLOC_FAILED", True),
        ("std::bad_alloc", True),
        ("the handler of std::bad_alloc was called twice", False),
        ("CUDA error: an illegal memory access was encountered", False),
        ("the user ran out of memory cards", False),
        ("not enough memory was reserved", False),
    ],
)
def test_errors_of_torch(message: str, out: bool) -> None:
    memory = registry.load("torch").memory
    assert memory.ran_out(RuntimeError(message)) is out
    assert memory.ran_out(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert not memory.ran_out(ValueError(message))


def test_a_class_of_torchs_own_may_say_it_in_other_words() -> None:
    from torch.distributed import DistBackendError

    memory = registry.load("torch").memory
    assert memory.ran_out(DistBackendError("NCCL error: Cuda failure 'out of memory'"))
    assert not memory.ran_out(DistBackendError("NCCL error: timed out"))


def test_native_and_default_devices() -> None:
    assert engine.native(CPU) == torch.device("cpu")
    with torch.device("meta"):
        with engine.default_scope(CPU):
            assert torch.zeros(1).device.type == "cpu"
        assert torch.zeros(1).device.type == "meta"


def fake() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(3)


@pytest.mark.parametrize("make", [fake, lambda: torch.zeros(3, device="meta")])
def test_what_only_stands_for_a_tensor_has_no_memory(make: Callable[[], Any]) -> None:
    x = make()
    assert engine.is_traced(x)
    assert (engine.storage(x), engine.address(x)) == (None, None)
    assert not x.is_meta or engine.devices_of(x) == ()
    with pytest.raises(UnsupportedError, match=r"cannot be read as it is|no data"):
        engine.to_host(x)


def test_a_tensor_inside_vmap_is_traced() -> None:
    seen = []
    torch.vmap(lambda x: seen.append(engine.is_traced(x)) or x)(torch.ones(3))
    assert seen == [True]
    assert not engine.is_traced(torch.ones(3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.empty(2, dtype=torch.bits8),
        lambda: torch.empty(2, dtype=torch.int4),
    ],
    ids=["sparse", "bits8", "int4"],
)
def test_what_numpy_cannot_hold_is_refused(make: Callable[[], Any]) -> None:
    x = make()
    with pytest.raises(UnsupportedError):
        engine.to_host(x)
    assert not x.is_sparse or engine.storage(x) is None


def test_tied_parameters_share_a_storage() -> None:
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    second.weight = first.weight
    apart, one, two = map(engine.storage, (first.bias, first.weight, second.weight.T))
    assert one.allocation == two.allocation
    assert (one.strides, two.strides) == ((16, 4), (4, 16))
    assert apart.allocation != one.allocation


def test_what_torch_lacks_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="PyTorch cannot take over this array"):
        engine.adopt(np.zeros(3, ">f4"))
    row = as_dtype("float8_e3m4")
    with pytest.raises(UnsupportedError, match="PyTorch has no float8_e3m4; convert the array"):
        engine.empty((2,), row, CPU)
    with pytest.raises(UnsupportedError, match="PyTorch has no float8_e3m4; convert the array"):
        engine.place(np.zeros(2, row.numpy()), CPU)


def test_tensors_are_read_without_history_and_lazy_signs() -> None:
    tensor = torch.ones(3, requires_grad=True) * 2
    assert_same_values(engine.to_host(tensor), [2, 2, 2], because=COPIED)
    tensor = torch.tensor([1 + 2j]).conj()
    assert tensor.is_conj()
    assert (engine.storage(tensor), engine.address(tensor)) == (None, None)
    assert_same_values(engine.to_host(tensor), np.array([1 - 2j], np.complex64), because=COPIED)
    assert_same_values(engine.to_host(tensor.imag), np.array([-2], np.float32), because=COPIED)
    tensor = torch.tensor([1 + 2j], requires_grad=True).conj()
    lent = np.from_dlpack(engine.export(tensor))
    assert_same_values(lent, np.array([1 - 2j], np.complex64), because=COPIED)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_in_an_inference_scope_nothing_is_kept_for_gradients(backend: str) -> None:
    weight = torch.ones(2, requires_grad=True)
    with engine.inference_scope(Device(backend, 0)):
        assert not (weight * 2).requires_grad
    assert (weight * 2).requires_grad
