"""What training needs: gradients, dropout, recomputation, losses, clipping, folding."""

from __future__ import annotations

import platform
from functools import partial
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn, ops
from anydevice._core.device import Device
from anydevice._core.trees import leaves
from anydevice._machine.engines import registry
from anydevice._nn.losses import LOSSES, loss_of, remark_on
from anydevice._nn.recompute import Recomputed
from anydevice._train import training
from anydevice.errors import ConfigurationError
from tests.comparing import assert_same_bits, assert_same_integers, rounding
from tests.peaks import measured
from tests.programs import output_of

Array = np.ndarray[Any, Any]
GPT = nn.Chain(
    nn.Embedding(20, 8),
    nn.TransformerBlock(8, 2, causal=True, rope=True, dropout=0.25),
    nn.TransformerBlock(8, 2, causal=True, rope=True, dropout=0.25),
    nn.RMSNorm(8),
    nn.Dense(8, 20, bias=False),
)

FORWARD = 2 * (3 * 8 + 2 * 5 + 8 + 8 + 8 + 32) + 8 + 8 + 20 + 10
"""The sums that follow one another in its loss: widths of 8 and 32, 5 tokens, 20 ids, 10 losses."""
THERE_AND_BACK = 3 * FORWARD
"""With those of the backward pass, each of which is of two factors."""


class Unhashable:
    """A loss that is an object, and one that cannot be a key."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True

    def __call__(self, output: Any, target: Any) -> Any:
        return ops.mean(output)


def batch(device: Device) -> tuple[Any, Any]:
    drawn = np.random.default_rng(0)
    ids = drawn.integers(0, 20, (2, 2, 5)).astype(np.int32)
    pair: tuple[Any, Any] = anydevice.to_device((ids[0].copy(), ids[1].copy()), device)
    return pair


def gradients(model: nn.Model, engine: Any, device: Device, step: int = 3) -> tuple[float, Any]:
    ids, targets = batch(device)
    at = anydevice.to_device(np.array(step, np.int32), device)

    def loss(parameters: Any, ids: Any, targets: Any, at: Any) -> Any:
        run = nn.Run(training=True, seed=7, step=at)
        return nn.cross_entropy(model.apply(parameters, ids, run), targets)

    value, found = engine.autodiff.value_and_grad(loss)(model.parameters, ids, targets, at)
    return float(anydevice.to_numpy(value)), anydevice.to_numpy(found)


def test_losses_of_one_seed_are_the_same_on_every_engine(trainable: Device, engine: Any) -> None:
    """Ten steps with dropout, against those of NumPy's forward pass with the same parameters."""
    model = nn.Model(GPT, (5,), device=trainable)
    optimizer = nn.AdamW(1e-2)
    parameters, state = model.parameters, optimizer.init(model.parameters)
    ids, targets = (anydevice.to_numpy(each) for each in batch(trainable))
    losses = []
    for step in range(1, 11):
        value, found = gradients(model.with_parameters(parameters), engine, trainable, step)
        run = nn.Run(training=True, seed=7, step=step)
        logits = model.apply(anydevice.to_numpy(parameters), ids, run)
        same = pytest.approx(value, rel=rounding(np.float32, FORWARD))
        assert float(nn.cross_entropy(logits, targets)) == same
        found = anydevice.to_device(found, trainable)
        parameters, state = optimizer.update(parameters, found, state, step)
        losses.append(value)
    assert losses[-1] < losses[0] - 0.3


def test_recomputed_activations_give_the_same_gradients(trainable: Device, engine: Any) -> None:
    model = nn.Model(GPT, (5,), device=trainable)
    again = nn.recompute(model)
    kinds = [type(layer).__name__ for layer in again.layer.layers]  # type: ignore[attr-defined]
    assert kinds == ["Embedding", "Recomputed", "Recomputed", "RMSNorm", "Dense"]
    assert again.parameters is model.parameters
    value, expected = gradients(model, engine, trainable)
    value_again, found = gradients(again, engine, trainable)
    allowed = rounding(np.float32, THERE_AND_BACK)
    assert value_again == pytest.approx(value, rel=allowed)
    for a, b in zip(leaves(found), leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=allowed * abs(b).max())


def assert_recomputation_saves(engine: Any, device: Device, layer: nn.Layer, *shape: int) -> None:
    """At least 40 % of the peak, and gradients stay the same."""
    model = nn.Model(layer, shape[1:], device=device)
    x = anydevice.to_device(np.random.default_rng(0).standard_normal(shape, "float32"), device)

    def step_of(model: nn.Model) -> Any:
        def loss(parameters: Any, x: Any) -> Any:
            return nn.mean_squared_error(model.apply(parameters, x, nn.Run(training=True)), x)

        return engine.autodiff.value_and_grad(loss)

    given = (model.parameters, x)
    (_, expected), plain = measured(engine.name, step_of(model), *given)
    (_, found), again = measured(engine.name, step_of(nn.recompute(model)), *given)
    assert again < 0.6 * plain
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        a, b = anydevice.to_numpy((one, other))
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * abs(b).max())


DENSE = nn.Dense(16, 16)
SAME = nn.Chain(nn.recompute(nn.Dropout(0.5)), "identity")


@pytest.mark.parametrize("layers", [(DENSE, "relu"), (nn.Dense(16, 16, activation="relu"),)])
def test_recomputation_lowers_the_peak(trainable: Device, engine: Any, layers: Any) -> None:
    assert_recomputation_saves(engine, trainable, nn.Chain(*layers * 20), 2048, 16)


@pytest.mark.needs("torch")
def test_recomputation_lowers_the_peak_of_chains_and_blocks() -> None:
    here = anydevice.device("cpu", engine="torch")
    chain = nn.Chain(DENSE, nn.Chain("gelu", nn.LayerNorm(16)))
    torch = registry.load("torch")
    assert_recomputation_saves(torch, here, nn.Chain(*[chain] * 6, DENSE), 2048, 16)
    assert_recomputation_saves(torch, here, nn.Chain(*[nn.TransformerBlock(16, 2)] * 6), 32, 64, 16)


PEAK = """
import sys
from pathlib import Path
import numpy as np, anydevice
from anydevice import nn

def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

anydevice.configure(return_memory=sys.argv[1] != "kept")
here = anydevice.device("cpu", engine="torch")
model = nn.build(*[nn.Dense(64, 64), "relu"] * 20, nn.Dense(64, 4), device=here)
if sys.argv[1] == "recomputed":
    model = nn.recompute(model)
x = np.ones((32768, 64), np.float32)
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back
nn.train(model, [(x, x[:, :4])] * 2, nn.SGD(1e-3), "mean_squared_error", epochs=1,
         optimize="none", progress=False)
print(resident("VmHWM") - before, "torch._dynamo" in sys.modules)
"""


@pytest.mark.needs("torch")
@pytest.mark.skipif("glibc" not in platform.libc_ver(), reason="the allocator is another one")
def test_recomputation_lowers_the_peak_of_the_process() -> None:
    """To half of the plain one. Memory that glibc keeps would be 1.8 times the plain one."""
    env = {"MALLOC_MMAP_THRESHOLD_": None, "OMP_NUM_THREADS": "1"}
    ways = ("kept", "plain", "recomputed")
    shown = {way: output_of("-c", PEAK, way, env=env).split() for way in ways}
    kept, plain, recomputed = (int(peak) for peak, _ in shown.values())
    assert recomputed < 0.7 * plain, shown
    assert plain < 0.8 * kept, shown
    assert shown["recomputed"][1] == "False", "PyTorch's compiler takes 150 MiB"


def test_a_tied_matrix_has_the_gradients_of_both_its_uses(trainable: Device, engine: Any) -> None:
    blocks = nn.Chain(nn.TransformerBlock(8, 2, causal=True), nn.RMSNorm(8))
    tied = nn.Model(nn.TiedEmbedding(20, 8, blocks), (5,), device=trainable)
    own = tied.parameters
    apart = nn.Model(
        nn.Chain(nn.Embedding(20, 8), blocks, nn.Dense(8, 20, bias=False)), (5,), device=trainable
    ).with_parameters([{"weight": own["weight"]}, own["inside"], {"weight": own["weight"]}])
    value, found = gradients(tied, engine, trainable)
    same, expected = gradients(apart, engine, trainable)
    allowed = rounding(np.float32, THERE_AND_BACK)
    assert value == pytest.approx(same, rel=allowed)
    both = expected[0]["weight"] + expected[2]["weight"]
    np.testing.assert_allclose(found["weight"], both, rtol=0, atol=allowed * abs(both).max())


def test_which_parts_of_a_chain_are_recomputed() -> None:
    dense, block = nn.Dense(4, 4), nn.TransformerBlock(4, 2)
    inner = nn.Chain(dense, "relu")
    assert nn.recompute(block) == Recomputed(block)
    assert nn.recompute(inner) == Recomputed(inner)
    assert nn.recompute(nn.Chain(inner, dense)) == Recomputed(nn.Chain(inner, dense))
    mixed = nn.Chain(block, nn.Chain(inner, dense), dense)
    assert nn.recompute(mixed) == nn.Chain(
        Recomputed(block), Recomputed(nn.Chain(inner, dense)), dense
    )
    deep = nn.Chain(dense, nn.Chain(block, dense))
    assert nn.recompute(deep) == nn.Chain(dense, nn.Chain(Recomputed(block), dense))
    for layer in (block, inner, deep, mixed):
        assert nn.recompute(nn.recompute(layer)) == nn.recompute(layer)


def test_where_there_are_no_gradients_a_recomputed_layer_is_the_layer() -> None:
    layer = nn.Dense(4, 3)
    model = nn.build(layer, device=anydevice.device("cpu", engine="numpy"))
    again, x = nn.recompute(model), np.ones((2, 4), np.float32)
    trained = again.apply(model.parameters, x, nn.Run(training=True))
    assert_same_bits(trained, model(x), because="NumPy recomputes nothing")
    assert_same_bits(again(x), model(x), because="NumPy recomputes nothing")
    with pytest.raises(ConfigurationError, match="not an array"):
        Recomputed(nn.Activation("silu")).apply({}, "text", nn.Run(training=True))


def left_out(device: Device, path: str = "[1]", **keywords: Any) -> Array:
    x = anydevice.to_device(np.ones((64, 4, 48), np.float32), device)
    run = nn.Run(training=True, path=path, **keywords)
    y: Array = anydevice.to_numpy(nn.Dropout(0.25).apply({}, x, run))
    assert set(np.unique(y)) == {np.float32(0), np.float32(1 / 0.75)}
    return y == 0


def test_dropout_is_the_same_on_every_engine(cpu: Device) -> None:
    numpy_cpu = anydevice.device("cpu", engine="numpy")
    expected = left_out(numpy_cpu, seed=5, step=9)
    arrays = {
        name: anydevice.to_device(np.array(value, np.int32), cpu)
        for name, value in {"seed": 5, "step": 9}.items()
    }
    assert_same_integers(left_out(cpu, seed=5, step=9), expected)
    assert_same_integers(left_out(cpu, **arrays), expected)
    large = left_out(numpy_cpu, seed=2**60, step=1)
    assert_same_integers(left_out(cpu, seed=nn.folded_seed(2**60), step=1), large)


def test_dropout_leaves_out_its_share_without_a_pattern() -> None:
    numpy_cpu = anydevice.device("cpu", engine="numpy")
    masks = [
        left_out(numpy_cpu, seed=seed, step=step, path=path)
        for seed in (0, 1)
        for step in (1, 2, 3)
        for path in ("[1]", "[2]")
    ]
    deviations = np.stack([mask.reshape(256, 48) - 0.25 for mask in masks]) / np.sqrt(0.1875)
    count = deviations[0].size
    spread = 4.5 / np.sqrt(count)
    assert abs(deviations.mean((1, 2))).max() < spread
    flat = deviations.reshape(len(masks), -1)
    between = flat @ flat.T / count
    assert abs(between - np.diag(np.diag(between))).max() < spread
    for down, along in ((0, 1), (1, 0), (1, 1), (2, 0), (0, 16), (4, 0), (64, 0)):
        a = deviations[:, down:, along:]
        b = deviations[:, : 256 - down, : 48 - along]
        assert abs((a * b).mean((1, 2))).max() < spread * 1.2
    largest = np.linalg.svd(deviations, compute_uv=False)[:, 0]
    assert largest.max() < (np.sqrt(256) + np.sqrt(48)) * 1.08, "no row or column repeats another"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_a_compiled_loss_has_the_same_gradients(trainable: Device, engine: Any) -> None:
    """One compiled function for all steps gives what the plain one gives."""
    layer = nn.Chain(nn.Dense(6, 8), nn.Dropout(0.5), "relu", nn.Dense(8, 3))
    model = nn.recompute(nn.Model(layer, device=trainable))
    drawn = np.random.default_rng(0)
    x = anydevice.to_device(drawn.normal(size=(4, 6)).astype(np.float32), trainable)
    target = anydevice.to_device(drawn.integers(0, 3, 4).astype(np.int32), trainable)

    def loss(parameters: Any, x: Any, target: Any, step: Any) -> Any:
        run = nn.Run(training=True, seed=1, step=step)
        return nn.cross_entropy(model.apply(parameters, x, run), target)

    plain = engine.autodiff.value_and_grad(loss)
    compiled = engine.autodiff.value_and_grad(engine.compiler.compile(loss))
    values = []
    for number in (1, 2):
        step = anydevice.to_device(np.array(number, np.int32), trainable)
        given = (model.parameters, x, target, step)
        value, found = anydevice.to_numpy(compiled(*given))
        same, expected = anydevice.to_numpy(plain(*given))
        allowed = rounding(np.float32, 3 * (6 + 8 + 3 + 4))
        assert float(value) == pytest.approx(float(same), rel=allowed)
        for a, b in zip(leaves(found), leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=allowed, atol=allowed)
        values.append(float(value))
    assert values[0] != values[1], "each step leaves out others"


def test_losses_are_those_of_torch(cpu: Device) -> None:
    torch = pytest.importorskip("torch")
    drawn = np.random.default_rng(0)
    output = drawn.normal(size=(6, 4)).astype(np.float32) * 5
    classes = drawn.integers(0, 4, 6).astype(np.int32)
    shares = drawn.uniform(size=(6, 4)).astype(np.float32)
    functional = torch.nn.functional
    tensor = torch.tensor(output)
    theirs: dict[str, tuple[Any, Array]] = {
        "cross_entropy": (functional.cross_entropy, classes),
        "mean_squared_error": (functional.mse_loss, shares),
        "binary_cross_entropy": (functional.binary_cross_entropy_with_logits, shares),
        "huber": (functional.huber_loss, shares),
        "kl_divergence": (
            lambda x, t: functional.kl_div(x.log_softmax(-1), t, reduction="batchmean"),
            shares / shares.sum(-1, keepdims=True) * (classes[:, None] != np.arange(4)),
        ),
    }
    for name, (loss, target) in theirs.items():
        wide = torch.tensor(target)
        expected = float(loss(tensor, wide.long() if target is classes else wide))
        found = loss_of(name)(*anydevice.to_device((output, target), cpu))
        allowed = rounding(np.float32, 4 + 24)
        assert float(anydevice.to_numpy(found)) == pytest.approx(expected, rel=allowed)


@pytest.mark.parametrize("name", LOSSES)
def test_weights_multiply_the_errors_of_rows(name: str, trainable: Device, engine: Any) -> None:
    drawn, loss = np.random.default_rng(1), LOSSES[name]
    output = drawn.normal(size=(6, 4)).astype(np.float32)
    target = drawn.integers(0, 2, 6 if name == "cross_entropy" else (6, 4)).astype(
        np.int32 if name == "cross_entropy" else np.float32
    )
    own, by_class = drawn.uniform(size=6).astype(np.float32), (0.5, 3.0, 1.0, 2.0)
    x, y, weights = anydevice.to_device((output, target, own), trainable)
    grad, allowed = engine.autodiff.value_and_grad, rounding(np.float32, 64)
    value, slope = anydevice.to_numpy(grad(lambda x: loss(x, (y, weights)))(x))
    rows = [grad(lambda x, n=n: loss(x[n : n + 1], y[n : n + 1]))(x) for n in range(6)]
    values, slopes = (np.stack(part) for part in zip(*anydevice.to_numpy(rows), strict=True))
    assert float(value) == pytest.approx((own * values).mean(), rel=allowed)
    np.testing.assert_allclose(slope, np.tensordot(own, slopes, 1) / 6, 0, allowed)
    if "cross_entropy" in name:
        pair = y, anydevice.to_device(np.float32(by_class)[target.astype(int)], trainable)
        with_classes = partial(loss, class_weights=by_class[: None if target.ndim == 1 else 2])
        assert float(with_classes(x, y)) == pytest.approx(float(loss(x, pair)), rel=allowed)


def test_binary_cross_entropy_takes_truth_values_and_large_outputs() -> None:
    loss = nn.binary_cross_entropy
    assert loss(np.array([200.0, -200.0]), np.array([True, False])) == 0
    assert loss(np.array([200.0], np.float32), np.array([0])) == pytest.approx(200)
    assert np.isnan(loss(np.array([np.nan]), np.array([1])))
    with pytest.raises(ConfigurationError, match=r"same shape, but output is \(2,\), target is"):
        loss(np.ones(2), np.ones(3))


@pytest.mark.parametrize("name", LOSSES)
def test_the_advice_for_targets_of_another_shape_works(trainable: Device, name: str) -> None:
    """One-hot classes, a column of classes, and a row of numbers for a column of outputs."""
    loss = LOSSES[name]
    hot, column = np.eye(3, dtype=np.float32)[[0, 2]], np.zeros((2, 1), np.int32)
    number = np.ones(2, np.float32)
    width = 3 if name == "cross_entropy" else 1
    output = anydevice.to_device(np.ones((2, width), np.float32), trainable)
    for given in [hot, hot.astype(np.int32), column] if width == 3 else [number]:
        target = anydevice.to_device(given, trainable)
        with pytest.raises(ConfigurationError, match=" use ") as caught:
            loss(output, target)
        advised = str(caught.value).rpartition(" use ")[2]
        fixed = eval(advised, {"target": target, "targets": target})
        assert np.isfinite(float(anydevice.to_numpy(loss(output, fixed))))


def test_losses_by_name() -> None:
    assert all(loss_of(name) is loss for name, loss in LOSSES.items())
    assert loss_of(nn.cross_entropy) is nn.cross_entropy
    with pytest.raises(ConfigurationError, match="unknown loss 'hinge'"):
        loss_of("hinge")
    with pytest.raises(ConfigurationError, match="unknown loss"):
        loss_of(["cross_entropy"])  # type: ignore[arg-type]


def test_gradients_are_clipped_as_by_torch(cpu: Device) -> None:
    torch = pytest.importorskip("torch")
    drawn = np.random.default_rng(0)
    tree = {"a": drawn.normal(size=(3, 4)).astype(np.float32), "b": [np.float32([2.0])]}
    there = anydevice.to_device(tree, cpu)
    for limit in (0.5, 100.0):
        theirs = [torch.nn.Parameter(torch.zeros(leaf.shape)) for leaf in leaves(tree)]
        for parameter, leaf in zip(theirs, leaves(tree), strict=True):
            parameter.grad = torch.tensor(leaf)
        allowed = rounding(np.float32, 20)  # 13 squares, a root, a product
        norm = float(torch.nn.utils.clip_grad_norm_(theirs, limit))
        found, found_norm = nn.clip_gradients(there, limit)
        assert float(anydevice.to_numpy(found_norm)) == pytest.approx(norm, rel=allowed)
        assert float(anydevice.to_numpy(nn.global_norm(there))) == pytest.approx(norm, rel=allowed)
        for a, b in zip(leaves(anydevice.to_numpy(found)), theirs, strict=True):
            np.testing.assert_allclose(a, b.grad.numpy(), rtol=allowed)
    for a, b in zip(leaves(anydevice.to_numpy(found)), leaves(tree), strict=True):
        assert_same_bits(a, b, because="a norm within the limit changes nothing")


def test_clipping_in_other_types() -> None:
    small, _ = nn.clip_gradients({"x": np.full(400, 300, np.float16), "y": np.array(1.0)}, 1.0)
    assert small["x"].dtype == np.float16
    assert small["y"].dtype == np.float64
    assert small["y"].shape == ()
    assert small["x"][0] == pytest.approx(0.05, rel=1e-3), "squares are added up in float32"
    assert nn.global_norm([np.array([3.0, 4.0])]).dtype == np.float64
    spoiled, norm = nn.clip_gradients([np.array([np.nan]), np.array([1.0])], 1.0)
    assert np.isnan(norm)
    assert np.isnan(spoiled[1]).all()
    for wrong in (0, -1.0, float("inf"), "x", True):
        with pytest.raises(ConfigurationError, match="finite norm above 0"):
            nn.clip_gradients([np.ones(1)], wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="no gradients"):
        nn.global_norm({})


@pytest.mark.parametrize(
    ("layer", "loss", "changed"),
    [
        (nn.Chain(nn.Dense(4, 3), "softmax"), nn.cross_entropy, True),
        (nn.Chain(nn.Dense(4, 3), nn.Chain("relu", "softmax")), nn.cross_entropy, True),
        (nn.Chain(nn.Dense(4, 3, activation="softmax")), nn.cross_entropy, True),
        (nn.recompute(nn.Chain(nn.Dense(4, 3), "softmax")), nn.cross_entropy, True),
        (nn.Chain(nn.Dense(4, 3), "sigmoid"), nn.binary_cross_entropy, True),
        (nn.Chain(nn.Dense(4, 3), "softmax"), nn.binary_cross_entropy, False),
        (nn.Chain(nn.Dense(4, 3), "softmax"), nn.mean_squared_error, False),
        (nn.Chain("softmax", nn.Dense(4, 3)), nn.cross_entropy, False),
        (nn.recompute(nn.Dense(4, 3)), nn.cross_entropy, False),
        (nn.Chain(nn.Dense(4, 3), nn.RMSNorm(3)), nn.cross_entropy, False),
        (nn.Chain(nn.Dense(4, 3), "softmax"), ops.cross_entropy, True),
        (nn.Chain(nn.Dense(4, 3), "softmax"), partial(partial(nn.cross_entropy)), True),
        (nn.Chain(nn.Dense(4, 3), "softmax", nn.Dropout(0.5)), nn.cross_entropy, True),
        (nn.Chain(nn.Dense(4, 3), "softmax", SAME), nn.cross_entropy, True),
        (nn.Chain(nn.Dense(4, 3), "sigmoid", nn.Flatten()), nn.binary_cross_entropy, True),
        (nn.Chain(nn.Dense(4, 3), "softmax", nn.Flatten()), nn.cross_entropy, False),
        (nn.Chain(nn.Dense(4, 3), "softmax", "relu"), nn.cross_entropy, False),
        (nn.Chain(nn.Dense(4, 3), "softmax"), Unhashable(), False),
    ],
)
def test_what_a_loss_does_itself_is_left_out(layer: nn.Layer, loss: Any, changed: bool) -> None:
    model = nn.Model(layer, (4,), device=anydevice.device("cpu", engine="numpy"))
    without, said = nn.fuse_loss(layer, loss)
    assert said is changed
    if not changed:
        assert without is layer
        return
    x = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    y = model.with_layer(without)(x)
    last = nn.Activation("sigmoid" if loss is nn.binary_cross_entropy else "softmax")
    allowed = rounding(np.float32, 20)
    np.testing.assert_allclose(last.apply({}, y, nn.Run()), model(x), rtol=allowed)


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d])
def test_a_convolution_that_ends_with_an_activation_is_folded(kind: Any) -> None:
    layer = kind(1, 2, 1, activation="sigmoid")
    assert nn.fuse_loss(layer, nn.binary_cross_entropy) == (kind(1, 2, 1), True)


@pytest.mark.parametrize(
    ("end", "loss", "said"),
    [
        ("softmax", nn.cross_entropy, "left out for cross_entropy"),
        ("softmax", ops.cross_entropy, "left out for cross_entropy"),
        ("softmax", partial(nn.cross_entropy), "left out for cross_entropy"),
        ("softmax", lambda y, t: nn.cross_entropy(y, t), "it is applied twice"),
        ("softmax", partial(lambda w, y, t: nn.cross_entropy(y, t), 1), "the loss partial gets"),
        ("sigmoid", Unhashable(), "the loss Unhashable gets what comes after it"),
        ("softmax", nn.binary_cross_entropy, "applies a sigmoid of its own to that"),
        ("sigmoid", nn.cross_entropy, "leave sigmoid out of the model"),
        (nn.recompute(nn.Chain("softmax", nn.Flatten())), nn.cross_entropy, "leave softmax out"),
        ("softmax", nn.mean_squared_error, None),
        ("sigmoid", ops.mean_squared_error, None),
        ("relu", Unhashable(), None),
    ],
)
def test_an_activation_applied_twice_is_said(end: Any, loss: Any, said: str | None) -> None:
    remark = remark_on(nn.Chain(nn.Dense(4, 3), end), loss)
    assert (remark is None) == (said is None)
    assert said is None or said in str(remark)


@pytest.mark.needs("torch")
def test_no_softmax_is_applied_twice_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_warned", set())  # what is said once is said in every test
    x = np.random.default_rng(0).standard_normal((32, 2)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int32)
    model = nn.build(nn.Dense(2, 3), "softmax", device=anydevice.device("cpu", engine="torch"))

    plain = nn.build(nn.Dense(2, 3), device=anydevice.device("cpu", engine="torch"))
    plain = plain.with_parameters(model.parameters[0])

    def loss_at_the_end(loss: Any, model: nn.Model = model) -> float:
        trained = nn.train(model, [(x, y)] * 6, nn.SGD(1.0), loss, epochs=1, optimize="none")
        assert trained.model.layer == model.layer
        return trained.history.losses[-1]

    with pytest.warns(UserWarning, match="left out for cross_entropy"):
        expected = loss_at_the_end(nn.cross_entropy)
    assert loss_at_the_end(nn.cross_entropy) == expected  # and it is said once
    assert loss_at_the_end(nn.cross_entropy, plain) == pytest.approx(expected, rel=1e-5)
    assert loss_at_the_end(ops.cross_entropy) == expected
    assert loss_at_the_end(partial(nn.cross_entropy)) == expected
    with pytest.warns(UserWarning, match="it is applied twice"):
        assert loss_at_the_end(lambda output, target: nn.cross_entropy(output, target)) > expected


@pytest.mark.parametrize("shape", [(7,), (7, 3), (7, 40), (7, 2, 5), (50, 4), (6, 3, 3, 2)])
def test_a_part_drops_what_the_whole_drops(shape: tuple[int, ...]) -> None:
    x = np.ones(shape, np.float32)
    layer = nn.Dropout(0.4)
    whole = layer.apply({}, x, nn.Run(training=True, seed=3, step=5))
    assert 0 < (whole == 0).mean() < 1
    for first, stop in ((0, 3), (3, 4), (4, shape[0])):
        rows = (first, stop - first, shape[0])
        part = layer.apply({}, x[first:stop], nn.Run(training=True, seed=3, step=5, rows=rows))
        assert_same_bits(part, whole[first:stop], because="the same hash of the same positions")


def test_several_rows_an_example_are_cut_with_it() -> None:
    x = np.ones((6 * 4, 5), np.float32)  # four tokens an example
    layer = nn.Dropout(0.4)
    whole = layer.apply({}, x, nn.Run(training=True, seed=3))
    part = layer.apply({}, x[8:16], nn.Run(training=True, seed=3, rows=(2, 2, 6)))
    assert_same_bits(part, whole[8:16], because="the same hash of the same positions")
