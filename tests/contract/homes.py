"""Where computing is tested: each engine that runs here, on one device of each of its backends."""

from __future__ import annotations

import os
from typing import Any

import pytest

from anydevice._core.device import Device
from anydevice._core.engine import Engine
from anydevice._machine.engines import registry
from anydevice.errors import AnyDeviceError


def homes() -> list[Any]:
    """Parameters for a fixture; one that was asked for and cannot run is a text that says why."""
    required = os.environ.get("ANYDEVICE_TEST_ENGINES", "").replace(",", " ").split()
    found = []
    for name in registry.engine_names():
        try:
            engine = registry.load(name)
        except AnyDeviceError as error:
            marks = () if name in required else pytest.mark.skip(reason=str(error))
            found.append(pytest.param(str(error), id=name, marks=marks))
            continue
        found += [
            pytest.param((engine, device), id=f"{name}-{device.backend}")
            for device in engine.devices()
            if device.index == 0
        ]
    return found


def home(request: pytest.FixtureRequest) -> tuple[Engine, Device]:
    """The engine and device of a fixture's parameter; a failure where it is such a text."""
    if isinstance(request.param, str):
        pytest.fail(f"this engine was asked for and cannot run: {request.param}")
    engine, device = request.param
    return engine, device
