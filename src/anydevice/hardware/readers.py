"""Which reader looks at which backend; each loads when it first looks.

Loading them takes longer than most of them look, and can be done while a driver is being asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from anydevice.core.facts import Facts
from anydevice.core.finding import Sighting
from anydevice.core.late import load

Look = Callable[[float], Sighting]
"""A reader: looks at the machine for at most so many seconds, and never raises."""


def _reader(backend: str) -> Look:
    def look(limit: float) -> Sighting:
        sighting: Sighting = load(f"anydevice.hardware.{backend}:look")(limit)
        return sighting

    return look


# Those that ask a child come first, so that it works while the others load.
READERS: dict[str, Look] = {
    backend: _reader(backend) for backend in ("opencl", "cuda", "cpu", "rocm", "tpu", "metal")
}

_TELL_FREE_MEMORY = ("cuda", "rocm", "metal", "cpu")


def free_memory(backend: str, index: int, facts: Facts) -> Facts:
    """The same facts with the free memory of this moment, where the backend can tell."""
    if backend not in _TELL_FREE_MEMORY:
        return facts
    now: int | None = load(f"anydevice.hardware.{backend}:free_memory")(index, facts)
    return facts if now is None else replace(facts, free_memory=now)
