"""The bar of a command: on a terminal, and only there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from anydevice.cli.printing import Output
from anydevice.core.progress import ProgressBar

Tell = Callable[[int, int, str], None]
"""Called with how much is done, how much there is, and what comes now."""


@contextmanager
def shown_on(output: Output, *, silent: bool = False) -> Iterator[Tell | None]:
    """What to tell the progress to; `None` where nobody would see it, or it is not wanted."""
    if output.width is None or silent:
        yield None
        return
    with ProgressBar(output.stream, colour=output.colour) as bar:
        yield bar.tell
