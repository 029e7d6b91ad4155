"""What `nn.train` does beside its steps: metrics, shares held back, frozen parameters, sizes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn
from anydevice._core.device import Device
from anydevice._core.trees import leaf_names, leaves
from anydevice.errors import ConfigurationError
from tests.comparing import SAME_PROGRAM, assert_same_values

DRAWN = np.random.default_rng(1)
X = DRAWN.normal(size=(90, 4)).astype(np.float32)
IDS = (X[:, 0] > 0).astype(np.int64) + (X[:, 1] > 0.5)
DATA = nn.Batches(X, IDS, size=32)
HELD = nn.Batches(X[:50], IDS[:50], size=32, shuffle=False)


def model_on(device: Device | str = "cpu") -> nn.Model:
    return nn.build(nn.Dense(4, 8), nn.BatchNorm(8), "relu", nn.Dense(8, 3), device=device)


def train(model: Any, data: Any = DATA, epochs: int = 2, **options: Any) -> nn.Trained:
    given = {"optimizer": nn.Adam(1e-2), "loss": "cross_entropy", "progress": False, **options}
    return nn.train(model, data, epochs=epochs, **given)


def compiling(device: Device) -> str:
    """Compilers of C++ take longer than these tests."""
    return "default" if device.engine == "jax" else "none"


def test_metrics_are_in_the_history(here: Device) -> None:
    def count(output: Any, target: Any) -> int:
        return int(output.shape[0])

    asked = ["accuracy", "macro_f1", count]
    options = {"device": here, "optimize": compiling(here)}
    trained = train(model_on(), validation=HELD, metrics=asked, **options)
    expected = nn.evaluate(trained.model, HELD, "cross_entropy", asked)
    last = trained.history[-1]
    assert last.metrics == pytest.approx(dict(expected.metrics), rel=1e-5)
    assert last.validation == pytest.approx(expected.loss, rel=1e-5)
    assert [len(each) for each in trained.history.metrics.values()] == [2, 2, 2]
    head = str(trained.history).splitlines()[0].split()
    assert head[:6] == ["epoch", "loss", "validation", "accuracy", "macro_f1", "count"]


def test_metrics_get_the_output_of_the_model_itself(here: Device) -> None:
    model = nn.build(nn.Dense(4, 1), "sigmoid", device="cpu")
    yes = (IDS > 0).astype(np.float32)[:, None]
    data = nn.Batches(X, yes, size=45, shuffle=False)
    asked = ["accuracy", "mae", "auc"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the sigmoid, once
        trained = train(
            model, data, 1, loss="binary_cross_entropy", validation=data, metrics=asked,
            device=here, optimize="none",
        )  # fmt: skip
    shares = nn.predict(trained.model, X)
    found = trained.history.metrics
    assert found["mae"] == pytest.approx([float(np.abs(shares - yes).mean())], 1e-5)
    assert found["accuracy"] == [float(((shares > 0.5) == (yes > 0)).mean())]


def test_a_share_is_held_back_by_the_seed(tmp_path: Path) -> None:
    data = nn.Batches(np.arange(50)[:, None], np.arange(50), size=8)
    parts = [data.split(0.2, seed) for seed in (0, 0, 1)]
    first, same, other = ([part.y.tolist() for part in pair] for pair in parts)
    assert first == same != other
    assert len(first[1]) == 10
    assert sorted(first[0] + first[1]) == list(range(50))
    assert first[1] != list(range(40, 50))
    assert parts[0][0].shuffle
    ordered = nn.Batches(np.arange(50)[:, None], np.arange(50), size=8, shuffle=False)
    assert ordered.split(0.2, 3)[1].y.tolist() == list(range(40, 50))

    options: dict[str, Any] = {"validation": 0.2, "metrics": "accuracy", "seed": 4}
    whole = train(model_on(), epochs=3, **options)
    rest, held = DATA.split(0.2, 4)
    by_hand = train(model_on(), rest, 3, validation=held, metrics="accuracy", seed=4)
    losses = [(each.loss, each.validation, each.metrics) for each in whole.history]
    assert losses == [(each.loss, each.validation, each.metrics) for each in by_hand.history]
    path = tmp_path / "training.safetensors"
    train(model_on(), epochs=1, save=path, **options)
    resumed = train(model_on(), epochs=3, save=path, resume=True, **options)
    assert losses == [(each.loss, each.validation, each.metrics) for each in resumed.history]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"data": [(X, IDS)], "validation": 0.2}, "this data is a list; split it before"),
        ({"validation": 1.5}, "between 0 and 1, such as 0.2"),
        ({"validation": 0.001}, "leaves none"),
        ({"metrics": "accuracy"}, "give validation= too"),
        ({"metrics": "acu", "validation": 0.2}, "unknown metric 'acu'"),
        ({"metrics": "mae", "validation": 0.2}, "batch 1 of the validation: mae"),
    ],
)
def test_what_cannot_be_validated_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        train(model_on(), **options)


def test_what_is_frozen_is_not_trained(here: Device) -> None:
    optimize = compiling(here)
    model = model_on().freeze("[0].weight", "[1]")
    trained = train(model, device=here, optimize=optimize, clip=1.0, accumulate=2).model
    assert trained.frozen == model.frozen
    before, after = leaves(model.parameters), leaves(anydevice.to_numpy(trained.parameters))
    for name, old, new in zip(leaf_names(model.parameters), before, after, strict=True):
        assert bool((old != new).any()) == (name not in model.frozen), name
    with pytest.raises(ConfigurationError, match=r"no parameters to train; model\.unfreeze\(\)"):
        train(model.freeze())
    moved = train(model.unfreeze(), device=here, optimize=optimize).model
    pairs = zip(before, leaves(anydevice.to_numpy(moved.parameters)), strict=True)
    assert all((old != new).any() for old, new in pairs)


def test_another_freezing_is_another_training(tmp_path: Path) -> None:
    path = tmp_path / "training.safetensors"
    train(model_on().freeze("[0]"), epochs=1, save=path)
    for other in (model_on(), model_on().freeze("[3]")):
        with pytest.raises(ConfigurationError, match="frozen"):
            train(other, save=path, resume=True)
    assert len(train(model_on().freeze("[0]"), save=path, resume=True).history) == 2


def test_groups_of_parameters_are_trained_as_told(here: Device) -> None:
    model = model_on().freeze("[3].bias")
    optimizer = nn.SGD(0.1, groups={"[0]": {"rate": 0.0}, "*.bias": {"rate": 0.05}})
    options = {"optimizer": optimizer, "device": here, "optimize": compiling(here)}
    trained = train(model, epochs=1, **options).model
    before, after = leaves(model.parameters), leaves(anydevice.to_numpy(trained.parameters))
    same = [
        name
        for name, old, new in zip(leaf_names(model.parameters), before, after, strict=True)
        if not (old != new).any()
    ]
    assert same == ["[0].weight", "[3].bias"]


def test_a_layer_takes_its_input_size_from_the_first_batch() -> None:
    layer = nn.Chain(nn.Dense(None, 8), "relu", nn.Dense(None, 3))
    found = train(layer, validation=0.2, seed=2, device="cpu")
    model = nn.build(nn.Dense(4, 8), "relu", nn.Dense(8, 3), seed=2, device="cpu")
    built = train(model, validation=0.2, seed=2)
    assert_same_values(found.history.losses, built.history.losses, because=SAME_PROGRAM)
    with pytest.raises(ConfigurationError, match="iterated only once"):
        train(layer, iter([(X, IDS)]), epochs=1, device="cpu")


def test_metrics_of_modules_of_others() -> None:
    torch, nnx = pytest.importorskip("torch"), pytest.importorskip("flax.nnx")
    mlx, mlx_optimizers = pytest.importorskip("mlx.nn"), pytest.importorskip("mlx.optimizers")
    optax = pytest.importorskip("optax")
    module = torch.nn.Linear(4, 3)
    for model, optimizer in (
        (module, torch.optim.SGD(module.parameters(), 0.1)),
        (nnx.Linear(4, 3, rngs=nnx.Rngs(0)), optax.sgd(0.1)),
        (mlx.Linear(4, 3), mlx_optimizers.SGD(0.1)),
    ):
        judged: dict[str, Any] = {"validation": HELD, "metrics": "accuracy", "device": "cpu"}
        trained = train(model, epochs=1, optimizer=optimizer, **judged)
        expected = nn.evaluate(trained.model, HELD, nn.cross_entropy, "accuracy", device="cpu")
        assert trained.history[-1].metrics == pytest.approx(expected.metrics)
        assert trained.history[-1].validation == pytest.approx(expected.loss, rel=1e-5)
    with pytest.raises(ConfigurationError, match="metrics need a loss of"):
        train(module, epochs=1, loss=lambda model, x, y: model(x).sum(), **judged)
