"""A model: its parameters, its place, its table, its errors."""

from __future__ import annotations

import numpy as np
import pytest

import anydevice
from anydevice import nn
from anydevice.core.device import Device
from anydevice.errors import ConfigurationError
from anydevice.nn.initializers import INITIALIZERS, Initializer
from anydevice.nn.trees import leaves, refilled

GPT = nn.Chain(
    nn.Embedding(20, 8),
    nn.TransformerBlock(8, 2, causal=True, rope=True, dropout=0.1),
    nn.RMSNorm(8),
    nn.Dense(8, 20, bias=False),
)
IMAGES = nn.Chain(nn.Conv2d(1, 4, 3), "relu", nn.MaxPool2d(2), nn.Flatten(), nn.Dense(36, 10))


def test_the_same_seed_gives_the_same_parameters_everywhere(cpu: Device) -> None:
    numpy_cpu = anydevice.device("cpu", engine="numpy")
    for layer, shape in ((GPT, (5,)), (IMAGES, (1, 8, 8))):
        there = leaves(anydevice.to_numpy(nn.Model(layer, shape, 3, cpu).parameters))
        here = leaves(nn.Model(layer, shape, 3, numpy_cpu).parameters)
        other = leaves(nn.Model(layer, shape, 4, numpy_cpu).parameters)
        assert all(np.array_equal(a, b) for a, b in zip(there, here, strict=True))
        assert not all(np.array_equal(a, b) for a, b in zip(other, here, strict=True))


def test_a_layer_begins_the_same_whatever_size_those_before_it_have() -> None:
    one, other = (
        nn.build(nn.Dense(4, n), nn.Dense(n, 3), nn.Dense(3, 2), device="cpu") for n in (5, 9)
    )
    np.testing.assert_array_equal(one.parameters[2]["weight"], other.parameters[2]["weight"])


def test_a_model_is_a_tree(cpu: Device) -> None:
    model = nn.build(nn.Dense(4, 3), "relu", device="cpu")
    moved = anydevice.to_device(model, cpu)
    assert isinstance(moved, nn.Model)
    assert anydevice.device_of(moved) == cpu
    assert type(moved.parameters[0]["weight"]).__module__.partition(".")[0] in (
        "numpy", "torch", "jaxlib", "mlx",
    )  # fmt: skip
    assert isinstance(cpu(model), nn.Model)
    back = anydevice.to_numpy(moved)
    np.testing.assert_array_equal(back.parameters[0]["weight"], model.parameters[0]["weight"])
    assert back.layer is model.layer
    assert back.output_shape == (3,)


def test_a_model_says_what_it_is() -> None:
    model = nn.Model(GPT, (5,), device="cpu")
    assert str(model).splitlines() == [
        "model                                output  parameters    bytes",
        "[0]    Embedding(20→8)               5×8            160    640 B",
        "[1]    TransformerBlock(8, 2 heads)  5×8          1,040  4.1 KiB",
        "[2]    RMSNorm(8)                    5×8              8     32 B",
        "[3]    Dense(8→20)                   5×20           160    640 B",
        "Chain  5 → 5×20                                   1,368  5.3 KiB",
    ]
    assert model.parameter_count == 1368
    assert repr(model).startswith("Model(Chain(layers=(Embedding(rows=20")
    nested = nn.build(nn.Chain(nn.Dense(2, 3), "relu"), nn.recompute(nn.Dense(3, 1)), device="cpu")
    assert [line.split()[0] for line in str(nested).splitlines()[1:]] == [
        "[0][0]", "[0][1]", "[1]", "Chain",
    ]  # fmt: skip
    assert str(nn.Model("relu", (), device="cpu")).splitlines()[-1].split()[:4] == [
        "Activation", "1", "→", "1",
    ]  # fmt: skip


def test_a_matrix_that_is_used_twice_is_counted_once() -> None:
    blocks = nn.Chain(nn.TransformerBlock(8, 2, causal=True), nn.RMSNorm(8))
    model = nn.Model(nn.TiedEmbedding(20, 8, blocks), (5,), device="cpu")
    assert str(model).splitlines() == [
        "model                                        output  parameters    bytes",
        "               TiedEmbedding(20→8→20)        5×20           160    640 B",
        ".inside[0]     TransformerBlock(8, 2 heads)  5×8          1,040  4.1 KiB",
        ".inside[1]     RMSNorm(8)                    5×8              8     32 B",
        "TiedEmbedding  5 → 5×20                                   1,208  4.7 KiB",
    ]
    marked = nn.recompute(model).layer
    assert isinstance(marked, nn.TiedEmbedding)
    assert marked.inside == nn.recompute(blocks)


def test_an_input_of_another_shape_names_the_layer(cpu: Device) -> None:
    model = nn.Model(IMAGES, (1, 8, 8), device=cpu)
    wrong = anydevice.to_device(np.ones((2, 1, 9, 12), np.float32), cpu)
    with pytest.raises(ConfigurationError, match=r"^Chain\[4\] Dense\(36→10\): got 60 features$"):
        model(wrong)


def test_an_input_that_is_wrong_otherwise_keeps_its_own_error() -> None:
    model = nn.build(nn.Dense(4, 3), device=anydevice.device("cpu", engine="numpy"))
    with pytest.raises(ConfigurationError, match="float64"):
        model(np.ones((2, 4)))


def test_the_shape_of_an_example_is_needed_once() -> None:
    assert nn.Model(nn.GatedMLP(4, 6), device="cpu").input_shape == (4,)
    assert nn.Model(nn.recompute(nn.Dense(4, 6)), device="cpu").input_shape == (4,)
    with pytest.raises(ConfigurationError, match="takes examples of many shapes"):
        nn.Model(nn.Embedding(4, 6), device="cpu")
    for wrong in (0, (3, -1), ("four",)):
        with pytest.raises(ConfigurationError, match="sizes of one example"):
            nn.Model("relu", wrong, device="cpu")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"Chain\[1\] Dense\(5→2\): got 3 features"):
        nn.build(nn.Dense(4, 3), nn.Dense(5, 2), device="cpu")


def test_what_every_part_gives_can_be_watched() -> None:
    seen: dict[str, tuple[int, ...]] = {}

    def watch(
        path: str, layer: nn.Layer, y: np.ndarray[tuple[int, ...], np.dtype[np.float32]]
    ) -> None:
        seen[path] = y.shape

    model = nn.Model(GPT, (5,), device=anydevice.device("cpu", engine="numpy"))
    ids = np.zeros((2, 5), np.int32)
    model.apply(model.parameters, ids, nn.Run(training=True, watch=watch))
    assert list(seen) == [
        "[0]",
        "[1].attention_norm",
        "[1].attention",
        "[1].attention_dropout",
        "[1].mlp_norm",
        "[1].mlp",
        "[1].mlp_dropout",
        "[1]",
        "[2]",
        "[3]",
    ]
    assert seen["[3]"] == (2, 5, 20)


@pytest.mark.parametrize("name", INITIALIZERS)
def test_initializers_have_the_variance_they_promise(name: str) -> None:
    promised = {"zeros": 0.0, "ones": 0.0, "lecun": 1 / 300, "he": 2 / 300, "glorot": 1 / 250}
    model = nn.build(nn.Dense(300, 200, initializer=name), device="cpu")
    weight = model.parameters["weight"]
    assert weight.var() == pytest.approx(promised[name], rel=0.03)
    assert weight.mean() == pytest.approx(1.0 if name == "ones" else 0.0, abs=1e-3)


def test_initializers_of_other_kinds() -> None:
    numbers = anydevice.rng(0, anydevice.device("cpu", engine="numpy"))
    assert abs(nn.Uniform(0.5)(numbers, (1000,), 1, 1)).max() <= 0.5
    assert nn.Scaled(by="outputs")(numbers, (1000,), 1, 4).std() == pytest.approx(0.5, rel=0.1)
    with pytest.raises(ConfigurationError, match="by is one of inputs, outputs, both"):
        nn.Scaled(by="width")(numbers, (2,), 1, 1)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError):
        Initializer()(numbers, (2,), 1, 1)


def test_public_names_load_on_first_use() -> None:
    for name in nn.__all__:
        assert getattr(nn, name).__doc__
    assert dir(nn) == nn.__all__
    with pytest.raises(AttributeError, match="has no attribute 'Dance'"):
        _ = nn.Dance


def test_a_tree_is_refilled_with_as_many_leaves() -> None:
    assert refilled({"b": (1, None), "a": 2}, "xy") == {"b": ("y", None), "a": "x"}
    with pytest.raises(ValueError, match="2 leaves, and 1 were given"):
        refilled([1, 2], "x")
