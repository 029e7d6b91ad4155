"""The progress bar of long operations, on a terminal and in a notebook."""

from __future__ import annotations

import os
import time
from html import escape
from typing import TYPE_CHECKING, Any, Self, TextIO

from anydevice._core.hooks import loaded_library
from anydevice._core.locks import ForkSafeLock
from anydevice._core.text import format_part

if TYPE_CHECKING:
    from rich.progress import Progress

_EVERY = 0.1
"""Seconds between two updates of a bar in a notebook; each is a message to the browser."""


class ProgressBar:
    """A bar on a terminal while the block runs; it is removed at the end.

    It appears with the first `tell`, but not before `delay` seconds have passed. The caller makes
    sure that the stream is a terminal; `None` shows nothing. With `in_bytes`, progress is shown in
    bytes, with rate and remaining time. The bar itself is `width` columns wide. With `notebook`, it
    is a cell output that is updated in place, and stays. Several threads may call `tell`.
    """

    def __init__(
        self,
        stream: TextIO | None,
        *,
        colour: bool = True,
        in_bytes: bool = False,
        width: int = 24,
        delay: float = 0.0,
        notebook: bool = False,
    ) -> None:
        self._stream, self._colour = stream, colour
        self._in_bytes, self._width = in_bytes, width
        self._from = time.monotonic() + delay
        self._bar: Progress | None = None
        self._lock = ForkSafeLock()
        self._output = _CellOutput() if notebook else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.hide()

    def hide(self) -> None:
        """Remove the bar until the next `tell`, so that lines can be printed."""
        with self._lock.native:
            if self._output is not None:
                self._output.finish()
            bar, self._bar = self._bar, None
        if bar is None:
            return
        try:
            bar.stop()
        finally:
            # Interrupted while it starts or stops, the bar would leave the cursor hidden.
            bar.console.show_cursor()

    def tell(self, done: int, total: int, doing: str) -> None:
        """Show that `done` of `total` is done, and the current step."""
        if time.monotonic() < self._from:
            return
        with self._lock.native:
            if self._output is not None:
                counts = format_part(done, total) if self._in_bytes else f"{done:,}/{total:,}"
                self._output.show(done, total, f"{counts}  {doing}")
            if self._stream is None:
                return
            if self._bar is None:
                self._bar = self._make_bar(self._stream)
                self._bar.add_task(doing, completed=done, total=total)
                self._bar.start()
            self._bar.update(self._bar.task_ids[0], completed=done, total=total, description=doing)

    def _make_bar(self, stream: TextIO) -> Progress:
        from rich import progress as rich
        from rich.console import Console

        shown: list[rich.ProgressColumn] = [rich.BarColumn(self._width)]
        if self._in_bytes:
            shown += [rich.DownloadColumn(binary_units=True), rich.TransferSpeedColumn()]
            shown += [rich.TimeRemainingColumn()]
        else:
            shown += [rich.MofNCompleteColumn(), rich.TimeElapsedColumn()]
        shown.append(rich.TextColumn("{task.description}", markup=False))
        console = Console(file=stream, no_color=not self._colour)
        return rich.Progress(*shown, console=console, transient=True)


class _CellOutput:
    """A bar in the output of a notebook's cell, updated in place."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown = 0.0
        self._waiting: dict[str, str] | None = None

    def show(self, done: int, total: int, text: str) -> None:
        """Show the bar and the text: now, or with the next call if the last update is recent."""
        self._waiting = {
            "text/plain": text,
            "text/html": '<div style="font:13px system-ui,sans-serif"><progress style="width:14em;'
            f'vertical-align:middle" value="{done}" max="{total}"></progress> {escape(text)}</div>',
        }
        if time.monotonic() - self._shown >= _EVERY:
            self.finish()

    def finish(self) -> None:
        """Show the last text."""
        content, self._waiting = self._waiting, None
        if content is None:
            return
        self._shown = time.monotonic()
        if self._handle is None:
            from IPython.display import display

            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


def in_notebook() -> bool:
    """Whether this runs in a notebook: an IPython kernel without a terminal.

    >>> in_notebook()
    False
    """
    ipython = loaded_library("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def columns_of(stream: TextIO) -> int:
    """Return the width of a terminal; 80 if it is unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
