"""Devices as they are not: a CPU stands for a GPU, or for a device with small groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from anydevice._core.device import Device
from anydevice._core.engine import Engine
from anydevice._machine.engines import registry
from anydevice.errors import UnsupportedError


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip a test that this driver cannot run because of a defect of its own."""
    try:
        return (yield)
    except UnsupportedError as error:
        if error.code == "driver_defect":
            pytest.skip(str(error))
        raise


@pytest.fixture
def engine() -> Engine:
    engine = registry.load("opencl")
    if not engine.devices():
        pytest.skip("no OpenCL driver is installed here")
    return engine


@pytest.fixture
def put(engine: Engine) -> Callable[[Any], Any]:
    return lambda x: engine.place(np.asarray(x), Device("opencl"))


@pytest.fixture
def get(engine: Engine) -> Callable[[Any], Any]:
    return engine.to_host


@pytest.fixture
def assume() -> Iterator[Callable[..., None]]:
    """Have the kernels assume this of every device: `assume(is_cpu=False)`."""
    from anydevice._engines.opencl.kernels import (
        attention,
        elementwise,
        products,
        programs,
        reductions,
        rows,
    )

    def change(**assumed: object) -> None:
        programs.assumed = programs.Assumed(**assumed)
        for module in (attention, elementwise, products, programs, reductions, rows):
            for name, value in vars(module).items():
                # What is built goes by its text, which says all that was assumed.
                if hasattr(value, "cache_clear") and name not in ("program", "text"):
                    value.cache_clear()

    yield change
    change()


ROUTES: dict[str, dict[str, object]] = {
    "cpu": {},
    "groups of 1": {"work_group": 1},
    "groups of 16": {"work_group": 16, "is_cpu": False},
    "gpu": {"is_cpu": False},
}


@pytest.fixture(params=ROUTES)
def assumed(request: pytest.FixtureRequest, assume: Callable[..., None]) -> None:
    """Run the test on each kind of device."""
    assume(**ROUTES[request.param])
