"""What the page on language models says of the code is true; its examples run elsewhere."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from pathlib import Path

import pytest

from anydevice import llm
from anydevice._plan.families import ARCHITECTURES
from anydevice.cli import chat

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/language-models.md").read_text("utf-8")


def rows(head: str) -> list[list[str]]:
    table = PAGE.partition(f"| {head} |")[2].partition("\n\n")[0]
    lines = table.splitlines()[2:]
    assert lines, head
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_families_are_those_of_the_table() -> None:
    shown = [
        name for cells in rows("`model_type` | models") for name in re.findall(r"`(\w+)`", cells[0])
    ]
    runs = [name for name, row in ARCHITECTURES.items() if row.forward is not None]
    assert sorted(shown) == sorted(runs)


def test_the_options_are_those_of_the_command() -> None:
    parser = ArgumentParser()
    chat.add_arguments(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    sentence = PAGE.partition("\nOptions: ")[2].partition(". ")[0]
    assert set(re.findall(r"`(--[\w-]+)`", sentence)) == known - {"-h", "--help", "--prompt"}


def test_the_commands_of_a_conversation_are_there() -> None:
    shown = [cells[0].strip("`").split()[0] for cells in rows("command | what it does")]
    assert shown == [line.split()[0] for line in chat.HELP if line.startswith("  /")]


def test_every_reason_for_which_a_reply_ends_is_there() -> None:
    said = re.findall(r'`"([a-z ]+)"`', (llm.Reply.__doc__ or "").partition("`tokens`")[0])
    assert [cells[0].strip("`") for cells in rows("`ended` | meaning")] == said


def test_the_order_of_sampling_is_that_of_the_code() -> None:
    from anydevice._llm import sampling

    order = (sampling.__doc__ or "").partition("The order is")[2].partition("then a")[0]
    steps = re.findall(r"^\d\. `?(\w+)`?", PAGE, re.MULTILINE)[:5]
    places = [order.replace("-", "_").replace(" penalty", "_penalty").find(step) for step in steps]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "mkdocs.yml"])
def test_the_page_is_found(page: str) -> None:
    assert "language-models.md" in (ROOT / page).read_text("utf-8")


def test_every_public_name_is_in_the_reference() -> None:
    reference = (ROOT / "docs/reference.md").read_text("utf-8")
    section = reference.partition("\n## Language models\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^::: (\S+)$", section, re.MULTILINE)
    assert sorted(listed) == sorted(f"anydevice._llm.model.{name}" for name in llm.__all__)
