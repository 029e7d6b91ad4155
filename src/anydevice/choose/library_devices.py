"""Devices as the array libraries themselves name them: `torch.device`, `jax.Device`, …"""

from __future__ import annotations

from typing import Any

from anydevice.core.device import Device
from anydevice.engines import registry
from anydevice.errors import DeviceNotFoundError

_PACKAGES = {"jaxlib": "jax", "pyopencl": "opencl"}
"""Packages that are not called as the engine is."""

_NAMES = ("device", "devicetype")
"""What libraries call the types of such objects; MLX's `mlx.core.cpu` is of the second."""


def device_from_library(spec: Any) -> Device | None:
    """The device that a library's own object stands for, with that library as its engine.

    `None` where it is no such object. Raises `DeviceNotFoundError` where the library does not see
    that device. Imports nothing: whoever has such an object has imported the library.
    """
    kind = type(spec)
    package = kind.__module__.partition(".")[0]
    name = _PACKAGES.get(package, package)
    if kind.__name__.lower() not in _NAMES or name not in registry.loaded_engines():
        return None
    engine = registry.load(name)
    for device in engine.devices():
        if _is_same(engine.native(device), spec):
            return Device(device, engine=name)
    seen = ", ".join(map(str, engine.devices())) or "no device"
    raise DeviceNotFoundError(f"{name} itself has no {spec!r} here; it sees {seen}")


def _is_same(native: Any, spec: Any) -> bool:
    if hasattr(spec, "type") and hasattr(spec, "index"):  # to PyTorch, no index is the first
        return bool(native.type == spec.type) and (native.index or 0) == (spec.index or 0)
    return bool(native == spec)
