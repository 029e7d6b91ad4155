"""Amounts of memory: read from what people write, and written so that people can read them.

A bar that shows a share, as text.

Figures as people read them, and tables of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from anydevice.errors import ConfigurationError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_WRITTEN = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(size: int | float | str) -> int:
    """Bytes from a number of bytes or a text such as `"20GiB"`, `"500 MB"` or `"8G"`.

    >>> parse_size("1.5GiB"), parse_size("2 GB"), parse_size(4096)
    (1610612736, 2000000000, 4096)
    """
    if isinstance(size, bool) or not isinstance(size, int | float | str):
        raise ConfigurationError(
            f"{size!r} is not a size; write bytes as a number, or a text such as '20GiB'",
            repr(size),
        )
    if isinstance(size, int | float):
        if not 0 <= size < float("inf"):
            raise ConfigurationError(
                f"{size!r} is not a size: it must be zero or more, and finite", repr(size)
            )
        return int(size)
    match = _PATTERN.fullmatch(size)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigurationError(
            f"{size!r} is not a size; write bytes as a number, or a text such as '20GiB'",
            repr(size),
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_size(size: int | None) -> str:
    """A size in binary units, with the precision that a person reads.

    >>> format_size(12 * 2**30), format_size(1536), format_size(None)
    ('12.0 GiB', '1.5 KiB', 'unknown')
    """
    if size is None:
        return "unknown"
    unit, factor = _unit(size)
    return f"{_amount(size, factor)} {unit}"


def format_part(part: int, whole: int) -> str:
    """A part of a size and that size, in the unit of the whole.

    >>> format_part(3 * 2**29, 8 * 2**30)
    '1.5/8.0 GiB'
    """
    unit, factor = _unit(whole)
    return f"{_amount(part, factor)}/{_amount(whole, factor)} {unit}"


def _unit(size: int) -> tuple[str, int]:
    return next(((unit, each) for unit, each in _WRITTEN.items() if size >= each), ("B", 1))


def _amount(size: int, factor: int) -> str:
    return f"{size / factor:.{0 if factor == 1 else 1}f}"


def bar(share: float, width: int) -> tuple[str, str]:
    """The full and the empty part of a bar of so many columns.

    What is not nothing shows, and only what is full is full.

    >>> bar(0.5, 8), bar(0.001, 4), bar(0.999, 4)
    (('████', '░░░░'), ('█', '░░░'), ('███', '░'))
    >>> bar(3.0, 4), bar(0.0, 4), bar(-1.0, 4)
    (('████', ''), ('', '░░░░'), ('', '░░░░'))
    """
    full = width if share >= 1 else min(width - 1, round(share * width))
    full = max(1 if share > 0 else 0, full)
    return "█" * full, "░" * (width - full)


_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_THOUSANDS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def time_in_words(seconds: float) -> str:
    """A time with three digits.

    >>> time_in_words(0.00123), time_in_words(2.5), time_in_words(4.2e-6)
    ('1.23 ms', '2.50 s', '4.20 µs')
    """
    unit, name = next((pair for pair in _TIMES if seconds >= 0.9995 * pair[0]), _TIMES[-1])
    return f"{_three_digits(seconds / unit)} {name}"


def rate_in_words(rate: float, unit: str) -> str:
    """A rate with three digits; `unit` is "B/s" or "FLOP/s".

    >>> rate_in_words(4.27e12, "B/s"), rate_in_words(31.0, "FLOP/s")
    ('4.27 TB/s', '31.0 FLOP/s')
    """
    size, prefix = next((pair for pair in _THOUSANDS if rate >= 0.9995 * pair[0]), _THOUSANDS[-1])
    return f"{_three_digits(rate / size)} {prefix}{unit}"


def percent(part: float) -> str:
    """A part of a whole.

    >>> percent(0.934), percent(0.0042), percent(0.0)
    ('93 %', '0.4 %', '0 %')
    """
    return f"{100 * part:.1f} %" if 0 < part < 0.095 else f"{100 * part:.0f} %"


def times(factor: float) -> str:
    """A factor.

    >>> times(12.34), times(0.5), times(265.0), times(0.00002)
    ('12.3 ×', '0.50 ×', '265 ×', '2e-05 ×')
    """
    return f"{_three_digits(factor)} ×" if factor >= 0.005 else f"{factor:.1g} ×"


def _three_digits(number: float) -> str:
    if number >= 99.95:
        return f"{number:.0f}"
    return f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()
) -> list[str]:
    """The lines of a table, its head first; the columns in `right` are set to the right.

    >>> for line in table(("op", "time"), [("add", "1 ms"), ("matmul", "12 ms")], [1]):
    ...     print(line)
    op       time
    add      1 ms
    matmul  12 ms
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
