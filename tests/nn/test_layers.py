"""Every layer on every engine against the float64 result, and against torch's own layer."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn, ops
from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES
from anydevice._core.trees import leaves, mapped
from anydevice._machine.engines import registry
from anydevice._nn.layer import Layer
from anydevice._nn.layers import ACTIVATIONS
from anydevice.errors import ConfigurationError
from tests.comparing import assert_close, rounding

Array = np.ndarray[Any, Any]

LAYERS: dict[str, tuple[Layer, tuple[int, ...]]] = {
    "dense": (nn.Dense(6, 5), (6,)),
    "dense over tokens": (nn.Dense(6, 5, bias=False, activation="gelu"), (3, 6)),
    "embedding": (nn.Embedding(11, 6), (4,)),
    "positions": (nn.PositionEmbedding(9, 6), (4, 6)),
    "layer norm": (nn.LayerNorm(6), (3, 6)),
    "layer norm without bias": (nn.LayerNorm(6, bias=False), (6,)),
    "rms norm": (nn.RMSNorm(6), (3, 6)),
    "batch norm": (nn.BatchNorm(6), (6,)),
    "batch norm of images": (nn.BatchNorm(3, momentum=0.3), (3, 4, 5)),
    "dropout": (nn.Dropout(0.5), (6,)),
    "flatten": (nn.Flatten(), (2, 3, 4)),
    "conv": (nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 7, 6)),
    "conv of one row": (nn.Conv2d(2, 3, (1, 2), bias=False, activation="relu"), (2, 5, 6)),
    "conv of sequences": (nn.Conv1d(2, 3, 3, stride=2, padding=1), (2, 7)),
    "conv of sequences without bias": (nn.Conv1d(2, 3, 2, bias=False, activation="relu"), (2, 7)),
    "depthwise conv": (nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=4), (4, 7, 6)),
    "group norm": (nn.GroupNorm(4, groups=2), (4, 3, 5)),
    "prelu": (nn.PReLU(3), (3, 4, 5)),
    "max pool of sequences": (nn.MaxPool1d(3, stride=2), (2, 8)),
    "avg pool of sequences": (nn.AvgPool1d(2), (2, 7)),
    "upsample": (nn.Upsample(2), (2, 3, 4)),
    "upsample linearly": (nn.Upsample(3, linear=True), (2, 3, 4)),
    "concatenate": (nn.Concatenate(nn.Conv2d(2, 3, 1), "identity"), (2, 4, 3)),
    "concatenate features": (nn.Concatenate(nn.Dense(6, 4), "tanh", axis=-1), (3, 6)),
    "both ways": (nn.Bidirectional(nn.LSTM(4, 5)), (6, 4)),
    "both ways to the last output": (nn.Bidirectional(nn.GRU(4, 5, last=True)), (6, 4)),
    "transposed conv": (nn.ConvTranspose2d(3, 2, 3, 2, 1, output_padding=1), (3, 4, 3)),
    "transposed conv without bias": (
        nn.ConvTranspose2d(3, 2, (1, 2), stride=(1, 2), bias=False, activation="tanh"),
        (3, 4, 3),
    ),
    "global avg pool": (nn.GlobalAvgPool(), (2, 7, 6)),
    "global max pool": (nn.GlobalMaxPool(), (2, 7)),
    "global max pool over positions": (nn.GlobalMaxPool(over="positions"), (7, 2)),
    "transposed": (nn.Transpose(), (2, 7, 6)),
    "residual": (nn.Residual(nn.Chain(nn.Dense(6, 8), "relu", nn.Dense(8, 6))), (6,)),
    "residual with a shortcut": (
        nn.Residual(
            nn.Chain(nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.BatchNorm(3)),
            nn.Conv2d(2, 3, 1, stride=2),
        ),
        (2, 7, 6),
    ),
    "gru": (nn.GRU(4, 5), (6, 4)),
    "gru to its last output": (nn.GRU(4, 5, last=True, bias=False), (6, 4)),
    "lstm": (nn.LSTM(4, 5), (6, 4)),
    "lstm to its last output": (nn.LSTM(4, 5, last=True, bias=False), (6, 4)),
    "leaky": (nn.LeakyReLU(0.2), (6,)),
    "max pool": (nn.MaxPool2d(2), (2, 7, 6)),
    "avg pool": (nn.AvgPool2d((3, 2), stride=1), (2, 7, 6)),
    "attention": (nn.Attention(8, 4, kv_heads=2, causal=True, rope=True), (5, 8)),
    "attention with bias": (nn.Attention(8, 2, bias=True), (5, 8)),
    "gated": (nn.GatedMLP(6, 10), (3, 6)),
    "block": (nn.TransformerBlock(8, 2, causal=True, rope=True), (5, 8)),
    "block of GPT-2": (
        nn.TransformerBlock(8, 2, causal=True, norm="layer", activation="gelu", bias=True),
        (5, 8),
    ),
    "tied": (nn.TiedEmbedding(11, 6, nn.Chain(nn.GatedMLP(6, 8), nn.RMSNorm(6))), (4,)),
    "chain": (nn.Chain(nn.Dense(6, 8), "relu", nn.Chain(nn.Dense(8, 3), "softmax")), (6,)),
    **{name: (nn.Activation(name), (6,)) for name in ACTIVATIONS},
}

CLOSE = rounding(np.float32, 128)
"""A block has the longest sums that follow one another: of 8, 5, 8, 8 and 32, and two norms."""


def example(layer: Layer, shape: tuple[int, ...]) -> Array:
    drawn = np.random.default_rng(0)
    if isinstance(layer, nn.Embedding | nn.TiedEmbedding):
        return drawn.integers(0, layer.rows, (2, *shape)).astype(np.int32)
    return drawn.normal(size=(2, *shape)).astype(np.float32)


def parameters_of(layer: Layer, seed: int = 0) -> Any:
    """Those it begins with, and a little noise, so that no bias is 0 and no scale 1."""
    drawn = np.random.default_rng(seed)
    first = layer.initial(anydevice.rng(seed, anydevice.device("cpu", engine="numpy")))
    return mapped(lambda x: (x + drawn.normal(size=x.shape) * 0.1).astype(np.float32), first)


def wide(tree: Any) -> Any:
    return mapped(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, tree)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_the_same_everywhere(name: str, anywhere: Device) -> None:
    layer, shape = LAYERS[name]
    parameters, x = parameters_of(layer), example(layer, shape)
    expected = layer.apply(wide(parameters), wide(x), nn.Run())
    there, x_there = anydevice.to_device((parameters, x), anywhere)
    y = anydevice.to_numpy(layer.apply(there, x_there, nn.Run()))
    assert y.shape == (2, *layer.output(shape)), "what `output` says is what comes out"
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, expected, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("name", LAYERS)
def test_each_parameter_has_its_own_memory(name: str) -> None:
    """An update in place changes no other."""
    layer, _ = LAYERS[name]
    arrays = leaves(layer.initial(anydevice.rng(0, anydevice.device("cpu", engine="numpy"))))
    assert len({array.__array_interface__["data"][0] for array in arrays}) == len(arrays)


def torch_result(module: Any, weights: dict[str, Array], x: Array) -> Array:
    import torch

    module.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
    with torch.no_grad():
        result: Array = module(torch.tensor(x)).numpy()
    return result


THEIRS: dict[str, Callable[[Any], Any]] = {
    "dense": lambda nn: nn.Linear(6, 5),
    "embedding": lambda nn: nn.Embedding(11, 6),
    "layer norm": lambda nn: nn.LayerNorm(6),
    "rms norm": lambda nn: nn.RMSNorm(6, eps=1e-6),
    "conv": lambda nn: nn.Conv2d(2, 3, 3, stride=2, padding=1),
    "max pool": lambda nn: nn.MaxPool2d(2),
    "avg pool": lambda nn: nn.AvgPool2d((3, 2), stride=1),
    "flatten": lambda nn: nn.Flatten(),
    "conv of sequences": lambda nn: nn.Conv1d(2, 3, 3, stride=2, padding=1),
    "transposed conv": lambda nn: nn.ConvTranspose2d(3, 2, 3, 2, 1, output_padding=1),
    "leaky": lambda nn: nn.LeakyReLU(0.2),
    "leaky_relu": lambda nn: nn.LeakyReLU(),
    "elu": lambda nn: nn.ELU(),
    "softplus": lambda nn: nn.Softplus(),
    "depthwise conv": lambda nn: nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=4),
    "group norm": lambda nn: nn.GroupNorm(2, 4),
    "prelu": lambda nn: nn.PReLU(3),
    "max pool of sequences": lambda nn: nn.MaxPool1d(3, stride=2),
    "avg pool of sequences": lambda nn: nn.AvgPool1d(2),
    "upsample": lambda nn: nn.Upsample(scale_factor=2),
    "upsample linearly": lambda nn: nn.Upsample(scale_factor=3, mode="bilinear"),
    "both ways": lambda nn: outputs_of(nn.LSTM(4, 5, batch_first=True, bidirectional=True)),
}


def outputs_of(module: Any) -> Any:
    module.register_forward_hook(lambda *given: given[-1][0])
    return module


def torch_names(parameters: Any) -> dict[str, Array]:
    named = {("weight" if n == "slope" else n): own for n, own in parameters.items()}
    for part, end in (("forward", ""), ("backward", "_reverse")):
        inside = named.pop(part, {})
        named |= {RECURRENT[n] + end: own for n, own in inside.items()}
    return named


@pytest.mark.parametrize("name", THEIRS)
def test_a_layer_is_that_of_torch(name: str, trainable: Device) -> None:
    """The output, and the gradients of the sum of output³."""
    torch = pytest.importorskip("torch")
    (layer, shape), module = LAYERS[name], THEIRS[name](torch.nn)
    own, x = parameters_of(layer), example(layer, shape)
    module.load_state_dict({n: torch.tensor(a) for n, a in torch_names(own).items()})
    given = torch.tensor(x, requires_grad=x.dtype == np.float32)
    (expected := module(given)).pow(3).sum().backward()
    gradients = {n: a.grad for n, a in (*module.named_parameters(), ("x", given))}
    there, x_there = anydevice.to_device((own, x), trainable)
    y = anydevice.to_numpy(layer.apply(there, x_there, nn.Run()))
    np.testing.assert_allclose(y, expected.detach().numpy(), CLOSE, CLOSE)
    tree = {**there, "x": x_there} if given.requires_grad else there
    autodiff = registry.load(str(trainable.engine)).autodiff
    _, found = autodiff.value_and_grad(lambda tree: loss_of(layer)({"x": x_there, **tree}))(tree)
    known = {n: a.numpy() for n, a in gradients.items() if a is not None}
    assert_gradients({**torch_names(found), **{n: found[n] for n in found if n == "x"}}, known)


def attention_weights(own: Any, prefix: str = "") -> dict[str, Array]:
    """The parameters of our attention by torch's names."""
    names = {"in_proj_weight": "qkv", "in_proj_bias": "qkv_bias"}
    names |= {"out_proj.weight": "output", "out_proj.bias": "output_bias"}
    return {prefix + theirs: own[name] for theirs, name in names.items()}


def test_attention_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch")
    layer, shape = LAYERS["attention with bias"]
    parameters, x = parameters_of(layer), example(layer, shape)
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    weights = attention_weights(parameters)
    theirs.load_state_dict({name: torch.tensor(own) for name, own in weights.items()})
    given = torch.tensor(x)
    expected = theirs(given, given, given, need_weights=False)[0].detach().numpy()
    np.testing.assert_allclose(layer.apply(parameters, x, nn.Run()), expected, CLOSE, CLOSE)


def test_a_block_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch")
    layer = nn.TransformerBlock(8, 2, hidden=12, norm="layer", activation="relu", bias=True)
    parameters, x = parameters_of(layer), example(layer, (5, 8))
    how = {"dropout": 0.0, "batch_first": True, "norm_first": True}
    theirs = torch.nn.TransformerEncoderLayer(8, 2, 12, **how)
    weights = attention_weights(parameters["attention"], "self_attn.")
    parts = {"norm1": parameters["attention_norm"], "norm2": parameters["mlp_norm"]}
    parts |= {"linear1": parameters["mlp"][0], "linear2": parameters["mlp"][1]}
    for name, part in parts.items():
        weights |= {f"{name}.{kind}": part[kind] for kind in ("weight", "bias")}
    expected = torch_result(theirs, weights, x)
    np.testing.assert_allclose(layer.apply(parameters, x, nn.Run()), expected, CLOSE, CLOSE)


def test_later_positions_do_not_change_earlier_ones() -> None:
    layer, shape = LAYERS["attention"]
    parameters, x = parameters_of(layer), example(layer, shape)
    changed = x.copy()
    changed[:, -1] += 1
    before, after = (layer.apply(parameters, each, nn.Run()) for each in (x, changed))
    assert_close(before[:, :-1], after[:, :-1], terms=64)
    assert (before[:, -1] != after[:, -1]).any()


@pytest.mark.parametrize(
    ("layer", "shape", "said"),
    [
        (nn.Dense(128, 10), (64,), "Dense(128→10): got 64 features"),
        (nn.Dense(4, 2), (), "Dense(4→2): got scalars, expected 4 features"),
        (nn.Chain("relu", nn.Dense(8, 2)), (4,), "Chain[1] Dense(8→2): got 4 features"),
        (nn.Chain("relu", nn.Chain(nn.LayerNorm(4))), (5,), "Chain[1][0] LayerNorm(4): got 5 f"),
        (nn.RMSNorm(4), (5,), "RMSNorm(4): got 5 features"),
        (nn.BatchNorm(4), (3, 4, 4), "BatchNorm(4): got 3 channels, the first axis of the shape"),
        (nn.BatchNorm(4), (), "BatchNorm(4): got scalars, expected 4 channels"),
        (nn.Chain(nn.TransformerBlock(8, 2)), (3, 4), "Chain[0].attention_norm RMSNorm(8): got 4"),
        (nn.Attention(8, 2), (8,), "Attention(8, 2 heads): got the shape (8,), expected"),
        (nn.PositionEmbedding(3, 4), (5, 4), "got 5 tokens, but it has 3 positions"),
        (nn.PositionEmbedding(3, 4), (4,), "got the shape (4,), expected (positions, 4)"),
        (nn.Conv2d(3, 8, 3), (1, 9, 9), "Conv2d(3→8, 3×3): got 1 channels"),
        (nn.Conv2d(3, 8, 3), (9, 9), "got the shape (9, 9), expected (channels, height"),
        (nn.Conv1d(3, 8, 3), (1, 9), "Conv1d(3→8, 3): got 1 channels"),
        (nn.Conv1d(3, 8, 3), (3, 9, 9), "got the shape (3, 9, 9), expected (channels, length)"),
        (nn.Conv1d(3, 8, 5), (3, 4), "got a length of 4, which its windows do not fit"),
        (nn.ConvTranspose2d(3, 8, 3), (1, 9, 9), "ConvTranspose2d(3→8, 3×3): got 1 channels"),
        (nn.ConvTranspose2d(3, 8, 1, padding=2), (3, 4, 4), "its padding leaves nothing of it"),
        (nn.GlobalMaxPool(), (4,), "GlobalMaxPool: got the shape (4,), expected (channels,"),
        (
            nn.Residual(nn.Dense(4, 3)),
            (4,),
            "Residual: got (features 3) from Dense(4→3) and (4,) beside it",
        ),
        (nn.Residual(nn.Dense(4, 3), nn.Dense(5, 3)), (4,), "Residual.shortcut Dense(5→3): got 4"),
        (nn.Conv2d(4, 6, 1, groups=4), (4, 3, 3), "4 groups do not divide its channels"),
        (nn.GroupNorm(6, groups=4), (6, 3), "GroupNorm(6): 4 groups do not divide the channels"),
        (nn.MaxPool1d(5), (3, 4), "MaxPool1d(5): got a length of 4, which its windows do not fit"),
        (
            nn.Concatenate(nn.Dense(6, 4), "tanh"),
            (3, 6),
            "got (positions 3, features 4) and (3, 6), which",
        ),
        (nn.Bidirectional(nn.GRU(4, 5)), (6, 3), "Bidirectional.forward GRU(4→5): got 3 features"),
        (nn.GRU(4, 5), (4,), "GRU(4→5): got the shape (4,), expected (positions, 4)"),
        (nn.LSTM(4, 5), (6, 3), "LSTM(4→5): got 3 features"),
        (nn.MaxPool2d((1, 5)), (3, 4, 4), "MaxPool2d(1×5): got an image of 4×4"),
        (
            nn.TiedEmbedding(9, 4, nn.Chain(nn.Dense(5, 4))),
            (3,),
            "TiedEmbedding.inside[0] Dense(5→4)",
        ),
        (
            nn.TiedEmbedding(9, 4, nn.Dense(4, 5)),
            (3,),
            "9→4→9): got the shape (positions 3, features 5) from Dense(4→5)",
        ),
        (nn.GatedMLP(4, 8), (3,), "GatedMLP(4→8→4): got 3 features"),
    ],
)
def test_a_wrong_shape_names_its_layer(layer: Layer, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        layer.output(shape)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Dense(0, 3),
        lambda: nn.Dense(3, 2.5),
        lambda: nn.Dense(3, True),
        lambda: nn.Dense(3, 2, activation="rulu"),
        lambda: nn.Dense(3, 2, initializer="he man"),
        lambda: nn.Dropout(1.0),
        lambda: nn.Dropout(-0.1),
        lambda: nn.Conv2d(1, 1, 0),
        lambda: nn.Conv2d(1, 1, (1, 2, 3)),
        lambda: nn.Conv2d(1, 1, 3, padding=-1),
        lambda: nn.Conv2d(1, 1, 3, activation="rulu"),
        lambda: nn.Conv1d(1, 1, (3,)),
        lambda: nn.Conv1d(1, 1, 3, padding=-1),
        lambda: nn.ConvTranspose2d(1, 1, 3, stride=2, output_padding=2),
        lambda: nn.ConvTranspose2d(1, 1, 3, stride=0),
        lambda: nn.GRU(0, 5),
        lambda: nn.LSTM(4, 5, last="yes"),
        lambda: nn.LeakyReLU(-0.1),
        lambda: nn.Residual(3),
        lambda: nn.Residual(nn.Dense(2, 2), 3),
        lambda: nn.MaxPool2d(2, stride=0),
        lambda: nn.Attention(8, 3),
        lambda: nn.Attention(8, 4, kv_heads=3),
        lambda: nn.Attention(6, 2, rope=True),
        lambda: nn.TransformerBlock(8, 2, norm="none"),
        lambda: nn.TransformerBlock(8, 2, activation="rulu"),
        lambda: nn.TiedEmbedding(9, 4, "relu"),
        lambda: nn.Chain(),
        lambda: nn.Chain(nn.Dense(2, 2), 3),
        lambda: nn.Activation("rulu"),
        lambda: nn.Dense(2, 3, bias="no"),
        lambda: nn.LayerNorm(4, eps=-1),
        lambda: nn.LayerNorm(4, eps="x"),
        lambda: nn.LayerNorm(4, bias=0),
        lambda: nn.RMSNorm(4, eps=float("nan")),
        lambda: nn.BatchNorm(0),
        lambda: nn.BatchNorm(4, momentum=0),
        lambda: nn.BatchNorm(4, momentum=1.5),
        lambda: nn.BatchNorm(4, eps=0),
        lambda: nn.Conv2d(1, 1, 3, bias=None),
        lambda: nn.Attention(8, 2, causal="yes"),
        lambda: nn.Attention(8, 2, theta=0),
        lambda: nn.TransformerBlock(8, 2, rope=1),
        lambda: nn.TransformerBlock(8, 2, norm=["rms"]),
        lambda: nn.TransformerBlock(8, 2, activation=None),
        lambda: nn.recompute("relu"),
        lambda: nn.Constant("one"),
        lambda: nn.Normal(-0.1),
        lambda: nn.Uniform("wide"),
        lambda: nn.Scaled(gain=-1),
        lambda: nn.Scaled(uniform="no"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Any) -> None:
    with pytest.raises(ConfigurationError):
        make()


def test_what_a_layer_takes_for_an_example() -> None:
    tokens = nn.Embedding(11, 6)
    blocks = nn.Chain(nn.Dense(6, 6))
    for layer in (tokens, nn.Chain(tokens, blocks), nn.recompute(tokens)):
        assert layer.takes_ids_below == 11
    assert nn.TiedEmbedding(9, 6, blocks).takes_ids_below == 9
    assert nn.TransformerBlock(8, 2).takes_ids_below is None


def test_a_layer_of_ones_own_needs_apply() -> None:
    class Nothing(nn.Layer):
        pass

    with pytest.raises(NotImplementedError, match="Nothing has no apply"):
        Nothing().apply({}, np.ones(1), nn.Run())
    assert (Nothing().label, nn.Dropout(0.25).label) == ("Nothing", "Dropout(0.25)")


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_a_value(name: str) -> None:
    layer, _ = LAYERS[name]
    again = pickle.loads(pickle.dumps(layer))
    assert again == layer
    assert hash(again) == hash(layer)
    assert [step for step, _ in again.parts] == [step for step, _ in layer.parts]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["dense", "conv", "block", "block of GPT-2", "positions", "gru", "lstm"]
)
def test_a_layer_computes_in_the_type_of_its_parameters(name: str, dtype: str, cpu: Device) -> None:
    """What mixed precision needs: 16 bits in, 16 bits out, also with dropout in training."""
    layer, shape = LAYERS[name]
    kind = DTYPES[dtype].numpy()
    parameters, x = parameters_of(layer), example(layer, shape)
    expected = layer.apply(wide(parameters), wide(x), nn.Run())
    narrow = mapped(lambda leaf: leaf.astype(kind), parameters)
    there, x_there = anydevice.to_device((narrow, x.astype(kind)), cpu)
    dropped = nn.Chain(layer, nn.Dropout(0.5))
    y = anydevice.to_numpy(layer.apply(there, x_there, nn.Run()))
    z = anydevice.to_numpy(dropped.apply([there, {}], x_there, nn.Run(training=True, step=1)))
    assert y.dtype == z.dtype == kind
    np.testing.assert_allclose(y.astype(np.float64), expected, rtol=0.05, atol=0.1)
    kept = z != 0
    np.testing.assert_allclose(z[kept].astype(np.float64), 2 * y[kept].astype(np.float64), 1e-6)


# Recurrent layers

RECURRENT = {
    "input": "weight_ih_l0",
    "recurrent": "weight_hh_l0",
    "input_bias": "bias_ih_l0",
    "recurrent_bias": "bias_hh_l0",
}


def of_torch(layer: nn.GRU | nn.LSTM, parameters: Any, x: Array) -> tuple[Array, dict[str, Array]]:
    """The output, and the gradients of the sum of output³."""
    torch = pytest.importorskip("torch")
    kind = getattr(torch.nn, type(layer).__name__)
    module = kind(layer.inputs, layer.outputs, bias=layer.bias, batch_first=True)
    module.load_state_dict({RECURRENT[name]: torch.tensor(own) for name, own in parameters.items()})
    given = torch.tensor(x, requires_grad=True)
    y = module(given)[0]
    y = y[:, -1] if layer.last else y
    (y**3).sum().backward()
    gradients = {name: getattr(module, RECURRENT[name]).grad.numpy() for name in parameters}
    return y.detach().numpy(), {**gradients, "x": given.grad.numpy()}


def loss_of(layer: Layer) -> Any:
    def loss(given: Any) -> Any:
        y = layer.apply(given, given["x"], nn.Run(training=True))
        return ops.sum(ops.multiply(y, ops.multiply(y, y)))

    return loss


def assert_gradients(found: Any, expected: dict[str, Array]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        within = 64 * CLOSE * max(1.0, np.abs(value).max())
        np.testing.assert_allclose(anydevice.to_numpy(found[name]), value, 0, within, err_msg=name)


@pytest.mark.parametrize(("last", "bias"), [(False, True), (True, False)])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_it_computes_what_torch_does(kind: Any, last: bool, bias: bool, trainable: Device) -> None:
    layer = kind(4, 5, last=last, bias=bias)
    parameters, x = parameters_of(layer), example(layer, (6, 4))
    expected, gradients = of_torch(layer, parameters, x)
    there = anydevice.to_device({**parameters, "x": x}, trainable)
    y = layer.apply(there, there["x"], nn.Run())
    np.testing.assert_allclose(anydevice.to_numpy(y), expected, CLOSE, CLOSE)
    autodiff = registry.load(trainable.engine or "").autodiff
    _, found = autodiff.value_and_grad(loss_of(layer))(there)
    assert_gradients(found, gradients)


def test_a_long_sequence_is_compiled_as_one_loop() -> None:
    """The size of what XLA gets does not grow with the time."""
    jax = pytest.importorskip("jax")
    layer = nn.LSTM(4, 5)
    parameters = parameters_of(layer)

    def size(time: int) -> int:
        loss = jax.grad(loss_of(layer))
        return len(str(jax.make_jaxpr(loss)({**parameters, "x": example(layer, (time, 4))})))

    assert size(300) < 1.1 * size(30)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_a_long_sequence_is_one_op_to_the_compiler_of_torch(kind: Any) -> None:
    """Written out, a hundred steps would take it minutes; gradients stay those of torch."""
    torch = pytest.importorskip("torch")
    common = pytest.importorskip("torch._dynamo.backends.common")
    boxed = pytest.importorskip("functorch.compile").make_boxed_func
    layer = kind(4, 5)
    parameters, x = parameters_of(layer), example(layer, (100, 4))
    expected, gradients = of_torch(layer, parameters, x)
    graphs: list[Any] = []

    def as_it_is(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return boxed(graph.forward)

    backend = common.aot_autograd(
        fw_compiler=as_it_is, bw_compiler=as_it_is, inference_compiler=as_it_is
    )
    loss = torch.compile(loss_of(layer), fullgraph=True, backend=backend)
    device = anydevice.device("cpu", engine="torch")
    there = anydevice.to_device({**parameters, "x": x}, device)
    _, found = registry.load("torch").autodiff.value_and_grad(loss)(there)
    assert_gradients(found, gradients)
    assert len(graphs) == 2
    assert all(len(graph.graph.nodes) < 40 for graph in graphs), "both ways, one op"
    apply = torch.compile(lambda given: layer.apply(given, given["x"], nn.Run()), backend=backend)
    np.testing.assert_allclose(apply(there).numpy(), expected, CLOSE, CLOSE)
