"""Models of several inputs and outputs: the curve of torch, and every call that takes a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn
from anydevice._core.device import Device
from anydevice._nn.layer import Layer
from anydevice.errors import ConfigurationError
from tests.comparing import SAME_PROGRAM, assert_close, assert_same_values
from tests.refusals import refuses

DRAWN = np.random.default_rng(0)
X = {
    "words": DRAWN.integers(0, 30, (96, 5)).astype(np.int32),
    "numbers": DRAWN.normal(size=(96, 4)).astype(np.float32),
}
Y = {
    "topic": (X["words"][:, 0] > 14).astype(np.int32),
    "score": X["numbers"][:, :1] * np.float32(2),
}
pytestmark = pytest.mark.filterwarnings("ignore:the activation at the end of the model is left out")
LOSS = {"topic": "cross_entropy", "score": ("mse", 0.25)}


def layers(softmax: bool = True) -> Layer:
    words = nn.Chain(nn.Input("words", 5), nn.Embedding(30, 6), nn.Flatten())
    numbers = nn.Chain(nn.Input("numbers", 4), nn.Dense(None, 3))
    topic = nn.Dense(None, 2, activation="softmax" if softmax else None)
    heads = nn.Heads({"topic": topic, "score": nn.Dense(None, 1)})
    return nn.Chain(nn.Concatenate(words, numbers), nn.Dense(None, 8), "tanh", heads)


def by_torch(parameters: Any) -> list[float]:
    """The losses of the same model, by its own arrays in PyTorch."""
    torch = pytest.importorskip("torch")
    (table, linear), hidden, _, heads = parameters
    trees = table[1], linear[1], hidden, heads["topic"], heads["score"]
    own = [{n: torch.tensor(a, requires_grad=True) for n, a in tree.items()} for tree in trees]
    table, linear, hidden, topic, score = own
    adam = torch.optim.Adam([x for tree in own for x in tree.values()], 1e-2)
    losses, f = [], torch.nn.functional
    for at in list(range(0, 96, 32)) * 3:
        x, y = ({n: torch.tensor(a[at : at + 32]) for n, a in part.items()} for part in (X, Y))
        joined = f.embedding(x["words"], **table).flatten(1), f.linear(x["numbers"], **linear)
        inside = f.linear(torch.cat(joined, 1), **hidden).tanh()
        value = f.cross_entropy(f.linear(inside, **topic), y["topic"].long())
        value = value + 0.25 * f.mse_loss(f.linear(inside, **score), y["score"])
        adam.zero_grad()
        value.backward()
        adam.step()
        losses.append(float(value.detach()))
    return [sum(losses[at : at + 3]) / 3 for at in (0, 3, 6)]


def test_two_inputs_and_two_heads_train_as_in_torch(here: Device, tmp_path: Path) -> None:
    model = nn.Model(layers(), device=here)
    expected = by_torch(anydevice.to_numpy(model.parameters))

    def run(epochs: int, path: str, model: Any = model, **own: Any) -> nn.Trained:
        data = nn.Batches(X, Y, 32, shuffle=False)
        own = {"optimize": "none", "save": tmp_path / path, "epochs": epochs, **own}
        return nn.train(model, data, nn.Adam(1e-2), LOSS, **own)

    done = run(3, "whole.safetensors")
    assert_close(done.history.losses, expected, terms=512, dtype=np.float32)
    run(1, "part.safetensors")
    again = run(3, "part.safetensors", resume=True)
    assert_same_values(done.history.losses, again.history.losses, because=SAME_PROGRAM)
    compiled = run(3, "compiled.safetensors", nn.recompute(model), optimize=None)
    assert_close(compiled.history.losses, expected, terms=512, dtype=np.float32)

    def right(output: Any, y: Any) -> float:
        assert_close(output["topic"].sum(-1), np.ones(len(y["topic"])), terms=8, dtype=np.float32)
        return nn.accuracy(output["topic"], y["topic"])

    found = nn.evaluate(done.model, (X, Y), LOSS, right)
    given = nn.predict(done.model, X)
    logits = np.log(given["topic"])[np.arange(96), Y["topic"]]
    by_hand = -logits.mean() + 0.25 * ((given["score"] - Y["score"]) ** 2).mean()
    assert found.loss == pytest.approx(by_hand, rel=1e-4)
    assert found["right"] == (given["topic"].argmax(-1) == Y["topic"]).mean()
    nn.save(done.model, tmp_path / "model.safetensors")
    loaded = nn.load(tmp_path / "model.safetensors", here)
    for head, array in nn.predict(loaded, X).items():
        assert_same_values(array, given[head], because=SAME_PROGRAM)
        fast = anydevice.compile(loaded, optimize="none", verify={n: x[:4] for n, x in X.items()})
        for called in (fast(**X), fast(X), loaded(X)):
            assert_close(called[head], array, terms=32)


def test_examples_by_name_are_split_weighed_and_checked(here: Device) -> None:
    data = nn.Batches(X, Y, 32, weights=np.zeros(96))
    kept, held = data.split(0.25)
    assert [len(part.x["words"]) for part in (kept, held)] == [72, 24]
    assert repr(data).endswith("shuffled; x: words, numbers, y: topic, score>")
    model = nn.Model(layers(softmax=False), device=here)
    assert nn.evaluate(model, data, LOSS).loss == 0, "weights of 0"
    options = {"epochs": 1, "validation": 0.25, "optimize": "none"}
    done = nn.train(
        layers(softmax=False), (X, Y), nn.SGD(0.1), LOSS, size=16, device=here, **options
    )
    assert done.history[-1].validation is not None
    short = {**X, "numbers": X["numbers"][:9]}
    refuses("there are 9 examples in x.numbers and 96 in x.words", nn.Batches, short, Y, 32)


def train(layer: Any, loss: Any = LOSS, x: Any = X, y: Any = Y, **own: Any) -> Any:
    batch = [(x, y)]
    own |= {"epochs": 1, "optimize": "none", "device": "cpu"}
    return nn.train(layer, batch, nn.SGD(0.1), loss, **own)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: train(layers(), x={"words": X["words"]}), "Input.numbers.: got 'words', expected"),
        (lambda: train(layers(), x=X["numbers"]), "got one array, .*expected a dict of arrays"),
        (lambda: train(layers(), {"topic": "cross_entropy"}), "loss is for .'topic'., the output"),
        (lambda: train(layers(), y={"topic": Y["topic"]}), "y is .'topic'."),
        (lambda: train(nn.Dense(4, 1), x=X["numbers"]), "the output is no dict"),
        (lambda: train(layers(), {**LOSS, "score": ("mse", -1.0)}), "the weight of loss.'score'."),
        (lambda: train(layers(), loss_weights={"score": 0.5}), "a weight beside a loss"),
        (
            lambda: nn.evaluate(nn.Model(layers(), device="cpu"), (X, Y), LOSS, "accuracy"),
            "is for a model with one output",
        ),
        (lambda: nn.Model(nn.Chain(nn.Heads({"a": "relu"}), nn.Dense(4, 1)), 4), "nn.Input.'a', …"),
        (lambda: nn.Model(nn.Concatenate(nn.Input("a", 4), nn.Dense(4, 1))), "got several arrays"),
        (lambda: nn.Model(layers(), device="cpu")(X["numbers"]), "got one array"),
        (lambda: nn.Input("a", 0), "shape must be the shape of an example"),
        (lambda: nn.Heads({"logits": nn.Dense(4, 1)}), "'logits', which is reserved"),
    ],
)
def test_what_does_not_fit_is_named(call: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        call()
