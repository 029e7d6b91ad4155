"""The history of a training: its epochs as values, as a table, and as a plot."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from anydevice._core import hooks
from anydevice._core.files import check_folder, expanded, write_whole
from anydevice._core.record import Record, as_dict
from anydevice.errors import ConfigurationError


class Epoch(Record):
    """One epoch: its mean losses, the rate of its last step, the steps up to its end, its time.

    The rate is NaN if an optimizer of another library does not report it. `left_out` counts the
    steps skipped because a loss scaled for float16 overflowed: a few at the start are usual.
    `metrics` are the metrics of the validation, by name.
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


class History(tuple[Epoch, ...]):
    """The epochs of a training, in order.

    >>> history = History([Epoch(1, 0.9, None, 0.1, 10, 1.5), Epoch(2, 0.5, None, 0.1, 20, 1.4)])
    >>> history.losses, history[-1].steps
    ([0.9, 0.5], 20)
    >>> print(history)
    epoch  loss  rate  steps  seconds
        1   0.9   0.1     10      1.5
        2   0.5   0.1     20      1.4
    """

    def __repr__(self) -> str:
        return f"History({list(self)!r})"

    def __str__(self) -> str:
        return hooks.render(self, "text")

    def _repr_html_(self) -> str:
        return hooks.render(self, "html")

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
        """Each metric of the validation, by name: one number per epoch that has it."""
        series: dict[str, list[float]] = {}
        for epoch in self:
            for name, number in (epoch.metrics or {}).items():
                series.setdefault(name, []).append(number)
        return series

    def to_list(self) -> list[dict[str, Any]]:
        """Return the epochs as plain data, ready for JSON."""
        return [as_dict(each) for each in self]

    @classmethod
    def from_list(cls, rows: Iterable[dict[str, Any]]) -> History:
        """Return the history from a result of `to_list`."""
        return cls(Epoch(**row) for row in rows)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the losses over the epochs into an `.svg` picture.

        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     History([Epoch(1, 0.9, 1.0, 0.1, 10, 1.5)]).plot(f"{folder}/losses.svg")
        ...     Path(f"{folder}/losses.svg").read_text()[:4]
        '<svg'

        Raises `ConfigurationError` for another kind of file or an empty history, and
        `TransferError` if the file cannot be written.
        """
        target = expanded(path)
        if target.suffix.lower() != ".svg":
            raise ConfigurationError(
                f"{path}: write it to a name ending in .svg; a notebook shows the rest",
                source="path",
            )
        check_folder(target)
        if not self:
            raise ConfigurationError("there is nothing to draw: no epoch has ended", source="path")
        write_whole(target, [hooks.render(self, "svg").encode()])
