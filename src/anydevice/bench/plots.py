"""Plots as SVG text, small enough to be read on a phone: dots in rows, and a roofline.

Everything that comes from outside is escaped here. Colours are those of the page: the
style of the class `m0` is that of the first engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import ceil, floor, log10

from anydevice.core.record import Record

WIDTH = 340
"""Units across: about the pixels of a phone, so that text keeps its size there."""

_LABELS, _RIGHT, _ROW, _TOP, _BOTTOM = 122, 18, 31, 18, 6

MARKS: tuple[Callable[[float, float], str], ...] = (
    lambda x, y: f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.6"',
    lambda x, y: f'<rect x="{x - 3.2:.1f}" y="{y - 3.2:.1f}" width="6.4" height="6.4"',
    lambda x, y: _polygon((x, y - 4.4), (x + 4.2, y + 3.2), (x - 4.2, y + 3.2)),
    lambda x, y: _polygon((x, y - 4.6), (x + 4.6, y), (x, y + 4.6), (x - 4.6, y)),
    lambda x, y: _polygon((x, y + 4.4), (x + 4.2, y - 3.2), (x - 4.2, y - 3.2)),
    lambda x, y: f'<rect x="{x - 1.7:.1f}" y="{y - 4.6:.1f}" width="3.4" height="9.2"',
)
"""One shape an engine: who sees no colours tells them apart as well."""


class Dot(Record):
    """One value of one engine, with what is said where it is pointed at."""

    engine: str
    value: float
    says: str


class Line(Record):
    """One row of dots, with a name and a fainter detail below it."""

    name: str
    detail: str
    dots: tuple[Dot, ...]


class Axis(Record):
    """Where values lie between two pixels; `low` and `high` are the values at its ends."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value; what lies beyond an end is drawn at it.

        >>> Axis(0.0, 1.0, 100.0, 300.0).at(0.5), Axis(1.0, 100.0, 0.0, 10.0, True).at(10.0)
        (200.0, 5.0)
        """
        held = min(max(value, self.low), self.high)
        if self.logarithmic:
            part = log10(held / self.low) / log10(self.high / self.low)
        else:
            part = (held - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)


def decades(values: Sequence[float]) -> tuple[float, float]:
    """The powers of ten around some values above 0.

    >>> decades([0.3, 42.0]), decades([1.0])
    ((0.1, 100.0), (1.0, 10.0))
    """
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    return 10.0**low, 10.0 ** max(high, low + 1)


def legend(shown: Sequence[str], engines: Sequence[str]) -> str:
    """Those of the engines that are shown, each with its mark and colour."""
    items = "".join(
        '<li><svg viewBox="0 0 12 12" width="12" height="12" aria-hidden="true">'
        f"{_mark(engine, 6, 6, engines)}</svg> {escape(engine)}</li>"
        for engine in shown
    )
    return f'<ul class="legend">{items}</ul>'


def dot_plot(
    lines: Sequence[Line],
    engines: Sequence[str],
    axis: tuple[float, float],
    ticks: Sequence[tuple[float, str]],
    *,
    logarithmic: bool = False,
    title: str,
) -> str:
    """Rows of dots on one axis, with ticks above; one colour and shape an engine."""
    scale = Axis(*axis, _LABELS, WIDTH - _RIGHT, logarithmic)
    height = _TOP + _ROW * len(lines) + _BOTTOM
    parts = [_opened(height, title)]
    for value, words in ticks:
        x = scale.at(value)
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP - 3}V{height - _BOTTOM}"/>')
        parts.append(_text(x, 10, words, "tick", "middle"))
    for number, line in enumerate(lines):
        top = _TOP + _ROW * number
        middle = top + _ROW / 2
        parts.append(f'<path class="rule" d="M{_LABELS} {middle:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(_text(0, middle - 2, _shortened(line.name, 18), "name"))
        parts.append(_text(0, middle + 9, _shortened(line.detail, 22), "detail"))
        for dot in line.dots:
            mark = _mark(dot.engine, scale.at(dot.value), middle, engines, dot.says)
            parts.append(mark)
    return "".join((*parts, "</svg>"))


def roofline(
    dots: Sequence[tuple[float, Dot]],
    engines: Sequence[str],
    bandwidth: float,
    roofs: Sequence[tuple[str, float]],
    ticks: Callable[[float], str],
    *,
    title: str,
) -> str:
    """Operations a second over operations a byte, below the roof that the ceilings make.

    `dots` come with their operations a byte; `roofs` are the rates of multiplying matrices.
    """
    height, left, right, top, bottom = 250, 48, 20, 10, 32
    top_rate = max(rate for _, rate in roofs)
    across = decades([x for x, _ in dots] + [top_rate / bandwidth])
    upward = decades([dot.value for _, dot in dots] + [top_rate])
    x_axis = Axis(*across, left, WIDTH - right, True)
    y_axis = Axis(*upward, height - bottom, top, True)
    parts = [_opened(height, title)]
    for value in _powers(across):
        x = x_axis.at(value)
        parts.append(f'<path class="grid" d="M{x:.1f} {top}V{height - bottom}"/>')
        parts.append(_text(x, height - bottom + 12, f"{value:g}", "tick", "middle"))
    for value in _powers(upward):
        y = y_axis.at(value)
        parts.append(f'<path class="grid" d="M{left} {y:.1f}H{WIDTH - right}"/>')
        parts.append(_text(left - 4, y + 3, ticks(value), "tick", "end"))
    parts.append(_text((left + WIDTH) / 2, height - 4, "operations a byte", "tick", "middle"))
    start = max(across[0], upward[0] / bandwidth)
    for name, rate in roofs:
        knee = rate / bandwidth
        points = [(start, start * bandwidth), (knee, rate), (across[1], rate)]
        path = "L".join(f"{x_axis.at(x):.1f} {y_axis.at(y):.1f}" for x, y in points)
        parts.append(f'<path class="roof" d="M{path}"/>')
        parts.append(_text(WIDTH - right, y_axis.at(rate) + 11, name, "detail", "end"))
    for x, dot in dots:
        parts.append(_mark(dot.engine, x_axis.at(x), y_axis.at(dot.value), engines, dot.says))
    return "".join((*parts, "</svg>"))


def _powers(ends: tuple[float, float]) -> list[float]:
    """The powers of ten between two of them; only some where there are many."""
    low, high = round(log10(ends[0])), round(log10(ends[1]))
    step = max(1, ceil((high - low) / 6))
    return [10.0**power for power in range(low, high + 1, step)]


def _opened(height: float, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>"
    )


def _text(x: float, y: float, words: str, style: str, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} class="{style}">{escape(words)}</text>'


def _mark(engine: str, x: float, y: float, engines: Sequence[str], says: str = "") -> str:
    number = engines.index(engine) % len(MARKS)
    title = f"<title>{escape(says)}</title>" if says else ""
    shape = MARKS[number](x, y)
    tag = shape[1:].partition(" ")[0]
    return f'{shape} class="mark m{number}">{title}</{tag}>'


def _polygon(*points: tuple[float, float]) -> str:
    return f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"'


def _shortened(words: str, most: int) -> str:
    return words if len(words) <= most else f"{words[: most - 1]}…"
