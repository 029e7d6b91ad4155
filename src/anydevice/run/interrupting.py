"""Ctrl-C that ends a loop at a good place instead of anywhere."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupts:
    """While the block runs, the first Ctrl-C only asks to stop; the second one interrupts.

    `asked` is true from the first one on, which calls `acknowledge` at once, wherever the program
    is: it may not wait, nor write to a stream of Python's. Only in the main thread, and only where
    nobody else has a handler of his own.
    """

    def __init__(self) -> None:
        self.asked = False
        self.acknowledge: Callable[[], None] | None = None
        self._before: Any = None

    def __enter__(self) -> Self:
        here = threading.current_thread() is threading.main_thread()
        if here and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if self.acknowledge is not None:
            self.acknowledge()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
