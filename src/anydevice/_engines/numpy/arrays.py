"""The NumPy engine: arrays in host memory, always available."""

from __future__ import annotations

from typing import Any

import numpy as np

from anydevice._core.device import Device
from anydevice._core.dtypes import DType
from anydevice._core.engine import Engine, Storage
from anydevice._engines.base import BaseEngine
from anydevice._engines.host import private

_CPU = Device("cpu")


class NumpyEngine(BaseEngine):
    name = "numpy"
    has_views = True
    dlpack = None
    from_dlpack = staticmethod(np.from_dlpack)

    def devices(self) -> tuple[Device, ...]:
        return (_CPU,)

    def native(self, device: Device) -> str:
        """Return the name of NumPy's only device in the array API standard."""
        if device != _CPU:
            raise self.not_seen(device)
        return "cpu"

    def owns(self, x: object) -> bool:
        return isinstance(x, np.ndarray)

    def devices_of(self, x: Any) -> tuple[Device, ...]:
        return (_CPU,)

    def storage(self, x: Any) -> Storage | None:
        start, size = _allocation(x)
        if not size:
            return None
        return Storage(start, size, _pointer(x) - start, x.strides, x.shape)

    def address(self, x: Any) -> int | None:
        return _pointer(x) if x.flags.c_contiguous and x.dtype.isnative else None

    def view(
        self, x: Any, dtype: DType, offset: int, strides: tuple[int, ...], shape: tuple[int, ...]
    ) -> Any:
        start, size = _allocation(x)
        memory = _Memory(start, size, x)
        return np.ndarray(shape, dtype.numpy(), np.asarray(memory), offset, strides)

    def empty(self, shape: tuple[int, ...], dtype: DType, device: Device) -> Any:
        self.native(device)
        return np.empty(shape, dtype.numpy())

    def place(self, x: Any, device: Device, *, narrow: bool = False) -> Any:
        self.native(device)
        return private(x)

    def to_host(self, x: Any) -> Any:
        return private(x)

    def separate(self, stacked: Any) -> list[Any]:
        return [row.copy() for row in stacked]

    def matmul(self, a: Any, b: Any) -> Any:
        return np.matmul(a, b)


class _Memory:
    """An array's whole allocation, as NumPy reads it; keeps the array alive."""

    def __init__(self, start: int, size: int, x: Any) -> None:
        self._owner = x
        self.__array_interface__ = {
            "data": (start, not x.flags.writeable),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


def _pointer(x: Any) -> int:
    return x.__array_interface__["data"][0]


def _allocation(x: Any) -> tuple[int, int]:
    """Return address and size of the memory at the end of an array's chain of bases."""
    top = x
    while isinstance(top.base, np.ndarray):
        top = top.base
    if top.base is not None:
        try:
            top = np.frombuffer(top.base, np.uint8)  # bytes, a memory map, shared memory
        except (BufferError, TypeError, ValueError):
            pass  # another library's object: only the span of the outermost array is known
    if top.flags.c_contiguous or top.flags.owndata:
        return _pointer(top), top.nbytes
    low = high = _pointer(top)
    for length, stride in zip(top.shape, top.strides, strict=True):
        if stride < 0:
            low += (length - 1) * stride
        else:
            high += (length - 1) * stride
    return low, high + top.itemsize - low if top.size else 0


ENGINE: Engine = NumpyEngine()
