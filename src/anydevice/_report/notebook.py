"""Output for notebooks: tables, lines, bars and plots, for light and dark themes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from anydevice._core.table import Table
from anydevice._report.svg import Curve, line_chart, rules

STYLE = (
    '.anydevice{font:13px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;'
    "overflow-x:auto}"
    ".anydevice table{border-collapse:collapse;margin:4px 0;font-size:inherit}"
    ".anydevice th,.anydevice td{padding:3px 10px;border:0;border-bottom:1px solid #8884;"
    "vertical-align:top;white-space:normal;max-width:44em;overflow-wrap:break-word}"
    ".anydevice tr{background:none}"
    ".anydevice td{font-variant-numeric:tabular-nums}"
    ".anydevice p{margin:3px 0}"
    ".anydevice .soft,.anydevice .tick,.anydevice .detail{opacity:.75}"
    ".anydevice .strong{font-weight:600}"
    ".anydevice .good{color:#2a9d58;font-weight:600}.anydevice .bad{color:#e04a3f;font-weight:600}"
    ".anydevice .bar{display:inline-block;width:9em;height:.7em;border:1px solid #8888;"
    "border-radius:2px;vertical-align:middle;margin-right:6px}"
    ".anydevice .bar span{display:block;height:100%;opacity:.6;background:currentColor}"
    ".anydevice svg{--ink:currentColor;--soft:currentColor;--line:#8884;--panel:#8880;"
    "--m0:#0b6bcb;--m1:#c2410c;--m2:#7c3aed;--m3:#15803d;--m4:#a16207;--m5:#0e7490}"
) + rules(".anydevice svg")


class Html(str):
    """Text that is already HTML."""

    __slots__ = ()


def block(*parts: str) -> str:
    """Return the parts as one output of a cell."""
    return f'<div class="anydevice"><style>{STYLE}</style>{"".join(parts)}</div>'


def line(text: str, style: str = "") -> Html:
    """Return a paragraph in a style: "good", "bad", "soft" or "strong".

    >>> line("a < b", "soft")
    '<p class="soft">a &lt; b</p>'
    """
    return Html(f'<p class="{style}">{escape(text)}</p>' if style else f"<p>{escape(text)}</p>")


def marked(mark: str, text: str, *, good: bool) -> Html:
    """Return a paragraph behind a green or red mark."""
    colour = "good" if good else "bad"
    return Html(f'<p><span class="{colour}">{escape(mark)}</span> {escape(text)}</p>')


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = (), caption: str = ""
) -> Html:
    """Return a table, without an empty head; columns in `right` are right-aligned."""

    def table_row(tag: str, cells: Sequence[str]) -> str:
        text = ""
        for number, cell in enumerate(cells):
            inner = cell if isinstance(cell, Html) else escape(cell).replace("\n", "<br>")
            side = "right" if number in right else "left"
            text += f'<{tag} style="text-align:{side}">{inner}</{tag}>'
        return f"<tr>{text}</tr>"

    above = f"<caption>{escape(caption)}</caption>" if caption else ""
    top = f"<thead>{table_row('th', head)}</thead>" if head else ""
    body = "".join(table_row("td", row) for row in rows)
    return Html(f"<table>{above}{top}<tbody>{body}</tbody></table>")


def table_block(table_value: Table) -> str:
    """Return a table as one output of a cell, its title above it."""
    title = [line(table_value.title, "strong")] if table_value.title else []
    return block(*title, table(table_value.head, table_value.rows, table_value.right))


def bar(share: float, text: str) -> Html:
    """Return a bar that is filled to a share, with a text beside it."""
    width = round(100 * min(max(share, 0.0), 1.0))
    colour = ' class="bad"' if share > 1 else ""
    return Html(
        f'<span class="bar"><span{colour} style="width:{width}%"></span></span>{escape(text)}'
    )


def plot(
    curves: Sequence[Curve],
    title: str,
    below: str,
    *,
    ends: tuple[float, float] | None = None,
    words: Callable[[float], str] | None = None,
    start: float | None = None,
) -> Html:
    """Return a line chart with its title above it; options are as in `line_chart`."""
    chart = line_chart(curves, title=title, below=below, ends=ends, words=words, start=start)
    return Html(f'{line(title, "soft")}<div style="max-width:480px">{chart}</div>')
