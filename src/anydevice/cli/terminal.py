"""The terminal of a live view: its whole screen, single keys, and signals."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Literal, Self

from anydevice._core.signals import handling
from anydevice.cli.printing import Output

try:
    import termios
    import tty
except ImportError:  # Windows
    termios = tty = None  # type: ignore[assignment]

_WHOLE_SCREEN, _FORMER_SCREEN = "\x1b[?1049h", "\x1b[?1049l"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_CLEAR, _REST_OF_LINE = "\x1b[2J", "\x1b[K"

Event = Literal["time", "quit", "redraw", "suspend"]

_SIGNALS: dict[str, Event] = dict.fromkeys(("SIGINT", "SIGTERM", "SIGHUP"), "quit")
_SCREEN_SIGNALS: dict[str, Event] = {
    **_SIGNALS,
    **dict.fromkeys(("SIGWINCH", "SIGCONT"), "redraw"),
    "SIGTSTP": "suspend",
}
_QUITTING_KEYS = b"qQ\x03\x04"


def shows_live_views(output: Output) -> bool:
    """Whether the output is a terminal whose screen can be drawn on."""
    able = os.environ.get("TERM", "") not in ("", "dumb")
    return output.width is not None and termios is not None and able


class TerminalEvents:
    """A block in which keys, Ctrl-C and signals are events; ignored signals stay ignored."""

    def __init__(self, keys: int | None = None, *, screen: bool = False) -> None:
        self._keys = keys
        self._signals = _SCREEN_SIGNALS if screen else _SIGNALS
        self._block = ExitStack()
        self._happened: list[Event] = []

    def __enter__(self) -> Self:
        self._woken, self._waking = socket.socketpair()
        self._woken.setblocking(False)
        self._waking.setblocking(False)
        handlers = {name: partial(self._handle, event) for name, event in self._signals.items()}
        if self._block.enter_context(handling(handlers)):
            end = self._waking.fileno()
            before = signal.set_wakeup_fd(end, warn_on_full_buffer=False)
            self._block.callback(signal.set_wakeup_fd, before)
        return self

    def __exit__(self, *_: object) -> None:
        self._block.close()
        self._woken.close()
        self._waking.close()

    def wait_until(self, moment: float) -> Event:
        """Return the next event, or "time" at that moment of the monotonic clock."""
        ends: list[Any] = [self._woken] if self._keys is None else [self._woken, self._keys]
        while True:
            left = max(0.0, moment - time.monotonic())
            ready, _, _ = select.select(ends, [], [], left)
            if self._woken in ready:
                self._woken.recv(1024)
            if self._keys is not None and self._keys in ready:
                typed = b""
                with suppress(OSError):  # the terminal is closed
                    typed = os.read(self._keys, 1024)
                if not typed or any(key in _QUITTING_KEYS for key in typed):
                    return "quit"
            if self._happened:
                event = "quit" if "quit" in self._happened else self._happened[0]
                self._happened.remove(event)
                return event
            if not left:
                return "time"

    def _handle(self, event: Event, *_: object) -> None:
        self._happened.append(event)


class Screen:
    """A block that has the terminal's whole screen, and restores it afterwards."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._descriptor = output.stream.fileno()
        self._shown: list[str] = []
        self._settings: list[Any] | None = None
        self.keys: int | None = None
        """The descriptor that keys are read from; `None` if there is none."""
        with suppress(AttributeError, OSError, ValueError):  # no standard input, or a closed one
            self.keys = sys.stdin.fileno() if sys.stdin.isatty() else None

    def __enter__(self) -> Self:
        self._output.stream.flush()
        if self.keys is not None:
            self._settings = termios.tcgetattr(self.keys)
            tty.setcbreak(self.keys, termios.TCSANOW)
        self._write(_WHOLE_SCREEN + _HIDE_CURSOR + _CLEAR)
        self.forget()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError, termios.error):  # a closed terminal has nothing to restore
            self._write(_SHOW_CURSOR + _FORMER_SCREEN)
            if self.keys is not None and self._settings is not None:
                termios.tcsetattr(self.keys, termios.TCSANOW, self._settings)

    @property
    def size(self) -> tuple[int, int]:
        """The current columns and rows; 80 and 24 if unknown."""
        columns, rows = os.get_terminal_size(self._descriptor)
        return columns or 80, rows or 24

    def draw(self, lines: list[str]) -> None:
        """Show these lines, each at most as wide as the screen; raises `OSError` if it is gone."""
        changes = [
            f"\x1b[{row};1H{self._output.showable(line)}{_REST_OF_LINE}"
            for row, line in enumerate(lines, 1)
            if row > len(self._shown) or self._shown[row - 1] != line
        ]
        if len(lines) < len(self._shown):
            changes.append(f"\x1b[{len(lines) + 1};1H\x1b[J")
        if changes:
            self._write("".join(changes))
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
