"""Amounts of memory: read from what people write, and written so that people can read them."""

from __future__ import annotations

import re

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
