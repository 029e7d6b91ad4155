"""The documentation as a site: what its sources must have, and that the check of `make docs` sees.

What needs the built pages is in `tests/check_site.py`, which `make docs` runs at its end.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

import pytest

from anydevice._core.backends import BACKENDS
from tests import browser, check_site

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
PICTURES = sorted(DOCS.rglob("*.svg"))
SETTINGS = (ROOT / "mkdocs.yml").read_text("utf-8")

needs_browser = pytest.mark.skipif(
    browser.executable() is None, reason="no Chromium is installed, which measures widths"
)


def name(path: Path) -> str:
    return path.relative_to(DOCS).as_posix()


def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r": (\S+\.md)$", SETTINGS.partition("\nnav:")[2], re.MULTILINE)
    assert sorted(listed) == [path.name for path in PAGES]


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_a_page_shows_a_table_or_a_picture_before_it_explains(path: Path) -> None:
    if path.name == "reference.md":
        return  # its signatures are made when the site is built
    text = path.read_text("utf-8")
    first = re.search(r"^\|.*\|$|!\[", text, re.MULTILINE)
    assert first is not None
    assert first.start() < 1200, f"{first.start()} characters stand before {first[0]!r}"


def paints_its_background(picture: str, width: float, height: float) -> bool:
    """Whether the first thing that is drawn is a rectangle as large as the picture."""
    drawn = re.sub(r"<(title|desc|style|defs|metadata)\b.*?</\1>", "", picture, flags=re.DOTALL)
    first = re.search(r"<(?!svg|g\b|!|\?|/)[^>]+>", drawn)
    if first is None or not first[0].startswith("<rect"):
        return False
    sizes = dict(re.findall(r'\b(width|height)="([\d.]+)"', first[0]))
    return float(sizes["width"]) > 0.98 * width and float(sizes["height"]) > 0.98 * height


def test_a_picture_without_a_background_would_be_found() -> None:
    assert paints_its_background('<svg><rect width="10" height="9"/><text/></svg>', 10, 9)
    assert not paints_its_background('<svg><text/><rect width="10" height="9"/></svg>', 10, 9)
    assert not paints_its_background('<svg><rect width="3" height="9"/></svg>', 10, 9)


@pytest.mark.parametrize("path", PICTURES, ids=name)
def test_a_picture_can_be_read_on_any_background(path: Path) -> None:
    text = path.read_text("utf-8")
    view = re.search(r'viewBox="[-\d.]+ [-\d.]+ ([\d.]+) ([\d.]+)"', text)
    assert view is not None
    if not re.search(r"\bsvg ?{[^}]*\bbackground: ?[#v]", text):
        assert paints_its_background(text, *map(float, view.groups()))
    assert re.search(r'<title|aria-label="', text), "it has no words for those who cannot see it"
    assert path.stat().st_size < 60_000


def test_the_figures_of_the_start_page_and_of_comparisons_are_those_of_the_benchmarks() -> None:
    start = (DOCS / "index.md").read_text("utf-8").partition("## Measured")[2].partition("\n## ")[0]
    figures = re.findall(r"^\*\*(.+?)\*\*", start, re.MULTILINE)
    compared = (DOCS / "compare.md").read_text("utf-8")
    measured = (DOCS / "benchmarks.md").read_text("utf-8")
    assert len(figures) >= 5
    assert [figure for figure in figures if figure not in measured] == []
    ours = re.findall(r"\d+\.\d+(?= (?:×|s|tokens/s)\b| ×)", compared)
    assert len(ours) >= 4
    assert [figure for figure in ours if figure not in measured] == []


def test_the_effects_on_the_page_of_tuning_are_those_of_the_benchmarks() -> None:
    measured = (DOCS / "benchmarks.md").read_text("utf-8")
    sections = (DOCS / "tuning.md").read_text("utf-8").split("\n| measured")[1:]
    rows = [line for part in sections for line in part.split("\n\n")[0].splitlines()[2:]]
    assert len(rows) >= 9
    for _, effect, command in (row.strip("| ").split(" | ") for row in rows):
        same = [line for line in measured.splitlines() if command in line]
        numbers = re.findall(r"\d+\.\d+", effect)
        assert any(all(number in line for number in numbers) for line in same), (effect, command)


def test_the_page_on_where_this_goes_names_what_was_never_run() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", (DOCS / "roadmap.md").read_text("utf-8"), re.MULTILINE)
    untested = [name for name, backend in BACKENDS.items() if backend.tier == "untested"]
    assert set(untested) <= {code for row in rows for code in re.findall(r"`(\w+)`", row)}
    assert {"Windows", "macOS"} <= set(rows)


START = """<html><body><article>{}</article><a href="one/">One</a>
<a href="./">Home</a></body></html>"""
OTHER = """<html><body><article><h2 id="part">Part</h2></article><a href="../">Home</a>
<a href="../one/">One</a></body></html>"""


def site(folder: Path, body: str) -> tuple[Path, dict[str, check_site.Page]]:
    """A built site of two pages, the first of which holds `body`."""
    (folder / "one").mkdir()
    (folder / "index.html").write_text(START.format(body))
    (folder / "one" / "index.html").write_text(OTHER)
    (folder / "seen.svg").write_text("<svg/>")
    return folder, check_site.pages_of(folder)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('<a href="one/#part">there</a> <img src="seen.svg">', ""),
        ('<a href="https://example.org/">elsewhere</a>', ""),
        ('<a href="two/">gone</a>', "two/: no such file"),
        ('<img src="gone.svg">', "gone.svg: no such file"),
        ('<a href="one/#gone">gone</a>', "one/#gone: no such place"),
        ('<a href="#gone">gone</a>', "#gone: no such place"),
        ('<script src="https://example.org/x.js"></script>', "loads https://example.org/x.js"),
        ('<link rel="stylesheet" href="//example.org/x.css">', "loads //example.org/x.css"),
    ],
)
def test_broken_links_and_other_hosts_are_seen(tmp_path: Path, body: str, said: str) -> None:
    folder, pages = site(tmp_path, body)
    found = [*check_site.broken_links(folder, pages), *check_site.other_hosts(folder, pages)]
    assert [problem for problem in found if said not in problem] == []
    assert bool(found) == bool(said)


def test_a_style_that_asks_another_host_is_seen(tmp_path: Path) -> None:
    folder, pages = site(tmp_path, "")
    (folder / "site.css").write_text("a { background: url(https://example.org/x.png) }")
    assert list(check_site.other_hosts(folder, pages)) == [
        "site.css loads https://example.org/x.png"
    ]


def test_a_page_outside_the_navigation_is_seen(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for page in ("index", "one", "two", "three"):
        (tmp_path / "docs" / f"{page}.md").touch()
    (tmp_path / "site" / "two").mkdir(parents=True)
    (tmp_path / "site" / "two" / "index.html").write_text(OTHER)
    _, pages = site(tmp_path / "site", "")
    assert list(check_site.forgotten(pages, tmp_path / "docs")) == [
        "three.md was not built",
        "two.md is not in the navigation",
    ]


def test_all_that_the_start_page_loads_is_weighed(tmp_path: Path) -> None:
    folder, pages = site(tmp_path, '<img src="seen.svg"><script src="x.js"></script>')
    (folder / "x.js").write_bytes(b" " * 1000)
    (folder / "one" / "large.js").write_bytes(b" " * 5000)
    bare = (folder / "index.html").stat().st_size + len("<svg/>")
    assert check_site.weight(folder, pages[""]) == bare + 1000


FAULTS = {
    "none": "",
    "scrolls": '<div style="overflow-x: auto"><p style="width: 2000px">it scrolls</p></div>',
    "wide": '<div style="width: 1000px">wide</div>',
    "hidden": '<div style="overflow-x: hidden"><p style="width: 2000px">cut off</p></div>',
    "faint": "<style>@media (prefers-color-scheme: dark) { body { background: #222 } }</style>"
    '<p style="color: #111">not to be read in the dark</p>',
    "below": '<p style="height: 2000px">text</p>',
}
FOUND = {
    "wide": ["390 px", "390 px", "800 px", "800 px"],
    "hidden": ["390 px", "800 px", "1280 px"],
    "faint": ["dark"],
    "below": ["sight"],
}
PAGE = """<html><meta name="viewport" content="width=device-width"><body><article>
{}<table style="color: #777"><tr><td></td></tr></table></article></body></html>"""


def test_on_windows_no_browser_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    assert run_path(str(ROOT / "tests" / "browser.py"))["executable"]() is None


@needs_browser
@pytest.mark.soak
def test_a_browser_sees_what_is_too_wide_too_faint_or_too_far_down(tmp_path: Path) -> None:
    for fault, body in FAULTS.items():
        (tmp_path / f"{fault}.html").write_text(PAGE.format(body))
    problems = list(check_site.seen(tmp_path, [f"{fault}.html" for fault in FAULTS]))
    found = [(page, part) for page, parts in FOUND.items() for part in parts]
    assert len(problems) == len(found), "\n".join(problems)
    for problem, (page, part) in zip(problems, found, strict=True):
        assert problem.startswith(page)
        assert part in problem


@pytest.mark.soak
@pytest.mark.skipif(
    find_spec("mkdocs") is None, reason='mkdocs is not installed: pip install ".[docs]"'
)
def test_the_site_is_built_and_passes_its_check(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]
    subprocess.run([*command, str(tmp_path)], cwd=ROOT, check=True)
    check_site.main(tmp_path)
