"""Memory of OpenCL: what our own pool holds of a device; drivers do not count."""

from __future__ import annotations

import pyopencl as cl

from anydevice._core.device import Device
from anydevice._core.engine import Memory, MemoryUse
from anydevice._engines.base import BaseMemory
from anydevice._engines.opencl.arrays import ENGINE
from anydevice._engines.opencl.buffers import limits, pools_of

_CODES = frozenset(
    {
        cl.status_code.MEM_OBJECT_ALLOCATION_FAILURE,
        cl.status_code.OUT_OF_RESOURCES,
        cl.status_code.OUT_OF_HOST_MEMORY,
        cl.status_code.INVALID_BUFFER_SIZE,  # more at once than the device gives out
    }
)


class OpenclMemory(BaseMemory):
    """Memory of our pools, by device; buffers that PyOpenCL makes by itself are not counted."""

    def use(self, device: Device) -> MemoryUse:
        """Return the memory of our own arrays; an unused device is not started for it."""
        native = ENGINE.native(device)
        pools = pools_of(native)
        return MemoryUse(
            in_use=sum(pool.in_use for pool in pools),
            reserved=sum(pool.held for pool in pools),
            peak=sum(max(pool.peak, pool.in_use) for pool in pools),
            limit=limits.get(native),
        )

    def reset_peak(self, device: Device) -> None:
        for pool in pools_of(ENGINE.native(device)):
            pool.reset_peak()

    def set_limit(self, device: Device, limit: int | None) -> None:
        """Limit the memory that our pools take of the device, kept blocks included."""
        native = ENGINE.native(device)
        if limit is None:
            limits.pop(native, None)
        else:
            limits[native] = limit

    def release(self, device: Device) -> None:
        for pool in pools_of(ENGINE.native(device)):
            pool.release()

    def ran_out(self, error: BaseException) -> bool:
        """Whether memory ran out; OUT_OF_RESOURCES counts, although it has other causes, too."""
        if isinstance(error, cl.MemoryError) or type(error) is MemoryError:
            return True
        return isinstance(error, cl.Error) and getattr(error, "code", None) in _CODES


MEMORY: Memory = OpenclMemory(ENGINE)
