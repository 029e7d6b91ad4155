"""A bar that shows a share, as text."""

from __future__ import annotations


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
