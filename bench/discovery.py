"""How long finding takes: `anydevice devices` against `import torch`, and `import anydevice`.

Both sides of each ratio are taken in turn in one run, each a fresh process, and the medians are
compared. Run with `make bench`, or `python bench/discovery.py [--runs 11] [--json]`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

TORCH = [sys.executable, "-c", "import torch; torch.cuda.is_available()"]
DEVICES = [sys.executable, "-m", "anydevice", "devices"]
EMPTY = [sys.executable, "-c", "pass"]
IMPORT = [sys.executable, "-c", "import anydevice"]


def seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def in_turn(first: list[str], second: list[str], runs: int) -> tuple[float, float]:
    """The median of each, taken alternately after one unmeasured run that fills the disk cache."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(runs + 1):
        for command, kept in zip((first, second), times, strict=True):
            taken = seconds(command)
            if turn:
                kept.append(taken)
    return statistics.median(times[0]), statistics.median(times[1])


def measure(runs: int) -> dict[str, float]:
    torch, devices = in_turn(TORCH, DEVICES, runs)
    bare, imported = in_turn(EMPTY, IMPORT, max(runs, 21))
    return {
        "import_torch_s": torch,
        "anydevice_devices_s": devices,
        "times_faster": torch / devices,
        "import_anydevice_ms": (imported - bare) * 1000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure(options.runs)
    if options.json:
        print(json.dumps(figures))
        return
    print(f"import torch; is_available()   {figures['import_torch_s'] * 1000:8.1f} ms")
    print(f"anydevice devices              {figures['anydevice_devices_s'] * 1000:8.1f} ms")
    print(f"                               {figures['times_faster']:8.1f} × faster")
    print(f"import anydevice, over nothing {figures['import_anydevice_ms']:8.1f} ms")


if __name__ == "__main__":
    main()
