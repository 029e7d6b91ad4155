"""What was measured decides which engine serves a device, until something changes."""

from __future__ import annotations

from pathlib import Path

import pytest

import anydevice
from anydevice import testing
from anydevice.bench.measuring import save
from anydevice.choose.measurements import read_measurements
from anydevice.choose.scope import why
from anydevice.discovery import _discover as discovery
from anydevice.settings.files import measurements_file

from .tiny import measurement, results

pytest.importorskip("torch", reason="a second engine of the CPU")

FASTER_TORCH = results(
    measurement("add"),
    measurement("add", 2e-4, engine="torch"),
    measurement("matmul", 5.0),  # not common to both
    measurement("sum", 1e-3),
    measurement("sum", 4e-4, engine="torch"),
)


def test_device_takes_the_engine_that_was_fastest(own_home: Path) -> None:
    assert anydevice.device("cpu").engine == "numpy"
    assert save(FASTER_TORCH) is None
    assert measurements_file() == own_home / "measurements.json"
    assert anydevice.device("cpu").engine == "torch"
    assert anydevice.Device("cpu").engine == "torch"
    assert anydevice.device("cpu", engine="numpy").engine == "numpy"
    [step] = [step for step in why("cpu").steps if step.source == "saved measurements"]
    assert step.taken
    assert step.outcome == (
        "torch was the fastest of those measured here: 2 calls in 600 µs, numpy 2.00 ms"
    )


def test_what_is_placed_goes_to_that_engine_at_once() -> None:
    import numpy as np

    assert isinstance(anydevice.to_device(np.ones(3), "cpu"), np.ndarray)
    save(FASTER_TORCH)
    assert type(anydevice.to_device(np.ones(3), "cpu")).__module__ == "torch"


def test_a_later_run_replaces_what_it_measured_and_keeps_the_rest() -> None:
    save(FASTER_TORCH)
    save(results(measurement("add", 1e-6), measurement("sum", 1e-6)))
    assert anydevice.device("cpu").engine == "numpy"
    times = [times for key, times in read_measurements().items() if "numpy" in key]
    assert [len(each) for each in times] == [3]


def test_only_what_was_measured_on_a_device_of_this_machine_is_kept() -> None:
    save(
        results(
            measurement(device="cuda:7"),
            measurement(seconds=0.0, state="failed", reason="no"),
        )
    )
    assert read_measurements() == {}


def test_another_version_of_a_library_makes_it_void(monkeypatch: pytest.MonkeyPatch) -> None:
    from anydevice.choose import measurements
    from anydevice.discovery.verdicts import key_of

    save(FASTER_TORCH)
    monkeypatch.setattr(measurements, "key_of", lambda *facts: f"{key_of(*facts)} newer")
    assert anydevice.device("cpu").engine == "numpy"


def test_where_it_cannot_be_written_that_is_said(own_home: Path) -> None:
    (own_home / "measurements.json").mkdir()
    assert "could not be kept" in (save(FASTER_TORCH) or "")


def test_each_card_has_its_own(own_home: Path) -> None:
    pytest.importorskip("jax", reason="a second engine of the made-up cards")
    with testing.fake_machine(cuda=2, engines=("torch", "jax"), keep_settings=True):
        run = results(
            measurement(device="cuda:1", engine="torch"),
            measurement(device="cuda:1", engine="jax", seconds=1e-5),
        )
        save(run)
        discovery.discover(refresh=True)
        engines = {str(each): each.engine for each in anydevice.devices("cuda")}
    assert engines["cuda:1"] == "jax"
