"""Every public name of the models is in the reference, and every page about them is found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from anydevice import nn

ROOT = Path(__file__).parents[2]


def test_every_public_name_of_nn_is_in_the_reference_and_nothing_else_is() -> None:
    page = (ROOT / "docs/reference.md").read_text("utf-8")
    section = page.partition("\n## Models\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^::: (\S+)$", section, re.MULTILINE)
    public = [f"{getattr(nn, name).__module__}.{name}" for name in nn.__all__]
    assert sorted(listed) == sorted([*public, "anydevice._train.history.Epoch"])


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "mkdocs.yml"])
def test_the_page_on_models_is_found(page: str) -> None:
    assert "models.md" in (ROOT / page).read_text("utf-8")


def test_every_example_is_on_the_page() -> None:
    page = (ROOT / "docs/models.md").read_text("utf-8")
    listed = re.findall(r"^\| `(examples/\w+\.py)` \|", page, re.MULTILINE)
    there = [path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*.py")]
    assert sorted(listed) == sorted(there)
