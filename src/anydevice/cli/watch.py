"""`anydevice watch`: a live view of every device; piped, one line a second for each.

How `anydevice watch` shows a look at the machine: a picture for a screen, or a line a card.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from unicodedata import combining, east_asian_width

from anydevice.cli.options import names
from anydevice.cli.printing import Output
from anydevice.cli.terminal import Attention, Screen, shows_live_views
from anydevice.cli.usage import Card, Glance, cards_among, glance
from anydevice.core.text import bar, format_part, format_size, percent
from anydevice.hardware.readers import DeviceProcess, Readings
from anydevice.memory.stats import Pressure

EXAMPLE = "anydevice watch --device cuda --interval 0.25"

_LIVE, _PIPED = 0.5, 1.0
_SHORTEST, _LONGEST = 0.05, 3600.0
_WIDTH = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which devices, how often, and whether only once."""
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        type=names,
        action="extend",
        help="only these, such as cuda:0,cpu; may be repeated",
    )
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=_interval,
        help=f"from one look to the next ({_LIVE:g}; {_PIPED:g} when piped)",
    )
    parser.add_argument("--once", action="store_true", help="look once and end")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Watch until q, Ctrl-C or a signal to end; the code is 0 then.

    JSON is one object a line, with the time and every device; with --once it is written for
    people too. A terminal that cannot be drawn on gets lines, as a pipe does.
    """
    cards = cards_among(arguments.device or ())
    if arguments.once:
        if arguments.json:
            output.json(_sample(_look(cards)))
        else:
            output.say(*frame(_look(cards), output, width=output.width or _WIDTH))
    elif arguments.json or not shows_live_views(output):
        _print(cards, output, arguments.interval or _PIPED, as_json=arguments.json)
    else:
        _show(cards, output, arguments.interval or _LIVE)
    return 0


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not _SHORTEST <= seconds <= _LONGEST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds from {_SHORTEST:g} to {_LONGEST:g}"
        )
    return seconds


def _look(cards: Sequence[Card]) -> list[Glance]:
    return [glance(card) for card in cards]


def _print(cards: Sequence[Card], output: Output, interval: float, *, as_json: bool) -> None:
    with Attention() as attention:
        while True:
            next_look = time.monotonic() + interval
            glances = _look(cards)
            if as_json:
                output.stream.write(json.dumps(_sample(glances)) + "\n")
            else:
                now = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
                output.say(*(f"{now}  {line(each)}" for each in glances))
            output.stream.flush()
            if attention.wait_until(next_look) == "quit":
                return


def _show(cards: Sequence[Card], output: Output, interval: float) -> None:
    screen = Screen(output)
    quits = "q quits" if screen.keys is not None else "Ctrl-C quits"
    words = f"every {interval:g} s  {quits}"
    try:
        with Attention(screen.keys, screen=True) as attention, screen:
            while True:
                next_look = time.monotonic() + interval
                glances = _look(cards)
                _draw(glances, screen, output, words)
                while (event := attention.wait_until(next_look)) != "time":
                    if event == "quit":
                        return
                    if event == "suspend":
                        screen.suspend()
                    screen.forget()
                    _draw(glances, screen, output, words)
    except OSError:
        # The terminal was closed while it was drawn on: the same as being asked to leave.
        return


def _draw(glances: Sequence[Glance], screen: Screen, output: Output, words: str) -> None:
    columns, rows = screen.size
    head = f"anydevice watch  {datetime.now():%H:%M:%S}  {words}"[:columns]
    picture = frame(glances, output, width=columns, height=max(0, rows - 2))
    screen.draw([output.paint(head, "dim"), "", *picture][:rows])


def _sample(glances: Sequence[Glance]) -> dict[str, object]:
    now = datetime.now().astimezone().isoformat(timespec="milliseconds")
    return {"time": now, "devices": [each.to_dict() for each in glances]}


Piece = tuple[str, str | None]
"""Words and the style to paint them in."""

_STYLES: dict[Pressure | None, str | None] = {
    "low": "good",
    "medium": "fix",
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
        yield _measured("load", each.readings.load, "fix", words, width)


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
    share = "" if part is None else percent(part)
    load = "" if process.load is None else f"load {percent(process.load):>5}"
    figures = f"{process.pid:>9} {held:>10} {share:>5}"
    if width >= _ROOM_FOR_LOADS:
        figures += f"{_GAP}{load:>10}"
    return [(f"{figures}{_GAP}", "dim"), (printable(process.name), None)]


def _memory(each: Glance) -> list[Piece]:
    pieces: list[Piece] = []
    part = _part(each.taken, each.usable)
    if each.taken is not None and each.usable is not None and part is not None:
        pieces += [(percent(part), None), (format_part(each.taken, each.usable), None)]
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
        pieces.append((f"load {percent(read.load)}", None))
    if read.temperature is not None:
        pieces.append((f"{read.temperature:.0f} °C", None))
    if read.power is not None:
        limit = "" if read.power_limit is None else f" of {read.power_limit:.0f}"
        pieces.append((f"{read.power:.0f}{limit} W", None))
    if read.clock is not None:
        pieces.append((f"{read.clock:.0f} MHz", None))
    if read.fan is not None:
        pieces.append((f"fan {percent(read.fan)}", None))
    if read.memory_load is not None:
        pieces.append((f"memory traffic {percent(read.memory_load)}", None))
    return pieces


def _part(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole


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
