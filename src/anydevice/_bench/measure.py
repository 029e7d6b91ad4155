"""Measures every op that has a benchmark, on every device and engine, beside the device's ceilings.

A ceiling is the best of several workloads, sizes and engines on this machine, not a figure of a
data sheet. An op that repeatedly does more raises the ceiling. `judge` adds to each measurement the
ceiling that binds it and the fraction reached: the roofline model of Williams, Waterman and
Patterson, 2009.
"""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np

from anydevice import __version__
from anydevice import _ops as ops
from anydevice._arrays.memory.out_of_memory import in_a_line
from anydevice._arrays.move import to_device, to_numpy
from anydevice._bench.results import (
    FEW,
    UNITS,
    Bound,
    Ceiling,
    MeasuredDevice,
    Measurement,
    Results,
    What,
)
from anydevice._bench.timing import seconds_of, size_of, time_calls, time_op
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
from anydevice._core.text import format_rate, format_size, percent
from anydevice._machine.choose.measurements import keep_measurements
from anydevice._machine.discovery.check import key_of
from anydevice._machine.discovery.discover import discover, forget_report
from anydevice._machine.engines.registry import version_of
from anydevice._ops.trusted_kernels import load_trusted
from anydevice.errors import UnsupportedError

MIB = 2**20

MAX_OVERRUN = 8
"""A workload that would take this many times the limit, judging by a smaller one, is skipped."""

_WRITTEN_IN_PLACE = ("numpy", "torch", "cupy")
"""Engines with `a[...] = b` in place: a copy that allocates nothing."""

TOO_FAST = 2.0
"""An op without arithmetic that exceeds the bandwidth by this factor returned a view."""

MOSTLY_READ = 0.1
"""If results are a smaller part of the moved bytes, the read ceiling applies."""

BUSY = 1.2
"""A ceiling exceeded by this factor was measured on a busy machine."""


class WorkloadSizes(Record):
    """Bytes of an array to copy or read, of one that crosses the bus, and edges of matrices."""

    memory: tuple[int, ...]
    bus: int
    edges: tuple[int, ...]


SIZES = {
    ("gpu", False): WorkloadSizes((256 * MIB, 1024 * MIB), 512 * MIB, (4096, 8192)),
    ("gpu", True): WorkloadSizes((256 * MIB,), 128 * MIB, (4096,)),
    ("cpu", False): WorkloadSizes((64 * MIB, 256 * MIB), 0, (1024, 2048)),
    ("cpu", True): WorkloadSizes((64 * MIB,), 0, (512, 1024)),
}
"""Sizes by kind of device and by `quick`; all are larger than caches."""

Make = Callable[[Runner], Callable[[], Any]]


class Tried(Record):
    """The trial of a device: the dtypes of matmul, and the sizes."""

    dtypes: tuple[str, ...]
    sizes: WorkloadSizes


class Workload(Record):
    """One way to reach a ceiling: a call, and the bytes or operations that it does."""

    what: What
    name: str
    work: int
    make: Make
    dtype: str | None = None

    @property
    def key(self) -> tuple[str, str | None]:
        """The identity of the workload within an engine."""
        return self.name, self.dtype


RateOf = Callable[[Runner, Tried, tuple[str, str | None], float], float | str]
"""A function with the signature and result of `time_workload`."""


class Raised(Record):
    """Measurements in which views move nothing, the ceilings, and a note for each raised one."""

    measurements: tuple[Measurement, ...]
    ceilings: tuple[Ceiling, ...]
    notes: tuple[str, ...]


def measure_ceilings(
    runners: Sequence[Runner],
    dtypes: Sequence[str],
    *,
    limit: float,
    quick: bool = False,
    sizes: WorkloadSizes | None = None,
    progress: Progress | None = None,
    rate_of: RateOf | None = None,
) -> tuple[tuple[Ceiling, ...], tuple[str, ...]]:
    """Measure the ceilings of each device; return them, and a note for each that failed."""
    time_one = rate_of or time_workload
    tries = [
        (runner, tried, load)
        for runner in runners
        for tried in [Tried(tuple(dtypes), sizes or SIZES[size_of(runner.device), quick])]
        for load in workloads(runner, tried)
    ]
    best: dict[tuple[str, str, str | None], Ceiling] = {}
    failed: dict[tuple[str, str, str | None], str] = {}
    rates: dict[tuple[str, str | None, str], float] = {}
    for number, (runner, tried, load) in enumerate(tries):
        if progress is not None:
            progress(number, len(tries), f"ceiling of {runner}: {load.name}")
        key = (str(runner.device), load.what, load.dtype)
        same = (str(runner), load.dtype, load.what)
        # At a larger size it will hardly be faster, and may take minutes.
        if same in rates and load.work / rates[same] > MAX_OVERRUN * limit:
            continue
        rate = time_one(runner, tried, load.key, limit)
        if isinstance(rate, str):  # another workload or engine may do it; the note says if none
            failed.setdefault(key, f"{runner.engine}: {rate}")
            continue
        rates[same] = rate
        if key not in best or rate > best[key].rate:
            best[key] = Ceiling(key[0], load.what, rate, runner.engine, load.name, load.dtype)
    notes = tuple(
        f"no {' '.join(filter(None, (what, dtype)))} ceiling of {device}: {reason}"
        for (device, what, dtype), reason in failed.items()
        if (device, what, dtype) not in best
    )
    return tuple(best.values()), notes


def workloads(runner: Runner, tried: Tried) -> Iterator[Workload]:
    """Yield all workloads for one engine on one device."""
    sizes = tried.sizes
    for size in sizes.memory:
        shown, count = format_size(size), size // 4
        if runner.engine in _WRITTEN_IN_PLACE:
            yield Workload("copy", f"copy of {shown}", 2 * size, _call_of(count, _copy, 2))
        yield Workload("copy", f"negative of {shown}", 2 * size, _call_of(count, ops.negative))
        yield Workload("copy", f"add of {shown}", 3 * size, _call_of(count, ops.add, 2))
        yield Workload("read", f"sum of {shown}", size, _call_of(count, ops.sum))
        yield Workload("read", f"max of {shown}", size, _call_of(count, ops.max))
        vector = partial(_row_times_matrix, count)
        yield Workload("read", f"matrix–vector of {shown}", size, vector)
    for dtype in tried.dtypes:
        for edge in sizes.edges:
            product = partial(_square, edge, dtype)
            yield Workload("matmul", f"matmul of {edge}³", 2 * edge**3, product, dtype)
    if runner.device.kind != "cpu" and sizes.bus:
        shown, size = format_size(sizes.bus), sizes.bus
        yield Workload("to device", f"to_device of {shown}", size, partial(_send, size))
        fetch = partial(_send, size, back=True)
        yield Workload("to host", f"to_numpy of {shown}", size, fetch)


def time_workload(
    runner: Runner, tried: Tried, key: tuple[str, str | None], limit: float
) -> float | str:
    """Return the work per second of an engine on a workload, or the reason of its failure."""
    [load] = [workload for workload in workloads(runner, tried) if workload.key == key]
    try:
        engine = runner.load()
        with runner.scope():
            call = load.make(runner)
            engine.synchronize(runner.place)

            def finish(results: list[Any]) -> None:
                engine.finish([x for x in results if engine.owns(x)])

            timing = time_calls(lambda _: call(), finish, limit=limit, max_calls=4)
        return load.work / timing.fastest  # other programs slow down the other samples
    except Exception as error:  # an engine may raise any error
        return f"{type(error).__name__}: {error}"


def _place_ones(runner: Runner, count: int) -> Any:
    return runner.load().place(np.ones(count, np.float32), runner.place)


def _copy(target: Any, source: Any) -> Any:
    target[...] = source
    return target


def _call_of(count: int, op: Callable[..., Any], arrays: int = 1) -> Make:
    return lambda runner: partial(op, *(_place_ones(runner, count) for _ in range(arrays)))


def _row_times_matrix(count: int, runner: Runner) -> Callable[[], Any]:
    width = min(4096, count)
    weight = ops.reshape(_place_ones(runner, count // width * width), (count // width, width))
    return partial(ops.linear, ops.reshape(_place_ones(runner, width), (1, width)), weight)


def _square(edge: int, dtype: str, runner: Runner) -> Callable[[], Any]:
    matrices = np.random.default_rng(0).standard_normal((2, edge, edge), np.float32)
    rounded = (x.astype(as_dtype(dtype).numpy()) for x in matrices)
    return partial(ops.matmul, *(runner.load().place(x, runner.place) for x in rounded))


def _send(size: int, runner: Runner, back: bool = False) -> Callable[[], Any]:
    send = partial(to_device, np.ones(size, np.uint8), runner.device.served_by(runner.engine))
    return partial(to_numpy, send()) if back else send


def ceiling_of(
    ceilings: Sequence[Ceiling], device: str, what: What, dtype: str | None = None
) -> Ceiling | None:
    """Return a ceiling of a device, for "matmul" in a dtype; `None` if unknown."""
    wanted = (device, what, dtype)
    return next((c for c in ceilings if (c.device, c.what, c.dtype) == wanted), None)


def judge(
    measurements: Sequence[Measurement], ceilings: Sequence[Ceiling], written: Sequence[int]
) -> tuple[Measurement, ...]:
    """Return the measurements with bound, fraction of the ceiling and speed-up over the CPU."""
    pairs = zip(without_views(measurements, ceilings, written), written, strict=True)
    bounded = [_with_bound(measurement, ceilings, results) for measurement, results in pairs]
    on_cpu = [m for m in bounded if m.device == "cpu" and m.state == "measured" and m.seconds]
    return tuple(_with_speed_up(measurement, on_cpu) for measurement in bounded)


def without_views(
    measurements: Sequence[Measurement], ceilings: Sequence[Ceiling], written: Sequence[int]
) -> tuple[Measurement, ...]:
    """Return the measurements, with `moved=0` if an op was too fast to have copied."""

    def is_view(measurement: Measurement, results: int) -> bool:
        memory = memory_ceiling(measurement, ceilings, results)
        if memory is None or measurement.operations or not measurement.seconds:
            return False
        return measurement.moved / measurement.seconds > TOO_FAST * memory.rate

    return tuple(
        replace(measurement, moved=0) if is_view(measurement, results) else measurement
        for measurement, results in zip(measurements, written, strict=True)
    )


def memory_ceiling(
    measurement: Measurement, ceilings: Sequence[Ceiling], results: int
) -> Ceiling | None:
    """Return the read ceiling for a measurement that mostly reads, else the copy ceiling."""
    reads = measurement.moved and results < MOSTLY_READ * measurement.moved
    reading = ceiling_of(ceilings, measurement.device, "read") if reads else None
    return reading or ceiling_of(ceilings, measurement.device, "copy")


def _with_bound(measurement: Measurement, ceilings: Sequence[Ceiling], results: int) -> Measurement:
    """Return the measurement with the ceiling it came nearest to: the one that binds it."""
    reached = [
        (rate / c.rate, c) for c, rate in _rates_reached(measurement, ceilings, results) if rate
    ]
    if not reached:
        return measurement
    fraction, nearest = max(reached, key=lambda pair: pair[0])
    bound: Bound = "compute" if nearest.what == "matmul" else "memory"
    return replace(measurement, bound=bound, fraction=fraction)


def _with_speed_up(measurement: Measurement, on_cpu: Sequence[Measurement]) -> Measurement:
    if measurement.state != "measured" or not measurement.seconds:
        return measurement
    of_op = [m for m in on_cpu if m.op == measurement.op]
    same = [m for m in of_op if (m.case, m.dtype) == (measurement.case, measurement.dtype)]
    if same:
        rival = next((m for m in same if m.engine == "numpy"), None)
        rival = rival or min(same, key=lambda m: m.seconds)
        speed_up = rival.seconds / measurement.seconds
    else:  # a case of an accelerator that is too large for the CPU: compare work per second
        working = [m for m in of_op if _speed(m)]
        alike = [m for m in working if m.bound == measurement.bound] or working
        alike = [m for m in alike if m.dtype == measurement.dtype] or alike
        if not alike or not _speed(measurement):
            return measurement
        rival = max(alike, key=_speed)
        speed_up = _speed(measurement) / _speed(rival)
    return replace(measurement, speed_up=speed_up, over=f"{rival.device} with {rival.engine}")


def _speed(measurement: Measurement) -> float:
    """Return the operations a second, or the bytes of an op without any."""
    return (measurement.operations or measurement.moved) / measurement.seconds


def raise_ceilings(
    measurements: Sequence[Measurement], ceilings: Sequence[Ceiling], written: Sequence[int]
) -> Raised:
    """Raise each ceiling to the rate that three quarters of the samples of an op reached."""
    # An op with arithmetic is no view; ceilings raised by it mistake fewer ops for views.
    computing = [row if row.operations else replace(row, moved=0) for row in measurements]
    sure = _highest(computing, ceilings, written)
    moving = without_views(measurements, sure, written)
    best = _highest(moving, sure, written)
    notes = tuple(
        _note(old, new) for old, new in zip(ceilings, best, strict=True) if new.rate > old.rate
    )
    return Raised(moving, best, notes)


def _highest(
    measurements: Sequence[Measurement], ceilings: Sequence[Ceiling], written: Sequence[int]
) -> tuple[Ceiling, ...]:
    best = {_key(ceiling): ceiling for ceiling in ceilings}
    for row, results in zip(measurements, written, strict=True):
        if row.samples < FEW:
            continue
        for ceiling, rate in _rates_reached(replace(row, seconds=row.high), ceilings, results):
            if rate > best[_key(ceiling)].rate:
                best[_key(ceiling)] = replace(
                    ceiling, rate=rate, engine=row.engine, kernel=f"{row.op}, {row.case}"
                )
    return tuple(best.values())


def _rates_reached(
    measurement: Measurement, ceilings: Sequence[Ceiling], results: int
) -> Iterator[tuple[Ceiling, float]]:
    """Yield the ceilings that apply to a measurement, each with the rate it reached."""
    # A view computes nothing either.
    if not measurement.seconds or not measurement.moved:
        return
    memory = memory_ceiling(measurement, ceilings, results)
    if memory:
        yield memory, measurement.moved / measurement.seconds
    compute = ceiling_of(ceilings, measurement.device, "matmul", measurement.dtype)
    if compute:
        yield compute, measurement.operations / measurement.seconds


def _key(ceiling: Ceiling) -> tuple[str, str, str | None]:
    return ceiling.device, ceiling.what, ceiling.dtype


def _note(old: Ceiling, new: Ceiling) -> str:
    before = format_rate(old.rate, UNITS[old.what])
    above = percent(new.rate / old.rate - 1)
    note = (
        f"{old.name} ceiling of {old.device} raised by {above}: {new.engine} did more in "
        f"{new.kernel} than the {before} of {old.engine}, {old.kernel}"
    )
    busy = new.rate > BUSY * old.rate
    return f"{note}; busy machine, repeat it, unless a cache is large" if busy else note


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
