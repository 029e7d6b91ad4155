"""`make versions`: what it runs is what `pyproject.toml` allows, and what is missing is named."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.run_versions import (
    ENVIRONMENTS,
    EXTRAS,
    Environment,
    Result,
    interpreters,
    lower_bounds,
    main,
    name_of,
    requirements,
    table,
    with_counts,
)

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
OLDEST = Environment("3.11", "oldest")


def test_the_pythons_that_are_run_are_those_that_are_promised() -> None:
    run = sorted({each.python for each in ENVIRONMENTS}, key=lambda each: int(each[2:]))
    promised = [each for each in PROJECT["classifiers"] if "Python :: 3." in each]
    assert promised == [f"Programming Language :: Python :: {each}" for each in run]
    assert PROJECT["requires-python"] == f">={run[0]}"


def test_the_oldest_libraries_are_the_lower_bounds() -> None:
    bounds = lower_bounds(PROJECT)
    extras = PROJECT["optional-dependencies"]
    listed = [*PROJECT["dependencies"], *(each for name in EXTRAS for each in extras[name])]
    assert {name_of(each) for each in bounds} == {name_of(each) for each in listed}
    [numpy] = [each for each in listed if each.startswith("numpy>=")]
    assert numpy.replace(">=", "==") in bounds


def test_each_library_has_one_lower_bound() -> None:
    """That of an extra for a card is not below the one that was run on CPUs."""
    run = dict(each.partition(";")[0].split("==") for each in lower_bounds(PROJECT))
    for name, extra in PROJECT["optional-dependencies"].items():
        for library, oldest in re.findall(
            r"^([\w-]+)\S*>=([\d.]+)", "\n".join(extra), re.MULTILINE
        ):
            least = run.get(library, oldest)
            assert numbers(oldest) >= numbers(least), f"{library} in the extra {name}"


def numbers(release: str) -> list[int]:
    return [int(part) for part in release.split(".")]


def test_without_pytorch_nothing_that_needs_it_is_installed() -> None:
    with_it = {name_of(each) for each in requirements(PROJECT, with_torch=True)}
    without = {name_of(each) for each in requirements(PROJECT, with_torch=False)}
    assert with_it - without == {"torch", "accelerate", "lightning-fabric"}


@pytest.fixture
def no_interpreters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Neither on the path nor in pyenv's folder."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("no_interpreters")
def test_a_missing_interpreter_is_named_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only=3.12"]) == 1
    assert "Python 3.12 is missing: name one in PYTHONS" in capsys.readouterr().out


@pytest.mark.usefixtures("no_interpreters")
def test_a_missing_interpreter_may_be_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only=3.12", "--missing=skip"]) == 1  # nothing was run
    assert "python3.12-newest: skipped" in capsys.readouterr().out


def test_interpreters_are_named_or_found(no_interpreters: Path) -> None:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert interpreters([]) == {}
    assert interpreters([sys.executable]) == {version: sys.executable}
    here = no_interpreters / f"python{version}"
    here.symlink_to(sys.executable)
    assert interpreters([]) == {version: here.name}


def test_one_of_pyenv_is_found_behind_a_shim_that_fails(no_interpreters: Path) -> None:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    shim = no_interpreters / f"python{version}"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    real = no_interpreters / "versions" / f"{version}.0" / "bin" / f"python{version}"
    real.parent.mkdir(parents=True)
    real.symlink_to(sys.executable)
    assert interpreters([]) == {version: str(real)}


def test_a_named_interpreter_that_does_not_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nothing in PYTHONS does not run"):
        interpreters([str(tmp_path / "nothing")])


def test_what_pytest_counted_is_shown_and_a_failure_is_not_green(tmp_path: Path) -> None:
    (tmp_path / "test_each.py").write_text(
        "import pytest\n"
        "def test_right(): pass\n"
        "def test_other(): pass\n"
        "def test_wrong(): assert False\n"
        "def test_absent(): pytest.skip('torch is not installed')\n"
        "@pytest.fixture\n"
        "def broken(): raise OSError\n"
        "def test_broken(broken): pass\n"
    )
    file = tmp_path / "results.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"]
    subprocess.run(
        [*command, f"--junitxml={file}", "test_each.py"], cwd=tmp_path, capture_output=True
    )
    result = with_counts(Result(OLDEST, versions=("1.26", "0.4", "", "")), file)
    assert (result.passed, result.skipped, result.failed) == (2, 1, 2)
    assert not result.green
    assert Result(OLDEST, passed=2).green
    heads, row = table([result])
    assert heads.split()[:5] == ["environment", "numpy", "jax", "mlx", "torch"]
    assert row.split()[:8] == ["python3.11-oldest", "1.26", "0.4", "–", "–", "2", "1", "2"]


def test_a_run_that_did_not_finish_is_not_green(tmp_path: Path) -> None:
    assert not with_counts(Result(OLDEST), tmp_path / "results.xml").green


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_hands_on_what_it_is_given() -> None:
    ended = subprocess.run(
        ["make", "--dry-run", "versions", "PYTHONS=/a /b", "ONLY=oldest", "ARGS=tests/core -x"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    told = " ".join(ended.stdout.replace("\\\n", " ").split())
    assert '--pythons="/a /b" --only="oldest" --missing=fail tests/core -x' in told
