"""The options of `verify` and `bench` by which only a part of everything is looked at.

The bar of a command: on a terminal, and only there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from anydevice.cli.printing import Output
from anydevice.core.progress import ProgressBar

_OPTIONS = {
    "op": "matmul,softmax",
    "device": "cuda:0,cpu",
    "engine": "torch,jax",
    "dtype": "float32,bfloat16",
}


def add_narrowing(parser: argparse.ArgumentParser) -> None:
    """Add --op, --device, --engine and --dtype: names with commas, or the option repeated.

    >>> parser = argparse.ArgumentParser()
    >>> add_narrowing(parser)
    >>> parser.parse_args(["--op", "add, exp", "--op", "log"]).op
    ['add', 'exp', 'log']
    """
    for name, example in _OPTIONS.items():
        parser.add_argument(
            f"--{name}",
            metavar=name.upper(),
            type=names,
            action="extend",
            help=f"only these, such as {example}; may be repeated",
        )


def names(text: str) -> list[str]:
    """The names in a text that has commas between them; for argparse, which says if none is."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} has no name in it")
    return found


Tell = Callable[[int, int, str], None]
"""Called with how much is done, how much there is, and what comes now."""


@contextmanager
def shown_on(output: Output, *, silent: bool = False) -> Iterator[Tell | None]:
    """What to tell the progress to; `None` where nobody would see it, or it is not wanted."""
    if output.width is None or silent:
        yield None
        return
    with ProgressBar(output.stream, colour=output.colour) as bar:
        yield bar.tell
