from __future__ import annotations

import numpy as np
import pytest

from anydevice.core.device import Device
from anydevice.engines import registry

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


def test_a_meta_tensor_lives_nowhere() -> None:
    assert engine.devices_of(torch.zeros(1, device="meta")) == ()


def test_a_tensor_with_a_gradient_history_is_read_without_it() -> None:
    tensor = torch.ones(3, requires_grad=True) * 2
    np.testing.assert_array_equal(engine.to_host(tensor), [2, 2, 2])


def test_a_lazily_conjugated_tensor_is_read_conjugated() -> None:
    tensor = torch.tensor([1 + 2j]).conj()
    assert tensor.is_conj()
    np.testing.assert_array_equal(engine.to_host(tensor), np.array([1 - 2j], np.complex64))
    np.testing.assert_array_equal(engine.to_host(tensor.imag), np.array([-2], np.float32))
