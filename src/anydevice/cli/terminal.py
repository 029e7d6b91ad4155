"""The terminal of a live view: its whole screen, single keys, and signals.

It sends plain control sequences that every terminal of the last decades knows, so it works over
ssh, and only lines that have changed.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, Literal, Self

from anydevice.cli.printing import Output

try:
    import termios
    import tty
except ImportError:  # Windows
    termios = tty = None  # type: ignore[assignment]

_WHOLE_SCREEN, _FORMER_SCREEN = "\x1b[?1049h", "\x1b[?1049l"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_CLEAR, _REST_OF_LINE = "\x1b[2J", "\x1b[K"

_LEAVING = ("SIGINT", "SIGTERM", "SIGHUP")
_REDRAWING = ("SIGWINCH", "SIGCONT")
_SUSPENDING = ("SIGTSTP",)
_QUITTING_KEYS = b"qQ\x03\x04"

Event = Literal["time", "quit", "redraw", "suspend"]


def shows_live_views(output: Output) -> bool:
    """Whether the output is a terminal whose screen can be drawn on."""
    able = os.environ.get("TERM", "") not in ("", "dumb")
    return output.width is not None and termios is not None and able


class TerminalEvents:
    """A block that waits for keys and signals, and turns them into events.

    In it, Ctrl-C, a request to end and a closed terminal are events, not errors. A signal that
    this process ignores, as under `nohup` and a script's `&`, stays ignored, and one that has a
    handler outside of Python keeps it.
    """

    def __init__(self, keys: int | None = None, *, screen: bool = False) -> None:
        self._keys = keys
        self._names = _LEAVING + (_REDRAWING + _SUSPENDING if screen else ())
        self._before: dict[int, Any] = {}
        self._happened: list[Event] = []
        self._wake_end: int | None = None
        self._wake_start: int | None = None

    def __enter__(self) -> Self:
        if os.name == "posix":  # elsewhere pipes cannot be waited for
            self._wake_end, self._wake_start = os.pipe()
            os.set_blocking(self._wake_end, False)
            os.set_blocking(self._wake_start, False)
        if threading.current_thread() is threading.main_thread():
            for name in self._names:
                number = getattr(signal, name, None)
                if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for end in (self._wake_end, self._wake_start):
            if end is not None:
                os.close(end)

    def wait_until(self, moment: float) -> Event:
        """The next event, or "time" at that moment of the monotonic clock.

        Keys and signals are handled even where the moment is past, so that a view that is slow to
        draw can be left.
        """
        while True:
            left = moment - time.monotonic()
            self._wait(max(0.0, left))
            if self._happened:
                event = "quit" if "quit" in self._happened else self._happened[0]
                self._happened.remove(event)
                return event
            if left <= 0:
                return "time"

    def _wait(self, seconds: float) -> None:
        waited_for = [end for end in (self._wake_end, self._keys) if end is not None]
        if not waited_for:
            time.sleep(min(seconds, 0.1))
            return
        ready, _, _ = select.select(waited_for, [], [], seconds)
        if self._wake_end is not None and self._wake_end in ready:
            os.read(self._wake_end, 1024)
        if self._keys is not None and self._keys in ready:
            try:
                typed = os.read(self._keys, 1024)
            except OSError:  # the terminal is closed
                typed = b""
            if not typed or any(key in _QUITTING_KEYS for key in typed):
                self._happened.append("quit")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name in _LEAVING:
            self._happened.append("quit")
        else:
            self._happened.append("redraw" if name in _REDRAWING else "suspend")
        if self._wake_start is not None:
            try:
                os.write(self._wake_start, b"!")
            except BlockingIOError:  # it is full, so the other end wakes up already
                pass


class Screen:
    """A block that has the terminal's whole screen, and restores it afterwards."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._descriptor = output.stream.fileno()
        self._shown: list[str] = []
        self._settings: list[Any] | None = None
        self.keys = _terminal_of_keys()
        """Where single keys are read from; `None` where they cannot be."""

    def __enter__(self) -> Self:
        self._output.stream.flush()
        if self.keys is not None:
            self._settings = termios.tcgetattr(self.keys)
            tty.setcbreak(self.keys, termios.TCSANOW)
        self._write(_WHOLE_SCREEN + _HIDE_CURSOR + _CLEAR)
        self.forget()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._write(_SHOW_CURSOR + _FORMER_SCREEN)
            if self.keys is not None and self._settings is not None:
                termios.tcsetattr(self.keys, termios.TCSANOW, self._settings)
        except (OSError, termios.error):  # the terminal is closed: there is nothing to restore
            pass

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows now; 80 and 24 where the terminal does not know."""
        columns, rows = os.get_terminal_size(self._descriptor)
        return columns or 80, rows or 24

    def draw(self, lines: list[str]) -> None:
        """Show these lines, each at most as wide as the screen; raises `OSError` if it is gone."""
        changes = [
            f"\x1b[{row};1H{line}{_REST_OF_LINE}"
            for row, line in enumerate(lines, 1)
            if row > len(self._shown) or self._shown[row - 1] != line
        ]
        if len(lines) < len(self._shown):
            changes.append(f"\x1b[{len(lines) + 1};1H\x1b[J")
        if changes:
            self._write("".join(self._output.showable(change) for change in changes))
        self._shown = lines

    def forget(self) -> None:
        """Draw everything again the next time."""
        self._shown = []

    def suspend(self) -> None:
        """Restore the terminal, stop the process, and take the screen again when continued."""
        self.__exit__()
        os.kill(os.getpid(), signal.SIGSTOP)
        self.__enter__()

    def _write(self, text: str) -> None:
        # Not through the stream: what a closed terminal did not take would stay in it.
        left = text.encode(self._output.stream.encoding or "utf-8", "replace")
        while left:
            left = left[os.write(self._descriptor, left) :]


def _terminal_of_keys() -> int | None:
    try:
        return sys.stdin.fileno() if sys.stdin.isatty() else None
    except (AttributeError, OSError, ValueError):  # there is none, or it is closed
        return None
