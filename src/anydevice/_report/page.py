"""Pages that are one HTML file and ask for nothing from outside: their style and their parts.

Everything that comes from outside is escaped here; a part takes text, and gives HTML.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from anydevice._core.files import check_folder, expanded, write_whole
from anydevice._core.text import format_size
from anydevice._report.svg import COLOURS, Bar, bar_chart, legend, rules, safe, unit_of
from anydevice.errors import ConfigurationError

PAGES = (".html", ".htm")
"""How the name of a page ends: whatever else is there, such as a model, no page replaces."""


def page_file(path: str | os.PathLike[str], endings: Sequence[str] = PAGES) -> Path:
    """The file that a page is written to.

    Raises `ConfigurationError` for a name that ends in another way, and `TransferError` where there
    is no such folder.

    >>> page_file("m/config.json")
    Traceback (most recent call last):
    anydevice.errors.ConfigurationError: m/config.json: write it to a name ending in .html or .htm
    """
    target = expanded(path)
    if target.suffix.lower() not in endings:
        names = " or ".join(endings)
        raise ConfigurationError(f"{path}: write it to a name ending in {names}", source="path")
    check_folder(target)
    return target


def save_page(path: str | os.PathLike[str], text: str, endings: Sequence[str] = PAGES) -> None:
    """Write a page, or a picture; raises as `page_file`, and where it cannot be written."""
    write_whole(page_file(path, endings), [text.encode()])


def _rows_as_cards(tables: str, most: int) -> str:
    """How tables look on screens of at most so many pixels: each row is a card of three columns."""
    return f"""
@media (max-width: {most}px) {{
  {tables} thead {{ display: none; }}
  {tables}, {tables} tbody {{ display: block; }}
  {tables} tr {{ display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 2px 8px;
    padding: 8px 0; border-bottom: 1px solid var(--line); }}
  {tables} td {{ display: block; border: 0; padding: 0; text-align: left;
    overflow-wrap: anywhere; }}
  {tables} td:first-child {{ font-weight: 600; }}
  {tables} td.text:nth-child(even) {{ grid-column: span 2; }}
  {tables} td:not(.text)::before {{ content: attr(data-name); display: block; color: var(--soft);
    font-size: .7rem; font-weight: normal; }}
}}
"""


STYLE = (
    COLOURS
    + """
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.45;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 16px; }
h1 { font-size: 1.5rem; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 28px 0 6px; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 12px 0 2px; }
h2 small, p, figcaption { color: var(--soft); font-weight: normal; font-size: .9rem; }
p { margin: 0 0 10px; overflow-wrap: anywhere; }
.verdict { color: var(--ink); font-size: 1.05rem; margin: 12px 0; }
.good b { color: var(--good); } .bad b { color: var(--bad); }
ul { padding: 0; margin: 0 0 10px; list-style: none; }
li { overflow-wrap: anywhere; }
.cards { display: flex; flex-wrap: wrap; gap: 8px; }
.cards li { flex: 1 1 140px; background: var(--panel); border-radius: 8px; padding: 8px 10px; }
.cards b { display: block; font-size: 1.05rem; }
.cards span { display: block; font-size: .85rem; }
.cards small { display: block; color: var(--soft); font-size: .75rem; line-height: 1.25; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: .85rem; margin: 4px 0 10px; }
.legend svg { vertical-align: -1px; }
.figures { display: flex; flex-wrap: wrap; gap: 16px; margin: 10px 0; }
.figures > * { flex: 1 1 340px; min-width: min(100%, 340px); margin: 0; padding: 10px;
  background: var(--panel); border-radius: 10px; }
.figures > .beside { flex-grow: 2; }
.figures > figure:only-child { max-width: 540px; }
figcaption b { color: var(--ink); }
figure > svg { display: block; width: 100%; max-width: 540px; height: auto; margin: 6px auto 0; }
dl { display: grid; grid-template-columns: fit-content(42%) minmax(0, 1fr); gap: 4px 14px;
  margin: 0; font-size: .9rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
details { margin: 14px 0; }
summary { cursor: pointer; padding: 6px 0; font-weight: 600; }
details li { font-size: .85rem; padding: 3px 0; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; }
th, td { text-align: right; padding: 4px 8px; border-bottom: 1px solid var(--line); }
th.text, td.text, th:first-child, td:first-child { text-align: left; }
td { font-variant-numeric: tabular-nums; }
"""
    + _rows_as_cards("table", 560)
    + _rows_as_cards("table.broad", 820)
    + rules("svg")
)
"""Light or dark as the reader's system is, in one column on a phone."""


def document(title: str, facts: Iterable[str], *parts: str, notes: Iterable[str] = ()) -> str:
    """The whole page: what it is about, its parts, and below them what is to be noted."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<meta name="color-scheme" content="light dark"/>'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\"/>"
        f"<title>{safe(title)}</title><style>{STYLE}</style></head><body><main>"
        f"<header><h1>{safe(title)}</h1><p>{safe(' · '.join(facts))}</p></header>"
        f"{''.join(parts)}{section('Notes', listed(notes))}</main></body></html>\n"
    )


def section(title: str, *parts: str, detail: str = "") -> str:
    """Parts below a title, with a fainter detail behind it; nothing where there are no parts."""
    said = f" <small>{safe(detail)}</small>" if detail else ""
    content = "".join(parts)
    return f"<section><h2>{safe(title)}{said}</h2>{content}</section>" if content else ""


def verdict(mark: str, text: str, *, good: bool | None) -> str:
    """The answer in one line, behind a mark in the colour of good or of bad, or in neither."""
    style = {True: " good", False: " bad", None: ""}[good]
    return f'<p class="verdict{style}"><b>{safe(mark)}</b> {safe(text)}</p>'


def paragraphs(texts: Iterable[str]) -> str:
    """A paragraph for each text."""
    return "".join(f"<p>{safe(text)}</p>" for text in texts)


def listed(texts: Iterable[str]) -> str:
    """The texts as a list; nothing where there are none."""
    items = "".join(f"<li>{safe(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def cards(values: Iterable[tuple[str, str, str]]) -> str:
    """Figures that are seen first: each a value, what it is of, and a fainter detail."""
    items = "".join(
        f"<li><b>{safe(value)}</b><span>{safe(name)}</span>"
        f"{f'<small>{safe(detail)}</small>' if detail else ''}</li>"
        for value, name, detail in values
    )
    return f'<ul class="cards">{items}</ul>' if items else ""


def figures(*parts: str) -> str:
    """Plots side by side, as many as there is room for."""
    return f'<div class="figures">{"".join(parts)}</div>' if any(parts) else ""


def figure(title: str, explanation: str, plot: str) -> str:
    """A plot below its title and a sentence on how to read it."""
    return (
        f"<figure><figcaption><b>{safe(title)}</b> {safe(explanation)}</figcaption>{plot}</figure>"
    )


def memory_figure(title: str, explanation: str, bars: Sequence[Bar], parts: Sequence[str]) -> str:
    """Bars of bytes, with the names of those parts that are in one; nothing without bars."""
    if not bars:
        return ""
    most = max(max(sum(size for _, size in each.pieces), each.ceiling or 0.0) for each in bars)
    words, unit = (lambda size: format_size(int(size))), unit_of(most)
    plot = bar_chart(bars, parts, words, unit, title=title)
    there = [part for part in parts if any(dict(each.pieces).get(part) for each in bars)]
    return figure(title, explanation, (legend(there, parts, bars=True) if there[1:] else "") + plot)


def beside(rows: Iterable[tuple[str, str]]) -> str:
    """Names and their values, in the room that plots leave beside them."""
    items = "".join(f"<dt>{safe(name)}</dt><dd>{safe(text)}</dd>" for name, text in rows)
    return f'<div class="beside"><dl>{items}</dl></div>' if items else ""


def table(names: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A table whose cells carry the name of their column, for screens that show no head.

    The first `texts` columns are words, the others numbers; with three or more of them, a table is
    too broad for a tablet as well.
    """
    styles = [' class="text"' if number < texts else "" for number in range(len(names))]
    head = "".join(
        f'<th scope="col"{style}>{safe(name)}</th>'
        for name, style in zip(names, styles, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-name="{safe(name)}"{style}>{safe(cell)}</td>'
            for name, style, cell in zip(names, styles, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    broad = ' class="broad"' if texts > 2 else ""
    return f"<table{broad}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def folded(title: str, content: str, *, opened: bool = False) -> str:
    """Content that a click shows and hides; it is hidden first unless `opened`."""
    state = ' open=""' if opened else ""
    return f"<details{state}><summary>{safe(title)}</summary>{content}</details>"
