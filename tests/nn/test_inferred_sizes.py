"""Sizes of inputs that are left open, and taken from the shape of an example."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydevice import nn
from anydevice._core.trees import difference, leaves
from anydevice._nn.model import built_for
from anydevice.errors import ConfigurationError
from tests.comparing import assert_same_bits

OPEN = nn.Chain(
    nn.Conv2d(None, 4, 3, padding=1),
    nn.BatchNorm(None),
    nn.Residual(nn.Chain(nn.Conv2d(None, 4, 1), "relu"), nn.Conv2d(None, 4, 1)),
    nn.ConvTranspose2d(None, 2, 2, 2),
    nn.Flatten(),
    nn.recompute(nn.Dense(None, 12)),
    nn.LayerNorm(None),
    nn.RMSNorm(None),
    nn.Dense(None, 5),
)
CLOSED = nn.Chain(
    nn.Conv2d(3, 4, 3, padding=1),
    nn.BatchNorm(4),
    nn.Residual(nn.Chain(nn.Conv2d(4, 4, 1), "relu"), nn.Conv2d(4, 4, 1)),
    nn.ConvTranspose2d(4, 2, 2, 2),
    nn.Flatten(),
    nn.recompute(nn.Dense(2 * 12 * 16, 12)),
    nn.LayerNorm(12),
    nn.RMSNorm(12),
    nn.Dense(12, 5),
)
TOKENS = nn.TiedEmbedding(
    9, 8, nn.Chain(nn.PositionEmbedding(6, None), nn.Dense(None, 8), nn.Conv1d(None, 6, 1))
)


def test_sizes_are_those_that_are_written_out() -> None:
    found = nn.Model(OPEN, (3, 6, 8), seed=2, device="cpu")
    expected = nn.Model(CLOSED, (3, 6, 8), seed=2, device="cpu")
    assert found.layer == expected.layer
    assert difference(expected.parameters, found.parameters) is None
    pairs = zip(leaves(expected.parameters), leaves(found.parameters), strict=True)
    for one, other in pairs:
        assert_same_bits(one, other, because="the same seed draws the same numbers")
    tokens = nn.Model(TOKENS, 6, device="cpu").layer
    assert isinstance(tokens, nn.TiedEmbedding)
    assert isinstance(tokens.inside, nn.Chain)
    assert [layer.label for layer in tokens.inside.layers] == [
        "PositionEmbedding(6×8)", "Dense(8→8)", "Conv1d(6→6, 1)",
    ]  # fmt: skip


def test_a_layer_without_open_sizes_stays_the_same_object() -> None:
    assert CLOSED.resolved((3, 6, 8)) is CLOSED
    assert nn.build(CLOSED, input_shape=(3, 6, 8), device="cpu").layer is CLOSED


def test_the_first_layer_that_knows_its_input_is_enough() -> None:
    model = nn.build(nn.Dense(4, 8), "relu", nn.Dense(None, 2), device="cpu")
    assert model(np.ones((1, 4), np.float32)).shape == (1, 2)


@pytest.mark.parametrize(
    "batch",
    [np.ones((2, 4), np.float32), [[1, 2, 3, 4], [5, 6, 7, 8]], "torch", "pandas"],
    ids=["numpy", "lists", "torch", "pandas"],
)
def test_a_batch_shows_the_shape(batch: Any) -> None:
    if isinstance(batch, str):
        library = pytest.importorskip(batch)
        ones = np.ones((2, 4), np.float32)
        batch = library.DataFrame(ones) if batch == "pandas" else library.tensor(ones)
    model = built_for(nn.Chain(nn.Dense(None, 3), "relu"), batch, seed=3, device="cpu")
    assert model.input_shape == (4,)
    same = nn.build(nn.Dense(4, 3), "relu", seed=3, device="cpu")
    assert_same_bits(
        model.parameters[0]["weight"],
        same.parameters[0]["weight"],
        because="the same seed draws the same numbers",
    )


def test_what_cannot_be_inferred_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Dense\(None→3\).*input_shape=\(64,\)"):
        nn.build(nn.Chain(nn.Dense(None, 3)), "relu", device="cpu")
    with pytest.raises(ConfigurationError, match=r"Chain\[1\] Dense\(None→3\): got scalars"):
        nn.build("relu", nn.Dense(None, 3), input_shape=(), device="cpu")
    for batch in ({"ids": [1]}, None, 3.0):
        with pytest.raises(ConfigurationError, match="the first batch"):
            built_for(nn.Dense(None, 3), batch, device="cpu")
    with pytest.raises(ConfigurationError, match="outputs must be an integer"):
        nn.Dense(3, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="rows must be an integer"):
        nn.Embedding(None, 3)  # type: ignore[arg-type]
