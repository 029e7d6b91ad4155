"""The screen, keys and signals of a live view, on a pseudo-terminal in this process."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from anydevice._machine.hardware.readers import DeviceProcess, Readings
from anydevice.cli import terminal, watch
from anydevice.cli.printing import Output
from anydevice.cli.terminal import TerminalEvents
from anydevice.cli.watch import DeviceUsage, line
from tests.cli.conftest import Anydevice

GIB = 2**30
PATIENCE = 300.0
OnScreen = tuple[Output, int, int]
GIVEN_BACK = "\x1b[?25h\x1b[?1049l"

CARD = DeviceUsage(
    "cuda:0",
    "NVIDIA H200",
    total=141 * GIB,
    usable=140 * GIB,
    readings=Readings(load=0.78, free_memory=70 * GIB),
    processes=(DeviceProcess(48211, "python train.py", 63 * GIB, 0.77),),
)


class Looks:
    """Stands for the machine: counts the looks, and does something at one of them."""

    def __init__(self, **at: Callable[[], None]) -> None:
        self.count, self.at = 0, at

    def __call__(self, cards: object) -> list[DeviceUsage]:
        self.count += 1
        self.at.get(f"look{self.count}", lambda: None)()
        return [CARD]


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_lines_in_this_process(anydevice: Anydevice, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(look3=interrupt)
    monkeypatch.setattr(watch, "_usages", looks)
    before = signal.getsignal(signal.SIGINT)
    code, out, err = anydevice("watch", "--interval", "0.05", "--device", "cpu")
    assert (code, err, looks.count) == (0, "", 3)
    assert [text[21:] for text in out.splitlines()] == [line(CARD)] * 3
    assert signal.getsignal(signal.SIGINT) is before
    looks = Looks(look2=interrupt)
    monkeypatch.setattr(watch, "_usages", looks)
    out = anydevice.text("watch", "--json", "--interval", "0.05", "--device", "cpu")
    assert [json.loads(text)["devices"][0] for text in out.splitlines()] == [CARD.to_dict()] * 2


@pytest.fixture
def on_screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[OnScreen]:
    """An output on a pseudo-terminal, whose keys are the program's; and both of its ends."""
    primary, secondary = pty.openpty()
    stream = open(os.dup(secondary), "w", encoding="utf-8")  # noqa: SIM115
    keys = open(os.dup(secondary), encoding="utf-8")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdin", keys)
    yield Output(stream, colour=True, width=80), primary, secondary
    for file in (stream, keys):
        file.close()
    for descriptor in (primary, secondary):
        os.close(descriptor)


def shown_until(primary: int, ending: str) -> str:
    """What the terminal was sent, to that ending; the system passes it on when it likes."""
    shown = b""
    while not shown.endswith(ending.encode()):
        assert select.select([primary], [], [], PATIENCE)[0], shown
        shown += os.read(primary, 65536)
    return shown.decode()


def test_the_live_view(on_screen: OnScreen, monkeypatch: pytest.MonkeyPatch) -> None:
    output, primary, secondary = on_screen
    before = termios.tcgetattr(secondary)
    looks = Looks(
        look2=lambda: signal.raise_signal(signal.SIGWINCH),
        look3=lambda: os.write(primary, b"x") and None,
        look4=lambda: os.write(primary, b"q") and None,
    )
    monkeypatch.setattr(watch, "_usages", looks)
    watch._show((), output, 0.05)
    assert looks.count >= 4
    shown = shown_until(primary, GIVEN_BACK)
    assert shown.count("cuda:0") == 2  # drawn anew after the change of size, and not otherwise
    assert termios.tcgetattr(secondary) == before


def test_suspending(on_screen: OnScreen, monkeypatch: pytest.MonkeyPatch) -> None:
    output, primary, _ = on_screen
    stopped: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *what: stopped.append(what))
    looks = Looks(look2=lambda: signal.raise_signal(signal.SIGTSTP), look3=interrupt)
    monkeypatch.setattr(watch, "_usages", looks)
    watch._show((), output, 0.05)
    assert stopped == [(os.getpid(), signal.SIGSTOP)]
    shown = shown_until(primary, GIVEN_BACK)
    if shown.count("\x1b[?1049h") == 1:  # only what came before it was stopped
        shown += shown_until(primary, GIVEN_BACK)
    assert shown.count("\x1b[?1049h") == shown.count(GIVEN_BACK) == 2


def test_fewer_lines_leave_nothing_behind(on_screen: OnScreen) -> None:
    output, primary, _ = on_screen
    with terminal.Screen(output) as screen:
        assert screen.size == (80, 24)  # a terminal that does not know its own
        screen.draw(["one", "two", "three"])
        shown_until(primary, "three\x1b[K")
        screen.draw(["one", "TWO"])
        assert shown_until(primary, "\x1b[J") == "\x1b[2;1HTWO\x1b[K\x1b[3;1H\x1b[J"
        screen.draw(["one", "TWO"])
    assert shown_until(primary, GIVEN_BACK) == GIVEN_BACK


def test_a_closed_screen(on_screen: OnScreen, monkeypatch: pytest.MonkeyPatch) -> None:
    output, _, _ = on_screen

    def gone(self: object, text: str) -> None:
        raise OSError(5, "Input/output error")

    looks = Looks(look2=lambda: monkeypatch.setattr(terminal.Screen, "_write", gone))
    monkeypatch.setattr(watch, "_usages", looks)
    watch._show((), output, 0.05)
    assert looks.count >= 2  # the next time that there is anything to draw


def test_without_keys(on_screen: OnScreen, monkeypatch: pytest.MonkeyPatch) -> None:
    output, primary, _ = on_screen
    monkeypatch.setattr(watch, "_usages", Looks(look2=interrupt))
    for none in (None, io.StringIO()):
        monkeypatch.setattr(sys, "stdin", none)
        watch._show((), output, 0.05)
        assert "Ctrl-C quits" in shown_until(primary, GIVEN_BACK)
        monkeypatch.setattr(watch, "_usages", Looks(look1=interrupt))


def test_keys_of_a_terminal_that_is_closed_quit() -> None:
    primary, secondary = pty.openpty()
    os.close(primary)
    try:
        with TerminalEvents(secondary) as events:
            assert events.wait_until(time.monotonic() + PATIENCE) == "quit"
    finally:
        os.close(secondary)


def test_events_outside_the_main_thread_and_many_signals() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def elsewhere() -> None:
        with TerminalEvents(screen=True) as events:
            seen.append(signal.getsignal(signal.SIGTERM))
            seen.append(events.wait_until(0.0))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(PATIENCE)
    assert seen == [before, "time"]
    with TerminalEvents(screen=True) as events:
        with suppress(BlockingIOError):
            while True:
                events._waking.send(b"!" * 65536)
        signal.raise_signal(signal.SIGCONT)  # no more fits that would wake it
        assert events.wait_until(0.0) == "redraw"
        signal.raise_signal(signal.SIGWINCH)
        signal.raise_signal(signal.SIGTERM)
        assert events.wait_until(0.0) == "quit"
        assert events.wait_until(0.0) == "redraw"


def test_whoever_was_woken_by_signals_before_is_so_again() -> None:
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    with TerminalEvents() as events:
        interrupt()
        assert events.wait_until(time.monotonic() + PATIENCE) == "quit"
    assert signal.set_wakeup_fd(before) == before


IGNORING = """
import os, signal, sys, time
from anydevice.cli.terminal import TerminalEvents

ignored = [signal.SIGINT, signal.SIGHUP]
for number in ignored:
    signal.signal(number, signal.SIG_IGN)
with TerminalEvents(screen=True) as events:
    for number in ignored:
        signal.raise_signal(number)
    print(events.wait_until(0.0))
    signal.raise_signal(signal.SIGTERM)
    print(events.wait_until(0.0))
print([signal.getsignal(number) == signal.SIG_IGN for number in ignored])
"""


def test_what_is_ignored_stays_ignored() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", IGNORING], capture_output=True, text=True, timeout=400
    )
    assert ended.stdout.split("\n")[:3] == ["time", "quit", "[True, True]"], ended.stderr


def test_what_python_does_not_handle_is_left_to_who_does(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with monkeypatch.context() as embedded:  # the program that Python runs in has its own
        embedded.setattr(signal, "getsignal", lambda number: None)
        with TerminalEvents() as events:
            assert events._before == {}
    assert {number: signal.getsignal(number) for number in handlers} == handlers
