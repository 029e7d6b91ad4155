"""The one queue of each OpenCL device and context, which all of our work there goes through."""

from __future__ import annotations

from typing import Any

import pyopencl as cl

from anydevice.core.locking import made_once


@made_once
def queue_of_device(native: Any) -> Any:
    """The queue of a `pyopencl.Device`, in a context of its own that is made on first use."""
    return queue_of_context(cl.Context([native]))


@made_once
def queue_of_context(context: Any) -> Any:
    """The queue that all our work in a context goes through."""
    return cl.CommandQueue(context)
