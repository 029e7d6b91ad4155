"""Tests whose library is missing are skipped and name it, and fail where it was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

@pytest.mark.needs("cupy")
def test_marked():
    raise ValueError

@pytest.mark.parametrize("engine", ["cupy", "numpy"])
def test_cases(engine):
    assert engine == "numpy"

@pytest.mark.parametrize("engine", ["cupy"])
def test_a_case_that_only_reads_the_name(engine):
    pass

def test_wrong():
    assert False
"""


@pytest.mark.skipif(find_spec("cupy") is not None, reason="CuPy is here")
@pytest.mark.parametrize(
    ("asked", "counts"),
    [("numpy", "1 failed, 2 passed, 2 skipped"), ("numpy,cupy", "2 failed, 2 passed, 1 error")],
)
def test_what_becomes_of_a_test(tmp_path: Path, asked: str, counts: str) -> None:
    (tmp_path / "test_absent.py").write_text(TESTS)
    options = ("-n0", "-p", "no:cacheprovider", "-p", "tests.conftest", "--rootdir", tmp_path)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-c", ROOT / "pyproject.toml", tmp_path],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "ANYDEVICE_TEST_ENGINES": asked},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert counts in ended.stdout, ended.stdout + ended.stderr
    assert ("SKIPPED [1] test_absent.py:0: cupy is not installed" in ended.stdout) == (
        asked == "numpy"
    )
