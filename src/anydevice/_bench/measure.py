"""Measures every op that has a benchmark, on every device and engine."""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

from anydevice import __version__
from anydevice._arrays.memory.out_of_memory import in_a_line
from anydevice._bench.ceilings import (
    Tried,
    WorkloadSizes,
    judge,
    measure_ceilings,
    raise_ceilings,
    time_workload,
)
from anydevice._bench.results import MeasuredDevice, Measurement, Results
from anydevice._bench.timing import seconds_of, size_of, time_op
from anydevice._check.cases.case import Benchmark, Call, Row
from anydevice._check.cases.table import one_or_more, row_of, select
from anydevice._check.runners import (
    Progress,
    Responder,
    Runner,
    find_runners,
    in_a_child,
    runner_of,
)
from anydevice._core.child.parent import Outcome
from anydevice._core.dtypes import as_dtype
from anydevice._core.record import Record, replace
from anydevice._machine.choose.measurements import keep_measurements
from anydevice._machine.discovery.check import key_of
from anydevice._machine.discovery.discover import discover, forget_report
from anydevice._machine.engines.registry import version_of
from anydevice._ops.trusted_kernels import load_trusted
from anydevice.errors import UnsupportedError

LIMIT, QUICK_LIMIT = 0.5, 0.1
"""Seconds that one op may take in one case and dtype, with one engine on one device."""

ANSWER_LIMIT = 300.0
"""Seconds that a child process may take for an op or a workload."""

CEILING_LIMIT = 0.25
"""Seconds for one workload of a ceiling; several workloads share a ceiling."""

DTYPES = {"gpu": ("bfloat16", "float32"), "cpu": ("float32",)}
"""Default dtypes."""


class _Job(Record):
    """One op in one case and dtype, with every engine and device that it is timed on."""

    row: Row
    benchmark: Benchmark
    dtype: str
    runners: tuple[Runner, ...]


def bench(
    ops: str | Sequence[str] | None = None,
    devices: str | Sequence[str] | None = None,
    engines: str | Sequence[str] | None = None,
    dtypes: str | Sequence[str] | None = None,
    *,
    quick: bool = False,
    limit: float | None = None,
    rows: Sequence[Row] | None = None,
    sizes: WorkloadSizes | None = None,
    isolated: bool = False,
    progress: Progress | None = None,
) -> Results:
    """Measure the ceilings of this machine, then every op on every device and engine.

    The first four arguments, a name or several each, narrow the selection; the default dtype is
    float32, and on accelerators bfloat16 too. `quick` takes one case of each op and less time;
    `limit` is the seconds for one op with one engine on one device. `rows` and `sizes` replace the
    table of cases and the sizes of the ceilings. Errors of an engine are results. With `isolated`,
    each engine works on its device in a child process, so that crashes are results too; `rows`
    must then be rows of the table.

    Raises `ConfigurationError` for an unknown name, a limit that is not a time above 0, or an empty
    selection, and `DeviceNotFoundError` if this machine lacks a device.
    """
    began, made = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
    chosen, kinds = select(ops, dtypes, rows)
    runners = find_runners(one_or_more(devices) or (), one_or_more(engines))
    # The CPU is the baseline: it is measured first, so that an interrupted run has it.
    runners = sorted(dict.fromkeys(runners), key=lambda runner: runner.device.backend != "cpu")
    seconds = seconds_of((QUICK_LIMIT if quick else LIMIT) if limit is None else limit)
    load_trusted()
    jobs = list(_jobs(chosen, runners, kinds, quick=quick))
    floats = [job.dtype for job in jobs if as_dtype(job.dtype).kind == "float"]
    with closing(_InChildren() if isolated else _InProcess()) as timers:
        ceilings, notes = measure_ceilings(
            runners,
            list(dict.fromkeys(floats)),
            limit=min(seconds, CEILING_LIMIT),
            quick=quick,
            sizes=sizes,
            progress=progress,
            rate_of=timers.rate_of,
        )
        total = sum(len(job.runners) for job in jobs)
        measured: list[tuple[Measurement, int]] = []
        for job in jobs:
            for runner in job.runners:
                if progress is not None:
                    doing = f"{job.row.op} in {job.dtype} on {runner}"
                    progress(len(measured), total, doing)
                measured.append(timers.measurement(job, runner, seconds))
    written = [results for _, results in measured]
    raised = raise_ceilings([row for row, _ in measured], ceilings, written)
    return Results(
        __version__,
        made,
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        tuple(_devices(runners)),
        raised.ceilings,
        judge(raised.measurements, raised.ceilings, written),
        (*notes, *raised.notes),
        quick,
        seconds,
        round(time.perf_counter() - began, 3),
    )


def _jobs(
    rows: Sequence[Row], runners: Sequence[Runner], kinds: Sequence[str] | None, *, quick: bool
) -> Iterator[_Job]:
    for size in ("cpu", "gpu"):
        there = tuple(runner for runner in runners if size_of(runner.device) == size)
        for row in rows if there else ():
            unasked = [d for d in DTYPES[size] if d in row.dtypes] or row.dtypes[:1]
            dtypes = unasked if kinds is None else [d for d in kinds if d in row.dtypes]
            cases = [case for case in row.benchmarks if case.place == size]
            for case in cases[:1] if quick else cases:
                for dtype in dtypes:
                    yield _Job(row, case, dtype, there)


def _devices(runners: Sequence[Runner]) -> Iterator[MeasuredDevice]:
    """Yield each device with the versions of its measured engines."""
    for device in dict.fromkeys(runner.device for runner in runners):
        facts = device.facts
        engines = [runner.engine for runner in runners if runner.device == device]
        yield MeasuredDevice(
            str(device),
            device.kind,
            facts.name,
            facts.uuid,
            facts.driver_version,
            {engine: version_of(engine) or "" for engine in engines},
        )


class _InProcess:
    """Times workloads and ops in this process."""

    rate_of = staticmethod(time_workload)

    def __init__(self) -> None:
        self._drawn: tuple[_Job | None, Any] = (None, None)

    def measurement(self, job: _Job, runner: Runner, limit: float) -> tuple[Measurement, int]:
        """Measure an op with one engine; return the measurement and the bytes of its results."""
        if self._drawn[0] is not job:
            self._drawn = (job, job.row.draw(job.benchmark, job.dtype))
        return _one(job, self._drawn[1], runner, limit)

    def close(self) -> None:
        """Release the child processes; here there are none."""


class _InChildren(_InProcess):
    """Times them in one child for each engine on a device; all stay, to compare ops at one time."""

    def __init__(self) -> None:
        super().__init__()
        self._of: dict[Runner, Responder] = {}

    def _ask(self, runner: Runner, *question: Any) -> Outcome:
        if runner not in self._of:
            self._of[runner] = in_a_child(runner, answering)
        return self._of[runner].ask(question, limit=ANSWER_LIMIT)

    def rate_of(
        self, runner: Runner, tried: Tried, key: tuple[str, str | None], limit: float
    ) -> float | str:
        sizes = [list(tried.sizes.memory), tried.sizes.bus, list(tried.sizes.edges)]
        outcome = self._ask(runner, "ceiling", list(tried.dtypes), sizes, key, limit)
        rate: float | str = outcome.answer if outcome.how == "answered" else outcome.sentence
        return rate

    def measurement(self, job: _Job, runner: Runner, limit: float) -> tuple[Measurement, int]:
        case = (job.row.op, job.benchmark.name, job.dtype)
        outcome = self._ask(runner, "op", *case, job.benchmark.place, limit)
        if outcome.how != "answered":
            where = (*case, str(runner.device), runner.engine)
            return Measurement(*where, "failed", replace(outcome, step=None).sentence), 0
        fields, written = outcome.answer
        return Measurement(**fields), written

    def close(self) -> None:
        for child in self._of.values():
            child.close()


def answering(tell: Callable[[str], None], arguments: dict[str, Any]) -> Callable[[Any], Any]:
    """Return the child's function: it answers with a rate, or a measurement and its bytes."""
    runner = runner_of(arguments)
    load_trusted()

    def answer(question: Any) -> Any:
        tell(f"{question[0]} {question[1]}")
        if question[0] == "ceiling":
            _, dtypes, (memory, bus, edges), key, limit = question
            sizes = WorkloadSizes(tuple(memory), bus, tuple(edges))
            return time_workload(runner, Tried(tuple(dtypes), sizes), tuple(key), limit)
        _, op, name, dtype, place, limit = question
        row = row_of(op)
        [case] = [c for c in row.benchmarks if (c.name, c.place) == (name, place)]
        job = _Job(row, case, dtype, (runner,))
        measurement, written = _one(job, row.draw(case, dtype), runner, limit)
        return measurement.to_dict(), written

    return answer


def _one(job: _Job, made: Call, runner: Runner, limit: float) -> tuple[Measurement, int]:
    where = (job.row.op, job.benchmark.name, job.dtype, str(runner.device), runner.engine)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numbers may overflow, which is no fault here
            timed = time_op(job.row, made, runner, limit=limit)
    except UnsupportedError as error:
        return Measurement(*where, "unsupported", str(error)), 0
    except Exception as error:  # an engine may raise any error: it is a result
        return Measurement(*where, "failed", in_a_line(error, runner.place)), 0
    figures = timed.timing.figures
    measurement = Measurement(*where, moved=timed.moved, operations=timed.operations, **figures)
    return measurement, timed.written


def save(results: Results) -> str | None:
    """Save the times for `device()` to choose by; return the reason if they cannot be written."""
    known = {str(device): device for device in discover().devices}
    times: dict[str, dict[str, float]] = {}
    for row in results.measured:
        device = known.get(row.device)
        status = device.status if device else None
        if device is None or status is None or not row.seconds:
            continue
        key = key_of(device.backend, device.index, status.facts, row.engine)
        times.setdefault(key, {})[f"{row.op} | {row.case} | {row.dtype}"] = row.seconds
    problem = keep_measurements(times)
    forget_report()  # the choice of engines is cached with the report
    return problem
