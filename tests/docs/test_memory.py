"""What the page on memory says of the code is true; its examples run elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import anydevice
from anydevice._arrays.memory.stats import pressure_of
from anydevice._machine.engines.registry import BUILT_IN
from anydevice._machine.settings.config import STRATEGIES
from anydevice._plan.cards import CARDS
from anydevice._plan.estimates import PARTS
from anydevice._plan.training import OPTIMIZERS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "memory.md").read_text("utf-8")


def rows(head: str) -> list[list[str]]:
    table = PAGE.partition(f"| {head} |")[2].partition("\n\n")[0]
    lines = table.splitlines()[2:]
    assert lines, head
    return [[cell.strip(' `"') for cell in line.strip("|").split("|")] for line in lines]


def test_every_part_of_an_estimate_is_there() -> None:
    assert [cells[0] for cells in rows("part | what it is")][:-1] == list(PARTS)


def test_every_card_is_there() -> None:
    section = PAGE.partition("## A training on many cards")[2].partition("\n## ")[0]
    assert [name for name in CARDS if name not in section.upper()] == []


def test_the_strategies_are_those_of_the_code() -> None:
    shown = {name: text.partition(" %")[0] for name, text in rows("setting | of a device's memory")}
    assert shown == {name: f"{share:.0%}".rstrip("%") for name, share in STRATEGIES.items()}


def test_every_library_says_how_it_is_limited() -> None:
    named = [cells[0] for cells in rows("library | how it is limited")]
    assert sorted(named) == sorted(BUILT_IN)


def test_pressure_is_that_of_the_code() -> None:
    shown = rows("pressure | taken")
    limits = [int(found[0]) for _, text in shown if (found := re.findall(r"\d+", text))]
    for (name, _), (below, _), most in zip(shown, shown[1:], limits, strict=False):
        assert pressure_of(1000, 1000 - 10 * most + 1) == name
        assert pressure_of(1000, 1000 - 10 * most) == below
    assert len(limits) == len(shown) - 1


def test_the_optimizers_are_those_of_the_code() -> None:
    sentence = PAGE.partition("The optimizers are ")[2].partition(".")[0]
    assert re.findall(r"`(\w+)`", sentence) == list(OPTIMIZERS)


@pytest.mark.parametrize(
    "name",
    [
        *("MemoryEstimate", "MemoryStats", "cpu_fallback", "estimate_inference"),
        *("estimate_training", "find_batch_size", "memory_stats", "plan_inference", "release"),
    ],
)
def test_every_public_name_is_in_the_reference_and_every_function_on_the_page(name: str) -> None:
    value = getattr(anydevice, name)
    reference = (DOCS / "reference.md").read_text("utf-8")
    assert f"::: {value.__module__}.{name}\n" in reference
    assert isinstance(value, type) or f"{name}(" in PAGE or f"@{name}\n" in PAGE
