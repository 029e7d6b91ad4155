"""The progress bar of everything that takes long."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID

_WIDTH = 24


class ProgressBar:
    """A bar on a terminal while the block runs; at its end it is gone.

    It appears with the first `tell`. The caller makes sure that the stream is a terminal. With
    `in_bytes`, progress is shown in bytes, with their rate and the time that is left. The bar
    itself is `width` columns wide.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        colour: bool = True,
        in_bytes: bool = False,
        width: int = _WIDTH,
    ) -> None:
        self._stream = stream
        self._colour = colour
        self._in_bytes = in_bytes
        self._width = width
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is None:
            return
        try:
            self._bar.stop()
        finally:
            # An interruption while the bar starts or stops would leave the cursor hidden.
            self._bar.console.show_cursor()

    def tell(self, done: int, total: int, doing: str) -> None:
        """Show that `done` of `total` is done, and what is being done now."""
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress

            console = Console(file=self._stream, no_color=not self._colour)
            self._bar = Progress(*self._columns(), console=console, transient=True)
            self._task = self._bar.add_task(doing, completed=done, total=total)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=done, total=total, description=doing)

    def _columns(self) -> tuple[ProgressColumn, ...]:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        counted: tuple[ProgressColumn, ...] = (MofNCompleteColumn(), TimeElapsedColumn())
        if self._in_bytes:
            counted = (
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
            )
        return BarColumn(self._width), *counted, TextColumn("{task.description}", markup=False)
