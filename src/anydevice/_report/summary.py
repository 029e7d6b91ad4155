"""A report as text for a terminal, and as a table for a notebook."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby

import anydevice
from anydevice._core.backends import BACKENDS
from anydevice._core.choice import Choice
from anydevice._core.device import Device
from anydevice._core.finding import DeviceStatus, Facts, Finding
from anydevice._core.record import Record
from anydevice._core.text import ABSENT, UNUSABLE, USABLE, format_size, wrapped
from anydevice._machine.discovery.discover import Report, discover
from anydevice._machine.engines import registry
from anydevice._report import notebook
from anydevice._report.choice import because, unmet_wishes, was_automatic
from anydevice._report.tables import Paint, plain

_GAP = "   "
_SYSTEMS = {"linux": "Linux", "darwin": "macOS", "win32": "Windows"}
_NARROWEST = 40


class _Entry(Record):
    """A device, or a backend without any: its mark, name and facts, and the failed stage."""

    mark: str
    name: str
    facts: tuple[str, ...] = ()
    stopped: DeviceStatus | Finding | None = None


def text(
    report: Report,
    *,
    choice: Choice | None = None,
    paint: Paint = plain,
    width: int | None = None,
) -> str:
    """Return the summary that `anydevice` prints; with `choice`, also the chosen device and why."""
    names = [entry.name for finding in report for entry in _entries(finding, report)]
    column = max(6, *(len(name) for name in names)) + 2 + len(_GAP)
    lines = [paint(_title(report), "dim"), ""]
    for finding in report:
        for _, alike in groupby(_entries(finding, report), key=_failure_lines):
            entries = list(alike)
            for entry in entries:
                lines += _head(entry, column, paint, width)
            # The reason that these devices share, once, below the last of them.
            for line, style in _failure_lines(entries[-1], len(entries)):
                room = None if style == "fix" else width
                lines += _break_line(line, column, room, paint, style)
        if finding.present:
            for note in finding.notes:
                lines += _break_line(f"note: {note}", column, width, paint, "dim")
    absent = [finding.backend for finding in report if not finding.present]
    if absent:
        lines.append(paint(f"{ABSENT} {', '.join(absent)}", "dim"))
    lines.append("")
    for line in _ending(report, choice):
        lines += _break_line(line, 0, width, plain, "dim")
    return "\n".join(lines)


def html(report: Report) -> str:
    """Return the report as one table for a notebook."""
    rows: list[tuple[str, ...]] = []
    for finding in report:
        if finding.present:
            rows += [_row(entry) for entry in _entries(finding, report)]
        else:
            why = f"not in this machine: {finding.reason}" if finding.reason else ""
            rows.append((ABSENT, finding.backend, "", why))
    caption = f"{_title(report)} · recommended: {report.recommended}"
    return notebook.block(notebook.line(caption, "soft"), _table(rows))


def devices_html(devices: Sequence[Device]) -> str:
    if not devices:
        return notebook.block(notebook.line("no usable device", "soft"))
    report = discover()
    return notebook.block(_table([_device_row(device, report) for device in devices]))


def device_html(device: Device) -> str:
    """Return one device for a notebook, with its engine and the source of the choice."""
    engine = f"engine {device.engine}" if device.engine else "no engine"
    chosen = f" · chosen by {device.chosen_by}" if device.chosen_by else ""
    title = notebook.line(f"device {device} · {engine}{chosen}", "soft")
    return notebook.block(title, _table([_device_row(device, discover())]))


def _table(rows: Sequence[Sequence[str]]) -> str:
    stopped = any(row[-1] for row in rows)
    head = ("", "device", "what it is", "what stopped it, and what fixes it")
    return notebook.table(head if stopped else head[:3], rows if stopped else [r[:3] for r in rows])


def _device_row(device: Device, report: Report) -> tuple[str, ...]:
    status = device.status
    if status is None:
        return (UNUSABLE, str(device), "", device.why_not or "")
    return _row(_entry(device, status, report))


def _row(entry: _Entry) -> tuple[str, ...]:
    why = "\n".join(line.strip() for line, _ in _failure_lines(entry))
    return (entry.mark, entry.name, " · ".join(entry.facts), why)


def describe(device: Device, report: Report) -> tuple[str, ...]:
    """Return short facts of a device: name, memory, libraries, and its other names."""
    status = device.status
    assert status is not None
    parts = [_identity(device, status.facts), memory_in_words(status.facts)]
    if status.usable:
        versions = {name: _short(registry.version_of(name) or "") for name in status.engines}
        parts.append(", ".join(f"{name} {version}".rstrip() for name, version in versions.items()))
    elif status.facts.driver_version and status.stage != "driver":
        parts.append(f"driver {status.facts.driver_version} answers")
    tier = report[device.backend].tier
    if status.usable and tier != "stable":
        parts.append("not tested on hardware" if tier == "untested" else tier)
    twins = [str(d) for card in report.cards if device in card for d in card if d != device]
    if twins:
        parts.append(f"same card as {', '.join(twins)}")
    if device.backend == "cpu" and len(report["cpu"].devices) > 1:
        parts.append(f"{len(report['cpu'].devices)} devices for jax")
    return tuple(part for part in parts if part)


def memory_in_words(facts: Facts) -> str:
    """Return total and free memory, with one unit: "12.0 GiB, 11.3 free"."""
    if facts.total_memory is None:
        return ""
    total = format_size(facts.total_memory)
    words = f"{total} unified" if facts.memory_kind == "unified" else total
    if facts.free_memory is not None:
        free = format_size(facts.free_memory)
        unit = " " + total.split()[1]
        words += f", {free.removesuffix(unit)} free"
    return words


def _title(report: Report) -> str:
    system = _SYSTEMS.get(sys.platform, sys.platform)
    python = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    version = f"anydevice {_short(anydevice.__version__)}"
    return f"{version} · {system} · {python} · {report.seconds * 1000:.0f} ms"


def _entries(finding: Finding, report: Report) -> Iterator[_Entry]:
    """Yield an entry for each device of a backend that is present."""
    if not finding.present:
        return
    if not finding.devices:
        yield _Entry(UNUSABLE, finding.backend, (), finding)
    for device in finding.devices:
        if device.backend == "cpu" and device.index > 0:  # the same cores once more, for jax
            continue
        status = device.status
        assert status is not None
        yield _entry(device, status, report)


def _entry(device: Device, status: DeviceStatus, report: Report) -> _Entry:
    stopped = None if status.usable else status
    mark = USABLE if status.usable else UNUSABLE
    return _Entry(mark, str(device), describe(device, report), stopped)


def _identity(device: Device, facts: Facts) -> str:
    more = None if device.kind == "cpu" else facts.architecture
    cores = facts.details.get("physical_cores")
    if facts.compute_capability:
        more = f"sm {facts.compute_capability}"
    elif device.backend == "opencl" and device.kind == "cpu":
        more = "a CPU"
    elif device.kind == "cpu" and cores:
        more = f"{cores} core{'' if cores == 1 else 's'}"
    return f"{facts.name}, {more}" if more else facts.name


def _short(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _head(entry: _Entry, column: int, paint: Paint, width: int | None) -> list[str]:
    style = "good" if entry.mark == USABLE else "bad"
    name = entry.name.ljust(column - 2)
    rows = [""]
    for part in entry.facts:
        longer = f"{rows[-1]}{_GAP}{part}" if rows[-1] else part
        if rows[-1] and width and column + len(longer) > width:
            rows.append(part)
        else:
            rows[-1] = longer
    first = f"{paint(entry.mark, style)} {paint(name, 'strong')}{rows[0]}".rstrip()
    return [first, *(" " * column + row for row in rows[1:])]


def _failure_lines(entry: _Entry, count: int = 1) -> list[tuple[str, str]]:
    """Return the lines below an unusable device with their styles: stage, reasons, fix."""
    stopped = entry.stopped
    if stopped is None:
        return []
    suffix = f" (each of these {count})" if count > 1 else ""
    fix = [(f"fix: {stopped.fix}", "fix")] if stopped.fix else []
    reasons = [(f"  {reason}", "dim") for reason in stopped.reasons]
    return [(f"stopped at: {stopped.stage}{suffix}", "bad"), *reasons, *fix]


def _break_line(line: str, column: int, width: int | None, paint: Paint, style: str) -> list[str]:
    """Return a line below a device, broken to fit, with all parts indented alike."""
    indent = " " * (len(line) - len(line.lstrip()))
    parts = [line]
    if width and column + len(line) > width:
        parts = wrapped(line.strip(), max(_NARROWEST, width - column), indent)
    return [" " * column + paint(part, style) for part in parts]


def _ending(report: Report, choice: Choice | None) -> list[str]:
    if choice is None:
        return [f"Recommended: {report.recommended}"]
    if choice.device is None:
        outcomes = [f"  {step.source} {step.asked}: {step.outcome}" for step in choice.steps]
        return ["Chosen: nothing, because no device fits", *outcomes]
    lines = [f"Chosen: {choice.device}, because {because(report, choice)}"]
    lines += [f"{wish}. See: anydevice config --why" for wish in unmet_wishes(choice)]
    waiting = _fixable_device(report, choice)
    if waiting is not None and waiting.status is not None:
        maker = BACKENDS[waiting.backend].vendor if waiting.backend in BACKENDS else ""
        card = waiting.status.facts.name.removeprefix(f"{maker} ")
        near = waiting.status.stage == "library"
        how = f"One command away from the {card}" if near else f"To get the {card}, fix it as above"
        lines.append(f"{how}. Then: anydevice doctor")
    return lines


def names_doctor(report: Report, choice: Choice) -> bool:
    """Whether the summary of this choice mentions `anydevice doctor`."""
    failed = any(d.status and d.status.stage == "compute" for d in report.devices)
    return failed or _fixable_device(report, choice) is not None


def _fixable_device(report: Report, choice: Choice) -> Device | None:
    """Return the first device with a known fix, if the order of backends ended at the CPU."""
    if choice.device is None or choice.device.backend != "cpu" or not was_automatic(choice):
        return None
    return next((d for d in report.devices if d.status and d.status.fix), None)
