"""The layers hold, and no folder of the package stands outside them."""

from __future__ import annotations

import re
from configparser import ConfigParser
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from shutil import copy, copytree, ignore_patterns
from typing import Any

import pytest

from anydevice._machine.engines.registry import BUILT_IN
from tests.programs import run_python

ROOT = Path(__file__).parents[2]
LINT = """
from importlinter.cli import lint_imports
raise SystemExit(lint_imports(limit_to_contracts={contracts}, no_cache=True))
"""


def lint(folder: Path, *contracts: str) -> tuple[int, str]:
    """The exit code and the text of the linter; of all contracts where none is named."""
    program, variables = LINT.format(contracts=contracts), {"PYTHONPATH": str(folder / "src")}
    ended = run_python("-c", program, cwd=folder, env=variables)
    colours = r"\x1b\[\d*m"  # older linters print them to files, too
    return ended.returncode, re.sub(colours, "", ended.stdout + ended.stderr)


def test_every_contract_is_kept() -> None:
    code, said = lint(ROOT)
    assert code == 0, said


def test_every_engine_is_in_the_contract_of_independence() -> None:
    contracts = ConfigParser()
    contracts.read(ROOT / ".importlinter", encoding="utf-8")
    first = contracts["importlinter:contract:engines"]["layers"].split("\n")[1]
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
def test_engines_are_independent(tmp_path: Path, file: str, planted: str, found: str) -> None:
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
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    listing = page.partition("## Layers")[2].partition("```text\n")[2].partition("```")[0]
    assert [line.split()[0] for line in listing.splitlines()] == drawing().rooms()


def test_the_drawing_of_the_layers_shows_the_imports_of_today() -> None:
    drawn = drawing()
    assert drawn.PICTURE.read_text("utf-8") == drawn.picture(), "run: python docs/draw_layers.py"
    rooms = drawn.rooms()
    upward = {
        (room, other)
        for room in rooms
        for other in drawn.imports(room) & set(rooms)
        if rooms.index(other) < rooms.index(room)
    }
    # Rooms of one layer may import each other; an error prints its message with `_core.text`.
    assert ("errors", "_core") in upward
    assert all(not low.startswith("_") for low, _ in upward)


def drawing() -> Any:
    spec = spec_from_file_location("draw_layers", ROOT / "docs/draw_layers.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
