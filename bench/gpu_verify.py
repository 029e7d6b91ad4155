"""`anydevice verify` for every engine of an NVIDIA card, one process each, all at once.

    PYTHONPATH=src python bench/gpu_verify.py [seconds]

Prints how many cells are right, wrong and unsupported, and each that is wrong. An engine that
does not end within the seconds (200 unless said) is stopped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

COMMAND = [sys.executable, "-m", "anydevice", "verify", "--json"]
PLACES = {
    "torch": ("cuda",),
    "jax": ("cuda", "--quick"),  # it compiles each case, which takes minutes
    "cupy": ("cuda",),
    "opencl": ("opencl",),
}


def main() -> None:
    limit = float(sys.argv[1]) if len(sys.argv) > 1 else 200.0
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    running = {
        engine: subprocess.Popen(
            [*COMMAND, "--engine", engine, "--device", device, *more],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for engine, (device, *more) in PLACES.items()
    }
    for engine, process in running.items():
        try:
            said, trouble = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            print(f"✗ verify {engine:<10} not done within {limit:.0f} s")
            continue
        try:
            cells = json.loads(said)["cells"]
        except (ValueError, KeyError):
            print(f"✗ verify {engine:<10} {said[-500:]} {trouble[-1500:]}")
            continue
        counts = {
            state: sum(cell["state"] == state for cell in cells)
            for state in ("right", "wrong", "unsupported")
        }
        mark = "✗" if counts["wrong"] else "✓"
        print(f"{mark} verify {engine:<10} {counts}")
        for cell in cells:
            if cell["state"] == "wrong":
                print("   ", {k: v for k, v in cell.items() if v is not None and k != "state"})


if __name__ == "__main__":
    main()
