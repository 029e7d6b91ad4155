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
