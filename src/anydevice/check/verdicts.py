"""Results of verifying ops: one cell for each op, dtype, device and engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from anydevice.core.record import Record
from anydevice.engines.trust import Entry
from anydevice.errors import ConfigurationError, VerificationError
from anydevice.ops.trusted_kernels import change_trusted

State = Literal["right", "wrong", "unsupported"]
Of = Literal["value", "gradient", "kernel"]
"""Results, gradients, or both where a kernel of our own computes them."""

IN_WORDS: dict[Of, str] = {
    "value": "",
    "gradient": "gradient of ",
    "kernel": "our kernel for ",
}
"""What stands before the name of an op in a sentence."""


class Cell(Record):
    """One op in one dtype, on one device, through one engine; true if it was right.

    `of` says what was compared, in how many `cases`. Where it is wrong, `case` names the worst
    one, `reason` says what happened and `largest_error` how far off it was, if numbers were
    compared. Where it is unsupported, `reason` says why; a right cell has a reason if some of its
    cases are not supported.
    """

    op: str
    of: Of
    dtype: str
    device: str
    engine: str
    state: State
    cases: int = 0
    case: str | None = None
    reason: str | None = None
    largest_error: float | None = None

    def __bool__(self) -> bool:
        return self.state == "right"

    def __str__(self) -> str:
        where = f"{IN_WORDS[self.of]}{self.op} in {self.dtype} on {self.device} with {self.engine}"
        case = f", {self.case}" if self.case else ""
        return f"{where}{case}: {self.reason or self.state}"


class Verdicts(Record):
    """All cells of one run, in the order of the table of cases; true where none is wrong.

    >>> cell = Cell("add", "value", "float32", "cpu", "numpy", "right", 3)
    >>> bool(Verdicts((cell,))), Verdicts((cell,)).counts()
    (True, {'right': 1, 'wrong': 0, 'unsupported': 0})
    """

    cells: tuple[Cell, ...]
    seconds: float = 0.0
    quick: bool = False

    def __iter__(self) -> Iterator[Cell]:
        return iter(self.cells)

    def __len__(self) -> int:
        return len(self.cells)

    def __bool__(self) -> bool:
        return not self.wrong

    @property
    def wrong(self) -> tuple[Cell, ...]:
        return self.of("wrong")

    def of(self, state: State) -> tuple[Cell, ...]:
        """The cells in one state."""
        return tuple(cell for cell in self.cells if cell.state == state)

    def counts(self) -> dict[str, int]:
        """How many cells are in each state."""
        states: tuple[State, ...] = ("right", "wrong", "unsupported")
        return {state: len(self.of(state)) for state in states}

    def insist(self) -> None:
        """Raise `VerificationError` with every wrong cell, if there is one."""
        if self.wrong:
            worst = self.wrong[0]
            raise VerificationError(
                "\n".join(map(str, self.wrong)),
                where=worst.op,
                largest_error=worst.largest_error,
            )

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, ready for JSON."""
        return {
            "right": not self.wrong,
            "quick": self.quick,
            "seconds": self.seconds,
            "counts": self.counts(),
            "cells": [cell.to_dict() for cell in self.cells],
        }


class Kept(Record):
    """The kernels of our own that are trusted now, and those that were found wrong.

    `problem` says why they could not be kept for later processes; `None` if all is well.
    """

    trusted: tuple[Entry, ...]
    refused: tuple[Entry, ...]
    problem: str | None = None


def save(verdicts: Verdicts) -> Kept:
    """Trust the kernels that were right everywhere, now and in later processes; forget the wrong.

    Raises `ConfigurationError` for the verdicts of a quick run, which are too little to go by.
    """
    if verdicts.quick:
        raise ConfigurationError("a quick run is too little to trust kernels by; run all", "quick")
    judged = [cell for cell in verdicts if cell.of == "kernel" and cell.state != "unsupported"]
    refused = {_entry(cell) for cell in judged if not cell}
    right = {_entry(cell) for cell in judged} - refused
    problem = change_trusted(right, refused)
    return Kept(tuple(sorted(right)), tuple(sorted(refused)), problem)


def refuse_wrong(verdicts: Verdicts) -> tuple[Entry, ...]:
    """Trust no kernel that was found wrong, now and in later processes; which those are."""
    refused = {_entry(cell) for cell in verdicts.wrong if cell.of == "kernel"}
    if refused:
        change_trusted(set(), refused)
    return tuple(sorted(refused))


def _entry(cell: Cell) -> Entry:
    return cell.op, cell.dtype, cell.device
