"""`nn.predict` and `nn.evaluate`: every kind of model and of data, in inference mode."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn, ops
from anydevice._core.device import Device
from anydevice.errors import ConfigurationError
from tests.comparing import assert_same_bits
from tests.nn.conftest import device_of_engine
from tests.train.libraries import CASES

Array = np.ndarray[Any, Any]
DRAWN = np.random.default_rng(5)
X = DRAWN.normal(size=(70, 4)).astype(np.float32)
IDS = DRAWN.integers(0, 3, 70)
CPU = "cpu"
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}


def model_on(device: Device | str) -> nn.Model:
    layers = nn.Dense(4, 8), nn.BatchNorm(8), "relu", nn.Dropout(0.9), nn.Dense(8, 3), "softmax"
    return nn.build(*layers, device=device)


def cross_entropy(shares: Array) -> float:
    return float(-np.log(shares[np.arange(70), IDS]).mean())


def test_outputs_are_those_of_the_model_in_order(cpu: Device) -> None:
    model = model_on(cpu)
    expected = anydevice.to_numpy(model(X))
    pairs = [(X[at : at + 32], IDS[at : at + 32]) for at in (0, 32, 64)]
    for data in (X, X.tolist(), nn.Batches(X, IDS, size=32), pairs, (X, IDS), iter(pairs)):
        found = nn.predict(model, data, size=32)
        assert type(found) is np.ndarray
        np.testing.assert_allclose(found, expected, **CLOSE)


def test_loss_and_metrics_are_those_of_all_examples_at_once(cpu: Device) -> None:
    model = model_on(cpu)
    shares = anydevice.to_numpy(model(X))

    def surest(output: Any, target: Any) -> Any:
        return ops.mean(ops.max(output, axis=-1))

    found = nn.evaluate(
        model, (X, IDS), "cross_entropy", ["accuracy", "top_2", "macro_f1", surest], size=32
    )
    assert found.loss == pytest.approx(cross_entropy(shares), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float((shares.argmax(-1) == IDS).mean()))
    assert found["top_2"] == pytest.approx(nn.top_k(shares, IDS, 2))
    assert found["macro_f1"] == pytest.approx(nn.macro_f1(shares, IDS))
    assert found["surest"] == pytest.approx(float(shares.max(-1).mean()), rel=1e-5)
    assert found.examples == 70
    assert list(found.metrics) == ["accuracy", "top_2", "macro_f1", "surest"]
    assert str(found).splitlines()[0] == f"loss      {found.loss:.4g}"
    assert f"{found['macro_f1']:.4g}</td>" in found._repr_html_()


@pytest.mark.parametrize("optimize", ["none", "default"])
def test_a_compiled_model_is_used_as_it_was_compiled(optimize: str) -> None:
    device = device_of_engine("jax")
    model = model_on(device)
    fast = anydevice.compile(model, device, optimize=optimize, precision="bfloat16")
    found = nn.predict(fast, X)
    np.testing.assert_allclose(found.astype(np.float32), anydevice.to_numpy(fast(X)), **CLOSE)
    assert not np.allclose(found.astype(np.float32), anydevice.to_numpy(model(X)), 1e-6, 1e-6)
    judged = nn.evaluate(fast, (X, IDS), metrics="accuracy")
    assert (judged.loss, math.isnan(judged["accuracy"])) == (None, False)
    assert str(judged).splitlines()[0].startswith("accuracy")


def test_shares_and_logits_of_two_classes_are_judged_alike() -> None:
    yes = (IDS > 0).astype(np.float32)[:, None]
    logits = nn.build(nn.Dense(4, 1), device="cpu")
    shares = nn.build(nn.Dense(4, 1), "sigmoid", device="cpu")
    shares = shares.with_parameters([logits.parameters, {}])
    found = [
        nn.evaluate(each, (X, yes), "binary_cross_entropy", ["accuracy", "f1", "auc"])
        for each in (logits, shares)
    ]
    assert found[0].loss == pytest.approx(found[1].loss)
    for name in ("accuracy", "f1", "auc"):
        assert found[0][name] == pytest.approx(found[1][name]), name
    error = nn.evaluate(shares, (X, yes), "binary_cross_entropy", "mae")["mae"]
    assert error == pytest.approx(float(np.abs(nn.predict(shares, X) - yes).mean()), rel=1e-5)


@pytest.mark.parametrize("library", CASES)
def test_modules_of_others_run_in_inference_mode_and_keep_theirs(library: str) -> None:
    module = CASES[library]().model()
    if library == "equinox":  # whose model has neither dropout nor state
        eqx, jax = pytest.importorskip("equinox"), pytest.importorskip("jax")
        module = jax.vmap(eqx.nn.Sequential([module.__wrapped__, eqx.nn.Dropout(0.9)]))
    mode = getattr(module, "training", None)
    first = nn.predict(module, X, size=32, device="cpu")
    assert first.shape == (70, 3)
    again = nn.predict(module, X, size=32, device="cpu")
    assert_same_bits(again, first, because="one program ran twice")
    np.testing.assert_allclose(nn.predict(module, X, size=70, device="cpu"), first, **CLOSE)
    found = nn.evaluate(module, (X, IDS), nn.cross_entropy, "accuracy", size=32, device="cpu")
    shares = np.exp(first - np.log(np.exp(first).sum(-1, keepdims=True)))
    assert found.loss == pytest.approx(cross_entropy(shares), rel=1e-4)
    assert found["accuracy"] == pytest.approx(float((first.argmax(-1) == IDS).mean()))
    assert getattr(module, "training", None) == mode
    if library == "nnx":
        assert module.layers[3].deterministic is False
    if library == "torch":
        module[1].eval()  # a part that is frozen by hand stays so
        nn.predict(module, X)
        assert [part.training for part in module] == [True, False, True, True, True]
        assert not any(part.grad is not None for part in module.parameters())
        losses = sys.modules["torch"].nn.functional
        own = nn.evaluate(module, (X, IDS), losses.cross_entropy, size=32)
        assert own.loss == pytest.approx(found.loss, rel=1e-5)


def test_batches_may_be_lists_of_numbers() -> None:
    model = nn.build(nn.Dense(2, 3), device="cpu")
    rows, ids = [[1.0, 2.0], [3.0, 4.0]], [0, 2]
    batches = [(rows, ids), (rows[:1], ids[:1])]
    assert nn.predict(model, batches).shape == (3, 3)
    for given in (rows, list(map(tuple, rows))):
        assert nn.predict(model, given).shape == (2, 3)
    assert nn.evaluate(model, batches, "cross_entropy").examples == 3


def test_a_hugging_face_model_has_its_own_loss(torch: Any) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=8, num_labels=3,
    )  # fmt: skip
    torch.manual_seed(0)
    module = transformers.BertForSequenceClassification(config).train()
    tokens = torch.from_numpy(DRAWN.integers(0, 30, (10, 6)))
    batches = [
        {"input_ids": tokens[at : at + 4], "labels": torch.from_numpy(IDS[at : at + 4])}
        for at in (0, 4, 8)
    ]
    batches[-1]["input_ids"], batches[-1]["labels"] = tokens[8:10], torch.from_numpy(IDS[8:10])
    found = nn.evaluate(module, batches, metrics=["accuracy"])
    assert module.training
    with torch.no_grad():
        whole = module.eval()(input_ids=tokens, labels=torch.from_numpy(IDS[:10]))
    assert found.loss == pytest.approx(float(whole.loss), rel=1e-5)
    logits = whole.logits.numpy()
    assert found["accuracy"] == pytest.approx(float((logits.argmax(-1) == IDS[:10]).mean()))
    np.testing.assert_allclose(nn.predict(module, batches), logits, **CLOSE)
    inputs = [{"input_ids": batch["input_ids"]} for batch in batches]
    np.testing.assert_allclose(nn.predict(module, inputs), logits, **CLOSE)


def _with_logits() -> Any:
    """A module of PyTorch whose output is a dict, as those of Hugging Face are."""
    torch: Any = pytest.importorskip("torch")

    class WithLogits(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 3)

        def forward(self, x: Any, labels: Any = None) -> Any:
            return {"logits": self.linear(x), "more": x}

    torch.manual_seed(0)
    return WithLogits()


def test_a_dict_of_arrays_is_data_and_named_losses_take_logits_and_labels() -> None:
    model = _with_logits()
    x = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
    y = np.arange(10) % 3
    logits = nn.predict(model, x)
    assert np.allclose(nn.predict(model, {"x": x}, size=4), logits, atol=1e-6)
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    wanted = -np.log(shifted[np.arange(10), y] / shifted.sum(1)).mean()
    for data in ({"x": x, "labels": y}, ({"x": x}, y), (x, y), [({"x": x}, y)]):
        found = nn.evaluate(model, data, "cross_entropy", "accuracy", size=4)
        assert found.loss == pytest.approx(wanted, rel=1e-5)
        assert found["accuracy"] == (logits.argmax(1) == y).mean()
    for batch in ({"x": x, "labels": y}, ({"x": x}, y), (x, y)):
        training = nn.Training(model, nn.SGD(0.0), None, "cross_entropy", device="cpu")
        assert float(training.step(batch)) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda model, x: nn.evaluate(model, {"x": x, "labels": x[:2]}), "3 in 'x', 2 in 'labels'"),
        (lambda model, x: nn.predict(model, {}), "there are no arrays in it"),
        (
            lambda model, x: nn.train(model, {"x": x}, nn.SGD(0.1), "cross_entropy", epochs=1),
            "data is one dict, and must be batches",
        ),
        (
            lambda model, x: nn.train(model, [{"x": x}], nn.SGD(0.1), "cross_entropy", epochs=1),
            "cross_entropy needs targets",
        ),
        (
            lambda model, x: nn.evaluate(
                lambda x: (x, x), (x, np.zeros(3, int)), "cross_entropy", device="cpu"
            ),
            "the model returns a tuple, and cross_entropy takes one array",
        ),
    ],
)
def test_dicts_and_outputs_that_do_not_fit_are_refused(call: Any, said: str) -> None:
    with anydevice.use_device("cpu"), pytest.raises(ConfigurationError, match=said):
        call(_with_logits(), np.ones((3, 4), np.float32))


def test_tables_loaders_and_functions() -> None:
    model = model_on("cpu")
    expected = anydevice.to_numpy(model(X))
    pandas, torch = pytest.importorskip("pandas"), pytest.importorskip("torch")
    np.testing.assert_allclose(nn.predict(model, pandas.DataFrame(X)), expected, **CLOSE)
    data = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(IDS))
    loader = torch.utils.data.DataLoader(data, batch_size=32)
    there = anydevice.to_device(model, anydevice.device("cpu", engine="torch"), convert=True)
    np.testing.assert_allclose(nn.predict(there, loader), expected, **CLOSE)
    found = nn.evaluate(there, loader, "cross_entropy", metrics={"right": "accuracy"})
    assert found["right"] == nn.evaluate(model, (X, IDS), metrics="accuracy")["accuracy"]
    doubled = nn.predict(lambda x: (ops.multiply(x, 2.0), {"same": x}), X, size=9, device=CPU)
    assert_same_bits(doubled[0], 2 * X, because="doubling a float rounds nothing")
    assert_same_bits(doubled[1]["same"], X, because="it was copied alone")


@pytest.mark.parametrize(
    ("function", "data", "options", "said"),
    [
        (nn.evaluate, (X, IDS), {}, "nothing is evaluated"),
        (nn.evaluate, X, {"loss": "cross_entropy"}, "no targets"),
        (nn.evaluate, (X, IDS[:9]), {"loss": "cross_entropy"}, "70 examples in x"),
        (nn.evaluate, (X, IDS), {"metrics": "acu"}, "unknown metric 'acu'"),
        (nn.evaluate, [(X, IDS), (X, X)], {"metrics": "accuracy"}, "batch 2 of .*: accuracy takes"),
        (nn.predict, [], {}, "no batches"),
        (nn.predict, 3, {}, "an array, a DataFrame, nn.Batches"),
        (nn.predict, X, {"size": 0}, "size must be an integer"),
        (nn.predict, [(X, IDS, X)], {}, "not a tuple of 3"),
        (nn.predict, X[:, :2], {}, "Dense"),
    ],
)
def test_bad_data_is_refused(function: Any, data: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        function(model_on("cpu"), data, **options)
