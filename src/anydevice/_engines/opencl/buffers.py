"""The memory of OpenCL arrays: queues, memory pools, and views by shape, strides and offset.

All work of a context goes through one queue that keeps its order. So a buffer that is given back
is free at once, even if earlier work still uses it.

PyOpenCL's own kernels ignore most strides. Ours do not, so whatever only rearranges elements is a
view. Strides and offsets are counted in elements here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf, prod
from typing import Any

import numpy as np
import pyopencl as cl
import pyopencl.tools as cl_tools
from pyopencl.array import Array

from anydevice._core.dtypes import DType
from anydevice._core.locks import ForkSafeLock, made_once

Ints = tuple[int, ...]

_LEADING_BITS = 7
"""Leading bits to which sizes are rounded up: 1 % is lost, and similar buffers are reused."""
_SMALL = 2**16
_SHARED = "shares_memory_with_another"

limits: dict[Any, int] = {}
"""The most bytes that all pools on a `pyopencl.Device` may take of it, where there is a limit."""

_pools: list[Pool] = []
_counting = ForkSafeLock()
"""Pools with limits allocate one at a time, since they may share a device."""


@made_once
def queue_of_device(native: cl.Device) -> Any:
    """Return the queue of a `pyopencl.Device`; its context is made on first use."""
    return queue_of_context(cl.Context([native]))


@made_once
def queue_of_context(context: cl.Context) -> Any:
    """Return the queue that all our work in a context goes through."""
    return cl.CommandQueue(context)


@made_once
def pool(context: cl.Context) -> Pool:
    """Return the pool that arrays of a context take their memory from."""
    made = Pool(queue_of_context(context))
    _pools.append(made)
    return made


def pools_of(native: cl.Device) -> list[Pool]:
    """Return the existing pools of a `pyopencl.Device`."""
    return [made for made in _pools if native in made.devices]


class LimitReachedError(cl.MemoryError):  # type: ignore[misc]  # PyOpenCL's is untyped
    """An array would have exceeded its device's limit of memory; `asked` is its size in bytes."""

    def __init__(self, message: str, size: int) -> None:
        super().__init__(message)
        self.asked = size


class Pool:
    """The memory of one context; new buffers are written at once, so a full device raises here."""

    def __init__(self, queue: cl.CommandQueue) -> None:
        allocator = cl_tools.ImmediateAllocator(queue)
        self._pool: Any = cl_tools.MemoryPool(allocator, leading_bits_in_bin_id=_LEADING_BITS)
        self._lock = ForkSafeLock()
        self._peak = 0
        self.devices: tuple[Any, ...] = tuple(queue.context.devices)

    @property
    def in_use(self) -> int:
        """The bytes of arrays."""
        return int(self._pool.active_bytes)

    @property
    def held(self) -> int:
        """The bytes that were taken from the driver, cached ones included."""
        return int(self._pool.managed_bytes)

    @property
    def peak(self) -> int:
        """The most bytes that were in use since the start, or `reset_peak`."""
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self.in_use

    def allocate(self, size: int) -> Any:
        """Return a buffer of at least `size` bytes; a full device first gives back its cache."""
        with self._lock.native:
            data = self._within_limits(size) if limits else self._pool.allocate(size)
            self._peak = max(self._peak, self._pool.active_bytes)
            return data

    __call__ = allocate  # the protocol of PyOpenCL's allocators

    def release(self) -> None:
        """Give the memory that no array uses back to the driver."""
        self._pool.free_held()

    def _within_limits(self, size: int) -> Any:
        needed = int(self._pool.alloc_size(self._pool.bin_number(size)))
        with _counting.native:
            if needed <= self._bytes_left()[0]:
                return self._pool.allocate(size)
            data = self._reuse(size, needed)
            if data is not None:
                return data
            for pool in _pools:
                if set(pool.devices) & set(self.devices):
                    pool.release()
            left, native = self._bytes_left()
            if needed <= left:
                return self._pool.allocate(size)
        in_use = sum(pool.held for pool in pools_of(native))
        raise LimitReachedError(
            f"{size} bytes more, with {in_use} in use, would exceed the limit of "
            f"{int(left) + in_use} bytes",
            size,
        )

    def _reuse(self, size: int, needed: int) -> Any:
        """Return an unused buffer that fits, or `None`."""
        before = self.held
        if not self._pool.held_blocks or before - self.in_use < needed:
            return None
        # PyOpenCL does not tell what it keeps: a new buffer exceeds the limit for a moment.
        data = self._pool.allocate(size)
        return data if self.held <= before else None

    def _bytes_left(self) -> tuple[float, Any]:
        """Return the bytes below the limit of the device that has the fewest, and the device."""
        left = {
            native: limits.get(native, inf) - sum(pool.held for pool in pools_of(native))
            for native in self.devices
        }
        native = min(left, key=left.__getitem__)
        return left[native], native


def new(shape: Ints, dtype: DType, context: cl.Context) -> Array:
    """Return a new array in C order, not initialized."""
    kind = dtype.numpy()
    size = prod(shape) * kind.itemsize
    memory = pool(context)
    data = memory.allocate(size) if size else None
    return Array(queue_of_context(context), shape, kind, allocator=memory, data=data)


def from_host(values: Any, context: cl.Context) -> Array:
    """Return a NumPy array on the device; a small one without waiting, and not counted."""
    queue, memory = queue_of_context(context), pool(context)
    if not values.size:
        return Array(queue, values.shape, values.dtype, allocator=memory)
    # A reference to the bytes: PyOpenCL asks for a buffer, which dtypes of ml_dtypes do not give.
    raw = values.reshape(-1).view(np.uint8)
    if values.nbytes <= _SMALL:
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
        data = cl.Buffer(context, flags, hostbuf=raw)
    else:
        data = memory.allocate(values.nbytes)
        cl.enqueue_copy(queue, data, raw)
    return Array(queue, values.shape, values.dtype, allocator=memory, data=data)


def view(x: Array, shape: Ints, strides: Ints, offset: int) -> Array:
    """Return the memory of an array as one of another shape, strides and offset."""
    itemsize = x.dtype.itemsize
    result = Array(
        queue_of_context(x.context),
        shape,
        x.dtype,
        allocator=x.allocator,
        data=x.base_data,
        offset=offset * itemsize,
        strides=tuple(stride * itemsize for stride in strides),
        events=x.events,
    )
    setattr(result, _SHARED, True)
    return result


def strides_of(x: Array) -> Ints:
    """Return the strides of an array in elements."""
    itemsize = x.dtype.itemsize
    return tuple(stride // itemsize for stride in x.strides)


def offset_of(x: Array) -> int:
    """Return the offset of the first element in the buffer, in elements."""
    return int(x.offset // x.dtype.itemsize)


def may_be_written(x: Array) -> bool:
    """Whether the array is in C order and not known to share its memory with a view."""
    return not x.offset and is_plain(x) and not hasattr(x, _SHARED)


def is_plain(x: Array) -> bool:
    """Whether the elements follow each other in C order."""
    return not x.size or collapsed(x.shape, strides_of(x))[1][0] in ((1,), ())


@lru_cache(maxsize=4096)
def collapsed(shape: Ints, *strides: Ints) -> tuple[Ints, tuple[Ints, ...]]:
    """Return the shape with as few axes as walk through all operands, and their strides there.

    Axes of size 1 are left out; neighbours that are one step in every operand become one axis.

    >>> collapsed((2, 3, 4), (12, 4, 1), (0, 4, 1))
    ((2, 12), ((12, 1), (0, 1)))
    """
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        here = [of_one[axis] for of_one in strides]
        if sizes and all(
            merged[-1] == size * step for merged, step in zip(steps, here, strict=True)
        ):
            sizes[-1] *= size
            for merged, step in zip(steps, here, strict=True):
                merged[-1] = step
        else:
            sizes.append(size)
            for merged, step in zip(steps, here, strict=True):
                merged.append(step)
    return tuple(sizes), tuple(tuple(merged) for merged in steps)


def broadcast_strides(x: Array, shape: Ints) -> Ints:
    """Return the strides in a larger shape; raises `ValueError` if `x` does not broadcast to it."""
    missing = len(shape) - x.ndim
    own = strides_of(x)
    if missing < 0 or any(
        mine not in (1, size) for mine, size in zip(x.shape, shape[missing:], strict=True)
    ):
        raise ValueError(f"an array {x.shape} cannot be repeated to {shape}")
    repeated = (0 if mine == 1 else step for mine, step in zip(x.shape, own, strict=True))
    return (*(0,) * missing, *repeated)


def broadcast_shape(*shapes: Ints) -> Ints:
    """Return the shape that these broadcast to; raises `ValueError` if they do not."""
    first = shapes[0]
    if all(shape == first for shape in shapes):
        return first
    return np.broadcast_shapes(*shapes)


def plain_strides(shape: Sequence[int]) -> Ints:
    """Return the strides of C order."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def reshaped_strides(x: Array, shape: Ints) -> Ints | None:
    """Return the strides with which an array is read in another shape; `None` if none would do."""
    sizes, (steps,) = collapsed(x.shape, strides_of(x))
    strides: list[int] = []
    axis, left = len(sizes) - 1, 1
    step = steps[-1] if steps else 1
    for size in reversed(shape):
        if size == 1:
            strides.append(step)
            continue
        if left == 1:
            left, step = sizes[axis], steps[axis]
            axis -= 1
        if left % size:
            return None
        strides.append(step)
        left //= size
        step *= size
    return tuple(reversed(strides))
