"""Line charts as SVG text, small enough to be read on a phone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from math import ceil, floor, isfinite, log10

from anydevice._core.record import Record
from anydevice._core.text import printable, shortened

WIDTH = 340
"""Units across: about the pixels of a phone, so that text keeps its size there."""

_MARK = 5
"""Half the width of the widest mark: the distance of texts from an axis with marks."""
_SIZE, _SMALL = 11.5, 10
"""Units of the letters of names, and of all other texts."""
_LARGEST = 1e300
"""The largest value on an axis; larger ones interrupt a curve, as infinity does."""
_MAX_MARKS = 40
"""A curve with more points has marks only at its ends."""

COLOURS = """
:root { --ink: #1d2329; --soft: #5c6873; --paper: #ffffff; --panel: #f4f6f8; --line: #d8dee4;
  --good: #15803d; --bad: #b91c1c;
  --m0: #0b62c4; --m1: #c2410c; --m2: #7c3aed; --m3: #15803d; --m4: #a16207; --m5: #0e7490; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaee; --soft: #9aa7b3; --paper: #14181c; --panel: #1e242a; --line: #39434d;
    --good: #62d58b; --bad: #ff8a80;
    --m0: #6db1ff; --m1: #ff9b66; --m2: #c4a3ff; --m3: #62d58b; --m4: #e5c04d; --m5: #5cd3ea; } }
"""
"""Colours of pictures on light and on dark screens."""

_RULES = {
    "text": f"fill: var(--ink); font-size: {_SIZE}px",
    ".tick": f"fill: var(--soft); font-size: {_SMALL}px",
    ".detail": f"fill: var(--soft); font-size: {_SMALL}px",
    ".grid": "stroke: var(--line); stroke-width: 1; fill: none",
    ".mark": "fill-opacity: .85; stroke: var(--panel); stroke-width: .6",
    ".curve": "stroke-width: 1.8; fill: none; stroke-linejoin: round",
    ".dashed": "stroke-dasharray: 5 3",
    **{f".m{number}": f"fill: var(--m{number})" for number in range(6)},
    **{f".c{number}": f"stroke: var(--m{number})" for number in range(6)},
}


def rules(within: str) -> str:
    """Return the style of plots within a CSS selector."""
    return "".join(f"{within} {selector} {{ {style} }}\n" for selector, style in _RULES.items())


def safe(text: str) -> str:
    r"""Return text escaped for HTML, without tags and control characters.

    >>> print(safe("a<b>\x00"))
    a&lt;b&gt;\x00
    """
    return escape(printable(text, lines=True))


_WIDTHS = {
    **dict.fromkeys("%@mMwW×…", 1.0),
    **dict.fromkeys("ABCDEFGHJKLNOPQRSTUVXYZ_<>=+", 0.8),
    **dict.fromkeys(" .,:;'|!iIjl()[]/-–", 0.4),
}
"""Ratios of width to height of letters; all others have 0.64."""

MARKS: tuple[Callable[[float, float], str], ...] = (
    lambda x, y: f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.6"',
    lambda x, y: f'<rect x="{x - 3.2:.1f}" y="{y - 3.2:.1f}" width="6.4" height="6.4"',
    lambda x, y: _polygon((x, y - 4.4), (x + 4.2, y + 3.2), (x - 4.2, y + 3.2)),
    lambda x, y: _polygon((x, y - 4.6), (x + 4.6, y), (x, y + 4.6), (x - 4.6, y)),
    lambda x, y: _polygon((x, y + 4.4), (x + 4.2, y - 3.2), (x - 4.2, y - 3.2)),
    lambda x, y: f'<rect x="{x - 1.7:.1f}" y="{y - 4.6:.1f}" width="3.4" height="9.2"',
)
"""One shape a curve, for readers who see no colours."""


Ticks = Sequence[tuple[float, str]]
"""Values of an axis, each with its label."""


class Curve(Record):
    """A named line through points."""

    name: str
    points: Sequence[tuple[float, float]]


class Axis(Record):
    """A scale from `low` at pixel `start` to `high` at pixel `end`."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """Return the pixel of a value, clipped to the axis; a single value is in the middle.

        >>> Axis(0.0, 1.0, 100.0, 300.0).at(0.5), Axis(1.0, 100.0, 0.0, 10.0, True).at(10.0)
        (200.0, 5.0)
        """
        clipped = min(max(value, self.low), self.high)
        if self.low == self.high:
            part = 0.5
        elif self.logarithmic:
            low = log10(self.low)
            part = (log10(clipped) - low) / (log10(self.high) - low)
        else:
            part = (clipped - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)


def decades(values: Sequence[float]) -> tuple[float, float]:
    """Return the powers of ten below and above some positive values.

    >>> decades([0.3, 42.0]), decades([1.0])
    ((0.1, 100.0), (1.0, 10.0))
    """
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    return 10.0**low, 10.0 ** max(high, low + 1)


def line_chart(
    curves: Sequence[Curve],
    *,
    title: str,
    below: str,
    words: Callable[[float], str] | None = None,
    ends: tuple[float, float] | None = None,
    start: float | None = None,
    style: str = "",
) -> str:
    """Return curves over one axis, which `below` names; their names stand above the plot."""
    points = [point for curve in curves for run in _runs(curve) for point in run] or [(1.0, 0.0)]
    across = sorted({x for x, _ in points} | ({start} if start is not None else set()))
    low, high = ends or (min(y for _, y in points), max(y for _, y in points))
    by_tens = ends is None and low > 1 / _LARGEST and high / low > 20
    marks = powers(decades([low, high])) if by_tens else _even(low, high)
    beside = _labels(marks, words)
    names = list(_name_positions(curves))
    under = _below(across)
    left = _MARK + 3 + max(map(_wide, beside))
    right = WIDTH - max(14, _wide(under[-1][1]) / 2)
    top = 12 + (14 * (names[-1][1] + 1) if len(curves) > 1 else 0)
    bottom = top + 176
    x_axis = Axis(across[0], across[-1], left, right)
    y_axis = Axis(min(low, marks[0]), max(high, marks[-1]), bottom, top, by_tens)
    parts = [
        _opening_tag(bottom + 34, title, style),
        *_level(y_axis, list(zip(marks, beside, strict=True)), left, right),
        *_upright(x_axis, under, bottom, bottom + 4, bottom + 15),
        _text((left + right) / 2, bottom + 29, below, "tick", "middle"),
    ]
    for number, (curve, (start, row)) in enumerate(zip(curves, names, strict=True)):
        look = f"curve c{number % 6}{' dashed' if number % 2 else ''}"  # for the colour-blind
        if len(curves) > 1:
            line = 10.0 + 14 * row
            parts.append(f'<path class="{look}" d="M{start:.1f} {line - 3.5}h18"/>')
            parts.append(_text(start + 23, line, _short(curve.name), "detail"))
        for run in _runs(curve):
            path = "M" + "L".join(f"{x_axis.at(x):.1f} {y_axis.at(y):.1f}" for x, y in run)
            parts.append(f'<path class="{look}" d="{path}"/>')
            marked = run if len(curve.points) <= _MAX_MARKS else [run[0], run[-1]]
            for x, y in marked:
                tooltip = f"{curve.name}, {below} {x:,.6g}: {words(y) if words else f'{y:.6g}'}"
                shape = MARKS[number % len(MARKS)](x_axis.at(x), y_axis.at(y))
                style = f'class="mark m{number % 6}"'
                tag = shape[1:].partition(" ")[0]
                parts.append(f"{shape} {style}><title>{safe(tooltip)}</title></{tag}>")
    return "".join((*parts, "</svg>"))


def picture(curves: Sequence[Curve], *, title: str, below: str) -> str:
    """Return a line chart as a file of its own, which carries its style."""
    page = "svg { background: var(--panel); font-family: system-ui, sans-serif }\n"
    return line_chart(curves, title=title, below=below, style=COLOURS + page + rules("svg"))


def powers(ends: tuple[float, float]) -> list[float]:
    """Return the powers of ten between two of them; at most seven."""
    low, high = round(log10(ends[0])), round(log10(ends[1]))
    step = max(1, ceil((high - low) / 6))
    return [10.0**power for power in range(low, high + 1, step)]


def _upright(axis: Axis, ticks: Ticks, top: float, bottom: float, words_at: float) -> Iterator[str]:
    """Yield grid lines, and labels that do not overlap; the last label is never omitted."""
    labels: list[tuple[float, str]] = []
    for value, words in ticks:
        x = axis.at(value)
        yield f'<path class="grid" d="M{x:.1f} {top}V{bottom}"/>'
        while labels and _overlap(labels[-1], (x, words)) and value == ticks[-1][0]:
            labels.pop()
        if not labels or not _overlap(labels[-1], (x, words)):
            labels.append((x, words))
    yield from (_text(x, words_at, words, "tick", "middle") for x, words in labels)


def _overlap(one: tuple[float, str], other: tuple[float, str]) -> bool:
    return other[0] - one[0] < (_wide(one[1]) + _wide(other[1])) / 2 + 4


def _wide(words: str, size: float = _SMALL) -> float:
    """Return the approximate width of a text in a wide font."""
    return size * sum(_WIDTHS.get(letter, 0.64) for letter in words)


def _fitting(words: str, room: float, size: float = _SMALL) -> str:
    """Return the text, without its middle if it is wider than `room`."""
    words = printable(words)
    length = len(words)
    while length > 1 and _wide(shortened(words, length), size) > room:
        length -= 1
    return shortened(words, length)


def _below(values: Sequence[float]) -> Ticks:
    """Return round ticks of the axis below; of integers, the first and the last are ticks too."""
    first, last = values[0], values[-1]
    between = [mark for mark in _even(first, last) if first <= mark <= last]
    if all(value == round(value) for value in values):
        between = sorted({first, last, *(round(mark) for mark in between)})
    return [(mark, f"{mark:,g}") for mark in between]


def _labels(marks: Sequence[float], words: Callable[[float], str] | None) -> list[str]:
    """Return labels of marks, with as many digits as distinguish them."""
    if words is not None:
        return [words(mark) for mark in marks]
    several = ([_number(mark, digits) for mark in marks] for digits in range(4, 13))
    return next(
        (labels for labels in several if len(set(labels)) == len(marks)), [*map(str, marks)]
    )


def _number(number: float, digits: int) -> str:
    """Return a number with these significant digits, and no exponent below ten million.

    >>> _number(60000.0, 4), _number(0.25, 4), _number(1e9, 4)
    ('60,000', '0.25', '1e+09')
    """
    if 1e3 <= abs(number) < 1e7 and number == round(number):
        return f"{number:,.0f}"
    return f"{number:.{digits}g}"


def _name_positions(curves: Sequence[Curve]) -> Iterator[tuple[float, int]]:
    """Yield the position of each curve's name above the plot: from the left, and its row."""
    at, row = 8.0, 0
    for curve in curves:
        wide = 23 + _wide(_short(curve.name)) + 12
        if at > 8 and at + wide > WIDTH:
            at, row = 8.0, row + 1
        yield at, row
        at += wide


def _short(name: str) -> str:
    return _fitting(name, WIDTH / 2)


def _level(axis: Axis, ticks: Ticks, left: float, right: float) -> Iterator[str]:
    for value, words in ticks:
        y = axis.at(value)
        yield f'<path class="grid" d="M{left:.1f} {y:.1f}H{right}"/>'
        yield _text(left - _MARK - 2, y + 3, words, "tick", "end")


def _opening_tag(height: float, title: str, style: str = "") -> str:
    inside = f"<style>{style}</style>" if style else ""
    box, own = f"0 0 {WIDTH} {height:.0f}", ""
    if style:  # in a page, the name is known, and there is room around a plot
        box, own = f"-8 -8 {WIDTH + 12} {height + 12:.0f}", ' xmlns="http://www.w3.org/2000/svg"'
    return (
        f'<svg{own} viewBox="{box}" role="img" aria-label="{safe(title)}">'
        f"<title>{safe(title)}</title>{inside}"
    )


def _text(x: float, y: float, words: str, style: str, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} class="{style}">{safe(words)}</text>'


def _polygon(*points: tuple[float, float]) -> str:
    return f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"'


def _runs(curve: Curve) -> list[list[tuple[float, float]]]:
    """Return the runs of finite points of a curve."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in curve.points:
        if isfinite(x) and abs(y) < _LARGEST:
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _even(low: float, high: float) -> list[float]:
    """Return four to eight round numbers at equal distances, around two numbers.

    >>> _even(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    span = (high - low) or abs(high) or 1.0
    rough = span / 5
    size = 10 ** floor(log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999)
    start, stop = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    if low == high:
        start, stop = start - 1, start + 1
    marks = (float(f"{number * step:.12g}") for number in range(start, max(stop, start + 1) + 1))
    return list(dict.fromkeys(marks))
