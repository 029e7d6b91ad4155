"""A model: its parameters, its place, its table, its errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn, ops
from anydevice._core.device import Device
from anydevice._core.trees import difference, leaves, refilled
from anydevice._nn import model as binding
from anydevice._nn.initializers import INITIALIZERS, Initializer
from anydevice._nn.model import built_for
from anydevice.errors import ConfigurationError
from tests.comparing import COPIED, SAME_PROGRAM, assert_same_bits

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
        for a, b in zip(there, here, strict=True):
            assert_same_bits(a, b, because="drawn on the host, then copied")
        assert any((a != b).any() for a, b in zip(other, here, strict=True))


def test_a_layer_begins_the_same_whatever_size_those_before_it_have() -> None:
    one, other = (
        nn.build(nn.Dense(4, n), nn.Dense(n, 3), nn.Dense(3, 2), device="cpu") for n in (5, 9)
    )
    last, same = one.parameters[2]["weight"], other.parameters[2]["weight"]
    assert_same_bits(last, same, because="the same seed draws the same numbers")


def test_a_model_is_a_tree(cpu: Device) -> None:
    model = nn.build(nn.Dense(4, 3), "relu", device="cpu")
    moved = anydevice.to_device(model, cpu)
    assert isinstance(moved, nn.Model)
    assert anydevice.device_of(moved) == cpu
    library = type(moved.parameters[0]["weight"]).__module__.partition(".")[0]
    assert library in ("numpy", "torch", "jaxlib", "mlx")
    assert isinstance(cpu(model), nn.Model)
    back = anydevice.to_numpy(moved)
    before, after = model.parameters[0]["weight"], back.parameters[0]["weight"]
    assert_same_bits(after, before, because=COPIED)
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
    assert repr(model) == "Model(Chain of 4 layers, 5 → 5×20, 1,368 parameters, cpu numpy)"
    dense = nn.build(nn.Dense(3, 2), device="cpu")
    assert repr(dense) == "Model(Dense(3→2), 3 → 2, 8 parameters, cpu numpy)"
    nested = nn.build(nn.Chain(nn.Dense(2, 3), "relu"), nn.recompute(nn.Dense(3, 1)), device="cpu")
    paths = [line.split()[0] for line in str(nested).splitlines()[1:]]
    assert paths == ["[0][0]", "[0][1]", "[1]", "Chain"]
    assert "\nActivation  1 → 1 " in str(nn.Model("relu", (), device="cpu"))


def test_a_model_says_what_training_does_not_change() -> None:
    layers = nn.Dense(64, 128), nn.BatchNorm(128), "relu", nn.Dense(128, 10)
    model = nn.build(*layers, device="cpu").freeze("[0]", "*.bias")
    assert str(model).splitlines() == [
        "model                  output  parameters     bytes  training",
        "[0]    Dense(64→128)   128          8,320  32.5 KiB  8,320 frozen",
        "[1]    BatchNorm(128)  128            512   2.0 KiB  128 frozen, 256 state",
        "[2]    relu            128              0       0 B",
        "[3]    Dense(128→10)   10           1,290   5.0 KiB  10 frozen",
        "Chain  64 → 10                     10,122  39.5 KiB  "
        "1,408 trained, 8,458 frozen, 256 state",
    ]
    assert "10,122 parameters, 8,458 frozen, 256 state" in repr(model)
    tied = nn.Model(nn.TiedEmbedding(20, 8, nn.RMSNorm(8)), (5,), device="cpu")
    assert "160 frozen" in str(tied.freeze("weight")).splitlines()[1]


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
    other = nn.build(nn.Dense(4, 3), device=anydevice.device("cpu", engine="numpy"))
    with pytest.raises(ConfigurationError, match="float64"):
        other(np.ones((2, 4)))


def test_what_is_in_the_hosts_memory_is_placed_where_the_parameters_are(cpu: Device) -> None:
    model = nn.build(nn.Dense(2, 3), "tanh", device=cpu)
    kind = type(model.parameters[0]["weight"])
    x = np.array([[1, 2], [3, 4]], np.float32)
    there = model(anydevice.to_device(x, cpu))
    for given in (x, x.tolist(), [[1, 2], [3, 4]], (x[0], x[1]), np.asfortranarray(x)):
        y = model(given)
        assert type(y) is kind
        assert y.dtype == there.dtype
        assert_same_bits(y, there, because=SAME_PROGRAM)
    tokens = nn.Model(nn.Chain(nn.Embedding(9, 4), nn.Dense(4, 2)), (3,), device=cpu)
    ids = np.array([[1, 2, 8]], np.int32)
    expected = tokens(anydevice.to_device(ids, cpu))
    for whole in (ids, ids.tolist()):
        assert_same_bits(tokens(whole), expected, because=SAME_PROGRAM)
    with pytest.raises(ConfigurationError, match="embedding"):
        tokens([[1.5, 2.0, 3.0]])
    assert nn.Model("relu", (2,), device=cpu)([[-1.0, 2.0]]).tolist() == [[0.0, 2.0]]


def test_floats_of_the_host_become_the_type_of_the_model(trainable: Device) -> None:
    model = nn.build(nn.Dense(2, 3), device=trainable)
    half = model.with_parameters(
        {name: ops.astype(one, "bfloat16") for name, one in model.parameters.items()}
    )
    for each in (model, half):
        y = each(np.ones((1, 2)))
        assert y.dtype == each.parameters["weight"].dtype


def test_fitting_arrays_are_not_looked_at(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.build(nn.Dense(2, 3), device=cpu)
    x = anydevice.to_device(np.ones((1, 2), np.float32), cpu)
    monkeypatch.setattr(binding, "as_batch", None)
    for each in (model, nn.recompute(model), anydevice.to_device(model, cpu)):
        assert tuple(each(x).shape) == (1, 3)


def test_what_is_no_batch_is_refused_in_words() -> None:
    model = nn.build(nn.Dense(2, 3), device=anydevice.device("cpu", engine="numpy"))
    number, nothing = r"examples of the shape \(2,\).*single number", "linear: this is not an array"
    wrong: list[tuple[object, str]] = [(one, number) for one in (3, 2.5, True, np.float32(3))]
    wrong += [(one, nothing) for one in (None, "text", {"x": 1}, [None], [["a"]])]
    wrong += [([[1.0, 2.0], [1.0]], "not a batch of examples")]
    wrong += [([[1.0]], r"Dense\(2→3\): got 1 features")]
    for batch, said in wrong:
        with pytest.raises(ConfigurationError, match=said):
            model(batch)


def test_an_array_of_another_library_is_refused_in_words() -> None:
    torch = pytest.importorskip("torch")
    for engine, label in (("numpy", "NumPy"), ("jax", "JAX")):
        model = nn.build(nn.Dense(2, 3), device=anydevice.device("cpu", engine=engine))
        said = f"of PyTorch, and .* parameters are of {label}"
        with pytest.raises(ConfigurationError, match=said):
            model(torch.ones(1, 2))
    model = nn.build(nn.Dense(2, 3), device=anydevice.device("cpu", engine="torch"))
    assert model(torch.nn.Parameter(torch.ones(1, 2))).requires_grad, "taken as it is"


@pytest.mark.needs("torch")
def test_a_model_can_be_called_with_what_it_was_trained_on() -> None:
    home = anydevice.device("cpu", engine="torch")
    x, y = np.ones((4, 2)), np.ones((4, 1), np.float32)
    model = nn.build(nn.Dense(2, 1), device="cpu")
    how: dict[str, Any] = {"epochs": 1, "device": home, "optimize": "none"}
    trained = nn.train(model, [(x, y)], nn.SGD(0.1), "mean_squared_error", **how).model
    assert type(trained(x)) is type(trained.parameters["weight"])


def test_a_compiled_function_may_call_a_model() -> None:
    jax = pytest.importorskip("jax")
    model = nn.build(nn.Dense(2, 3), device=anydevice.device("cpu", engine="jax"))
    assert jax.jit(model)(np.ones((1, 2), np.float32)).shape == (1, 3)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"weight": 1}, "the tree has a list of 2, and a dict of 'weight' was given"),
        ([{}], "the tree has a list of 2, and a list of 1 was given"),
        ([{}, {"weight": 1}], r"[0] has a dict of 'bias', 'weight', and a dict of nothing was"),
        ([3, {}], r"[0] has a dict of 'bias', 'weight', and a int was given"),
        ([{"weight": np.ones((2, 3)), "bias": np.ones(3)}, {}], "shape (3, 2), and (2, 3) was"),
        ([{"weight": np.ones((3, 2)), "bias": None}, {}], "['bias'] has the shape (3,), and a"),
        ([{"weight": np.ones((3, 2)), "bias": np.ones(3)}, np.ones(1)], "an array of shape (1,)"),
    ],
)  # fmt: skip
def test_parameters_in_another_nest_are_refused(parameters: object, said: str) -> None:
    model = nn.build(nn.Dense(2, 3), "relu", device="cpu")
    with pytest.raises(ConfigurationError) as caught:
        model.with_parameters(parameters)
    assert said in str(caught.value)


def test_the_shape_of_an_example_is_needed_once() -> None:
    assert nn.Model(nn.GatedMLP(4, 6), device="cpu").input_shape == (4,)
    assert nn.Model(nn.recompute(nn.Dense(4, 6)), device="cpu").input_shape == (4,)
    with pytest.raises(ConfigurationError, match="takes examples of many shapes"):
        nn.Model(nn.Embedding(4, 6), device="cpu")
    for wrong in (0, (3, -1), ("four",), 2.5, True):
        with pytest.raises(ConfigurationError, match="shape of one example"):
            nn.Model("relu", wrong, device="cpu")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"Chain\[1\] Dense\(5→2\): got 3 features"):
        nn.build(nn.Dense(4, 3), nn.Dense(5, 2), device="cpu")


def test_what_every_part_gives_can_be_watched() -> None:
    seen: dict[str, tuple[int, ...]] = {}

    def watch(path: str, layer: nn.Layer, y: Any) -> None:
        seen[path] = y.shape

    model = nn.Model(GPT, (5,), device=anydevice.device("cpu", engine="numpy"))
    ids = np.zeros((2, 5), np.int32)
    model.apply(model.parameters, ids, nn.Run(training=True, watch=watch))
    inside = "attention_norm", "attention", "attention_dropout", "mlp_norm", "mlp", "mlp_dropout"
    assert list(seen) == ["[0]", *(f"[1].{name}" for name in inside), "[1]", "[2]", "[3]"]
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
    with pytest.raises(ConfigurationError, match="by must be one of inputs, outputs, both"):
        nn.Scaled(by="width")(numbers, (2,), 1, 1)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError):
        Initializer()(numbers, (2,), 1, 1)


def test_public_names_load_on_first_use() -> None:
    for name in nn.__all__:
        assert getattr(nn, name).__doc__
    assert dir(nn) == nn.__all__
    with pytest.raises(AttributeError, match="has no attribute 'Dance'"):
        _ = nn.Dance


def test_nests_are_compared_and_refilled() -> None:
    one = np.ones(1)
    assert difference([one, None, {"a": one}], (one, None, {"a": one.astype("int32")})) is None
    assert difference([None], [one]) == "[0] has None, and (1,) was given"
    assert refilled({"b": (1, None), "a": 2}, "xy") == {"b": ("y", None), "a": "x"}
    with pytest.raises(ValueError, match="2 leaves, and 1 were given"):
        refilled([1, 2], "x")


# Sizes of inputs that are left open

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
    9, 8, nn.Chain(nn.PositionEmbedding(6, None), nn.Dense(None, 8), nn.LSTM(None, 8))
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
    labels = [layer.label for layer in tokens.inside.layers]
    assert labels == ["PositionEmbedding(6×8)", "Dense(8→8)", "LSTM(8→8)"]


def test_what_is_known_is_not_inferred() -> None:
    assert CLOSED.resolved((3, 6, 8)) is CLOSED
    assert nn.build(CLOSED, input_shape=(3, 6, 8), device="cpu").layer is CLOSED
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
    found, expected = model.parameters[0]["weight"], same.parameters[0]["weight"]
    assert_same_bits(found, expected, because="the same seed draws the same numbers")


def test_what_cannot_be_inferred_is_refused() -> None:
    open_one = nn.Dense(None, 3)
    for batch in ({"ids": [1]}, None, 3.0):
        with pytest.raises(ConfigurationError, match="the first batch"):
            built_for(open_one, batch, device="cpu")
    calls: list[tuple[Any, str]] = [
        (lambda: nn.build(nn.Chain(open_one), "relu"), r"Dense\(None→3\).*input_shape=\(64,\)"),
        (lambda: nn.build("relu", open_one, input_shape=()), r"\[1\] Dense\(None→3\): got scalars"),
        (lambda: nn.Dense(3, None), "outputs must be an integer"),  # type: ignore[arg-type]
        (lambda: nn.Embedding(None, 3), "rows must be an integer"),  # type: ignore[arg-type]
    ]
    for call, said in calls:
        with pytest.raises(ConfigurationError, match=said):
            call()
