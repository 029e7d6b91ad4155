"""Saved models and checkpoints that are read, written and replaced by several processes at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import anydevice
from anydevice import nn
from anydevice.core.device import Device
from anydevice.core.trees import leaves, mapped
from anydevice.training.checkpoints import is_checkpoint

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


def load_while_another_process_saves(path: Path, times: int) -> Counter[str]:
    nn.save(numbered(1), path)
    saver = subprocess.Popen(
        [sys.executable, "-c", SAVER, __file__, str(path)], stdout=subprocess.PIPE
    )
    found: Counter[str] = Counter()
    try:
        assert saver.stdout is not None
        assert saver.stdout.readline() == b"saving\n"
        for _ in range(times):
            model = nn.load(path, CPU)
            number = model.layer.layers[1].rate * 10  # type: ignore[attr-defined]
            values = {float(x) for leaf in leaves(model.parameters) for x in leaf.flat}
            found[f"model {number:g}" if values == {number} else "mixed"] += 1
        assert saver.poll() is None
    finally:
        saver.kill()
        saver.communicate()
    return found


@pytest.mark.skipif(os.name != "posix", reason="an opened file can be replaced")
@pytest.mark.parametrize("times", [400, pytest.param(9000, marks=pytest.mark.soak)])
def test_a_model_that_is_saved_while_it_is_loaded_is_one_or_the_other(
    tmp_path: Path, times: int
) -> None:
    found = load_while_another_process_saves(tmp_path / "model.safetensors", times)
    assert set(found) == {"model 1", "model 2"}
    assert min(found.values()) > times / 10


TRAINING = """
import sys, time, numpy, anydevice
from anydevice import nn
from anydevice.errors import AnyDeviceError
x = numpy.linspace(-1, 1, 4096, dtype=numpy.float32).reshape(64, 64)
model = nn.Model(nn.Dense(64, 64), device=anydevice.device("cpu", engine="numpy"))
for _ in range(12):
    nn.train(
        model, nn.Batches(x, x, size=8), nn.AdamW(1e-2), "mean_squared_error", epochs=2,
        device=anydevice.device("cpu", engine="torch"), optimize="none", progress=False,
        save=sys.argv[1], save_every=1, resume=False,
    )
"""


@pytest.mark.soak
def test_two_trainings_on_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "run.safetensors"
    command = [sys.executable, "-c", TRAINING, str(path)]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [each.communicate()[1] for each in both]
    assert [each.returncode for each in both] == [0, 0], said
    assert os.listdir(tmp_path) == [path.name]
    assert is_checkpoint(path)
