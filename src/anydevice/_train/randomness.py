"""The global random generators of Python, NumPy, PyTorch and MLX: their states as JSON."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from anydevice._core.device import Device
from anydevice._libraries.registry import part
from anydevice._machine.engines import registry

State = Mapping[str, Any]

_WITH_GLOBAL_NUMBERS = ("torch", "mlx")


def host_state(loader: object = None) -> dict[str, Any]:
    """Return the state of the host's generators, and of a loader's own generators."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, [int(key) for key in keys], *rest],
    }
    for library in _WITH_GLOBAL_NUMBERS:
        if registry.loaded(library):
            state |= part(library, "random").state(loader)
    return state


def set_host_state(state: State, loader: object = None) -> None:
    """Set the generators to a state of `host_state`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))
    for library in _WITH_GLOBAL_NUMBERS:
        if library in state and registry.loaded(library):
            part(library, "random").set_state(state, loader)


def random_state(*devices: Device) -> tuple[State, list[str | None]]:
    """Return the state of the generators of the host and of accelerators."""
    return host_state(), [device_state(device) for device in devices]


def set_random_state(state: tuple[State, list[str | None]], *devices: Device) -> None:
    """Set the generators of the host and of these devices to a result of `random_state`."""
    set_host_state(state[0])
    for device, own in zip(devices, state[1], strict=True):
        set_device_state(device, own)


def seed_modules(library: str, seed: int) -> None:
    """Seed the random generator of a library's modules, if it is global."""
    if library in _WITH_GLOBAL_NUMBERS:
        part(library, "random").seed(seed)


def device_state(device: Device) -> str | None:
    """Return the state of PyTorch's generator on an accelerator; `None` for other devices."""
    if device.engine != "torch" or device.kind == "cpu":
        return None
    state: str | None = part("torch", "random").device_state(device)
    return state


def set_device_state(device: Device, state: str | None) -> None:
    """Set the generator of an accelerator to a result of `device_state`."""
    if device.engine == "torch" and device.kind != "cpu":
        part("torch", "random").set_device_state(device, state)
