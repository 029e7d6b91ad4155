"""A process of a training that dies: who is shown, and how the training goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FEW = {"OMP_NUM_THREADS": "1"}

SET_UP = """
import json, os, pathlib, signal, sys, time
import numpy as np
import anydevice
from anydevice import nn, parallel

mesh = parallel.initialize("cpu")
numbers = np.random.default_rng(0)
X = numbers.standard_normal((52, 8)).astype(np.float32)
Y = numbers.integers(0, 4, 52).astype(np.int32)
model = nn.build(nn.Dense(8, 32), "gelu", nn.Dropout(0.2), nn.Dense(32, 4), seed=1,
                 device=mesh.devices[0])
def train(*callbacks, epochs=6, **options):
    done = nn.train(model, nn.Batches(X, Y, size=10), nn.AdamW(1e-2), "cross_entropy",
                    epochs=epochs, devices=mesh, seed=3, clip=1.0, progress=False,
                    optimize="none" if mesh.engine == "torch" else "default",
                    callbacks=callbacks, **options)
    return [each.loss for each in done.history]

KEPT = {"save": "training.safetensors", "save_every": 2, "resume": True}
"""

DIES = (
    SET_UP
    + """
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]

class Dying(nn.Callback):
    def step(self, moment):
        if mesh.rank == 1:
            if moment.steps == 9 and restart == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            if moment.steps == 15 and restart == "1":
                raise RuntimeError("the disk is full")

curve = train(Dying(), **KEPT)
print(json.dumps([curve, train()]))
"""
)

WAITS = (
    SET_UP
    + """
class Slow(nn.Callback):
    def step(self, moment):
        time.sleep(0.02)  # 60 steps: longer than until the kill

pathlib.Path(f"pid{mesh.rank}").write_text(str(os.getpid()))
curve = train(Slow(), epochs=10, **KEPT)
if mesh.rank == 0:
    print(json.dumps([curve, train(epochs=10)] if mesh.group is None else curve))
"""
)


def launch(program: str, folder: Path, *words: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(program)
    return subprocess.Popen(
        [sys.executable, "-m", "anydevice", "launch", *words, "train.py"],
        cwd=folder,
        env={**os.environ, **FEW},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it wrote; once it has ended well."""
    printed, told = process.communicate(timeout=120)
    assert process.returncode == 0, told[-3000:]
    return printed, told


def apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.fixture(params=["torch", pytest.param("jax", marks=pytest.mark.soak)])
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    pytest.importorskip(name)
    return name


def test_who_dies_is_shown_last_and_the_training_goes_on(engine: str, tmp_path: Path) -> None:
    """A kill, then an error, of which no restart is left; the rest of it is trained by one."""
    process = launch(DIES, tmp_path, "-n", "2", "--restarts", "1", "--engine", engine)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 1
    killed, failed = told.split("starting again (1 of 1)")
    assert "process 1 of 2 failed first (ended by SIGKILL)" in killed
    assert "process 1 of 2 failed first (exit code 1)" in failed
    assert failed.strip().endswith("RuntimeError: the disk is full"), failed[-2000:]
    several, one = json.loads(ended(launch(DIES, tmp_path, "--engine", engine))[0])
    assert len(several) == 6
    assert apart(several, one) <= 1e-6


@pytest.mark.soak
def test_ten_kills_at_any_time(engine: str, tmp_path: Path) -> None:
    one = json.loads(ended(launch(WAITS, tmp_path / "one", "--engine", engine))[0])[1]
    chance = random.Random(17)
    for number in range(10):
        folder = tmp_path / str(number)
        process = launch(WAITS, folder, "-n", "3", "--restarts", "1", "--engine", engine)
        rank = chance.randrange(3)
        while not (folder / "training.safetensors").is_file():
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(chance.random())
        os.kill(int((folder / f"pid{rank}").read_text()), signal.SIGKILL)
        printed, told = ended(process)
        assert f"process {rank} of 3 failed first (ended by SIGKILL)" in told
        assert apart(one, json.loads(printed.splitlines()[-1])) <= 1e-6  # Gloo writes there too
