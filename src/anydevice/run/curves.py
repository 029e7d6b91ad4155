"""Curves of losses as SVG text: few lines, readable on a phone, by day and by night."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from anydevice.core.record import Record

_WIDTH, _HEIGHT = 480, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 14, 34, 34
_COLOURS = ("#0b6bcb", "#c2410c")
_DASHES = ("none", "5 3")  # who sees no colours tells the lines apart as well
_STYLE = (
    "svg{background:#fff;color:#222;font:12px system-ui,sans-serif}"
    ".grid{stroke:#8884;fill:none}text{fill:currentColor}.soft{opacity:.7}"
    "@media(prefers-color-scheme:dark){svg{background:#16181c;color:#e6e6e6}}"
)


class Curve(Record):
    """A named line through points of an epoch and a loss."""

    name: str
    points: Sequence[tuple[float, float]]


def picture_of(curves: Sequence[Curve], said: str) -> str:
    """The curves as one SVG picture, with `said` above it.

    Losses are on a logarithmic axis where they are all above 0 and span more than a factor of 20.
    What is no finite number is left out.
    """
    points = [point for curve in curves for point in _finite(curve)] or [(1.0, 0.0)]
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    logarithmic = low > 0 and high / low > 20
    marks = _powers(low, high) if logarithmic else _even(low, high)
    low, high = min(low, marks[0]), max(high, marks[-1])

    def across(x: float) -> float:
        share = (x - first) / (last - first) if last > first else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def upward(y: float) -> float:
        ends = [math.log(v) for v in (low, high, y)] if logarithmic else [low, high, y]
        share = (ends[2] - ends[0]) / (ends[1] - ends[0])
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        f"<title>{escape(said)}</title><style>{_STYLE}</style>",
        _text(_LEFT, 18, said, "start"),
    ]
    for mark in marks:
        y = upward(mark)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{mark:.4g}", "end"))
    epochs = sorted({first, last, *(round(x) for x in _even(first, last) if first < x < last)})
    below = _HEIGHT - _BOTTOM + 16
    parts += [_text(across(epoch), below, f"{epoch:g}", "middle") for epoch in epochs]
    parts.append(_text((_WIDTH + _LEFT) / 2, _HEIGHT - 4, "epoch", "middle"))
    for number, curve in enumerate(curves):
        parts += _drawn(curve, number, [(across(x), upward(y)) for x, y in _finite(curve)])
    return "".join((*parts, "</svg>"))


def page_of(curves: Sequence[Curve], said: str) -> str:
    """The picture in a page of its own, which needs nothing else."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>Training</title>'
        "<style>body{margin:0 auto;max-width:60rem}</style>"
        f"{picture_of(curves, said)}</html>"
    )


def _drawn(curve: Curve, number: int, points: Sequence[tuple[float, float]]) -> list[str]:
    look = f'stroke="{_COLOURS[number]}" stroke-dasharray="{_DASHES[number]}"'
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    at = _WIDTH - _RIGHT - 150 + 80 * number
    parts = [f'<path d="M{at} 26h18" stroke-width="2" {look}/>', _text(at + 22, 30, curve.name)]
    if points:
        parts.append(f'<path d="M{path}" fill="none" stroke-width="2" {look}/>')
        x, y = points[-1]
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_COLOURS[number]}"/>')
    return parts


def _finite(curve: Curve) -> list[tuple[float, float]]:
    return [(x, y) for x, y in curve.points if math.isfinite(y)]


def _powers(low: float, high: float) -> list[float]:
    """The powers of ten around two numbers above 0."""
    ends = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**power for power in range(ends[0], ends[1] + 1)]


def _even(low: float, high: float) -> list[float]:
    """Four to eight round numbers at equal distances, around two numbers.

    >>> _even(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    span = (high - low) or abs(high) or 1.0
    rough = span / 5
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999)
    start, stop = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(start, max(stop, start + 1) + 1)]


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="soft" {place}>{escape(words)}</text>'
