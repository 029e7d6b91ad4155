"""Starting four processes until their first all-reduce: `anydevice launch` against torchrun.

    PYTHONPATH=src python bench/launch.py [runs]

Both run the same script, in turns; the medians and the ratio of each turn are compared. Then
`parallel.launch` forks four, from a program that has imported PyTorch and computed nothing.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROCESSES, MOST, MOST_FORKED = 4, 1.1, 0.5

SCRIPT = """
import time
import torch, torch.distributed
from anydevice import parallel

mesh = parallel.initialize("cpu")
total = torch.ones(1)
torch.distributed.all_reduce(total)
if mesh.rank == 0:
    print(f"summed {time.time()} {float(total)}", flush=True)
"""

FORKED = """
import time
import torch, torch.distributed
from anydevice import parallel

def summed():
    parallel.initialize("cpu")
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    return time.time()

parallel.initialize("cpu")  # finds the device, once for all that fork
began = time.time()
print(f"summed {max(parallel.launch(summed, processes=4))} 4.0 {began}")
"""


def run(command: list[str], folder: str) -> list[str]:
    """What a command printed of its first all-reduce."""
    paths = os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])
    variables = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("summed")]
    if done.returncode or not lines:
        raise SystemExit(done.stderr[-2000:])
    return lines[-1].split()[1:]


def seconds(launcher: list[str], folder: str) -> float:
    began = time.time()
    at, total = run([sys.executable, "-m", *launcher, "script.py"], folder)
    assert float(total) == PROCESSES, total
    return float(at) - began


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    ours = ["anydevice", "launch", "-n", str(PROCESSES)]
    theirs = ["torch.distributed.run", "--nproc-per-node", str(PROCESSES)]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "script.py").write_text(SCRIPT)
        Path(folder, "forked.py").write_text(FORKED)
        seconds(ours, folder)  # files that are read for the first time
        turns = [(seconds(ours, folder), seconds(theirs, folder)) for _ in range(runs)]
        forks = []
        for _ in range(runs):
            at, _, began = run([sys.executable, "forked.py"], folder)
            forks.append(float(at) - float(began))
    own, other = (statistics.median(each) for each in zip(*turns, strict=True))
    ratio = statistics.median(a / b for a, b in turns)
    forked = statistics.median(forks)
    print(
        f"{'✓' if ratio <= MOST else '✗'} launch  {own:.1f} s, torchrun {other:.1f} s: "
        f"{ratio:.2f} × (bar {MOST})"
    )
    print(f"{'✓' if forked <= MOST_FORKED else '✗'} forked  {forked:.2f} s (bar {MOST_FORKED})")


if __name__ == "__main__":
    main()
