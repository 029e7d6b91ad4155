"""A device as a value: its name, its identity, and what it says of itself."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import anydevice
from anydevice import Device, testing
from anydevice._core.finding import BackendScan, Facts, RawDevice
from anydevice.errors import ConfigurationError, DeviceNotFoundError
from tests.comparing import assert_same_bits


@pytest.mark.parametrize(
    ("written", "backend", "index", "name"),
    [
        ("cuda:1", "cuda", 1, "cuda:1"),
        ("cuda", "cuda", 0, "cuda:0"),
        (" CUDA:2 ", "cuda", 2, "cuda:2"),
        ("cpu", "cpu", 0, "cpu"),
        ("cpu:0", "cpu", 0, "cpu"),
        ("cpu:3", "cpu", 3, "cpu:3"),
    ],
)
def test_a_name_is_read_and_written(written: str, backend: str, index: int, name: str) -> None:
    device = Device(written)
    assert (device.backend, device.index, str(device)) == (backend, index, name)
    assert Device(str(device)) == device
    assert Device(device) == device


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("cuda:1", 2), "names index 1, but index=2 is"),
        (("cuda", -1), "0 or more"),
        (("cudda:0",), "the backends are cuda, rocm, metal, xpu, tpu, opencl, cpu"),
        (("mps",), "did you mean 'metal'"),
        *(
            ((name,), "does not name a device")
            for name in ("", "cuda:", "cuda:-1", "cuda:x", ":1", "cuda 1", "cuda:1:2", "🎉")
        ),
    ],
)
def test_what_names_no_device_is_refused(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Device(*arguments)


@pytest.mark.parametrize("name", ["hpu:1", "HPU"])
def test_what_only_pytorch_drives_is_said_to_be_that(name: str) -> None:
    import torch

    short = name.lower().partition(":")[0]
    with pytest.raises(ConfigurationError) as caught:
        anydevice.device(name)
    said = str(caught.value)
    assert "PyTorch drives" in said
    assert "anydevice does not yet" in said
    assert f'torch.device("{short}")' in said
    assert "there is no backend" not in said
    with pytest.raises(ConfigurationError, match="anydevice does not yet"):
        anydevice.device(torch.device(short))


def test_equal_by_place_alone_and_unchanging() -> None:
    assert Device("cuda", 3) == Device("cuda:3")
    plain, served = Device("cuda:1"), Device("cuda:1", engine="jax", chosen_by="argument")
    assert plain == served
    assert hash(plain) == hash(served)
    assert len({plain, served, Device("cuda:0")}) == 2
    assert plain != Device("rocm:1")
    assert plain != "cuda:1"
    with pytest.raises(AttributeError, match="does not change"):
        plain.index = 3  # type: ignore[misc]
    assert repr(Device("cuda:1", engine="jax")) == """Device("cuda:1", engine='jax')"""
    assert repr(Device("cpu")) == 'Device("cpu")'


def test_it_survives_pickling_with_its_engine() -> None:
    device = Device("cuda:1", engine="jax", chosen_by="argument")
    copy = pickle.loads(pickle.dumps(device))
    assert copy == device
    assert (copy.engine, copy.chosen_by) == ("jax", "argument")
    seen = anydevice.devices("cpu")[0]
    assert pickle.loads(pickle.dumps(seen)) == seen


def test_a_device_of_an_added_backend_can_be_unpickled_without_its_probe() -> None:
    npu = BackendScan("npu", True, (RawDevice(0, "gpu", Facts(name="N1")),), engines=("numpy",))
    with testing.fake_machine(keep_settings=True, scans=[npu]):
        pickled = pickle.dumps(anydevice.device("npu"))
    assert str(pickle.loads(pickled)) == "npu:0"
    assert not pickle.loads(pickled).usable


def test_it_has_one_device_for_each_engine() -> None:
    """Asked for with every array, such as by `device_of`, it is made once."""
    x = np.ones(2)
    assert anydevice.device_of(x) is anydevice.device_of(x)
    place = Device("cpu")
    served = place.served_by("torch")
    assert place.served_by("torch") is served
    assert (served.engine, served.engine_asked) == ("torch", "torch")
    picked = place.served_by("torch", picked=True)
    assert (picked.engine, picked.engine_is_free) == ("torch", True)
    assert not served.engine_is_free
    assert place.served_by("torch", "argument").chosen_by == "argument"
    assert place.served_by("torch").chosen_by is None


def test_a_device_that_is_not_here_says_so() -> None:
    with testing.fake_machine(keep_settings=True, cuda=1):
        absent = Device("cuda:7")
        assert not absent.usable
        assert absent.why_not == "this machine has no cuda:7"
        assert absent.engine is None
        assert absent.status is None
        with pytest.raises(DeviceNotFoundError, match="has no cuda:7") as caught:
            _ = absent.facts
        assert {finding.backend for finding in caught.value.findings} >= {"cuda", "cpu"}
        with pytest.raises(DeviceNotFoundError, match="no installed library drives cuda:7"):
            _ = absent.native
        with pytest.raises(DeviceNotFoundError, match="cannot be checked"):
            absent.check()
        assert absent.to_dict()["facts"] is None


@pytest.mark.needs("torch")
def test_a_device_made_by_hand_knows_what_discovery_knows() -> None:
    with testing.fake_machine(keep_settings=True, cuda=2, memory="80GiB", free="70GiB"):
        device = Device("cuda:1")
        assert device.usable
        assert device.why_not is None
        assert device.kind == "gpu"
        assert device.facts.total_memory == 80 * 2**30
        assert device.facts.free_memory == 70 * 2**30
        assert device.facts.compute_capability == "9.0"
        assert device.engine == "torch"
    with testing.fake_machine(keep_settings=True, opencl=1):
        assert Device("opencl:0").kind == "gpu"
        assert Device("opencl:5").kind == "gpu"


def test_free_memory_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    from anydevice._machine.hardware.cpu import reader as cpu

    device = Device("cpu")
    monkeypatch.setattr(cpu, "free_memory", lambda index, facts: 12345)
    assert device.facts.free_memory == 12345
    monkeypatch.setattr(cpu, "free_memory", lambda index, facts: None)
    assert device.facts == device.status.facts


def test_native_and_as_plain_data() -> None:
    import torch

    assert anydevice.device("cpu", engine="torch").native == torch.device("cpu")
    plain = anydevice.device("cpu").to_dict()
    expected = {"device": "cpu", "kind": "cpu", "usable": True, "why_not": None}
    assert plain.items() >= expected.items()
    assert {"name", "uuid", "pci_address", "memory_kind", "total_memory"} <= plain["facts"].keys()


@pytest.mark.needs("torch")
def test_calling_it_moves() -> None:
    import numpy

    x = {"a": [numpy.arange(3.0), "text"], "b": (None, 1)}
    moved = anydevice.device("cpu", engine="torch")(x)
    assert type(moved["a"][0]).__module__ == "torch"
    assert moved["a"][1] == "text"
    assert moved["b"] == (None, 1)
    back = anydevice.to_numpy(moved)
    assert_same_bits(back["a"][0], x["a"][0], because="it was only copied")


def test_errors_carry_what_they_say() -> None:
    from anydevice import errors

    full = errors.OutOfMemoryError("full", asked=3, free=1, total=2, advice=["a smaller batch"])
    assert isinstance(full, MemoryError)
    assert (full.asked, full.free, full.total, full.advice) == (3, 1, 2, ("a smaller batch",))
    wrong = errors.VerificationError("off", where="softmax", shapes=[(2, 3)], largest_error=0.5)
    assert (wrong.where, wrong.shapes, wrong.largest_error) == ("softmax", ((2, 3),), 0.5)
    assert errors.DeviceMismatchError("two", ("a", "b")).paths == ("a", "b")
    assert errors.TransferError("x", "layers[3]").path == "layers[3]"
    for error in (full, wrong):
        assert isinstance(error, errors.AnyDeviceError)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
