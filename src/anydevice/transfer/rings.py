"""The ring of each device: made on the first large copy, sized to the machine, given back."""

from __future__ import annotations

import os
import threading

from anydevice.core.device import Device
from anydevice.engines.cuda_driver import driver_of
from anydevice.transfer.pieces import usable_cores
from anydevice.transfer.staging import MOST_LANES, Ring

_rings: dict[tuple[int, int], Ring] = {}
_making = threading.Lock()


def ring_of(device: Device) -> Ring | None:
    """The ring for copies to and from a device; `None` where copies are not staged."""
    if device.backend != "cuda":
        return None
    key = (os.getpid(), device.index)  # a forked child has neither the threads nor the context
    with _making:
        if key not in _rings:
            _rings[key] = Ring(driver_of(device.index), _lanes())
        return _rings[key]


def release_ring(device: Device) -> None:
    """Give a ring's pinned memory and threads back; the next large copy makes it anew."""
    with _making:
        ring = _rings.pop((os.getpid(), device.index), None) if device.backend == "cuda" else None
    if ring is not None:
        ring.close()


def _lanes() -> int:
    """One lane a core that this process may use, as far as more of them help."""
    return max(1, min(MOST_LANES, usable_cores()))
