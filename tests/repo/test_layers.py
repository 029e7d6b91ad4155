"""The layers hold, and no folder of the package stands outside them."""

from __future__ import annotations

import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINT = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"


def test_every_contract_is_kept() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LINT], cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_engine_file_is_in_the_contract_of_independence() -> None:
    from anydevice.engines.registry import BUILT_IN

    contracts = ConfigParser()
    contracts.read(ROOT / ".importlinter", encoding="utf-8")
    named = contracts["importlinter:contract:engines"]["modules"].split()
    targets = [row.target.partition(":")[0] for row in BUILT_IN.values()]
    assert sorted(named) == sorted(targets)


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
