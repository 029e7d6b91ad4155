"""Plots as SVG text, small enough to be read on a phone: rows of dots, a roofline, curves.

Everything that comes from outside is escaped here. Dots have the colours of the page that they are
on: the style of the class `m0` is that of the first engine. Curves carry their own style, for light
and dark screens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from math import ceil, floor, isfinite, log10

from anydevice.core.record import Record
from anydevice.core.text import shortened

WIDTH = 340
"""Units across: about the pixels of a phone, so that text keeps its size there."""

_LABELS, _RIGHT, _ROW, _TOP, _BOTTOM = 122, 18, 31, 18, 6
_MARK = 5
"""Half the width of the widest mark: texts keep so far from the axis on which marks lie."""
_BETWEEN = 11
"""Units between the lines of texts below each other."""

_COLOURS = ("#0b6bcb", "#c2410c")
_DASHES = ("none", "5 3")  # who sees no colours tells the lines apart as well
_CURVE_STYLE = (
    "svg{background:#fff;color:#222;font:12px system-ui,sans-serif}"
    ".grid{stroke:#8884;fill:none}text{fill:currentColor}.soft,.tick{opacity:.7}"
    "@media(prefers-color-scheme:dark){svg{background:#16181c;color:#e6e6e6}}"
)

MARKS: tuple[Callable[[float, float], str], ...] = (
    lambda x, y: f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.6"',
    lambda x, y: f'<rect x="{x - 3.2:.1f}" y="{y - 3.2:.1f}" width="6.4" height="6.4"',
    lambda x, y: _polygon((x, y - 4.4), (x + 4.2, y + 3.2), (x - 4.2, y + 3.2)),
    lambda x, y: _polygon((x, y - 4.6), (x + 4.6, y), (x, y + 4.6), (x - 4.6, y)),
    lambda x, y: _polygon((x, y + 4.4), (x + 4.2, y - 3.2), (x - 4.2, y - 3.2)),
    lambda x, y: f'<rect x="{x - 1.7:.1f}" y="{y - 4.6:.1f}" width="3.4" height="9.2"',
)
"""One shape an engine: who sees no colours tells them apart as well."""


Ticks = Sequence[tuple[float, str]]
"""Values of an axis, each with its label."""


class Dot(Record):
    """One value of one engine, with what is said where it is pointed at."""

    engine: str
    value: float = 0.0
    says: str = ""


class Line(Record):
    """One row of dots, with a name and a fainter detail below it."""

    name: str
    detail: str
    dots: tuple[Dot, ...]


class Curve(Record):
    """A named line through points of an epoch and a loss."""

    name: str
    points: Sequence[tuple[float, float]]


class Axis(Record):
    """Where values lie between two pixels; `low` and `high` are the values at its ends."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value; what lies beyond an end is drawn at it.

        Where both ends are one value, that is the middle.

        >>> Axis(0.0, 1.0, 100.0, 300.0).at(0.5), Axis(1.0, 100.0, 0.0, 10.0, True).at(10.0)
        (200.0, 5.0)
        """
        held = min(max(value, self.low), self.high)
        if self.low == self.high:
            part = 0.5
        elif self.logarithmic:
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
        f"{_mark(Dot(engine), 6, 6, engines)}</svg> {escape(engine)}</li>"
        for engine in shown
    )
    return f'<ul class="legend">{items}</ul>'


def dot_plot(
    lines: Sequence[Line],
    engines: Sequence[str],
    axis: tuple[float, float],
    ticks: Ticks,
    *,
    logarithmic: bool = False,
    title: str,
) -> str:
    """Rows of dots on one axis, with ticks above; one colour and shape an engine."""
    scale = Axis(*axis, _LABELS, WIDTH - _RIGHT, logarithmic)
    height = _TOP + _ROW * len(lines) + _BOTTOM
    parts = [_opened(height, title), *_upright(scale, ticks, _TOP - 3, height - _BOTTOM, 10)]
    for number, line in enumerate(lines):
        middle = _TOP + _ROW * (number + 0.5)
        parts.append(f'<path class="rule" d="M{_LABELS} {middle:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(_text(0, middle - 2, shortened(line.name, 18), "name"))
        parts.append(_text(0, middle + 9, shortened(line.detail, 20), "detail"))
        parts += [_mark(dot, scale.at(dot.value), middle, engines) for dot in line.dots]
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
    longest = max(len(name) for name, _ in roofs)
    left, right, top, floor_at, height = 48, WIDTH - 12 - 5.5 * longest, 10, 218, 250
    top_rate = max(rate for _, rate in roofs)
    across = decades([x for x, _ in dots] + [top_rate / bandwidth])
    upward = decades([dot.value for _, dot in dots] + [top_rate])
    x_axis, y_axis = Axis(*across, left, right, True), Axis(*upward, floor_at, top, True)
    below = [(value, f"{value:g}") for value in powers(across)]
    beside = [(value, ticks(value)) for value in powers(upward)]
    parts = [
        _opened(height, title),
        *_upright(x_axis, below, top, floor_at, floor_at + 12),
        *_level(y_axis, beside, left, right),
        _text((left + right) / 2, height - 4, "operations a byte", "tick", "middle"),
    ]
    start = max(across[0], upward[0] / bandwidth)
    for _, rate in roofs:
        points = [(start, start * bandwidth), (rate / bandwidth, rate), (across[1], rate)]
        parts.append(f'<path class="roof" d="{_path(points, x_axis, y_axis)}"/>')
    beside_roofs = _apart([y_axis.at(rate) + 3 for _, rate in roofs], _BETWEEN)
    for (name, _), y in zip(roofs, beside_roofs, strict=True):
        parts.append(_text(right + _MARK + 2, y, name, "detail"))
    parts += [_mark(dot, x_axis.at(x), y_axis.at(dot.value), engines) for x, dot in dots]
    return "".join((*parts, "</svg>"))


def picture_of(curves: Sequence[Curve], said: str, style: str = _CURVE_STYLE) -> str:
    """The curves as one SVG picture, with `said` above it; without a style, the page's counts.

    Losses are on a logarithmic axis where they are all above 0 and span more than a factor of 20.
    NaN and infinities are left out.
    """
    width, height, left, right, top, bottom = 480, 300, 54, 14, 34, 34
    points = [point for curve in curves for point in _finite(curve)] or [(1.0, 0.0)]
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    logarithmic = low > 0 and high / low > 20
    marks = powers(decades([low, high])) if logarithmic else _even(low, high)
    x_axis = Axis(first, last, left, width - right)
    y_axis = Axis(min(low, marks[0]), max(high, marks[-1]), height - bottom, top, logarithmic)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(said)}</title>{f'<style>{style}</style>' if style else ''}",
        _text(left, 18, said, "soft"),
        *_level(y_axis, [(mark, f"{mark:.4g}") for mark in marks], left, width - right),
    ]
    epochs = sorted({first, last, *(round(x) for x in _even(first, last) if first < x < last)})
    below = height - bottom + 16
    parts += [_text(x_axis.at(epoch), below, f"{epoch:g}", "soft", "middle") for epoch in epochs]
    parts.append(_text((width + left) / 2, height - 4, "epoch", "soft", "middle"))
    for number, curve in enumerate(curves):
        look = f'stroke="{_COLOURS[number]}" stroke-dasharray="{_DASHES[number]}"'
        at = width - right - 150 + 80 * number
        parts.append(f'<path d="M{at} 26h18" stroke-width="2" {look}/>')
        parts.append(_text(at + 22, 30, curve.name, "soft"))
        if drawn := _finite(curve):
            path = _path(drawn, x_axis, y_axis)
            parts.append(f'<path d="{path}" fill="none" stroke-width="2" {look}/>')
            x, y = x_axis.at(drawn[-1][0]), y_axis.at(drawn[-1][1])
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_COLOURS[number]}"/>')
    return "".join((*parts, "</svg>"))


def page_of(curves: Sequence[Curve], said: str) -> str:
    """The picture in a page of its own, which needs nothing else."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>Training</title>'
        "<style>body{margin:0 auto;max-width:60rem}</style>"
        f"{picture_of(curves, said)}</html>"
    )


def powers(ends: tuple[float, float]) -> list[float]:
    """The powers of ten between two of them; only some where there are many."""
    low, high = round(log10(ends[0])), round(log10(ends[1]))
    step = max(1, ceil((high - low) / 6))
    return [10.0**power for power in range(low, high + 1, step)]


def _upright(axis: Axis, ticks: Ticks, top: float, bottom: float, words_at: float) -> Iterator[str]:
    for value, words in ticks:
        x = axis.at(value)
        yield f'<path class="grid" d="M{x:.1f} {top}V{bottom}"/>'
        yield _text(x, words_at, words, "tick", "middle")


def _level(axis: Axis, ticks: Ticks, left: float, right: float) -> Iterator[str]:
    for value, words in ticks:
        y = axis.at(value)
        yield f'<path class="grid" d="M{left} {y:.1f}H{right}"/>'
        yield _text(left - 4, y + 3, words, "tick", "end")


def _apart(places: Sequence[float], least: float) -> list[float]:
    """The places, moved downward where two would lie nearer to each other than `least`.

    >>> _apart([30.0, 10.0, 12.0], 11.0)
    [32.0, 10.0, 21.0]
    """
    found: dict[int, float] = {}
    below = float("-inf")
    for number in sorted(range(len(places)), key=places.__getitem__):
        found[number] = below = max(places[number], below + least)
    return [found[number] for number in range(len(places))]


def _path(points: Sequence[tuple[float, float]], x_axis: Axis, y_axis: Axis) -> str:
    return "M" + "L".join(f"{x_axis.at(x):.1f} {y_axis.at(y):.1f}" for x, y in points)


def _opened(height: float, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>"
    )


def _text(x: float, y: float, words: str, style: str, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} class="{style}">{escape(words)}</text>'


def _mark(dot: Dot, x: float, y: float, engines: Sequence[str]) -> str:
    number = engines.index(dot.engine) % len(MARKS)
    title = f"<title>{escape(dot.says)}</title>" if dot.says else ""
    shape = MARKS[number](x, y)
    tag = shape[1:].partition(" ")[0]
    return f'{shape} class="mark m{number}">{title}</{tag}>'


def _polygon(*points: tuple[float, float]) -> str:
    return f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"'


def _finite(curve: Curve) -> list[tuple[float, float]]:
    return [(x, y) for x, y in curve.points if isfinite(y)]


def _even(low: float, high: float) -> list[float]:
    """Four to eight round numbers at equal distances, around two numbers.

    >>> _even(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    span = (high - low) or abs(high) or 1.0
    rough = span / 5
    size = 10 ** floor(log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999)
    start, stop = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(start, max(stop, start + 1) + 1)]
