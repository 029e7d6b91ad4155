"""A training by a mesh of one against one without a mesh, and by two processes on one card.

    PYTHONPATH=src python bench/launch_training.py [toy]

Steps with a mesh and without one are timed in turns, as medians. Two processes that share the card
exchange gradients by gloo, since NCCL refuses that; their losses are compared with those of one.
On a machine without a card, and with `toy` for a small model, the CPU shows that it runs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import anydevice
from anydevice import nn, parallel

TOY = "toy" in sys.argv or not torch.cuda.is_available()
PLACE = "cuda:0" if torch.cuda.is_available() else "cpu"
SIZE, STEPS, RUNS = (64, 20, 5) if TOY else (2048, 60, 31)
MOST_SLOWER, MOST_APART = 1.02, 1e-5

numbers = np.random.default_rng(0)
X = numbers.standard_normal((102, 64)).astype(np.float32)  # the last batch has two rows
Y = numbers.integers(0, 10, 102)


def ours(size: int) -> Any:
    place = anydevice.device(PLACE, engine="torch")
    hidden = [part for _ in range(4) for part in (nn.Dense(size, size), "gelu")]
    layers = (nn.Dense(64, size), "gelu", nn.Dropout(0.1), *hidden, nn.Dense(size, 10))
    return nn.build(*layers, device=place, seed=1)


def users(size: int) -> Any:
    torch.manual_seed(4)
    layers = torch.nn
    hidden = [part for _ in range(4) for part in (layers.Linear(size, size), layers.GELU())]
    first = layers.Linear(64, size), layers.GELU(), layers.Dropout(0.1)
    return layers.Sequential(*first, *hidden, layers.Linear(size, 10))


def optimizer_of(model: Any) -> Any:
    is_ours = isinstance(model, nn.Model)
    return nn.AdamW(1e-3) if is_ours else torch.optim.AdamW(model.parameters(), 1e-3)


def cross_entropy(output: Any, y: Any) -> Any:
    return torch.nn.functional.cross_entropy(output, y.long())


def loss_of(model: Any) -> Any:
    return "cross_entropy" if isinstance(model, nn.Model) else cross_entropy


def curve(make: Any, strategy: str) -> list[float]:
    mesh, model = parallel.initialize(PLACE), make(256)
    several: dict[str, Any] = {"strategy": strategy} if mesh.size > 1 else {}
    done = nn.train(
        model,
        nn.Batches(X, Y, size=50),
        optimizer_of(model),
        loss_of(model),
        epochs=3,
        devices=mesh,
        clip=1.0,
        seed=3,
        optimize="none",
        progress=False,
        **several,
    )
    return [epoch.loss for epoch in done.history]


def seconds(training: Any, batch: Any) -> float:
    training.read()
    began = time.perf_counter()
    for _ in range(STEPS):
        training.step(batch)
    training.read()
    return time.perf_counter() - began


def mesh_of_one(make: Any) -> tuple[str, str, bool]:
    x = numbers.standard_normal((512, 64)).astype(np.float32)
    batch = x, numbers.integers(0, 10, 512)
    trainings = []
    for place in ({"device": PLACE}, {"devices": parallel.initialize(PLACE)}):
        model = make(SIZE)
        given = model, optimizer_of(model), None, loss_of(model)
        trainings.append(nn.Training(*given, optimize="none", **place))
    for training in trainings:
        seconds(training, batch)
    pairs = [[seconds(training, batch) for training in trainings] for _ in range(RUNS)]
    ratio = statistics.median(mesh / none for none, mesh in pairs)
    each = statistics.median(none for none, _ in pairs) / STEPS
    text = f"{ratio:.3f} × without, of {each * 1e3:.2f} ms a step (bar {MOST_SLOWER})"
    return f"mesh of one, {make.__name__}", text, ratio <= MOST_SLOWER


def two_processes(make: Any, strategy: str) -> tuple[str, str, bool]:
    """The losses of two processes on one card against those of one."""
    label = f"two processes, {make.__name__}, {strategy}"
    program = Path(__file__).resolve()  # it imports from where this one does
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "anydevice", "launch", "-n", "2", str(program)]
        done = subprocess.run(
            [*command, "curve", make.__name__, strategy],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
    if done.returncode:
        return label, (done.stderr.strip().splitlines() or ["no word"])[-1][:100], False
    several = json.loads(done.stdout.strip().splitlines()[-1])
    one = curve(make, strategy)
    apart = max(abs(a - b) for a, b in zip(one, several, strict=True))
    return label, f"losses {apart:.1e} from one process (bar {MOST_APART:.0e})", apart <= MOST_APART


def main() -> None:
    rows = [mesh_of_one(make) for make in (ours, users)]
    rows += [two_processes(make, how) for make in (ours, users) for how in ("replicate", "shard")]
    for label, text, met in rows:
        print(f"{'✓' if met else '✗'} {label}  {text}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["curve"]:
        losses = curve({"ours": ours, "users": users}[sys.argv[2]], sys.argv[3])
        if parallel.initialize(PLACE).rank == 0:
            print(json.dumps(losses), flush=True)
    else:
        main()
