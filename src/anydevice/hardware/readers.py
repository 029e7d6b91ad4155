"""Which reader looks at which backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from anydevice.core.facts import Facts
from anydevice.core.finding import Sighting
from anydevice.hardware import cpu, cuda, metal, opencl, rocm, tpu

Look = Callable[[float], Sighting]
"""A reader: looks at the machine for at most so many seconds, and never raises."""

READERS: dict[str, Look] = {
    "cuda": cuda.look,
    "rocm": rocm.look,
    "metal": metal.look,
    "tpu": tpu.look,
    "opencl": opencl.look,
    "cpu": cpu.look,
}

_FREE_MEMORY: dict[str, Callable[[int, Facts], int | None]] = {
    "cuda": cuda.free_memory,
    "rocm": rocm.free_memory,
    "metal": metal.free_memory,
    "cpu": cpu.free_memory,
}


def free_memory(backend: str, index: int, facts: Facts) -> Facts:
    """The same facts with the free memory of this moment, where the backend can tell."""
    read = _FREE_MEMORY.get(backend)
    now = read(index, facts) if read else None
    return facts if now is None else replace(facts, free_memory=now)
