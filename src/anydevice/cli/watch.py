"""`anydevice watch`: a live view of every device; piped, one line a second for each."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from datetime import datetime

from anydevice.cli.glances import Card, Glance, cards_among, glance
from anydevice.cli.narrowing import names
from anydevice.cli.printing import Output
from anydevice.cli.terminal import Attention, Screen, shows_live_views
from anydevice.cli.watch_frame import frame, line

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
