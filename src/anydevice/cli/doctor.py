"""`anydevice doctor`: compute on every usable device, explain what is wrong and what to do."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from anydevice._core.finding import Verdict
from anydevice._core.text import ABSENT, UNUSABLE, USABLE, format_time, shortened, wrapped
from anydevice._machine.choose.scope import why
from anydevice._machine.discovery.check import check
from anydevice._machine.discovery.discover import discover
from anydevice._machine.discovery.doctor import Examination, prepare
from anydevice._machine.engines import registry
from anydevice._report.diagnosis import Conclusion, Explanation, conclude
from anydevice.cli.options import add_options, progress_on, seconds
from anydevice.cli.printing import Output, error_in_json, problem_of

EXAMPLE = "anydevice doctor cuda:0 --engine torch"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "devices", nargs="*", metavar="DEVICE", help='only these: "cuda", "cuda:1" or "gpu"'
    )
    add_options(
        parser,
        ("--engine", "ENGINE", str, "only this array library, such as torch"),
        ("--limit", "SECONDS", seconds, "how long one computation may take (120)"),
    )
    parser.set_defaults(limit=120.0)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Check and print; return 1 for an unusable device, a wrong result, or wrong settings."""
    examined = prepare(discover(), arguments.devices, arguments.engine)
    problem = problem_of(why)
    if arguments.json:
        verdicts = [
            check(device, engine, limit=arguments.limit) for device, engine in examined.pairs
        ]
        conclusion = conclude(examined, verdicts, os.environ)
        output.json(conclusion.to_dict() | error_in_json(problem))
    else:
        conclusion = _show(examined, arguments.limit, output)
        output.complain(problem)
    return 0 if conclusion.healthy and not problem else 1


def _show(examined: Examination, limit: float, output: Output) -> Conclusion:
    places = [finding.backend for finding in examined.report]
    places += [str(device) for device in examined.report.devices]
    column = max(map(len, places)) + 3
    libraries = (
        max((len(registry.with_version(engine)) for _, engine in examined.pairs), default=0) + 3
    )
    verdicts = []
    for number, (device, engine) in enumerate(examined.pairs):
        with progress_on(output) as bar:
            bar.tell(number, len(examined.pairs), f"{device} with {engine}")
            verdict = check(device, engine, limit=limit)
        verdicts.append(verdict)
        output.say(_line(verdict, column, libraries, output))
        output.stream.flush()
    for item in examined.unusable:
        place = output.paint(item.place.ljust(column), "strong")
        output.say(f"{output.paint(UNUSABLE, 'bad')} {place}stopped at: {item.stage}")
    for finding in examined.report:
        if not finding.present:
            why = finding.reason or "not in this machine"
            output.say(output.paint(f"{ABSENT} {finding.backend.ljust(column)}{why}", "dim"))
    conclusion = conclude(examined, verdicts, os.environ)
    _show_explanations("What is wrong, and what to do", conclusion.explanations, output)
    _show_explanations("Worth knowing", conclusion.worth_knowing, output)
    right = sum(verdict.right for verdict in conclusion.verdicts)
    stopped = ", ".join(item.place for item in conclusion.unusable)
    but = f"; not usable: {stopped}" if stopped else ""
    output.say("", f"{right} of {len(verdicts)} computations were right{but}.")
    return conclusion


def _line(verdict: Verdict, column: int, libraries: int, output: Output) -> str:
    mark, style = (USABLE, "good") if verdict.right else (UNUSABLE, "bad")
    place = output.paint(verdict.device.ljust(column), "strong")
    library = registry.with_version(verdict.engine).ljust(libraries)
    reason = " ".join(str(verdict.reason or "wrong").split())  # in full below the table
    words = "right" if verdict.right else shortened(reason, 100)
    times = f"{format_time(verdict.seconds)} in all"
    if verdict.first_call is not None and verdict.second_call is not None:
        times += f", first call {format_time(verdict.first_call)}"
        times += f", second {format_time(verdict.second_call)}"
    return f"{output.paint(mark, style)} {place}{library}{words}   {output.paint(times, 'dim')}"


def _show_explanations(title: str, explanations: Sequence[Explanation], output: Output) -> None:
    if not explanations:
        return
    output.say("", output.paint(title, "strong"))
    for explanation in explanations:
        output.say("", f"  {output.paint(explanation.subject, 'strong')}: {explanation.cause}")
        for sentence in (*explanation.evidence, explanation.meaning):
            output.say(*wrapped(sentence, output.width or 10_000, "    "))
        output.say(f"    {output.paint('→ ' + explanation.advice, 'fix')}")
