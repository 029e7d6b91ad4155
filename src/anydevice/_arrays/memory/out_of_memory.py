"""Out of memory: every library's own error becomes an `OutOfMemoryError` that says what to do."""

from __future__ import annotations

import gc
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType, TracebackType
from typing import Any, ParamSpec, TypeVar

from anydevice._core.device import Device
from anydevice._core.engine import Engine, MemoryUse
from anydevice._core.finding import Facts, same_card
from anydevice._core.record import Record
from anydevice._core.text import format_size
from anydevice._machine.discovery.discover import discover
from anydevice._machine.engines import registry
from anydevice._machine.engines.registry import owner_of
from anydevice._machine.hardware.readers import processes
from anydevice.errors import AnyDeviceError, OutOfMemoryError

P = ParamSpec("P")
T = TypeVar("T")

_RESUMABLE = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR
_SMALLER_BATCH = "a smaller batch; anydevice.find_batch_size(fn, start) finds the largest that fits"
_HIGHER_LIMIT = "a higher limit, with anydevice.configure(memory=…)"
_SMALLER_DTYPE = "a smaller dtype, such as bfloat16, and checkpointing where you train"
_HOST_ERROR = re.compile(
    r"DefaultCPUAllocator|alloc_cpu|^std::bad_alloc$|\bCPU\b|\b[Hh]ost memory\b"
)
_CARD_ERROR = re.compile(r"\bGPU (\d+)\b")
_AMBIGUOUS = "OUT_OF_RESOURCES"
_LEAST_TO_TELL = 2**20
_MOST_PROCESSES = 4


class RanOut(Record):
    """An out-of-memory error, and the engine that raised it; `None` for Python or unknown."""

    error: BaseException
    engine: Engine | None


def ran_out(error: BaseException) -> RanOut | None:
    """Return the out-of-memory error in a chain of causes, if a group has no other; else `None`."""
    return _ran_out(error, frozenset())


def _ran_out(error: BaseException | None, above: frozenset[int]) -> RanOut | None:
    if error is None or id(error) in above:  # causes may form a cycle
        return None
    above |= {id(error)}
    if isinstance(error, OutOfMemoryError):
        behind = _ran_out(error.__cause__, above)
        return RanOut(error, behind.engine if behind else None)
    if type(error) is MemoryError:
        return RanOut(error, None)
    for engine in _imported_engines(error):
        if engine.memory.ran_out(error):
            return RanOut(error, engine)
    if isinstance(error, MemoryError):
        return RanOut(error, None)
    if isinstance(error, BaseExceptionGroup):
        inside = [_ran_out(inner, above) for inner in error.exceptions]
        if all(inside):
            return inside[0]
    return _ran_out(error.__cause__, above)


def as_oom_error(
    error: BaseException, device: Device | None = None, *, what: str = "", smaller: bool = True
) -> OutOfMemoryError | None:
    """Return our error for a library's out-of-memory error; `None` if it is not one.

    It says how much was requested and where, how much is free there, who else uses the device and
    what to try. The library's error is its cause. `device` is the device of the call, if known;
    `what` names the object that did not fit; `smaller` is whether to advise a smaller batch. An
    `OutOfMemoryError` is returned itself, with `what` before its message.

    The frames of its traceback are cleared, so that keeping the error does not keep the memory.
    Frames that are still running, such as the caller's, cannot be cleared.
    """
    match = ran_out(error)
    if match is None:
        return None
    clear_frames(error)
    if isinstance(error, OutOfMemoryError):
        if what:
            error.args = (f"{what}: {error}",)
        return error
    ours = _ours(match, device, what, smaller)
    ours.__cause__ = error
    return ours


def raise_if_oom(
    error: BaseException,
    device: Device | None = None,
    *,
    what: str = "",
    among: tuple[Any, ...] = (),
    smaller: bool = True,
) -> None:
    """Raise our error in place of a library's out-of-memory error; return for any other error.

    `among` are the arguments of the failed call: without `device`, the device of the first array
    among them counts. `smaller` is whether to advise a smaller batch.
    """
    if isinstance(error, AnyDeviceError) and not isinstance(error, OutOfMemoryError):
        return
    place = device or _try(partial(_first_place, among))
    ours = as_oom_error(error, place, what=what, smaller=smaller)
    if ours is None:
        return
    try:
        raise ours
    finally:
        del ours, error, among  # else the error would hold this frame, and this frame the error


def in_a_line(error: BaseException, device: Device | None = None) -> str:
    """Return an error in one line, with its class; translate an out-of-memory error."""
    translated = as_oom_error(error, device) or error
    first = (str(translated).strip() or "no message").splitlines()[0]
    return f"{type(translated).__name__}: {first}"


class translating_oom:  # noqa: N801 - it is used like a function
    """A block, or decorated function, in which running out of memory is an `OutOfMemoryError`."""

    def __init__(self, device: Device | str | None = None, *, what: str = "") -> None:
        self._device = Device(device) if isinstance(device, str) else device
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            try:
                raise_if_oom(error, self._device, what=self._what)
            finally:
                del error, where

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def within(*arguments: P.args, **named: P.kwargs) -> T:
            with self:
                return function(*arguments, **named)

        return within


def clear_frames(error: BaseException) -> None:
    """Clear the frames of an error and its causes, which would keep the call's arrays alive."""
    frames = [
        frame for cause in _behind(error) for frame, _ in traceback.walk_tb(cause.__traceback__)
    ]
    unfinished = _unfinished_frames(frames)
    for frame in frames:
        if frame not in unfinished:
            try:
                frame.clear()
            except RuntimeError:  # it is running
                continue


def _behind(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its causes and contexts, and the errors of groups."""
    visited: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        error_behind = waiting.pop()
        if error_behind is None or id(error_behind) in visited:
            continue
        visited.add(id(error_behind))
        yield error_behind
        waiting += [error_behind.__cause__, error_behind.__context__]
        waiting += getattr(error_behind, "exceptions", ())


def _unfinished_frames(frames: list[FrameType]) -> set[FrameType | None]:
    """Return the frames of unfinished generators and coroutines, which clearing would end."""
    resumable = [frame for frame in frames if frame.f_code.co_flags & _RESUMABLE]
    unfinished: set[FrameType | None] = set()
    for owner in gc.get_referrers(*resumable) if resumable else ():
        if isinstance(owner, GeneratorType):
            unfinished.add(owner.gi_frame)
        elif isinstance(owner, CoroutineType):
            unfinished.add(owner.cr_frame)
        elif isinstance(owner, AsyncGeneratorType):
            unfinished.add(owner.ag_frame)
    return unfinished


def _imported_engines(error: BaseException) -> Iterator[Engine]:
    """Yield engines of imported libraries, the error's own first: their words may be the same."""
    made_in = type(error).__module__
    rows = [row for row in registry.rows().values() if row.module in sys.modules]

    def is_other(row: registry.EngineRow) -> bool:
        own = row.module.partition(".")[0], f"anydevice._engines.{row.name}"
        return not made_in.startswith(own)

    for row in sorted(rows, key=is_other):
        try:
            yield registry.load(row.name)
        except Exception:  # half imported, or damaged: the error cannot be of this library
            continue


def _first_place(arguments: tuple[Any, ...]) -> Device | None:
    for value in arguments:
        inside = value if isinstance(value, list | tuple) else (value,)
        for x in inside:
            owner = owner_of(x)
            places = owner.devices_of(x) if owner is not None else ()
            if places:
                return places[0]
    return None


def _ours(match: RanOut, device: Device | None, what: str, smaller: bool) -> OutOfMemoryError:
    engine, error = match.engine, match.error
    if isinstance(error, OutOfMemoryError):
        return _again(error, what)
    requested = _try(lambda: engine.memory.asked(error)) if engine else None
    place = _try(lambda: place_of_error(error, engine, device))
    facts = _try(lambda: place.facts) if place else None
    usage = _try(lambda: engine.memory.use(place)) if engine and place else None
    lines = [headline(place, requested, facts)]
    if engine and usage:
        lines.append(holding(engine, usage))
    lines += _try_all(lambda: doubts(error))
    if place:
        lines += _try_all(lambda: own_limit(place))
    if place and facts:
        lines += _try_all(lambda: others(place, facts))
    advice = [*(giving_back(usage) if usage else ())]
    if smaller:
        advice.append(_SMALLER_BATCH)
    if usage and usage.limit is not None:
        advice.append(_HIGHER_LIMIT)
    advice += [_SMALLER_DTYPE, *_try_all(lambda: elsewhere(place, requested, facts))]
    lines += [f"try {tip}" for tip in advice]
    message = "\n  ".join(lines)
    return OutOfMemoryError(
        f"{what}: {message}" if what else message,
        asked=requested,
        free=facts.free_memory if facts else None,
        total=facts.total_memory if facts else None,
        device=place,
        advice=advice,
    )


def _again(error: OutOfMemoryError, what: str) -> OutOfMemoryError:
    """Return a copy of our error, for an error that was raised from it and becomes its cause."""
    return OutOfMemoryError(
        f"{what}: {error}" if what else str(error),
        asked=error.asked,
        free=error.free,
        total=error.total,
        device=error.device,
        advice=error.advice,
    )


def _try(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except Exception:  # anything may fail without memory, and the error itself matters more
        return None


def _try_all(ask: Callable[[], Iterable[str]]) -> list[str]:
    return _try(lambda: list(ask())) or []


def place_of_error(
    error: BaseException, engine: Engine | None, device: Device | None
) -> Device | None:
    """Return the device whose memory ran out: from the error's text, else `device`.

    Placing on a card can fail because the host is out of memory, and the other way round.
    """
    if engine is None:
        return Device("cpu")
    text = str(error)
    if _HOST_ERROR.search(text):
        return Device("cpu")
    card, devices = _CARD_ERROR.search(text), engine.devices()
    for known in devices:
        if card is not None and known.kind != "cpu" and known.index == int(card[1]):
            return known
    if device in devices:
        return device
    return devices[0] if len({known.backend for known in devices}) == 1 else device


def headline(place: Device | None, requested: int | None, facts: Facts | None) -> str:
    """Return the first line: whose memory, how much was requested, how much is free."""
    parts = [f"{format_size(requested)} were asked for"] if requested is not None else []
    if facts is not None and facts.free_memory is not None:
        of = f" of {format_size(facts.total_memory)}" if facts.total_memory is not None else ""
        parts.append(f"{format_size(facts.free_memory)}{of} are free")
    elif facts is not None and facts.total_memory is not None:
        parts.append(f"it has {format_size(facts.total_memory)} in all")
    where = str(place) if place is not None else "the device"
    return f"{where} is out of memory" + (f": {', '.join(parts)}" if parts else "")


def holding(engine: Engine, usage: MemoryUse) -> str:
    """Return how much memory the library holds, as a sentence."""
    limit = f", and may hold {format_size(usage.limit)}" if usage.limit is not None else ""
    ahead = ", taken at its start before any array needed it" if usage.preallocated else ""
    return (
        f"{engine.name} holds {format_size(usage.reserved)} in this process{ahead}, "
        f"{format_size(usage.in_use)} of it in arrays{limit}"
    )


def doubts(error: BaseException) -> Iterator[str]:
    """Yield another cause if the error has several meanings."""
    if _AMBIGUOUS in str(error):
        yield (
            f"or a kernel failed: drivers say {_AMBIGUOUS} of one that reads beyond its arrays, "
            "or needs more registers or local memory than there are, too"
        )


def others(place: Device, facts: Facts) -> Iterator[str]:
    """Yield the other processes with the most memory there, if the driver reports them."""
    least = max(_LEAST_TO_TELL, (facts.total_memory or 0) // 100)
    using = [
        process
        for process in processes(place.backend, place.index, facts)
        if process.pid != os.getpid() and (process.memory or 0) >= least
    ]
    if using:
        named = [f"{p.name} (pid {p.pid}) {format_size(p.memory)}" for p in using]
        more = len(named) - _MOST_PROCESSES
        last = [f"and {more} more"] if more > 0 else []
        yield f"others hold memory there: {', '.join(named[:_MOST_PROCESSES] + last)}"


def own_limit(place: Device) -> Iterator[str]:
    """Yield the limit of this process's address space, if it has one."""
    if place.backend == "cpu" and sys.platform != "win32":
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            yield f"the address space of this process ends at {format_size(limit)} (ulimit -v)"


def giving_back(usage: MemoryUse) -> Iterator[str]:
    """Yield the advice to release memory, if there is some that no array uses."""
    unused = 0 if usage.preallocated else usage.reserved - usage.in_use
    if unused >= _LEAST_TO_TELL:
        yield f"anydevice.release(), which gives {format_size(unused)} back that no array uses"


def elsewhere(place: Device | None, requested: int | None, facts: Facts | None) -> Iterator[str]:
    """Yield the advice to use the device with the most free memory, if it has enough."""
    free: dict[Device, int] = {}
    for device in discover().devices if requested is not None else ():
        if device == place or not device.usable or (device.kind == "cpu") > (device.index == 0):
            continue
        there = device.facts
        shared = facts is not None and (
            same_card(facts, there) or facts.memory_kind == there.memory_kind != "dedicated"
        )
        if not shared and (there.free_memory or 0) > (requested or 0):
            free[device] = there.free_memory or 0
    if free:
        best = max(free, key=lambda device: (device.kind != "cpu", free[device]))
        alone = "; anydevice.cpu_fallback(fn) goes there by itself" if best.kind == "cpu" else ""
        yield f"{best}, which has {format_size(free[best])} free{alone}"
