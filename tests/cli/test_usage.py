"""One look at a card, with real readings of the CPU and made-up cards."""

from __future__ import annotations

import json

import pytest

from anydevice import testing
from anydevice._core.finding import BackendScan, Facts, RawDevice
from anydevice._machine.hardware.readers import Readings
from anydevice.cli.watch import DeviceUsage, cards_among, usage_of
from anydevice.errors import ConfigurationError, DeviceNotFoundError

MIB, GIB = 2**20, 2**30


def test_a_look_at_the_cpu() -> None:
    seen = usage_of(cards_among(["cpu"])[0])
    assert (seen.device, seen.also) == ("cpu", ())
    assert seen.pressure in ("low", "medium", "high", "critical")
    assert seen.processes
    data = json.loads(json.dumps(seen.to_dict()))
    assert data["free"] == seen.free
    assert "free_memory" not in data
    assert data["processes"][0]["pid"] == seen.processes[0].pid


def test_a_card_by_two_names_is_one() -> None:
    card = Facts("a card", uuid="GPU-1", total_memory=GIB, free_memory=MIB, details={"fake": True})
    processor = Facts("PoCL", total_memory=GIB)
    scans = (
        BackendScan("cuda", True, (RawDevice(0, "gpu", card),), engines=("torch",)),
        BackendScan("opencl", True, (RawDevice(0, "gpu", card), RawDevice(1, "cpu", processor))),
    )
    with testing.fake_machine(scans=scans):
        cards = cards_among()
        assert [[str(device) for device in card] for card in cards] == [
            ["cuda:0", "opencl:0"],
            ["cpu"],
        ]
        seen = usage_of(cards[0])
        assert (seen.device, seen.also, seen.taken) == ("cuda:0", ("opencl:0",), GIB - MIB)
        assert [str(card[0]) for card in cards_among(["opencl"])] == ["cuda:0", "opencl:1"]
        unknown = usage_of(cards_among(["opencl:1"])[0])
        assert (unknown.taken, unknown.pressure, unknown.usable) == (None, None, GIB)
        with pytest.raises(DeviceNotFoundError, match="this machine has no rocm"):
            cards_among(["rocm"])
        with pytest.raises(ConfigurationError, match="--device: there is no backend 'dreams'"):
            cards_among(["dreams"])


def test_a_driver_that_counts_more_than_there_is() -> None:
    seen = DeviceUsage("x:0", "x", GIB, GIB, Readings(free_memory=2 * GIB))
    assert (seen.taken, seen.pressure) == (0, "low")
