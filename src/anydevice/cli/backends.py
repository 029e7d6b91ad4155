"""`anydevice backends`: what each backend needs and is good for, and what each library lacks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from anydevice._core.backends import BACKENDS, Backend
from anydevice._core.finding import Detail, Facts, Finding
from anydevice._core.record import as_dict
from anydevice._core.text import ABSENT, UNUSABLE, USABLE, wrapped
from anydevice._machine.discovery.discover import Report, discover
from anydevice._machine.engines import registry
from anydevice._machine.engines.registry import EngineRow
from anydevice._report.tables import render_lines
from anydevice.cli.printing import Output

EXAMPLE = "anydevice backends"

_CPU_DETAILS = ("simd", "threads", "physical_cores", "logical_cores", "usable_cores")
_PIPED_WIDTH = 80
_NARROW = 80
"""Below this many columns a table would break words: its cells stand below each other instead."""


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Print tables of backends and engines, and a line on this CPU."""
    report = discover()
    if arguments.json:
        output.json(_as_data(report))
        return 0
    backends = BACKENDS.values()
    about = [_about(row, report[row.name]) for row in backends if row.name in report]
    head = ("", "backend", "vendor", "platforms", "BLAS", "run-time compiler", "best for")
    _show_table("Backends", head, about, output)
    needs = [
        (
            row.name,
            ", ".join(registry.engines_for(row.name)),
            f"{row.tier}: {row.tier_note}",
            row.requires,
        )
        for row in backends
    ]
    title = "What they require, and how well they are tested"
    _show_table(title, ("backend", "engines", "tier", "requires"), needs, output)
    drives = [_engine(row) for row in registry.rows().values()]
    _show_table("Engines", ("engine", "installed", "drives", "lacks"), drives, output)
    cpu = {name: value or "unknown" for name, value in _cpu(report).items()}
    words = f"{cpu['name']}   SIMD level: {cpu['simd']}   threads: {cpu['threads']}"
    if cpu["physical_cores"] != "unknown":
        words += f"   cores: {cpu['physical_cores']}"
    output.say(output.paint("This CPU", "strong"), *wrapped(words, output.width or 10_000, "  "))
    for note in registry.notes():
        output.say("", f"note: {note}")
    return 0


def _as_data(report: Report) -> dict[str, object]:
    return {
        "backends": [
            {
                **as_dict(row),
                "engines": list(registry.engines_for(row.name)),
                "present": row.name in report and report[row.name].present,
                "usable": row.name in report and report[row.name].usable,
            }
            for row in BACKENDS.values()
        ],
        "engines": [
            {
                "engine": row.name,
                "label": row.label,
                "version": registry.version_of(row.name),
                "backends": list(row.backends),
                "lacks": {name: absent.reason.to_dict() for name, absent in row.lacks.items()},
            }
            for row in registry.rows().values()
        ],
        "cpu": _cpu(report),
        "notes": list(registry.notes()),
    }


def _about(row: Backend, finding: Finding) -> tuple[str, ...]:
    mark = USABLE if finding.usable else UNUSABLE if finding.present else ABSENT
    platforms = ", ".join(row.platforms)
    return mark, row.name, row.vendor, platforms, row.blas, row.runtime_compiler, row.best_for


def _engine(row: EngineRow) -> tuple[str, ...]:
    version = registry.version_of(row.name) or "no"
    lacks = "\n".join(f"– {absent}" for absent in row.lacks.values()) or "nothing"
    return row.name, version, ", ".join(row.backends), lacks


def _cpu(report: Report) -> dict[str, Detail]:
    devices = report["cpu"].devices
    status = devices[0].status if devices else None
    facts = status.facts if status else Facts("unknown")
    known = {name: facts.details.get(name) for name in _CPU_DETAILS}
    return {"name": facts.name, "architecture": facts.architecture, **known}


def _show_table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], output: Output
) -> None:
    output.say(output.paint(title, "strong"))
    if output.width is not None and output.width < _NARROW:
        _show_stacked(headings, rows, output)
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="dim")
    for heading in headings:
        whole = heading in ("", "backend", "engine", "vendor", "installed")
        style = "bold" if heading in ("backend", "engine") else ""
        table.add_column(heading, style=style, no_wrap=whole, overflow="fold")
    for row in rows:
        table.add_row(*row)
    output.say(*render_lines(table, output.width or _PIPED_WIDTH, colour=output.colour))


def _show_stacked(headings: Sequence[str], rows: Sequence[Sequence[str]], output: Output) -> None:
    """Print each row as lines: the mark and the name, then a line for each other cell."""
    named = 1 - bool(headings[0])
    for row in rows:
        output.say("", " ".join((*row[:named], output.paint(row[named], "strong"))))
        for heading, cell in zip(headings[named + 1 :], row[named + 1 :], strict=True):
            for line in f"{heading}: {cell}".splitlines():
                output.say(*wrapped(line, output.width or _PIPED_WIDTH, "  ", "  "))
    output.say("")
