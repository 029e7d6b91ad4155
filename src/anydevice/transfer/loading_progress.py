"""How far a long load has come: a bar on a terminal, nothing when piped."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from anydevice.core.progress import ProgressBar

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
        terminal = sys.stderr is not None and sys.stderr.isatty()
        self._bar = ProgressBar(sys.stderr, in_bytes=True) if terminal else None
        if wanted is False:
            self._bar = None
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
            self._bar.__exit__(kind, error, trace)

    def advance(self, size: int) -> None:
        """So many more bytes are there."""
        self._done += size
        if self._bar is not None and time.monotonic() >= self._from:
            self._bar.tell(self._done, self._total, "loading weights")
