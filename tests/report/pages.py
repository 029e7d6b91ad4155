"""What holds for every page that the library writes, whatever it is about."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple
from xml.etree import ElementTree

EVIL = "<script>alert('x')</script>&\"\x00"
"""The name that a model, a file or a metric may have."""

_HEAD = "<!DOCTYPE html>\n"


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


def parsed(text: str) -> ElementTree.Element:
    """The page as XML: every tag is closed and every attribute quoted."""
    assert text.startswith(_HEAD)
    return ElementTree.fromstring(text.removeprefix(_HEAD))


def checked(text: str) -> ElementTree.Element:
    """A page that is well-formed, asks for nothing, is for light and dark, and whose labels lie
    apart from each other and from every mark."""
    root = parsed(text)
    assert not re.search(r"(?:src|href)\s*=|url\(|@import|<script|<link|https?:", text)
    assert "default-src 'none'" in text
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in text
    assert "prefers-color-scheme: dark" in text
    for plot in root.findall(".//figure/svg"):
        check_labels(plot)
    return root


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


def said(root: ElementTree.Element) -> str:
    """All of the text of a page but its style."""
    body = root.find("body")
    assert body is not None
    return " ".join(" ".join(body.itertext()).split())


def rows(root: ElementTree.Element) -> list[list[str]]:
    """The cells of its tables."""
    return [["".join(cell.itertext()) for cell in row] for row in root.findall(".//tbody/tr")]


def facts(root: ElementTree.Element) -> dict[str, str]:
    """The names and values beside its plots."""
    names, values = root.findall(".//dt"), root.findall(".//dd")
    return {name.text or "": value.text or "" for name, value in zip(names, values, strict=True)}


def figure(root: ElementTree.Element, title: str) -> ElementTree.Element:
    """The figure of that title."""
    [found] = [each for each in root.findall(".//figure") if each.findtext("figcaption/b") == title]
    return found


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
