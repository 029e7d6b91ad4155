"""Benchmark results as one self-contained HTML page of plots and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf

from anydevice.bench.ceilings import ceiling_of
from anydevice.bench.printing import (
    CHANGES,
    HEAD,
    change_cells,
    comparison_counts,
    measurement_cells,
)
from anydevice.bench.results import UNITS, MeasuredDevice, Measurement, Results, compare_runs
from anydevice.core.text import format_rate, format_time, percent, times
from anydevice.rendering.page import (
    cards,
    document,
    figure,
    figures,
    folded,
    listed,
    paragraphs,
    section,
    table,
)
from anydevice.rendering.svg import Dot, Line, decades, dot_plot, legend, powers, roofline


def page(results: Results, earlier: Results | None = None) -> str:
    """One HTML page that holds all of the results and needs no other file.

    With an earlier run, it begins with what changed since.
    """
    known = [name for device in results.devices for name in device.engines]
    engines = list(dict.fromkeys([*known, *(each.engine for each in results.measurements)]))
    sections = "".join(_device(device, results, engines) for device in results.devices)
    compared = _compared(earlier, results, engines) if earlier is not None else ""
    facts = [
        f"anydevice {results.version}",
        results.system,
        results.made.replace("T", " "),
        f"{len(results.measured)} measurements in {format_time(results.seconds)}",
        *(["a quick run"] if results.quick else []),
    ]
    return document("anydevice bench", facts, compared, sections, notes=results.notes)


def _compared(earlier: Results, results: Results, engines: Sequence[str]) -> str:
    comparison = compare_runs(earlier, results)
    runs = " · ".join(
        f"{name} {each.made.replace('T', ' ')}, anydevice {each.version}"
        for name, each in (("before", earlier), ("now", results))
    )
    parts = [paragraphs([runs, *comparison.elsewhere, comparison_counts(comparison)])]
    plots = figures(*_changes(earlier, results, engines))
    if plots:
        named = list(dict.fromkeys(each.engine for each in results.measured))
        parts += [legend(named, engines), plots]
    for title, changes in (("Slower", comparison.slower), ("Faster", comparison.faster)):
        if changes:
            rows = [change_cells(each) for each in changes]
            parts += [f"<h3>{title}</h3>", table(CHANGES, rows, texts=4)]
    lost = (f"lost: {_name(each)}: {each.reason or ''}" for each in comparison.lost)
    return section("Against the earlier run", *parts, paragraphs(lost))


def _changes(earlier: Results, results: Results, engines: Sequence[str]) -> Iterator[str]:
    """A figure for each device: what each measurement takes now, over what it took before."""
    before = {each.key: each.seconds for each in earlier.measured}
    for device in results.devices:
        there = [each for each in results.measured if each.device == device.device]
        lines = _lines(there, lambda each: each.seconds / (before.get(each.key) or inf), times)
        if lines:
            title = f"Time now over before, {device.device}"
            ends = decades([1.0, *(dot.value for line in lines for dot in line.dots)])
            ends = (min(ends[0], 0.1), ends[1])
            marks = [(power, f"{power:g} ×") for power in powers(ends)]
            plot = dot_plot(lines, engines, ends, marks, logarithmic=True, title=title)
            yield figure(title, "left of 1 × is faster now", plot)


def _device(device: MeasuredDevice, results: Results, engines: Sequence[str]) -> str:
    there = [each for each in results.measurements if each.device == device.device]
    measured = [each for each in there if each.state == "measured"]
    driver = f" · driver {device.driver}" if device.driver else ""
    rows = [measurement_cells(each) for each in measured]
    everything = folded(f"All {len(rows)} figures", table(HEAD, rows, texts=4)) if rows else ""
    lost = [
        f"{each.state} {_name(each)}: {each.reason or ''}"
        for each in there
        if each.state != "measured"
    ]
    missing = folded(f"{len(lost)} could not be measured", listed(lost)) if lost else ""
    return section(
        device.device,
        paragraphs([device.libraries + driver]),
        _ceilings(device.device, results),
        legend(list(device.engines), engines),
        figures(*_figures(device.device, measured, results, engines)),
        everything,
        missing,
        detail=device.name,
    )


def _ceilings(device: str, results: Results) -> str:
    return cards(
        (format_rate(each.rate, UNITS[each.what]), each.name, f"{each.engine}, {each.kernel}")
        for each in results.ceilings
        if each.device == device
    )


def _figures(
    device: str, measured: Sequence[Measurement], results: Results, engines: Sequence[str]
) -> Iterator[str]:
    copying = ceiling_of(results.ceilings, device, "copy")
    roofs = [
        (each.dtype or "", each.rate)
        for each in results.ceilings
        if each.device == device and each.what == "matmul"
    ]
    near = _lines(measured, lambda each: each.fraction, percent)
    if near:
        title = "Fraction of the ceiling"
        most = min(max(dot.value for line in near for dot in line.dots), 1.5)
        ticks = [(part / 4, f"{25 * part} %") for part in range(5)]
        ends = (0.0, max(1.0, most))
        plot = dot_plot(near, engines, ends, ticks, title=f"{title}, {device}")
        yield figure(title, "of the memory's or of the matmul's, as binds", plot)
    faster = _lines(measured, lambda each: each.speed_up, times)
    if faster:
        title = "Speed-up over the CPU"
        ends = decades([dot.value for line in faster for dot in line.dots])
        marks = [(power, f"{power:g} ×") for power in powers(ends)]
        name = f"{title}, {device}"
        plot = dot_plot(faster, engines, ends, marks, logarithmic=True, title=name)
        yield figure(title, "right is faster; each line is ten times", plot)
    rates = [(each, each.operations / each.seconds) for each in measured if each.operations]
    dots = [
        (
            each.operations / each.moved,
            Dot(each.engine, rate, f"{_name(each)}: {format_rate(rate, 'FLOP/s')}"),
        )
        for each, rate in rates
        if each.moved
    ]
    if dots and copying and roofs:
        title = "Roofline"
        plot = roofline(dots, engines, copying.rate, roofs, _power, title=f"{title}, {device}")
        yield figure(title, "operations a second; the line is the ceiling", plot)


def _lines(
    measured: Sequence[Measurement],
    value: Callable[[Measurement], float | None],
    words: Callable[[float], str],
) -> list[Line]:
    """A row for each op, case and dtype that has a value, with a dot for each engine."""
    rows: dict[tuple[str, str, str], list[Dot]] = {}
    for each in measured:
        found = value(each)
        if found:
            said = f"{_name(each)}: {words(found)}, {format_time(each.seconds)}"
            rows.setdefault((each.op, each.case, each.dtype), []).append(
                Dot(each.engine, found, said)
            )
    dtypes = {op: {dtype for other, _, dtype in rows if other == op} for op, _, _ in rows}
    return [
        Line(op, f"{dtype}, {case}" if len(dtypes[op]) > 1 else case, tuple(dots))
        for (op, case, dtype), dots in rows.items()
    ]


def _name(each: Measurement) -> str:
    return f"{each.op}, {each.case}, {each.dtype}, {each.engine}"


def _power(value: float) -> str:
    """A power of ten without the digits behind the point."""
    return format_rate(value, "").replace(".00", "").replace(".0", "").strip()
