"""The options of `verify` and `bench` by which only a part of everything is looked at."""

from __future__ import annotations

import argparse

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
            type=_names,
            action="extend",
            help=f"only these, such as {example}; may be repeated",
        )


def _names(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} has no name in it")
    return names
