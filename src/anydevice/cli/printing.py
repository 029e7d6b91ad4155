"""The output of commands: JSON, colours, and marks that the stream can show."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from anydevice._core.files import check_folder, check_writable, expanded, write_whole
from anydevice._core.progress import columns_of
from anydevice._core.record import Record
from anydevice._core.text import printable
from anydevice.errors import AnyDeviceError, TransferError

_COLOURS = {"good": "32", "bad": "31", "dim": "2", "strong": "1", "fix": "36"}

_IN_ASCII = str.maketrans(
    {"✓": "+", "✗": "x", "–": "-", "·": "-", "…": "...", "→": "->", "─": "-", "×": "x", "µ": "u"}
    | {"█": "#", "░": ".", "°": ""}
)
"""Our own marks in ASCII, for a stream that has no Unicode."""

_COLOURFUL_WINDOWS = ("WT_SESSION", "TERM", "ANSICON", "ConEmuANSI")
"""Variables of Windows terminals that show colours; the old console prints the codes instead."""


_TURNING = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Characters that change the direction of the text behind them."""

_WORD = re.compile(r" *[^ ]+")
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_STYLES = re.compile(rf"({_STYLE.pattern})")
_COLUMN = re.compile(r"(?<=\S) {2,}(?=\S)")


class Output(Record):
    """A stream with what it can show. `width` is the terminal's, `None` if there is none."""

    stream: TextIO
    colour: bool = False
    width: int | None = None

    def say(self, *lines: str, whole: bool = False) -> None:
        """Print lines, broken between words to fit the terminal unless they are to stay `whole`."""
        for line in "\n".join(lines).split("\n"):
            for part in fitted(line, None if whole else self.width):
                self.stream.write(self.showable(part) + "\n")

    def showable(self, line: str) -> str:
        """Return the line as the stream can show it, without control characters but our styles."""
        line = "".join(
            part if self.colour and _STYLE.fullmatch(part) else printable(part)
            for part in _STYLES.split(line)
        )
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        try:
            line.encode(encoding)
        except UnicodeEncodeError:
            return line.translate(_IN_ASCII).encode(encoding, "replace").decode(encoding)
        except LookupError:  # an encoding that Python does not know
            return line.translate(_IN_ASCII).encode("ascii", "replace").decode("ascii")
        return line

    def write(self, text: str) -> None:
        """Print text as it comes and show it at once; a terminal gets only harmless characters."""
        shown = text if self.width is None else _harmless(text)
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        try:
            shown = shown.encode(encoding, "replace").decode(encoding)
        except LookupError:  # an encoding that Python does not know
            shown = shown.encode("ascii", "replace").decode("ascii")
        self.stream.write(shown)
        self.stream.flush()

    def json(self, value: object) -> None:
        """Print a value as JSON, in ASCII alone, so that it is valid on every stream."""
        import json  # text output does not need it

        self.stream.write(json.dumps(value, indent=2) + "\n")

    def complain(self, problem: Exception | None) -> None:
        """Print an error, if there is one, below what was printed before."""
        if problem is not None:
            self.stream.flush()  # so that it comes after the output if both go to one place
            complain(problem)

    def paint(self, words: str, style: str) -> str:
        """Return the words in a style ("good bad dim strong fix") if this stream has colours."""
        if not self.colour or not words:
            return words
        return f"\x1b[{_COLOURS[style]}m{words}\x1b[0m"


def _harmless(text: str) -> str:
    """Return text for a terminal: joiners of scripts stay, control characters are escaped."""
    from unicodedata import category  # other commands do not need it

    return "".join(
        char
        if char.isprintable() or char in "\n\t" or (category(char) == "Cf" and char not in _TURNING)
        else printable(char)
        for char in text
    )


def fitted(line: str, width: int | None) -> list[str]:
    """Break a line into lines of at most `width` columns, never within a word.

    Further lines start at the last column of the first one that leaves them half of the width.

    >>> fitted("name   one two three", 15)
    ['name   one two', '       three']
    """
    plain = _STYLE.sub("", line)
    if width is None or len(plain) <= width:
        return [line]
    columns = [gap.end() for gap in _COLUMN.finditer(plain) if gap.end() <= width // 2]
    indent = columns[-1] if columns else len(plain) - len(plain.lstrip(" ")) + 2
    lines, used = [""], 0
    for word in _WORD.findall(line):
        size = len(_STYLE.sub("", word))
        if used and used + size > width:
            word = word.replace(" ", "")
            size = len(_STYLE.sub("", word))
            start = max(0, min(indent, width - size))
            lines.append(" " * start)
            used = start
        lines[-1] += word
        used += size
    return lines


def output_on(stream: TextIO, environment: Mapping[str, str] = os.environ) -> Output:
    """Return the output on a stream, with colours as the environment wants them."""
    try:
        terminal = stream.isatty()
    except ValueError:  # it is closed
        terminal = False
    columns = environment.get("COLUMNS", "")
    colour = _wants_colour(terminal, environment, sys.platform)
    if not terminal:
        return Output(stream, colour)
    return Output(stream, colour, (columns.isdigit() and int(columns)) or columns_of(stream))


def error_in_json(problem: Exception | None) -> dict[str, object]:
    """Return the entries that an error adds to JSON: its message and its code."""
    if problem is None:
        return {}
    return {"error": str(problem), "code": getattr(problem, "code", "bad_usage")}


def problem_of(call: Callable[[], object]) -> AnyDeviceError | None:
    """Return the error of a call, or `None`."""
    try:
        call()
    except AnyDeviceError as error:
        return error
    return None


def complain(problem: Exception | str) -> None:
    """Print what went wrong on standard error, where that can be written."""
    errors = output_on(sys.stderr)
    try:
        errors.say(f"{errors.paint('anydevice:', 'bad')} {problem}")
        errors.stream.flush()
    except OSError:
        drop(errors.stream)


def drop(stream: TextIO) -> None:
    """Discard pending output, so that the interpreter exits without an error."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except (OSError, ValueError):  # the stream has no descriptor: nothing is held back
        pass


def check_file(path: str | None, *inputs: str | Path | None) -> None:
    """Raise `TransferError` before the work if its result could not be written to the file."""
    if path is None:
        return
    target = expanded(path)
    check_folder(target)
    check_writable(target)
    read = [expanded(path) for path in inputs if path is not None]
    there = [path for path in read if os.path.exists(path)]  # which never raises
    places = (target, *target.absolute().parents)
    if target.exists() and any(os.path.samefile(path, at) for path in there for at in places):
        raise TransferError(f"{path} cannot be written: it is what this command reads")


def write_file(path: str, text: str) -> None:
    """Write the result of a command as a whole file; raises `TransferError` where it cannot."""
    write_whole(expanded(path), [text.encode()])


def _wants_colour(terminal: bool, environment: Mapping[str, str], system: str) -> bool:
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR"):
        return True
    if not terminal or environment.get("TERM") == "dumb":
        return False
    return system != "win32" or any(name in environment for name in _COLOURFUL_WINDOWS)
