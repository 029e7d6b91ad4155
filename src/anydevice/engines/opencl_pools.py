"""The memory that arrays on OpenCL lie in: counted, kept for later arrays, and limited where asked.

All work of a context goes through one queue that keeps its order. A buffer that is given back is
therefore free for whatever is started later, even while work that was started before still uses it.
"""

from __future__ import annotations

from math import inf
from typing import Any

import pyopencl as cl
import pyopencl.tools as cl_tools

from anydevice.core.locking import ForkSafeLock, made_once
from anydevice.engines.opencl_queues import queue_of_context

_LEADING_BITS = 7
"""Sizes are rounded up to so many leading bits: 1 % is lost, and about equal ones are reused."""


@made_once
def pool(context: Any) -> Pool:
    """Where arrays of a context get their memory, and give it back to."""
    made = Pool(queue_of_context(context))
    _pools.append(made)
    return made


def pools_of(native: Any) -> list[Pool]:
    """Every pool that has been made on a `pyopencl.Device`; asking makes none."""
    return [made for made in _pools if native in made.devices]


_pools: list[Pool] = []

limits: dict[Any, int] = {}
"""The most bytes that all pools on a `pyopencl.Device` may take of it, where there is a limit."""

_counting = ForkSafeLock()
"""Of all pools that keep to limits one allocates at a time: they may share a device."""


class LimitReachedError(cl.MemoryError):  # type: ignore[misc]  # PyOpenCL's is untyped
    """An array would have gone beyond the limit of its device; `asked` is its size in bytes."""

    def __init__(self, message: str, asked: int) -> None:
        super().__init__(message)
        self.asked = asked


class Pool:
    """The memory of one context.

    Allocating takes microseconds where a buffer of about that size was given back before. A new
    one is filled in at once, which waits for the queue, so that a device without room says so
    here and not in the middle of a computation.
    """

    def __init__(self, queue: Any) -> None:
        allocator = cl_tools.ImmediateAllocator(queue)
        self._pool: Any = cl_tools.MemoryPool(allocator, leading_bits_in_bin_id=_LEADING_BITS)
        self._lock = ForkSafeLock()
        self._peak = 0
        self.devices: tuple[Any, ...] = tuple(queue.context.devices)

    @property
    def in_use(self) -> int:
        """The bytes that arrays lie in."""
        return int(self._pool.active_bytes)

    @property
    def held(self) -> int:
        """The bytes that were taken from the driver, for arrays and for later ones."""
        return int(self._pool.managed_bytes)

    @property
    def peak(self) -> int:
        """The most bytes that were in use since the start, or `reset_peak`."""
        return self._peak

    def reset_peak(self) -> None:
        """Begin to look for the peak anew."""
        self._peak = self.in_use

    def allocate(self, size: int) -> Any:
        """A buffer of at least so many bytes.

        Raises `LimitReachedError` beyond the limit, and what PyOpenCL raises where the device has
        no room; both only after what is kept for later was given back.
        """
        with self._lock.native:
            data = self._within_limits(size) if limits else self._pool.allocate(size)
            self._peak = max(self._peak, self._pool.active_bytes)
            return data

    __call__ = allocate  # what PyOpenCL takes for an allocator

    def release(self) -> None:
        """Give the memory that no array uses back to the driver."""
        self._pool.free_held()

    def _within_limits(self, size: int) -> Any:
        needed = int(self._pool.alloc_size(self._pool.bin_number(size)))
        with _counting.native:
            if needed <= self._room()[0]:
                return self._pool.allocate(size)
            data = self._kept(size, needed)
            if data is not None:
                return data
            for each in self._neighbours():
                each.release()
            room, native = self._room()
            if needed <= room:
                return self._pool.allocate(size)
        held = sum(each.held for each in pools_of(native))
        raise LimitReachedError(
            f"{size} bytes more than the {held} in use are beyond the limit of "
            f"{int(room) + held} bytes",
            size,
        )

    def _kept(self, size: int, needed: int) -> Any:
        """A buffer that was given back and fits, where there is one.

        PyOpenCL does not tell which sizes it keeps. One that it had to make anew is dropped again:
        for that moment, the limit is exceeded.
        """
        before = self.held
        if not self._pool.held_blocks or before - self.in_use < needed:
            return None
        data = self._pool.allocate(size)
        return data if self.held <= before else None

    def _room(self) -> tuple[float, Any]:
        """How many bytes may still be taken, infinitely many without a limit, and of which device.

        Of several devices it is the one that has least left.
        """
        return min(
            ((_room_of(native), native) for native in self.devices), key=lambda pair: pair[0]
        )

    def _neighbours(self) -> list[Pool]:
        """Every pool that shares a device with this one, and it itself."""
        return [each for each in _pools if set(each.devices) & set(self.devices)]


def _room_of(native: Any) -> float:
    return limits.get(native, inf) - sum(each.held for each in pools_of(native))
