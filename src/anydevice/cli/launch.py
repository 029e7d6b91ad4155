"""`anydevice launch`: run a script in several processes of this machine."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial

from anydevice._parallel.host import run_script
from anydevice._parallel.processes import TOGETHER
from anydevice.cli.printing import Output
from anydevice.errors import ConfigurationError

EXAMPLE = "anydevice launch -n 4 train.py --epochs 3"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    restarts = "start all of them again, up to N times, where one fails: a training with save= and "
    restarts += "resume=True goes on from its file (default: 0)"
    engine = "the library that they compute with (default: one that the script imports, else the "
    engine += "first of these that is installed)"
    count = "how many processes; each gets torchrun's variables (default: 1)"
    positive, natural = partial(_at_least, 1), partial(_at_least, 0)
    parser.add_argument("-n", "--processes", metavar="N", type=positive, default=1, help=count)
    parser.add_argument("--restarts", metavar="N", type=natural, default=0, help=restarts)
    parser.add_argument("--engine", choices=TOGETHER, help=engine)
    parser.add_argument("--hosts", "--nnodes", help=argparse.SUPPRESS)
    script = "a Python file, which calls parallel.initialize()"
    parser.add_argument("script", type=_script, help=script)
    rest = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="…", help="what the script gets"
    )
    rest.required = False  # else the error for a missing script names it too


def run(arguments: argparse.Namespace, output: Output) -> int:
    if arguments.hosts is not None:
        raise ConfigurationError(
            "anydevice launch starts processes of one host; several hosts are started by "
            "`python -m torch.distributed.run`, jax.distributed, Slurm or Ray, whose variables "
            "parallel.initialize() understands",
            source="--hosts",
        )
    command = [sys.executable, "-m", "anydevice._parallel"]
    command += [arguments.script, *arguments.arguments]
    return run_script(command, arguments.processes, arguments.restarts, arguments.engine)


def _script(text: str) -> str:
    if not os.path.isfile(text):
        what = "a folder" if os.path.isdir(text) else "no file"
        raise argparse.ArgumentTypeError(
            f"{text or repr(text)} is {what}; give a Python file, as in {EXAMPLE}"
        )
    if not os.access(text, os.R_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be read: Permission denied")
    return text


def _at_least(least: int, text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else -1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of {least} or more")
    return number
