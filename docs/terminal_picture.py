"""Draws what a terminal shows as SVG: `screen_of` reads its bytes, `drawn` makes the picture.

The picture asks no other host for anything: its letters are those of the reader's system, each
piece of a line stretched to the columns that it has in the terminal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape

COLUMN, ROW, SIZE = 7.8, 18, 13
PADDING, BAR = 16, 34
BACKGROUND, FRAME, INK, SOFT = "#0d1117", "#30363d", "#e6edf3", "#8b949e"
COLOURS = {"31": "#ff7b72", "32": "#56d364", "33": "#e3b341", "36": "#79c0ff"}
FONTS = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"

Cell = tuple[str, str]
"""A character, and the codes of its style, such as "1;32"."""

_PART = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b.|[\s\S]")
_PIECE = re.compile(r"\S+(?: \S+)*")


def screen_of(text: str, columns: int) -> list[list[Cell]]:
    """The lines that a terminal shows after this text, whatever was erased or written over."""
    lines: list[list[Cell]] = [[]]
    row, column, style = 0, 0, ""
    for part in _PART.finditer(text):
        numbers, command, character = part[1] or "", part[2], part[0]
        if command == "m":
            style = ";".join(sorted({*style.split(";"), *numbers.split(";")} - {""}))
            style = "" if numbers in ("", "0") else style
        elif command == "A":
            row = max(0, row - int(numbers or 1))
        elif command == "H":
            row, column = (int(number or 1) - 1 for number in (numbers + ";").split(";")[:2])
        elif command == "K":
            lines[row] = [] if numbers == "2" else lines[row][:column]
        elif command == "J":
            lines = lines[: 0 if numbers == "2" else row]
        elif character == "\r":
            column = 0
        elif character == "\n":
            row, column = row + 1, 0
        elif command is None and character.isprintable():
            if column == columns:
                row, column = row + 1, 0
                lines += [[] for _ in range(row + 1 - len(lines))]
            line = lines[row] + [(" ", "")] * (column - len(lines[row]))
            lines[row] = [*line[:column], (character, style), *line[column + 1 :]]
            column += 1
        lines += [[] for _ in range(row + 1 - len(lines))]
    return lines


def text_of(lines: Sequence[Sequence[Cell]]) -> str:
    """The lines without their colours."""
    return "\n".join("".join(each for each, _ in line).rstrip() for line in lines).strip("\n")


def drawn(lines: Sequence[Sequence[Cell]], title: str, *, columns: int, metadata: str = "") -> str:
    """The lines in the window of a terminal, with a title in its bar."""
    lines = _without_empty_ends(lines)
    width = round(columns * COLUMN + 2 * PADDING)
    height = BAR + ROW * len(lines) + PADDING
    dots = "".join(
        f'<circle cx="{20 + 18 * number}" cy="17" r="5.5" fill="{colour}"/>'
        for number, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    texts = [
        piece
        for number, line in enumerate(lines)
        for piece in _pieces(line, BAR + ROW * (number + 0.75))
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" role="img" aria-label="{escape(title)}" '
            f'font-family="{FONTS}" font-size="{SIZE}">',
            f"<metadata>{escape(metadata)}</metadata>",
            f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="9" '
            f'fill="{BACKGROUND}" stroke="{FRAME}"/>{dots}',
            f'<text x="{width / 2:g}" y="22" text-anchor="middle" fill="{SOFT}" '
            f'font-size="12.5">{escape(title)}</text>',
            f'<g fill="{INK}" xml:space="preserve">',
            *texts,
            "</g>",
            "</svg>",
            "",
        ]
    )


def _pieces(line: Sequence[Cell], y: float) -> Iterator[str]:
    """One text element for each stretch of one style without a gap."""
    start = 0
    while start < len(line):
        style = line[start][1]
        end = next((k for k in range(start, len(line)) if line[k][1] != style), len(line))
        words = "".join(character for character, _ in line[start:end])
        for piece in _PIECE.finditer(words):
            x = PADDING + COLUMN * (start + piece.start())
            length = COLUMN * len(piece[0])
            yield (
                f'<text x="{x:g}" y="{y:g}" textLength="{length:g}"{_look(style)}>'
                f"{escape(piece[0], quote=False)}</text>"
            )
        start = end


def _look(style: str) -> str:
    codes = style.split(";")
    colour = next((COLOURS[code] for code in codes if code in COLOURS), None)
    colour = colour or (SOFT if "2" in codes else None)
    bold = ' font-weight="bold"' if "1" in codes else ""
    return (f' fill="{colour}"' if colour else "") + bold


def _without_empty_ends(lines: Sequence[Sequence[Cell]]) -> list[Sequence[Cell]]:
    kept = list(lines)
    while kept and not any(character.strip() for character, _ in kept[-1]):
        kept.pop()
    return kept
