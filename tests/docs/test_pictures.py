"""The pictures in docs/pictures show what the commands print today, and ask no other host."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from anydevice._core.finding import Reason
from anydevice._report.diagnosis import CAUSES, Cause

pytest.importorskip("pty", reason="the pictures are made in a terminal of Unix")

ROOT = Path(__file__).parents[2]
LARGEST = 20_000
OTHER = Cause("another name", "another meaning", "other advice")
NAMES = ("bench", "boxes", "chat", "doctor", "overview", "plan", "prove", "training", "watch")


@pytest.fixture(scope="module")
def maker() -> Iterator[ModuleType]:
    """The program that makes the pictures."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import make_pictures

        yield make_pictures
    finally:
        sys.path.remove(str(ROOT / "docs"))


def test_these_are_all(maker: ModuleType) -> None:
    assert sorted(maker.PICTURES) == sorted(NAMES)
    assert sorted(path.stem for path in maker.FOLDER.glob("*.svg")) == sorted(NAMES)


def test_every_picture_is_shown() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "".join(path.read_text("utf-8") for path in pages)
    assert [name for name in NAMES if f"pictures/{name}.svg)" not in text] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_no_older_than_what_it_shows(maker: ModuleType, name: str) -> None:
    shown = maker.kept(name)["shows"]
    assert shown == maker.fingerprint(maker.PICTURES[name]), (
        f"docs/pictures/{name}.svg shows what is printed no longer: make pictures ARGS={name}"
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_small_and_needs_nothing_else(maker: ModuleType, name: str) -> None:
    path = maker.FOLDER / f"{name}.svg"
    text = path.read_text("utf-8")
    assert path.stat().st_size <= LARGEST
    root = ElementTree.fromstring(text)
    assert float(root.attrib["width"]) > 300
    namespace = "http://www.w3.org/2000/svg"
    drawn = re.sub(r"(<text[^>]*>)[^<]*", r"\1", text)  # an address that is shown fetches nothing
    assert set(re.findall(r"\w+://[^\"' <)]*", drawn)) == {namespace}
    assert "@import" not in text
    assert not list(root.iter(f"{{{namespace}}}script"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", json.loads(root[0].text or "")["made"])


@pytest.mark.parametrize(
    ("name", "changed", "value"),
    [
        ("overview", "anydevice.cli.overview.NEXT", "Go on with: anydevice doctor"),
        ("doctor", "anydevice.cli.doctor.USABLE", "OK"),
        (
            "doctor",
            "anydevice._machine.engines.diagnosis.why_not",
            lambda *_: Reason("failed", "no"),
        ),
        ("doctor", "anydevice._report.diagnosis.CAUSES", CAUSES | {"cpu_only_build": OTHER}),
        ("plan", "anydevice._report.plan.format_size", str),
        ("watch", "anydevice.cli.watch._GAP", "   "),
        ("chat", "anydevice.cli.chat.described", lambda reply: "fast"),
        ("prove", "anydevice.cli.prove._words", lambda found: "yes"),
        ("training", "anydevice._train.history.History.plot", "other"),
        ("bench", "anydevice._report.benchmark.format_rate", lambda *_: "fast"),
        ("boxes", "proof_boxes.MARGIN", 0.02),
    ],
)
def test_a_change_of_what_is_printed_is_noticed(
    maker: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, changed: str, value: Any
) -> None:
    if value == "other":

        def plot(history: object, path: Path) -> None:
            path.write_text("<svg xmlns=''></svg>")

        value = plot
    monkeypatch.setattr(changed, value)
    assert maker.kept(name)["shows"] != maker.fingerprint(maker.PICTURES[name])


def test_what_a_terminal_shows_is_drawn_where_it_stands(maker: ModuleType) -> None:
    from terminal_picture import drawn, screen_of, text_of

    shown = screen_of("loading 1\rloading 2\r\x1b[K\x1b[32mgood\x1b[0m   <3>\r\nabcdefghijklm", 12)
    assert text_of(shown) == "good   <3>\nabcdefghijkl\nm"
    picture = drawn(shown, "title", columns=12)
    assert re.search(r'<text x="16" y="[\d.]+" textLength="31.2" fill="#56d364">good<', picture)
    assert "&lt;3&gt;" in picture
    moved = screen_of("\x1b[?1049h\x1b[2J\x1b[1;1Hone\x1b[K\x1b[2;1Htwo\x1b[1;1Hsix\x1b[K", 80)
    assert text_of(moved) == "six\ntwo"
