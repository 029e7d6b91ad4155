"""Signals that a block handles itself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def handling(handlers: Mapping[str, Callable[[int, Any], None]]) -> Iterator[bool]:
    """Handle signals by name in a block, which receives whether any is handled.

    Ignored signals stay ignored, as under nohup, and only the main thread can handle any.
    """
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for name, handler in handlers.items():
            number = getattr(signal, name, None)  # not every system has all
            if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, handler)
    try:
        yield bool(before)
    finally:
        for number, own in before.items():
            signal.signal(number, own)
