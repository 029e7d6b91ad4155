"""Rooms: which devices a plan may use, named in any way, and what each has for a model."""

from __future__ import annotations

import pytest
from tests.memory.test_plans import LLAMA

import anydevice
from anydevice import plan_inference, testing
from anydevice.core.finding import Facts, Seen, Sighting
from anydevice.discovery import _discover as discovery
from anydevice.errors import ConfigurationError, DeviceNotFoundError
from anydevice.memory.stats import MemoryStats, memory_stats
from anydevice.planning import available as rooms
from anydevice.planning.available import Room, rooms_of
from anydevice.planning.overheads import CONTEXT
from anydevice.planning.placement import groups_of

GIB = 2**30


def test_devices_that_are_not_there_or_not_devices() -> None:
    with testing.fake_machine(cuda=1):
        with pytest.raises(DeviceNotFoundError, match="cuda:7 is not usable"):
            plan_inference(LLAMA, ["cuda:0", "cuda:7"], context=1)
        with pytest.raises(DeviceNotFoundError, match="metal:0 is not usable"):
            plan_inference(LLAMA, "metal", context=1)
        with pytest.raises(DeviceNotFoundError, match="no tpu of this machine"):
            plan_inference(LLAMA, "tpu", context=1)
        with pytest.raises(ConfigurationError, match="no device is named"):
            plan_inference(LLAMA, [], context=1)
        with pytest.raises(ConfigurationError, match="is not a device"):
            plan_inference(LLAMA, [7], context=1)


def test_devices_by_kind_as_objects_and_only_once() -> None:
    with testing.fake_machine(cuda=2) as report:
        found, notes = rooms_of(["gpu", report.devices[0], "cuda:1"])
    assert [str(room.device) for room in found] == ["cuda:0", "cuda:1"]
    assert notes == ()


def test_devices_may_come_from_any_collection() -> None:
    with testing.fake_machine(cuda=2):
        for places in ({"cuda:1"}, (name for name in ["cuda:1"]), {"cuda:1": None}.keys()):
            assert [str(room.device) for room in rooms_of(places)[0]] == ["cuda:1"]


def test_the_processor_counts_once_however_many_devices_jax_makes_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    with testing.fake_machine() as report:
        assert len([device for device in report.devices if device.backend == "cpu"]) == 8
        for places in (None, "cpu", ["cpu"]):
            assert [str(room.device) for room in rooms_of(places)[0]] == ["cpu"]
        assert [str(room.device) for room in rooms_of("cpu:3")[0]] == ["cpu:3"]


def test_a_library_s_own_device() -> None:
    torch = pytest.importorskip("torch")
    found, _ = rooms_of(torch.device("cpu"))
    assert [str(room.device) for room in found] == ["cpu"]


def test_one_card_seen_through_two_backends_counts_once() -> None:
    facts = Facts("one card", uuid="GPU-7", total_memory=8 * GIB, free_memory=8 * GIB)
    seen = (Seen(0, "gpu", facts),)
    sightings = [
        Sighting("cuda", present=True, devices=seen, engines=("torch",)),
        Sighting("opencl", present=True, devices=seen, engines=("torch",)),
    ]
    with testing.fake_machine(sightings=sightings):
        everything, _ = rooms_of(None)
        both, _ = rooms_of(["cuda", "opencl"])
    assert [room.device.backend for room in everything] == ["cuda", "cpu"]
    groups = [[room.device.backend for room in group.rooms] for group in groups_of(both)]
    assert groups == [["cuda"], ["opencl"]]


def test_unified_memory_is_not_counted_twice() -> None:
    with testing.fake_machine(metal=1, memory="8GiB"):
        found, _ = rooms_of(None)
    groups = [[str(room.device) for room in group.rooms] for group in groups_of(found)]
    assert groups == [["metal:0"], ["cpu"]]


def test_the_processor_seen_through_opencl_is_only_used_by_name() -> None:
    facts = Facts("a CPU", memory_kind="host", total_memory=GIB)
    pocl = Sighting("opencl", present=True, devices=(Seen(0, "cpu", facts),), engines=("torch",))
    with testing.fake_machine(sightings=[pocl]):
        assert [str(room.device) for room in rooms_of(None)[0]] == ["cpu"]
        assert [str(room.device) for room in rooms_of("opencl")[0]] == ["opencl:0"]


def test_what_discovery_has_just_read_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[anydevice.Device] = []

    def stats(device: anydevice.Device) -> MemoryStats:
        asked.append(device)
        return memory_stats(device)

    monkeypatch.setattr("anydevice.memory.stats.memory_stats", stats)
    monkeypatch.setattr(rooms.registry, "loaded_engines", lambda: ())
    discovery.forget_report()
    rooms.look_ahead()
    first, _ = rooms_of("cpu")
    assert asked == []
    rooms.look_ahead()  # it was looked at: that changes nothing
    monkeypatch.setattr(rooms, "_ONE_MOMENT", -1.0)
    second, _ = rooms_of("cpu")
    assert asked == [anydevice.Device("cpu")]
    assert first[0].free > 0 < second[0].free


def test_a_limit_does_not_count_the_context_of_the_driver() -> None:
    device = anydevice.Device("cuda:0")
    assert Room(device, 80 * GIB, 40 * GIB).room == 40 * GIB + CONTEXT
    assert Room(device, 40 * GIB, 40 * GIB).room == 40 * GIB
    assert Room(device, 80 * GIB).room == 80 * GIB
    assert Room(device, 0, 40 * GIB).room == 0
