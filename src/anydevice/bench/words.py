"""Figures as people read them, and tables of them."""

from __future__ import annotations

from collections.abc import Sequence

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
