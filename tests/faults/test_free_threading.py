"""Python without its global lock: 16 threads at once, each of which gets what one alone gets.

`ANYDEVICE_TEST_FREE_THREADED` names such an interpreter, with the dependencies of anydevice
installed; else `python3.14t` and `python3.13t` are looked for on the path.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import anydevice
from tests.programs import run_python

PROGRAM = r"""
import json, sys, threading, traceback, warnings
from pathlib import Path
import anydevice

folder, threads, rounds = Path(sys.argv[1]), 16, int(sys.argv[2])
first = threading.Barrier(threads)
failed, answers = {}, {}

def found(name, work, times):
    # Where threads are the first to use something, and then again and again.
    said = set()
    def run(number):
        first.wait()
        for again in range(times):
            try:
                said.add(work(number))
            except Exception as error:
                failed.setdefault(name, f"{type(error).__name__}: {error}"[:300])
                traceback.print_exc()
                return
    started = [threading.Thread(target=run, args=(n,)) for n in range(threads)]
    for thread in started: thread.start()
    for thread in started: thread.join()
    answers[name] = sorted(said)

found("devices", lambda n: str(anydevice.devices()), 3)
found("discover", lambda n: str(anydevice.discover(refresh=True)["cpu"].usable), 2)
found("device", lambda n: str(anydevice.device("cpu", engine="numpy").engine), rounds)

import numpy as np
from anydevice import nn, ops
cpu = anydevice.device("cpu", engine="numpy")
x = np.linspace(-3, 3, 24 * 16, dtype=np.float32).reshape(24, 16)

def use(number):
    with anydevice.use_device("cpu" if number % 2 else cpu):
        return str(anydevice.device().kind)

def move(number):
    shared = x[:2]
    moved = anydevice.to_device({"a": shared, "b": [shared, (x.T, 3)]}, cpu, copy=True)
    return f"{float(moved['b'][1][0].sum()):.6f} {moved['a'] is moved['b'][0]}"

def compute(number):
    q = x.reshape(1, 24, 2, 8).swapaxes(1, 2)
    values = [ops.softmax(x), ops.gelu(x), ops.matmul(x, x.T), ops.layernorm(x, x[0], x[1]),
              ops.attention(q, q, q, causal=True), ops.sum(x, axis=0)]
    return " ".join(f"{float(np.abs(value).sum()):.5f}" for value in values)

def draw(number):
    return f"{float(anydevice.rng(7, cpu).normal(100_000).sum()):.6f}"

def ahead(number):
    return str([float(batch.sum()) for batch in anydevice.prefetch([x, x[:3]], cpu)])

def model(number):
    made = nn.Model(nn.Chain(nn.Dense(16, 8), "relu", nn.Dense(8, 2)), device=cpu)
    path = folder / f"{number}.safetensors"
    nn.save(made, path)
    return f"{float(nn.load(path, cpu)(x).sum()):.6f}"

def shared_file(number):
    nn.save(nn.Model(nn.Dense(4, 2), device=cpu, seed=number % 2), folder / "one.safetensors")
    return str(nn.load(folder / "one.safetensors", cpu)(x[:, :4]).shape)

def settle(number):
    anydevice.prefer("cpu", engine="numpy")
    anydevice.configure(time_limit=5.0 + number % 2)
    return str(anydevice.configure().time_limit in (5.0, 6.0))

def compiled(number):
    made = nn.Model(nn.Chain(nn.Dense(16, 8), "gelu"), device=cpu)
    return f"{float(anydevice.compile(made, cpu, verify=x)(x).sum()):.5f}"

for name, work, times in [
    ("use_device", use, rounds), ("to_device", move, rounds), ("ops", compute, rounds),
    ("rng", draw, 5), ("prefetch", ahead, 10), ("model", model, 10),
    ("shared file", shared_file, 10), ("settings", settle, 5), ("compile", compiled, 2),
]:
    found(name, work, times)

print(json.dumps([failed, answers, sys._is_gil_enabled()]))
"""
ONE_ANSWER_EACH = 12
NAMED = os.environ.get("ANYDEVICE_TEST_FREE_THREADED")  # tests themselves see no such variables


def interpreter() -> str:
    """One without the lock that has what anydevice needs."""
    python = NAMED or shutil.which("python3.14t") or shutil.which("python3.13t")
    if python is None:
        pytest.skip(
            "no Python without the global lock is here; name one that has anydevice's "
            "dependencies: ANYDEVICE_TEST_FREE_THREADED=/path/python3.13t"
        )
    asked = "import sys, numpy, ml_dtypes, psutil, tomlkit, rich; sys.exit(sys._is_gil_enabled())"
    tried = run_python("-c", asked, python=python)
    if tried.returncode and NAMED is None:
        pytest.skip(f"{python} lacks what anydevice needs: {tried.stderr[-200:]}")
    assert tried.returncode == 0, tried.stderr
    return python


@pytest.mark.soak
@pytest.mark.parametrize("run", range(3))
def test_16_threads_without_the_global_lock(tmp_path: Path, home: Path, run: int) -> None:
    source = Path(anydevice.__file__).parents[1]
    done = run_python(
        *("-c", PROGRAM, str(tmp_path), "60"),
        env={"PYTHONPATH": str(source), "ANYDEVICE_HOME": str(home)},
        cwd=tmp_path,
        python=interpreter(),
        limit=None,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    failed, answers, has_lock = json.loads(done.stdout.splitlines()[-1])
    assert failed == {}, done.stderr[-4000:]
    assert not has_lock
    assert len(answers) == ONE_ANSWER_EACH
    assert {name: said for name, said in answers.items() if len(said) != 1} == {}
