"""`anydevice config`: the settings in force, where each came from, and how the choice is made."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from anydevice.choose.scope import make_request, why
from anydevice.cli.printing import Output, error_in_json
from anydevice.core.choice import Choice, Request, Step
from anydevice.core.record import Record
from anydevice.core.text import ABSENT, UNUSABLE, USABLE, percent, wrapped
from anydevice.discovery._discover import discover
from anydevice.errors import AnyDeviceError
from anydevice.ops.trusted_kernels import kernels_file
from anydevice.rendering.choice_text import because
from anydevice.settings.config import Config, current
from anydevice.settings.files import measurements_file, project_file, user_file, verdicts_file

EXAMPLE = "anydevice config --why"

_VARIABLES = ("ANYDEVICE_DEVICE", "ANYDEVICE_ENGINE", "ANYDEVICE_HOME")


class Setting(Record):
    """One setting in words, and where it came from."""

    name: str
    value: str
    origin: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whether to show the steps of the choice too."""
    parser.add_argument(
        "--why", action="store_true", help="show every step by which the device is chosen"
    )


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Print the settings, the files that were looked at and, if asked, the steps of the choice."""
    try:
        config, origins = current()
        request = make_request(None, engine=None, min_free=None)
        choice = why() if arguments.why else None
    except AnyDeviceError as error:
        return _show_problem(error, arguments, output)
    if arguments.json:
        output.json(_as_data(config, origins, request, choice))
        return 0
    _show_settings([*_wishes(request), *_settings(config, origins)], output)
    _show_places(output)
    if choice is not None:
        _show_steps(choice, output)
    return 0


def _show_problem(error: AnyDeviceError, arguments: argparse.Namespace, output: Output) -> int:
    """Where settings are wrong: everything that was looked at, and the error."""
    if arguments.json:
        output.json(_looked_at() | error_in_json(error))
        return 1
    _show_places(output)
    output.complain(error)
    return 1


def _show_places(output: Output) -> None:
    output.say("", output.paint("Looked at", "strong"))
    for name, words in _places():
        output.say(f"  {name.ljust(18)}{words}")


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
    return {
        "files": [
            {"file": name, "path": None if path is None else str(path), "exists": _exists(path)}
            for name, path in _files()
        ],
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _wishes(request: Request) -> list[Setting]:
    wishes = [
        Setting("device", str(wish), f"{wish.source} {wish.detail}".strip())
        for wish in request.wishes
    ]
    engine = Setting("engine", request.engine or "automatic", request.engine_source or "default")
    return [*(wishes or [Setting("device", "automatic", "default")]), engine]


def _settings(config: Config, origins: dict[str, str]) -> list[Setting]:
    values = {
        "order": ", ".join(config.order) or "the order of backends",
        "memory": _memory(config),
        "x64": _switch(config.x64),
        "jit": _switch(config.jit),
        "mixed_precision": _switch(config.mixed_precision),
        "time_limit": f"{config.time_limit:g} s",
        "env": ", ".join(f"{name}={value}" for name, value in config.env.items()) or "none",
    }
    return [Setting(name, value, origins.get(name, "default")) for name, value in values.items()]


def _memory(config: Config) -> str:
    if config.memory is None:
        return "no limit"
    fraction = config.memory_fraction
    if fraction is None:
        return str(config.memory)
    return f"{config.memory} ({percent(fraction)})"


def _switch(value: bool) -> str:
    return "on" if value else "off"


def _files() -> list[tuple[str, Path | None]]:
    return [("project file", project_file()), ("user file", user_file())]


def _exists(path: Path | None) -> bool:
    return path is not None and path.exists()


def _places() -> list[tuple[str, str]]:
    places = [(variable, os.environ.get(variable, "not set")) for variable in _VARIABLES]
    for name, path in _files():
        if path is None:
            places.append((name, "none here or in a folder above"))
        else:
            places.append((name, f"{path}{'' if _exists(path) else ' (does not exist)'}"))
    for name, kept in (
        ("past checks", verdicts_file()),
        ("measurements", measurements_file()),
        ("our kernels", kernels_file()),
    ):
        places.append((name, f"{kept}{'' if _exists(kept) else ' (does not exist)'}"))
    return places


def _show_settings(settings: list[Setting], output: Output) -> None:
    output.say(output.paint("Settings", "strong"))
    names = max(len(setting.name) for setting in settings) + 3
    values = max(len(setting.value) for setting in settings) + 3
    for setting in settings:
        origin = output.paint(setting.origin, "dim" if setting.origin == "default" else "good")
        output.say(f"  {setting.name.ljust(names)}{setting.value.ljust(values)}{origin}")


def _mark(step: Step) -> tuple[str, str]:
    if step.taken:
        return USABLE, "good"
    # What is left out may well be usable: nobody asked for it.
    return (ABSENT, "dim") if step.left_out else (UNUSABLE, "bad")


def _show_steps(choice: Choice, output: Output) -> None:
    output.say("", output.paint("Steps of the choice", "strong"))
    sources = max((len(step.source) for step in choice.steps), default=0) + 3
    asked = max((len(step.asked) for step in choice.steps), default=0) + 3
    for step in choice.steps:
        mark, style = _mark(step)
        words = f"{step.source.ljust(sources)}{step.asked.ljust(asked)}{step.outcome}"
        if output.width is None or len(words) + 2 <= output.width:
            output.say(f"{output.paint(mark, style)} {words}")
            continue
        output.say(f"{output.paint(mark, style)} {step.source}   {step.asked}")
        output.say(*wrapped(step.outcome, max(output.width, 20), "    "))
    if choice.device is None:
        output.say("", "Chosen: nothing, because no device fits")
    else:
        output.say("", f"Chosen: {choice.device}, because {because(discover(), choice)}")
