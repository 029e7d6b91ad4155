"""The engines that run here without an accelerator, each on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

import anydevice
from anydevice._core.device import Device
from anydevice._machine.engines import registry

TRAINING = ("torch", "jax", "mlx")
ALL = ("numpy", *TRAINING)
ENGINES = (*ALL, "opencl")


def device_of_engine(name: str) -> Device:
    pytest.importorskip({"mlx": "mlx.core", "opencl": "pyopencl"}.get(name, name))
    if name != "opencl":
        return anydevice.device("cpu", engine=name)
    devices = registry.load(name).devices()
    return devices[0] if devices else pytest.skip("OpenCL shows no device here")


@pytest.fixture(params=ALL)
def cpu(request: pytest.FixtureRequest) -> Device:
    return device_of_engine(request.param)


@pytest.fixture(params=ENGINES)
def anywhere(request: pytest.FixtureRequest) -> Device:
    return device_of_engine(request.param)


@pytest.fixture(params=TRAINING)
def trainable(request: pytest.FixtureRequest) -> Device:
    return device_of_engine(request.param)


@pytest.fixture
def engine(trainable: Device) -> Any:
    assert trainable.engine is not None
    return registry.load(trainable.engine)
