from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from anydevice._core.device import Device
from anydevice._core.dtypes import as_dtype
from anydevice._machine.engines import registry
from anydevice.errors import UnsupportedError
from tests.comparing import COPIED, assert_same_values

torch = pytest.importorskip("torch")
engine = registry.load("torch")
CPU = Device("cpu")


def test_native_is_a_torch_device() -> None:
    assert engine.native(CPU) == torch.device("cpu")


def test_the_scope_sets_torchs_default_device() -> None:
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


def test_what_is_exported_is_free_of_history_and_of_lazy_signs() -> None:
    tensor = torch.tensor([1 + 2j], requires_grad=True).conj()
    lent = np.from_dlpack(engine.export(tensor))
    assert_same_values(lent, np.array([1 - 2j], np.complex64), because=COPIED)


def test_what_cannot_be_taken_over_says_so() -> None:
    with pytest.raises(UnsupportedError, match="PyTorch cannot take over this array"):
        engine.adopt(np.zeros(3, ">f4"))


def test_a_type_that_pytorch_lacks_is_refused() -> None:
    row = as_dtype("float8_e3m4")
    with pytest.raises(UnsupportedError, match="PyTorch has no float8_e3m4; convert the array"):
        engine.empty((2,), row, CPU)
    with pytest.raises(UnsupportedError, match="PyTorch has no float8_e3m4; convert the array"):
        engine.place(np.zeros(2, row.numpy()), CPU)


def test_a_tensor_is_read_without_its_history_and_lazy_signs() -> None:
    tensor = torch.ones(3, requires_grad=True) * 2
    assert_same_values(engine.to_host(tensor), [2, 2, 2], because=COPIED)
    tensor = torch.tensor([1 + 2j]).conj()
    assert tensor.is_conj()
    assert (engine.storage(tensor), engine.address(tensor)) == (None, None)
    assert_same_values(engine.to_host(tensor), np.array([1 - 2j], np.complex64), because=COPIED)
    assert_same_values(engine.to_host(tensor.imag), np.array([-2], np.float32), because=COPIED)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_in_an_inference_scope_nothing_is_kept_for_gradients(backend: str) -> None:
    weight = torch.ones(2, requires_grad=True)
    with engine.inference_scope(Device(backend, 0)):
        assert not (weight * 2).requires_grad
    assert (weight * 2).requires_grad
