"""The OpenCL engine, through PyOpenCL: every device of every platform, in the drivers' order."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pyopencl as cl
import pyopencl.array as cl_array
from pyopencl.array import Array

from anydevice._core.device import Device
from anydevice._core.dtypes import DType
from anydevice._core.engine import Engine, Storage
from anydevice._engines.base import BaseEngine
from anydevice._engines.host import narrowed, no_dtype, plain
from anydevice._engines.opencl.buffers import pool, queue_of_context, queue_of_device
from anydevice._engines.opencl.kernels.programs import limits

_MULTIPLIED = ("float16", "bfloat16", "float32", "float64")


class OpenclEngine(BaseEngine):
    name = "opencl"
    has_views = True

    def devices(self) -> tuple[Device, ...]:
        return tuple(Device("opencl", index) for index in range(len(_all_devices())))

    def native(self, device: Device) -> Any:
        devices = _all_devices()
        if device.backend != "opencl" or device.index >= len(devices):
            raise self.not_seen(device)
        return devices[device.index]

    def owns(self, x: object) -> bool:
        return isinstance(x, Array)

    def devices_of(self, x: Array) -> tuple[Device, ...]:
        return tuple(Device("opencl", _all_devices().index(native)) for native in x.context.devices)

    def storage(self, x: Array) -> Storage | None:
        """Return the buffer, known by its handle: OpenCL gives out no pointers."""
        if not isinstance(x.base_data, cl.MemoryObjectHolder):
            return None
        return Storage(x.base_data.int_ptr, x.base_data.size, x.offset, x.strides, x.shape)

    def view(
        self, x: Array, dtype: DType, offset: int, strides: tuple[int, ...], shape: tuple[int, ...]
    ) -> Array:
        queue, number = _queue_of(x), dtype.numpy()
        return Array(queue, shape, number, "C", x.allocator, x.base_data, offset, strides)

    def empty(self, shape: tuple[int, ...], dtype: DType, device: Device) -> Array:
        queue = queue_of_device(self.native(device))
        made = cl_array.empty(queue, shape, dtype.numpy(), allocator=pool(queue.context))
        queue.finish()  # earlier work on this memory may not have ended
        return made

    def place(self, x: Any, device: Device, *, narrow: bool = False) -> Array:
        """Return a copy, also of dtypes that OpenCL only stores; `narrow` rounds float64."""
        queue = queue_of_device(self.native(device))
        absent = limits(queue.context).no_doubles if narrow else None
        if absent is not None:
            x = narrowed(x, ("float64",), why=absent.what, remedy=absent.instead, narrow=True)
        return cl_array.to_device(queue, plain(x), allocator=pool(queue.context))

    def to_host(self, x: Array) -> Any:
        if not x.size:
            return np.empty(x.shape, x.dtype)
        # PyOpenCL's own `get` reads no gaps and not every type, so the bytes are read here: those
        # of the array or, where it has gaps, of all of its buffer.
        gapless = x.flags.forc
        start, size = (x.offset, x.nbytes) if gapless else (0, x.base_data.size)
        read = np.empty(size, np.uint8)
        cl.enqueue_copy(_queue_of(x), read, x.base_data, src_offset=start, wait_for=x.events)
        array = np.ndarray(x.shape, x.dtype, read, x.offset - start, x.strides)
        return array if gapless else array.copy()

    def separate(self, stacked: Array) -> list[Array]:
        return [row.copy(queue=_queue_of(stacked)) for row in stacked]

    def matmul(self, a: Array, b: Array) -> Array:
        if str(a.dtype) not in _MULTIPLIED or a.dtype != b.dtype:
            what = f"OpenCL multiplies no {a.dtype} by {b.dtype}"
            raise no_dtype(what, "convert both matrices to float32")
        return super().matmul(a, b)

    def finish(self, arrays: Any) -> None:
        for x in arrays if isinstance(arrays, list | tuple) else (arrays,):
            x.finish()
            _queue_of(x).finish()

    def synchronize(self, device: Device) -> None:
        queue_of_device(self.native(device)).finish()


def _all_devices() -> list[Any]:
    """Return every device of every platform, numbered through as the drivers list them."""
    devices: list[Any] = []
    with suppress(cl.Error):  # the loader found no driver at all
        for platform in cl.get_platforms():
            with suppress(cl.Error):  # a driver whose hardware is not there
                devices += platform.get_devices()
    return devices


def _queue_of(x: Array) -> Any:
    return x.queue or queue_of_context(x.context)


ENGINE: Engine = OpenclEngine()
