"""Freezing: which parameters training changes, chosen on the model by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn
from anydevice._core.device import Device
from anydevice._core.record import replace
from anydevice._core.trees import leaf_names
from anydevice._formats import model as tensor_files
from anydevice._nn.layer import Updates
from anydevice._nn.model import frozen_layers, trained_leaves
from anydevice.errors import ConfigurationError, TransferError

BLOCKS = nn.Chain(nn.Embedding(9, 8), nn.TransformerBlock(8, 2), nn.Dense(8, 2, bias=False))


def small(device: Device | str = "cpu") -> nn.Model:
    return nn.build(nn.Dense(4, 8), "relu", nn.Dense(8, 2), device=device)


@pytest.mark.parametrize(
    ("names", "frozen"),
    [
        (["[0]"], ["[0].bias", "[0].weight"]),
        (["Chain[2]"], ["[2].bias", "[2].weight"]),
        (["*.bias"], ["[0].bias", "[2].bias"]),
        (["[?].weight", "[0]*"], ["[0].bias", "[0].weight", "[2].weight"]),
        ([], ["[0].bias", "[0].weight", "[2].bias", "[2].weight"]),
        (["Chain"], ["[0].bias", "[0].weight", "[2].bias", "[2].weight"]),
    ],
)
def test_layers_and_parameters_are_frozen_by_name(names: list[str], frozen: list[str]) -> None:
    model = small()
    held = model.freeze(*names)
    assert sorted(held.frozen) == frozen
    known = leaf_names(model.parameters)
    assert trained_leaves(held) == [name not in frozen for name in known]
    assert trained_leaves(model) == [True] * 4
    assert trained_leaves(held.unfreeze()) == [True] * 4
    assert sorted(held.unfreeze("*.bias").frozen) == [each for each in frozen if "bias" not in each]


def test_parts_of_layers_are_frozen_by_name() -> None:
    model = nn.Model(BLOCKS, (5,), device="cpu").freeze("[1].attention", "*_norm.weight")
    assert sorted(model.frozen) == [
        "[1].attention.output",
        "[1].attention.qkv",
        "[1].attention_norm.weight",
        "[1].mlp_norm.weight",
    ]
    assert nn.build(nn.Dense(3, 2), device="cpu").freeze("bias").frozen == {".bias"}


@pytest.mark.parametrize("name", ["[3]", "[0].wieght", "", "weights", "[0"])
def test_an_unknown_name_is_refused_with_the_nearest(name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        small().freeze("[0]", name)
    assert repr(name) in str(caught.value)
    assert "'[0]" in str(caught.value)
    with pytest.raises(ConfigurationError, match="unfreeze takes names"):
        small().unfreeze(0)  # type: ignore[arg-type]


def test_what_is_frozen_stays_so_wherever_the_model_goes(cpu: Device, tmp_path: Path) -> None:
    model = small(cpu).freeze("[0]")
    again = nn.recompute(model)
    path = tmp_path / "model.safetensors"
    nn.save(model, path)
    for other in (
        model.with_parameters(model.parameters),
        anydevice.to_device(model, "cpu"),
        anydevice.to_numpy(model),
        again,
        nn.load(path, cpu),
        nn.train(
            model, [(np.ones((2, 4)), np.ones((2, 2)))], nn.SGD(0.1), "mean_squared_error", epochs=1
        ).model,
    ):
        assert other.frozen == {"[0].bias", "[0].weight"}


def test_a_file_that_freezes_what_it_lacks_is_refused(tmp_path: Path) -> None:
    model, path = small(), tmp_path / "model.safetensors"
    nn.save(model, path)
    found = tensor_files.read(path, "model", anydevice.device("cpu", engine="numpy"))
    assert "frozen" not in found.metadata  # as files of version 0.1 are
    metadata = {**found.metadata, "frozen": ["[7].weight"]}
    tensor_files.write(path, "model", {"parameters": model.parameters}, metadata)
    with pytest.raises(TransferError, match=r"freezes \['\[7\]\.weight'\]"):
        nn.load(path, "cpu")


def test_a_layer_with_frozen_state_does_as_in_inference(cpu: Device) -> None:
    layers = nn.Chain(nn.Dense(4, 6), nn.BatchNorm(6)), nn.BatchNorm(6), nn.Dropout(0.5)
    model = nn.build(*layers, device=cpu)
    held = model.freeze("[0]")
    assert frozen_layers(model) == frozen_layers(model.freeze("*.bias", "*.mean")) == frozenset()
    assert frozen_layers(held) == {"[0][1]"}
    x = anydevice.to_device(np.random.default_rng(0).normal(size=(5, 4)).astype("float32"), cpu)
    expected = anydevice.to_numpy(layers[0].apply(model.parameters[0], x, nn.Run()))
    for each, changed in ((model, {"[0][1]", "[1]"}), (held, {"[1]"})):
        updates: Updates = {}
        seen: dict[str, Any] = {}
        run = nn.Run(True, 1, 1, "", lambda path, _, y: seen.update({path: y}), updates)  # noqa: B023
        each.apply(each.parameters, x, replace(run, frozen=frozen_layers(each)))
        assert {path for path, _ in updates} == changed
        assert np.allclose(anydevice.to_numpy(seen["[0]"]), expected) == (each is held)
        assert (anydevice.to_numpy(seen["[2]"]) == 0).any(), "dropout goes on"
