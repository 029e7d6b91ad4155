"""Ctrl-C during a training."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self


class Interrupts:
    """While the block runs, the first Ctrl-C only requests a stop; the second one interrupts.

    The first one calls `acknowledge` from the signal handler, so it must neither wait nor write to
    a Python stream. Active only in the main thread, if no other handler is installed.
    """

    def __init__(self) -> None:
        self.requested = False
        self.acknowledge: Callable[[], None] | None = None
        self._before: Any = None
        self._process = os.getpid()

    def __enter__(self) -> Self:
        here = threading.current_thread() is threading.main_thread()
        if here and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a data worker, which ends with the training
            return
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self.acknowledge is not None:
            self.acknowledge()

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
