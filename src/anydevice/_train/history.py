"""The history of a training: its epochs as values, as a table, and as a plot."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from anydevice._core.record import Record, as_dict
from anydevice._core.text import table
from anydevice._report.svg import Curve


class Epoch(Record):
    """One epoch: its mean losses, the rate of its last step, the steps up to its end, its time.

    The rate is NaN where an optimizer of another library keeps it to itself. `left_out` counts the
    steps that changed nothing, because a loss scaled for float16 overflowed: a few at the start are
    usual. `metrics` are those of the validation, by name.
    """

    epoch: int
    loss: float
    validation: float | None
    rate: float
    steps: int
    seconds: float
    left_out: int = 0
    metrics: Mapping[str, float] | None = None

    def __hash__(self) -> int:
        return hash((self.epoch, self.loss, self.validation, self.steps))


_COLUMNS: dict[str, Callable[[Epoch], str]] = {
    "epoch": lambda each: str(each.epoch),
    "loss": lambda each: f"{each.loss:.4g}",
    "validation": lambda each: "" if each.validation is None else f"{each.validation:.4g}",
    "rate": lambda each: "" if math.isnan(each.rate) else f"{each.rate:.3g}",
    "steps": lambda each: f"{each.steps:,}",
    "left out": lambda each: f"{each.left_out:,}" if each.left_out else "",
    "seconds": lambda each: f"{each.seconds:.1f}",
}
_OPTIONAL = ("validation", "rate", "left out")
_EMPTY = "no epoch has ended"
_SHOWN = 24
"""Epochs with a row each; of more, the first and the last ones are shown."""


def _numbers(values: Iterable[float | None]) -> list[str]:
    return ["" if value is None else f"{value:.4g}" for value in values]


class History(Sequence[Epoch]):
    """The epochs of a training, in order.

    >>> history = History([Epoch(1, 0.9, None, 0.1, 10, 1.5), Epoch(2, 0.5, None, 0.1, 20, 1.4)])
    >>> history.losses, history[-1].steps
    ([0.9, 0.5], 20)
    >>> print(history)
    epoch  loss  rate  steps  seconds
        1   0.9   0.1     10      1.5
        2   0.5   0.1     20      1.4
    """

    def __init__(self, epochs: Iterable[Epoch] = ()) -> None:
        self._epochs = tuple(epochs)

    @overload
    def __getitem__(self, index: int) -> Epoch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Epoch]: ...
    def __getitem__(self, index: int | slice) -> Epoch | Sequence[Epoch]:
        return self._epochs[index]

    def __len__(self) -> int:
        return len(self._epochs)

    def __iter__(self) -> Iterator[Epoch]:
        return iter(self._epochs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, History) and self._epochs == other._epochs

    def __hash__(self) -> int:
        return hash(self._epochs)

    def __repr__(self) -> str:
        return f"History({list(self._epochs)!r})"

    def __str__(self) -> str:
        if not self:
            return _EMPTY
        lines = table(*self._table())
        if len(self) > _SHOWN:
            half = _SHOWN // 2
            lines[1 + half : -half] = [self._left_out()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from anydevice._report import notebook

        if not self:
            return notebook.block(notebook.line(_EMPTY, "soft"))
        head, rows, right = self._table()
        if len(self) > _SHOWN:
            half = _SHOWN // 2
            rows[half:-half] = [(self._left_out(), *[""] * (len(head) - 1))]
        return notebook.block(
            notebook.plot(*self._curves(), "epoch"), notebook.table(head, rows, right)
        )

    def _table(self) -> tuple[list[str], list[tuple[str, ...]], range]:
        """The head, the rows, and the columns of numbers."""
        cells = {name: [shown(each) for each in self] for name, shown in _COLUMNS.items()}
        cells = {name: cells[name] for name in cells if name not in _OPTIONAL or any(cells[name])}
        measured = {name: _numbers(each) for name, each in self._by_metric().items()}
        before = [name for name in cells if name in ("epoch", "loss", "validation")]
        cells = {**{name: cells[name] for name in before}, **measured, **cells}
        return list(cells), list(zip(*cells.values(), strict=True)), range(len(cells))

    def _left_out(self) -> str:
        return f"… {len(self) - _SHOWN} more …"

    @property
    def losses(self) -> list[float]:
        """The mean loss of each epoch."""
        return [each.loss for each in self]

    @property
    def validations(self) -> list[float]:
        """The validation loss after each epoch, if there was one."""
        return [each.validation for each in self if each.validation is not None]

    @property
    def metrics(self) -> dict[str, list[float]]:
        """Each metric of the validation, by name: a number for each epoch that has it."""
        found = self._by_metric().items()
        return {name: [each for each in numbers if each is not None] for name, numbers in found}

    def _by_metric(self) -> dict[str, list[float | None]]:
        names = dict.fromkeys(name for each in self for name in each.metrics or ())
        return {name: [(each.metrics or {}).get(name) for each in self] for name in names}

    def to_list(self) -> list[dict[str, Any]]:
        """The epochs as plain data, ready for JSON."""
        return [as_dict(each) for each in self]

    @classmethod
    def from_list(cls, rows: Iterable[dict[str, Any]]) -> History:
        """The history that `to_list` gave."""
        return cls(Epoch(**row) for row in rows)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the losses over the epochs into an `.svg` picture, or all of it on an `.html` page.

        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     History([Epoch(1, 0.9, 1.0, 0.1, 10, 1.5)]).plot(f"{folder}/losses.svg")
        ...     Path(f"{folder}/losses.svg").read_text()[:4]
        '<svg'

        Raises `ConfigurationError` for another kind of file, and where there are no epochs;
        `TransferError` where the file cannot be written.
        """
        from anydevice._train.page import draw

        draw(self, path)

    def _curves(self) -> tuple[list[Curve], str]:
        """The losses over the epochs, and what is said above them."""
        curves = [Curve("training", [(each.epoch, each.loss) for each in self])]
        held = [(each.epoch, each.validation) for each in self if each.validation is not None]
        if held:
            curves.append(Curve("validation", held))
        last = self[-1]
        seconds = sum(each.seconds for each in self)
        count = f"{last.epoch} epoch{'s' if last.epoch > 1 else ''}"
        return curves, f"{count}, {last.steps:,} steps, {seconds:.1f} s"
