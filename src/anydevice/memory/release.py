"""Giving back memory that no array uses."""

from __future__ import annotations

import gc
from collections.abc import Callable

from anydevice.choose.scope import device as choose_device
from anydevice.core.device import Device
from anydevice.engines import registry
from anydevice.engines.lookup import place_of

_callbacks: list[Callable[[Device], None]] = []


def on_release(give_back: Callable[[Device], None]) -> Callable[[Device], None]:
    """Call a function, too, whenever a device's memory is released; used as a decorator."""
    _callbacks.append(give_back)
    return give_back


def release(device: Device | str | None = None) -> None:
    """Give the memory of a device that no array uses back to it; without one, that of all.

    Array libraries keep the memory of arrays that are gone, for later ones, and copies to a CUDA
    device keep pinned memory of the host. Other libraries and other programs cannot use either
    until it is given back. Whatever is in use stays, and so does what JAX took at its start: it
    keeps that until its process ends. Later allocations and copies take their memory anew, so call
    this where memory is short, and not in a loop.

    >>> import anydevice
    >>> anydevice.release("cpu")

    No library is imported or started for it. Raises `DeviceNotFoundError` where a device that is
    named is not usable.
    """
    place = None if device is None else place_of(choose_device(device))
    for engine in registry.started_engines():
        for each in engine.devices():
            if place is None or each == place:
                for give_back in _callbacks:
                    give_back(each)
                engine.memory.release(each)


def free_what_failed() -> None:
    """Collect what a call that ran out of memory left behind, and give it back.

    The frames of the error have to be cleared before: see `out_of_memory.let_go`.
    """
    gc.collect()
    release()
