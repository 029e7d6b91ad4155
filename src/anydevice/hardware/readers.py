"""Which reader looks at which backend; each loads when it first looks.

Loading them takes longer than most of them look, and can be done while a driver is being asked.
"""

from __future__ import annotations

from collections.abc import Callable

from anydevice.core.facts import Facts
from anydevice.core.finding import Sighting
from anydevice.core.late import load
from anydevice.core.record import replace

Look = Callable[[float], Sighting]
"""A reader: looks at the machine for at most so many seconds, and never raises."""

Begin = Callable[[], Look]
"""Starts what a reader can start, and returns the rest of it."""


def _asking_children(backend: str) -> Begin:
    def begin() -> Look:
        look: Look = load(f"anydevice.hardware.{backend}:begin")()
        return look

    return begin


def _reading_files(backend: str) -> Begin:
    def look(limit: float) -> Sighting:
        sighting: Sighting = load(f"anydevice.hardware.{backend}:look")(limit)
        return sighting

    return lambda: look


# Those that ask a child come first, so that it works while the others load.
READERS: dict[str, Begin] = {
    "opencl": _asking_children("opencl"),
    "cuda": _asking_children("cuda"),
    "cpu": _reading_files("cpu"),
    "rocm": _reading_files("rocm"),
    "tpu": _reading_files("tpu"),
    "metal": _reading_files("metal"),
}

_TELL_FREE_MEMORY = ("cuda", "rocm", "metal", "cpu")


def free_memory(backend: str, index: int, facts: Facts) -> Facts:
    """The same facts with the free memory of this moment, where the backend can tell."""
    if backend not in _TELL_FREE_MEMORY:
        return facts
    now: int | None = load(f"anydevice.hardware.{backend}:free_memory")(index, facts)
    return facts if now is None else replace(facts, free_memory=now)
