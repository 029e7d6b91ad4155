"""Every figure is in docs/benchmarks.md, with its date, its machine and a command that exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from anydevice.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
BENCHMARKS = (ROOT / "docs/benchmarks.md").read_text("utf-8")
README = (ROOT / "README.md").read_text("utf-8")
HEAD = ["what", "figure", "bar", "date", "machine", "command"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


class Row(NamedTuple):
    what: str
    figure: str
    bar: str
    date: str
    machine: str
    command: str


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables(text: str) -> Iterator[list[list[str]]]:
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        yield [cells(line) for line in table.splitlines()]


def rows() -> list[Row]:
    found = [table for table in tables(BENCHMARKS) if table[0] == HEAD]
    return [Row(*line) for table in found for line in table[2:]]


def machines() -> set[str]:
    [table] = [table for table in tables(BENCHMARKS) if table[0][0] == "machine"]
    return {line[0] for line in table[2:]}


def problem_of(command: str) -> str | None:
    """What is wrong with a command of the page, if anything is."""
    words = command.strip("`").split()
    while "=" in words[0]:
        words = words[1:]
    if words[0] == "make":
        return None if words[1] in TARGETS else f"the Makefile has no {words[1]}"
    if words[0] == "anydevice":
        return None if words[1] in COMMANDS else f"anydevice has no command {words[1]}"
    if words[0] not in ("python", "pytest", "bash"):
        return f"{words[0]} is not a command of a clone"
    paths = [word for word in words[1:] if "/" in word]
    lacking = [path for path in paths if not (ROOT / path).exists()]
    return f"there is no {', '.join(lacking)}" if lacking or not paths else None


def figures(text: str) -> set[str]:
    """The numbers of measurements in a text: those with a unit, or in bold."""
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    units = r"×|%|tokens|s|ms|µs|GB/s|TB/s|of \d+"
    with_unit = re.findall(rf"(?<![\w.,–-])(\d[\d,.]*\d|\d)(?= (?:{units})(?![\w/]))", plain)
    bold = re.findall(r"\*\*[^*\d]*(\d[\d,.]*\d|\d)[^*]*\*\*", plain)
    return {*with_unit, *bold}


def test_every_table_of_figures_has_the_same_columns() -> None:
    assert len(rows()) > 100
    for table in tables(BENCHMARKS):
        assert table[0] in (HEAD, ["capability", "figure", "table"], ["machine", "what it is"])
        assert {len(line) for line in table} == {len(table[0])}, table[0]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.what[:40])
def test_a_figure_says_when_where_and_how_it_was_measured(row: Row) -> None:
    assert row.figure
    assert row.bar
    assert re.fullmatch(r"2026-\d\d-\d\d", row.date)
    assert row.machine in machines()
    assert problem_of(row.command) is None


def test_the_page_is_tables_and_no_stories() -> None:
    prose = re.sub(r"^(\||#).*\n", "", BENCHMARKS, flags=re.MULTILINE)
    assert len(prose.split()) < 250


def test_the_summary_repeats_what_the_tables_say() -> None:
    summary = BENCHMARKS.partition("\n## ")[0].partition("| machine |")[0]
    below = BENCHMARKS.partition("\n## ")[2]
    lacking = {figure for figure in figures(summary) if figure not in below}
    assert lacking <= {"2,887"}, "the sum of the ops that are right"


def test_every_figure_of_the_readme_is_in_the_benchmarks() -> None:
    said = figures(README)
    assert len(said) >= 6
    lacking = {each for each in said if not re.search(rf"(?<![\d.,]){each}(?![\d])", BENCHMARKS)}
    assert not lacking


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("copies are 6.2 × as fast", {"6.2"}),
        ("**279.2** tokens/s", {"279.2"}),
        ("80.9 s, 1.8 % and 43,539 tokens", {"80.9", "1.8", "43,539"}),
        ("Python 3.11 and 20 families", set()),
        ("```text\n5.0 × in code\n```", set()),
    ],
)
def test_figures_are_found(text: str, expected: set[str]) -> None:
    assert figures(text) == expected


@pytest.mark.parametrize(
    "command",
    ["`python bench/nothing.py`", "`make nothing`", "`anydevice nothing`", "`perf`", "`python -V`"],
)
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    assert problem_of(command) is not None
