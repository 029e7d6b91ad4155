"""Styles of words on a terminal, and lines that several reports begin with."""

from __future__ import annotations

from collections.abc import Callable

from anydevice._core.text import UNUSABLE, USABLE, wrapped

Paint = Callable[[str, str], str]
"""Puts words into a style: "good", "bad", "dim", "strong" or "fix"."""

WIDTH = 80
"""Columns of a text whose width is not given."""


def plain(words: str, style: str) -> str:
    """Return the words without a style."""
    del style
    return words


def verdict_lines(good: bool, verdict: str, columns: int, paint: Paint) -> list[str]:
    """Return a verdict behind its mark, in lines of at most `columns`."""
    mark, style = (USABLE, "good") if good else (UNUSABLE, "bad")
    first, *rest = wrapped(f"{mark} {verdict}", columns, hanging="  ")
    return [paint(mark, style) + first[len(mark) :], *rest]
