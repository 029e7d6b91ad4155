"""The same training in one process and in several of PyTorch, which fork from one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SET_UP = """
import contextlib, os, signal, sys, time
import numpy as np, torch, torch._dynamo, torch.distributed
import anydevice
from anydevice import nn, parallel
from anydevice.training import spreading

numbers = np.random.default_rng(0)
X = numbers.standard_normal((102, 64)).astype(np.float32)  # the last batch has two rows
Y = numbers.integers(0, 10, 102)
T = torch.nn
anydevice.device("cpu", engine="torch")  # found once, for all that fork from here

def ours():
    return nn.build(nn.Dense(64, 256), "gelu", nn.Dropout(0.2), nn.Dense(256, 256), "gelu",
                    nn.Dropout(0.1), nn.Dense(256, 10), seed=1,
                    device=anydevice.device("cpu", engine="torch"))

def users():
    torch.manual_seed(torch.initial_seed() + parallel.initialize("cpu").rank)  # ranks differ
    torch.manual_seed(4)
    return T.Sequential(T.Linear(64, 256), T.GELU(), T.Dropout(0.2), T.Linear(256, 256), T.GELU(),
                        T.Dropout(0.1), T.Linear(256, 10))

def trained(make, epochs=2, **options):
    mesh = parallel.initialize("cpu")
    model = make()
    own = isinstance(model, nn.Model)
    given = {"loss": "cross_entropy" if own else T.functional.cross_entropy, "epochs": epochs,
             "clip": 1.0, "progress": False, "seed": 3, "data": nn.Batches(X, Y, size=50),
             "optimizer": nn.AdamW(1e-3) if own else torch.optim.AdamW(model.parameters(), 1e-3),
             "optimize": "none"}
    given |= options
    data, optimizer, loss = (given.pop(name) for name in ("data", "optimizer", "loss"))
    result = nn.train(model, data, optimizer, loss, devices=mesh, **given)
    if mesh.size > 1:
        assert result.report.spread.startswith(f"{mesh.size} processes, replicate"), result.report
    return [epoch.loss for epoch in result.history]

def apart(one, several):
    return max(abs(p - q) for losses in several for p, q in zip(one, losses, strict=True))

def failing(function, *given, processes=2, **options):
    def called():
        function(*given, **options)
    began = time.monotonic()
    try:
        parallel.launch(called, processes=processes)
    except anydevice.AnyDeviceError as error:
        assert time.monotonic() - began < 20
        return str(error)
    raise SystemExit("nothing was raised")
"""

SAME = """
several = {(make, n): parallel.launch(trained, make, processes=n)
           for make in (ours, users) for n in (2, 3, 4)}
for make in (ours, users):
    several[make, "added"] = parallel.launch(lambda: trained(make, 1, accumulate=2), processes=3)

def unweighted(self, batch, own=spreading.ProcessSpread._own):
    part, rows, share = own(self, batch)
    return part, rows, (1 / self._group.size if share else 0.0)

def mask_per_shard(self, batch, own=spreading.ProcessSpread._own):
    part, (first, count, every), share = own(self, batch)
    return part, (0, count, count), share

# What the bar of 1e-6 is for: these would be taken for right by a weaker test.
spreading._ROUNDING = 1.0
mutants = {}
for mutant in (unweighted, mask_per_shard):
    whole, spreading.ProcessSpread._own = spreading.ProcessSpread._own, mutant
    for make in (ours, users):
        mutants[make, mutant.__name__] = parallel.launch(trained, make, 1, processes=3)
    spreading.ProcessSpread._own = whole

for make in (ours, users):
    one, added = trained(make), trained(make, 1, accumulate=2)
    for n in (2, 3, 4):
        assert apart(one, several[make, n]) <= 1e-6, (make, n, apart(one, several[make, n]))
    assert apart(added, several[make, "added"]) <= 1e-6, make
    for (made, name), losses in mutants.items():
        if made is make:
            assert apart(one[:1], losses) > 1e-4, (make, name, apart(one, losses))
print("held")
"""

REFUSED = """
def masked(output, y):
    kept = (y > 3).float()
    return (T.functional.cross_entropy(output, y, reduction="none") * kept).sum() / kept.sum()

told = failing(trained, users, loss=masked)
assert "UnsupportedError" in told and "it is no mean over rows" in told, told

def others():
    trained(ours, data=nn.Batches(X + parallel.initialize("cpu").rank, Y, size=50))

told = failing(others)
assert "the processes have different batches" in told, told

def statistics():
    return nn.build(nn.Dense(64, 10), nn.BatchNorm(10), seed=1,
                    device=anydevice.device("cpu", engine="torch"))

told = failing(trained, statistics, optimizer=nn.SGD(0.1), loss="cross_entropy")
assert "BatchNorm" in told and "statistics of whole batches" in told, told
assert "hold all parameters each" in failing(trained, ours, strategy="shard")

wrong = X.copy()
wrong[3] = np.nan
told = failing(trained, ours, data=nn.Batches(wrong, Y, size=50))
assert "the batch itself holds NaN values in x" in told, told
print("held")
"""

SAVED = """
for make in (ours, users):
    name = f"{make.__name__}.safetensors"
    parallel.launch(lambda: trained(make, 1, save=name), processes=4)
    two = parallel.launch(lambda: trained(make, resume=name), processes=2)
    whole = parallel.launch(trained, make, processes=1)[0]
    one = parallel.launch(lambda: trained(make, resume=name), processes=1)[0]
    assert apart(whole, [one, *two]) <= 1e-6, (make, whole, one, two)

# Ctrl-C in one process stops all of them after the same step.
def interrupted():
    mesh, steps = parallel.initialize("cpu"), []

    class Interrupting(nn.Callback):
        def step(self, moment):
            steps.append(moment)
            if mesh.rank == 1 and len(steps) == 2:
                os.kill(os.getpid(), signal.SIGINT)

    result = nn.train(ours(), nn.Batches(X, Y, size=20), nn.AdamW(1e-3), "cross_entropy", epochs=9,
                      devices=mesh, optimize="none", callbacks=Interrupting(), save="c.safetensors")
    return result.stopped, len(steps)

stopped = parallel.launch(interrupted, processes=2)
assert stopped == [("Ctrl-C", 3)] * 2, stopped
print("held")
"""


def held(program: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def torch_is_there() -> None:
    pytest.importorskip("torch")


def test_several_processes_train_as_one(tmp_path: Path) -> None:
    """The same losses, also where one has no rows; the same files; what would differ is refused.

    All in one program, since importing PyTorch takes longest. The single process comes last: once
    it has computed, a fork may be unsafe.
    """
    assert held(SET_UP + REFUSED + SAVED + SAME, tmp_path).split() == ["held"] * 3
