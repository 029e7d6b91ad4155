"""`anydevice watch`: a live view of every device; lines, JSON or CSV for files; Prometheus."""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import count

from rich.cells import cell_len

from anydevice._arrays.memory.stats import Pressure, pressure_of
from anydevice._core.device import Device
from anydevice._core.record import Record
from anydevice._core.text import bar, format_part, format_size, percent, printable
from anydevice._machine.discovery.discover import discover
from anydevice._machine.discovery.doctor import prepare
from anydevice._machine.hardware.readers import DeviceProcess, Readings, processes, readings
from anydevice._machine.settings.config import check_wish
from anydevice.cli.options import add_filters, add_options, add_switches, seconds
from anydevice.cli.printing import Output
from anydevice.cli.prometheus import DEFAULT, exposition, serve
from anydevice.cli.terminal import Event, Screen, TerminalEvents, shows_live_views
from anydevice.errors import ConfigurationError

EXAMPLE = "anydevice watch --device cuda --interval 0.25"

_LIVE, _PIPED = 0.5, 1.0
_WIDTH = 80

Card = tuple[Device, ...]
"""One card by all its names: seen through CUDA and through OpenCL it is one."""
Piece = tuple[str, str | None]
"""Text, and the style to paint it in."""

_STYLES = {"low": "good", "medium": "fix", "high": "bad", "critical": "bad"}
_GAP = "  "
_MAX_PROCESSES = 8
_WIDTH_WITH_LOADS = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_filters(parser, "device")
    interval = f"from one look to the next ({_LIVE:g}; {_PIPED:g} when piped)"
    limited = partial(seconds, low=0.05, high=3600.0)
    add_options(parser, ("--interval", "SECONDS", limited, interval))
    rows = "a row for each device and look, below one row of names"
    add_switches(parser, once="look once and end", csv=rows)
    address = f"serve metrics at this address, as dcgm-exporter does ({DEFAULT}, on loopback)"
    parser.add_argument("--prometheus", metavar="ADDRESS", nargs="?", const=DEFAULT, help=address)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Watch until q, Ctrl-C or a signal to end; return 0."""
    if arguments.json + arguments.csv + bool(arguments.prometheus) > 1:
        raise ConfigurationError("--json, --csv and --prometheus exclude one another", "--json")
    if arguments.prometheus and arguments.interval:
        raise ConfigurationError("--prometheus looks at each request: leave --interval out")
    cards = cards_among(arguments.device or ())
    if arguments.prometheus and arguments.once:
        output.write(exposition(_usages(cards)))
    elif arguments.prometheus:
        serve(arguments.prometheus, partial(_usages, cards), output)
    elif arguments.once and arguments.json:
        output.json(_sample(_usages(cards)))
    elif arguments.once and not arguments.csv:
        output.say(*frame(_usages(cards), output, width=output.width or _WIDTH))
    elif arguments.json or arguments.csv or not shows_live_views(output):
        _print(cards, output, arguments)
    else:
        _show(cards, output, arguments.interval or _LIVE)
    return 0


def _usages(cards: Sequence[Card]) -> list[DeviceUsage]:
    return [usage_of(card) for card in cards]


def _print(cards: Sequence[Card], output: Output, arguments: argparse.Namespace) -> None:
    with TerminalEvents() as events:
        for number in count():
            next_time = time.monotonic() + (arguments.interval or _PIPED)
            usages = _usages(cards)
            if arguments.json:
                output.stream.write(json.dumps(_sample(usages)) + "\n")
            elif arguments.csv:
                _write_csv(usages, output, with_names=number == 0)
            else:
                now = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
                output.say(*(f"{now}  {line(usage)}" for usage in usages))
            output.stream.flush()
            if arguments.once or events.wait_until(next_time) == "quit":
                return


def _write_csv(usages: Sequence[DeviceUsage], output: Output, *, with_names: bool) -> None:
    for usage in usages:
        plain = {"time": _sample(())["time"]} | usage.to_dict()
        plain |= {"processes": len(usage.processes), "also": " ".join(usage.also)}
        rows = csv.DictWriter(output, plain, lineterminator="\n")
        if with_names and usage is usages[0]:
            rows.writeheader()
        rows.writerow(plain)


def _show(cards: Sequence[Card], output: Output, interval: float) -> None:
    screen = Screen(output)
    quits = "q quits" if screen.keys is not None else "Ctrl-C quits"
    words = f"every {interval:g} s  {quits}"
    event: Event = "time"
    # A terminal that closes while it is drawn on is a request to end.
    with suppress(OSError), TerminalEvents(screen.keys, screen=True) as events, screen:
        while event != "quit":
            if event == "time":
                next_time = time.monotonic() + interval
                usages = _usages(cards)
            else:
                if event == "suspend":
                    screen.suspend()
                screen.forget()
            columns, rows = screen.size
            head = f"anydevice watch  {datetime.now():%H:%M:%S}  {words}"[:columns]
            picture = frame(usages, output, width=columns, height=max(0, rows - 2))
            screen.draw([output.paint(head, "dim"), "", *picture][:rows])
            event = events.wait_until(next_time)


def _sample(usages: Sequence[DeviceUsage]) -> dict[str, object]:
    now = datetime.now().astimezone().isoformat(timespec="milliseconds")
    return {"time": now, "devices": [usage.to_dict() for usage in usages]}


def frame(
    usages: Sequence[DeviceUsage], output: Output, *, width: int, height: int | None = None
) -> list[str]:
    """Return the lines of the view: a block a card, and its processes, as far as there is room."""
    blocks = [list(_block(usage, width)) for usage in usages]
    left = _MAX_PROCESSES * len(blocks)
    if height is not None:
        left = height - sum(len(block) + 1 for block in blocks) + 1
    lines: list[list[Piece]] = []
    for number, (usage, block) in enumerate(zip(usages, blocks, strict=True)):
        share = max(0, min(_MAX_PROCESSES, left // (len(blocks) - number)))
        shown = usage.processes[:share]
        left -= len(shown)
        lines += [[]] if lines else []
        lines += block
        lines += [_process(process, usage, width) for process in shown]
    return [_paint_line(line, width, output) for line in lines[:height]]


def line(usage: DeviceUsage) -> str:
    """Return one card as a line, for a file or a pipe."""
    parts = [text for text, _ in (*_memory(usage), *_readings(usage.readings))]
    if usage.processes and usage.device != "cpu":
        parts.append(f"processes {len(usage.processes)}")
    if usage.processes:
        largest = usage.processes[0]
        size = f" {format_size(largest.memory)}" if largest.memory is not None else ""
        parts.append(f"largest {largest.pid} {printable(largest.name)}{size}")
    return f"{usage.device}{_GAP}{_GAP.join(parts)}".rstrip()


def _block(usage: DeviceUsage, width: int) -> Iterator[list[Piece]]:
    title: list[Piece] = [(usage.device, "strong"), (printable(usage.name), None)]
    if usage.also:
        title.append((f"also {', '.join(usage.also)}", "dim"))
    if usage.processes and usage.device != "cpu":
        count = len(usage.processes)
        title.append(("1 process" if count == 1 else f"{count} processes", "dim"))
    yield _fitting(title, width)
    style = _STYLES.get(usage.pressure or "")
    yield _bar_line("memory", usage.share_of(usage.taken), style, _memory(usage), width)
    readings = _readings(usage.readings, label="")
    if readings:
        yield _bar_line("load", usage.readings.load, "fix", readings, width)


def _bar_line(
    label: str, part: float | None, style: str | None, words: list[Piece], width: int
) -> list[Piece]:
    cells = max(6, min(40, width // 4 - 2))
    pieces: list[Piece] = [(f"{_GAP}{label:<6} ", "dim")]
    if part is not None:
        full, empty = bar(part, cells)
        pieces += [(full, style), (empty + _GAP, "dim")]
    used = sum(cell_len(text) for text, _ in pieces)
    return pieces + _fitting(words, width - used)


def _fitting(words: Sequence[Piece], width: int) -> list[Piece]:
    """Return the texts that fit, with gaps between them, and at least the first."""
    pieces: list[Piece] = []
    for text, style in words:
        gap = _GAP if pieces else ""
        if pieces and sum(cell_len(piece) for piece, _ in pieces) + cell_len(gap + text) > width:
            break
        pieces += [(gap, None), (text, style)]
    return pieces


def _process(process: DeviceProcess, usage: DeviceUsage, width: int) -> list[Piece]:
    size = "" if process.memory is None else format_size(process.memory)
    part = usage.share_of(process.memory)
    share = "" if part is None else percent(part)
    load = "" if process.load is None else f"load {percent(process.load):>5}"
    figures = f"{process.pid:>9} {size:>10} {share:>5}"
    if width >= _WIDTH_WITH_LOADS:
        figures += f"{_GAP}{load:>10}"
    return [(f"{figures}{_GAP}", "dim"), (printable(process.name), None)]


def _memory(usage: DeviceUsage) -> list[Piece]:
    pieces: list[Piece] = [("unknown", None)]
    if usage.taken is not None and usage.usable:
        amount = format_part(usage.taken, usage.usable)
        pieces = [(percent(usage.taken / usage.usable), None), (amount, None)]
    elif usage.usable is not None:
        pieces = [(f"{format_size(usage.usable)} in all", None)]
    if usage.pressure is not None:
        pieces.append((usage.pressure, _STYLES[usage.pressure]))
    return pieces


def _readings(read: Readings, label: str = "load ") -> list[Piece]:
    limit = "" if read.power_limit is None else f" of {read.power_limit:.0f}"
    texts = (
        None if read.load is None else f"{label}{percent(read.load)}",
        None if read.temperature is None else f"{read.temperature:.0f} °C",
        None if read.power is None else f"{read.power:.0f}{limit} W",
        None if read.clock is None else f"{read.clock:.0f} MHz",
        None if read.fan is None else f"fan {percent(read.fan)}",
        None if read.memory_load is None else f"memory traffic {percent(read.memory_load)}",
    )
    return [(text, None) for text in texts if text]


def _paint_line(pieces: list[Piece], width: int, output: Output) -> str:
    painted, left = [], width
    for text, style in pieces:
        while cell_len(text) > left:
            text = text[:-1]
        left -= cell_len(text)
        painted.append(output.paint(text, style) if style else text)
    return "".join(painted).rstrip()


# The usage of a card: memory, load, heat, power, and its processes


class DeviceUsage(Record):
    """The usage of one card at one moment, in bytes; `also` are the other names of the card."""

    device: str
    name: str
    total: int | None
    usable: int | None
    readings: Readings
    processes: tuple[DeviceProcess, ...] = ()
    also: tuple[str, ...] = ()
    uuid: str | None = None

    @property
    def free(self) -> int | None:
        return self.readings.free_memory

    @property
    def taken(self) -> int | None:
        """The memory of all processes together."""
        if self.usable is None or self.free is None:
            return None
        return max(0, self.usable - self.free)

    def share_of(self, size: int | None) -> float | None:
        """Return a size as a share of the usable memory."""
        return size / self.usable if size is not None and self.usable else None

    @property
    def pressure(self) -> Pressure | None:
        """The memory pressure; memory that a process holds but does not use counts as taken."""
        return pressure_of(self.usable, self.free)

    def to_dict(self) -> dict[str, object]:
        """Return the usage as plain data, ready for JSON."""
        plain = super().to_dict()
        readings = plain.pop("readings")
        return {
            **plain,
            "free": readings.pop("free_memory"),
            "used": self.taken,
            "pressure": self.pressure,
            **readings,
        }


def cards_among(names: Sequence[str] = ()) -> tuple[Card, ...]:
    """Return every card that a driver shows, or the named ones; raise if one is not there."""
    wishes = [name.strip().lower() for name in names]
    for name in wishes:
        check_wish(name, "--device")
    report = discover()
    shown = [
        device
        for device in prepare(report, names).report.devices
        if device.kind != "cpu"
        or str(device) in ("cpu", *wishes)
        or (wishes and device.backend != "cpu")
    ]
    return tuple(card for card in report.cards if any(device in shown for device in card))


def usage_of(card: Card) -> DeviceUsage:
    """Return the current usage of a card; never raises."""
    device = card[0]
    status = device.status
    assert status is not None
    facts = status.facts
    return DeviceUsage(
        device=str(device),
        name=facts.name,
        total=facts.total_memory,
        usable=facts.obtainable_memory,
        readings=readings(device.backend, device.index, facts),
        processes=processes(device.backend, device.index, facts),
        also=tuple(str(other) for other in card[1:]),
        uuid=facts.uuid,
    )
