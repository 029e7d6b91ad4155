"""`anydevice watch` on a real terminal: it draws, follows its size, and gives it back as it was."""

from __future__ import annotations

import os
import re
import signal
import termios
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cli.pseudo_terminal import PATIENCE, Terminal


class LiveView(Terminal):
    """The live view of the CPU."""

    def __init__(self, *words: str, **changes: Any) -> None:
        super().__init__("watch", "--device", "cpu", *words, **changes)

    def ended(self) -> int:
        """Its exit code, after it has given the screen back."""
        self.until(re.escape("\x1b[?25h\x1b[?1049l"))
        code = self.process.wait(PATIENCE)
        assert termios.tcgetattr(self.secondary) == self.settings
        return code


@pytest.fixture
def opened() -> Iterator[Callable[..., LiveView]]:
    terminals: list[LiveView] = []

    def open_one(*words: str, **changes: Any) -> Terminal:
        terminals.append(LiveView(*words, **changes))
        return terminals[-1]

    yield open_one
    for each in terminals:
        each.close()


@pytest.mark.parametrize("leave", ["q", "\x03", "SIGTERM"])
def test_it_draws_and_gives_the_terminal_back(opened: Callable[..., LiveView], leave: str) -> None:
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


def test_it_follows_the_size_of_the_window(opened: Callable[..., LiveView]) -> None:
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


def test_it_can_be_suspended(opened: Callable[..., LiveView]) -> None:
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


def test_a_closed_terminal_ends_it(opened: Callable[..., LiveView]) -> None:
    screen = opened("--interval", "0.1")
    screen.until("GiB")
    os.close(screen.secondary)
    os.close(screen.primary)
    assert screen.process.wait(PATIENCE) == 0


def test_without_unicode_and_colours(opened: Callable[..., LiveView]) -> None:
    screen = opened("--interval", "0.1", PYTHONUTF8="0", PYTHONIOENCODING="ascii", NO_COLOR="1")
    begun = screen.until("GiB")
    assert "#" in begun or "...." in begun
    assert not re.search(r"\x1b\[\d+m", begun)
    screen.type(b"q")
    assert screen.ended() == 0


def test_a_dumb_terminal_gets_lines(opened: Callable[..., LiveView]) -> None:
    screen = opened("--interval", "0.1", TERM="dumb")
    begun = screen.until("GiB")
    assert "\x1b" not in begun
    screen.process.send_signal(signal.SIGTERM)
    assert screen.process.wait(PATIENCE) == 0
