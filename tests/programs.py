"""Python programs in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def run_python(
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str | None] | None = None,
    limit: float | None = 400,
    python: str = sys.executable,
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter; `env` is added to this process's variables, without those of `None`."""
    merged = {**os.environ, **(env or {})}
    return subprocess.run(
        [python, *arguments],
        cwd=cwd,
        env={name: value for name, value in merged.items() if value is not None},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit,
    )


def output_of(*arguments: str, **how: Any) -> str:
    """Return the output of an interpreter that must end well; `how` is that of `run_python`."""
    done = run_python(*arguments, **how)
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout
