"""Commands that install anydevice itself: one constant says where they install it from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from anydevice._core import text

ROOT = Path(__file__).parents[2]
BY_NAME = re.compile(r"pip3? install(?: -\S+)*(?: [\"']?anydevice\b|[^\n`]* [\"']?anydevice\[)")
FROM_A_CLONE = re.compile(r"pip3? install(?: -\S+)* [\"']?\.(?=[\[\"'`\s]|$)")
FOR_DEVELOPERS = ("CONTRIBUTING.md", "tests", "text.py")


def commands(pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield the lines with such a command, wherever users read them."""
    folders = ("src", "docs", "demo", "examples", "bench")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    kinds = (".py", ".md", ".toml", ".svg", ".ipynb")
    for path in sorted([*files, *ROOT.glob("*.md")]):
        if path.suffix in kinds and path.name not in FOR_DEVELOPERS:
            for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
                if pattern.search(line):
                    yield f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def test_every_command_and_page_follows_the_switch() -> None:
    wrong = FROM_A_CLONE if text.PUBLISHED else BY_NAME
    assert list(commands(wrong)) == []


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ('pip install "anydevice[cuda]"', BY_NAME),
        ("pip install --upgrade anydevice", BY_NAME),
        ("run: pip install 'anydevice[llm]'", BY_NAME),
        ('pip install ".[cuda]"', FROM_A_CLONE),
        ("pip install .", FROM_A_CLONE),
        ("pip install numpy 'anydevice[llm]'", BY_NAME),
        ("pip install torch in a clone of anydevice", None),
        ('pip install "jax[cuda13]"', None),
    ],
)
def test_the_patterns_find_what_they_are_for(line: str, pattern: re.Pattern[str] | None) -> None:
    assert [one for one in (BY_NAME, FROM_A_CLONE) if one.search(line)] == [pattern] * bool(pattern)


def test_the_switch_turns_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert text.install_command("llm") == 'pip install ".[llm]" in a clone of anydevice'
    assert "git pull" in text.update_command()
    monkeypatch.setattr(text, "PUBLISHED", True)
    assert text.install_command("llm") == 'pip install "anydevice[llm]"'
    assert text.update_command() == "pip install --upgrade anydevice"
