"""The command line: parses the arguments, runs one command, and returns its exit code.

The module of a command has an `EXAMPLE`, `add_arguments(parser)` if it takes any, and
`run(arguments, output)`, which prints and returns the exit code.

`_EXIT_CODES` and docs/troubleshooting.md have the exit codes of every command; `launch` returns
the code of the process that failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, EIO, ENOSPC
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn, TextIO

import anydevice
from anydevice._core.text import warn
from anydevice._machine.settings.config import unknown_variables
from anydevice.cli.printing import Output, complain, drop, error_in_json, fitted, output_on
from anydevice.errors import AnyDeviceError, OutOfMemoryError

COMMANDS = {
    "devices": "list every device with what is known of it",
    "backends": "what each backend needs and is good for, and what each library lacks",
    "doctor": "compute on every usable device, explain what is wrong and what to do",
    "verify": "compute every op here in every way, and compare with one reference",
    "chat": "talk to a language model, or give it one prompt",
    "quantize": "write a language model as a GGUF file with quantized weights",
    "launch": "run a training script in several processes",
    "bench": "measure this machine's ceilings, and how near to them every op comes",
    "prove": "prove a property of a model for every input, or find one that refutes it",
    "plan": "whether a model fits here, on which devices, and what would fit if not",
    "watch": "a live view of every device: memory, load, heat, power and processes",
    "prefer": "save the device that you prefer",
    "config": "show the settings in force and where each came from",
    "completion": "print a script that completes commands and options in a shell",
}
ANSWER_IS_NO, NOT_DONE, NOT_DECIDED, INTERRUPTED, NOBODY_READS = 1, 2, 3, 130, 141

_FULL = (ENOSPC, EDQUOT, EFBIG, EIO)
"""Errors of an output to a disk that is full or fails."""

_MAY_BE_EMPTY = ("prompt", "system", "device")
"""Arguments whose commands say what an empty text means."""

_WITHOUT_JSON = {"launch": "what the script prints", "completion": "a script"}
"""Commands whose output is not for JSON, and what it is."""

_DESCRIPTION = (
    "Find every accelerator of this machine and choose one.\n"
    "Without a command: a summary, and the device that would be chosen."
)

_EXIT_CODES = """\
    0  all is well
    1  it was done, and the answer is no: wrong, slower, refuted, too large
    2  it could not be done: a wrong option, file, name or setting
    3  undecided: prove reached no result, or verify --quick ran out of time
  130  it was interrupted by Ctrl-C; prove says how far it is, and gives 3
  141  the reader of its output is gone"""


class _Help(argparse.HelpFormatter):
    """A page of help whose texts keep their lines, and are broken between words alone."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = (f"{indent}{line}" for line in text.splitlines())
        return "\n".join(part for line in lines for part in fitted(line, width))


class _UsageError(Exception):
    def __init__(self, usage: str, message: str) -> None:
        super().__init__(message)
        self.usage = usage


class _Parser(argparse.ArgumentParser):
    """A parser that raises where argparse would print and exit, so that --json holds here too."""

    commands: Mapping[str, argparse.ArgumentParser]

    def error(self, message: str) -> NoReturn:
        raise _UsageError(self.format_usage(), message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Raise for unknown arguments here, with the usage of the command, not of all commands."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stdout).write(message)  # where argparse hides errors


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, `sys.argv` unless another is given, and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    sys.stdout = sys.stdout or _nowhere()  # closed by the parent process
    sys.stderr = sys.stderr or _nowhere()
    output = output_on(sys.stdout)
    try:
        code = _run(words, output)
        output.stream.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        drop(output.stream)
        return NOBODY_READS
    except OSError as error:
        drop(output.stream)
        complain(_refusal(error))
        return NOT_DONE


def _run(words: list[str], output: Output) -> int:
    name = next((word for word in words if not word.startswith("-")), None)
    as_json = "--json" in words and name not in _WITHOUT_JSON
    try:
        # Only the module of this command is imported; the others take longer than it runs.
        module = name if name in COMMANDS else "overview"
        command = import_module(f"anydevice.cli.{module}")
        parser = _parser(command, name)
        arguments = parser.parse_args(words)
        _check_names(arguments, words, parser)
        if arguments.json and name in _WITHOUT_JSON:
            parser.error(f"{name} prints {_WITHOUT_JSON[name]}, and has no --json of its own")
        # With `--json FILE` the terminal is for people, errors too.
        as_json = arguments.json and getattr(arguments, "file", None) in (None, "-")
        with _warnings_in_a_line():
            if name != "config":  # which lists them
                for variable, advice in unknown_variables().items():
                    warn(f"{variable} is not a setting; {advice}")
            code: int = command.run(arguments, output)
            return code
    except SystemExit as leaving:  # --help and --version
        return int(leaving.code or 0)
    except _UsageError as error:
        _say_error(error, output, as_json=as_json, usage=error.usage)
        return NOT_DONE
    except AnyDeviceError as error:
        _say_error(error, output, as_json=as_json)
        return ANSWER_IS_NO if isinstance(error, OutOfMemoryError) else NOT_DONE


def _check_names(
    arguments: argparse.Namespace, words: Sequence[str], parser: argparse.ArgumentParser
) -> None:
    """Raise for an empty name: commands would take it for a missing one, or for a folder."""
    options = {word.partition("=")[0] for word in words}
    for name, value in vars(arguments).items():
        if value == "" and name not in _MAY_BE_EMPTY:
            option = f"--{name.rstrip('_').replace('_', '-')}"
            parser.error(f"{option if option in options else name.upper()} is empty: give a name")


def command_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command; of the program itself for an empty name."""
    parser = _parser(import_module(f"anydevice.cli.{name or 'overview'}"), name)
    return parser.commands[name] if name else parser


def _parser(command: ModuleType, chosen: str | None) -> _Parser:
    parser = _Parser(
        prog="anydevice",
        description=_DESCRIPTION,
        epilog=f"exit codes:\n{_EXIT_CODES}\n\nexample:\n  anydevice --json",
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=f"anydevice {anydevice.__version__}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    parser.commands = commands.choices
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            formatter_class=_Help,
        )
        if name == chosen:
            sub.epilog = f"example:\n  {command.EXAMPLE}"
            if chosen not in _WITHOUT_JSON:
                # Suppressed: otherwise its default would undo a --json before the command's name.
                sub.add_argument(
                    "--json", action="store_true", default=argparse.SUPPRESS, help="print JSON"
                )
            if hasattr(command, "add_arguments"):
                command.add_arguments(sub)
    return parser


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Print each warning of the block once, in one plain line."""
    said: set[str] = set()

    def show(message: Warning | str, *details: object, **more: object) -> None:
        text = str(message)
        if text not in said:
            said.add(text)
            errors = output_on(sys.stderr)
            errors.say(f"{errors.paint('warning:', 'strong')} {text}")

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield


def _say_error(error: Exception, output: Output, *, as_json: bool, usage: str = "") -> None:
    if as_json:
        output.json(error_in_json(error))
        return
    if usage:
        sys.stderr.write(usage)
    output.complain(error)


def _refusal(error: OSError) -> str:
    """Return the message of a system error; without a file name it is the output that failed."""
    why = error.strerror or str(error)
    if error.errno in _FULL:
        return f"{error.filename or 'the output'} cannot be written: {why}"
    return f"{error.filename}: {why}" if error.filename else why


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")
