"""The files of the project: how they are named, and what they must not say."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = (".ci", "bench", "demo", "docs", "examples", "src", "tests")

VAGUE = {"common", "helper", "helpers", "misc", "miscellaneous", "util", "utilities", "utils"}
"""Names that say nothing of what is inside."""

# Written so that this file does not hold what it looks for.
PLACES = re.compile(
    r"(?<![\w.$}>-])(?:/wo[r]k/|/ro[o]t/|/(?:ho[m]e|Us[e]rs)/(?!(?:me|user|you)\b)\w|/opt/(?:wh[e]els|py[p]i)|C:\\+Us[e]rs)"
)
"""Paths of somebody's machine; that of a user called me, user or you is nobody's."""


def files() -> Iterator[Path]:
    top = (path for path in ROOT.iterdir() if not path.name.startswith((".coverage", ".git")))
    yield from (path for path in top if path.is_file())
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path


def python_files(folder: str) -> list[Path]:
    return [path for path in files() if path.suffix == ".py" and path.is_relative_to(ROOT / folder)]


def test_no_file_or_folder_has_a_name_that_says_nothing() -> None:
    vague = {
        str(path.relative_to(ROOT))
        for path in files()
        for part in path.relative_to(ROOT).parts
        if VAGUE & set(re.split(r"[^a-z]+", part.lower()))
    }
    assert not vague


def test_no_file_holds_a_path_of_somebodys_machine() -> None:
    found = []
    for path in files():
        try:
            lines = path.read_text("utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(lines, 1):
            if PLACES.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


def test_a_path_of_a_machine_would_be_found_and_no_other() -> None:
    for line in ("see /wo" + "rk/x", '"/ro' + 'ot/.cache"', "/ho" + "me/ada/x", "/Us" + "ers/ada"):
        assert PLACES.search(line), line
    for line in ("framework/x", "a/ro" + "ot/b", "$XDG/ho" + "me/x", "~/x"):
        assert not PLACES.search(line), line


def test_the_inits_of_inner_packages_hold_no_code() -> None:
    # Those that users import from.
    outer = ("anydevice", "compat", "_ops")
    filled = []
    for path in python_files("src/anydevice"):
        if path.name == "__init__.py" and path.parent.name not in outer:
            tree = ast.parse(path.read_text("utf-8"))
            if len(tree.body) > (ast.get_docstring(tree) is not None):
                filled.append(str(path.relative_to(ROOT)))
    assert not filled
