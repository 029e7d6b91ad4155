"""The layers hold, and no folder of the package stands outside them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

import pytest

ROOT = Path(__file__).parents[2]
LINT = """
from importlinter.cli import lint_imports
raise SystemExit(lint_imports(limit_to_contracts={contracts}, no_cache=True))
"""


def lint(folder: Path, *contracts: str) -> tuple[int, str]:
    """The exit code and the text of the linter; of all contracts where none is named."""
    ended = subprocess.run(
        [sys.executable, "-c", LINT.format(contracts=contracts)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "src")},
        capture_output=True,
        text=True,
        timeout=400,
    )
    colours = r"\x1b\[\d*m"  # older linters print them to files, too
    return ended.returncode, re.sub(colours, "", ended.stdout + ended.stderr)


def test_every_contract_is_kept() -> None:
    code, said = lint(ROOT)
    assert code == 0, said


def engines_contract() -> str:
    contracts = ConfigParser()
    contracts.read(ROOT / ".importlinter", encoding="utf-8")
    return contracts["importlinter:contract:engines"]["layers"]


def test_every_engine_is_in_the_contract_of_independence() -> None:
    from anydevice._machine.engines.registry import BUILT_IN

    first = engines_contract().split("\n")[1]
    assert sorted(first.replace("|", " ").split()) == sorted(BUILT_IN)


@pytest.mark.parametrize(
    ("file", "planted", "found"),
    [
        ("opencl/kernels/rows.py", "from anydevice._engines.torch.triton import fused", "-> "),
        ("numpy/primitives.py", "import anydevice._engines.jax.memory", "-> "),
        ("base.py", "from anydevice._engines.mlx.arrays import ENGINE", "-> "),
        ("tinylib/arrays.py", "import anydevice", "tinylib"),
    ],
    ids=["a kernel", "a primitive", "the base", "an engine that is not named"],
)
def test_an_import_between_engines_breaks_the_contract(
    tmp_path: Path, file: str, planted: str, found: str
) -> None:
    copytree(ROOT / "src", tmp_path / "src", ignore=ignore_patterns("__pycache__"))
    copy(ROOT / ".importlinter", tmp_path)
    path = tmp_path / "src/anydevice/_engines" / file
    path.parent.mkdir(exist_ok=True)
    (path.parent / "__init__.py").touch()
    with path.open("a", encoding="utf-8") as text:
        text.write(f"\n\ndef planted():\n    {planted}\n")
    code, said = lint(tmp_path, "engines")
    assert code == 1, said
    assert "what they share imports none of them BROKEN" in said
    assert found in said


def test_the_layers_stand_in_the_order_of_the_documentation() -> None:
    contracts = ConfigParser()
    contracts.read(ROOT / ".importlinter", encoding="utf-8")
    layers = contracts["importlinter:contract:layers"]["layers"].replace("|", " ").split()
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    drawing = page.partition("## Layers")[2].partition("```text")[2].partition("```")[0]
    lines = [line for line in drawing.splitlines()[1:] if not line.startswith(" ")]
    drawn = [line.split()[0].rstrip("/").removesuffix(".py") for line in lines]
    assert [name for name in reversed(layers) if name not in ("cli", "testing")] == drawn[:-2]
    assert set(drawn[-2:]) == {"cli", "testing"}
