"""Checks the documentation as it was built: links, hosts, weight, width and contrast.

    python -m tests.check_site site/

`make docs` builds the pages and calls this. Where a Chromium is installed, it also looks at each
page in three widths, light and dark: nothing may be wider than the page, unless it scrolls in a box
of its own, every text must stand out from what is behind it, and a table or a picture must be seen
without scrolling. Elsewhere it says what it left out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from tests import browser

HEAVIEST = 500_000
"""Bytes that the start page may load, uncompressed."""
WIDTHS = (390, 800, 1280)
SCHEMES = ("light", "dark")
HERE = Path(__file__).parent
FAINTEST = 4.5
"""The least contrast of a text, as WCAG 2 counts it; of a large one 3."""
LOADED = {"link": ("href",), **dict.fromkeys(("script", "img", "iframe", "source"), ("src",))}
LOADING = {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch", "modulepreload"}
LATER = re.compile(r'"search": ?"([^"]+)"')
"""The script of the search, which is started by another."""


@dataclass
class Page(HTMLParser):
    """What a page links to, what it loads, and the places in it."""

    path: Path
    address: str
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=lambda: {"", "__top"})

    def __post_init__(self) -> None:
        super().__init__()
        text = self.path.read_text("utf-8")
        self.feed(text)
        self.loads += LATER.findall(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag != "link" or LOADING & set(values.get("rel", "").split()):
            self.loads += [values[name] for name in LOADED.get(tag, ()) if values.get(name)]


def pages_of(site: Path) -> dict[str, Page]:
    """All pages by their address, such as `choosing/`."""
    found = {}
    for path in sorted(site.rglob("*.html")):
        address = path.relative_to(site).as_posix().removesuffix("index.html")
        found[address] = Page(path, address)
    return found


def broken_links(site: Path, pages: dict[str, Page]) -> Iterator[str]:
    """Links and pictures that lead nowhere, and anchors that no page has."""
    for page in pages.values():
        # The page for what is not found stands anywhere, so its addresses begin at the root.
        for link in () if page.address == "404.html" else (*page.links, *page.loads):
            if urlsplit(link).scheme or link.startswith("//"):
                continue
            target, anchor = urldefrag(urljoin("/" + page.address, link))
            target = unquote(target).removeprefix("/")
            if target in pages:
                if unquote(anchor) not in pages[target].anchors:
                    yield f"{page.address or 'the start page'}: {link}: no such place on that page"
            elif not (site / target).is_file():
                yield f"{page.address or 'the start page'}: {link}: no such file"


def other_hosts(site: Path, pages: dict[str, Page]) -> Iterator[str]:
    """What a page or a style asks another host for; links that a reader may follow do not count."""
    for page in pages.values():
        for load in page.loads:
            if urlsplit(load).netloc:
                yield f"{page.address or 'the start page'} loads {load}"
    for path in (*site.rglob("*.css"), *site.rglob("*.svg")):
        text = path.read_text("utf-8")
        for load in re.findall(r"""(?:url\(|@import |href=)["']?((?:https?:)?//[^"')\s]+)""", text):
            yield f"{path.relative_to(site)} loads {load}"


def forgotten(pages: dict[str, Page], docs: Path) -> Iterator[str]:
    """Pages that were not built, or that no other page's navigation has."""
    for path in sorted(docs.glob("*.md")):
        address = "" if path.stem == "index" else f"{path.stem}/"
        if address not in pages:
            yield f"{path.name} was not built"
            continue
        other = pages["" if address else next(name for name in pages if name.endswith("/"))]
        linked = {urljoin("/" + other.address, urldefrag(link).url) for link in other.links}
        if "/" + address not in linked:
            yield f"{path.name} is not in the navigation"


def weight(site: Path, page: Page) -> int:
    """Bytes of the start page and of all that it loads."""
    files = {site / unquote(urldefrag(load).url) for load in page.loads}
    more = {site / "sitemap.xml"} if (site / "sitemap.xml").exists() else set()
    return sum(path.stat().st_size for path in {page.path, *files, *more})


WIDER = (HERE / "wider.js").read_text("utf-8")

BELOW = """(() => {
  const shown = [...document.querySelectorAll("article table, article img")].map(
    e => e.getBoundingClientRect().top).filter(top => top > 0);
  return Math.min(...shown, 1e6) < innerHeight - 80 ? [] : ["no table or picture is in sight"];
})()"""

FAINT = (HERE / "faint.js").read_text("utf-8").replace("LEAST", str(FAINTEST))


SEARCHED = (HERE / "searched.js").read_text("utf-8")


def seen(site: Path, addresses: Iterable[str]) -> Iterator[str]:
    """What a browser finds too wide or too faint, by page, width and scheme."""
    with browser.served(site) as base, browser.browser() as window:
        for address in addresses:
            window.open(base + address, WIDTHS[0])
            name = address or "the start page"
            for url in window.requests:
                if not url.startswith((base, "data:", "blob:")):
                    yield f"{name} asks for {url}"
            if not address and (loaded := sum(window.received.values())) > HEAVIEST:
                yield f"{name} loads {loaded} bytes, more than {HEAVIEST}"
            for width in WIDTHS:
                window.resize(width)
                yield from (f"{name}, {width} px: {problem}" for problem in window.value(WIDER))
            yield from (f"{name}: {problem}" for problem in window.value(BELOW))
            for scheme in SCHEMES:
                window.prefer(scheme)
                yield from (f"{name}, {scheme}: {problem}" for problem in window.value(FAINT))


def search(site: Path) -> list[str]:
    """What is wrong with the search of the start page, whose index is loaded when it is used."""
    with browser.served(site) as base, browser.browser() as window:
        window.open(base, WIDTHS[-1])
        problems: list[str] = window.value(SEARCHED)
        return problems


def main(site: Path) -> None:
    docs = Path(__file__).parents[1] / "docs"
    pages = pages_of(site)
    problems = [*broken_links(site, pages), *other_hosts(site, pages), *forgotten(pages, docs)]
    heavy = weight(site, pages[""])
    if heavy > HEAVIEST:
        problems.append(f"the start page loads {heavy} bytes, more than {HEAVIEST}")
    if browser.executable() is None:
        print("no Chromium is installed: widths and contrast of the pages were not looked at")
    else:
        problems += [*seen(site, [name for name in pages if name != "404.html"]), *search(site)]
    if problems:
        sys.exit("\n".join(problems))
    print(f"{len(pages)} pages without a broken link; the start page loads {heavy // 1000} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
