"""`anydevice prefer`: save the preferred device, or forget it."""

from __future__ import annotations

import argparse

from anydevice._core.choice import Choice
from anydevice._core.text import UNUSABLE, USABLE
from anydevice._machine.choose.scope import why
from anydevice._machine.discovery.discover import discover
from anydevice._machine.settings.config import prefer
from anydevice._report.choice import because
from anydevice.cli.options import add_options, add_switches
from anydevice.cli.printing import Output
from anydevice.errors import ConfigurationError

EXAMPLE = "anydevice prefer cuda --engine torch"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("device", nargs="?", metavar="DEVICE", help='"cuda", "cuda:1" or "gpu"')
    add_switches(which, clear="forget the preference")
    engine = "the array library to use it with, such as torch; left out, a saved one is forgotten"
    add_options(parser, ("--engine", "ENGINE", str, engine))
    project = "save it for this project: its anydevice.toml, here or above, is made if it has none"
    add_switches(parser, project=project)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Write the preference; say in which file, whether it can be met now, and what is chosen."""
    wish = (arguments.device or "").strip().lower() or None  # "" forgets, as in `prefer("")`
    if wish is None and arguments.engine:
        raise ConfigurationError("forgetting forgets the engine too: leave --engine out")
    file = prefer(wish, engine=arguments.engine, project=arguments.project)
    met = why(None if wish in (None, "auto") else wish, engine=arguments.engine)
    now = why()
    if arguments.json:
        output.json(
            {
                "device": wish,
                "engine": arguments.engine,
                "file": None if file is None else str(file),
                "usable": None if wish is None else met.device is not None,
                "code": None if met.device or not met.reasons else met.reasons[0].code,
                "reason": None if met.device else _reasons(met),
                "chosen": None if now.device is None else str(now.device),
            }
        )
        return 0
    if file is None:
        output.say("There is no preference to forget.")
    elif wish is None:
        output.say(f"The preference is forgotten, in {file}")
    else:
        with_engine = f" with {arguments.engine}" if arguments.engine else ""
        output.say(f"Preferred from now on: {wish}{with_engine}, written to {file}")
    if wish is not None and met.device is not None:
        output.say(f"{output.paint(USABLE, 'good')} {met.device} is usable now")
    elif wish is not None:
        output.say(f"{output.paint(UNUSABLE, 'bad')} {wish} is not usable now: {_reasons(met)}")
        output.say("  It is passed over until it is.")
    if now.device is not None:
        output.say(f"Chosen: {now.device}, because {because(discover(), now)}")
    return 0


def _reasons(choice: Choice) -> str:
    return "; ".join(step.outcome for step in choice.passed_over)
