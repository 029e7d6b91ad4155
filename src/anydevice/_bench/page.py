"""Benchmark results, of ops and of language models, as self-contained HTML pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from anydevice._bench.ceilings import ceiling_of
from anydevice._bench.language_models import (
    TEXT_HEAD,
    TextSpeed,
    TextSpeeds,
    text_cells,
    token_rate,
)
from anydevice._bench.printing import (
    CHANGES,
    HEAD,
    change_cells,
    comparison_counts,
    measurement_cells,
)
from anydevice._bench.results import UNITS, MeasuredDevice, Measurement, Results, compare_runs
from anydevice._core.text import format_rate, format_size, format_time, percent, times
from anydevice._plan.estimates import PARTS
from anydevice._report.page import (
    beside,
    cards,
    document,
    figure,
    figures,
    folded,
    listed,
    memory_figure,
    paragraphs,
    section,
    table,
)
from anydevice._report.svg import (
    Bar,
    Curve,
    Dot,
    Line,
    decades,
    dot_plot,
    legend,
    line_chart,
    powers,
    roofline,
)

_MOST_NAMED = 6
"""Changes for the better and for the worse that are seen first."""


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
    runs = [
        (name, f"{each.made.replace('T', ' ')}, anydevice {each.version}")
        for name, each in (("before", earlier), ("now", results))
    ]
    both = (("slower", comparison.slower), ("faster", comparison.faster))
    largest = [
        (times(each.factor), f"{name}: {', '.join(change_cells(each)[:4])}")
        for name, changes in both
        for each in changes[:_MOST_NAMED]
    ]
    tables = [
        folded(
            f"{len(changes)} {name}",
            table(CHANGES, [change_cells(each) for each in changes], texts=4),
            opened=len(changes) <= _MOST_NAMED,
        )
        for name, changes in both
        if changes
    ]
    lost = (f"lost: {_name(each)}: {each.reason or ''}" for each in comparison.lost)
    named = list(dict.fromkeys(each.engine for each in results.measured))
    return section(
        "Against the earlier run",
        paragraphs([comparison_counts(comparison), *comparison.elsewhere]),
        legend(named, engines),
        figures(*_changes(earlier, results, engines), beside([*runs, *largest])),
        *tables,
        paragraphs(lost),
    )


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
    rows = [measurement_cells(each) for each in measured]
    everything = folded(f"All {len(rows)} figures", table(HEAD, rows, texts=4)) if rows else ""
    lost = [
        f"{each.state} {_name(each)}: {each.reason or ''}"
        for each in there
        if each.state != "measured"
    ]
    missing = folded(f"{len(lost)} could not be measured", listed(lost)) if lost else ""
    facts = [
        ("device", f"{device.device}, {device.name}"),
        *([("driver", device.driver)] if device.driver else []),
        *device.engines.items(),
        ("measured", f"{len(measured)} of {len(there)}"),
    ]
    return section(
        device.device,
        _ceilings(device.device, results),
        legend(list(device.engines), engines),
        figures(*_figures(device.device, measured, results, engines), beside(facts)),
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


_ON_A_CPU = "On a CPU, the peak is that of the whole process, Python and its libraries included."
_ELSEWHERE = "The peak is that of the arrays; what the plan calls overhead is not counted in it."


def text_page(found: TextSpeeds, about: Mapping[str, Any]) -> str:
    """The page of a language model's speeds; `about` has the model, where it is, and its plan."""
    where = f"{about['device']} with {about['engine']}"
    ceilings = [
        (f"ceiling: {each.name}", format_rate(each.rate, UNITS[each.what]))
        for each in found.ceilings
        if each.what in ("read", "matmul")
    ]
    facts = [
        ("model", str(about["model"])),
        ("device", f"{where}, because {about['reason']}"),
        ("dtype", str(about["dtype"])),
        ("context", f"{about['context']:,} tokens"),
        *ceilings,
    ]
    notes = [] if found.peak is None else [_ON_A_CPU if about["device"] == "cpu" else _ELSEWHERE]
    return document(
        "anydevice bench",
        [f"anydevice {found.version}", str(about["model"]), where, str(about["dtype"])],
        cards(_text_cards(found, about["memory"]["total"])),
        figures(*_text_figures(found, about["memory"]), beside(facts)),
        section("All figures", table(TEXT_HEAD, [text_cells(each) for each in found.speeds], 0)),
        notes=notes,
    )


def _text_cards(found: TextSpeeds, planned: int) -> Iterator[tuple[str, str, str]]:
    writing = max(found.speeds, key=lambda each: each.decode)
    reading = max(found.speeds, key=lambda each: each.prefill)
    for name, each, rate, limit in (
        ("decode", writing, writing.decode, writing.decode_limit),
        ("prefill", reading, reading.prefill, reading.prefill_limit),
    ):
        share = f", {percent(rate / limit)} of the limit" if limit else ""
        yield token_rate(rate), name, f"context {each.context:,}{share}"
    longest = max(found.speeds, key=lambda each: each.context)
    yield format_time(longest.first_token), "to the first token", f"context {longest.context:,}"
    if found.peak is not None:
        yield format_size(found.peak), "memory at the peak", f"{format_size(planned)} planned"


def _text_figures(found: TextSpeeds, memory: Mapping[str, int]) -> Iterator[str]:
    speeds = sorted(found.speeds, key=lambda each: each.context)
    yield _by_context("Decode", speeds, lambda each: (each.decode, each.decode_limit))
    yield _by_context("Prefill", speeds, lambda each: (each.prefill, each.prefill_limit))
    waits = Curve("first token", [(each.context, each.first_token) for each in speeds])
    yield _rising("First token", "seconds until it is there", [waits])
    parts = {name.replace("_", "-"): float(memory[name]) for name in PARTS}
    bars = [Bar("planned", format_size(memory["total"]), tuple(parts.items()))]
    if found.peak is not None:
        bars.append(Bar("at the peak", format_size(found.peak), (("measured", float(found.peak)),)))
    yield memory_figure("Memory", "of the plan, and measured", bars, [*parts, "measured"])


def _by_context(
    title: str,
    speeds: Sequence[TextSpeed],
    rates: Callable[[TextSpeed], tuple[float, float | None]],
) -> str:
    """Tokens a second over the tokens of the prompt, below what the ceilings allow."""
    both = [(each.context, *rates(each)) for each in speeds]
    curves = [Curve("measured", [(context, rate) for context, rate, _ in both])]
    limits = [(context, limit) for context, _, limit in both if limit is not None]
    if limits:
        curves.append(Curve("what the ceilings allow", limits, limit=True))
    return _rising(title, "tokens a second", curves)


def _rising(title: str, explanation: str, curves: Sequence[Curve]) -> str:
    """Curves over contexts: from 0 on, or by powers of ten where they are far apart."""
    values = [value for curve in curves for _, value in curve.points]
    ends = (0.0, max(values)) if max(values) <= 20 * min(values) else None
    several = len(curves[0].points) > 1
    below = "tokens of the prompt"
    chart = line_chart(curves, title=title, below=below, ends=ends, logarithmic=several)
    return figure(title, explanation, chart)
