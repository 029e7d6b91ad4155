"""The engines that train, each on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from anydevice import nn
from anydevice._core.device import Device
from tests.nn.conftest import ALL, TRAINING, device_of_engine


def on_step(function: Callable[[nn.TrainingEvent], Any]) -> nn.Callback:
    """A callback that calls a function after each step."""

    class OnStep(nn.Callback):
        def step(self, event: nn.TrainingEvent) -> None:
            function(event)

    return OnStep()


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
