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


WIDER = """(() => {
  const scrolls = e => /auto|scroll/.test(getComputedStyle(e).overflowX);
  const found = [], width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width)
    found.push(`the page is ${document.documentElement.scrollWidth} wide`);
  for (const e of document.querySelectorAll("article, article *")) {
    const box = e.getBoundingClientRect();
    if (box.width < 1 || box.height < 1 || box.right <= width + 1) continue;
    let up = e.parentElement;
    while (up && !scrolls(up)) up = up.parentElement;
    if (!up) found.push(`${e.tagName} ${e.textContent.trim().slice(0, 40)} ends at ${box.right}`);
  }
  return found.slice(0, 3);
})()"""

BELOW = """(() => {
  const shown = [...document.querySelectorAll("article table, article img")].map(
    e => e.getBoundingClientRect().top).filter(top => top > 0);
  return Math.min(...shown, 1e6) < innerHeight - 80 ? [] : ["no table or picture is in sight"];
})()"""

FAINT = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const known = new Map();
  const rgba = color => {
    if (!known.has(color)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = color;
      canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      known.set(color, [r, g, b, a / 255]);
    }
    return known.get(color);
  };
  const over = (top, below) =>
    [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const behind = e => {
    const layers = [];
    for (; e; e = e.parentElement) {
      const layer = rgba(getComputedStyle(e).backgroundColor);
      layers.push(layer);
      if (layer[3] === 1) break;
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const light = color => {
    const [r, g, b] = color.slice(0, 3).map(
      v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = new Map();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const e = texts.currentNode.parentElement, text = texts.currentNode.data.trim();
    if (!text || e.closest(".headerlink, script, style, [hidden]") || !e.offsetParent) continue;
    const style = getComputedStyle(e);
    if (style.visibility !== "visible" || style.opacity === "0") continue;
    const below = behind(e), [a, b] = [light(over(rgba(style.color), below)), light(below)];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const large = parseFloat(style.fontSize) >= 24;
    const key = `${e.tagName}.${e.className} ${style.color}`;
    if (contrast < (large ? 3 : LEAST) && !found.has(key))
      found.set(key, `"${text.slice(0, 30)}" has a contrast of ${contrast.toFixed(1)}: ${key}`);
  }
  return [...found.values()].slice(0, 5);
})()""".replace("LEAST", str(FAINTEST))


SEARCHED = """(async () => {
  const box = document.querySelector("[data-md-component=search-query]");
  if (!box) return ["there is no search"];
  box.focus();
  box.value = "prefetch";
  for (let turn = 0; turn < 100; turn++) {
    box.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
    await new Promise(done => setTimeout(done, 100));
    if (document.querySelector(".md-search-result__item a[href*=moving]")) return [];
  }
  return ["searching for prefetch does not find the page about moving data"];
})()"""


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
