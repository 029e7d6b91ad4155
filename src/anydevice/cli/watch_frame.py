"""How `anydevice watch` shows a look at the machine: a picture for a screen, or a line a card."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unicodedata import combining, east_asian_width

from anydevice.cli.glances import Glance
from anydevice.cli.printing import Output
from anydevice.core.bars import bar
from anydevice.core.sizes import format_part, format_size
from anydevice.hardware.readings import DeviceProcess, Readings
from anydevice.memory.figures import Pressure

Piece = tuple[str, str | None]
"""Words and the style to paint them in."""

_STYLES: dict[Pressure | None, str | None] = {
    "low": "good",
    "medium": "mend",
    "high": "bad",
    "critical": "bad",
    None: None,
}
_GAP = "  "
_MOST_PROCESSES = 8
_ROOM_FOR_LOADS = 60


def frame(
    glances: Sequence[Glance], output: Output, *, width: int, height: int | None = None
) -> list[str]:
    """The picture, at most so wide and so high: a block a card, with its largest processes.

    Where it is too narrow, what matters least is left out; where it is too low, processes are,
    and then cards at the end.
    """
    blocks = [list(_block(each, width)) for each in glances]
    room = _MOST_PROCESSES * len(blocks)
    if height is not None:
        room = height - sum(len(block) + 1 for block in blocks) + 1
    lines: list[list[Piece]] = []
    for number, (each, block) in enumerate(zip(glances, blocks, strict=True)):
        share = max(0, min(_MOST_PROCESSES, room // (len(blocks) - number)))
        shown = each.processes[:share]
        room -= len(shown)
        lines += [[]] if lines else []
        lines += block
        lines += [_process(process, each.usable, width) for process in shown]
    return [_painted(line, width, output) for line in lines[:height]]


def line(each: Glance) -> str:
    """One card in one line, for a file or a pipe."""
    parts = [text for text, _ in (*_memory(each), *_readings(each.readings))]
    if each.processes and each.device != "cpu":
        parts.append(f"processes {len(each.processes)}")
    if each.processes:
        largest = each.processes[0]
        size = f" {format_size(largest.memory)}" if largest.memory is not None else ""
        parts.append(f"largest {largest.pid} {printable(largest.name)}{size}")
    return f"{each.device}{_GAP}{_GAP.join(parts)}".rstrip()


def printable(text: str) -> str:
    r"""The text without what could control a terminal: a process is called what it likes.

    >>> printable("train\x1b[2J.py")
    'train?[2J.py'
    """
    return "".join(character if character.isprintable() else "?" for character in text)


def _block(each: Glance, width: int) -> Iterator[list[Piece]]:
    title: list[Piece] = [(each.device, "strong"), (printable(each.name), None)]
    if each.also:
        title.append((f"also {', '.join(each.also)}", "dim"))
    if each.processes and each.device != "cpu":
        count = len(each.processes)
        title.append(("1 process" if count == 1 else f"{count} processes", "dim"))
    yield _fitting(title, width)
    style = _STYLES[each.pressure]
    yield _measured("memory", _part(each.taken, each.usable), style, _memory(each), width)
    told = _readings(each.readings)
    if told:
        words = [(text.removeprefix("load "), style) for text, style in told]
        yield _measured("load", each.readings.load, "mend", words, width)


def _measured(
    label: str, part: float | None, style: str | None, words: list[Piece], width: int
) -> list[Piece]:
    cells = max(6, min(40, width // 4 - 2))
    pieces: list[Piece] = [(f"{_GAP}{label:<6} ", "dim")]
    if part is not None:
        full, empty = bar(part, cells)
        pieces += [(full, style), (empty + _GAP, "dim")]
    used = sum(_cells(text) for text, _ in pieces)
    return pieces + _fitting(words, width - used)


def _fitting(words: Sequence[Piece], width: int) -> list[Piece]:
    """As many of the words as fit with gaps between them; the first, cut, in any case."""
    pieces: list[Piece] = []
    used = 0
    for text, style in words:
        gap = _GAP if pieces else ""
        used += _cells(gap + text)
        if pieces and used > width:
            break
        pieces += [(gap, None), (text, style)]
    return pieces


def _process(process: DeviceProcess, usable: int | None, width: int) -> list[Piece]:
    held = "" if process.memory is None else format_size(process.memory)
    part = _part(process.memory, usable)
    share = "" if part is None else _percent(part)
    load = "" if process.load is None else f"load {_percent(process.load):>5}"
    figures = f"{process.pid:>9} {held:>10} {share:>5}"
    if width >= _ROOM_FOR_LOADS:
        figures += f"{_GAP}{load:>10}"
    return [(f"{figures}{_GAP}", "dim"), (printable(process.name), None)]


def _memory(each: Glance) -> list[Piece]:
    pieces: list[Piece] = []
    part = _part(each.taken, each.usable)
    if each.taken is not None and each.usable is not None and part is not None:
        pieces += [(_percent(part), None), (format_part(each.taken, each.usable), None)]
    elif each.usable is not None:
        pieces.append((f"{format_size(each.usable)} in all", None))
    else:
        pieces.append(("unknown", None))
    if each.pressure is not None:
        pieces.append((each.pressure, _STYLES[each.pressure]))
    return pieces


def _readings(read: Readings) -> list[Piece]:
    pieces: list[Piece] = []
    if read.load is not None:
        pieces.append((f"load {_percent(read.load)}", None))
    if read.temperature is not None:
        pieces.append((f"{read.temperature:.0f} °C", None))
    if read.power is not None:
        limit = "" if read.power_limit is None else f" of {read.power_limit:.0f}"
        pieces.append((f"{read.power:.0f}{limit} W", None))
    if read.clock is not None:
        pieces.append((f"{read.clock:.0f} MHz", None))
    if read.fan is not None:
        pieces.append((f"fan {_percent(read.fan)}", None))
    if read.memory_load is not None:
        pieces.append((f"memory traffic {_percent(read.memory_load)}", None))
    return pieces


def _part(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole


def _percent(part: float) -> str:
    return f"{part:.0%}".replace("%", " %")


def _painted(pieces: list[Piece], width: int, output: Output) -> str:
    painted, left = [], width
    for text, style in pieces:
        cut = _cut(text, left)
        left -= _cells(cut)
        painted.append(output.paint(cut, style) if style else cut)
    return "".join(painted).rstrip()


def _cut(text: str, width: int) -> str:
    while _cells(text) > width:
        text = text[:-1]
    return text


def _cells(text: str) -> int:
    """How many columns of a terminal the text takes.

    >>> _cells("abc"), _cells("日本")
    (3, 4)
    """
    if text.isascii():
        return len(text)
    return sum(
        0 if combining(character) else 2 if east_asian_width(character) in "WF" else 1
        for character in text
    )
