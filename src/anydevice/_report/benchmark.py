"""Benchmarks as text: ops and ceilings, comparisons of two runs, language models, functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from anydevice._bench.functions import DeviceTiming, Timings
from anydevice._bench.language_models import TextSpeed, TextSpeeds
from anydevice._bench.results import UNITS, Change, Comparison, Measurement, Results
from anydevice._core.text import format_rate, format_size, format_time, percent, times
from anydevice._report import notebook
from anydevice._report.tables import table

_HEAD = ("op", "case", "dtype", "engine", "time", "spread", "rate", "of ceiling", "speed-up")
_LEFT = ("op", "case", "dtype", "engine")
_OMITTED_FIRST = ("spread", "case")
"""Columns that a narrow terminal goes without, in this order."""
_CHANGE_HEAD = ("", "op", "case", "dtype", "where", "before", "now", "factor")
_SPEED_HEAD = ("context", "prefill", "of limit", "first token", "decode", "of limit", "limit")
_TIMING_HEAD = ("device", "engine", "time", "spread", "first call", "peak", "speed-up")
_TIMING_RIGHT = (2, 3, 4, 5, 6)
_NOISY = 0.5
"""Above this spread a timing is noisy."""


def summary_lines(results: Results) -> Iterator[str]:
    """Yield the system, the devices with their libraries, and the ceilings of each device."""
    kind = " · quick" if results.quick else ""
    yield f"anydevice {results.version} · {results.system}{kind} · {format_time(results.seconds)}"
    for device in results.devices:
        driver = f", driver {device.driver}" if device.driver else ""
        yield ""
        yield f"{device.device}   {device.name}{driver}   {device.libraries}"
        for ceiling in results.ceilings:
            if ceiling.device == device.device:
                rate = format_rate(ceiling.rate, UNITS[ceiling.what])
                yield f"  {ceiling.name:<18}{rate:>14}   {ceiling.engine}, {ceiling.kernel}"


def measurement_lines(results: Results, width: int | None) -> Iterator[str]:
    """Yield a table for each device, with fewer columns on a narrow terminal."""
    for device in results.devices:
        rows = [row for row in results.measured if row.device == device.device]
        if not rows:
            continue
        head, lines = _fit_columns(rows, width)
        baseline = "   no speed-ups: the CPU was not measured"
        if rivals := list(dict.fromkeys(row.over for row in rows if row.over)):
            rival = rivals[0] if len(rivals) == 1 else "the fastest engine of the CPU"
            baseline = f"   speed-up over {rival}"
        yield ""
        yield f"{device.device}{baseline if 'speed-up' in head else ''}"
        yield from lines
    for row in results.measurements:
        if row.state == "failed":
            yield f"failed: {_name(row)}: {row.reason}"
    unsupported = sum(row.state == "unsupported" for row in results.measurements)
    if unsupported:
        yield f"{unsupported} not supported by their engine; --json has the reasons"
    if results.notes:
        yield ""
    for note in results.notes:
        yield f"note: {note}"


def _fit_columns(rows: Sequence[Measurement], width: int | None) -> tuple[list[str], list[str]]:
    """Return the columns that fit the terminal, and the lines of the table."""
    # With a single engine every op is compared with itself, and each speed-up is 1.00 ×.
    alone = all(row.over == f"{row.device} with {row.engine}" for row in rows)
    omitted = list(_OMITTED_FIRST)
    omitted.insert(0 if alone else len(omitted), "speed-up")
    omitted.append("rate")
    head = list(_HEAD)
    cells = [dict(zip(_HEAD, _measurement_cells(row), strict=True)) for row in rows]
    while True:
        right = [number for number, name in enumerate(head) if name not in _LEFT]
        lines = table(head, [[row[name] for name in head] for row in cells], right)
        if width is None or not omitted or max(map(len, lines)) <= width:
            return head, lines
        head.remove(omitted.pop(0))


def _measurement_cells(row: Measurement) -> list[str]:
    unit = "FLOP/s" if row.bound == "compute" else "B/s"
    bound = f" {row.bound}" if row.bound else ""
    return [
        row.op,
        row.case,
        row.dtype,
        row.engine,
        format_time(row.seconds),
        f"± {percent(row.spread)}" if row.samples > 1 else "–",
        format_rate(row.rate, unit) if row.rate else "–",
        f"{percent(row.fraction)}{bound}" if row.fraction is not None else "–",
        times(row.speed_up) if row.speed_up else "–",
    ]


def _name(row: Measurement) -> str:
    return f"{row.op} in {row.dtype} on {row.device} with {row.engine}"


def comparison_lines(comparison: Comparison, name: str) -> Iterator[str]:
    """Yield the changes since the run in the file `name`."""
    yield ""
    yield f"Against {name}"
    for sentence in comparison.elsewhere:
        yield f"  note: {sentence}"
    for title, changes in (("slower", comparison.slower), ("faster", comparison.faster)):
        rows = [(title, *_change_cells(change)) for change in changes]
        lines = table(_CHANGE_HEAD, rows, [5, 6, 7]) if rows else ()
        yield from (f"  {line}" for line in lines)
    for row in comparison.lost:
        yield f"  lost: {_name(row)}: {row.reason}"
    if comparison.apart:
        yield f"  {comparison.apart}"
        return
    counts = f"{len(comparison.slower)} slower, {len(comparison.faster)} faster, "
    counts += f"{len(comparison.lost)} lost, {comparison.alike} within the noise"
    if comparison.only_before or comparison.only_now:
        counts += f"; {comparison.only_before} only there, {comparison.only_now} only here"
    yield f"  {counts}"


def _change_cells(change: Change) -> list[str]:
    new, before = change.new, format_time(change.old.seconds)
    where = f"{new.engine} on {new.device}"
    now, factor = format_time(new.seconds), times(change.factor)
    return [new.op, new.case, new.dtype, where, before, now, factor]


def text_lines(speeds: TextSpeeds) -> Iterator[str]:
    """Yield the ceilings of the device, and the speeds of a language model as a table."""
    for ceiling in speeds.ceilings:
        if ceiling.what in ("read", "matmul"):
            rate = format_rate(ceiling.rate, UNITS[ceiling.what])
            yield f"  {ceiling.name:<18}{rate:>14}   {ceiling.kernel}"
    if speeds.peak is not None:
        yield f"  {'memory':<18}{format_size(speeds.peak):>14}   at the peak of this process"
    yield ""
    rows = [_speed_cells(row) for row in speeds.speeds]
    yield from table(_SPEED_HEAD, rows, range(len(_SPEED_HEAD)))


def _speed_cells(row: TextSpeed) -> list[str]:
    return [
        f"{row.context:,}",
        _token_rate(row.prefill),
        _share(row.prefill, row.prefill_limit),
        format_time(row.first_token),
        _token_rate(row.decode),
        _share(row.decode, row.decode_limit),
        "–" if row.decode_limit is None else _token_rate(row.decode_limit),
    ]


def _token_rate(rate: float) -> str:
    return f"{rate:,.0f} tok/s" if rate >= 100 else f"{rate:.1f} tok/s"


def _share(rate: float, limit: float | None) -> str:
    return "–" if not limit else percent(rate / limit)


def timings_text(timings: Timings) -> str:
    lines = table(_TIMING_HEAD, list(map(_timing_cells, timings)), _TIMING_RIGHT)
    return "\n".join((timings.function, *lines, *_timing_remarks(timings)))


def timings_html(timings: Timings) -> str:
    return notebook.block(
        notebook.line(timings.function, "strong"),
        notebook.table(_TIMING_HEAD, map(_timing_cells, timings), _TIMING_RIGHT),
        *(notebook.line(remark, "soft") for remark in _timing_remarks(timings)),
    )


def _timing_cells(row: DeviceTiming) -> tuple[str, ...]:
    pair = (row.device, row.engine or "–")
    if row.seconds is None:
        return (*pair, *["–"] * 5)
    spread = "–" if row.spread is None else f"± {percent(row.spread)}"
    if (row.spread or 0.0) > _NOISY:
        spread = "noisy"
    speed_up = times(row.speed_up) if row.speed_up else "–"
    peak = "–" if row.peak is None else format_size(row.peak)
    return (*pair, format_time(row.seconds), spread, format_time(row.first or 0.0), peak, speed_up)


def _timing_remarks(timings: Timings) -> list[str]:
    remarks = [f"{name}: {row.reason}" for name, row in timings._by_name().items() if row.reason]
    if any((row.spread or 0.0) > _NOISY for row in timings):
        remarks.append(
            f"noisy: calls differ by more than ± {percent(_NOISY)}; repeat it while nothing "
            "else runs, or with a longer limit"
        )
    return remarks
