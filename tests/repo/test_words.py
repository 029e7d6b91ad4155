"""The words of the field, and none of a private dialect, wherever people read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Each is written as another word: what is meant stands beside it.
FORBIDDEN = {
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bwhole[ _]numbers?\b": "integer",
    r"\btruth[ _]values?\b": "boolean",
    r"\b(is|are) (not|no) numbers?\b(?! of)": "NaN",
    r"\bnot a number\b(?! of)": "NaN",
    r"\bno number\b(?! (is|of)\b)": "NaN",
    r"\belement[ _]types?\b": "dtype",
    r"\bdoes as well\b": "falls back",
    r"\bnests?\b": "tree",
    r"\bbut for\b": "except for",
}
PATTERN = re.compile("|".join(f"(?:{pattern})" for pattern in FORBIDDEN), re.IGNORECASE)


def _texts() -> list[Path]:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    code = [
        path
        for folder in ("src", "bench", "demo", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cl")
    ]
    return sorted([*pages, *code])


@pytest.mark.parametrize("path", _texts(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_words_of_the_field_are_used(path: Path) -> None:
    lines = path.read_text("utf-8").splitlines()
    found = [
        f"{path.name}:{number}: {match.group(0)!r} in {line.strip()!r}"
        for number, line in enumerate(lines, 1)
        for match in PATTERN.finditer(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "what mends it",
        "a whole number",
        "an element_type",
        "is not a number",
        "a nest of dicts",
        "all but for one",
    ],
)
def test_a_word_of_the_old_dialect_is_found(line: str) -> None:
    assert PATTERN.search(line)


@pytest.mark.parametrize(
    "line", ["recommended", "nested trees", "not a number of seconds", "no number is given twice"]
)
def test_ordinary_words_are_left_alone(line: str) -> None:
    assert not PATTERN.search(line)
