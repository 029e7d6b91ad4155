"""`anydevice verify`: compares every op on every device, engine and dtype with a reference."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence

from anydevice.check.verdicts import IN_WORDS, Cell, Kept, Of, Verdicts, save
from anydevice.check.verifying import verify
from anydevice.cli.options import add_filters, progress_on
from anydevice.cli.printing import Output
from anydevice.core.text import ABSENT, UNUSABLE, USABLE, table

EXAMPLE = "anydevice verify --op rmsnorm,softmax --engine torch --dtype bfloat16"

_MARKS = {"right": (USABLE, "good"), "wrong": (UNUSABLE, "bad"), "unsupported": (ABSENT, "dim")}
_SHORT = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float64": "f64",
    "int32": "i32",
    "bool": "bool",
}
_TITLES: dict[Of, str] = {"value": "", "kernel": "Our kernels", "gradient": "Gradients"}
_NAMED = 4
"""So many ops are named where they share a reason; more are counted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which part of the table is verified, and whether the outcome is kept."""
    add_filters(parser)
    parser.add_argument(
        "--all", action="store_true", help="a line for every op, also where many are alike"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--quick", action="store_true", help="one case of each op, no gradients")
    how.add_argument(
        "--save", action="store_true", help="let kernels that are right be used from now on"
    )


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Verify, print, and give 1 where anything is wrong, or what is right cannot be kept."""
    with progress_on(output, silent=arguments.json) as progress:
        verdicts = verify(
            arguments.op,
            arguments.device,
            arguments.engine,
            arguments.dtype,
            quick=arguments.quick,
            progress=progress,
        )
    kept = save(verdicts) if arguments.save else None
    if arguments.json:
        output.json(verdicts.to_dict() | ({"kernels": kept.to_dict()} if kept else {}))
    else:
        show(verdicts, output, folded=arguments.op is None and not arguments.all)
        if kept:
            _show_kept(kept, output)
    return 0 if verdicts and not (kept and kept.problem) else 1


def show(verdicts: Verdicts, output: Output, *, folded: bool = False) -> None:
    """Print the matrix, what is wrong, why something is unsupported, and the result.

    Where it is `folded`, ops that are nowhere wrong and have the same marks share a line.
    """
    for of, title in _TITLES.items():
        cells = [cell for cell in verdicts if cell.of == of]
        if any(cell.state != "unsupported" for cell in cells) or (cells and of == "value"):
            _show_matrix(title, cells, output, folded=folded)
    if verdicts.wrong:
        output.say(output.paint("Wrong", "bad"))
        output.say(*(f"  {cell}" for cell in verdicts.wrong), "")
    _show_reasons("Unsupported", verdicts.of("unsupported"), output)
    partly = [cell for cell in verdicts.of("right") if cell.reason]
    _show_reasons("Right, but not every case is supported", partly, output)
    counts = verdicts.counts()
    words = ", ".join(f"{count} {state}" for state, count in counts.items())
    output.say(f"{words}, in {verdicts.seconds:.1f} s.")


def _show_matrix(title: str, cells: Sequence[Cell], output: Output, *, folded: bool) -> None:
    states = {
        (cell.op, cell.device, cell.engine, cell.dtype): _MARKS[cell.state][0] for cell in cells
    }
    ops = _lines_of(cells, folded=folded)
    columns = []
    for device, engine in dict.fromkeys((cell.device, cell.engine) for cell in cells):
        dtypes = [
            each for each in _SHORT if any(key[1:] == (device, engine, each) for key in states)
        ]
        marks = (
            (states.get((op, device, engine, each), "") for each in dtypes) for op in ops.values()
        )
        heads = f"{engine} on {device}", _in_columns(_SHORT[each] for each in dtypes)
        columns.append([*heads, *map(_in_columns, marks)])
    names = [title, "", *ops]
    for fitting in _that_fit(names, columns, output.width):
        first, *rows = zip(names, *fitting, strict=True)
        head, types, *lines = table(first, rows)
        output.say(output.paint(head, "strong"), output.paint(types, "dim"))
        output.say(*(_painted(line, output) for line in lines), "")


def _lines_of(cells: Sequence[Cell], *, folded: bool) -> dict[str, str]:
    """What stands at the start of each line, with the op whose marks follow."""
    marks: dict[str, list[tuple[str, ...]]] = {}
    for cell in cells:
        marks.setdefault(cell.op, []).append((cell.device, cell.engine, cell.dtype, cell.state))
    if not folded:
        return {op: op for op in marks}
    wrong = {cell.op for cell in cells if cell.state == "wrong"}
    alike: dict[object, list[str]] = {}
    for op, its in marks.items():
        alike.setdefault(op if op in wrong else tuple(sorted(its)), []).append(op)
    # The first op by name and how many more there are: no two lines have the same name.
    return {
        first if not others else f"{first} and {len(others)} more": first
        for first, *others in alike.values()
    }


def _that_fit(
    names: Sequence[str], columns: Sequence[list[str]], width: int | None
) -> Iterator[list[list[str]]]:
    """The columns in as many tables as it takes for each to fit the terminal."""
    row: list[list[str]] = []
    for column in columns:
        widths = [max(map(len, each)) + 2 for each in (names, *row, column)]
        if row and width is not None and sum(widths) - 2 > width:
            yield row
            row = []
        row.append(column)
    yield row


def _in_columns(words: Iterable[str]) -> str:
    return "".join(word.ljust(5) for word in words).rstrip()


def _painted(line: str, output: Output) -> str:
    for mark, style in _MARKS.values():
        line = line.replace(mark, output.paint(mark, style))
    return line


def _show_reasons(title: str, cells: Sequence[Cell], output: Output) -> None:
    """One line for each reason of each engine, with what it is about."""
    about: dict[tuple[str, str, Of, str], list[Cell]] = {}
    for cell in cells:
        about.setdefault((cell.engine, cell.device, cell.of, cell.reason or ""), []).append(cell)
    if not about:
        return
    output.say(output.paint(title, "strong"))
    for (engine, device, of, reason), same in about.items():
        ops = dict.fromkeys(cell.op for cell in same)
        dtypes = ", ".join(dict.fromkeys(cell.dtype for cell in same))
        named = ", ".join(ops) if len(ops) <= _NAMED else f"{len(ops)} ops"
        output.say(f"  {engine} on {device}, {IN_WORDS[of]}{named} in {dtypes}: {reason}")
    output.say("")


def _show_kept(kept: Kept, output: Output) -> None:
    for title, entries in (("Used from now on", kept.trusted), ("Not used", kept.refused)):
        for kernel, dtype, device in entries:
            output.say(f"{title}: our {kernel} in {dtype} on {device}")
    if kept.problem:
        output.say(output.paint(kept.problem, "bad"))
    elif not kept.trusted and not kept.refused:
        output.say("There are no kernels of our own for these devices: nothing was to be saved.")
