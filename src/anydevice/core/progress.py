"""The progress bar of long operations."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress


class ProgressBar:
    """A bar on a terminal while the block runs; at its end it is gone.

    It appears with the first `tell`, but not before `delay` seconds have passed. The caller makes
    sure that the stream is a terminal; `None` shows nothing. With `in_bytes`, progress is shown in
    bytes, with their rate and the time that is left. The bar itself is `width` columns wide.
    """

    def __init__(
        self,
        stream: TextIO | None,
        *,
        colour: bool = True,
        in_bytes: bool = False,
        width: int = 24,
        delay: float = 0.0,
    ) -> None:
        self._stream, self._colour = stream, colour
        self._in_bytes, self._width = in_bytes, width
        self._from = time.monotonic() + delay
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.hide()

    def hide(self) -> None:
        """Take the bar away until the next `tell`: now lines can be printed."""
        bar, self._bar = self._bar, None
        if bar is None:
            return
        try:
            bar.stop()
        finally:
            # An interruption while the bar starts or stops would leave the cursor hidden.
            bar.console.show_cursor()

    def tell(self, done: int, total: int, doing: str) -> None:
        """Show that `done` of `total` is done, and what is being done now."""
        if self._stream is None or time.monotonic() < self._from:
            return
        if self._bar is None:
            from rich import progress as rich
            from rich.console import Console

            shown: list[rich.ProgressColumn] = [rich.BarColumn(self._width)]
            if self._in_bytes:
                shown += [rich.DownloadColumn(binary_units=True), rich.TransferSpeedColumn()]
                shown += [rich.TimeRemainingColumn()]
            else:
                shown += [rich.MofNCompleteColumn(), rich.TimeElapsedColumn()]
            shown.append(rich.TextColumn("{task.description}", markup=False))
            console = Console(file=self._stream, no_color=not self._colour)
            self._bar = rich.Progress(*shown, console=console, transient=True)
            self._bar.add_task(doing, completed=done, total=total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done, total=total, description=doing)


def columns_of(stream: TextIO) -> int:
    """The width of a terminal; 80 where it does not know."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
