"""Options that people bring from Keras, by their effect: each learns, resumes and can be saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydevice import nn
from anydevice._core.device import Device
from anydevice._core.trees import leaves
from anydevice.errors import ConfigurationError
from tests.comparing import SAME_PROGRAM, assert_same_values

DRAWN = np.random.default_rng(0)
X = DRAWN.normal(size=(192, 4, 8)).astype(np.float32)
Y = (X[:, 0].mean(-1) > 0).astype(np.int32)
GOOD = (np.arange(192) % 5 < 2).astype(np.float32)
"""Weights of 1 for the right labels, of 0 for the others, which are the most."""

LAYERS = nn.Chain(
    *(nn.Conv1d(None, 8, 3, padding=1, groups=4), nn.GroupNorm(None, 2), nn.PReLU(None)),
    *(nn.MaxPool1d(2), nn.Upsample(2), nn.Concatenate("elu", nn.Conv1d(None, 4, 1))),
    *(nn.Transpose(), nn.Bidirectional(nn.GRU(None, 6, last=True))),
    nn.Dense(None, 2, activation="softplus"),
)
RUNS: dict[str, tuple[Any, Any]] = {
    "layers": (nn.RMSprop(5e-3, momentum=0.5), None),
    "averages": (nn.EMA(nn.Adam(2e-2), 0.9), None),
    "a plateau": (nn.Adam(nn.WarmUp(5, nn.PlateauRate(1.0, patience=1))), None),
    "weights": (nn.Adam(2e-2), GOOD),
}


@pytest.mark.parametrize("name", RUNS)
def test_each_learns_and_resumes(name: str, here: Device, tmp_path: Path) -> None:
    optimizer, weights = RUNS[name]
    layers = LAYERS if name == "layers" else nn.Chain(nn.Flatten(), nn.Dense(None, 2))
    labels = Y if weights is None else np.where(weights > 0, Y, 1 - Y)

    def run(epochs: int, path: str, weights: Any = weights, **own: Any) -> nn.Trained:
        data = nn.Batches(X, labels, 32, weights=weights)
        own |= {"device": here, "validation": 0.2, "metrics": "accuracy"}
        own |= {"optimize": "default" if here.engine == "jax" else "none"}  # the quicker one
        own |= {"save": tmp_path / path, "epochs": epochs}
        return nn.train(layers, data, optimizer, "cross_entropy", **own)

    whole = run(6, "whole.safetensors")
    run(2, "part.safetensors")
    again = run(6, "part.safetensors", resume=True)
    assert_same_values(whole.history.losses, again.history.losses, because=SAME_PROGRAM)
    assert whole.history[-1].loss < 0.8 * whole.history[0].loss
    best, other = (done.averaged or done.model for done in (whole, again))
    for a, b in zip(leaves(best.parameters), leaves(other.parameters), strict=True):
        assert_same_values(a, b, because=SAME_PROGRAM)
    assert nn.evaluate(best, (X, Y), metrics="accuracy")["accuracy"] > 0.75, "not the wrong labels"
    nn.save(best, tmp_path / "model.safetensors")
    loaded = nn.load(tmp_path / "model.safetensors", here)
    assert_same_values(nn.predict(loaded, X), nn.predict(best, X), because=SAME_PROGRAM)
    assert name != "a plateau" or whole.history[-1].rate < 0.2
    if weights is not None:
        with pytest.raises(ConfigurationError, match="data held other numbers"):
            run(7, "part.safetensors", 1 - weights, resume=True)
        own, both = (nn.Batches(X, labels, 50, weights=w) for w in (weights, None))
        losses = [nn.evaluate(best, data, "cross_entropy").loss for data in (own, both)]
        assert losses[0] < 0.4 * losses[1], "the wrong labels count nothing"
        blind = run(6, "blind.safetensors", None)
        assert nn.evaluate(blind.model, (X, Y), metrics="accuracy")["accuracy"] < 0.5
