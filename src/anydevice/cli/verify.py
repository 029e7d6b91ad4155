"""`anydevice verify`: compares every op on every device, engine and dtype with a reference."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from anydevice._check.cases.table import TABLE
from anydevice._check.verdicts import (
    FAILED,
    IN_WORDS,
    Cell,
    Kept,
    Of,
    State,
    Verdicts,
    in_words,
    save,
)
from anydevice._check.verify import verify
from anydevice._core.record import NOTHING
from anydevice._core.text import ABSENT, UNUSABLE, USABLE
from anydevice.cli.main import ANSWER_IS_NO, NOT_DECIDED, NOT_DONE
from anydevice.cli.options import add_filters, add_switches, progress_on
from anydevice.cli.printing import Output, complain

EXAMPLE = "anydevice verify --op rmsnorm,softmax --engine torch --dtype bfloat16"

_MARKS: dict[State, tuple[str, str]] = {
    "right": (USABLE, "good"),
    "unsupported": (ABSENT, "dim"),
    "wrong": (f"{UNUSABLE} wrong", "bad"),
    "crashed": (f"{UNUSABLE} crashed", "bad"),
    "timed_out": (f"{UNUSABLE} timed out", "bad"),
    "not_reached": (f"{ABSENT} not reached", "bad"),
}
_SHORT = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float64": "f64",
    "int32": "i32",
    "bool": "bool",
}
_PARTS: dict[Of, str] = {"value": "", "kernel": "our kernel ", "gradient": "gradient "}
_FILTERS = ("op", "device", "engine", "dtype")
_MAX_NAMED = 4
"""Ops that a shared reason names; a longer list is counted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_filters(parser)
    parser.add_argument("--seed", type=int, metavar="N", help="draw the calls of another run")
    how = parser.add_mutually_exclusive_group()
    add_switches(
        how,
        quick="one case of each op, one dtype of each kind, no gradients; a minute an engine",
        save="use the kernels that are right from now on",
    )


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Verify and print; return 0 if all is right, and 3 if time was up and nothing is wrong."""
    with progress_on(output, silent=arguments.json) as bar:
        rows = Rows(output, arguments.op or TABLE, before=bar.hide)
        verdicts = verify(
            arguments.op,
            arguments.device,
            arguments.engine,
            arguments.dtype,
            quick=arguments.quick,
            seed=arguments.seed,
            progress=bar.tell,
            on_op=None if arguments.json else rows.add,
        )
    saved = save(verdicts) if arguments.save else None
    if arguments.json:
        output.json(verdicts.to_dict() | ({"kernels": saved.to_dict()} if saved else {}))
    else:
        show(verdicts, output, {name: getattr(arguments, name) for name in _FILTERS})
        if saved:
            _show_kept(saved, output)
    if saved and saved.problem:
        return NOT_DONE
    if verdicts.out_of_time:
        return NOT_DECIDED
    return 0 if verdicts else ANSWER_IS_NO


class Rows:
    """Prints a line for each op as soon as it is decided; calls `before` first."""

    def __init__(
        self, output: Output, ops: Iterable[str], before: Callable[[], None] = lambda: None
    ) -> None:
        self._output, self._before = output, before
        self._column = max(map(len, ops)) + 2
        self._below = ""

    def add(self, cells: Sequence[Cell]) -> None:
        self._before()
        first, say = cells[0], self._output.say
        title = f"{first.engine} on {first.device}"
        if title != self._below:
            say(*([""] if self._below else []), self._output.paint(title, "strong"))
            self._below = title
        say(f"  {first.op:<{self._column}}{'   '.join(self._parts(cells))}")
        self._output.stream.flush()

    def _parts(self, cells: Sequence[Cell]) -> Iterator[str]:
        for of, part in _PARTS.items():
            for state, (mark, style) in _MARKS.items():
                dtypes = [cell.dtype for cell in cells if (cell.of, cell.state) == (of, state)]
                if dtypes:
                    names = " ".join(_SHORT.get(dtype, dtype) for dtype in dtypes)
                    yield f"{part}{self._output.paint(mark, style)} {names}"
                    part = ""


def show(
    verdicts: Verdicts, output: Output, filters: Mapping[str, Sequence[str] | None] = NOTHING
) -> None:
    """Print what failed, why something is unsupported or was not reached, and the result."""
    output.say("")
    for state in FAILED:
        cells = verdicts.of(state)
        if cells:
            output.say(output.paint(in_words(state).capitalize(), "bad"))
            output.say(*(f"  {cell}" for cell in cells), "")
    _show_reasons("Unsupported", verdicts.of("unsupported"), output)
    partly = [cell for cell in verdicts.of("right") if cell.reason]
    _show_reasons("Right, but not every case is supported", partly, output)
    _show_reasons("Not reached", verdicts.of("not_reached"), output, named=len(TABLE))
    counts = ", ".join(
        f"{count} {in_words(state)}"
        for state, count in verdicts.counts().items()
        if count or state in ("right", "wrong", "unsupported")
    )
    output.say(f"{counts}, in {verdicts.seconds:.1f} s.")
    if verdicts.out_of_time:
        output.say("Time was up, and nothing is wrong so far; run without --quick for the rest.")
    again = ""
    for option in _FILTERS:
        failed = dict.fromkeys(getattr(cell, option) for cell in verdicts.failed)
        names = failed or filters.get(option)
        again += f" --{option} {','.join(names)}" if names else ""
    quick = " --quick" if verdicts.quick else ""
    output.say(f"To draw the same calls: anydevice verify{again}{quick} --seed {verdicts.seed}")


def _show_reasons(
    title: str, cells: Sequence[Cell], output: Output, named: int = _MAX_NAMED
) -> None:
    """Print a line for each reason of each engine, with its ops."""
    about: dict[tuple[str, str, Of, str], list[Cell]] = {}
    for cell in cells:
        about.setdefault((cell.engine, cell.device, cell.of, cell.reason or ""), []).append(cell)
    if not about:
        return
    output.say(output.paint(title, "strong"))
    for (engine, device, of, reason), same in about.items():
        ops = dict.fromkeys(cell.op for cell in same)
        dtypes = ", ".join(dict.fromkeys(cell.dtype for cell in same))
        which = ", ".join(ops) if len(ops) <= named else f"{len(ops)} ops"
        output.say(f"  {engine} on {device}, {IN_WORDS[of]}{which} in {dtypes}: {reason}")
    output.say("")


def _show_kept(saved: Kept, output: Output) -> None:
    for title, entries in (("Used from now on", saved.trusted), ("Not used", saved.refused)):
        for kernel, dtype, device in entries:
            output.say(f"{title}: our {kernel} in {dtype} on {device}")
    if saved.problem:
        output.stream.flush()
        complain(saved.problem)
    elif not saved.trusted and not saved.refused:
        output.say("There are no kernels of our own for these devices: nothing to save.")
