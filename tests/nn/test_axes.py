"""Every layer on every layout, of equal sizes: the right numbers, or a refusal that names both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from anydevice import nn
from anydevice._core.trees import mapped
from anydevice._nn.layer import Layer
from tests.comparing import assert_close
from tests.nn.test_layers import parameters_of
from tests.optional import torch
from tests.refusals import refuses

N = 6
KINDS: dict[str, tuple[Layer, int]] = {
    "features": (nn.Dense(N, N), 1),
    "positions, features": (nn.GatedMLP(N, N), 2),
    "positions, positions, features": (nn.LayerNorm(N), 3),
    "channels, length": (nn.Conv1d(N, N, 1), 2),
    "channels, height, width": (nn.Conv2d(N, N, 1), 3),
}
"""By the names of the axes: a layer with that output, and the number of axes."""

ROW, SEQUENCE, GRID, CHANNELS, IMAGE = KINDS
LAST, ALL = (ROW, SEQUENCE, GRID), tuple(KINDS)


def by(name: str, *rest: Any) -> Callable[[Any, Any], Any]:
    """A function of PyTorch, of the input and the rest; strings are names of parameters."""
    return lambda x, p: getattr(torch.nn.functional, name)(
        x, *(p[value] if isinstance(value, str) else value for value in rest)
    )


def twice(axis: int) -> Callable[[Any, Any], Any]:
    return lambda x, p: torch.cat([x.relu(), x.relu()], axis)


def gated(x: Any, p: Any) -> Any:
    gate, up = (x @ p["gate_up"].T).chunk(2, -1)
    return (by("silu")(gate, p) * up) @ p["down"].T


def attention(x: Any, p: Any) -> Any:
    q, k, v = (x @ p["qkv"].T).chunk(3, -1)
    return by("scaled_dot_product_attention", k, v)(q, p) @ p["output"].T


def recurrent(kind: str) -> Callable[[Any, Any], Any]:
    def apply(x: Any, p: Any) -> Any:
        module = getattr(torch.nn, kind)(N, N, batch_first=True, dtype=x.dtype)
        ours = ("input", "recurrent", "input_bias", "recurrent_bias")
        own = {name: p[mine] for name, mine in zip(module.state_dict(), ours, strict=True)}
        return torch.func.functional_call(module, own, x)[0]

    return apply


ROWS: list[tuple[Layer, tuple[str, ...], Any]] = [
    (nn.Dense(N, N), LAST, by("linear", "weight", "bias")),
    (nn.LayerNorm(N), LAST, by("layer_norm", (N,), "weight", "bias")),
    (nn.RMSNorm(N), LAST, by("rms_norm", (N,), "weight", 1e-6)),
    (nn.GatedMLP(N, N), LAST, gated),
    (nn.Activation("softmax"), LAST, by("softmax", -1)),
    (nn.Activation("relu"), ALL, by("relu")),
    (nn.LeakyReLU(0.5), ALL, by("leaky_relu", 0.5)),
    (nn.Dropout(0.5), ALL, lambda x, p: x),
    (nn.Residual("relu"), ALL, lambda x, p: x.relu() + x),
    (nn.Flatten(), ALL, lambda x, p: x.flatten(1)),
    (nn.Transpose(), (SEQUENCE, CHANNELS, IMAGE), lambda x, p: x.flatten(2).mT),
    (nn.PositionEmbedding(N, N), (SEQUENCE, GRID), lambda x, p: x + p["weight"]),
    (nn.Attention(N, 1), (SEQUENCE,), attention),
    (nn.TransformerBlock(N, 1), (SEQUENCE,), "test_layers.py compares it"),
    (nn.GRU(N, N), (SEQUENCE,), recurrent("GRU")),
    (nn.LSTM(N, N), (SEQUENCE,), recurrent("LSTM")),
    (
        nn.BatchNorm(N),
        (ROW, CHANNELS, IMAGE),
        by("batch_norm", "mean", "variance", "weight", "bias"),
    ),
    (nn.Conv1d(N, N, 2), (CHANNELS,), by("conv1d", "weight", "bias")),
    (nn.Conv2d(N, N, 2), (IMAGE,), by("conv2d", "weight", "bias")),
    (nn.ConvTranspose2d(N, N, 2), (IMAGE,), by("conv_transpose2d", "weight", "bias")),
    (nn.MaxPool2d(2), (IMAGE,), by("max_pool2d", 2)),
    (nn.AvgPool2d(2), (IMAGE,), by("avg_pool2d", 2)),
    (nn.GlobalAvgPool(), (CHANNELS, IMAGE), lambda x, p: x.flatten(2).mean(2)),
    (nn.GlobalMaxPool(), (CHANNELS, IMAGE), lambda x, p: x.flatten(2).amax(2)),
    (nn.GlobalAvgPool("positions"), (SEQUENCE, GRID), lambda x, p: x.flatten(1, -2).mean(1)),
    (nn.GlobalMaxPool("positions"), (SEQUENCE, GRID), lambda x, p: x.flatten(1, -2).amax(1)),
    (nn.GroupNorm(N, 2), (ROW, CHANNELS, IMAGE), by("group_norm", 2, "weight", "bias")),
    (nn.PReLU(N), (ROW, CHANNELS, IMAGE), by("prelu", "slope")),
    (nn.MaxPool1d(2), (CHANNELS,), by("max_pool1d", 2)),
    (nn.AvgPool1d(2), (CHANNELS,), by("avg_pool1d", 2)),
    (nn.Upsample(2), (CHANNELS, IMAGE), by("interpolate", None, 2)),
    (nn.Concatenate("relu", "relu"), (ROW, CHANNELS, IMAGE), twice(1)),
    (nn.Concatenate("relu", "relu", axis=-1), ALL, twice(-1)),
    (nn.Bidirectional(nn.GRU(N, N)), (SEQUENCE,), "test_layers.py compares it"),
    (nn.Embedding(N, N), (), None),
    (nn.TiedEmbedding(N, N, nn.Dense(N, N)), (), None),
]
"""A layer, the layouts that it takes, and its outputs for these by PyTorch."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row[0].label))
def test_a_layer_computes_over_the_right_axis_or_refuses(row: Any, kind: str) -> None:
    layer, kinds, reference = row
    source, axes = KINDS[kind]
    chain, shape = nn.Chain(source, layer), (N,) * axes
    if kind not in kinds:
        names = f" {N}, ".join(kind.split(", "))
        refuses(rf"^Chain\[1\].*got .*\({names} {N}\), expected ", nn.Model, chain, shape)
        return
    model = nn.Model(chain, shape, device="cpu").with_parameters(parameters_of(chain))
    x = np.random.default_rng(1).normal(size=(3, *shape)).astype(np.float32)
    before = source.apply(model.parameters[0], x, nn.Run())
    given = mapped(lambda array: torch.tensor(array).double(), [before, model.parameters[1]])
    if callable(reference):
        assert_close(model(x), reference(*given).numpy(), terms=128, dtype=np.float32)


def test_the_table_has_every_layer() -> None:
    named = [getattr(nn, name) for name in nn.__all__]
    layers = {kind for kind in named if isinstance(kind, type) and issubclass(kind, Layer)}
    rest = {Layer, nn.Chain, nn.Heads, nn.Input}  # tests/train/test_inputs_and_heads.py
    assert layers - {type(layer) for layer, *_ in ROWS} == rest


def test_names_follow_the_axes() -> None:
    assert nn.Chain(nn.Conv2d(N, N, 1), nn.Transpose(), nn.LSTM(N, 2)).output((N, 4, 5)) == (20, 2)
    assert nn.Chain(nn.LSTM(N, N), nn.Transpose(), nn.Conv1d(N, 2, 1)).output((20, N)) == (2, 20)
    refuses("beside it", nn.Chain(nn.LSTM(N, N), nn.Residual(nn.Transpose())).output, (N, N))
    refuses('"softmax" after it', nn.Conv2d(1, 2, 3, activation="softmax").output, (1, 5, 5))
    refuses("over must be None or", nn.GlobalAvgPool, over="features")
