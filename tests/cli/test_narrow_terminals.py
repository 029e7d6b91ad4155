"""On a narrow terminal lines are broken between words, and no word is broken."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from tempfile import TemporaryDirectory

import pytest

from anydevice._bench import ceilings
from anydevice.cli.main import main
from anydevice.cli.printing import Output, fitted
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


@pytest.fixture(autouse=True)
def short_paths(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A path is one word, and that of a test's folder is wider than a narrow terminal."""
    tiny = ceilings.WorkloadSizes((2**16,), 2**16, (16,))
    monkeypatch.setattr(ceilings, "SIZES", dict.fromkeys(ceilings.SIZES, tiny))
    monkeypatch.setenv("ANYDEVICE_HOME", "home")
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


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command or "summary")
def test_no_word_is_broken_at_60_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow = shown(command, 200, monkeypatch), shown(command, 60, monkeypatch)
    assert [line for line in narrow if len(line) > 60] == []
    new = words_of(narrow) - words_of(wide)
    assert {word for word in new for whole in words_of(wide) if word in whole} == set()
    assert len(words_of(narrow)) > 2


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


def test_colours_take_no_room() -> None:
    stream = io.StringIO()
    output = Output(stream, colour=True, width=12)
    output.say(f"{output.paint('one', 'bad')} {output.paint('two three', 'good')}")
    assert stream.getvalue() == "\x1b[31mone\x1b[0m \x1b[32mtwo\n  three\x1b[0m\n"
