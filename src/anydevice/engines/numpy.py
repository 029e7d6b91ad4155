"""NumPy: the host's memory, always there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from anydevice.core.device import Device
from anydevice.core.engine import Engine
from anydevice.engines.sight import not_seen

_CPU = Device("cpu")


class NumpyEngine:
    """Arrays in the host's memory."""

    name = "numpy"

    def devices(self) -> tuple[Device, ...]:
        return (_CPU,)

    def native(self, device: Device) -> str:
        """NumPy's word for its only device, as the array API standard spells it."""
        if device != _CPU:
            raise not_seen("NumPy", device, self.devices())
        return "cpu"

    def owns(self, x: object) -> bool:
        return isinstance(x, np.ndarray)

    def devices_of(self, x: Any) -> tuple[Device, ...]:
        return (_CPU,)

    def from_host(self, x: Any, device: Device) -> Any:
        self.native(device)
        return np.array(x)

    def to_host(self, x: Any) -> Any:
        return np.array(x)

    def move(self, x: Any, device: Device) -> Any:
        self.native(device)
        return x

    def matmul(self, a: Any, b: Any) -> Any:
        return np.matmul(a, b)

    def synchronize(self, device: Device) -> None:
        self.native(device)

    def default_scope(self, device: Device) -> AbstractContextManager[Any]:
        self.native(device)
        return nullcontext()


ENGINE: Engine = NumpyEngine()
