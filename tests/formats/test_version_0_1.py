"""Files of version 0.1.0 are still read: models with most kinds of layers, and a training."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn

FILES = Path(__file__).parents[1] / "recorded" / "saved" / "0.1"


def test_a_transformer_gives_what_it_gave() -> None:
    model = nn.load(FILES / "transformer.safetensors", "cpu")
    output = anydevice.to_numpy(model(np.array([[1, 2, 3, 4, 0]])))
    expected = [-1.9233421, 3.8391774, -1.2415617, -0.3851356, 1.4257076, 0.1615032, 0.9821529]
    np.testing.assert_allclose(output[0, -1], expected, rtol=1e-4, atol=1e-5)


def test_a_model_of_images_gives_what_it_gave() -> None:
    model = nn.load(FILES / "image.safetensors", "cpu")
    output = anydevice.to_numpy(model(np.ones((1, 1, 8, 8), np.float32)))
    np.testing.assert_allclose(output, [[0.2007261, -0.0358380, 0.5429143]], rtol=1e-4, atol=1e-5)


def test_a_training_is_resumed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "training.safetensors"
    shutil.copy(FILES / "training.safetensors", path)
    x = np.linspace(-1, 1, 16, dtype=np.float32).reshape(8, 2)

    def resumed(**options: Any) -> nn.Trained:
        return nn.train(
            nn.build(nn.Dense(2, 3), "tanh", nn.Dense(3, 1), device="cpu"),
            nn.Batches(x, x[:, :1], size=4),
            nn.AdamW(nn.WarmUp(2, then=1e-2)),
            nn.mean_squared_error,
            device=anydevice.device("cpu", engine="torch"),
            validation=[(x, x[:, :1])],
            patience=3,
            resume=path,
            progress=False,
            **options,
        )

    trained = resumed(epochs=4, optimize="none")
    as_it_was = resumed(epochs=2).report
    assert as_it_was.optimize == "default", "trainings were always compiled then"
    assert len(trained.history) == 4
    np.testing.assert_allclose(trained.history.validations[:2], [0.8197739, 0.7283694], rtol=1e-5)
    assert trained.history.validations[-1] < 0.6
