"""Hooks: a layer above registers its function, and is imported when it is first called."""

from __future__ import annotations

import pytest

from anydevice._core.hooks import Hook, load
from tests.programs import output_of


def test_a_home_that_registers_nothing_is_named() -> None:
    hook: Hook[[], None] = Hook("anydevice.errors")
    with pytest.raises(AssertionError, match=r"anydevice\.errors registers no function"):
        hook()


def test_the_home_is_imported_by_the_first_call() -> None:
    code = """
import sys
from anydevice._core.device import Device
above = ("anydevice._machine", "anydevice._arrays", "anydevice._engines")
assert not any(name.startswith(above) for name in sys.modules)
place = Device("cpu")
assert place.kind == "cpu" and str(place) == "cpu"
assert not any(name.startswith(above) for name in sys.modules)
assert place.usable
assert "anydevice._machine.discovery.discover" in sys.modules
assert "anydevice._arrays.move" not in sys.modules
assert place([1]) == [1]
assert "anydevice._arrays.move" in sys.modules
"""
    output_of("-c", code)


def test_a_module_can_be_loaded_too() -> None:
    import anydevice.errors

    assert load("anydevice.errors") is anydevice.errors
