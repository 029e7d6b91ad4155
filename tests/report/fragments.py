"""Reads notebook output and plots: tags that are closed, rows of tables, labels that lie apart."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import combinations
from typing import Any, NamedTuple
from xml.etree import ElementTree

EVIL = "<script>alert('x')</script>&\"\x00"
"""The name that a model, a file or a metric may have."""

VOID = ("br", "meta", "hr", "img")


class Fragment(HTMLParser):
    """The tags and texts of a fragment; raises where a tag is not closed in its turn."""

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self.texts: list[str] = []
        self.feed(fragment)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "br" and self.rows:
            self.rows[-1][-1] += "\n"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["style"]:
            return
        self.texts.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def shown(value: Any) -> Fragment:
    """What a notebook shows of a value."""
    return Fragment(value._repr_html_())


class Box(NamedTuple):
    """Where something lies in a picture, and what it is."""

    left: float
    top: float
    right: float
    bottom: float
    what: str

    def meets(self, other: Box) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def check_labels(plot: ElementTree.Element) -> None:
    """No label of a plot lies on a mark, on another label, or beyond the picture."""
    labels, marks = list(_labels(plot)), list(_marks(plot))
    width, height = map(float, plot.get("viewBox", "").split()[2:])
    for label in labels:
        assert not [mark for mark in marks if label.meets(mark)], label
        assert label.left >= -1, label
        assert label.right <= width + 1, label
        assert label.bottom <= height + 1, label
    for one, other in combinations(labels, 2):
        assert not one.meets(other), (one, other)


def _labels(plot: ElementTree.Element) -> Iterator[Box]:
    for text in plot.findall("text"):
        x, y, words = float(text.get("x", "")), float(text.get("y", "")), text.text or ""
        size = 10 if text.get("class") in ("tick", "detail") else 11.5
        wide = size * sum(0.95 if letter in "%mMwW" else 0.55 for letter in words)
        left = x - {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor", "start")] * wide
        yield Box(left, y - 0.75 * size, left + wide, y, words)


def _marks(plot: ElementTree.Element) -> Iterator[Box]:
    for mark in plot.findall("*"):
        if "mark" not in mark.get("class", "").split():
            continue
        if mark.tag == "polygon":
            points = [tuple(map(float, each.split(","))) for each in mark.get("points", "").split()]
            xs, ys = [x for x, _ in points], [y for _, y in points]
            yield Box(min(xs), min(ys), max(xs), max(ys), "polygon")
            continue
        here = {name: float(mark.get(name, "0")) for name in ("cx", "cy", "r", "x", "y")}
        if mark.tag == "circle":
            x, y, r = here["cx"], here["cy"], here["r"]
            yield Box(x - r, y - r, x + r, y + r, "circle")
        else:
            wide, high = float(mark.get("width", "")), float(mark.get("height", ""))
            yield Box(here["x"], here["y"], here["x"] + wide, here["y"] + high, "rect")
