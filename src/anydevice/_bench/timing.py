"""Timing of calls: warmed up, synchronized and repeated on arguments that no cache has."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil
from statistics import median, quantiles
from typing import Any, Literal

import numpy as np

from anydevice import _ops as ops
from anydevice._check.cases.case import Call, Row
from anydevice._check.checks import mapped, place
from anydevice._check.compare import leaves
from anydevice._check.runners import Runner
from anydevice._core import checks
from anydevice._core.device import Device
from anydevice._core.engine import Engine
from anydevice._core.record import Record

MIN_SAMPLE_SECONDS = 2e-3
"""Shortest sample: the wait at its end must not count."""

MAX_SAMPLES = 200
MIN_SAMPLES = 5
MAX_CALLS = 1000

MAX_FIRST_SECONDS = 10.0
"""A longer first call is not repeated: it is the only sample."""

CACHE_BYTES = {"cpu": 128 * 2**20, "gpu": 256 * 2**20}
"""Bytes of copies of the arguments: more than caches hold."""

MAX_SETS = 64
MAX_RESULT_BYTES = {"cpu": 2**29, "gpu": 2**32}
"""Limit of the results of calls that are waited for together."""

_FIGURES = ("seconds", "low", "high", "first", "samples")

CONSUMING = frozenset({"cache_write"})
"""Ops that consume their first argument: the result replaces it."""


class Timing(Record):
    """The seconds of one call: the median of the samples, their quartiles, and the first call.

    The first call is apart: it compiles, allocates and starts what later ones reuse. Each sample is
    the mean of `calls` calls that were started without waiting in between. `fastest` is the least
    of the samples.
    """

    seconds: float
    low: float
    high: float
    first: float
    samples: int
    calls: int
    fastest: float

    @property
    def figures(self) -> dict[str, Any]:
        """The fields that results keep, by name."""
        return {name: getattr(self, name) for name in _FIGURES}


def seconds_of(limit: Any) -> float:
    """Return a limit as seconds.

    Raises `ConfigurationError` for anything but a number of seconds above 0.

    >>> seconds_of(1)
    1.0
    """
    return checks.number("limit", limit, above=0, note="it is a time in seconds")


def time_calls(
    call: Callable[[int], Any],
    finish: Callable[[list[Any]], None],
    *,
    limit: float,
    max_calls: int = MAX_CALLS,
    first: float | None = None,
) -> Timing:
    """Time `call`, which is given 0, 1, 2, … so that it can take other arguments each time.

    `finish` waits until all of the results are complete. No call is started after `limit` seconds,
    except a second one if the first took less than 10 seconds. At most `max_calls` results are held
    at a time. `first` has the seconds of the first call if the caller has made it already.
    """
    number = 0

    def sample(count: int) -> float:
        nonlocal number
        began = time.perf_counter()
        finish([call(number + i) for i in range(count)])
        number += count
        return (time.perf_counter() - began) / count

    if first is None:
        first = sample(1)
    if first > MAX_FIRST_SECONDS:
        return Timing(first, first, first, first, 1, 1, first)
    second = sample(1)
    if second >= limit:
        return Timing(second, second, second, first, 1, 1, second)
    ends = time.perf_counter() + limit
    calls = max(1, min(ceil(MIN_SAMPLE_SECONDS / max(second, 1e-9)), max_calls))
    if calls > 1:  # the second call was no good guide if it still had something to set up
        calls = max(1, min(ceil(MIN_SAMPLE_SECONDS / max(sample(calls), 1e-9)), max_calls))
    taken: list[float] = []
    while len(taken) < MAX_SAMPLES and (time.perf_counter() < ends or len(taken) < MIN_SAMPLES):
        taken.append(sample(calls))
        if time.perf_counter() > ends + 2 * limit:  # slower than it looked: few must do
            break
    low = high = taken[0]
    if len(taken) > 1:
        low, _, high = quantiles(taken, n=4, method="inclusive")
    return Timing(median(taken), low, high, first, len(taken), calls, min(taken))


def size_of(device: Device) -> Literal["gpu", "cpu"]:
    """Return the key of a device in tables of sizes."""
    return "cpu" if device.kind == "cpu" else "gpu"


class TimedOp(Record):
    """The timing of an op, the bytes that it moved (0 for a view) and wrote, and its operations."""

    timing: Timing
    moved: int
    written: int
    operations: int


def time_op(row: Row, made: Call, runner: Runner, *, limit: float) -> TimedOp:
    """Time one call of an op; errors of the engine are raised."""
    engine, device = runner.load(), runner.device
    consuming = row.op in CONSUMING
    size = sum(int(array.nbytes) for array in made.arrays())
    count = max(1, min(MAX_SETS, CACHE_BYTES[size_of(device)] // max(size, 1)))
    placed = (mapped(made, lambda x: place(x, engine, runner.place)) for _ in range(count))
    sets = [(list(copy.arguments), copy.options) for copy in placed]
    op = getattr(ops, row.op)

    def call(number: int) -> Any:
        by_position, by_name = sets[number % count]
        result = op(*by_position, **by_name)
        if consuming:
            by_position[0] = result
        return result

    def arrays(number: int) -> list[Any]:
        by_position, by_name = sets[number]
        return [x for x in leaves([*by_position, *by_name.values()]) if engine.owns(x)]

    def finish(results: Any) -> None:
        engine.finish(list(leaves(results)))

    with runner.scope():
        finish([arrays(number) for number in range(count)])
        began = time.perf_counter()
        result = call(0)
        finish(result)
        first = time.perf_counter() - began
        written = sum(
            int(np.prod(array.shape)) * engine.dtype_of(array).itemsize for array in leaves(result)
        )
        viewed = not consuming and _is_view(result, arrays(0), engine)
        del result
        free, room = device.facts.free_memory, MAX_RESULT_BYTES[size_of(device)]
        room = room if free is None else min(room, free // 4)
        most = 1 if consuming else max(1, min(MAX_CALLS, room // max(written, 1)))
        timing = time_calls(call, finish, limit=limit, max_calls=most, first=first)
    moved = 0 if viewed else row.moved(made, written)
    return TimedOp(timing, moved, written, row.operations(made))


def _is_view(result: Any, arguments: list[Any], engine: Engine) -> bool:
    """Whether the results are in the memory of the arguments, if the library tells."""
    stored = [engine.storage(array) for array in leaves(result)]
    theirs = {s.allocation for x in arguments if (s := engine.storage(x)) is not None}
    return bool(stored) and all(s is not None and s.allocation in theirs for s in stored)
