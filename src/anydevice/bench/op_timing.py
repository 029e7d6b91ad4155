"""One op in one place: its arguments placed, rotated so that caches do not help, and timed."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from anydevice import ops
from anydevice.bench.places import Place
from anydevice.bench.timing import MOST_CALLS, Timing, time_calls
from anydevice.check.comparing import leaves
from anydevice.check.drawing import Call
from anydevice.check.rows import Row
from anydevice.check.trials import mapped
from anydevice.core.engine import Engine
from anydevice.core.record import Record

COLD = {"cpu": 128 * 2**20, "gpu": 256 * 2**20}
"""Arguments are placed several times over, up to so many bytes: more than caches hold."""

MOST_SETS = 64
MOST_RESULTS = {"cpu": 2**29, "gpu": 2**32}
"""Bytes of results that are held at a time: calls are waited for together, as many as fit."""

CONSUMING = frozenset({"cache_write"})
"""Ops whose first argument must not be used again: their result takes its place."""


class TimedOp(Record):
    """How long an op took, the bytes that it moved and wrote, and the operations that it did.

    Where its result is a view of an argument nothing was moved.
    """

    timing: Timing
    moved: int
    written: int
    operations: int


def time_op(row: Row, made: Call, place: Place, *, limit: float) -> TimedOp:
    """Time one call of an op in one place; whatever its engine raises is raised."""
    engine = place.load()
    consuming = row.op in CONSUMING
    size = sum(int(array.nbytes) for array in made.arrays())
    count = max(1, min(MOST_SETS, COLD[place.size] // max(size, 1)))
    sets = [_placed(made, engine, place) for _ in range(count)]
    op = getattr(ops, row.op)

    def call(number: int) -> Any:
        arguments = sets[number % count]
        result = op(*arguments.by_place, **arguments.by_name)
        if consuming:
            arguments.by_place[0] = result
        return result

    def finish(results: Any) -> None:
        engine.finish(list(leaves(results)))

    with place.scope():
        finish([arguments.arrays(engine) for arguments in sets])
        began = time.perf_counter()
        result = call(0)
        finish(result)
        first = time.perf_counter() - began
        written = sum(_bytes(array, engine) for array in leaves(result))
        viewed = not consuming and _is_view(result, sets[0].arrays(engine), engine)
        del result
        most = 1 if consuming else _most_calls(place, written)
        timing = time_calls(call, finish, limit=limit, most_calls=most, first=first)
    moved = 0 if viewed else row.moved(made, written)
    return TimedOp(timing, moved, written, row.operations(made))


def _most_calls(place: Place, written: int) -> int:
    """How many results may be held: no more than a quarter of what is free."""
    free = place.device.facts.free_memory
    room = MOST_RESULTS[place.size] if free is None else min(MOST_RESULTS[place.size], free // 4)
    return max(1, min(MOST_CALLS, room // max(written, 1)))


class _Arguments:
    """The arguments of one call, where they are needed; those by place can be replaced."""

    def __init__(self, made: Call) -> None:
        self.by_place = list(made.arguments)
        self.by_name = dict(made.options)

    def arrays(self, engine: Engine) -> list[Any]:
        values = leaves([*self.by_place, *self.by_name.values()])
        return [each for each in values if engine.owns(each)]


def _placed(made: Call, engine: Engine, place: Place) -> _Arguments:
    def placed(x: np.ndarray[Any, Any]) -> Any:
        return engine.place(x, place.lies, narrow=x.dtype.kind in "iu")

    return _Arguments(mapped(made, placed))


def _bytes(array: Any, engine: Engine) -> int:
    return int(np.prod(array.shape)) * engine.dtype_of(array).itemsize


def _is_view(result: Any, arguments: list[Any], engine: Engine) -> bool:
    """Whether the results lie in the memory of the arguments, as far as the library tells."""
    stored = [engine.storage(array) for array in leaves(result)]
    theirs = {each.allocation for x in arguments if (each := engine.storage(x)) is not None}
    return bool(stored) and all(each is not None and each.allocation in theirs for each in stored)
