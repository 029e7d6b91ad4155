"""`anydevice devices`: every device with its properties."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from anydevice._core.backends import BACKENDS
from anydevice._core.device import Device
from anydevice._core.finding import DeviceStatus, Facts, Finding
from anydevice._core.text import ABSENT, UNUSABLE, USABLE, format_size
from anydevice._machine.discovery.discover import Report, discover
from anydevice._machine.engines import registry
from anydevice._machine.settings.config import current
from anydevice.cli.main import NOT_DONE
from anydevice.cli.printing import Output, error_in_json, problem_of

EXAMPLE = "anydevice devices --json"

_LABELS = 20
_RUNTIMES = {name: row.label for name, row in BACKENDS.items()} | {"xpu": "Level Zero"}


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Print the list; with a settings file that is wrong, the list and then the error."""
    problem = problem_of(current)
    report = discover()
    if arguments.json:
        output.json(report.to_dict() | error_in_json(problem))
    else:
        _show(report, output)
        output.complain(problem)
    return NOT_DONE if problem else 0


def _show(report: Report, output: Output) -> None:
    twins = {device: card for card in report.cards if len(card) > 1 for device in card}
    for finding in report:
        if finding.present and not finding.devices:
            _show_one(UNUSABLE, finding.backend, "no device", _troubles(finding), output)
        for device in finding.devices:
            status = device.status
            assert status is not None
            mark = USABLE if status.usable else UNUSABLE
            others = [str(other) for other in twins.get(device, ()) if other != device]
            pairs = [*_pairs(device, status, finding), ("same card as", ", ".join(others))]
            rows = [*pairs, *_troubles(status)]
            _show_one(mark, str(device), status.facts.name, rows, output)
        for note in finding.notes if finding.present else ():
            output.say(f"  {output.paint(f'note on {finding.backend}: {note}', 'dim')}", "")
    absent = [finding.backend for finding in report if not finding.present]
    if absent:
        output.say(output.paint(f"{ABSENT} {', '.join(absent)}: not in this machine", "dim"), "")
    output.say(f"Recommended: {report.recommended}")


def _show_one(
    mark: str, name: str, title: str, rows: Iterable[tuple[str, str]], output: Output
) -> None:
    style = "good" if mark == USABLE else "bad"
    output.say(f"{output.paint(mark, style)} {output.paint(name, 'strong')}   {title}")
    for label, words in rows:
        if words:
            painted = output.paint(words, "fix") if label == "fix" else words
            output.say(f"    {output.paint(label.ljust(_LABELS), 'dim')}{painted}")
    output.say()


def _pairs(device: Device, status: DeviceStatus, finding: Finding) -> Iterator[tuple[str, str]]:
    facts = status.facts
    yield "kind", device.kind
    tested = BACKENDS[finding.backend].tier_note if finding.backend in BACKENDS else "from a probe"
    yield "tier", f"{finding.tier} ({tested})"
    yield "engines", ", ".join(map(registry.with_version, status.engines))
    for refusal in status.refusals if status.usable else ():
        yield f"not by {refusal.engine}", refusal.reason.text
    yield "memory", _memory(facts)
    yield "compute capability", facts.compute_capability or ""
    yield "architecture", facts.architecture or ""
    runtime = f"{_RUNTIMES.get(device.backend, 'runtime')} {facts.runtime_version}"
    versions = (facts.driver_version, facts.runtime_version and runtime)
    yield "driver", ", ".join(filter(None, versions))
    yield "uuid", facts.uuid or ""
    yield "pci address", facts.pci_address or ""
    for name, value in facts.details.items():
        if value is not None:
            yield name.replace("_", " "), _format_value(value)


def _memory(facts: Facts) -> str:
    if facts.total_memory is None:
        return ""
    words = f"{format_size(facts.total_memory)} {facts.memory_kind}"
    if facts.usable_memory not in (None, facts.total_memory):
        words += f", {format_size(facts.usable_memory)} usable"
    if facts.free_memory is not None:
        words += f", {format_size(facts.free_memory)} free"
    return words


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _troubles(stopped: DeviceStatus | Finding) -> Iterator[tuple[str, str]]:
    if stopped.stage is None:
        return
    yield "stopped at", stopped.stage
    for reason in stopped.reasons:
        yield "reason", reason.text
    yield "fix", stopped.fix or ""
