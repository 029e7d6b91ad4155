"""The file of measurements, and what the choice makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from anydevice._core.choice import Choice, Measured, Request, Wish, choose, pick_engine
from anydevice._core.device import Device
from anydevice._core.finding import DeviceStatus, Facts, Finding
from anydevice._machine.choose.measurements import (
    keep_measurements,
    measured_engine,
    measured_engines,
    read_measurements,
)
from anydevice._machine.discovery.check import key_of
from anydevice._machine.discovery.discover import Report
from anydevice._machine.settings.files import measurements_file
from anydevice._report.choice import because

CARD = Facts("card", uuid="GPU-1", driver_version="580")


def finding(backend: str, *engines: str) -> Finding:
    kind = "cpu" if backend == "cpu" else "gpu"
    device = Device.seen(backend, 0, DeviceStatus(kind, CARD, engines))  # type: ignore[arg-type]
    return Finding(backend, True, True, "stable", (device,))


CUDA = finding("cuda", "torch", "jax", "cupy")
CPU = finding("cpu", "numpy", "torch")


def key(engine: str, facts: Facts = CARD) -> str:
    return key_of("cuda", 0, facts, engine)


def pick(*findings: Finding, **request: object) -> Choice:
    return choose(Request(**request), findings, lambda device: None)  # type: ignore[arg-type]


JAX_FIRST = Measured("cuda:0", (("jax", 0.5), ("torch", 1.5)), 60)


def test_the_fastest_engine_serves_and_the_step_comes_before_the_order_of_backends() -> None:
    choice = pick(CUDA, CPU, measured=(JAX_FIRST,), loaded=frozenset({"torch"}))
    assert (str(choice.device), choice.device.engine) == ("cuda:0", "jax")
    assert choice.device.chosen_by == "order of backends"
    assert [step.source for step in choice.steps] == ["saved measurements", "order of backends"]
    assert choice.steps[0].outcome == (
        "jax was the fastest of those measured here: 60 calls in 500 ms, torch 1.50 s"
    )
    assert choice.passed_over == ()
    assert because(Report((CUDA, CPU), "cuda"), choice) == (
        "it is the first usable one in the order of backends; "
        "jax serves it, the fastest measured here"
    )


def test_it_decides_for_a_device_that_is_asked_for_too() -> None:
    wish = Wish("argument", ("cuda:0",), binding=True)
    choice = pick(CUDA, CPU, wishes=(wish,), measured=(JAX_FIRST,))
    assert (choice.device.engine, choice.device.chosen_by) == ("jax", "argument")


def test_it_comes_after_the_configured_order() -> None:
    here = Measured("cpu", (("torch", 0.5), ("numpy", 1.5)), 1)
    choice = pick(CUDA, CPU, order=("cpu",), measured=(JAX_FIRST, here))
    assert (str(choice.device), choice.device.engine) == ("cpu", "torch")
    assert str(here).endswith("1 call in 500 ms, numpy 1.50 s")


def test_an_engine_that_is_asked_for_wins_and_the_step_says_so() -> None:
    choice = pick(
        CUDA, CPU, engine="torch", engine_source="ANYDEVICE_ENGINE", measured=(JAX_FIRST,)
    )
    assert choice.device.engine == "torch"
    step = choice.steps[0]
    assert (step.taken, step.ignored) == (False, True)
    assert step.outcome.endswith("torch is asked for by ANYDEVICE_ENGINE")
    assert "measured" not in because(Report((CUDA, CPU), "cuda"), choice)
    unnamed = pick(CUDA, CPU, engine="torch", measured=(JAX_FIRST,))
    assert unnamed.steps[0].outcome.endswith("torch is asked for")


def test_an_engine_that_no_longer_drives_the_device_is_not_taken() -> None:
    only_torch = finding("cuda", "torch")
    choice = pick(only_torch, CPU, measured=(JAX_FIRST,))
    assert choice.device.engine == "torch"
    assert [step.source for step in choice.steps] == ["order of backends"]


def test_without_measurements_everything_is_as_before() -> None:
    assert pick_engine(Device("cpu"), ("numpy", "torch"), {"torch"}) == "numpy"
    assert pick_engine(Device("cpu"), ("numpy", "torch"), (), "torch") == "torch"
    assert pick_engine(Device("cpu"), ("numpy", "torch"), (), "jax") == "numpy"


def test_engines_are_compared_by_what_all_were_measured_with(home: Path) -> None:
    keep_measurements(
        {
            key("torch"): {"add": 1.0, "matmul": 1.0, "sum": 100.0},
            key("jax"): {"add": 0.25, "matmul": 0.25, "erf": 100.0},
        }
    )
    assert measured_engines(CUDA.devices) == (
        Measured("cuda:0", (("jax", 0.5), ("torch", 2.0)), 2),
    )
    assert measured_engine(CUDA.devices[0]) == "jax"


def test_one_engine_is_nothing_to_compare(home: Path) -> None:
    assert measured_engine(CUDA.devices[0]) is None
    keep_measurements({key("torch"): {"add": 1.0}})
    assert measured_engine(CUDA.devices[0]) is None
    keep_measurements({key("jax"): {"sum": 1.0}})
    assert measured_engine(CUDA.devices[0]) is None  # nothing in common
    keep_measurements({key("jax"): {"add": 2.0}})
    assert measured_engine(CUDA.devices[0]) == "torch"


@pytest.mark.parametrize(
    "facts",
    [Facts("card", uuid="GPU-2", driver_version="580"), Facts("card", uuid="GPU-1")],
    ids=["another card", "another driver"],
)
def test_what_was_measured_elsewhere_is_stale(home: Path, facts: Facts) -> None:
    keep_measurements({key("torch", facts): {"add": 1.0}, key("jax", facts): {"add": 0.5}})
    assert measured_engines(CUDA.devices) == ()


def test_a_device_that_is_not_here_has_no_measurements(home: Path) -> None:
    keep_measurements({key("torch"): {"add": 1.0}})
    assert measured_engine(Device("tpu:7")) is None


@pytest.mark.parametrize(
    "damage", ['{"k": 3}', '{"k": {"add": "soon"}}', '{"k": {"add": -1}}', '{"k": {"add": true}}']
)
def test_a_damaged_measurement_counts_for_nothing(home: Path, damage: str) -> None:
    measurements_file().write_text(damage)
    assert read_measurements() == {}
    assert keep_measurements({"k": {"add": 1.0}}) is None
    assert read_measurements() == {"k": {"add": 1.0}}


@pytest.mark.parametrize("damage", ["", "{", "[]", "3", "\0", '{"k": {"add": Infinity}}'])
def test_a_damaged_file_counts_for_nothing_and_is_named(home: Path, damage: str) -> None:
    measurements_file().write_text(damage)
    with pytest.warns(UserWarning, match=r"measurements\.json is not used"):
        assert read_measurements() == {}
    assert keep_measurements({"k": {"add": 1.0}}) is None
    assert read_measurements() == {"k": {"add": 1.0}}


def test_the_file_is_read_again_when_it_changes(home: Path) -> None:
    keep_measurements({"k": {"add": 1.0}})
    assert read_measurements() is read_measurements()
    keep_measurements({"k": {"add": 22.0}})
    assert read_measurements() == {"k": {"add": 22.0}}
    measurements_file().unlink()
    assert read_measurements() == {}


def test_where_it_cannot_be_written_that_is_said(home: Path) -> None:
    measurements_file().mkdir()
    said = keep_measurements({"k": {"add": 1.0}})
    assert said.startswith("the measurements could not be kept in")
