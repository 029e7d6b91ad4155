"""What a stream can show; on a narrow one lines are broken between words, and no word is."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
from collections.abc import Iterator
from tempfile import TemporaryDirectory

import pytest

from anydevice._bench import measure
from anydevice.cli import printing
from anydevice.cli.main import main
from anydevice.cli.printing import Output, fitted, output_on
from tests.cli.pseudo_terminal import TerminalStream

COMMANDS = (
    "devices",
    "backends",
    "config",
    "config --why",
    "doctor cpu --engine numpy",
    "bench --quick --engine numpy --op reshape,exp --limit 0.001",
    "verify --quick --engine numpy --op softmax,add",
    "prefer cpu",
    "",
    "--help",
    "bench --help",
    "chat --help",
    "chat nobody/nothing --prompt x",
    "devices --nonsense",
    "verify --op nonsense",
)
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


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
    output = Output(stream, colour=True, width=12)
    output.say(f"{output.paint('one', 'bad')} {output.paint('two three', 'good')}")
    assert stream.getvalue() == "\x1b[31mone\x1b[0m \x1b[32mtwo\n  three\x1b[0m\n"


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


@pytest.fixture
def short_paths(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A path is one word, and that of a test's folder is wider than a narrow terminal."""
    tiny = measure.WorkloadSizes((2**16,), 2**16, (16,))
    monkeypatch.setattr(measure, "SIZES", dict.fromkeys(measure.SIZES, tiny))
    monkeypatch.setenv("ANYDEVICE_HOME", "home")
    monkeypatch.setenv("HF_HUB_CACHE", "hub")
    with TemporaryDirectory() as folder:
        monkeypatch.chdir(folder)
        yield
        monkeypatch.undo()


def shown(words: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of a command on a terminal, as they stay there."""
    terminal = TerminalStream()
    with monkeypatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        patch.setattr(sys, "stdout", terminal)
        patch.setattr(sys, "stderr", terminal)
        main(words.split())
    lines = _CONTROL.sub("", terminal.getvalue()).split("\n")
    return [line.rpartition("\r")[2] for line in lines]


UNITS = {"s", "ms", "µs", "ns", "min", "B", "KiB", "MiB", "GiB", "TiB"}
UNITS |= {f"{prefix}{unit}/s" for prefix in ("", "k", "M", "G", "T") for unit in ("B", "FLOP")}


def words_of(lines: list[str]) -> set[str]:
    """Without what differs from run to run: times, sizes and counts, and their units."""
    words = " ".join(lines).split()
    said = {word for word in words if not re.search(r"[\d…━╸█░%]", word)}
    return {word for word in said if word.strip("(),;:.") not in UNITS}


@pytest.mark.usefixtures("short_paths")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command or "summary")
def test_no_word_is_broken_at_60_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow = shown(command, 200, monkeypatch), shown(command, 60, monkeypatch)
    assert [line for line in narrow if len(line) > 60] == []
    new = words_of(narrow) - words_of(wide)
    assert {word for word in new for whole in words_of(wide) if word in whole} == set()
    assert len(words_of(narrow)) > 2


@pytest.mark.usefixtures("short_paths")
@pytest.mark.parametrize("command", ["devices", "config --why", "backends", ""])
def test_it_prints_at_40_columns_and_fewer(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (40, 20, 3):
        assert words_of(shown(command, columns, monkeypatch)), columns


@pytest.mark.parametrize(
    ("line", "width", "lines"),
    [
        ("one two", None, ["one two"]),
        ("one two", 7, ["one two"]),
        ("one two", 6, ["one", "  two"]),
        ("  label   one two three", 20, ["  label   one two", "          three"]),
        ("a very long label   one two", 20, ["a very long label", "  one two"]),
        ("  label   a-long-word", 12, ["  label", " a-long-word"]),
        ("incomprehensibilities", 5, ["incomprehensibilities"]),
        ("", 5, [""]),
    ],
)
def test_where_a_line_is_broken(line: str, width: int | None, lines: list[str]) -> None:
    assert fitted(line, width) == lines
