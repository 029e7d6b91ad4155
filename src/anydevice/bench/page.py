"""Benchmark results as one self-contained HTML page of plots and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
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
from anydevice.rendering.svg import Dot, Line, decades, dot_plot, legend, powers, roofline

STYLE = """
:root { --ink: #1d2329; --soft: #5c6873; --paper: #ffffff; --panel: #f4f6f8; --line: #d8dee4;
  --m0: #0b62c4; --m1: #c2410c; --m2: #7c3aed; --m3: #15803d; --m4: #a16207; --m5: #0e7490; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaee; --soft: #9aa7b3; --paper: #14181c; --panel: #1e242a; --line: #39434d;
    --m0: #6db1ff; --m1: #ff9b66; --m2: #c4a3ff; --m3: #62d58b; --m4: #e5c04d; --m5: #5cd3ea; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.45;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 16px; }
h1 { font-size: 1.5rem; margin: 0 0 4px; }
h2 { font-size: 1.2rem; margin: 28px 0 2px; overflow-wrap: anywhere; }
h2 small, p, figcaption { color: var(--soft); font-weight: normal; font-size: .9rem; }
p { margin: 0 0 10px; overflow-wrap: anywhere; }
ul { padding: 0; margin: 0 0 10px; list-style: none; }
h3 { font-size: 1rem; margin: 12px 0 2px; }
.ceilings { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 8px; }
.ceilings li { background: var(--panel); border-radius: 8px; padding: 8px 10px; }
.ceilings b { display: block; font-size: 1.05rem; white-space: nowrap; }
.ceilings span { display: block; font-size: .85rem; }
.ceilings small { display: block; color: var(--soft); font-size: .75rem; line-height: 1.25;
  overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: .85rem; }
.legend svg { vertical-align: -1px; }
.figures { display: grid; gap: 16px; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); }
.figures figure:only-child { max-width: 420px; }
figure { margin: 0; background: var(--panel); border-radius: 10px; padding: 10px; min-width: 0; }
figcaption b { color: var(--ink); }
figure svg { display: block; width: 100%; height: auto; margin-top: 6px; }
svg text { fill: var(--ink); font-size: 11.5px; }
svg .tick, svg .detail { fill: var(--soft); font-size: 10px; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .rule { stroke: var(--line); stroke-width: 1; }
svg .roof { stroke: var(--soft); stroke-width: 1.5; fill: none; }
svg .mark { fill-opacity: .85; stroke: var(--panel); stroke-width: .6; }
.m0 { fill: var(--m0); } .m1 { fill: var(--m1); } .m2 { fill: var(--m2); }
.m3 { fill: var(--m3); } .m4 { fill: var(--m4); } .m5 { fill: var(--m5); }
details { margin: 14px 0; }
summary { cursor: pointer; padding: 6px 0; font-weight: 600; }
details li { font-size: .85rem; overflow-wrap: anywhere; padding: 3px 0; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; }
th, td { text-align: right; padding: 4px 8px; border-bottom: 1px solid var(--line); }
th:nth-child(-n+4), td:nth-child(-n+4) { text-align: left; }
td { font-variant-numeric: tabular-nums; }
@media (max-width: 820px) {
  thead { display: none; }
  table, tbody { display: block; }
  tr { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 2px 8px;
    padding: 8px 0; border-bottom: 1px solid var(--line); }
  td, td:nth-child(-n+4) { display: block; border: 0; padding: 0; text-align: left;
    overflow-wrap: anywhere; }
  td:first-child { font-weight: 600; }
  td:nth-child(2), td:nth-child(4) { grid-column: span 2; }
  td:nth-child(n+5)::before { content: attr(data-name); display: block; color: var(--soft);
    font-size: .7rem; }
}
"""
"""Light or dark as the reader's system is, in one column on a phone."""


def page(results: Results, earlier: Results | None = None) -> str:
    """One HTML page that holds all of the results and needs no other file.

    With an earlier run, it begins with what changed since.
    """
    known = [name for device in results.devices for name in device.engines]
    engines = list(dict.fromkeys([*known, *(each.engine for each in results.measurements)]))
    sections = "".join(_device(device, results, engines) for device in results.devices)
    compared = _compared(earlier, results, engines) if earlier is not None else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<meta name="color-scheme" content="light dark"/>'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\"/>"
        f"<title>anydevice bench</title><style>{STYLE}</style></head><body><main>"
        f"{_top(results)}{compared}{sections}{_notes(results)}</main></body></html>\n"
    )


def _top(results: Results) -> str:
    facts = [
        f"anydevice {results.version}",
        results.system,
        results.made.replace("T", " "),
        f"{len(results.measured)} measurements in {format_time(results.seconds)}",
        *(["a quick run"] if results.quick else []),
    ]
    return f"<header><h1>anydevice bench</h1><p>{escape(' · '.join(facts))}</p></header>"


def _notes(results: Results) -> str:
    notes = "".join(f"<li>{escape(note)}</li>" for note in results.notes)
    return f"<section><h2>Notes</h2><ul>{notes}</ul></section>" if notes else ""


def _compared(earlier: Results, results: Results, engines: Sequence[str]) -> str:
    comparison = compare_runs(earlier, results)
    runs = " · ".join(
        f"{name} {each.made.replace('T', ' ')}, anydevice {each.version}"
        for name, each in (("before", earlier), ("now", results))
    )
    parts = [f"<section><h2>Against the earlier run</h2><p>{escape(runs)}</p>"]
    parts += [f"<p>{escape(sentence)}</p>" for sentence in comparison.elsewhere]
    parts.append(f"<p>{escape(comparison_counts(comparison))}</p>")
    figures = "".join(_changes(earlier, results, engines))
    if figures:
        named = list(dict.fromkeys(each.engine for each in results.measured))
        parts += [legend(named, engines), f'<div class="figures">{figures}</div>']
    for title, changes in (("Slower", comparison.slower), ("Faster", comparison.faster)):
        if changes:
            parts += [
                f"<h3>{title}</h3>",
                _table(CHANGES, [change_cells(each) for each in changes]),
            ]
    parts += [
        f"<p>lost: {escape(_name(each))}: {escape(each.reason or '')}</p>"
        for each in comparison.lost
    ]
    return "".join((*parts, "</section>"))


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
            yield _figure(title, "left of 1 × is faster now", plot)


def _device(device: MeasuredDevice, results: Results, engines: Sequence[str]) -> str:
    there = [each for each in results.measurements if each.device == device.device]
    measured = [each for each in there if each.state == "measured"]
    driver = f" · driver {device.driver}" if device.driver else ""
    figures = "".join(_figures(device.device, measured, results, engines))
    rows = [measurement_cells(each) for each in measured]
    everything = _folded(f"All {len(rows)} figures", _table(HEAD, rows)) if rows else ""
    lost = [
        f"<li><b>{escape(each.state)}</b> {escape(_name(each))}: {escape(each.reason or '')}</li>"
        for each in there
        if each.state != "measured"
    ]
    count = f"{len(lost)} could not be measured"
    missing = _folded(count, f"<ul>{''.join(lost)}</ul>") if lost else ""
    return (
        f"<section><h2>{escape(device.device)} <small>{escape(device.name)}</small></h2>"
        f"<p>{escape(device.libraries + driver)}</p>{_ceilings(device.device, results)}"
        f"{legend(list(device.engines), engines)}"
        f'<div class="figures">{figures}</div>'
        f"{everything}{missing}</section>"
    )


def _ceilings(device: str, results: Results) -> str:
    cards = "".join(
        f"<li><b>{escape(format_rate(each.rate, UNITS[each.what]))}</b>"
        f"<span>{escape(each.name)}</span>"
        f"<small>{escape(f'{each.engine}, {each.kernel}')}</small></li>"
        for each in results.ceilings
        if each.device == device
    )
    return f'<ul class="ceilings">{cards}</ul>' if cards else ""


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
        yield _figure(title, "of the memory's or of the matmul's, as binds", plot)
    faster = _lines(measured, lambda each: each.speed_up, times)
    if faster:
        title = "Speed-up over the CPU"
        ends = decades([dot.value for line in faster for dot in line.dots])
        marks = [(power, f"{power:g} ×") for power in powers(ends)]
        name = f"{title}, {device}"
        plot = dot_plot(faster, engines, ends, marks, logarithmic=True, title=name)
        yield _figure(title, "right is faster; each line is ten times", plot)
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
        yield _figure(title, "operations a second; the line is the ceiling", plot)


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


def _figure(title: str, explanation: str, plot: str) -> str:
    return (
        f"<figure><figcaption><b>{escape(title)}</b> {escape(explanation)}</figcaption>"
        f"{plot}</figure>"
    )


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose cells carry the name of their column, for screens that show no head."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-name="{escape(name)}">{escape(cell)}</td>'
            for name, cell in zip(names, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>{content}</details>"
