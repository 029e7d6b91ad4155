"""The engines that train, each on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from anydevice._core.device import Device
from tests.nn.conftest import ALL, TRAINING, device_of_engine


@pytest.fixture(params=TRAINING)
def here(request: pytest.FixtureRequest) -> Device:
    return device_of_engine(request.param)


@pytest.fixture(params=ALL)
def cpu(request: pytest.FixtureRequest) -> Device:
    return device_of_engine(request.param)


@pytest.fixture
def jax() -> Device:
    return device_of_engine("jax")


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")
