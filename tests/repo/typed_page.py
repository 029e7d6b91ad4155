"""A page of user code for type checkers: the types that it must have, and lines that are wrong."""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np

from anydevice import device, llm, nn, ops, to_numpy

Numbers = np.ndarray[Any, np.dtype[np.float32]]


class Net:
    """A module of some library."""


def arrays(x: Numbers, batch: dict[str, Numbers]) -> None:
    here = device("cpu")
    assert_type(here(x), Numbers)
    assert_type(here(batch), dict[str, Numbers])
    assert_type(ops.softmax(x), Numbers)
    assert_type(ops.concat([x, x]), Numbers)
    assert_type(to_numpy(x), np.ndarray[Any, Any])


def trainings(data: nn.Batches, layer: nn.Dense, model: nn.Model) -> None:
    assert_type(nn.train(model, data, "adam", "mse", epochs=1).model, nn.Model)
    assert_type(nn.train(layer, data, nn.Adam(), nn.cross_entropy, epochs=1).model, nn.Model)
    assert_type(nn.train(Net(), data, nn.Adam(), "mse", epochs=3).model, Net)
    training = nn.Training(Net(), nn.Adam(), data, "mse")
    for batch in training:
        assert_type(float(training.step(batch)), float)
    assert_type(training.model, Net)


def replies(model: llm.LanguageModel, chat: list[dict[str, str]], ids: list[int]) -> None:
    assert_type(model.generate("Once"), llm.Reply)
    assert_type(model.generate(chat, max_tokens=5, temperature=0.5), llm.Reply)
    assert_type(model.generate(ids, 5), llm.Reply)
    assert_type(model.generate(["Once", "Twice"], seed=3), list[llm.Reply])
    assert_type(model.generate([chat, chat]), list[llm.Reply])


def mistakes(model: llm.LanguageModel, net: nn.Model, data: nn.Batches, x: Numbers) -> None:
    model.generate("Once", max_tokns=3)  # wrong
    print(model.generate(["Once"]).text)  # wrong
    nn.train(net, data, "adam", "mse", epochs=1, epoch=2)  # wrong
    nn.train(net, data, "adam", "mse", epochs=1).model.fit()  # wrong
    nn.Training(net, "adam", data, "mse").model.fit()  # wrong
    to_numpy(x).cpu()  # wrong
    device("cpu")(x).cpu()  # wrong
    ops.softmax(x).cpu()  # wrong
