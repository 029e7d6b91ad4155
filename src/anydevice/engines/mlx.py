"""MLX: Metal on Apple Silicon, and the CPU there and on Linux.

An MLX array lies in memory that CPU and GPU share; where it is worked on is decided by each
operation, so it lives on every device that MLX has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np

from anydevice.core.device import Device
from anydevice.core.engine import Engine
from anydevice.engines.registry import BUILT_IN
from anydevice.engines.sight import not_seen

_LACKS = BUILT_IN["mlx"].lacks
_TYPES = {"metal": mx.gpu, "cpu": mx.cpu}


class MlxEngine:
    """Arrays of MLX."""

    name = "mlx"

    def devices(self) -> tuple[Device, ...]:
        metal = (Device("metal"),) if mx.metal.is_available() else ()
        return (*metal, Device("cpu"))

    def native(self, device: Device) -> Any:
        if device not in self.devices():
            raise not_seen("MLX", device, self.devices())
        return mx.Device(_TYPES[device.backend], device.index)

    def owns(self, x: object) -> bool:
        return isinstance(x, mx.array)

    def devices_of(self, x: Any) -> tuple[Device, ...]:
        return self.devices()

    def from_host(self, x: Any, device: Device) -> Any:
        self.native(device)
        plain = np.array(x, order="C")  # MLX refuses negative strides
        if plain.dtype == np.complex128:
            raise _LACKS["complex128"].error()
        if plain.dtype != np.float64:
            return mx.array(plain)
        if device.backend != "cpu":
            raise _LACKS["float64"].error()
        return mx.array(plain, dtype=mx.float64)

    def to_host(self, x: Any) -> Any:
        if x.dtype == mx.bfloat16:
            return np.array(x.view(mx.uint16)).view(ml_dtypes.bfloat16)
        return np.array(x)

    def move(self, x: Any, device: Device) -> Any:
        self.native(device)
        return x

    def matmul(self, a: Any, b: Any) -> Any:
        """The product, on MLX's default device: `default_scope` sets another one."""
        return mx.matmul(a, b)

    def synchronize(self, device: Device) -> None:
        mx.synchronize(mx.default_stream(self.native(device)))

    def default_scope(self, device: Device) -> AbstractContextManager[Any]:
        return _default(self.native(device))


@contextmanager
def _default(native: Any) -> Iterator[Any]:
    before = mx.default_device()
    mx.set_default_device(native)
    try:
        yield native
    finally:
        mx.set_default_device(before)


ENGINE: Engine = MlxEngine()
