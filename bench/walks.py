"""How far calls walk through anydevice: its own calls, their files, and the switches between files.

Each call is made until it is warm, then counted once. A step of training is the difference between
two trainings of which one has a step more.

    python bench/walks.py
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import anydevice
from anydevice import llm, nn, ops

_WARM_UPS = 4
_STEPS = 8

warnings.simplefilter("ignore")  # where no accelerator is, `device()` says so


class Walk(NamedTuple):
    """The calls of one walk by file, and the switches between files."""

    calls: Counter[str]
    switches: int


def walk(call: Callable[[], Any]) -> Walk:
    """Follow one call, after a few to warm up."""
    for _ in range(_WARM_UPS):
        call()
    calls: Counter[str] = Counter()
    switches, last = 0, ""

    def follow(frame: FrameType, event: str, _: Any) -> None:
        nonlocal switches, last
        path = frame.f_code.co_filename.replace("\\", "/")
        if event != "call" or "/anydevice/" not in path:
            return
        calls[path] += 1
        switches += path != last
        last = path

    sys.setprofile(follow)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Walk(calls, switches)


def train_step() -> Walk:
    """One further step of `nn.train`."""
    rows = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)
    model = nn.build(
        nn.Dense(4, 8), "relu", nn.Dense(8, 4), device=anydevice.device("cpu", engine="torch")
    )

    def train(steps: int) -> None:
        data = [(rows, rows)] * steps
        nn.train(model, data, nn.Adam(), nn.mean_squared_error, epochs=1, optimize="none")

    few, more = (walk(partial(train, steps)) for steps in (_STEPS, _STEPS + 1))
    return Walk(more.calls - few.calls, more.switches - few.switches)


def language_model() -> dict[str, Walk]:
    """Return the walks of loading a small language model, and of one more token, if it is there."""
    root = Path(os.environ.get("ANYDEVICE_DATA") or Path(__file__).parents[2] / "shared" / "data")
    folder = root / "stories260K"
    if not folder.is_dir():
        return {}
    stream = iter(llm.load(folder, device="cpu").stream("Once upon a time", max_tokens=100))
    return {
        "llm.load(folder)": walk(lambda: llm.load(folder, device="cpu")),
        "one more token of stream()": walk(lambda: next(stream)),
    }


def walks() -> dict[str, Walk]:
    """Return the walks of a few calls that most programs make."""
    module, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    return {
        **language_model(),
        'compile(Linear, "cpu", verify=x, optimize="none")': walk(
            lambda: anydevice.compile(module, "cpu", verify=x, optimize="none")
        ),
        "one further step of nn.train": train_step(),
        'device("cpu", engine="torch")': walk(lambda: anydevice.device("cpu", engine="torch")),
        "device()": walk(anydevice.device),
        "ops.softmax(x)": walk(lambda: ops.softmax(x)),
    }


def main() -> None:
    table = Table("call", box=None, pad_edge=False)
    for name in ("calls", "files", "switches"):
        table.add_column(name, justify="right")
    for name, each in walks().items():
        table.add_row(name, f"{each.calls.total():,}", str(len(each.calls)), f"{each.switches:,}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
