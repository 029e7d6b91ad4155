"""mypy and pyright find the types of user code, and each of its mistakes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = Path(__file__).with_name("typed_page.py")
CHECKERS = {"mypy": ["--strict"], "pyright": ["--pythonpath", sys.executable]}


@pytest.mark.parametrize("name", CHECKERS)
def test_a_page_of_user_code_has_the_types_that_it_says(name: str) -> None:
    program = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed; pip install {name}")
    run = [program, *CHECKERS[name], str(PAGE)]
    ended = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    found = re.findall(r"typed_page\.py:(\d+).* error: ", ended.stdout)
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    wrong = {at for at, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert len(wrong) == 8
    assert {int(line) for line in found} == wrong, ended.stdout + ended.stderr
