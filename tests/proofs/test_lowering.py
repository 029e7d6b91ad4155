"""Models are lowered exactly: the network computes what the model does, and states its errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn
from anydevice._core.trees import mapped
from anydevice._proofs import graph as graphs
from anydevice._proofs.evaluation import evaluate
from anydevice._proofs.graph import Builder
from anydevice._proofs.lowering import lower
from anydevice.errors import ConfigurationError, UnsupportedError
from tests.comparing import assert_close

CPU = anydevice.device("cpu", engine="numpy")
ROUNDING = 1e-12
Built = tuple[tuple[Any, ...], tuple[int, ...]]

MODELS: dict[str, Built] = {
    "dense": ((nn.Dense(5, 8), "relu", nn.Dense(8, 3)), (5,)),
    "dense over rows": ((nn.Dense(5, 8), "relu", nn.Dense(8, 3, bias=False)), (3, 5)),
    "named activations": ((nn.Dense(5, 8, activation="tanh"), nn.Dense(8, 3)), (5,)),
    "conv2d": (
        (nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0)), "relu", nn.Conv2d(3, 4, 2)),
        (2, 9, 7),
    ),
    "conv1d": ((nn.Conv1d(2, 3, 3, stride=2, padding=1), "relu", nn.Conv1d(3, 2, 2)), (2, 11)),
    "average pooling": ((nn.AvgPool2d(3, 2), nn.Flatten(), nn.Dense(None, 3)), (2, 7, 8)),
    "mean of channels": ((nn.Conv2d(2, 3, 2), nn.GlobalAvgPool(), nn.Dense(3, 2)), (2, 4, 6)),
    "max pooling": ((nn.Conv2d(2, 3, 2), nn.MaxPool2d((3, 2), 2)), (2, 8, 7)),
    "max of channels": ((nn.Conv1d(2, 3, 2), nn.GlobalMaxPool(), nn.Dense(3, 2)), (2, 8)),
    "batch norm": ((nn.Dense(5, 8), nn.BatchNorm(8), "relu", nn.Dense(8, 2)), (5,)),
    "batch norm of images": ((nn.Conv2d(2, 3, 2), nn.BatchNorm(3), "relu"), (2, 4, 5)),
    "residual": (
        (nn.Dense(5, 6), nn.Residual("relu"), nn.Residual(nn.Dense(6, 4), nn.Dense(6, 4))),
        (5,),
    ),
    "dropout and recomputing": (
        (nn.Dense(5, 6), nn.Dropout(0.5), nn.recompute(nn.Chain("relu", nn.Dense(6, 2)))),
        (5,),
    ),
    "leaky relu": ((nn.Dense(5, 8), nn.LeakyReLU(0.2), nn.Dense(8, 2), "leaky_relu"), (5,)),
    "sigmoid": ((nn.Dense(5, 8), "sigmoid", nn.Dense(8, 2), "sigmoid"), (5,)),
    "gelu": ((nn.Dense(5, 8), "gelu", nn.Dense(8, 2)), (5,)),
    "gelu by tanh": ((nn.Dense(5, 8), "gelu_tanh", nn.Dense(8, 2)), (5,)),
    "silu": ((nn.Dense(5, 8), "silu", nn.Dense(8, 2)), (5,)),
    "softmax": ((nn.Dense(5, 4), "softmax", nn.Dense(4, 3), "softmax"), (2, 5)),
    "layer norm": ((nn.Dense(5, 8), nn.LayerNorm(8), nn.Dense(8, 2)), (2, 5)),
    "rms norm": ((nn.Dense(5, 8), nn.RMSNorm(8), nn.Dense(8, 2)), (5,)),
    "attention": ((nn.PositionEmbedding(4, 8), nn.Attention(8, 4, 2, bias=True)), (3, 8)),
    "causal attention": ((nn.Attention(8, 2, causal=True),), (3, 8)),
    "lstm": ((nn.LSTM(3, 2), nn.LSTM(2, 2, last=True), nn.Dense(2, 2)), (4, 3)),
    "gru": ((nn.GRU(3, 2), nn.GRU(2, 2, last=True, bias=False)), (4, 3)),
    "both directions": (
        (nn.Bidirectional(nn.LSTM(3, 2)), nn.Bidirectional(nn.GRU(4, 2, True))),
        (3, 3),
    ),
    "group norm": ((nn.GroupNorm(4, 2), nn.Flatten(), nn.Dense(None, 2)), (4, 2, 2)),
    "nearest upsampling": ((nn.Upsample(3), nn.Flatten(), nn.Dense(None, 2)), (2, 2, 3)),
    "linear upsampling": ((nn.Upsample(2, linear=True), nn.Upsample(4, linear=True)), (2, 2, 3)),
    "blocks": (
        (
            nn.TransformerBlock(4, 2, hidden=3),
            nn.TransformerBlock(4, 2, hidden=3, activation="gelu", norm="layer", bias=True),
        ),
        (2, 4),
    ),
}


def built(name: str, seed: int = 0) -> nn.Model:
    """The model, whose parameters are all drawn: also biases, and statistics of norms."""
    layers, shape = MODELS[name]
    model = nn.build(*layers, input_shape=shape, seed=seed, device=CPU)
    generator = np.random.default_rng(seed)

    def drawn(x: Any) -> Any:
        spread = generator.uniform(0.5, 1.5, x.shape) if x.ndim == 1 else np.ones(x.shape)
        return (np.asarray(x) * spread + 0.1 * (x.ndim == 1)).astype(np.float32)

    return model.with_parameters(mapped(drawn, model.parameters))


def in_float64(model: nn.Model) -> nn.Model:
    return model.with_parameters(mapped(lambda x: x.astype(np.float64), model.parameters))


def examples(model: nn.Model, count: int = 6, scale: float = 1.0) -> Any:
    generator = np.random.default_rng(1)
    return (scale * generator.standard_normal((count, *model.input_shape))).astype(np.float32)


def flat(x: Any) -> Any:
    return np.asarray(x, np.float64).reshape(len(x), -1)


def largest_difference(model: nn.Model) -> float:
    x = examples(model).astype(np.float64)
    found, _ = evaluate(lower(model).network, flat(x))
    return float(np.abs(found - flat(in_float64(model)(x))).max())


@pytest.mark.parametrize("name", MODELS)
def test_the_network_computes_what_the_model_does(name: str) -> None:
    for seed in range(2):
        assert largest_difference(built(name, seed)) < ROUNDING


@pytest.mark.parametrize("name", MODELS)
def test_float32_stays_within_the_stated_error(name: str) -> None:
    model = built(name)
    network = lower(model).network
    for scale in (0.1, 1.0, 10.0):
        x = examples(model, scale=scale)
        found, error = evaluate(network, flat(x))
        assert (np.abs(flat(model(x)) - found) <= error).all()


@pytest.mark.parametrize("engine", ["torch", "jax", "mlx"])
@pytest.mark.parametrize("name", ["conv2d", "batch norm of images", "layer norm", "max pooling"])
def test_other_engines_stay_within_it_too(engine: str, name: str) -> None:
    pytest.importorskip("mlx.core" if engine == "mlx" else engine)
    model = built(name)
    there = anydevice.to_device(model, anydevice.device("cpu", engine=engine), convert=True)
    x = examples(model)
    network = lower(there).network
    assert network.hash() == lower(model).network.hash()
    found, error = evaluate(network, flat(x))
    assert (np.abs(flat(anydevice.to_numpy(there(x))) - found) <= error).all()


def test_sums_in_any_order_stay_within_the_stated_error() -> None:
    model = built("dense")
    x = examples(model, 200)
    found, error = evaluate(lower(model).network, flat(x))
    generator = np.random.default_rng(0)
    (first, _, last) = model.parameters
    for _ in range(20):
        h = np.maximum(summed(x, first, generator), np.float32(0))
        assert (np.abs(summed(h, last, generator) - found) <= error).all()
    # What the network states is not idle: a hundredth of it is too little.
    assert not (np.abs(summed(h, last, generator) - found) <= error / 100).all()


def summed(x: Any, parameters: Any, generator: Any) -> Any:
    """x · weightᵀ + bias in float32, term by term in a random order."""
    terms = x[:, None, :] * parameters["weight"][None]
    terms = np.dstack([terms, np.broadcast_to(parameters["bias"], terms.shape[:2])])
    total = np.zeros(terms.shape[:2], np.float32)
    for at in generator.permutation(terms.shape[-1]):
        total = (total + terms[..., at]).astype(np.float32)
    return total


def _no_bias(f: Any, self: Any, cells: Any, weight: Any, bias: Any, *rest: Any, **k: Any) -> Any:
    return f(self, cells, weight, None, *rest, **k)


PLANTED: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "a bias is forgotten": ("dense", "dense", _no_bias),
    "a bias of a convolution is forgotten": ("conv2d", "convolution", _no_bias),
    "leaky is relu": (
        "leaky relu",
        "leaky_relu",
        lambda f, self, cells, slope: self.function(cells, "relu"),
    ),
    "the mean is a sum": ("average pooling", "mean", lambda f, self, cells: self.total(cells)),
    "the largest is the first": ("max pooling", "largest", lambda f, self, cells: cells[..., 0]),
    "a norm does nothing": ("batch norm", "normalize", lambda f, self, cells, *rest: cells),
    "a layer norm does nothing": ("layer norm", "layer_norm", lambda f, self, cells, *rest: cells),
    "a sum takes one part": (
        "residual",
        "combine",
        lambda f, self, parts, *rest, **named: f(self, parts[:1], *rest, **named),
    ),
    "a softmax is linear": ("softmax", "softmax", lambda f, self, cells: cells),
    "no token looks ahead": (
        "attention",
        "attention",
        lambda f, self, q, k, v, scale, causal: f(self, q, k, v, scale, True),
    ),
    "a line between neighbours is a step": (
        "linear upsampling",
        "interpolate",
        lambda f, self, cells, axis, size, scale, way: np.repeat(cells, scale, axis),
    ),
    "a product is a sum": (
        "rms norm",
        "product",
        lambda f, self, a, b: self.combine([(1.0, a), (1.0, b)]),
    ),
}
"""The model that shows each fault, the method, and its replacement, which takes it first."""


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_in_the_lowering_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, method, replacement = PLANTED[fault]
    original = getattr(Builder, method)
    monkeypatch.setattr(Builder, method, lambda *a, **k: replacement(original, *a, **k))
    assert largest_difference(built(name)) > 1e-4


def test_activations_are_part_of_the_node_before_them() -> None:
    network = lower(built("dense")).network
    assert [(node.size, node.function) for node in network.nodes] == [(8, "relu"), (3, "")]
    assert [node.roundings for node in network.nodes] == [6, 9]
    # Not where that node is needed without it.
    residual = lower(built("residual")).network
    assert [node.function for node in residual.nodes[:3]] == ["", "relu", ""]


def test_clips_and_abs() -> None:
    graph = Builder(3)
    network = graph.network(graph.clip(np.arange(3), -0.25, 1.5))
    x = np.linspace(-3, 3, 30).reshape(10, 3)
    assert_close(evaluate(network, x)[0], np.clip(x, -0.25, 1.5), terms=4)
    low, high = np.full((1, 3), -1e6), np.full((1, 3), 1e6)
    for node in network.nodes:
        (weight,) = node.weights
        ends = sorted([low * weight, high * weight], key=lambda z: float(z[0, 0]))
        low, high = ends[0] + node.bias, ends[1] + node.bias
        if node.function:
            low, high = np.maximum(low, 0), np.maximum(high, 0)
    assert (low >= -0.25).all()
    assert (high <= 1.5).all()
    for name, options, expected in (
        ("absolute", (), np.abs(x)),
        ("clip", (0.5, None), np.maximum(x, 0.5)),
        ("clip", (None, 0.1), np.minimum(x, 0.1)),
    ):
        graph = Builder(3)
        network = graph.network(getattr(graph, name)(np.arange(3), *options))
        assert np.allclose(evaluate(network, x)[0], expected, atol=1e-12)


def test_a_last_softmax_is_left_out_for_classes() -> None:
    model = nn.build(nn.Dense(4, 3), "softmax", nn.Dropout(0.1), device=CPU)
    lowered = lower(model, classes=True)
    assert lowered.dropped == "softmax"
    assert [node.function for node in lowered.network.nodes] == [""]
    assert len(lower(model).network.nodes) == 3


@pytest.mark.parametrize(
    ("layers", "shape", "where"),
    [
        ((nn.Chain(nn.Conv1d(5, 4, 1), nn.PReLU(4)), "relu"), (5, 4), "Chain[0][1] PReLU(4)"),
        ((nn.Embedding(10, 4), nn.Dense(4, 2)), (3,), "Chain"),
        ((nn.Conv1d(5, 4, 1), nn.Residual(nn.PReLU(4))), (5, 4), "Chain[1].layer PReLU(4)"),
        ((nn.Attention(4, 2, rope=True),), (3, 4), "Attention(4, 2 heads)"),
    ],
)
def test_other_layers_are_refused_with_their_path(layers: Any, shape: Any, where: str) -> None:
    model = nn.build(*layers, input_shape=shape, device=CPU)
    with pytest.raises(UnsupportedError) as refused:
        lower(model)
    assert where in str(refused.value)
    assert ";" in str(refused.value)


def test_a_layer_of_the_users_own_is_refused() -> None:
    class Doubled(nn.Layer):
        def apply(self, parameters: Any, x: Any, run: Any) -> Any:
            return 2 * x

    with pytest.raises(UnsupportedError, match=r"Chain\[1\] Doubled"):
        lower(nn.build(nn.Dense(2, 2), Doubled(), device=CPU))


@pytest.mark.parametrize(
    ("name", "weight", "number", "where"),
    [
        ("dense", (2, "bias"), np.nan, r"Chain\[2\]\['bias'\]"),
        ("dense", (2, "bias"), np.inf, r"Chain\[2\]\['bias'\]"),
        ("batch norm", (1, "variance"), -1.0, r"Chain\[1\]"),
    ],
)
def test_weights_of_nan(name: str, weight: tuple[int, str], number: float, where: str) -> None:
    model = built(name)
    parameters = mapped(np.copy, model.parameters)
    parameters[weight[0]][weight[1]][1] = number
    with np.errstate(invalid="ignore"), pytest.raises(ConfigurationError, match=where):
        lower(model.with_parameters(parameters))


def test_weights_of_16_bits_are_refused() -> None:
    model = built("dense")
    narrow = model.with_parameters(mapped(lambda x: x.astype(np.float16), model.parameters))
    with pytest.raises(UnsupportedError, match="float16, and proofs do not cover"):
        lower(narrow)


def test_matrices_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_BYTES", 1000)
    model = nn.build(nn.Conv2d(1, 2, 3), input_shape=(1, 20, 20), device=CPU)
    with pytest.raises(UnsupportedError, match=r"Conv2d.*more than 1000 B"):
        lower(model)
