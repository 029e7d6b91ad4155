"""Every engine that runs here, on every device it has.

`ANYDEVICE_TEST_ENGINES=torch,jax` names the engines that must run: one of them that cannot is a
failure. Any other engine that cannot run is skipped, with its reason.

A file about computing says `ONE_DEVICE = True`, and runs on one device of each backend: JAX
compiles for each device.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from anydevice._core.device import Device
from anydevice._core.engine import Engine
from anydevice._engines import host
from anydevice._machine.engines import registry
from anydevice.errors import AnyDeviceError

from .home import Home


@dataclass(frozen=True)
class Place:
    """One engine and one of its devices."""

    engine: Engine
    device: Device


@cache
def _places() -> tuple[object, ...]:
    required = os.environ.get("ANYDEVICE_TEST_ENGINES", "").replace(",", " ").split()
    unknown = [name for name in required if name not in registry.engine_names()]
    if unknown:
        raise pytest.UsageError(f"ANYDEVICE_TEST_ENGINES names no engine: {', '.join(unknown)}")
    found: list[object] = []
    for name in registry.engine_names():
        places, reason = _of_engine(name)
        found += [pytest.param(place, id=f"{name}-{place.device}") for place in places]
        if not places:
            marks = () if name in required else pytest.mark.skip(reason=reason)
            found.append(pytest.param(reason, id=name, marks=marks))
    return tuple(found)


def _of_engine(name: str) -> tuple[list[Place], str]:
    try:
        engine = registry.load(name)
    except AnyDeviceError as error:
        return [], str(error)
    return [Place(engine, device) for device in engine.devices()], f"{name} sees no device here"


def _first_of_each() -> list[object]:
    """One place an engine: enough where two engines meet."""
    first = {}
    for parameter in _places():
        first.setdefault(parameter.id.partition("-")[0], parameter)  # type: ignore[attr-defined]
    return list(first.values())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "other" in metafunc.fixturenames:
        for name in ("place", "other"):
            metafunc.parametrize(name, _first_of_each(), indirect=True)
    elif "place" in metafunc.fixturenames:
        places: list[Any] = list(_places())
        if getattr(metafunc.module, "ONE_DEVICE", False):
            places = [one for one in places if not _index(one.values[0])]
        metafunc.parametrize("place", places, indirect=True)


def _index(place: Place | str) -> int:
    return 0 if isinstance(place, str) else place.device.index


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    if isinstance(request.param, str):
        pytest.fail(f"this engine was asked for and cannot run: {request.param}")
    assert isinstance(request.param, Place)
    return request.param


other = place
"""The second engine of an ordered pair; the first is `place`."""


@pytest.fixture(autouse=True)
def nothing_was_warned_of() -> None:
    """The one warning of a process, that integers were narrowed, may come in every test."""
    host.forget_warning()


@pytest.fixture
def engine(place: Place) -> Engine:
    return place.engine


@pytest.fixture
def device(place: Place) -> Device:
    return place.device


@pytest.fixture
def at(engine: Engine, device: Device) -> Home:
    return Home(engine, device)
