"""Tests whose library is missing are skipped and name it, and fail where it was asked for."""

from __future__ import annotations

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.programs import run_python

ROOT = Path(__file__).parents[2]
TESTS = """
import importlib
import pytest
from anydevice._machine.engines import registry

@pytest.mark.needs("cupy")
def test_marked():
    raise ValueError

@pytest.mark.parametrize("engine", ["cupy", "numpy"])
def test_cases(engine):
    importlib.import_module(engine)

@pytest.mark.parametrize("engine", ["cupy", "numpy"])
def test_cases_that_anydevice_looks_for(engine):
    registry.load(engine)

@pytest.mark.parametrize("engine", ["cupy", "numpy"])
def test_cases_that_fail_for_another_reason(engine):
    assert engine == "numpy"

@pytest.mark.parametrize("engine", ["cupy"])
def test_a_case_that_only_reads_the_name(engine):
    pass

def test_wrong():
    assert False
"""


def pytest_in(place: Path, asked: str, **files: str) -> subprocess.CompletedProcess[str]:
    """Run files of tests in a folder that has our conftest.py."""
    folder = place / "tests"
    folder.mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    options = ("-n0", "-p", "no:cacheprovider", "--rootdir", str(folder))
    variables = {"PYTHONPATH": str(ROOT), "ANYDEVICE_TEST_ENGINES": asked}
    command = ("-m", "pytest", *options, "-c", str(ROOT / "pyproject.toml"), str(folder))
    return run_python(*command, cwd=folder, env=variables)


@pytest.mark.skipif(find_spec("cupy") is not None, reason="CuPy is here")
@pytest.mark.parametrize(
    ("asked", "counts"),
    [("numpy", "2 failed, 4 passed, 3 skipped"), ("numpy,cupy", "4 failed, 4 passed, 1 error")],
)
def test_what_becomes_of_a_test(tmp_path: Path, asked: str, counts: str) -> None:
    ended = pytest_in(tmp_path, asked, test_absent=TESTS)
    assert counts in ended.stdout, ended.stdout + ended.stderr
    skipped = "SKIPPED [2] test_absent.py:0: cupy is not installed"
    assert (skipped in ended.stdout) == (asked == "numpy")


@pytest.mark.skipif(find_spec("cupy") is not None, reason="CuPy is here")
def test_a_file_that_needs_helpers_beside_an_absent_library_is_skipped(tmp_path: Path) -> None:
    """The first file stays half imported otherwise, and the second one is an error."""
    first, second = "import cupy\nhelper = 1", "from test_first import helper"
    ended = pytest_in(tmp_path, "numpy", test_first=first, test_second=second)
    assert "2 skipped" in ended.stdout, ended.stdout + ended.stderr
