"""How far a long load has come: a bar on a terminal, nothing when piped."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LARGE = 100_000_000
SLOW = 1.0


class LoadingProgress:
    """A bar on the error stream for `total` bytes, while the block runs.

    It appears where that stream is a terminal, at once for more than 100 MB and else after one
    second, and is gone at the end. `wanted` is true for a bar from the start, false for none.
    """

    def __init__(self, total: int, wanted: bool | None = None) -> None:
        self._total = total
        self._done = 0
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        terminal = sys.stderr is not None and sys.stderr.isatty()
        self._possible = terminal and wanted is not False
        at_once = wanted is True or total > LARGE
        self._from = time.monotonic() + (0.0 if at_once else SLOW)

    def __enter__(self) -> Self:
        self.advance(0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, size: int) -> None:
        """So many more bytes are there."""
        self._done += size
        if self._bar is None and self._possible and time.monotonic() >= self._from:
            self._start()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done)

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            transient=True,
        )
        self._task = self._bar.add_task("loading weights", total=self._total)
        self._bar.start()
