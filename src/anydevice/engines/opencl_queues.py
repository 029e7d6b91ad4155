"""The one queue of each OpenCL device, and the memory that arrays lie in.

All work of a device goes through one queue that keeps its order. A buffer that is given back is
therefore free for whatever is started later, even while work that was started before still uses it.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import pyopencl as cl
import pyopencl.tools as cl_tools

_LEADING_BITS = 7
"""Sizes are rounded up to so many leading bits: 1 % is lost, and about equal ones are reused."""


@cache
def queue_of_device(native: Any) -> Any:
    """The queue of a `pyopencl.Device`, in a context of its own that is made on first use."""
    return queue_of_context(cl.Context([native]))


@cache
def queue_of_context(context: Any) -> Any:
    """The queue that all our work in a context goes through."""
    return cl.CommandQueue(context)


@cache
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
"""The most bytes that a pool may take of each `pyopencl.Device`, where there is a limit."""


class LimitReachedError(cl.MemoryError):  # type: ignore[misc]  # PyOpenCL's is untyped
    """An array would have gone beyond the limit of its pool; `asked` is its size in bytes."""

    def __init__(self, message: str, asked: int) -> None:
        super().__init__(message)
        self.asked = asked


class Pool:
    """The memory of one context: counted, kept for later arrays, and limited where asked.

    Allocating takes microseconds where a buffer of about that size was given back before. A new
    one is filled in at once, which waits for the queue, so that a device without room says so
    here and not in the middle of a computation.
    """

    def __init__(self, queue: Any) -> None:
        allocator = cl_tools.ImmediateAllocator(queue)
        self._pool: Any = cl_tools.MemoryPool(allocator, leading_bits_in_bin_id=_LEADING_BITS)
        self._lock = threading.Lock()
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
        with self._lock:
            if limits:
                self._make_room(size)
            data = self._pool.allocate(size)
            self._peak = max(self._peak, self._pool.active_bytes)
            return data

    __call__ = allocate  # what PyOpenCL takes for an allocator

    def release(self) -> None:
        """Give the memory that no array uses back to the driver."""
        self._pool.free_held()

    def _make_room(self, size: int) -> None:
        limit = min((limits[native] for native in self.devices if native in limits), default=None)
        needed = self._pool.alloc_size(self._pool.bin_number(size))
        if limit is None or self.held + needed <= limit:
            return
        self.release()
        if self.held + needed > limit:
            raise LimitReachedError(
                f"{size} bytes more than the {self.in_use} in use are beyond the limit of "
                f"{limit} bytes",
                size,
            )
