"""`release`: return cached memory to a device."""

from __future__ import annotations

import gc
from collections.abc import Callable

from anydevice.choose.scope import one_device
from anydevice.core.device import Device
from anydevice.engines import registry

_callbacks: list[Callable[[Device], None]] = []


def on_release(give_back: Callable[[Device], None]) -> Callable[[Device], None]:
    """Also call a function whenever a device's memory is released; used as a decorator."""
    _callbacks.append(give_back)
    return give_back


def release(device: Device | str | None = None) -> None:
    """Release cached memory of a device, or of all devices.

    Array libraries cache the memory of deleted arrays, and copies to a CUDA device cache pinned
    host memory. Other libraries and programs cannot use either until it is released. Memory in use
    stays, and so does what JAX preallocated: it keeps that until its process ends. Later
    allocations and copies have to allocate again, so call this when memory is short, and not in a
    loop.

    >>> import anydevice
    >>> anydevice.release("cpu")

    No library is imported or started for it. Raises `DeviceNotFoundError` if the given device is
    not usable.
    """
    place = None if device is None else one_device(device)
    for engine in registry.started_engines():
        for each in engine.devices():
            if place is None or each == place:
                for give_back in _callbacks:
                    give_back(each)
                engine.memory.release(each)


def free_what_failed() -> None:
    """Collect and release the memory of a call that ran out of memory.

    The frames of the error have to be cleared first: see `out_of_memory.let_go`.
    """
    gc.collect()
    release()
