"""What a stream can show, and what the user's environment asks for."""

from __future__ import annotations

import io
import os
import pty

import pytest

from anydevice.cli import printing
from anydevice.cli.printing import Output, output_on
from tests.cli.pseudo_terminal import TerminalStream


@pytest.mark.parametrize(
    ("terminal", "environment", "system", "colour"),
    [
        (True, {"TERM": "xterm"}, "linux", True),
        (False, {"TERM": "xterm"}, "linux", False),
        (True, {"TERM": "dumb"}, "linux", False),
        (True, {"NO_COLOR": "1"}, "linux", False),
        (True, {"NO_COLOR": ""}, "linux", True),
        (False, {"FORCE_COLOR": "1"}, "linux", True),
        (False, {"FORCE_COLOR": "1", "TERM": "dumb"}, "linux", True),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, "linux", False),
        (True, {}, "win32", False),
        (True, {"WT_SESSION": "x"}, "win32", True),
    ],
)
def test_colour(
    terminal: bool,
    environment: dict[str, str],
    system: str,
    colour: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(printing.sys, "platform", system)
    stream = TerminalStream() if terminal else io.StringIO()
    assert output_on(stream, environment).colour is colour


def test_a_closed_stream_is_no_terminal() -> None:
    stream = io.StringIO()
    stream.close()
    assert output_on(stream, {}) == Output(stream, colour=False, width=None)


def test_the_width_is_that_of_the_terminal() -> None:
    primary, secondary = pty.openpty()
    try:
        import fcntl
        import struct
        import termios

        fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 97, 0, 0))
        with os.fdopen(secondary, "w", closefd=False) as stream:
            assert output_on(stream, {}).width == 97
            assert output_on(stream, {"COLUMNS": "50"}).width == 50
            assert output_on(stream, {"COLUMNS": "wide"}).width == 97
    finally:
        os.close(primary)
        os.close(secondary)
    assert output_on(TerminalStream(), {}).width == 80, "a terminal without a size"
    assert output_on(io.StringIO(), {"COLUMNS": "50"}).width is None, "piped: nothing is broken"


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("utf-8", "✓ · – ✗ … Ⅶ"),
        ("ascii", "+ - - x ... ?"),
        ("cp1252", "+ - - x ... ?"),  # it has some of them; a mixture would look like a mistake
    ],
)
def test_marks_are_written_as_the_stream_can(encoding: str, shown: str) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    Output(stream).say("✓ · – ✗ … Ⅶ")
    stream.flush()
    assert raw.getvalue().decode(encoding) == f"{shown}\n"


def test_a_stream_with_an_unknown_encoding_gets_ascii() -> None:
    class Odd(io.StringIO):
        encoding = "no-such-encoding"  # type: ignore[assignment]

    stream = Odd()
    Output(stream).say("✓ usable")
    assert stream.getvalue() == "+ usable\n"


def test_painting() -> None:
    stream = io.StringIO()
    assert Output(stream, colour=True).paint("here", "good") == "\x1b[32mhere\x1b[0m"
    assert Output(stream, colour=True).paint("", "good") == ""
    assert Output(stream).paint("here", "good") == "here"


def test_json_is_ascii_and_an_empty_say_is_an_empty_line() -> None:
    stream = io.StringIO()
    Output(stream).json({"mark": "✓"})
    Output(stream).say()
    assert stream.getvalue() == '{\n  "mark": "\\u2713"\n}\n\n'


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("back\rover \x9b1A", "back\\rover \\x9b1A"),
        ("turned \u202e text", "turned \\u202e text"),
        ("👩\u200d🚀 and نمی\u200cدانم", "👩\u200d🚀 and نمی\u200cدانم"),
    ],
)
def test_what_a_model_writes_gives_a_terminal_no_commands(written: str, shown: str) -> None:
    terminal, file = io.StringIO(), io.StringIO()
    Output(terminal, colour=True, width=60).write(written)
    Output(file).write(written)
    assert terminal.getvalue() == shown
    assert file.getvalue() == written


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", b"na?ve"), ("latin-1", b"na\xefve")])
def test_what_a_stream_cannot_encode_is_replaced(encoding: str, shown: bytes) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    Output(stream).write("na\xefve")
    assert raw.getvalue() == shown
