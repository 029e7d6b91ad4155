"""Plots as SVG text, small enough to be read on a phone: dots, bars, curves, a roofline.

Everything that comes from outside is escaped here. Marks have the colours of the page that they are
on: the style of the class `m0` is that of the first series. A picture in a file of its own carries
its style, for light and dark screens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from math import ceil, floor, isfinite, log10

from anydevice._core.record import Record
from anydevice._core.text import printable, shortened

WIDTH = 340
"""Units across: about the pixels of a phone, so that text keeps its size there."""

_LABELS, _RIGHT, _ROW, _TOP, _BOTTOM = 122, 18, 31, 18, 6
_MARK = 5
"""Half the width of the widest mark: texts keep so far from the axis on which marks lie."""
_BETWEEN = 11
"""Units between the lines of texts below each other."""
_SIZE, _SMALL = 11.5, 10
"""Units of the letters of names, and of all other texts."""
_LARGEST = 1e300
"""Beyond it, a value is as good as infinite: axes end somewhere."""
_MOST_MARKS = 40
"""A curve of more points has a mark at its ends alone."""

COLOURS = """
:root { --ink: #1d2329; --soft: #5c6873; --paper: #ffffff; --panel: #f4f6f8; --line: #d8dee4;
  --good: #15803d; --bad: #b91c1c;
  --m0: #0b62c4; --m1: #c2410c; --m2: #7c3aed; --m3: #15803d; --m4: #a16207; --m5: #0e7490; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaee; --soft: #9aa7b3; --paper: #14181c; --panel: #1e242a; --line: #39434d;
    --good: #62d58b; --bad: #ff8a80;
    --m0: #6db1ff; --m1: #ff9b66; --m2: #c4a3ff; --m3: #62d58b; --m4: #e5c04d; --m5: #5cd3ea; } }
"""
"""What the colours of pages and pictures are, on light and on dark screens."""

_RULES = {
    "text": f"fill: var(--ink); font-size: {_SIZE}px",
    ".tick": f"fill: var(--soft); font-size: {_SMALL}px",
    ".detail": f"fill: var(--soft); font-size: {_SMALL}px",
    ".grid": "stroke: var(--line); stroke-width: 1; fill: none",
    ".rule": "stroke: var(--line); stroke-width: 1; fill: none",
    ".roof": "stroke: var(--soft); stroke-width: 1.5; fill: none",
    ".end": "stroke: var(--ink); stroke-width: 2; fill: none",
    ".mark": "fill-opacity: .85; stroke: var(--panel); stroke-width: .6",
    ".curve": "stroke-width: 1.8; fill: none; stroke-linejoin: round",
    ".dashed": "stroke-dasharray: 5 3",
    **{f".m{number}": f"fill: var(--m{number})" for number in range(6)},
    **{f".c{number}": f"stroke: var(--m{number})" for number in range(6)},
}


def rules(within: str) -> str:
    """The style of the parts of plots, in whatever a selector names."""
    return "".join(f"{within} {selector} {{ {how} }}\n" for selector, how in _RULES.items())


def safe(text: str) -> str:
    r"""A text of anybody's as HTML has it: nothing in it is a tag or a control character.

    >>> print(safe("a<b>\x00"))
    a&lt;b&gt;\x00
    """
    return escape(printable(text, lines=True))


_WIDTHS = {
    **dict.fromkeys("%@mMwW×…", 1.0),
    **dict.fromkeys("ABCDEFGHJKLNOPQRSTUVXYZ_<>=+", 0.8),
    **dict.fromkeys(" .,:;'|!iIjl()[]/-–", 0.4),
}
"""How wide letters are over their height, where that is not 0.64."""

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
    """A named line through points; where it says what is possible at most, `limit`."""

    name: str
    points: Sequence[tuple[float, float]]
    limit: bool = False


class Bar(Record):
    """One row of pieces, each of a part and as long as its value; `ceiling` is what there is."""

    name: str
    detail: str
    pieces: tuple[tuple[str, float], ...]
    ceiling: float | None = None


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
            low = log10(self.low)
            part = (log10(held) - low) / (log10(self.high) - low)
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


def legend(shown: Sequence[str], engines: Sequence[str], *, bars: bool = False) -> str:
    """Those of the engines that are shown, each with its mark and colour; squares for `bars`."""
    items = "".join(
        '<li><svg viewBox="0 0 12 12" width="12" height="12" aria-hidden="true">'
        f"{_swatch(engine, engines) if bars else _mark(Dot(engine), 6, 6, engines)}</svg> "
        f"{safe(engine)}</li>"
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
        parts += _names(middle, line.name, line.detail)
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
    longest = max(_wide(name) for name, _ in roofs)
    left, right, top, floor_at, height = 54, WIDTH - _MARK - 3 - longest, 10, 218, 250
    top_rate = max(rate for _, rate in roofs)
    across = decades([x for x, _ in dots] + [top_rate / bandwidth])
    upward = decades([dot.value for _, dot in dots] + [top_rate])
    x_axis, y_axis = Axis(*across, left, right, True), Axis(*upward, floor_at, top, True)
    below = [(value, f"{value:g}") for value in powers(across)]
    beside = [(value, ticks(value)) for value in powers(upward)]
    parts = [
        _opened(height, title),
        *_upright(x_axis, below, top, floor_at, floor_at + 14),
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


def bar_chart(
    bars: Sequence[Bar],
    parts: Sequence[str],
    words: Callable[[float], str],
    unit: tuple[float, str],
    *,
    title: str,
) -> str:
    """Rows of stacked pieces from 0 on, ticks in a unit above, a line across at each ceiling."""
    ends = [each.ceiling or 0.0 for each in bars]
    ends += [sum(value for _, value in each.pieces) for each in bars]
    most = max(ends) or unit[0]
    height = _TOP + _ROW * len(bars) + _BOTTOM
    marks = [mark for mark in _even(0.0, most / unit[0]) if mark * unit[0] <= most]
    ticks = [(mark * unit[0], f"{mark:g}") for mark in marks]
    ticks[-1] = (ticks[-1][0], f"{ticks[-1][1]} {unit[1]}")
    last, label = ticks[-1]
    room = WIDTH - _LABELS - _wide(label) / 2  # for what ends at the last tick, in its middle
    long = min(WIDTH - _LABELS - _RIGHT, room * most / last if last else room)
    scale = Axis(0.0, most, _LABELS, _LABELS + long)
    drawn = [_opened(height, title), *_upright(scale, ticks, _TOP - 3, height - _BOTTOM, 10)]
    for number, each in enumerate(bars):
        middle, at = _TOP + _ROW * (number + 0.5), 0.0
        drawn += _names(middle, each.name, each.detail)
        for part, value in each.pieces:
            start, at = scale.at(at), at + value
            place = f'x="{start:.1f}" y="{middle - 6:.1f}" height="12"'
            place += f' width="{scale.at(at) - start:.1f}" class="mark m{parts.index(part) % 6}"'
            drawn.append(f"<rect {place}><title>{safe(f'{part}: {words(value)}')}</title></rect>")
        if each.ceiling is not None:
            end, said = scale.at(each.ceiling), f"{each.name}: {words(each.ceiling)} there"
            line = f'<path class="end" d="M{end:.1f} {middle - 10:.1f}V{middle + 10:.1f}">'
            drawn.append(f"{line}<title>{safe(said)}</title></path>")
    return "".join((*drawn, "</svg>"))


def unit_of(size: float) -> tuple[float, str]:
    """The bytes of the unit that a size is said in, and its name.

    >>> unit_of(3e9)
    (1073741824.0, 'GiB')
    """
    power = min(5, max(0, floor(log10(max(size, 1.0)) / log10(1024))))
    return 1024.0**power, ("B", "KiB", "MiB", "GiB", "TiB", "PiB")[power]


def line_chart(
    curves: Sequence[Curve],
    *,
    title: str,
    below: str,
    words: Callable[[float], str] | None = None,
    ends: tuple[float, float] | None = None,
    start: float | None = None,
    logarithmic: bool = False,
    style: str = "",
) -> str:
    """Curves over one axis, which `below` names, with their names above the plot.

    Values are on a logarithmic axis where they are all above 0 and span more than a factor of 20,
    unless the `ends` of the axis are given; the axis below begins at `start`, if that is given, and
    may be `logarithmic`. NaN and infinities interrupt a curve. A picture in a file of its own has a
    `style`.
    """
    points = [point for curve in curves for run in _runs(curve) for point in run] or [(1.0, 0.0)]
    across = sorted({x for x, _ in points} | ({start} if start is not None else set()))
    low, high = ends or (min(y for _, y in points), max(y for _, y in points))
    by_tens = ends is None and low > 1 / _LARGEST and high / low > 20
    marks = powers(decades([low, high])) if by_tens else _even(low, high)
    beside = _labels(marks, words)
    names = list(_places(curves))
    under = _below(across, logarithmic)
    left = _MARK + 3 + max(map(_wide, beside))
    right = WIDTH - max(14, _wide(under[-1][1]) / 2)
    top = 12 + (14 * (names[-1][1] + 1) if len(curves) > 1 else 0)
    bottom = top + 176
    x_axis = Axis(across[0], across[-1], left, right, logarithmic)
    y_axis = Axis(min(low, marks[0]), max(high, marks[-1]), bottom, top, by_tens)
    parts = [
        _opened(bottom + 34, title, style),
        *_level(y_axis, list(zip(marks, beside, strict=True)), left, right),
        *_upright(x_axis, under, bottom, bottom + 4, bottom + 15),
        _text((left + right) / 2, bottom + 29, below, "tick", "middle"),
    ]
    for number, (curve, (start, row)) in enumerate(zip(curves, names, strict=True)):
        look = _look(curve, number)
        if len(curves) > 1:
            line = 10.0 + 14 * row
            parts.append(f'<path class="{look}" d="M{start:.1f} {line - 3.5}h18"/>')
            parts.append(_text(start + 23, line, _short(curve.name), "detail"))
        for run in _runs(curve):
            path = _path(run, x_axis, y_axis)
            if curve.limit and len(across) == 1:
                path = f"M{left:.1f} {y_axis.at(run[0][1]):.1f}H{right:.1f}"
            parts.append(f'<path class="{look}" d="{path}"/>')
            marked = run if len(curve.points) <= _MOST_MARKS else [run[0], run[-1]]
            for x, y in () if curve.limit else marked:
                says = f"{curve.name}, {below} {x:,.6g}: {words(y) if words else f'{y:.6g}'}"
                dot = Dot(curve.name, y, says)
                order = [each.name for each in curves]
                parts.append(_mark(dot, x_axis.at(x), y_axis.at(y), order))
    return "".join((*parts, "</svg>"))


def picture(curves: Sequence[Curve], *, title: str, below: str) -> str:
    """A line chart that is a file of its own, which carries its style."""
    page = "svg { background: var(--panel); font-family: system-ui, sans-serif }\n"
    return line_chart(curves, title=title, below=below, style=COLOURS + page + rules("svg"))


def powers(ends: tuple[float, float]) -> list[float]:
    """The powers of ten between two of them; only some where there are many."""
    low, high = round(log10(ends[0])), round(log10(ends[1]))
    step = max(1, ceil((high - low) / 6))
    return [10.0**power for power in range(low, high + 1, step)]


def _upright(axis: Axis, ticks: Ticks, top: float, bottom: float, words_at: float) -> Iterator[str]:
    """Lines with their labels; a label that would run into the one before it is left out.

    The last label stays, and the one before it goes.
    """
    told: list[tuple[float, str]] = []
    for value, words in ticks:
        x = axis.at(value)
        yield f'<path class="grid" d="M{x:.1f} {top}V{bottom}"/>'
        while told and _run_together(told[-1], (x, words)) and value == ticks[-1][0]:
            told.pop()
        if not told or not _run_together(told[-1], (x, words)):
            told.append((x, words))
    yield from (_text(x, words_at, words, "tick", "middle") for x, words in told)


def _run_together(one: tuple[float, str], other: tuple[float, str]) -> bool:
    """Whether two centred labels of a line would touch."""
    return other[0] - one[0] < (_wide(one[1]) + _wide(other[1])) / 2 + 4


def _names(middle: float, name: str, detail: str) -> Iterator[str]:
    """What a row is called, and the detail below it, left of its marks."""
    room = _LABELS - _MARK - 2
    yield _text(0, middle - 2, _fitting(name, room, _SIZE), "name")
    yield _text(0, middle + 9, _fitting(detail, room), "detail")


def _wide(words: str, size: float = _SMALL) -> float:
    """The units across that a text takes, about: in a wide font."""
    return size * sum(_WIDTHS.get(letter, 0.64) for letter in words)


def _fitting(words: str, room: float, size: float = _SMALL) -> str:
    """The text, without its middle if it is wider than the room for it."""
    words = printable(words)
    most = len(words)
    while most > 1 and _wide(shortened(words, most), size) > room:
        most -= 1
    return shortened(words, most)


def _below(values: Sequence[float], logarithmic: bool) -> Ticks:
    """The ticks of the axis below: the values themselves, or round numbers between them.

    Of integers, such as epochs, the first and the last have one.
    """
    first, last = values[0], values[-1]
    if logarithmic:
        return [(value, f"{value:,g}") for value in values]
    between = [mark for mark in _even(first, last) if first <= mark <= last]
    if all(value == round(value) for value in values):
        between = sorted({first, last, *(round(mark) for mark in between)})
    return [(mark, f"{mark:,g}") for mark in between]


def _labels(marks: Sequence[float], words: Callable[[float], str] | None) -> list[str]:
    """The labels of marks, with as many digits as it takes to tell them apart."""
    if words is not None:
        return [words(mark) for mark in marks]
    several = ([_number(mark, digits) for mark in marks] for digits in range(4, 13))
    return next(
        (labels for labels in several if len(set(labels)) == len(marks)), [*map(str, marks)]
    )


def _number(number: float, digits: int) -> str:
    """A number with so many digits, and without an exponent below ten millions.

    >>> _number(60000.0, 4), _number(0.25, 4), _number(1e9, 4)
    ('60,000', '0.25', '1e+09')
    """
    if 1e3 <= abs(number) < 1e7 and number == round(number):
        return f"{number:,.0f}"
    return f"{number:.{digits}g}"


def _places(curves: Sequence[Curve]) -> Iterator[tuple[float, int]]:
    """Where the names of curves stand above a plot: units from the left, and in which row."""
    at, row = 8.0, 0
    for curve in curves:
        wide = 23 + _wide(_short(curve.name)) + 12
        if at > 8 and at + wide > WIDTH:
            at, row = 8.0, row + 1
        yield at, row
        at += wide


def _short(name: str) -> str:
    return _fitting(name, WIDTH / 2)


def _look(curve: Curve, number: int) -> str:
    """Who sees no colours tells every second curve by its dashes, and each by its marks."""
    if curve.limit:
        return "roof dashed"
    return f"curve c{number % 6}{' dashed' if number % 2 else ''}"


def _level(axis: Axis, ticks: Ticks, left: float, right: float) -> Iterator[str]:
    for value, words in ticks:
        y = axis.at(value)
        yield f'<path class="grid" d="M{left:.1f} {y:.1f}H{right}"/>'
        yield _text(left - _MARK - 2, y + 3, words, "tick", "end")


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


def _opened(height: float, title: str, style: str = "") -> str:
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


def _mark(dot: Dot, x: float, y: float, engines: Sequence[str]) -> str:
    number = engines.index(dot.engine) % len(MARKS)
    title = f"<title>{safe(dot.says)}</title>" if dot.says else ""
    shape = MARKS[number](x, y)
    tag = shape[1:].partition(" ")[0]
    return f'{shape} class="mark m{number}">{title}</{tag}>'


def _swatch(part: str, parts: Sequence[str]) -> str:
    number = parts.index(part) % 6
    return f'<rect x="1" y="1" width="10" height="10" class="mark m{number}"/>'


def _polygon(*points: tuple[float, float]) -> str:
    return f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"'


def _runs(curve: Curve) -> list[list[tuple[float, float]]]:
    """The points of a curve without NaN and infinities, which interrupt it.

    >>> _runs(Curve("loss", [(1, 3.0), (2, float("nan")), (3, 2.0), (4, 1.0)]))
    [[(1, 3.0)], [(3, 2.0), (4, 1.0)]]
    """
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in curve.points:
        if isfinite(x) and abs(y) < _LARGEST:
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


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
    if low == high:
        start, stop = start - 1, start + 1
    marks = (float(f"{number * step:.12g}") for number in range(start, max(stop, start + 1) + 1))
    return list(dict.fromkeys(marks))
