"""Results of verifying ops: one cell for each op, dtype, device and engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from anydevice._core import hooks
from anydevice._core.record import Record
from anydevice._engines.trust import Entry
from anydevice._ops.trusted_kernels import change_trusted
from anydevice.errors import ConfigurationError, VerificationError

State = Literal["right", "wrong", "unsupported", "crashed", "timed_out", "not_reached"]
"""The state of a cell; `not_reached` is undecided."""

STATES: tuple[State, ...] = ("right", "wrong", "unsupported", "crashed", "timed_out", "not_reached")
FAILED: tuple[State, ...] = ("wrong", "crashed", "timed_out")

Of = Literal["value", "gradient", "kernel"]
"""Results, gradients, or both where a kernel of our own computes them."""

IN_WORDS: dict[Of, str] = {
    "value": "",
    "gradient": "gradient of ",
    "kernel": "our kernel for ",
}
"""The text before the name of an op in a message."""


class Cell(Record):
    """One op in one dtype, on one device, through one engine; true if it was right.

    `of` says what was compared, in how many `cases`. Where it is wrong, `case` names the worst
    one, `reason` says what happened and `largest_error` how far off it was, if numbers were
    compared. Where it crashed or timed out, `case` is the one that did. Where it is unsupported or
    was not reached, `reason` says why; a right cell has a reason if some of its cases are not
    supported. `code` is that of the reason, as in `Reason`, where it has one.
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
    code: str | None = None

    def __bool__(self) -> bool:
        return self.state == "right"

    def __str__(self) -> str:
        where = f"{IN_WORDS[self.of]}{self.op} in {self.dtype} on {self.device} with {self.engine}"
        case = f", {self.case}" if self.case else ""
        return f"{where}{case}: {self.reason or in_words(self.state)}"


def in_words(state: str) -> str:
    """Return a state in words.

    >>> in_words("timed_out")
    'timed out'
    """
    return state.replace("_", " ")


class Verdicts(Record):
    """All cells of one run, device by device in the order of the table of cases.

    True where everything was decided and nothing is wrong, crashed or timed out. `seed` draws the
    same calls again.

    >>> cell = Cell("add", "value", "float32", "cpu", "numpy", "right", 3)
    >>> bool(Verdicts((cell,))), Verdicts((cell,)).counts()["right"]
    (True, 1)
    """

    cells: tuple[Cell, ...]
    seconds: float = 0.0
    quick: bool = False
    seed: int = 0

    def __iter__(self) -> Iterator[Cell]:
        return iter(self.cells)

    def __len__(self) -> int:
        return len(self.cells)

    def __bool__(self) -> bool:
        return not self.of(*FAILED, "not_reached")

    @property
    def wrong(self) -> tuple[Cell, ...]:
        return self.of("wrong")

    @property
    def failed(self) -> tuple[Cell, ...]:
        """The cells that are wrong, crashed or timed out."""
        return self.of(*FAILED)

    @property
    def out_of_time(self) -> bool:
        """Whether the time of a quick run was up before all was decided, and nothing is wrong."""
        undecided = self.of("not_reached")
        late = all(cell.code == "timed_out" for cell in undecided)
        return bool(undecided) and late and not self.failed

    def of(self, *states: State) -> tuple[Cell, ...]:
        """Return the cells in these states."""
        return tuple(cell for cell in self.cells if cell.state in states)

    def counts(self) -> dict[str, int]:
        """Return how many cells are in each state."""
        return {state: len(self.of(state)) for state in STATES}

    def insist(self) -> None:
        """Raise `VerificationError`, which lists them, if any cells failed or were not reached."""
        if not self:
            bad = (*self.failed, *self.of("not_reached"))
            raise VerificationError(
                "\n".join(map(str, bad)), where=bad[0].op, largest_error=bad[0].largest_error
            )

    def _repr_html_(self) -> str:
        return hooks.render(self, "html")

    def to_dict(self) -> dict[str, Any]:
        """Return the verdicts as plain data, ready for JSON."""
        return {
            "right": bool(self),
            "quick": self.quick,
            "out_of_time": self.out_of_time,
            "seed": self.seed,
            "seconds": self.seconds,
            "counts": self.counts(),
            "cells": [cell.to_dict() for cell in self.cells],
        }


class Kept(Record):
    """Our kernels that are trusted now, those that failed, and why they could not be saved."""

    trusted: tuple[Entry, ...]
    refused: tuple[Entry, ...]
    problem: str | None = None


def save(verdicts: Verdicts) -> Kept:
    """Trust the kernels that were right everywhere, now and in later processes; forget the wrong.

    Raises `ConfigurationError` for the verdicts of a quick run, which has too few cases.
    """
    if verdicts.quick:
        raise ConfigurationError(
            "a quick run is not enough to trust kernels; run all cases", "quick"
        )
    refused = _kernels(verdicts.failed)
    right = _kernels(verdicts.of("right")) - refused
    problem = change_trusted(right, refused)
    return Kept(tuple(sorted(right)), tuple(sorted(refused)), problem)


def refuse_wrong(verdicts: Verdicts) -> tuple[Entry, ...]:
    """Trust no kernel that failed, now and in later processes; return those kernels."""
    refused = _kernels(verdicts.failed)
    if refused:
        change_trusted(set(), refused)
    return tuple(sorted(refused))


def _kernels(cells: Iterable[Cell]) -> set[Entry]:
    return {(cell.op, cell.dtype, cell.device) for cell in cells if cell.of == "kernel"}
