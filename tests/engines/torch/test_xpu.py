"""PyTorch on Intel GPUs that are not here: fake ones, and a stand-in for `torch.xpu`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import ops, testing
from anydevice._core.device import Device
from anydevice._core.dtypes import as_dtype
from anydevice._machine.choose.scope import device_from_library
from anydevice._machine.engines import registry
from tests.comparing import COPIED, EXACT, assert_same_values

torch = pytest.importorskip("torch")
FakeTensorMode = importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode
engine = registry.load("torch")
GPU = Device("xpu", 1)


class Xpu:
    """The calls that our files make of `torch.xpu`, which are kept; tensors stay on the CPU."""

    def __init__(self, *, has_fp64: bool) -> None:
        self.calls: list[Any] = []
        self.has_fp64 = has_fp64

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            return nullcontext(self) if name == "stream" else self

        return call

    def device_count(self) -> int:
        return 2


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Xpu]:
    """Two Intel GPUs, as far as our files for PyTorch know."""
    from anydevice._engines.torch import arrays

    stand_in = Xpu(has_fp64=getattr(request, "param", True))
    monkeypatch.setattr(torch, "xpu", stand_in)
    monkeypatch.setitem(arrays.MODULES, "xpu", stand_in)
    monkeypatch.setitem(arrays._WAIT, "xpu", stand_in.synchronize)
    for name in ("_natives", "_idle_streams"):
        monkeypatch.setattr(arrays, name, {})
    arrays._lacking_dtypes.cache_clear()
    yield stand_in
    arrays._lacking_dtypes.cache_clear()


def test_gpus_are_named_and_synchronized(xpu: Xpu) -> None:
    assert engine.devices() == (Device("xpu", 0), GPU, Device("cpu"))
    native = engine.native(GPU)
    assert (native, str(native)) == (torch.device("xpu", 1), "xpu:1")
    assert device_from_library(native) == GPU
    engine.synchronize(GPU)
    assert xpu.calls == [("synchronize", native)]


def test_arrays_are_made_and_received_in_the_order_of_a_stream(
    xpu: Xpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[Any] = []

    class Tensor:
        device = torch.device("xpu", 1)
        record_stream = recorded.append

    monkeypatch.setattr(torch, "empty", lambda shape, **named: Tensor())
    made = engine.empty((2,), as_dtype("float32"), GPU)
    engine.receive([made])
    engine.finish(made)
    native = Tensor.device
    assert recorded == [xpu, xpu]
    names = ["Stream", "stream", "current_stream", "current_stream", "current_stream"]
    assert [call[0] for call in xpu.calls] == [*names, "synchronize"]
    assert xpu.calls[2:5] == [("current_stream", native)] * 3


@pytest.mark.parametrize("xpu", [True, False], indirect=True)
def test_a_card_without_float64_takes_none(xpu: Xpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "to", lambda x, target: x)  # the card itself is not here
    double, single = np.ones(3), np.ones(3, "float32")
    assert engine.place(single, GPU).dtype == torch.float32
    assert engine.place(double, GPU, narrow=True).dtype == (
        torch.float64 if xpu.has_fp64 else torch.float32
    )
    if not xpu.has_fp64:
        with pytest.raises(anydevice.UnsupportedError, match="no float64 on Metal and Arc A"):
            engine.place(double, GPU)


def test_random_numbers_are_those_of_the_gpu(xpu: Xpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from anydevice._libraries.torch import random

    xpu.get_rng_state = lambda index: torch.tensor([index, 7], dtype=torch.uint8)
    place = Device("xpu", 1, engine="torch")
    saved = random.device_state(place)
    assert saved == "0107"
    random.set_device_state(place, saved)
    (name, state, index) = xpu.calls[-1]
    assert (name, state.tolist(), index) == ("set_rng_state", [1, 7], 1)


def test_pytorch_s_own_tensors_are_on_the_gpu_and_compiled_without_checks() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    from anydevice._engines.torch.compiler import _check_indices
    from anydevice._engines.torch.fused import _alike

    added = []
    with FakeTensorMode():
        for place in ("xpu:1", "cpu"):
            table, index = torch.ones(5, 4, device=place), torch.zeros(2, device=place).long()
            graph = make_fx(lambda a, b: torch.nn.functional.embedding(a, b))(index, table).graph
            before = len(graph.nodes)
            _check_indices(graph)  # on a GPU, a check would have to wait
            added.append(len(graph.nodes) > before)
        on_gpu = torch.ones(3, device="xpu:1")
        assert engine.devices_of(on_gpu) == (GPU,)
        assert _alike([[on_gpu], [on_gpu]])  # PyTorch's fused optimizers serve it
    assert added == [False, True]


def test_a_fake_gpu_holds_and_computes() -> None:
    x = np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4)
    with testing.fake_machine(xpu=["Intel Arc A770 1MiB"], engines=["torch"]) as report:
        place = anydevice.device()
        assert (str(place), report["xpu"].tier, place.facts.name) == (
            "xpu:0",
            "untested",
            "Intel Arc A770",
        )
        placed = place(x)
        assert anydevice.device_of(placed) == place
        assert anydevice.memory_stats("xpu").in_use == x.nbytes
        y = ops.softmax(placed, axis=-1)
        assert anydevice.device_of(y) == place
        assert_same_values(anydevice.to_numpy(placed), x, because=COPIED)
        loss = registry.load("torch").autodiff.value_and_grad(lambda a: ops.sum(ops.relu(a)))
        value, slope = loss(placed)
        assert anydevice.device_of(slope) == place
        assert_same_values(anydevice.to_numpy(slope), (x > 0).astype("float32"), because=EXACT)
        del placed, y, value, slope
        with pytest.raises(anydevice.OutOfMemoryError, match="xpu:0"):
            place(np.zeros(2**19, "float32"))
