"""How long `anydevice verify --quick` takes for each engine, and when its first line comes.

    PYTHONPATH=src python bench/quick_verify.py [engine …]

Piped, each engine in a process of its own, with the caches of compiled kernels cold: those of
PoCL, CuPy, Triton and NVIDIA's driver start empty. The bar is 60 s an engine and an exit code of
0, 1 or 3.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from tempfile import TemporaryDirectory

from anydevice._machine.discovery.discover import discover

COMMAND = [sys.executable, "-m", "anydevice", "verify", "--quick", "--engine"]
CACHES = ("POCL_CACHE_DIR", "CUDA_CACHE_PATH", "CUPY_CACHE_DIR", "TRITON_CACHE_DIR")
BAR = 60.0


def measure(engine: str) -> tuple[float, float, int, str]:
    """Seconds to the first line and to the end, the exit code, and the last line."""
    with TemporaryDirectory() as folder:
        cold = {name: os.path.join(folder, name) for name in CACHES}
        for path in cold.values():
            os.mkdir(path)
        began = time.monotonic()
        running = subprocess.Popen(
            [*COMMAND, engine],
            env={**os.environ, **cold, "PYTHONUTF8": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert running.stdout is not None
        first, last = 0.0, ""
        for line in running.stdout:
            first = first or time.monotonic() - began
            last = line.strip() or last
        return first, time.monotonic() - began, running.wait(), last


def main() -> None:
    installed = dict.fromkeys(
        engine for device in discover().devices if device.status for engine in device.status.engines
    )
    for engine in sys.argv[1:] or installed:
        first, seconds, code, last = measure(engine)
        mark = "✓" if seconds <= BAR and code in (0, 1, 3) else "✗"
        times = f"first line {first:4.1f} s, end {seconds:4.1f} s (bar {BAR:.0f})"
        print(f"{mark} quick {engine:<8} {times}, exit code {code}: {last}", flush=True)


if __name__ == "__main__":
    main()
