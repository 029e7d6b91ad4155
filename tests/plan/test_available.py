"""Available memory: which devices a plan may use, by any name, and what each has for a model."""

from __future__ import annotations

from typing import Any

import pytest

import anydevice
from anydevice import plan_inference, testing
from anydevice._core.finding import BackendScan, Facts, RawDevice
from anydevice._machine.discovery import discover as discovery
from anydevice._plan import plan as planning
from anydevice._plan.estimates import CONTEXT
from anydevice._plan.plan import AvailableMemory, available_memory, device_groups
from anydevice.errors import ConfigurationError, DeviceNotFoundError
from tests.plan.configs import LLAMA_8B

GIB = 2**30


@pytest.mark.parametrize(
    ("names", "error", "said"),
    [
        (["cuda:0", "cuda:7"], DeviceNotFoundError, "cuda:7 is not usable"),
        ("metal", DeviceNotFoundError, "metal:0 is not usable"),
        ("tpu", DeviceNotFoundError, "no tpu of this machine"),
        ([], ConfigurationError, "no device is named"),
        ([7], ConfigurationError, "is not a device"),
    ],
)
def test_names_without_a_device(names: Any, error: type[Exception], said: str) -> None:
    with testing.fake_machine(cuda=1), pytest.raises(error, match=said):
        plan_inference(LLAMA_8B, names, context=1)


def names(memories: Any) -> list[str]:
    return [str(memory.device) for memory in memories]


def test_devices_by_kind_as_objects_and_only_once() -> None:
    with testing.fake_machine(cuda=2) as report:
        found, notes = available_memory(["gpu", report.devices[0], "cuda:1"])
    assert names(found) == ["cuda:0", "cuda:1"]
    assert notes == ()


def test_devices_may_come_from_any_collection() -> None:
    with testing.fake_machine(cuda=2):
        for places in ({"cuda:1"}, (name for name in ["cuda:1"]), {"cuda:1": None}.keys()):
            assert names(available_memory(places)[0]) == ["cuda:1"]


def test_the_processor_counts_once_with_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    with testing.fake_machine() as report:
        assert len([device for device in report.devices if device.backend == "cpu"]) == 8
        for places in (None, "cpu", ["cpu"]):
            assert names(available_memory(places)[0]) == ["cpu"]
        assert names(available_memory("cpu:3")[0]) == ["cpu:3"]


def test_a_library_s_own_device() -> None:
    torch = pytest.importorskip("torch")
    found, _ = available_memory(torch.device("cpu"))
    assert names(found) == ["cpu"]


@pytest.mark.needs("torch")
def test_one_card_seen_through_two_backends_counts_once() -> None:
    facts = Facts("one card", uuid="GPU-7", total_memory=8 * GIB, free_memory=8 * GIB)
    seen = (RawDevice(0, "gpu", facts),)
    scans = [
        BackendScan("cuda", present=True, devices=seen, engines=("torch",)),
        BackendScan("opencl", present=True, devices=seen, engines=("torch",)),
    ]
    with testing.fake_machine(scans=scans):
        everything, _ = available_memory(None)
        both, _ = available_memory(["cuda", "opencl"])
    assert [each.device.backend for each in everything] == ["cuda", "cpu"]
    groups = [[each.device.backend for each in group.devices] for group in device_groups(both)]
    assert groups == [["cuda"], ["opencl"]]


def test_unified_memory_is_not_counted_twice() -> None:
    with testing.fake_machine(metal=1, memory="8GiB"):
        found, _ = available_memory(None)
    groups = [names(group.devices) for group in device_groups(found)]
    assert groups == [["metal:0"], ["cpu"]]


@pytest.mark.needs("torch")
def test_the_processor_seen_through_opencl_is_only_used_by_name() -> None:
    facts = Facts("a CPU", memory_kind="host", total_memory=GIB)
    pocl = BackendScan("opencl", True, (RawDevice(0, "cpu", facts),), engines=("torch",))
    with testing.fake_machine(scans=[pocl]):
        assert names(available_memory(None)[0]) == ["cpu"]
        assert names(available_memory("opencl")[0]) == ["opencl:0"]


def test_what_discovery_has_just_read_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    read = discovery.FREE_MEMORY["cpu"]()

    def free(index: int, facts: Facts) -> int | None:
        asked.append(index)
        return read(index, facts)

    monkeypatch.setitem(discovery.FREE_MEMORY, "cpu", lambda: free)
    monkeypatch.setattr(planning.registry, "loaded_engines", lambda: ())
    discovery.forget_report()
    planning.look_ahead()
    first, _ = available_memory("cpu")
    assert asked == []
    planning.look_ahead()  # it was looked at: that changes nothing
    monkeypatch.setattr(planning, "_RECENT", -1.0)
    second, _ = available_memory("cpu")
    assert asked == [0]
    assert first[0].free > 0 < second[0].free


def test_a_limit_does_not_count_the_context_of_the_driver() -> None:
    device = anydevice.Device("cuda:0")
    assert AvailableMemory(device, 80 * GIB, 40 * GIB).bytes == 40 * GIB + CONTEXT
    assert AvailableMemory(device, 40 * GIB, 40 * GIB).bytes == 40 * GIB
    assert AvailableMemory(device, 80 * GIB).bytes == 80 * GIB
    assert AvailableMemory(device, 0, 40 * GIB).bytes == 0
