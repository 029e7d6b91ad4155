"""What an allocation that failed met with, in words: whose memory, what is free, what may help."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

from anydevice.choose.discovery import discover
from anydevice.core.device import Device
from anydevice.core.engine import Engine, MemoryUse
from anydevice.core.facts import Facts
from anydevice.core.sizes import format_size
from anydevice.engines.places import place_of
from anydevice.hardware.identity import same_card
from anydevice.hardware.readings import processes

_OF_THE_HOST = re.compile(r"DefaultCPUAllocator|alloc_cpu|\bCPU\b|\b[Hh]ost memory\b")
_OF_A_CARD = re.compile(r"\bGPU (\d+)\b")
_AMBIGUOUS = "OUT_OF_RESOURCES"
_WORTH_TELLING = 2**20
_MOST_PROCESSES = 4


def place_of_error(
    error: BaseException, engine: Engine | None, device: Device | None
) -> Device | None:
    """Whose memory it was: as far as the error tells, else where the library was to work.

    Placing on a card can fail for want of the host's memory, and the other way round.

    >>> place_of_error(MemoryError(), None, Device("cuda:0"))
    Device("cpu")
    """
    if engine is None or engine.name == "numpy":
        return Device("cpu")
    text = str(error)
    if _OF_THE_HOST.search(text):
        return Device("cpu")
    card, seen = _OF_A_CARD.search(text), engine.devices()
    for each in seen:
        if card is not None and each.kind != "cpu" and each.index == int(card[1]):
            return each
    if device is not None and place_of(device) in seen:
        return device
    return seen[0] if len({each.backend for each in seen}) == 1 else device


def headline(place: Device | None, asked: int | None, facts: Facts | None) -> str:
    """The first line, which says all that matters where there is room for only one.

    >>> headline(Device("cuda:0"), 2**31, Facts("a card", total_memory=2**34, free_memory=2**30))
    'cuda:0 is out of memory: 2.0 GiB were asked for, 1.0 GiB of 16.0 GiB are free'
    """
    parts = [f"{format_size(asked)} were asked for"] if asked is not None else []
    if facts is not None and facts.free_memory is not None:
        of = f" of {format_size(facts.total_memory)}" if facts.total_memory is not None else ""
        parts.append(f"{format_size(facts.free_memory)}{of} are free")
    elif facts is not None and facts.total_memory is not None:
        parts.append(f"it has {format_size(facts.total_memory)} in all")
    where = str(place) if place is not None else "the device"
    return f"{where} is out of memory" + (f": {', '.join(parts)}" if parts else "")


def holding(engine: Engine, held: MemoryUse) -> str:
    """What the library that found no room holds already."""
    limit = f", and may hold {format_size(held.limit)}" if held.limit is not None else ""
    ahead = ", taken at its start before any array needed it" if held.preallocated else ""
    return (
        f"{engine.name} holds {format_size(held.reserved)} in this process{ahead}, "
        f"{format_size(held.in_use)} of it in arrays{limit}"
    )


def doubts(error: BaseException) -> Iterator[str]:
    """That it may not have been memory that ran out, where the error means other things too."""
    if _AMBIGUOUS in str(error):
        yield (
            f"or a kernel failed: drivers say {_AMBIGUOUS} of one that reads beyond its arrays, "
            "or needs more registers or local memory than there are, too"
        )


def others(place: Device, facts: Facts) -> Iterator[str]:
    """Who else holds memory there, where the driver tells; the largest few."""
    least = max(_WORTH_TELLING, (facts.total_memory or 0) // 100)
    using = [
        each
        for each in processes(place.backend, place.index, facts)
        if each.pid != os.getpid() and (each.memory or 0) >= least
    ]
    if using:
        named = [f"{p.name} (pid {p.pid}) {format_size(p.memory)}" for p in using]
        more = len(named) - _MOST_PROCESSES
        last = [f"and {more} more"] if more > 0 else []
        yield f"others hold memory there: {', '.join(named[:_MOST_PROCESSES] + last)}"


def own_limit(place: Device) -> Iterator[str]:
    """That this process may not have all of the host's memory, where that is so."""
    if place.backend == "cpu" and sys.platform != "win32":
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            yield f"the address space of this process ends at {format_size(limit)} (ulimit -v)"


def giving_back(held: MemoryUse) -> Iterator[str]:
    """That memory can be given back, where there is some that nothing uses."""
    unused = 0 if held.preallocated else held.reserved - held.in_use
    if unused >= _WORTH_TELLING:
        yield f"anydevice.release(), which gives {format_size(unused)} back that no array uses"


def elsewhere(place: Device | None, asked: int | None, facts: Facts | None) -> Iterator[str]:
    """The device with most free memory of its own, where that is more than was asked for."""
    free: dict[Device, int] = {}
    for device in discover().devices if asked is not None else ():
        if device == place or not device.usable or (device.kind == "cpu") > (device.index == 0):
            continue
        there = device.facts
        shared = facts is not None and (
            same_card(facts, there) or facts.memory_kind == there.memory_kind != "dedicated"
        )
        if not shared and (there.free_memory or 0) > (asked or 0):
            free[device] = there.free_memory or 0
    if free:
        best = max(free, key=lambda device: (device.kind != "cpu", free[device]))
        alone = "; anydevice.cpu_fallback(fn) goes there by itself" if best.kind == "cpu" else ""
        yield f"{best}, which has {format_size(free[best])} free{alone}"
