"""The bar of a training: how far it is, its loss, rate and speed, and the time that is left."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from anydevice.core.progress import ProgressBar


class TrainingProgress:
    """A bar on the error stream while the block runs, where that is a terminal.

    `wanted` is true for a bar in any case, false for none.
    """

    def __init__(
        self, epochs: int, length: int | None, done: int, wanted: bool | None = None
    ) -> None:
        self._epochs = epochs
        self._length = length
        self._began = time.monotonic()
        self._done_before = self._done = done
        terminal = sys.stderr is not None and sys.stderr.isatty()
        shown = terminal if wanted is None else wanted
        self._bar = ProgressBar(sys.stderr, colour=terminal) if shown else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.__exit__(kind, error, trace)

    def learned(self, length: int) -> None:
        """An epoch has so many batches."""
        self._length = length

    def tell(
        self, epoch: int, position: int, loss: float | None, rate: float, examples: int
    ) -> None:
        """Training is at this batch of this epoch, and has passed so many examples in all.

        `rate` is that of the last step.
        """
        if self._bar is None:
            return
        seconds = max(time.monotonic() - self._began, 1e-9)
        words = [f"epoch {epoch}/{self._epochs}"]
        if loss is not None:
            words.append(f"loss {loss:.4g}")
        words.append(f"rate {rate:.3g}")
        words.append(f"{examples / seconds:,.0f} examples/s")
        done, total = epoch - 1, self._epochs
        if self._length:
            done = (epoch - 1) * self._length + position
            total = self._epochs * self._length
            taken = done - self._done_before
            if taken > 0:
                words.append(f"{clock((total - done) * seconds / taken)} left")
        self._bar.tell(min(done, total), total, "  ".join(words))


def clock(seconds: float) -> str:
    """A time as people read it.

    >>> clock(75), clock(3 * 3600 + 62)
    ('1:15', '3:01:02')
    """
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours}:{minutes:02}:{whole % 60:02}"
    return f"{minutes}:{whole % 60:02}"
