"""The CuPy engine: CUDA, or ROCm in a build for ROCm."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import cupy
from cupy import ndarray

from anydevice._core.device import Device
from anydevice._core.dtypes import DType
from anydevice._core.engine import Engine, Storage
from anydevice._core.finding import version_numbers
from anydevice._engines.base import BaseEngine
from anydevice._engines.host import known_dtype, lacking, plain
from anydevice._machine.engines.registry import BUILT_IN

_LACKS = BUILT_IN["cupy"].lacks
_BACKEND = "rocm" if cupy.cuda.runtime.is_hip else "cuda"
_BFLOAT16_SINCE = (14,)
_ON_GPU = (2, 10, 13)
"""DLPack's numbers for memory of CUDA, of ROCm, and for memory that CUDA manages."""


class CupyEngine(BaseEngine):
    """Arrays of CuPy, which does not track streams: synchronize yours before releasing an array."""

    name = "cupy"
    has_views = True
    dlpack = None

    def devices(self) -> tuple[Device, ...]:
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError:  # no driver, or no card
            count = 0
        return tuple(Device(_BACKEND, index) for index in range(count))

    def native(self, device: Device) -> Any:
        if device not in self.devices():
            raise self.not_seen(device)
        return cupy.cuda.Device(device.index)

    def owns(self, x: object) -> bool:
        return isinstance(x, ndarray)

    def devices_of(self, x: ndarray) -> tuple[Device, ...]:
        return (Device(_BACKEND, x.device.id),)

    def storage(self, x: ndarray) -> Storage | None:
        whole = x.data.mem
        if not x.size or not whole.size:
            return None
        return Storage(whole.ptr, whole.size, x.data.ptr - whole.ptr, x.strides, x.shape)

    def address(self, x: ndarray) -> int | None:
        if not x.flags.c_contiguous:
            return None
        return x.data.ptr

    def view(
        self,
        x: ndarray,
        dtype: DType,
        offset: int,
        strides: tuple[int, ...],
        shape: tuple[int, ...],
    ) -> ndarray:
        start = cupy.cuda.MemoryPointer(x.data.mem, offset)
        return ndarray(shape, dtype.numpy(), start, strides)

    def empty(self, shape: tuple[int, ...], dtype: DType, device: Device) -> ndarray:
        target = self.native(device)
        if dtype.name == "bfloat16" and version_numbers(cupy.__version__)[:1] < _BFLOAT16_SINCE:
            raise _LACKS["bfloat16"].error()
        if dtype.module != "numpy" and dtype.name != "bfloat16":
            raise lacking("CuPy", dtype)
        with target:
            made = cupy.empty(shape, dtype.numpy())
            # CuPy gives freed memory out again while the stream that used it is still at work.
            cupy.cuda.get_current_stream().synchronize()
            return made

    def place(self, x: Any, device: Device, *, narrow: bool = False) -> ndarray:
        host = plain(x)
        made = self.empty(host.shape, known_dtype(host.dtype), device)
        with made.device:
            made.set(host)
            # The copy may still be reading the caller's memory.
            cupy.cuda.get_current_stream().synchronize()
        return made

    def to_host(self, x: ndarray) -> Any:
        with x.device:
            return cupy.asnumpy(x)

    def from_dlpack(self, x: Any) -> ndarray:
        if x.__dlpack_device__()[0] not in _ON_GPU:
            raise BufferError("it does not lie on a GPU")
        return cupy.from_dlpack(x)

    def move(self, x: ndarray, device: Device) -> ndarray:
        if self.devices_of(x) == (device,):
            return x
        with self.native(device):
            return cupy.array(x)

    def separate(self, stacked: ndarray) -> list[ndarray]:
        return [row.copy() for row in stacked]

    def matmul(self, a: ndarray, b: ndarray) -> ndarray:
        with a.device:
            return cupy.matmul(a, b)

    def finish(self, arrays: Any) -> None:
        several = arrays if isinstance(arrays, list | tuple) else (arrays,)
        for index in {x.device.id for x in several}:
            with cupy.cuda.Device(index):
                cupy.cuda.get_current_stream().synchronize()

    def synchronize(self, device: Device) -> None:
        self.native(device).synchronize()

    def default_scope(self, device: Device) -> AbstractContextManager[object]:
        return self.native(device)


ENGINE: Engine = CupyEngine()
