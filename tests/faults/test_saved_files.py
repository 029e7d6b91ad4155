"""Saved models and checkpoints that are read, written and replaced by several processes at once."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import anydevice
from anydevice import nn
from anydevice._core.device import Device
from anydevice._core.locks import FileLock
from anydevice._core.trees import leaves, mapped
from anydevice.errors import ConfigurationError

fcntl = pytest.importorskip("fcntl", reason="files are replaced and locked as on POSIX")

CPU = Device("cpu", engine="numpy")

SAVER = """
import os, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
from test_saved_files import numbered, nn
models = [numbered(number) for number in (1, 2)]
print("saving", flush=True)
while True:
    for model in models:
        nn.save(model, sys.argv[2])
"""


def numbered(number: int) -> nn.Model:
    """A model whose layers and whose parameters both hold its number."""
    layer = nn.Chain(nn.Dense(4, 8), nn.Dropout(number / 10), nn.Dense(8, 2))
    model = nn.Model(layer, device=anydevice.device("cpu", engine="numpy"))
    return model.with_parameters(mapped(lambda x: np.full_like(x, number), model.parameters))


def load_while_another_process_saves(path: Path, times: int, changes: int) -> Counter[str]:
    """Load `times` times or more, until the file has changed `changes` times."""
    nn.save(numbered(1), path)
    saver = subprocess.Popen(
        [sys.executable, "-c", SAVER, __file__, str(path)], stdout=subprocess.PIPE
    )
    found: Counter[str] = Counter()
    changed, before, began = 0, "", time.monotonic()
    try:
        assert saver.stdout.readline() == b"saving\n"
        while found.total() < times or (changed < changes and time.monotonic() - began < 60):
            model = nn.load(path, CPU)
            number = model.layer.layers[1].rate * 10  # type: ignore[attr-defined]
            values = {float(x) for leaf in leaves(model.parameters) for x in leaf.flat}
            name = f"model {number:g}" if values == {number} else "mixed"
            found[name] += 1
            changed, before = changed + (name != before), name
        assert saver.poll() is None
    finally:
        saver.kill()
        saver.communicate()
    return found


@pytest.mark.parametrize("times", [400, pytest.param(9000, marks=pytest.mark.soak)])
def test_a_model_saved_during_a_load_is_one_or_the_other(tmp_path: Path, times: int) -> None:
    found = load_while_another_process_saves(tmp_path / "model.safetensors", times, times // 40)
    assert set(found) == {"model 1", "model 2"}


TRAINER = """
import os, sys, time
sys.path.insert(0, os.path.dirname(sys.argv[1]))
from test_saved_files import train

def epoch_ended(moment):
    print("training", flush=True)
    if os.fork():
        print("forked", flush=True)
    time.sleep(60)

train(sys.argv[2], callbacks=epoch_ended)
"""


def train(path: str | Path, **options: Any) -> nn.Trained:
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)
    model = nn.Model(nn.Dense(4, 4), device=anydevice.device("cpu", engine="numpy"))
    return nn.train(
        model,
        nn.Batches(x, x, size=8),
        nn.AdamW(1e-2),
        "mean_squared_error",
        epochs=2,
        device=anydevice.device("cpu", engine="torch"),
        optimize="none",
        progress=False,
        save=path,
        **options,
    )


def test_a_second_training_on_one_file_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path, link = tmp_path / "run.safetensors", tmp_path / "link.safetensors"
    first = subprocess.Popen(
        [sys.executable, "-c", TRAINER, __file__, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert [first.stdout.readline() for _ in range(2)] == ["training\n", "forked\n"]
        before = path.read_bytes()
        link.symlink_to(path)
        for name, resume in ((path, True), (path, False), (path, None), (link, True)):
            with pytest.raises(
                ConfigurationError, match="wait until it has ended, or give save= another path"
            ) as caught:
                train(name, resume=resume)
            assert f"process {first.pid} on {os.uname().nodename}" in str(caught.value)
            assert caught.value.source == "save"
        assert path.read_bytes() == before
        train(tmp_path / "other.safetensors")
        first.kill()  # and its forked child lives on, as a worker that loads data may
        first.wait()
        assert len(train(path, resume=True).history) == 2
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate()
    assert sorted(os.listdir(tmp_path)) == [link.name, "other.safetensors", path.name]


LOOP = """
import os, sys, time
sys.path.insert(0, os.path.dirname(sys.argv[1]))
from test_saved_files import own_loop

training = own_loop()
training.save(sys.argv[2])
print("saved", flush=True)
time.sleep(60)
"""


def own_loop() -> nn.Training:
    x = np.ones((8, 4), np.float32)
    model = nn.Model(nn.Dense(4, 4), device=anydevice.device("cpu", engine="torch"))
    return nn.Training(model, nn.AdamW(1e-2), [(x, x)], "mean_squared_error", optimize="none")


def test_of_two_processes_with_loops_of_their_own_one_may_save_to_a_file(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path, other = tmp_path / "run.safetensors", tmp_path / "other.safetensors"
    command = [sys.executable, "-c", LOOP, __file__, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout.readline() == "saved\n"
            before, training = path.read_bytes(), own_loop()
            for save in (partial(training.save, path), partial(train, path, resume=True)):
                with pytest.raises(ConfigurationError, match=f"process {first.pid} on"):
                    save()
            assert path.read_bytes() == before
            training.save(other)
        finally:
            first.kill()
    training.save(path)
    second = own_loop()  # as in a notebook whose cell runs again
    second.load(path)
    second.save(path)
    assert [name for name in os.listdir(tmp_path) if "lock" in name] == [".run.safetensors.lock"]
    del training, second
    gc.collect()
    assert sorted(os.listdir(tmp_path)) == [other.name, path.name]


def test_training_works_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.safetensors"
    (tmp_path / ".run.safetensors.lock").mkdir()
    with FileLock(path) as locked:
        assert not locked
    (tmp_path / ".run.safetensors.lock").rmdir()
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError("this file system has no locks")))
    with FileLock(path) as locked, FileLock(path) as again:
        assert not locked
        assert not again
    assert os.listdir(tmp_path) == []


def test_threads_and_names_from_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    with FileLock(path), pytest.raises(BlockingIOError) as caught, FileLock(path):
        pass
    assert caught.value.strerror == f"process {os.getpid()} on {os.uname().nodename}"
    with FileLock(path):
        (tmp_path / ".run.safetensors.lock").write_text("process 1 on \x1b[31mred")
        with pytest.raises(BlockingIOError, match="another process"), FileLock(path):
            pass
    with FileLock(path) as locked:
        assert locked


def test_of_many_only_one_is_in_the_block(tmp_path: Path) -> None:
    path, inside, most, entered = tmp_path / "run.safetensors", 0, 0, 0

    def enter() -> None:
        nonlocal inside, most, entered
        for _ in range(200):
            with suppress(BlockingIOError), FileLock(path) as locked:
                assert locked
                inside += 1
                most, entered = max(most, inside), entered + 1
                time.sleep(0)
                inside -= 1

    with ThreadPoolExecutor(8) as pool:
        for each in [pool.submit(enter) for _ in range(8)]:
            each.result()
    assert most == 1
    assert entered > 8
    assert os.listdir(tmp_path) == []
