"""`anydevice config`: the settings in force, where each came from, and how the choice is made."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from anydevice._core.choice import Choice, Request
from anydevice._core.text import ABSENT, UNUSABLE, USABLE, percent, printable, wrapped
from anydevice._machine.choose.scope import make_request, why
from anydevice._machine.discovery.discover import discover
from anydevice._machine.settings.config import Config, current, unknown_variables
from anydevice._machine.settings.files import (
    NO_HOME,
    described,
    measurements_file,
    project_file,
    user_file,
    verdicts_file,
)
from anydevice._ops.trusted_kernels import kernels_file
from anydevice._report.choice import because
from anydevice.cli.main import NOT_DONE
from anydevice.cli.options import add_switches
from anydevice.cli.printing import Output, error_in_json
from anydevice.errors import AnyDeviceError

EXAMPLE = "anydevice config --why"

_VARIABLES = ("ANYDEVICE_DEVICE", "ANYDEVICE_ENGINE", "ANYDEVICE_HOME")

Setting = tuple[str, str, str]
"""The name of a setting, its value in words, and where it came from."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_switches(parser, why="show every step by which the device is chosen")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Print the settings, the files that were looked at and, if asked, the steps of the choice."""
    try:
        config, origins = current()
        request = make_request(None, engine=None, min_free=None)
        choice = why() if arguments.why else None
    except AnyDeviceError as error:
        if arguments.json:
            output.json(_looked_at() | error_in_json(error))
        else:
            _show_places(output)
            output.complain(error)
        return NOT_DONE
    if arguments.json:
        output.json(_as_data(config, origins, request, choice))
        return 0
    _show_settings(_settings(config, origins, request), output)
    _show_places(output)
    if choice is not None:
        _show_steps(choice, output)
    return 0


def _as_data(
    config: Config, origins: dict[str, str], request: Request, choice: Choice | None
) -> dict[str, object]:
    data: dict[str, object] = {
        "settings": config.to_dict(),
        "origins": origins,
        "wishes": [
            {"source": wish.source, "detail": wish.detail, "devices": list(wish.names)}
            for wish in request.wishes
        ],
        "engine": request.engine,
        "engine_source": request.engine_source,
        **_looked_at(),
    }
    if choice is not None:
        data["steps"] = [step.to_dict() for step in choice.steps]
        data["chosen"] = None if choice.device is None else str(choice.device)
        data["because"] = because(discover(), choice)
    return data


def _looked_at() -> dict[str, object]:
    user_s = None if user_file().parent == NO_HOME else user_file()
    return {
        "files": [
            {"file": name, "path": path and str(path), "exists": _exists(path)}
            for name, path in (("project file", project_file()), ("user file", user_s))
        ],
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "unknown_variables": list(unknown_variables()),
    }


def _exists(path: Path | None) -> bool:
    return path is not None and os.path.exists(path)  # which never raises


def _settings(config: Config, origins: dict[str, str], request: Request) -> list[Setting]:
    settings = [
        ("device", str(wish), f"{wish.source} {wish.detail}".strip()) for wish in request.wishes
    ] or [("device", "automatic", "default")]
    settings.append(("engine", request.engine or "automatic", request.engine_source or "default"))
    share = config.memory_fraction
    values = {
        "order": ", ".join(config.order) or "the order of backends",
        "memory": "no limit" if config.memory is None else str(config.memory),
        "threads": "each library's own" if config.threads is None else str(config.threads),
        **{
            name: "on" if getattr(config, name) else "off"
            for name in ("return_memory", "x64", "jit", "mixed_precision")
        },
        "time_limit": f"{config.time_limit:g} s",
        "env": printable(", ".join(f"{name}={value}" for name, value in config.env.items()))
        or "none",
    }
    if share is not None:
        values["memory"] += f" ({percent(share)})"
    return settings + [
        (name, value, origins.get(name, "default")) for name, value in values.items()
    ]


def _show_settings(settings: list[Setting], output: Output) -> None:
    output.say(output.paint("Settings", "strong"))
    names, values = (max(len(setting[cell]) for setting in settings) + 3 for cell in (0, 1))
    for name, value, origin in settings:
        painted = output.paint(origin, "dim" if origin == "default" else "good")
        output.say(f"  {name:<{names}}{value:<{values}}{painted}")


def _show_places(output: Output) -> None:
    output.say("", output.paint("Looked at", "strong"))
    for variable in _VARIABLES:
        output.say(f"  {variable:<18}{printable(os.environ.get(variable, 'not set'))}")
    for variable, advice in unknown_variables().items():
        note = output.paint(f"is not a setting; {advice}", "bad")
        output.say(f"  {printable(variable):<17} {note}")
    for name, path in (
        ("project file", project_file()),
        ("user file", user_file()),
        ("past checks", verdicts_file()),
        ("measurements", measurements_file()),
        ("our kernels", kernels_file()),
    ):
        words = "none here or in a folder above" if path is None else described(path)
        is_missing = path is not None and NO_HOME not in path.parents and not _exists(path)
        output.say(f"  {name:<18}{words}{' (does not exist)' if is_missing else ''}")


def _show_steps(choice: Choice, output: Output) -> None:
    output.say("", output.paint("Steps of the choice", "strong"))
    sources = max((len(step.source) for step in choice.steps), default=0) + 3
    wishes = max((len(step.asked) for step in choice.steps), default=0) + 3
    for step in choice.steps:
        # An ignored step may well be usable: there was no wish for it.
        mark, style = (ABSENT, "dim") if step.ignored else (UNUSABLE, "bad")
        if step.taken:
            mark, style = USABLE, "good"
        lines = [f"{step.source:<{sources}}{step.asked:<{wishes}}{step.outcome}"]
        if output.width is not None and len(lines[0]) + 2 > output.width:
            outcome = wrapped(step.outcome, output.width, "    ")
            lines = [f"{step.source}   {step.asked}", *outcome]
        output.say(f"{output.paint(mark, style)} {lines[0]}", *lines[1:])
    if choice.device is None:
        output.say("", "Chosen: nothing, because no device fits")
    else:
        output.say("", f"Chosen: {choice.device}, because {because(discover(), choice)}")
