"""Benchmark results as lines of text, for a terminal or a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from anydevice._bench.results import UNITS, Change, Comparison, Measurement, Results
from anydevice._core.text import format_rate, format_time, percent, table, times

HEAD = ("op", "case", "dtype", "engine", "time", "spread", "rate", "of ceiling", "speed-up")
CHANGES = ("op", "case", "dtype", "where", "before", "now", "factor")
_TO_THE_LEFT = ("op", "case", "dtype", "engine")
_LESS_NEEDED = ("spread", "case")
"""What a terminal that is too narrow goes without, in this order."""


def summary_lines(results: Results) -> Iterator[str]:
    """What was measured where, and the ceilings of each device."""
    kind = " · quick" if results.quick else ""
    yield f"anydevice {results.version} · {results.system}{kind} · {format_time(results.seconds)}"
    for device in results.devices:
        driver = f", driver {device.driver}" if device.driver else ""
        yield ""
        yield f"{device.device}   {device.name}{driver}   {device.libraries}"
        for each in results.ceilings:
            if each.device == device.device:
                rate = format_rate(each.rate, UNITS[each.what])
                yield f"  {each.name:<18}{rate:>14}   {each.engine}, {each.kernel}"


def measurement_lines(results: Results, width: int | None) -> Iterator[str]:
    """A table for each device; on a narrow terminal with fewer columns."""
    for device in results.devices:
        there = [each for each in results.measured if each.device == device.device]
        if not there:
            continue
        head, lines = _fitting(there, width)
        yield ""
        yield f"{device.device}{_over(there) if 'speed-up' in head else ''}"
        yield from lines
    for each in results.measurements:
        if each.state == "failed":
            yield f"failed: {_named(each)}: {each.reason}"
    lacking = sum(each.state == "unsupported" for each in results.measurements)
    if lacking:
        yield f"{lacking} not supported by their engine; --json has the reasons"
    if results.notes:
        yield ""
    for note in results.notes:
        yield f"note: {note}"


def _fitting(there: Sequence[Measurement], width: int | None) -> tuple[list[str], list[str]]:
    """The columns that fit the terminal, and the lines of the table."""
    # Measured with one engine alone, everything is held against itself: 1.00 × all the way down.
    alone = all(each.over == f"{each.device} with {each.engine}" for each in there)
    leaving = list(_LESS_NEEDED)
    leaving.insert(0 if alone else len(leaving), "speed-up")
    leaving.append("rate")
    head = list(HEAD)
    rows = [dict(zip(HEAD, measurement_cells(each), strict=True)) for each in there]
    while True:
        right = [number for number, name in enumerate(head) if name not in _TO_THE_LEFT]
        lines = table(head, [[row[name] for name in head] for row in rows], right)
        if width is None or not leaving or max(map(len, lines)) <= width:
            return head, lines
        head.remove(leaving.pop(0))


def measurement_cells(each: Measurement) -> list[str]:
    """One measurement as the cells of a table."""
    unit = "FLOP/s" if each.bound == "compute" else "B/s"
    bound = f" {each.bound}" if each.bound else ""
    return [
        each.op,
        each.case,
        each.dtype,
        each.engine,
        format_time(each.seconds),
        f"± {percent(each.spread)}" if each.samples > 1 else "–",
        format_rate(each.rate, unit) if each.rate else "–",
        f"{percent(each.fraction)}{bound}" if each.fraction is not None else "–",
        times(each.speed_up) if each.speed_up else "–",
    ]


def _named(each: Measurement) -> str:
    return f"{each.op} in {each.dtype} on {each.device} with {each.engine}"


def _over(there: Sequence[Measurement]) -> str:
    rivals = list(dict.fromkeys(each.over for each in there if each.over))
    if not rivals:
        return "   no speed-ups: the CPU was not measured"
    return f"   speed-up over {rivals[0] if len(rivals) == 1 else 'the fastest engine of the CPU'}"


def comparison_lines(comparison: Comparison, name: str) -> Iterator[str]:
    """What changed since the run in the file `name`."""
    yield ""
    yield f"Against {name}"
    for sentence in comparison.elsewhere:
        yield f"  note: {sentence}"
    for title, changes in (("slower", comparison.slower), ("faster", comparison.faster)):
        rows = [(title, *change_cells(each)) for each in changes]
        lines = table(("", *CHANGES), rows, [5, 6, 7]) if rows else ()
        yield from (f"  {line}" for line in lines)
    for each in comparison.lost:
        yield f"  lost: {_named(each)}: {each.reason}"
    yield f"  {comparison_counts(comparison)}"


def comparison_counts(comparison: Comparison) -> str:
    """How much is slower, faster, lost and neither; or that nothing can be compared."""
    if comparison.apart:
        return comparison.apart
    counts = f"{len(comparison.slower)} slower, {len(comparison.faster)} faster, "
    counts += f"{len(comparison.lost)} lost, {comparison.alike} within the noise"
    if comparison.only_before or comparison.only_now:
        counts += f"; {comparison.only_before} only there, {comparison.only_now} only here"
    return counts


def change_cells(each: Change) -> list[str]:
    """One change as the cells of a table."""
    new, before, now = each.new, format_time(each.old.seconds), format_time(each.new.seconds)
    where = f"{new.engine} on {new.device}"
    return [new.op, new.case, new.dtype, where, before, now, times(each.factor)]
