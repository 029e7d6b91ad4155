"""`anydevice watch` on a real terminal: it draws, follows its size, and gives it back as it was."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

PATIENCE = 60.0

# In the child and not by `preexec_fn`, which forks this process with all of its threads.
TAKE_THE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal:
    """A pseudo-terminal with the live view on it, as the user's session leader would have it."""

    def __init__(self, *words: str, columns: int = 80, rows: int = 24, **changes: str) -> None:
        self.primary, self.secondary = pty.openpty()
        self.resize(columns, rows)
        self.settings = termios.tcgetattr(self.secondary)
        self.shown = ""
        environment = {**os.environ, "PYTHONUTF8": "1", "TERM": "xterm", **changes}
        view = ("-m", "anydevice", "watch", "--device", "cpu")
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_THE_TERMINAL, *view, *words],
            stdin=self.secondary,
            stdout=self.secondary,
            stderr=self.secondary,
            env=environment,
            start_new_session=True,
        )

    def resize(self, columns: int, rows: int) -> None:
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self.primary, termios.TIOCSWINSZ, size)

    def until(self, pattern: str) -> str:
        """What is shown up to the pattern; the rest is kept for the next question."""
        deadline = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, self.shown, re.DOTALL)):
            ready, _, _ = select.select([self.primary], [], [], 0.1)
            if ready:
                self.shown += os.read(self.primary, 65536).decode("utf-8", "replace")
            assert time.monotonic() < deadline, f"{pattern!r} is not in {self.shown!r}"
        before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return before

    def type(self, keys: bytes) -> None:
        os.write(self.primary, keys)

    def ended(self) -> int:
        """Its exit code, after it has given the screen back."""
        self.until(re.escape("\x1b[?25h\x1b[?1049l"))
        code = self.process.wait(PATIENCE)
        assert termios.tcgetattr(self.secondary) == self.settings
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for descriptor in (self.primary, self.secondary):
            try:
                os.close(descriptor)
            except OSError:  # the test has closed it
                pass


@pytest.fixture
def opened() -> Iterator[Callable[..., Terminal]]:
    terminals: list[Terminal] = []

    def open_one(*words: str, **changes: Any) -> Terminal:
        terminals.append(Terminal(*words, **changes))
        return terminals[-1]

    yield open_one
    for each in terminals:
        each.close()


@pytest.mark.parametrize("leave", ["q", "\x03", "SIGTERM"])
def test_it_draws_and_gives_the_terminal_back(opened: Callable[..., Terminal], leave: str) -> None:
    screen = opened("--interval", "0.1")
    begun = screen.until("GiB")
    assert begun.startswith("\x1b[?1049h\x1b[?25l\x1b[2J")
    assert "anydevice watch" in begun
    assert "every 0.1 s  q quits" in begun
    local = 3
    now = termios.tcgetattr(screen.secondary)[local]
    assert not now & (termios.ECHO | termios.ICANON)
    screen.type(b"xyz ")  # other keys do nothing
    screen.until(r"\x1b\[1;1H")  # the time is shown anew
    if leave.startswith("SIG"):
        screen.process.send_signal(getattr(signal, leave))
    else:
        screen.type(leave.encode())
    assert screen.ended() == 0


def test_it_follows_the_size_of_the_window(opened: Callable[..., Terminal]) -> None:
    screen = opened("--interval", "1000", columns=80)
    screen.until(r"\x1b\[1;1H")
    screen.resize(40, 10)
    screen.until(r"\x1b\[1;1H")  # the first line once more: all of it is drawn anew
    narrow = screen.until(r"\x1b\[10;1H")
    texts = re.sub(r"\x1b\[(\d*m|K)", "", narrow).split("\x1b[")
    assert len(texts) > 8
    assert all(len(text.partition("H")[2]) <= 40 for text in texts[1:])
    assert "\x1b[11;1H" not in screen.shown
    screen.type(b"q")
    assert screen.ended() == 0


def test_it_can_be_suspended(opened: Callable[..., Terminal]) -> None:
    screen = opened("--interval", "0.1")
    screen.until("GiB")
    screen.process.send_signal(signal.SIGTSTP)
    screen.until(re.escape("\x1b[?25h\x1b[?1049l"))
    _, status = os.waitpid(screen.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert termios.tcgetattr(screen.secondary) == screen.settings
    screen.process.send_signal(signal.SIGCONT)
    screen.until(re.escape("\x1b[?1049h\x1b[?25l\x1b[2J") + ".*GiB")
    screen.type(b"q")
    assert screen.ended() == 0


def test_a_closed_terminal_ends_it(opened: Callable[..., Terminal]) -> None:
    screen = opened("--interval", "0.1")
    screen.until("GiB")
    os.close(screen.secondary)
    os.close(screen.primary)
    assert screen.process.wait(PATIENCE) == 0


def test_without_unicode_and_colours(opened: Callable[..., Terminal]) -> None:
    screen = opened("--interval", "0.1", PYTHONUTF8="0", PYTHONIOENCODING="ascii", NO_COLOR="1")
    begun = screen.until("GiB")
    assert "#" in begun or "...." in begun
    assert not re.search(r"\x1b\[\d+m", begun)
    screen.type(b"q")
    assert screen.ended() == 0


def test_a_dumb_terminal_gets_lines(opened: Callable[..., Terminal]) -> None:
    screen = opened("--interval", "0.1", TERM="dumb")
    begun = screen.until("GiB")
    assert "\x1b" not in begun
    screen.process.send_signal(signal.SIGTERM)
    assert screen.process.wait(PATIENCE) == 0
