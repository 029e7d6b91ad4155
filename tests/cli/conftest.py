"""A user of its own for every test: settings, verdicts and working directory are made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from anydevice._machine.choose import scope
from anydevice._machine.discovery import discover as discovery
from anydevice._machine.settings import config as settings
from anydevice.cli.main import main
from tests.machines import machine_of

Result = tuple[int, str, str]
Process = Callable[..., subprocess.CompletedProcess[bytes]]

_SWITCHES = (
    "ANYDEVICE_DEVICE",
    "ANYDEVICE_ENGINE",
    "COLUMNS",
    "CUDA_VISIBLE_DEVICES",
    "FORCE_COLOR",
    "LOCAL_RANK",
    "NO_COLOR",
    "PYTHONIOENCODING",
    "SLURM_LOCALID",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
)


def _forget() -> None:
    discovery.forget_report()
    scope.forget()
    settings.forget_changes()


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The project's settings file, empty: no file above the working directory is looked at."""
    for name in _SWITCHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ANYDEVICE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TERM", "xterm-256color")
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    file = folder / "anydevice.toml"
    file.touch()
    _forget()
    yield file
    _forget()


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    """The user's settings file, not yet written."""
    home = tmp_path / "home"
    home.mkdir()
    return home / "anydevice.toml"


class Anydevice:
    """Runs command lines in this process: `code, out, err = anydevice("devices", "--json")`.

    With `cuda=1` and the like it runs on such a fake machine, on which the settings count.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str, **machine: Any) -> Result:
        self._capsys.readouterr()
        with machine_of(**machine) if machine else nullcontext():
            code = main(words)
        out, err = self._capsys.readouterr()
        return code, out, err

    def text(self, *words: str, code: int = 0, **machine: Any) -> str:
        """Return the output of a command that ends with `code` and without errors."""
        result, out, err = self(*words, **machine)
        assert (result, err) == (code, "")
        return out

    def json(self, *words: str, code: int = 0, **machine: Any) -> Any:
        """Return the JSON of a command that ends with `code` and without errors."""
        return json.loads(self.text(*words, "--json", code=code, **machine))

    def refusal(self, *words: str, **machine: Any) -> str:
        """Return the error of a command that ends with 2 and prints nothing else."""
        code, out, err = self(*words, **machine)
        assert (code, out) == (2, "")
        return err


@pytest.fixture
def anydevice(capsys: pytest.CaptureFixture[str]) -> Anydevice:
    return Anydevice(capsys)


@pytest.fixture
def process() -> Process:
    """Run a real `python -m anydevice` with its output piped."""

    def run(*words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, "-m", "anydevice", *words],
            capture_output=True,
            env={**os.environ, **environment},
            timeout=400,
            check=False,
        )

    return run
