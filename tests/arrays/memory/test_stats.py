"""The figures of a device's memory, with real libraries on the CPU and made-up cards."""

from __future__ import annotations

import gc
import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy
import pytest

import anydevice
from anydevice import testing
from anydevice._arrays.memory.stats import MemoryStats, PeakMeter, memory_stats, pressure_of
from anydevice._core.device import Device
from anydevice._core.engine import MemoryUse
from anydevice._core.finding import BackendScan, Facts, RawDevice
from anydevice._machine.choose import scope
from anydevice._machine.engines import registry
from anydevice.errors import DeviceNotFoundError
from tests.programs import output_of

MIB, GIB = 2**20, 2**30


def stats(**changes: Any) -> MemoryStats:
    sizes = {"total": 100, "usable": 100, "free": 30, "in_use": 10, "reserved": 10, "peak": 20}
    given: dict[str, Any] = {name: size * GIB for name, size in sizes.items()}
    return MemoryStats(**{"device": "cuda:0", **given, **changes})


@pytest.mark.parametrize(
    ("free", "pressure"),
    [
        *((100, "low"), (41, "low"), (40, "medium"), (21, "medium")),
        *((20, "high"), (6, "high"), (5, "critical"), (0, "critical")),
    ],
)
def test_pressure(free: int, pressure: str) -> None:
    assert pressure_of(100, free) == pressure
    assert stats(free=free * GIB).pressure == pressure


def test_pressure_where_the_size_is_unknown() -> None:
    assert pressure_of(None, 5) is None
    assert pressure_of(0, 0) is None
    assert pressure_of(100, None) is None
    assert stats(usable=None, free=None).pressure is None
    assert stats(usable=None).available == 30 * GIB


def test_memory_that_this_process_holds_and_does_not_use_is_available() -> None:
    jax = stats(free=5 * GIB, in_use=2 * GIB, reserved=75 * GIB, preallocated=True)
    assert (jax.available, jax.pressure) == (78 * GIB, "low")
    # Whatever the sums say, there is never more than all of it.
    assert stats(free=90 * GIB, reserved=75 * GIB).available == 100 * GIB

    assert stats(free=None, in_use=90 * GIB).pressure == "high"
    assert stats(free=None, in_use=None, reserved=None).available == 100 * GIB


def test_in_words_and_as_data() -> None:
    engines = {"jax": MemoryUse(2 * GIB, 75 * GIB, 20 * GIB, preallocated=True)}
    taken = {"free": 5 * GIB, "in_use": 2 * GIB, "reserved": 75 * GIB}
    told = stats(**taken, preallocated=True, engines=engines)
    assert str(told) == (
        "cuda:0: 5.0 GiB free of 100.0 GiB usable, 2.0 GiB in use by this process, "
        "75.0 GiB reserved, taken ahead of need, peak 20.0 GiB, pressure low"
    )
    data = json.loads(json.dumps(told.to_dict()))
    assert (data["pressure"], data["available"], data["preallocated"]) == ("low", 78 * GIB, True)
    assert data["engines"]["jax"]["reserved"] == 75 * GIB
    assert hash(told) == hash(stats(**taken))
    unknown = stats(total=None, usable=None, free=None, in_use=None, reserved=None, peak=None)
    assert str(unknown) == "cuda:0: unknown usable"


def test_the_cpu_tells_of_the_whole_process() -> None:
    before = memory_stats("cpu")
    assert (before.device, before.preallocated) == ("cpu", False)
    assert before.in_use is not None
    assert before.in_use == before.reserved
    held = numpy.ones(256 * MIB // 8)
    after = memory_stats(Device("cpu"))
    assert after.in_use - before.in_use > 200 * MIB
    assert after.peak >= after.in_use
    del held
    freed = memory_stats("cpu")
    assert freed.in_use < after.in_use
    assert freed.peak >= after.peak - 16 * MIB  # the kernel counts a peak roughly


def test_without_a_device_it_is_the_chosen_one() -> None:
    with testing.fake_machine(cuda=2, memory="80GiB", free=["10GiB", "70GiB"]):
        assert memory_stats().device == "cuda:1"
        told = memory_stats("cuda:0")
        assert (told.free, told.pressure) == (10 * GIB, "high")
        assert (told.in_use, told.reserved, told.peak) == (0, 0, 0)


def test_what_is_said_of_the_choice_points_at_who_asked() -> None:
    with testing.fake_machine():
        for ask in (memory_stats, anydevice.synchronize, anydevice.device):
            scope.forget_warnings()
            with pytest.warns(UserWarning, match="using cpu: no accelerator") as said:
                ask()
            assert [each.filename for each in said] == [__file__]


def test_a_device_that_is_not_here() -> None:
    with testing.fake_machine():
        with pytest.raises(DeviceNotFoundError):
            memory_stats("cuda:0")
        with pytest.raises(DeviceNotFoundError, match="this machine has no cuda:0"):
            memory_stats(Device("cuda:0"))


def test_an_engine_that_counts_is_asked() -> None:
    if not anydevice.devices("opencl"):
        pytest.skip("no OpenCL driver is installed")
    gc.collect()  # garbage of earlier tests would be freed while this one counts
    before = memory_stats("opencl")
    array = anydevice.to_device(numpy.ones(4 * MIB, "uint8"), "opencl")
    after = memory_stats("opencl")
    assert set(after.engines) == {"opencl"}
    assert after.in_use - before.in_use >= 4 * MIB
    assert after.peak >= after.in_use
    del array


def counting(name: str, *held: MemoryUse | None, sees: bool = True) -> Any:
    """An engine that holds so much of every device, or does not see it."""
    error = None if sees else DeviceNotFoundError("it is not here")
    use = Mock(side_effect=error, return_value=held[0] if held else None)
    return SimpleNamespace(name=name, memory=SimpleNamespace(use=use))


@pytest.mark.needs("torch")
def test_several_libraries_on_one_card_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = {
        "torch": counting("torch", MemoryUse(GIB, 2 * GIB)),
        "jax": counting("jax", MemoryUse(3 * GIB, 60 * GIB, peak=5 * GIB, preallocated=True)),
        "cupy": counting("cupy", sees=False),
        "numpy": counting("numpy"),
    }
    monkeypatch.setattr(registry, "loaded_engines", lambda: tuple(engines))
    monkeypatch.setattr(registry, "load", engines.__getitem__)
    monkeypatch.setattr(registry, "jax_started", lambda: True)
    with testing.fake_machine(cuda=1, memory="80GiB", free="15GiB", engines=["torch"]):
        told = memory_stats("cuda:0")
        assert (told.in_use, told.reserved, told.peak) == (4 * GIB, 62 * GIB, 6 * GIB)
        assert (told.preallocated, told.pressure) == (True, "low")
        assert set(told.engines) == {"torch", "jax"}
        # One that is imported and was not started holds nothing, and must not be started.
        monkeypatch.setattr(registry, "jax_started", lambda: False)
        assert set(memory_stats("cuda:0").engines) == {"torch"}
        engines["torch"] = counting("torch")
        assert memory_stats("cuda:0").engines == {}


def test_a_card_is_asked_under_its_other_name_too() -> None:
    card = Facts("a card", uuid="GPU-1", total_memory=GIB, details={"fake": True})
    free = Facts("a card", uuid="GPU-1", total_memory=GIB, free_memory=MIB, details={"fake": True})
    scans = (
        BackendScan("cuda", True, (RawDevice(0, "gpu", free),), engines=("torch",)),
        BackendScan(
            "opencl", True, (RawDevice(0, "gpu", card), RawDevice(1, "gpu", Facts("another")))
        ),
    )
    with testing.fake_machine(scans=scans):
        assert memory_stats(Device("opencl:0")).free == MIB
        assert memory_stats(Device("opencl:1")).free is None


def test_no_library_is_imported_or_started_for_it() -> None:
    code = (
        "import sys, anydevice\n"
        "print(anydevice.memory_stats('cpu').pressure)\n"
        "assert not {'numpy', 'torch', 'jax', 'mlx', 'pyopencl'} & set(sys.modules)\n"
    )
    assert output_of("-c", code).strip() in ("low", "medium", "high", "critical")
    code = (
        "import jax, anydevice\n"
        "from anydevice._machine.engines.library_settings import jax_started\n"
        "anydevice.memory_stats('cpu')\n"
        "assert not jax_started()\n"
    )
    output_of("-c", code)


def fill(size: int) -> None:
    """Use memory and return it."""
    numpy.ones(size, numpy.uint8)


def test_meters_within_each_other_have_the_peaks_of_their_own_time() -> None:
    outer = PeakMeter(Device("cpu"))
    fill(256 * MIB)
    if outer.peak is None:
        pytest.skip("this system does not start a peak again")
    inner = PeakMeter(Device("cpu"))
    fill(64 * MIB)
    for meter, size in ((outer, 256 * MIB), (inner, 64 * MIB)):
        assert meter.peak is not None
        assert meter.before is not None
        assert abs(meter.peak - meter.before - size) < 32 * MIB


@pytest.mark.needs("torch")
def test_a_peak_that_a_library_does_not_count_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = counting("torch", MemoryUse(GIB, 2 * GIB))
    engine.memory.reset_peak = Mock()
    monkeypatch.setattr(registry, "loaded_engines", lambda: ("torch",))
    monkeypatch.setattr(registry, "load", lambda _: engine)
    with testing.fake_machine(cuda=1, memory="80GiB", free="15GiB", engines=["torch"]):
        assert PeakMeter(Device("cuda:0")).peak is None
        engine.memory.use = Mock(return_value=MemoryUse(GIB, 2 * GIB, peak=GIB))
        meter = PeakMeter(Device("cuda:0"))
        engine.memory.use = Mock(return_value=MemoryUse(GIB, 2 * GIB, peak=2 * GIB))
        assert (meter.before, meter.peak) == (GIB, 2 * GIB)
