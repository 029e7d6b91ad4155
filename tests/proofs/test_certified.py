"""Training with interval bounds: sound bounds, the same on every engine, and something to prove."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn
from anydevice._nn.layer import Run
from anydevice._proofs.certified import BoxedBatch, _propagate, certified
from anydevice.errors import ConfigurationError, UnsupportedError
from tests.comparing import SAME_PROGRAM, assert_same_values

pytestmark = pytest.mark.filterwarnings("ignore:the activation at the end")
CPU = anydevice.device("cpu", engine="numpy")


def blobs(count: int = 240) -> tuple[Any, Any]:
    """Three clusters in the plane, from 0 to 1."""
    generator = np.random.default_rng(0)
    centres = np.array([[0.2, 0.2], [0.8, 0.3], [0.5, 0.8]])
    labels = generator.integers(0, 3, count).astype(np.int32)
    x = centres[labels] + 0.06 * generator.standard_normal((count, 2))
    return x.astype(np.float32), labels


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ((nn.Dense(4, 6), "gelu", nn.Dense(6, 6), "silu", nn.Dense(6, 3), "gelu_tanh"), (4,)),
        ((nn.Dense(4, 6), nn.BatchNorm(6), nn.LeakyReLU(0.1), nn.Dense(6, 3), "tanh"), (4,)),
        (
            (nn.Residual(nn.Chain(nn.Dense(4, 4), "relu")), nn.Dense(4, 2, activation="sigmoid")),
            (4,),
        ),
        (
            (
                nn.Conv2d(1, 3, 3, padding=1, activation="relu"),
                nn.MaxPool2d(2),
                nn.AvgPool2d(2),
                nn.Flatten(),
                nn.Dropout(0.5),
                nn.recompute(nn.Dense(None, 3)),
            ),
            (1, 8, 8),
        ),
        ((nn.Conv1d(2, 3, 3), "relu", nn.GlobalMaxPool(), nn.Dense(3, 2)), (2, 7)),
        ((nn.Conv2d(1, 2, 2), "relu", nn.GlobalAvgPool(), nn.Dense(2, 2)), (1, 5, 5)),
    ],
)
def test_no_output_leaves_its_bounds(layers: Any, shape: Any) -> None:
    model = nn.build(*layers, input_shape=shape, device=CPU)
    generator = np.random.default_rng(0)
    x = generator.standard_normal((1, *shape)).astype(np.float32)
    radius = np.float32(0.3)
    found = _propagate(model.layer, model.parameters, BoxedBatch(x, x - radius, x + radius), Run())
    moves = generator.uniform(-radius, radius, (400, *shape)).astype(np.float32)
    corners = radius * np.sign(moves)
    y = model(np.concatenate([x + moves, x + corners]))
    assert (y >= found.low - 1e-5).all()
    assert (y <= found.high + 1e-5).all()
    assert np.allclose(found.x, model(x), atol=1e-6)
    assert (found.high - found.low < 60 * (y.max(0) - y.min(0))).all(), "bounds that say something"


def trained(engine: str, loss: Any, epochs: int = 12, **options: Any) -> Any:
    x, y = blobs()
    where = anydevice.device("cpu", engine=engine)
    model = nn.build(nn.Dense(2, 16), "relu", nn.Dense(16, 3), "softmax", device=CPU)
    how = "default" if engine == "jax" else "none"  # its primitives one by one take minutes
    options |= {"epochs": epochs, "device": where, "optimize": how, "seed": 0, "progress": False}
    return nn.train(model, nn.Batches(x, y, 24), nn.Adam(0.02), loss, **options)


def share_certified(model: nn.Model, eps: float) -> float:
    """How many examples keep their class by intervals alone."""
    x, y = blobs()
    bare = nn.Chain(*model.layer.layers[:-1])  # type: ignore[attr-defined]
    parameters = anydevice.to_numpy(model.parameters)[:-1]
    found = _propagate(bare, parameters, BoxedBatch(x, x - eps, x + eps), Run())
    worst: Any = np.where(np.arange(3) == y[:, None], found.low, found.high)
    return float((worst.argmax(1) == y).mean())


LOSS = certified("cross_entropy", 0.08, ramp=60, low=0, high=1)


def test_training_is_the_same_on_every_engine_and_certifies() -> None:
    losses = {}
    for engine, name in (("torch", "torch"), ("jax", "jax"), ("mlx", "mlx")):
        if find_spec(name) is None:
            continue
        done = trained(engine, LOSS)
        losses[engine] = done.history.losses
        assert share_certified(done.model, 0.06) > 0.9, engine
    assert losses, "an engine with gradients"
    for each in losses.values():
        assert np.allclose(each, next(iter(losses.values())), rtol=1e-3)


def test_it_certifies_what_plain_training_does_not() -> None:
    pytest.importorskip("torch")
    plain = trained("torch", "cross_entropy", epochs=30)
    robust = trained("torch", certified("cross_entropy", 0.13, ramp=100), epochs=30)
    assert share_certified(plain.model, 0.12) < share_certified(robust.model, 0.12) - 0.1


def test_eps_grows_over_the_ramp_and_is_whole_outside_of_training() -> None:
    pytest.importorskip("torch")
    x, y = blobs(24)
    model = nn.build(nn.Dense(2, 16), "relu", nn.Dense(16, 3), device=CPU)

    def value(step: int, training: bool) -> float:
        run = Run(training=training, step=step)
        return float(LOSS.of_layer(model.layer, model.parameters, x, y, run)[0])

    plain = float(nn.cross_entropy(model(x), y))
    assert value(0, True) == pytest.approx(plain)
    assert value(0, True) < value(30, True) < value(60, True)
    assert value(60, True) == value(90, True) == value(0, False)


def test_a_training_is_saved_and_goes_on(tmp_path: Any) -> None:
    pytest.importorskip("torch")
    whole = trained("torch", LOSS, epochs=4)
    path = tmp_path / "robust.safetensors"
    trained("torch", LOSS, epochs=2, save=path)
    rest = trained("torch", LOSS, epochs=4, save=path, resume=True)
    assert_same_values(rest.history.losses, whole.history.losses, because=SAME_PROGRAM)
    other = certified("cross_entropy", 0.01, ramp=60, low=0, high=1)
    with pytest.raises(ConfigurationError, match="loss"):
        trained("torch", other, epochs=5, save=path, resume=True)


def test_what_has_no_bounds_is_refused_with_its_path() -> None:
    pytest.importorskip("torch")
    x, y = blobs()
    model = nn.build(nn.Dense(2, 4), nn.Chain(nn.LayerNorm(4)), nn.Dense(4, 3), device=CPU)
    where = anydevice.device("cpu", engine="torch")
    with pytest.raises(UnsupportedError, match=r"Chain\[1\]\[0\] LayerNorm\(4\)"):
        nn.train(model, nn.Batches(x, y, 24), nn.Adam(0.1), LOSS, epochs=1, device=where)


def test_a_module_of_another_library_is_refused() -> None:
    torch: Any = pytest.importorskip("torch")
    x, y = blobs()
    with pytest.raises(ConfigurationError, match="no module of another library"):
        nn.train(
            torch.nn.Linear(2, 3), nn.Batches(x, y, 24), nn.Adam(0.1), LOSS, epochs=1, device="cpu"
        )


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "mean_squared_error"},
        {"eps": 0},
        {"eps": float("nan")},
        {"eps": "a"},
        {"share": 2},
        {"ramp": -1},
        {"ramp": 1.5},
        {"low": 1, "high": 0},
    ],
)
def test_settings_are_checked(options: Any) -> None:
    with pytest.raises(ConfigurationError):
        certified(**{"loss": "cross_entropy", "eps": 0.1, **options})
