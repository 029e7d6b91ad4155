"""Options that several commands have, and the progress bar of a command."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf, nan

from anydevice._core.progress import ProgressBar
from anydevice._core.text import parse_count
from anydevice.cli.printing import Output
from anydevice.errors import ConfigurationError

_FILTERS = {
    "op": "matmul,softmax",
    "device": "cuda:0,cpu",
    "engine": "torch,jax",
    "dtype": "float32,bfloat16",
}


Option = tuple[str, str, Callable[[str], object], str]
"""The name of an option, the word for its value in the help, its parser, and its help."""


def add_options(parser: argparse._ActionsContainer, *options: Option) -> None:
    """Add options that take one value.

    >>> parser = argparse.ArgumentParser()
    >>> add_options(parser, ("--context", "TOKENS", count, "of prompt and reply together"))
    >>> parser.parse_args(["--context", "32k"]).context
    32768
    """
    for name, metavar, kind, text in options:
        parser.add_argument(name, metavar=metavar, type=kind, help=text)


def add_switches(parser: argparse._ActionsContainer, **switches: str) -> None:
    """Add options that take no value, each with its help."""
    for name, text in switches.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)


def add_filters(parser: argparse.ArgumentParser, *options: str) -> None:
    """Add --op, --device, --engine and --dtype, or those named: lists that may be repeated.

    >>> parser = argparse.ArgumentParser()
    >>> add_filters(parser)
    >>> parser.parse_args(["--op", "add, exp", "--op", "log"]).op
    ['add', 'exp', 'log']
    """
    for name in options or _FILTERS:
        parser.add_argument(
            f"--{name}",
            metavar=name.upper(),
            type=_names,
            action="extend",
            help=f"only these, such as {_FILTERS[name]}; may be repeated",
        )


def _names(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} has no name in it")
    return names


def add_removed_page(parser: argparse.ArgumentParser) -> None:
    """Add --html, which wrote pages before version 0.3, as an error that says so."""

    def refuse(path: str) -> None:
        raise argparse.ArgumentTypeError("removed in 0.3: use --json, or a notebook for plots")

    parser.add_argument("--html", type=refuse, help=argparse.SUPPRESS)


def check_place(devices: Sequence[str] | None, engine: str | None) -> None:
    """Raise `ConfigurationError`, with the option and the known names, for an unknown name.

    >>> check_place(["cpu", "quantum"], "torch")
    Traceback (most recent call last):
    anydevice.errors.ConfigurationError: --device: there is no backend 'quantum'; \
the backends are cuda, rocm, metal, xpu, tpu, opencl, cpu
    """
    from anydevice._machine.settings.config import check_engine, check_wish

    for name in devices or ():
        check_wish(name.strip().lower(), "--device")
    if engine is not None:
        check_engine(engine, "--engine")


def seconds(text: str, low: float = 0.0, high: float = inf) -> float:
    """Return the number of seconds in the text, above 0 and from `low` to `high`.

    >>> seconds("0.5")
    0.5
    """
    try:
        number = float(text)
    except ValueError:
        number = nan
    if not (low <= number <= high and 0 < number < inf):
        limits = f"from {low:g}" if low else "above 0"
        limits += f" to {high:g}" if high < inf else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds {limits}")
    return number


def count(text: str) -> int:
    """Return the positive integer in the text, which may end in k or M.

    >>> count("32k")
    32768
    """
    try:
        return parse_count(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


@contextmanager
def progress_on(output: Output, *, silent: bool = False) -> Iterator[ProgressBar]:
    """Show a progress bar on a terminal; nothing when piped or `silent`."""
    stream = None if output.width is None or silent else output.stream
    with ProgressBar(stream, colour=output.colour) as bar:
        yield bar
