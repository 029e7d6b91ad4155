"""Reading the small files of `/proc` and `/sys`, where any of them may be missing or garbled.

What cannot be read is `None`: a reader that meets it says "unknown" and goes on.
"""

from __future__ import annotations

import os
from pathlib import Path


def read_text(path: Path | str, *, most: int | None = None) -> str | None:
    """The file's text, its first `most` bytes where that is given; `None` if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            content = file.read() if most is None else file.read(most)
    except (OSError, ValueError):
        return None
    return (content or b"").decode("utf-8", "replace")


def read_number(path: Path | str) -> int | None:
    """The whole number that a file holds; `None` if it holds anything else ("max", nothing, …)."""
    return as_number(read_text(path))


def as_number(text: str | None) -> int | None:
    """The whole number that a text holds, or `None`.

    >>> as_number(" 4096 "), as_number("-1"), as_number("max"), as_number("1_000")
    (4096, -1, None, None)
    """
    stripped = (text or "").strip()
    digits = stripped[1:] if stripped.startswith("-") else stripped
    # A limit has at most 20 digits; int() refuses very long texts with an error of its own.
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 20):
        return None
    return int(stripped)


def read_table(path: Path | str) -> dict[str, int]:
    """A file of lines "name number", such as `memory.stat` or `meminfo`; other lines are left out.

    A colon after the name is dropped, and a unit "kB" after the number makes it bytes.
    """
    table: dict[str, int] = {}
    for line in (read_text(path) or "").splitlines():
        words = line.split()
        number = as_number(words[1]) if len(words) > 1 else None
        if number is not None:
            table[words[0].rstrip(":")] = number * 1024 if words[2:] == ["kB"] else number
    return table


def as_cpu_set(text: str | None) -> frozenset[int] | None:
    """The processors that the kernel writes as "0-3,8"; `None` if the text is empty or garbled.

    >>> sorted(as_cpu_set("0-2,8") or ()), as_cpu_set("all")
    ([0, 1, 2, 8], None)
    """
    numbers: set[int] = set()
    for part in (text or "").strip().split(","):
        first, _, last = part.partition("-")
        low = as_number(first)
        high = as_number(last) if last else low
        if low is None or high is None or not 0 <= low <= high < 65536:
            return None
        numbers.update(range(low, high + 1))
    return frozenset(numbers)


def exists(path: Path | str) -> bool:
    """Whether there is such a file or folder; false also where that cannot be told."""
    try:
        os.stat(path)
    except (OSError, ValueError):
        return False
    return True
