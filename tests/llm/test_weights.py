"""Parameters of decoders from folders: joined on the way, checked before they are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from anydevice import device
from anydevice.core.device import Device
from anydevice.engines import registry
from anydevice.llm.description import describe
from anydevice.llm.weights import load_parameters, random_parameters
from anydevice.planning.config import read_config


def place(engine: str) -> Device:
    return device("opencl" if engine == "opencl" else "cpu", engine=engine)


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "mlx", "opencl"])
def test_a_folder_becomes_parameters_of_each_engine(stories: Path, name: str) -> None:
    engine = registry.load(name)
    description = describe(read_config(stories))
    found = load_parameters(stories, description, place(name), "float32")
    state = load_file(stories / "model.safetensors")
    layer, theirs = found["layers"][3], "model.layers.3"
    joined = [state[f"{theirs}.self_attn.{each}_proj.weight"] for each in "qkv"]
    assert engine.owns(layer["qkv"]["weight"])
    assert np.array_equal(engine.to_host(layer["qkv"]["weight"]), np.concatenate(joined))
    joined = [state[f"{theirs}.mlp.{each}_proj.weight"] for each in ("gate", "up")]
    assert np.array_equal(engine.to_host(layer["gate_up"]["weight"]), np.concatenate(joined))
    assert set(found) == {"embedding", "layers", "norm"}
    assert len(found["layers"]) == len(description.layers)


def test_random_parameters_are_the_same_everywhere(stories: Path) -> None:
    description = describe(read_config(stories))
    found = {}
    for name in ("numpy", "torch", "jax", "mlx"):
        engine = registry.load(name)
        made = random_parameters(description, 3, place(name), "bfloat16")
        found[name] = engine.to_host(made["layers"][1]["gate_up"]["weight"]).astype("float32")
    first = found.pop("numpy")
    assert abs(first.std() * description.hidden**0.5 - 1) < 0.05
    assert len(np.unique(first)) > 500
    for other in found.values():
        assert np.array_equal(first, other)
