"""Every op that has a benchmark, on every device and engine of this machine.

Letting the choice of engines rest on what was measured.
"""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from anydevice import __version__
from anydevice.bench.ceilings import Sizes, judge, measure_ceilings, raise_ceilings
from anydevice.bench.results import Measurement, Results
from anydevice.bench.timing import Place, Progress, find_places, machines_of, seconds_of, time_op
from anydevice.check import trusted_kernels as trusting
from anydevice.check.case import Benchmark, Call, Row
from anydevice.check.cases import TABLE, insist_on_cases, one_or_more, row_of
from anydevice.choose.measurements import keep_measurements
from anydevice.core.dtypes import as_dtype
from anydevice.core.record import Record
from anydevice.discovery._discover import discover, forget_report
from anydevice.discovery.verdicts import key_of
from anydevice.errors import UnsupportedError
from anydevice.memory.out_of_memory import in_a_line

LIMIT, QUICK_LIMIT = 0.5, 0.1
"""Seconds that one op may take in one case, element type and place."""

CEILING_LIMIT = 0.25
"""Seconds for one kernel of a ceiling: they all go for the same few figures."""

DTYPES = {"gpu": ("bfloat16", "float32"), "cpu": ("float32",)}
"""The element types that are measured unasked."""


class _Step(Record):
    """One op in one case and element type, in every place of that size."""

    row: Row
    benchmark: Benchmark
    dtype: str
    places: tuple[Place, ...]


def bench(
    ops: str | Sequence[str] | None = None,
    devices: str | Sequence[str] | None = None,
    engines: str | Sequence[str] | None = None,
    dtypes: str | Sequence[str] | None = None,
    *,
    quick: bool = False,
    limit: float | None = None,
    rows: Sequence[Row] | None = None,
    sizes: Sizes | None = None,
    progress: Progress | None = None,
) -> Results:
    """Measure the ceilings of this machine, then every op on every device and engine.

    The first four arguments, a name or several each, narrow what is measured; unasked, element
    types are float32, and on accelerators bfloat16 too. `quick` takes one case of each op and less
    time; `limit` is the seconds for one op in one place. `rows` and `sizes` replace the table of
    cases and the sizes of the ceilings. Whatever an engine raises is told in the results.

    Raises `ConfigurationError` for a name that nothing has, a limit that is no number of seconds,
    or where nothing is left to measure, and `DeviceNotFoundError` where this machine lacks what was
    asked for.
    """
    began, made = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
    table = list(rows) if rows is not None else list(TABLE.values())
    named, asked = one_or_more(ops), one_or_more(dtypes)
    chosen = [row_of(op) for op in named] if named is not None else table
    kinds = None if asked is None else tuple(as_dtype(dtype).name for dtype in asked)
    insist_on_cases(chosen, kinds)
    places = find_places(one_or_more(devices) or (), one_or_more(engines))
    seconds = seconds_of((QUICK_LIMIT if quick else LIMIT) if limit is None else limit)
    trusting.load_into_table()
    steps = list(_steps(chosen, places, kinds, quick=quick))
    ceilings, notes = measure_ceilings(
        places,
        _matmul_dtypes(steps),
        limit=min(seconds, CEILING_LIMIT),
        quick=quick,
        sizes=sizes,
        progress=progress,
    )
    found = list(_measured(steps, seconds, progress))
    written = [results for _, results in found]
    raised = raise_ceilings([each for each, _ in found], ceilings, written)
    return Results(
        __version__,
        made,
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        tuple(machines_of(places)),
        raised.ceilings,
        judge(raised.measurements, raised.ceilings, written),
        (*notes, *raised.notes),
        quick,
        seconds,
        round(time.perf_counter() - began, 3),
    )


def _steps(
    rows: Sequence[Row], places: Sequence[Place], kinds: Sequence[str] | None, *, quick: bool
) -> Iterator[_Step]:
    for size in ("cpu", "gpu"):
        there = tuple(place for place in places if place.size == size)
        for row in rows if there else ():
            unasked = [d for d in DTYPES[size] if d in row.dtypes] or row.dtypes[:1]
            asked = unasked if kinds is None else [d for d in kinds if d in row.dtypes]
            cases = [each for each in row.benchmarks if each.place == size]
            for case in cases[:1] if quick else cases:
                for dtype in asked:
                    yield _Step(row, case, dtype, there)


def _matmul_dtypes(steps: Sequence[_Step]) -> list[str]:
    """The element types for which a rate of multiplying matrices is needed."""
    return list(dict.fromkeys(s.dtype for s in steps if as_dtype(s.dtype).kind == "float"))


def _measured(
    steps: Sequence[_Step], limit: float, progress: Progress | None
) -> Iterator[tuple[Measurement, int]]:
    done, total = 0, sum(len(step.places) for step in steps)
    for step in steps:
        made = step.row.draw(step.benchmark, step.dtype)
        for place in step.places:
            if progress is not None:
                progress(done, total, f"{step.row.op} in {step.dtype} on {place}")
            done += 1
            yield _one(step, made, place, limit)


def _one(step: _Step, made: Call, place: Place, limit: float) -> tuple[Measurement, int]:
    """One measurement, and the bytes of the results."""
    where = (step.row.op, step.benchmark.name, step.dtype, str(place.device), place.engine)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numbers may overflow; that is not asked here
            timed = time_op(step.row, made, place, limit=limit)
    except UnsupportedError as error:
        return Measurement(*where, "unsupported", str(error)), 0
    except Exception as error:  # an engine fails in any way it likes: that is a result
        return Measurement(*where, "failed", in_a_line(error, place.lies)), 0
    timing = timed.timing
    measurement = Measurement(
        *where,
        seconds=timing.seconds,
        low=timing.low,
        high=timing.high,
        first=timing.first,
        samples=timing.samples,
        moved=timed.moved,
        operations=timed.operations,
    )
    return measurement, timed.written


def save(results: Results) -> str | None:
    """Keep the times, so that `device()` takes the fastest engine from now on.

    They count for this device, driver and version of each library. Where they cannot be kept, a
    sentence says why.
    """
    places = {str(device): device for device in discover().devices}
    kept: dict[str, dict[str, float]] = {}
    for each in results.measured:
        device = places.get(each.device)
        standing = device.standing if device else None
        if device is None or standing is None or not each.seconds:
            continue
        key = key_of(device.backend, device.index, standing.facts, each.engine)
        kept.setdefault(key, {})[f"{each.op} | {each.case} | {each.dtype}"] = each.seconds
    problem = keep_measurements(kept)
    forget_report()  # what remembers who serves a device goes by the report
    return problem
