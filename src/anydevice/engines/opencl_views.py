"""Arrays of PyOpenCL as containers: new ones, and views by shape, strides and offset.

PyOpenCL's arrays carry strides but its own kernels ignore most of them. Ours do not, so whatever
only rearranges elements is a view. Strides and offsets are counted in elements here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import pyopencl as cl
import pyopencl.array as cl_array

from anydevice.core.dtypes import DType
from anydevice.engines.opencl_pools import pool
from anydevice.engines.opencl_queues import queue_of_context

Ints = tuple[int, ...]

_MARK = "shares_memory_with_another"
_SMALL = 2**16


def new(shape: Ints, dtype: DType, context: Any) -> Any:
    """A new array in C order; what its elements are is not said."""
    kind = dtype.numpy()
    size = prod(shape) * kind.itemsize
    room = pool(context)
    data = room.allocate(size) if size else None
    return cl_array.Array(queue_of_context(context), shape, kind, allocator=room, data=data)


def from_host(values: Any, context: Any) -> Any:
    """A NumPy array on the device; a small one without waiting for what is under way there.

    A small one is not counted among the memory in use.
    """
    queue, room = queue_of_context(context), pool(context)
    if not values.size:
        return cl_array.Array(queue, values.shape, values.dtype, allocator=room)
    # A reference to the bytes: PyOpenCL asks for a buffer, which types of ml_dtypes do not give.
    raw = values.reshape(-1).view(np.uint8)
    if values.nbytes <= _SMALL:
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
        data = cl.Buffer(context, flags, hostbuf=raw)
    else:
        data = room.allocate(values.nbytes)
        cl.enqueue_copy(queue, data, raw)
    return cl_array.Array(queue, values.shape, values.dtype, allocator=room, data=data)


def view(x: Any, shape: Ints, strides: Ints, offset: int) -> Any:
    """The memory of an array seen with another shape, strides and offset."""
    itemsize = x.dtype.itemsize
    seen = cl_array.Array(
        queue_of_context(x.context),
        shape,
        x.dtype,
        allocator=x.allocator,
        data=x.base_data,
        offset=offset * itemsize,
        strides=tuple(stride * itemsize for stride in strides),
        events=x.events,
    )
    setattr(seen, _MARK, True)
    return seen


def strides_of(x: Any) -> Ints:
    """The strides of an array in elements."""
    itemsize = x.dtype.itemsize
    return tuple(stride // itemsize for stride in x.strides)


def offset_of(x: Any) -> int:
    """The way from the start of its buffer to the first element, in elements."""
    return int(x.offset // x.dtype.itemsize)


def events_of(*arrays: Any) -> list[Any] | None:
    """What must have happened on other queues before arrays can be read; `None` for nothing."""
    waiting = [event for x in arrays if x.events for event in x.events]
    return waiting or None


def may_be_written(x: Any) -> bool:
    """Whether the array is in C order and, as far as we know, nobody else's view of its memory."""
    return not x.offset and is_plain(x) and not hasattr(x, _MARK)


def is_plain(x: Any) -> bool:
    """Whether the elements follow each other in C order."""
    return not x.size or _collapsed(x.shape, (strides_of(x),))[1][0] in ((1,), ())


def collapsed(shape: Ints, *strides: Ints) -> tuple[Ints, tuple[Ints, ...]]:
    """The shape with as few axes as walk through all operands, and each one's strides there.

    Axes of size 1 are left out; neighbours that are one step in every operand become one axis.

    >>> collapsed((2, 3, 4), (12, 4, 1), (0, 4, 1))
    ((2, 12), ((12, 1), (0, 1)))
    """
    return _collapsed(shape, strides)


@lru_cache(maxsize=4096)
def _collapsed(shape: Ints, strides: tuple[Ints, ...]) -> tuple[Ints, tuple[Ints, ...]]:
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        here = [of_one[axis] for of_one in strides]
        if sizes and all(kept[-1] == size * step for kept, step in zip(steps, here, strict=True)):
            sizes[-1] *= size
            for kept, step in zip(steps, here, strict=True):
                kept[-1] = step
        else:
            sizes.append(size)
            for kept, step in zip(steps, here, strict=True):
                kept.append(step)
    return tuple(sizes), tuple(tuple(kept) for kept in steps)


def broadcast_strides(x: Any, shape: Ints) -> Ints:
    """The strides with which an array is read as if it had a larger shape.

    Raises `ValueError` where it cannot be repeated to that shape.
    """
    missing = len(shape) - x.ndim
    own = strides_of(x)
    if missing < 0 or any(
        mine not in (1, size) for mine, size in zip(x.shape, shape[missing:], strict=True)
    ):
        raise ValueError(f"an array {x.shape} cannot be repeated to {shape}")
    repeated = (0 if mine == 1 else step for mine, step in zip(x.shape, own, strict=True))
    return (*(0,) * missing, *repeated)


def broadcast_shape(*shapes: Ints) -> Ints:
    """The shape that arrays of these shapes have together.

    Raises `ValueError` where they have none.
    """
    first = shapes[0]
    if all(shape == first for shape in shapes):
        return first
    together: Ints = np.broadcast_shapes(*shapes)
    return together


def plain_strides(shape: Sequence[int]) -> Ints:
    """The strides of C order."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def reshaped_strides(x: Any, shape: Ints) -> Ints | None:
    """The strides with which an array is read in another shape; `None` where none would do."""
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
