"""Memory of JAX: what XLA's allocator holds of an accelerator; the CPU's it does not count."""

from __future__ import annotations

import os
from functools import cache

import jax

from anydevice._core.device import Device
from anydevice._core.engine import Memory, MemoryUse
from anydevice._core.text import format_size
from anydevice._engines.base import BaseMemory
from anydevice._engines.jax.arrays import ENGINE

_FAILED: type[BaseException] = jax.errors.JaxRuntimeError
_ABOUT_EQUAL = 0.03
"""A driver and CUDA differ by a little on the memory of a card, and so do shares of it."""


class JaxMemory(BaseMemory):
    """Memory of JAX's allocators, by device.

    JAX keeps memory until its process ends, and counts its peak from the start. With
    `XLA_PYTHON_CLIENT_ALLOCATOR=platform` it gives memory back, and is slower.
    """

    def use(self, device: Device) -> MemoryUse | None:
        """Return the bytes of XLA's allocator; `None` for the CPU, where it does not count."""
        target = ENGINE.native(device)
        counted = target.memory_stats()  # nothing on the CPU
        if not counted:
            return None
        in_use = counted["bytes_in_use"]
        return MemoryUse(
            in_use=in_use,
            reserved=max(in_use, counted.get("pool_bytes") or counted.get("bytes_reserved") or 0),
            peak=counted.get("peak_bytes_in_use"),
            limit=counted.get("bytes_limit") or None,
            # By default, JAX takes all its share of a GPU when it starts.
            preallocated=target.platform == "gpu" and _preallocates(),
        )

    def set_limit(self, device: Device, limit: int | None) -> str | None:
        """Return why it has no effect: JAX takes its limit when it starts, and it has started."""
        now = self.use(device)
        if device.backend not in ("cuda", "rocm") or now is None:
            if limit is None:
                return None
            return (
                f"JAX can be given no limit on {device}: it has one on GPUs only; on the CPU use "
                "the system's own: ulimit -v, or a cgroup"
            )
        if now.limit == limit or (
            limit and now.limit and abs(now.limit - limit) <= _ABOUT_EQUAL * limit
        ):
            return None
        return (
            f"JAX has already started, and may hold {format_size(now.limit)} of {device} until "
            "its process ends; call anydevice.configure(memory=…) before JAX is first used, or "
            "set XLA_PYTHON_CLIENT_MEM_FRACTION before Python starts"
        )

    def ran_out(self, error: BaseException) -> bool:
        if type(error) is MemoryError:
            return True
        message = str(error)
        # A status of XLA, which other errors have, too.
        exhausted = "RESOURCE_EXHAUSTED" in message and "memory" in message.lower()
        if type(error) is RuntimeError:  # anybody's, except for how it begins
            return exhausted and message.startswith("RESOURCE_EXHAUSTED: ")
        return isinstance(error, _FAILED) and (
            exhausted or "Out of memory" in message or "ERROR_OUT_OF_MEMORY" in message
        )


@cache
def _preallocates() -> bool:
    """Whether JAX took its memory at the start, by the environment at the first call."""
    allocator = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    enabled = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "") not in ("false", "False", "0")
    return enabled and allocator != "platform"


MEMORY: Memory = JaxMemory(ENGINE)
