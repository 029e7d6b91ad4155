"""The one queue of each OpenCL device, and the memory that results are made in.

All work of a device goes through one queue that keeps its order. A buffer that is given back is
therefore free for whatever is started later, even while work that was started before still uses it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pyopencl as cl
import pyopencl.tools as cl_tools


@cache
def queue_of_device(native: Any) -> Any:
    """The queue of a `pyopencl.Device`, in a context of its own that is made on first use."""
    return queue_of_context(cl.Context([native]))


@cache
def queue_of_context(context: Any) -> Any:
    """The queue that all our work in a context goes through."""
    return cl.CommandQueue(context)


@cache
def pool(context: Any) -> Any:
    """Where results of a context get their memory, and give it back to.

    Allocating takes microseconds where a buffer of about that size was given back before. A new
    one is filled in at once, which waits for the queue, so that a device without room says so
    here and not in the middle of a computation.
    """
    return cl_tools.MemoryPool(cl_tools.ImmediateAllocator(queue_of_context(context)))


def release(context: Any) -> None:
    """Give the memory that no array uses back to the driver."""
    pool(context).free_held()
