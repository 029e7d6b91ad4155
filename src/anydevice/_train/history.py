"""The epochs of a training: as a bar or lines while they run, then as a table and a plot."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import ceil
from threading import Timer
from typing import Any, Self

from anydevice._core import hooks
from anydevice._core.files import check_folder, expanded, write_whole
from anydevice._core.progress import ProgressBar, columns_of, in_notebook
from anydevice._core.record import Record, as_dict
from anydevice._core.text import clock, say
from anydevice.errors import ConfigurationError


class Epoch(Record):
    """One epoch: its mean losses, the rate of its last step, the steps up to its end, its time.

    The rate is NaN if an optimizer of another library does not report it. `left_out` counts the
    steps skipped because a loss scaled for float16 overflowed: a few at the start are usual.
    `metrics` are the metrics of the validation, by name. `peak` is the most bytes in use on the
    device, on a CPU by the whole process; `None` if unknown.
    """

    epoch: int
    loss: float
    validation: float | None
    rate: float
    steps: int
    seconds: float
    left_out: int = 0
    metrics: Mapping[str, float] | None = None
    peak: int | None = None

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

    def __new__(cls, epochs: Iterable[Epoch] = ()) -> Self:
        return super().__new__(cls, epochs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Pickled by 0.2, where a history was no tuple; it would be empty without a word.
        raise ConfigurationError("a History of anydevice 0.2 cannot be unpickled", source="pickle")

    def __repr__(self) -> str:
        return f"History({list(self)!r})"

    def __str__(self) -> str:
        return hooks.render(self, "text")

    def _repr_html_(self) -> str:
        return hooks.render(self, "html")

    @property
    def losses(self) -> list[float]:
        """The mean loss of each epoch."""
        return [epoch.loss for epoch in self]

    @property
    def validations(self) -> list[float]:
        """The validation loss after each epoch, if there was one."""
        return [epoch.validation for epoch in self if epoch.validation is not None]

    @property
    def metrics(self) -> dict[str, list[float]]:
        """Each metric of the validation by name: a number per epoch with a validation."""
        series: dict[str, list[float]] = {}
        for epoch in self:
            for name, number in (epoch.metrics or {}).items():
                series.setdefault(name, []).append(number)
        return series

    def to_list(self) -> list[dict[str, Any]]:
        """Return the epochs as plain data, ready for JSON."""
        return [as_dict(epoch) for epoch in self]

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


_NARROW = 100
"""Terminal width below which the bar is shortened, to leave room for the text."""

_SLOW = 4.0
"""Seconds of compiling after which a line is printed if there is no bar."""

_MOST_LINES = 100
"""Maximum number of epoch lines without a bar; of more epochs, evenly spaced ones are printed."""

_STEPS_BEFORE_FORECAST = 5
"""Batches before the time left is estimated."""


class TrainingProgress:
    """A bar on the error stream while the block runs, on a terminal or in a notebook."""

    def __init__(
        self, epochs: int, length: int | None, done: int, wanted: bool | None = None
    ) -> None:
        self._epochs, self._length, self._done = epochs, length, done
        self._first_tell: tuple[float, int, int] | None = None
        self._doing, self._ending = "starting", ""
        terminal = sys.stderr is not None and sys.stderr.isatty()
        self._notebook = wanted is not False and in_notebook()
        self._shown = not self._notebook and (terminal if wanted is None else wanted)
        barred = terminal or self._notebook
        self._prints = not barred and wanted is None and sys.stderr is not None
        self._slow: Timer | None = None
        self._columns = columns_of(sys.stderr) if self._shown else _NARROW
        self._width = 24 if self._columns >= _NARROW else 10
        stream = sys.stderr if self._shown else None
        self._bar = ProgressBar(stream, colour=terminal, width=self._width, notebook=self._notebook)

    def __enter__(self) -> Self:
        self._show(self._done, [])
        return self

    def __exit__(self, *error: object) -> None:
        self.compiled()
        self._bar.__exit__(*error)

    def learned(self, length: int) -> None:
        """Set the number of batches in an epoch."""
        self._length = length

    def compiles(self, epoch: int, engine: str) -> None:
        """Show that an engine compiles the step that begins, or print a line if it is slow."""
        self._doing = "compiling"
        self._show(self._done, [(f"epoch {epoch}/{self._epochs}", 0)])
        if self._prints and self._slow is None:
            text = f"{engine} is compiling the training step, which may take a minute; "
            self._slow = Timer(_SLOW, say, [f"{text}optimize='none' starts at once"])
            self._slow.daemon = True
            self._slow.start()

    def compiled(self) -> None:
        """Note that the compiled step has ended."""
        if self._slow is not None:
            self._slow.cancel()

    def ended(self, epoch: Epoch) -> None:
        """Note the end of an epoch; without a bar, print a line."""
        last = epoch.epoch == self._epochs
        if self._prints and (last or epoch.epoch % ceil(self._epochs / _MOST_LINES) == 0):
            say(_line(epoch, self._epochs))

    def ends(self, text: str) -> None:
        """Show when the training will end, without Python's streams: signal handlers call this."""
        self._ending = text
        if self._shown:
            self._show(self._done, [])
        elif sys.stderr is not None:
            with suppress(OSError, ValueError):
                os.write(sys.stderr.fileno(), f"{text}\n".encode())

    def tell(
        self, epoch: int, position: int, loss: float | None, rate: float, examples: int
    ) -> None:
        """Show the batch of the epoch and the examples; time left counts from the first call."""
        self._doing = ""
        done = (epoch - 1) * self._length + position if self._length else epoch - 1
        now = time.monotonic()
        self._first_tell = self._first_tell or (now, examples, done)
        began, examples_before, steps_before = self._first_tell
        seconds = now - began
        parts = [(f"epoch {epoch}/{self._epochs}", 0)]
        if not math.isnan(rate):  # an optimizer of another library may not report it
            parts.append((f"rate {rate:.3g}", 4))
        if loss is not None:
            parts.insert(1, (f"loss {loss:.4g}", 1))
        if seconds > 0 and examples > examples_before:
            parts.append((f"{(examples - examples_before) / seconds:,.0f} examples/s", 3))
        if self._length and done - steps_before >= _STEPS_BEFORE_FORECAST:
            left = (self._total() - done) * seconds / (done - steps_before)
            parts.append((f"{clock(left)} left", 2))
        self._show(done, parts)

    def _total(self) -> int:
        return self._epochs * (self._length or 1)

    def _show(self, done: int, parts: list[tuple[str, int]]) -> None:
        """Show the bar with as many words as fit; each has a rank, and low ranks come first."""
        total = self._total()
        self._done = min(done, total)
        if self._ending:
            parts = [(self._ending, 0)]
        elif self._doing:
            parts = [*parts, (self._doing, 1)]
        taken = self._width + 2 * len(str(total)) + 1 + len("0:00:00") + 3
        self._bar.tell(self._done, total, fitted(parts, self._columns - taken))


def _line(epoch: Epoch, epochs: int) -> str:
    """Return the numbers of an epoch in a line.

    >>> from anydevice._train.history import Epoch
    >>> _line(Epoch(3, 0.21437, 0.25, 1e-3, 300, 4.21), 10)
    'epoch 3/10  loss 0.2144  validation 0.25  rate 0.001  4.2 s'
    """
    numbers = {"loss": epoch.loss, "validation": epoch.validation, **(epoch.metrics or {})}
    parts = [f"{name} {value:.4g}" for name, value in numbers.items() if value is not None]
    if not math.isnan(epoch.rate):
        parts.append(f"rate {epoch.rate:.3g}")
    return "  ".join([f"epoch {epoch.epoch}/{epochs}", *parts, f"{epoch.seconds:.1f} s"])


def fitted(parts: list[tuple[str, int]], room: int) -> str:
    """Return the words in order, dropping the highest ranks until the rest fits."""
    rest = list(parts)
    while sum(len(text) + 2 for text, _ in rest) - 2 > room and len(rest) > 1:
        rest.remove(max(rest, key=lambda word: word[1]))
    return "  ".join(text for text, _ in rest)
