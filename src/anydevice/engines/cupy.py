"""CuPy: CUDA, or ROCm where it was built for that."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import cupy

from anydevice.core.device import Device
from anydevice.core.engine import Engine
from anydevice.engines.sight import not_seen

_BACKEND = "rocm" if cupy.cuda.runtime.is_hip else "cuda"


class CupyEngine:
    """Arrays of CuPy."""

    name = "cupy"

    def devices(self) -> tuple[Device, ...]:
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError:  # no driver, or no card
            count = 0
        return tuple(Device(_BACKEND, index) for index in range(count))

    def native(self, device: Device) -> Any:
        if device not in self.devices():
            raise not_seen("CuPy", device, self.devices())
        return cupy.cuda.Device(device.index)

    def owns(self, x: object) -> bool:
        return isinstance(x, cupy.ndarray)

    def devices_of(self, x: Any) -> tuple[Device, ...]:
        return (Device(_BACKEND, x.device.id),)

    def from_host(self, x: Any, device: Device) -> Any:
        with self.native(device):
            return cupy.array(x)

    def to_host(self, x: Any) -> Any:
        return cupy.asnumpy(x)

    def move(self, x: Any, device: Device) -> Any:
        if self.devices_of(x) == (device,):
            return x
        with self.native(device):
            return cupy.array(x)

    def matmul(self, a: Any, b: Any) -> Any:
        with a.device:
            return cupy.matmul(a, b)

    def synchronize(self, device: Device) -> None:
        self.native(device).synchronize()

    def default_scope(self, device: Device) -> AbstractContextManager[Any]:
        scope: AbstractContextManager[Any] = self.native(device)
        return scope


ENGINE: Engine = CupyEngine()
