"""Memory of CuPy: what its pools hold of a GPU and of pinned host memory."""

from __future__ import annotations

import cupy

from anydevice._core.device import Device
from anydevice._core.engine import Memory, MemoryUse
from anydevice._engines.base import BaseMemory
from anydevice._engines.cupy.arrays import ENGINE

_SAID = ("cudaerrormemoryallocation", "hiperroroutofmemory", "out of memory", "alloc_failed")

_before: dict[Device, int] = {}
"""The limits of the pool from before ours; 0 is none."""


class CupyMemory(BaseMemory):
    """Memory of CuPy's default pool, by device."""

    def use(self, device: Device) -> MemoryUse:
        """Return the bytes that the pool holds; it keeps no peak."""
        with ENGINE.native(device):
            pool = cupy.get_default_memory_pool()
            return MemoryUse(
                in_use=pool.used_bytes(),
                reserved=pool.total_bytes(),
                limit=pool.get_limit() or None,
            )

    def set_limit(self, device: Device, limit: int | None) -> None:
        """Limit the pool, its cache included; lifting restores the limit from before."""
        with ENGINE.native(device):
            pool = cupy.get_default_memory_pool()
            if limit is not None:
                _before.setdefault(device, pool.get_limit())
                pool.set_limit(size=limit)
            elif device in _before:
                pool.set_limit(size=_before.pop(device))

    def release(self, device: Device) -> None:
        with ENGINE.native(device):
            cupy.get_default_memory_pool().free_all_blocks()
            cupy.get_default_pinned_memory_pool().free_all_blocks()

    def ran_out(self, error: BaseException) -> bool:
        if isinstance(error, cupy.cuda.memory.OutOfMemoryError) or type(error) is MemoryError:
            return True
        ours = type(error).__module__.partition(".")[0].startswith("cupy")
        message = str(error).lower()
        return isinstance(error, RuntimeError) and ours and any(words in message for words in _SAID)


MEMORY: Memory = CupyMemory(ENGINE)
