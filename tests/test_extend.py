"""`anydevice.extend`, for packages that add engines and probes, and the old names that it has."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

import anydevice
from anydevice import Device, extend, testing
from anydevice.extend import BackendScan, Reason
from tests.programs import output_of

RECIPE_OF_0_2 = {
    "anydevice.core.device": {"Device": "Device"},
    "anydevice.core.engine": {"Absent": "Absent", "MemoryUse": "MemoryUse"},
    "anydevice.core.finding": {"Seen": "RawDevice", "Sighting": "BackendScan", "Facts": "Facts"},
    "anydevice.engines.base": {"BaseEngine": "BaseEngine"},
    "anydevice.engines.host": {"known_dtype": "known_dtype", "private": "private"},
    "anydevice.engines.registry": {"EngineRow": "EngineRow", "load": "load_engine"},
}
"""The modules that CONTRIBUTING and the documentation of 0.2 imported, with the new names."""


def test_importing_it_loads_no_array_library() -> None:
    program = (
        "import sys, anydevice.extend\n"
        "heavy = {'numpy', 'torch', 'jax', 'mlx', 'cupy', 'pyopencl'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "anydevice.extend.EngineRow, anydevice.extend.BackendScan\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    output_of("-c", program)


@pytest.mark.parametrize("name", extend.__all__)
def test_every_name_is_there_and_says_what_it_is(name: str) -> None:
    assert getattr(extend, name).__doc__


def test_the_type_checker_sees_every_name() -> None:
    text = Path(str(extend.__file__)).read_text("utf-8")
    imported = re.findall(r"^    from anydevice\S* import (\w+) as \1$", text, re.MULTILINE)
    assert sorted([*imported, "load_engine"]) == extend.__all__


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [(module, *pair) for module, names in RECIPE_OF_0_2.items() for pair in names.items()],
)
def test_a_name_of_0_2_warns_and_is_the_new_one(module: str, old: str, new: str) -> None:
    told = rf"^{re.escape(module)}\.{old} is now anydevice\.extend\.{new}; .* 0\.4$"
    with pytest.warns(DeprecationWarning, match=told) as caught:
        value = getattr(import_module(module), old)
    assert value is getattr(extend, new)
    assert caught[0].filename == __file__


def test_a_name_that_was_never_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Decive'"):
        _ = import_module("anydevice.core.device").Decive


def test_the_old_names_of_a_status_and_a_scan_warn() -> None:
    device = Device("cpu")
    with pytest.warns(DeprecationWarning, match="now Device.status"):
        assert device.standing == device.status
    asleep = BackendScan("cuda", present=True, stage="driver", reason=Reason("x", "asleep"))
    with (
        pytest.warns(DeprecationWarning, match="sightings= is now scans="),
        testing.fake_machine(sightings=[asleep]),
    ):
        assert anydevice.discover()["cuda"].reason == "asleep"
