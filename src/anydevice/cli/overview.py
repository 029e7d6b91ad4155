"""`anydevice` without a command: the devices, which of them are usable, and which is chosen."""

from __future__ import annotations

import argparse

from anydevice._core.choice import Choice
from anydevice._machine.choose.scope import why
from anydevice._machine.discovery.discover import discover
from anydevice._report.choice import because
from anydevice._report.summary import names_doctor, text
from anydevice.cli.main import ANSWER_IS_NO, NOT_DONE
from anydevice.cli.printing import Output, error_in_json
from anydevice.errors import AnyDeviceError

EXAMPLE = "anydevice"

NEXT = "Next: anydevice doctor, anydevice verify --quick, anydevice bench --quick"
"""Suggested commands for a machine on which nothing has to be fixed."""


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Print the summary; with a settings file that is wrong, the summary and then the error."""
    choice: Choice | None = None
    problem: AnyDeviceError | None = None
    try:
        choice = why()
    except AnyDeviceError as error:
        problem = error
    report = discover()
    if arguments.json:
        plain = report.to_dict() | {"chosen": None, "because": None}
        if choice is not None and choice.device is not None:
            plain |= {"chosen": str(choice.device), "because": because(report, choice)}
        output.json(plain | error_in_json(problem))
    else:
        fitting = text(report, choice=choice, paint=output.paint, width=output.width)
        output.say(fitting, whole=True)  # its commands stay in one piece
        if choice is not None and choice.device and not names_doctor(report, choice):
            output.say(NEXT)
        output.complain(problem)
    if choice is None:
        return NOT_DONE
    return ANSWER_IS_NO if choice.device is None else 0
