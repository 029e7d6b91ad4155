"""Programs in a process of their own, in which JAX has eight devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"}


def on_eight_devices(program: str, folder: Path | None = None) -> str:
    """What a program prints in a process where JAX has eight devices."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **EIGHT},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
