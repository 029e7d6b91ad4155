"""Running out of memory: every library's own error made into ours, which says what to do.

Nothing here costs anything before an error has happened: whoever calls a library catches what it
raises and asks here. That must not make things worse, so whatever cannot be found out at such a
moment is left out, and the memory that the failed try held is let go of.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType, TracebackType
from typing import Any, ParamSpec, TypeVar

from anydevice.core.device import Device
from anydevice.core.engine import Engine
from anydevice.core.record import Record
from anydevice.engines import registry
from anydevice.engines.ownership import owner_of
from anydevice.engines.places import place_of
from anydevice.errors import AnyDeviceError, OutOfMemoryError
from anydevice.memory import shortage

P = ParamSpec("P")
T = TypeVar("T")

_GOES_ON = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR
_SMALLER_BATCH = "a smaller batch; anydevice.find_batch_size(fn, start) finds the largest that fits"
_HIGHER_LIMIT = "a higher limit, with anydevice.configure(memory=…)"
_LESS_EACH = "a smaller element type, such as bfloat16, and checkpointing where you train"


class RanOut(Record):
    """The error that says that there is no memory left, and the engine whose library found out.

    `engine` is `None` where it was Python itself, or nobody knows.
    """

    error: BaseException
    engine: Engine | None


def ran_out(error: BaseException) -> RanOut | None:
    """The out-of-memory error that this is, or was raised from; `None` where it is another one.

    A group of errors is one where each of them is; else what else went wrong would be hidden.

    >>> ran_out(MemoryError()) is None, ran_out(ValueError()) is None
    (False, True)
    """
    return _ran_out(error, frozenset())


def _ran_out(error: BaseException | None, above: frozenset[int]) -> RanOut | None:
    if error is None or id(error) in above:  # causes may go round
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
        inside = [_ran_out(each, above) for each in error.exceptions]
        if all(inside):
            return inside[0]
    return _ran_out(error.__cause__, above)


def explained(
    error: BaseException, device: Device | None = None, *, what: str = "", smaller: bool = True
) -> OutOfMemoryError | None:
    """Our error for a library's out-of-memory error; `None` where it is not one.

    It says what was asked for and where, what is free there, who else uses the device and what to
    try. The library's error is its cause. `device` is where the library was told to work, if that
    is known, and `what` names the thing that found no room; `smaller` is whether a smaller batch
    can be advised. An error of ours is returned as it is, but for that name.

    What the frames hold that the error came through is let go of, so that keeping the error does
    not keep the memory. That cannot be done with frames that are still running, such as the
    caller's: what it holds, it has to let go of itself.

    >>> print(explained(MemoryError()))  # doctest: +ELLIPSIS
    cpu is out of memory: ...
    >>> explained(ValueError("something else")) is None
    True
    """
    found = ran_out(error)
    if found is None:
        return None
    let_go(error)
    if isinstance(error, OutOfMemoryError):
        if what:
            error.args = (f"{what}: {error}",)
        return error
    ours = _ours(found, device, what, smaller)
    ours.__cause__ = error
    return ours


def refuse(
    error: BaseException,
    device: Device | None = None,
    *,
    what: str = "",
    among: tuple[Any, ...] = (),
    smaller: bool = True,
) -> None:
    """Raise our error in place of a library's out-of-memory error; return for any other error.

    `among` are the arguments of the call that failed: where `device` is not known, the first array
    among them says it. `smaller` is whether a smaller batch can be advised.
    """
    if isinstance(error, AnyDeviceError) and not isinstance(error, OutOfMemoryError):
        return
    place = device or _known(partial(_first_place, among))
    ours = explained(error, place, what=what, smaller=smaller)
    if ours is None:
        return
    try:
        raise ours
    finally:
        del ours, error, among  # else the error would hold this frame, and this frame the error


def in_a_line(error: BaseException, device: Device | None = None) -> str:
    """An error in one line, with its kind: ours where it is an out-of-memory error.

    >>> in_a_line(ValueError("no such thing"))
    'ValueError: no such thing'
    """
    said = explained(error, device) or error
    first = (str(said).strip() or "no message").splitlines()[0]
    return f"{type(said).__name__}: {first}"


class explaining:  # noqa: N801 - it is used like a function
    """A block, or a decorated function, in which running out of memory is our `OutOfMemoryError`.

    For what calls a library by itself; everything of anydevice does so already.

    >>> import numpy
    >>> with explaining("cpu"):
    ...     numpy.ones(2**50)
    Traceback (most recent call last):
    ...
    anydevice.errors.OutOfMemoryError: cpu is out of memory: 8192.0 TiB were asked for, ...

    Any other error passes through untouched.
    """

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
                refuse(error, self._device, what=self._what)
            finally:
                del error, where

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def within(*arguments: P.args, **named: P.kwargs) -> T:
            with self:
                return function(*arguments, **named)

        return within


def let_go(error: BaseException) -> None:
    """Empty the frames that an error, and those behind it, came through.

    Their variables would keep the arrays of the failed try alive for as long as the error lives.
    A frame that is still running is left alone, and so is that of a generator or a coroutine that
    caught the error and goes on later.
    """
    frames = [
        frame for each in _behind(error) for frame, _ in traceback.walk_tb(each.__traceback__)
    ]
    unfinished = _unfinished(frames)
    for frame in frames:
        if frame not in unfinished:
            try:
                frame.clear()
            except RuntimeError:  # it is running
                continue


def _behind(error: BaseException) -> Iterator[BaseException]:
    """The error, those that it was raised from or after, and those of a group."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [each.__cause__, each.__context__]
        waiting += getattr(each, "exceptions", ())


def _unfinished(frames: list[FrameType]) -> set[FrameType | None]:
    """The frames of generators and coroutines that are not at their end.

    Before Python 3.13, to clear such a frame ends what it belongs to. A frame does not say whose it
    is; but only who has not ended refers to it.
    """
    may_go_on = [frame for frame in frames if frame.f_code.co_flags & _GOES_ON]
    found: set[FrameType | None] = set()
    for owner in gc.get_referrers(*may_go_on) if may_go_on else ():
        if isinstance(owner, GeneratorType):
            found.add(owner.gi_frame)
        elif isinstance(owner, CoroutineType):
            found.add(owner.cr_frame)
        elif isinstance(owner, AsyncGeneratorType):
            found.add(owner.ag_frame)
    return found


def _imported_engines(error: BaseException) -> Iterator[Engine]:
    """The engines whose library is imported; the one whose class the error is comes first.

    They tell their errors by a few words, which those of another library may have in them too.
    """
    made_in = type(error).__module__
    rows = [row for row in registry.rows().values() if row.module in sys.modules]
    for row in sorted(rows, key=lambda row: not made_in.startswith(_homes(row))):
        try:
            yield registry.load(row.name)
        except Exception:  # half imported, or damaged: then the error cannot be its own
            continue


def _homes(row: registry.EngineRow) -> tuple[str, str]:
    """How the names of modules begin that define an engine's errors: the library's, and ours."""
    return row.module.partition(".")[0], f"anydevice.engines.{row.name}"


def _first_place(arguments: tuple[Any, ...]) -> Device | None:
    for value in arguments:
        inside = value if isinstance(value, list | tuple) else (value,)
        for x in inside:
            owner = owner_of(x)
            places = owner.devices_of(x) if owner is not None else ()
            if places:
                return places[0]
    return None


def _ours(found: RanOut, device: Device | None, what: str, smaller: bool) -> OutOfMemoryError:
    engine, error = found.engine, found.error
    if isinstance(error, OutOfMemoryError):
        return _again(error, what)
    asked = _known(lambda: engine.memory.asked(error)) if engine else None
    place = _known(lambda: shortage.place_of_error(error, engine, device))
    facts = _known(lambda: place.facts) if place else None
    held = _known(lambda: engine.memory.use(place_of(place))) if engine and place else None
    lines = [shortage.headline(place, asked, facts)]
    if engine and held:
        lines.append(shortage.holding(engine, held))
    lines += _all_known(lambda: shortage.doubts(error))
    if place:
        lines += _all_known(lambda: shortage.own_limit(place))
    if place and facts:
        lines += _all_known(lambda: shortage.others(place, facts))
    advice = [*(shortage.giving_back(held) if held else ())]
    if smaller:
        advice.append(_SMALLER_BATCH)
    if held and held.limit is not None:
        advice.append(_HIGHER_LIMIT)
    advice += [_LESS_EACH, *_all_known(lambda: shortage.elsewhere(place, asked, facts))]
    lines += [f"try {tip}" for tip in advice]
    said = "\n  ".join(lines)
    return OutOfMemoryError(
        f"{what}: {said}" if what else said,
        asked=asked,
        free=facts.free_memory if facts else None,
        total=facts.total_memory if facts else None,
        device=place,
        advice=advice,
    )


def _again(error: OutOfMemoryError, what: str) -> OutOfMemoryError:
    """The same once more: somebody raised another error from ours, which is to be its cause."""
    return OutOfMemoryError(
        f"{what}: {error}" if what else str(error),
        asked=error.asked,
        free=error.free,
        total=error.total,
        device=error.device,
        advice=error.advice,
    )


def _known(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except Exception:  # with no memory left anything may fail, and the error itself matters more
        return None


def _all_known(ask: Callable[[], Iterable[str]]) -> list[str]:
    return _known(lambda: list(ask())) or []
