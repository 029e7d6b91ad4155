"""MLX's memory: one pool for all of its devices, with its cache."""

from __future__ import annotations

import re

import mlx.core as mx

from anydevice._core.device import Device
from anydevice._core.engine import Memory, MemoryUse
from anydevice._engines.base import BaseMemory
from anydevice._engines.mlx.arrays import ENGINE, LimitReachedError, memory_limit, set_memory_limit

_SAID = re.compile(
    r"\[(?:metal::)?malloc\w*\] "
    r"|\[METAL\] Command buffer execution failed: Insufficient Memory"
    r"|cudaMalloc\w*(?:\(.*\))? failed: out of memory"
)
"""The beginnings of MLX's messages: it raises general errors of Python."""


class MlxMemory(BaseMemory):
    """Memory of MLX in all: its devices share one memory."""

    def use(self, device: Device) -> MemoryUse:
        ENGINE.native(device)
        in_use = mx.get_active_memory()
        return MemoryUse(
            in_use=in_use,
            reserved=in_use + mx.get_cache_memory(),
            peak=max(in_use, mx.get_peak_memory()),
            limit=memory_limit(),
        )

    def reset_peak(self, device: Device) -> None:
        ENGINE.native(device)
        mx.reset_peak_memory()

    def set_limit(self, device: Device, limit: int | None) -> None:
        """Limit the memory of new arrays; results of computations are not limited."""
        ENGINE.native(device)
        set_memory_limit(limit)

    def release(self, device: Device) -> None:
        ENGINE.native(device)
        mx.clear_cache()

    def ran_out(self, error: BaseException) -> bool:
        if isinstance(error, LimitReachedError) or type(error) is MemoryError:
            return True
        plain = type(error) in (RuntimeError, ValueError)
        return plain and _SAID.match(str(error)) is not None


MEMORY: Memory = MlxMemory(ENGINE)
