"""Text for terminals: tables, which rich lays out, styles of words, and verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from anydevice._core.text import UNUSABLE, USABLE, wrapped

if TYPE_CHECKING:
    from rich.console import RenderableType

    from anydevice._core.table import Table

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


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()
) -> list[str]:
    """Return the lines of a table, its head first; columns in `right` are right-aligned."""
    from rich.table import Table as Grid  # which takes longer to load than most commands run

    grid = Grid(box=None, pad_edge=False, show_header=False)
    for number in range(len(head)):
        grid.add_column(justify="right" if number in right else "left", no_wrap=True)
    for row in (head, *rows):
        grid.add_row(*row)
    return render_lines(grid)


def table_lines(value: Table) -> list[str]:
    return table(value.head, value.rows, value.right)


def render_lines(
    renderable: RenderableType, columns: int = 10_000, *, colour: bool = False
) -> list[str]:
    """Return the lines that rich renders in this width."""
    from io import StringIO

    from rich.console import Console

    # Boxes stay: the file's encoding may differ from the output's.
    colours: Literal["standard"] | None = "standard" if colour else None
    console = Console(
        file=StringIO(), width=columns, color_system=colours, markup=False, emoji=False
    )
    with console.capture() as captured:
        console.print(renderable, highlight=False)
    return [line.rstrip() for line in captured.get().splitlines()]
