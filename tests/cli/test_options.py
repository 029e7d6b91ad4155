"""The one bar of all commands."""

from __future__ import annotations

import io
import threading
import time
from typing import Any

import pytest
from rich.progress import Progress

from anydevice._core.progress import ProgressBar
from anydevice.cli.options import progress_on
from anydevice.cli.printing import Output
from tests.cli.conftest import Anydevice
from tests.cli.pseudo_terminal import TerminalStream


def test_a_terminal_shows_progress_and_a_pipe_does_not() -> None:
    terminal, pipe = TerminalStream(), io.StringIO()
    with progress_on(Output(terminal, width=80)) as bar:
        bar.tell(1, 4, "add on [cpu]")
    assert "1/4" in terminal.getvalue()
    assert "add on [cpu]" in terminal.getvalue()
    for output, silent in ((Output(pipe), False), (Output(pipe, width=80), True)):
        with progress_on(output, silent=silent) as bar:
            bar.tell(1, 4, "add")
    assert pipe.getvalue() == ""


def test_lines_can_be_printed_while_the_bar_is_hidden() -> None:
    terminal = TerminalStream()
    with progress_on(Output(terminal, width=80)) as bar:
        bar.tell(1, 4, "one")
        bar.hide()
        before = len(terminal.getvalue())
        terminal.write("a line\n")
        bar.tell(2, 4, "two")
    assert terminal.getvalue()[:before].endswith("\x1b[1A\x1b[2K\x1b[?25h"), "its line is empty"
    assert "two" in terminal.getvalue()[before:]


def test_threads_that_tell_at_once_share_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = TerminalStream()
    all_at_once = threading.Barrier(8)
    made = Progress.__init__

    def take_long(self: Progress, *columns: Any, **options: Any) -> None:
        time.sleep(0.05)  # as importing rich does, the first time
        made(self, *columns, **options)

    monkeypatch.setattr(Progress, "__init__", take_long)

    def tell(number: int) -> None:
        all_at_once.wait()
        bar.tell(number, 8, "add")

    with progress_on(Output(terminal, width=80)) as bar:
        threads = [threading.Thread(target=tell, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert terminal.getvalue().count("\x1b[?25l") == 1
    after = terminal.getvalue()
    time.sleep(0.3)  # a bar that was left behind is drawn again and again
    assert terminal.getvalue() == after


def test_nothing_is_shown_before_anything_is_told() -> None:
    terminal = TerminalStream()
    with progress_on(Output(terminal, width=80)):
        pass
    assert terminal.getvalue() == ""


def test_the_cursor_comes_back_after_an_interruption() -> None:
    terminal = TerminalStream()

    def interrupted() -> None:
        with progress_on(Output(terminal, width=80)) as bar:
            bar.tell(0, 2, "one")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert terminal.getvalue().rpartition("\x1b[?25l")[2].count("\x1b[?25h") >= 1


def test_bytes_are_shown_as_such() -> None:
    terminal = TerminalStream()
    with ProgressBar(terminal, colour=False, in_bytes=True) as bar:
        bar.tell(1024, 2048, "loading")
        bar.tell(2048, 2048, "loading")
    assert "2.0/2.0 KiB" in terminal.getvalue()
    assert "loading" in terminal.getvalue()


@pytest.mark.parametrize(
    "words", [("bench",), ("plan", "model"), ("prove", "net.onnx", "true.vnnlib")], ids=" ".join
)
def test_pages_are_refused_with_advice(anydevice: Anydevice, words: tuple[str, ...]) -> None:
    err = anydevice.refusal(*words, "--html", "page.html")
    assert "--html: removed in 0.3: use --json, or a notebook for plots" in " ".join(err.split())
