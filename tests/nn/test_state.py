"""Layers with state, which training updates without gradients: where it is, and what it becomes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn, ops
from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES
from anydevice._core.trees import leaves
from anydevice._machine.engines import registry
from anydevice._nn.layer import Layer, Updates, state_places
from tests.comparing import COPIED, assert_same_bits
from tests.nn.test_layers import CLOSE, LAYERS, example, parameters_of, wide

Array = np.ndarray[Any, Any]

SHAPES = [(6,), (6, 5), (6, 4, 3)]
"""Of examples that `BatchNorm(6)` takes: features, sequences of channels, and images."""


def at(parameters: Any, path: str) -> Any:
    """The parameters that a path leads to."""
    for name, place in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        parameters = parameters[name or int(place)]
    return parameters


def batch_norm(shape: tuple[int, ...]) -> tuple[Layer, Any, Array]:
    layer = nn.BatchNorm(6, momentum=0.3)
    x = np.random.default_rng(1).normal(3, 2, (4, *shape)).astype(np.float32)
    return layer, parameters_of(layer), x


def of_torch(parameters: Any, x: Array) -> tuple[Array, Updates, dict[str, Array]]:
    """The output in training, the state after it, and gradients of the sum of output³."""
    torch = pytest.importorskip("torch")
    kind = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}[x.ndim]
    module = kind(6, momentum=0.3)
    names = {"mean": "running_mean", "variance": "running_var"}
    module.load_state_dict(
        {names.get(name, name): torch.tensor(value) for name, value in parameters.items()},
        strict=False,
    )
    given = torch.tensor(x, requires_grad=True)
    y = module(given)
    (y**3).sum().backward()
    state = {("", name): getattr(module, theirs).numpy() for name, theirs in names.items()}
    gradients = {name: getattr(module, name).grad.numpy() for name in ("weight", "bias")}
    return y.detach().numpy(), state, {**gradients, "x": given.grad.numpy()}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_norm_in_training_is_that_of_torch(shape: tuple[int, ...], anywhere: Device) -> None:
    layer, parameters, x = batch_norm(shape)
    expected, state, _ = of_torch(parameters, x)
    there, x_there = anydevice.to_device((parameters, x), anywhere)
    found: Updates = {}
    y = layer.apply(there, x_there, nn.Run(training=True, updates=found))
    np.testing.assert_allclose(anydevice.to_numpy(y), expected, CLOSE, CLOSE)
    assert found.keys() == state.keys() == set(state_places(layer))
    for key, value in state.items():
        np.testing.assert_allclose(anydevice.to_numpy(found[key]), value, CLOSE, CLOSE)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_norm_has_torchs_gradients(shape: tuple[int, ...], trainable: Device) -> None:
    layer, parameters, x = batch_norm(shape)
    _, _, expected = of_torch(parameters, x)
    autodiff = registry.load(trainable.engine or "").autodiff

    def loss(given: Any) -> Any:
        y = layer.apply(given, given["x"], nn.Run(training=True, updates={}))
        return ops.sum(ops.multiply(y, ops.multiply(y, y)))

    _, gradients = autodiff.value_and_grad(loss)(
        anydevice.to_device({**parameters, "x": x}, trainable)
    )
    for name, value in expected.items():
        within = 64 * CLOSE * max(1.0, np.abs(value).max())
        np.testing.assert_allclose(anydevice.to_numpy(gradients[name]), value, 0, within)
    for name in layer.state_names:
        assert not anydevice.to_numpy(gradients[name]).any(), f"{name} is not trained"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_state_is_float32_whatever_is_computed_in(dtype: str, cpu: Device) -> None:
    layer, parameters, x = batch_norm((6, 4, 3))
    kind = DTYPES[dtype].numpy()
    narrow = {
        name: value if name in layer.state_names else value.astype(kind)
        for name, value in parameters.items()
    }
    exact: Updates = {}
    expected = layer.apply(wide(parameters), wide(x), nn.Run(training=True, updates=exact))
    there, x_there = anydevice.to_device((narrow, x.astype(kind)), cpu)
    found: Updates = {}
    y = anydevice.to_numpy(layer.apply(there, x_there, nn.Run(training=True, updates=found)))
    assert y.dtype == kind
    np.testing.assert_allclose(y.astype(np.float64), expected, 0.02, 0.02)
    for key, value in found.items():
        assert anydevice.to_numpy(value).dtype == np.float32
        np.testing.assert_allclose(anydevice.to_numpy(value), exact[key], 0.01)


def test_inference_and_a_single_value_use_the_state_and_leave_it(cpu: Device) -> None:
    layer, parameters, x = batch_norm((6,))
    scale = parameters["weight"] / np.sqrt(parameters["variance"] + 1e-5)
    expected = (x - parameters["mean"]) * scale + parameters["bias"]
    there, x_there = anydevice.to_device((parameters, x), cpu)
    for rows, training in ((4, False), (1, False), (1, True)):
        found: Updates = {}
        run = nn.Run(training=training, updates=found)
        y = layer.apply(there, ops.slice_axis(x_there, 0, 0, rows), run)
        np.testing.assert_allclose(anydevice.to_numpy(y), expected[:rows], CLOSE, CLOSE)
        assert bool(found) == training
        for (_, name), value in found.items():
            assert_same_bits(value, parameters[name], because=COPIED)


@pytest.mark.parametrize("name", LAYERS)
def test_paths_of_state_lead_through_the_parameters(name: str) -> None:
    """Every part of a layer with its own parameters is where its path says, and so is state."""
    layer, shape = LAYERS[name]
    parameters = parameters_of(layer)
    met: dict[str, tuple[Layer, Any]] = {}

    class Noting(nn.Run):
        def through(self, step: str, part: Layer, own: Any, x: Any) -> Any:
            path = self.path + step
            met[path] = part, own
            return part.apply(own, x, Noting(path=path))

    layer.apply(parameters, example(layer, shape), Noting())
    for path, (part, own) in met.items():
        if own:  # the dropouts of a block have none, and are no parts
            assert at(parameters, path) is own, path
            assert part in [each for where, each in places_of(layer) if where == path]
    for path, own_name in state_places(layer):
        assert own_name in at(parameters, path)


def places_of(layer: Layer, path: str = "") -> list[tuple[str, Layer]]:
    inside = [each for step, part in layer.parts for each in places_of(part, path + step)]
    return [(path, layer), *inside]


def test_state_is_found_inside_other_layers() -> None:
    deep = nn.Chain(nn.Dense(4, 6), nn.recompute(nn.Chain(nn.BatchNorm(6), nn.BatchNorm(6))))
    assert [path for path, _ in state_places(deep)] == ["[1][0]"] * 2 + ["[1][1]"] * 2
    assert state_places(nn.Chain(nn.Dense(4, 6), "relu", nn.LayerNorm(6))) == []


def test_a_layer_with_state_is_not_recomputed(trainable: Device) -> None:
    """Its updates are those of the step, and gradients stay: nothing of a checkpoint leaks."""
    layers = [nn.Dense(6, 6), "relu", nn.Dense(6, 6), nn.BatchNorm(6), nn.Dense(6, 6), "tanh"]
    plain = nn.Chain(*layers)
    there = anydevice.to_device(parameters_of(plain), trainable)
    x = anydevice.to_device(np.random.default_rng(2).normal(size=(4, 6)).astype("f4"), trainable)
    engine = registry.load(trainable.engine or "")
    results = []
    for layer in (plain, nn.recompute(plain)):
        found: Updates = {}

        def loss(parameters: Any, layer: Layer = layer, found: Updates = found) -> Any:
            y = layer.apply(parameters, x, nn.Run(training=True, updates=found))
            kept = [ops.sum(value) for value in found.values()]  # an error, if of a checkpoint
            return ops.add(ops.mean(ops.multiply(y, y)), ops.add(*kept))

        _, gradients = engine.autodiff.value_and_grad(loss)(there)
        assert set(found) == set(state_places(layer))
        results.append(anydevice.to_numpy(gradients))
    for one, other in zip(*map(leaves, results), strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-7)


def rows(count: int = 16) -> tuple[Array, Array]:
    drawn = np.random.default_rng(3)
    x = drawn.normal(2, 3, (count, 4)).astype(np.float32)
    return x, drawn.integers(0, 3, count).astype(np.int32)


def start(device: Device | str) -> nn.Model:
    layers = nn.Dense(4, 6), nn.BatchNorm(6, momentum=0.3), "relu", nn.Dense(6, 3)
    return nn.build(*layers, seed=4, device=device)


def trained(device: Device, epochs: int = 3, **options: Any) -> nn.Model:
    model, data = start(device), nn.Batches(*rows(), 4, shuffle=False)
    options |= {"epochs": epochs, "device": device, "optimize": "none"}
    return nn.train(model, data, nn.SGD(0.1), "cross_entropy", **options).model


def test_a_training_is_that_of_torch(trainable: Device) -> None:
    torch = pytest.importorskip("torch")
    norm = torch.nn.BatchNorm1d(6, momentum=0.3)
    module = torch.nn.Sequential(
        torch.nn.Linear(4, 6), norm, torch.nn.ReLU(), torch.nn.Linear(6, 3)
    )
    with torch.no_grad():
        for at in (0, 3):
            for name, value in anydevice.to_numpy(start("cpu").parameters[at]).items():
                getattr(module[at], name).copy_(torch.tensor(value))
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    x, y = map(torch.tensor, rows())
    for _ in range(3):
        for place in range(0, 16, 4):
            optimizer.zero_grad()
            output = module(x[place : place + 4])
            torch.nn.functional.cross_entropy(output, y[place : place + 4].long()).backward()
            optimizer.step()
    found = anydevice.to_numpy(trained(trainable).parameters)
    for name, theirs in (("mean", "running_mean"), ("variance", "running_var")):
        np.testing.assert_allclose(found[1][name], getattr(module[1], theirs), 1e-4, 1e-5)
    for at in (0, 1, 3):
        for name in ("weight", "bias"):
            value = getattr(module[at], name).detach().numpy()
            np.testing.assert_allclose(found[at][name], value, 1e-4, 1e-5)


@pytest.mark.parametrize("precision", ["mixed", "float16"])
def test_state_stays_float32_in_16_bits(precision: str, trainable: Device) -> None:
    norm = anydevice.to_numpy(trained(trainable, epochs=1, precision=precision).parameters)[1]
    assert {norm[name].dtype for name in ("mean", "variance")} == {np.dtype("float32")}
    assert norm["mean"].any()


def test_state_is_saved_resumed_and_compiled(trainable: Device, tmp_path: Path) -> None:
    """As the undisturbed training has it, bit for bit."""
    whole = trained(trainable)
    path = tmp_path / "run.safetensors"
    trained(trainable, epochs=1, save=path)
    resumed = trained(trainable, resume=path)
    nn.save(resumed, tmp_path / "model.safetensors")
    loaded = nn.load(tmp_path / "model.safetensors", trainable)
    for model in (resumed, loaded):
        pairs = zip(leaves(whole.parameters), leaves(model.parameters), strict=True)
        for one, other in pairs:
            assert_same_bits(one, other, because="the same programs ran twice")
    x = rows()[0]
    compiled = anydevice.compile(loaded, trainable, optimize="none", verify=x)
    alone = np.concatenate([anydevice.to_numpy(compiled(x[at : at + 1])) for at in range(4)])
    np.testing.assert_allclose(alone, anydevice.to_numpy(compiled(x))[:4], 1e-5, 1e-6)
