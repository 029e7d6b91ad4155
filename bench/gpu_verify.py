"""`anydevice verify` for every engine of an NVIDIA card, in several processes, all at once.

    PYTHONPATH=src python bench/gpu_verify.py [seconds] [engine …]

Prints how many cells are in each state, and each that failed. Engines that compile a kernel for
each case share their ops between several processes. An engine that does not end within the
seconds (200 unless said) is stopped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from anydevice._check.cases.table import TABLE
from anydevice._check.verdicts import FAILED, STATES

COMMAND = [sys.executable, "-m", "anydevice", "verify", "--json"]
PLACES = {"torch": ("cuda", 1), "jax": ("cuda", 6), "cupy": ("cuda", 1), "opencl": ("opencl", 8)}
"""The device of an engine, and how many processes share its ops."""


def begin(engine: str) -> list[subprocess.Popen[str]]:
    device, shares = PLACES[engine]
    ops = list(TABLE)
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return [
        subprocess.Popen(
            [
                *COMMAND,
                "--engine",
                engine,
                "--device",
                device,
                "--op",
                ",".join(ops[share::shares]),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for share in range(shares)
    ]


def cells_of(processes: list[subprocess.Popen[str]], until: float) -> list[dict[str, Any]]:
    """The cells that the processes print; raises where one does not end, or prints none."""
    cells: list[dict[str, Any]] = []
    for process in processes:
        said, trouble = process.communicate(timeout=max(0.1, until - time.monotonic()))
        try:
            cells += json.loads(said)["cells"]
        except (ValueError, KeyError) as error:
            raise RuntimeError(f"{said[-500:]} {trouble[-1500:]}") from error
    return cells


def main() -> None:
    limit = float(sys.argv[1]) if len(sys.argv) > 1 else 200.0
    began = time.monotonic()
    running = {engine: begin(engine) for engine in sys.argv[2:] or PLACES}
    for engine, processes in running.items():
        try:
            cells = cells_of(processes, began + limit)
        except subprocess.TimeoutExpired:
            print(f"✗ verify {engine:<10} not done within {limit:.0f} s")
            continue
        except RuntimeError as error:
            print(f"✗ verify {engine:<10} {error}")
            continue
        finally:
            for process in processes:
                process.kill()
        counts = {state: sum(cell["state"] == state for cell in cells) for state in STATES}
        failed = [cell for cell in cells if cell["state"] in FAILED]
        took = time.monotonic() - began
        print(f"{'✗' if failed else '✓'} verify {engine:<10} {counts}, {took:.0f} s")
        for cell in failed:
            print("   ", {name: value for name, value in cell.items() if value is not None})


if __name__ == "__main__":
    main()
