"""Text for people: sizes, times, rates, percent, bars, lines, and warnings."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress

from anydevice.errors import ConfigurationError

USABLE, UNUSABLE, ABSENT = "✓", "✗", "–"
"""The marks before a device or backend: usable; here but not usable; not in this machine."""

PUBLISHED = False
"""Whether anydevice is on the package index; install commands depend on it."""

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", 1)},
    **{prefix: 1024**power for power, prefix in enumerate("kmgtp", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", 1)},
}
_BINARY = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_COUNT = re.compile(r"\s*(\d[\d_]{0,15}(?:\.\d{1,9})?)\s*([km]?)\s*", re.IGNORECASE)
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))
_THOUSANDS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def install_command(extra: str) -> str:
    """Return the command that installs anydevice with one of its extras.

    >>> install_command("llm")
    'pip install ".[llm]" in a clone of anydevice'
    """
    if PUBLISHED:
        return f'pip install "anydevice[{extra}]"'
    return f'pip install ".[{extra}]" in a clone of anydevice'


def update_command() -> str:
    """Return the command that installs the newest anydevice."""
    if PUBLISHED:
        return "pip install --upgrade anydevice"
    return "git pull && pip install . in a clone of anydevice"


def parse_size(size: int | float | str) -> int:
    """Return the bytes of a number of bytes or a text such as `"20GiB"`, `"500 MB"` or `"8G"`.

    >>> parse_size("1.5GiB"), parse_size("2 GB"), parse_size(4096)
    (1610612736, 2000000000, 4096)
    """
    if isinstance(size, int | float) and not isinstance(size, bool):
        if 0 <= size < float("inf"):
            return int(size)
        raise ConfigurationError(
            f"{size!r} is not a size: it must be zero or more, and finite", repr(size)
        )
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigurationError(
            f"{size!r} is not a size; write bytes as a number, or a text such as '20GiB' "
            "with one of the units B, KB, MB, GB, TB, PB, KiB, MiB, GiB, TiB and PiB",
            repr(size),
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])


def type_text(value: object) -> str:
    """Return the type of a value with its article, for a message.

    >>> type_text(3), type_text("model.pt"), type_text(type_text)
    ('an int', 'a str', 'a function')
    """
    kind = type(value)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def joined(parts: Iterable[str]) -> str:
    """Join parts into one text, the last with "and".

    >>> joined(["a", "b", "c"]), joined(["a"]), joined([])
    ('a, b and c', 'a', '')
    """
    *first, last = list(parts) or [""]
    return f"{', '.join(first)} and {last}" if first else last


def format_size(size: int | None) -> str:
    """Return a size in binary units.

    >>> format_size(12 * 2**30), format_size(1536), format_size(None)
    ('12.0 GiB', '1.5 KiB', 'unknown')
    """
    return "unknown" if size is None else " ".join(_in_unit_of(size, size))


def format_part(part: int, whole: int) -> str:
    """Return a part of a size and the whole, in the unit of the whole.

    >>> format_part(3 * 2**29, 8 * 2**30)
    '1.5/8.0 GiB'
    """
    return f"{_in_unit_of(whole, part)[0]}/{format_size(whole)}"


def format_time(seconds: float) -> str:
    """Return a time with three digits.

    >>> format_time(0.00123), format_time(2.5), format_time(4.2e-6)
    ('1.23 ms', '2.50 s', '4.20 µs')
    """
    return _with_unit(seconds, _TIMES)


def clock(seconds: float) -> str:
    """Return a time in minutes and seconds.

    >>> clock(75), clock(3 * 3600 + 62)
    ('1:15', '3:01:02')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def format_rate(rate: float, unit: str) -> str:
    """Return a rate with three digits; `unit` is "B/s" or "FLOP/s".

    >>> format_rate(4.27e12, "B/s"), format_rate(31.0, "FLOP/s")
    ('4.27 TB/s', '31.0 FLOP/s')
    """
    return f"{_with_unit(rate, _THOUSANDS)}{unit}"


def format_count(count: int) -> str:
    """Return a count, with three digits and a unit from a million on.

    >>> format_count(8_030_261_248), format_count(999_885_952), format_count(12_345)
    ('8.03 B', '1.00 B', '12,345')
    """
    return _with_unit(count, _COUNTS) if count >= 0.9995 * _COUNTS[-1][0] else f"{count:,}"


def parse_count(text: str) -> int:
    """Return a count above 0 from a text such as `"8192"`, `"8k"` or `"1.5M"`; a k is 1024.

    >>> parse_count("32k"), parse_count("1m"), parse_count("4_096")
    (32768, 1048576, 4096)
    """
    match = _COUNT.fullmatch(text)
    count: float = float(match[1]) * 1024 ** " km".index(match[2].lower() or " ") if match else 0.0
    if count < 1 or not count.is_integer():
        raise ConfigurationError(
            f"{shortened(text)!r} is not an integer above 0, such as 8192 or 8k", text
        )
    return int(count)


def percent(part: float) -> str:
    """Return a part of a whole.

    >>> percent(0.934), percent(0.0042), percent(0.0)
    ('93 %', '0.4 %', '0 %')
    """
    return f"{100 * part:.1f} %" if 0 < part < 0.095 else f"{100 * part:.0f} %"


def times(factor: float) -> str:
    """Return a factor.

    >>> times(12.34), times(0.5), times(265.0), times(0.00002)
    ('12.3 ×', '0.50 ×', '265 ×', '2e-05 ×')
    """
    return f"{_three_digits(factor)} ×" if factor >= 0.005 else f"{factor:.1g} ×"


def bar(share: float, width: int) -> tuple[str, str]:
    """Return the full and the empty part of a bar of `width` columns.

    Only a share of 0 has an empty bar, and only a share of 1 a full one.

    >>> bar(0.5, 8), bar(0.001, 4), bar(0.999, 4)
    (('████', '░░░░'), ('█', '░░░'), ('███', '░'))
    >>> bar(3.0, 4), bar(0.0, 4), bar(-1.0, 4)
    (('████', ''), ('', '░░░░'), ('', '░░░░'))
    """
    full = width if share >= 1 else min(width - 1, round(share * width))
    full = max(1 if share > 0 else 0, full)
    return "█" * full, "░" * (width - full)


def shortened(text: str, limit: int = 80) -> str:
    """Return a text of at most `limit` characters; a longer one loses its middle.

    >>> shortened("a/very/long/path", 9)
    'a/ve…path'
    """
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}…{text[len(text) - (limit - 1) // 2 :]}"


def printable(value: object, *, lines: bool = False) -> str:
    r"""Escape an untrusted path or text (from a driver, a file or the environment) for a terminal.

    Control characters, which could clear the screen or disguise a name, are shown as escapes, and
    so are line ends unless `lines`.

    >>> printable("train\x1b[2J.py")
    'train\\x1b[2J.py'
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or (lines and character == "\n")
        else " "
        if character in "\u00a0\u202f\u3000"  # spaces in texts of other languages
        else character.encode("unicode_escape").decode()
        for character in text
    )


def no_pages(method: str) -> ConfigurationError:
    """Return the error for a method that wrote HTML pages before version 0.3."""
    return ConfigurationError(f"{method} was removed in 0.3: a notebook shows the same", method)


def wrapped(text: str, columns: int, indent: str = "", hanging: str = "") -> list[str]:
    """Wrap a text into indented lines; all but the first are also indented by `hanging`.

    No word is broken.

    >>> wrapped("one line and another", 12, "  ", "  ")
    ['  one line', '    and', '    another']
    """
    from textwrap import wrap

    return wrap(
        text,
        columns,
        initial_indent=indent,
        subsequent_indent=indent + hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _in_unit_of(whole: int, size: int) -> tuple[str, str]:
    unit, factor = next(
        ((unit, size_of_unit) for unit, size_of_unit in _BINARY.items() if whole >= size_of_unit),
        ("B", 1),
    )
    return f"{size / factor:.{0 if factor == 1 else 1}f}", unit


def _with_unit(number: float, units: Sequence[tuple[float, str]]) -> str:
    """Return a number with three digits in the largest unit that fits, else in the last one."""
    size, unit = next((pair for pair in units if number >= 0.9995 * pair[0]), units[-1])
    return f"{_three_digits(number / size)} {unit}"


def _three_digits(number: float) -> str:
    if number >= 99.95:
        return f"{number:.0f}"
    return f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"


_PASSED_OVER = re.compile(rf"({__name__.partition('.')[0]}|contextlib|functools)(\.|$)")
"""Our own modules, and those of the standard library that lie between them."""


def warn(message: str | Warning) -> None:
    """Warn at the nearest caller outside of anydevice."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _PASSED_OVER.match(str(frame.f_globals.get("__name__"))):
        frame, level = frame.f_back, level + 1
    shown = printable(message, lines=True) if isinstance(message, str) else message
    warnings.warn(shown, stacklevel=level)


def say(line: str) -> None:
    """Print a line on the error stream."""
    with suppress(OSError, ValueError):  # the stream may be closed by now
        print(line, file=sys.stderr, flush=True)
