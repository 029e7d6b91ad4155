"""Programs in a process of their own, in which JAX has eight devices."""

from __future__ import annotations

from pathlib import Path

from tests.programs import output_of

EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"}


def on_eight_devices(program: str, folder: Path | None = None) -> str:
    """What a program prints in a process where JAX has eight devices."""
    return output_of("-c", program, env=EIGHT, cwd=folder, limit=900)
