"""Names of other libraries have the effect of ours, or say what to give instead."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection
from typing import Any

import numpy
import pytest

import anydevice
from anydevice import llm, nn
from anydevice._core.names import INSTEAD, SAME
from anydevice._core.trees import leaves
from anydevice._libraries.precision import PRECISIONS
from anydevice._nn.layers import ACTIVATIONS
from anydevice._nn.losses import LOSSES
from anydevice._nn.optimizers import OPTIMIZERS
from anydevice._train.metrics import METRICS
from anydevice.errors import ConfigurationError
from tests.comparing import assert_same_bits

X = numpy.random.default_rng(0).standard_normal((40, 4)).astype("float32")
Y = (X[:, 0] > 0).astype("int32")


def keywords(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


OURS: dict[str, Collection[str]] = {
    "loss": LOSSES,
    "loss of a module": LOSSES,
    "optimizer": OPTIMIZERS,
    "precision": PRECISIONS,
    "metric": METRICS,
    "activation": ACTIVATIONS,
    "training": keywords(nn.train),
    "evaluation": keywords(nn.evaluate),
    "generation": keywords(llm.LanguageModel.generate),
    "loading": keywords(llm.load),
    "batches": keywords(nn.Batches),
    "field": [*nn.AdamW._fields, *nn.Conv2d._fields],
}


@pytest.mark.parametrize("kind", {**SAME, **INSTEAD})
def test_every_name_that_is_proposed_exists(kind: str) -> None:
    same, instead = SAME.get(kind, {}), INSTEAD.get(kind, {})
    assert same.keys() <= set(OURS[kind])
    others = " ".join([*same.values(), *instead.values()]).split()
    assert len(others) == len({*others} - {*OURS[kind]})
    for advice in instead:
        for name in re.findall(r"\bnn\.(\w+)", advice):
            assert hasattr(nn, name), advice
        known = set().union(*map(keywords, (nn.train, llm.load, nn.Batches, nn.AdamW)))
        assert set(re.findall(r"\b(\w+)=", advice)) <= known | set(OURS[kind]), advice


def trained(*arguments: Any, **options: Any) -> Any:
    model = nn.build(nn.Dense(4, 3), "relu", nn.Dense(3, 2), device="cpu")
    return nn.train(model, *arguments, **options, progress=False).model.parameters


def test_other_names_train_as_ours_do() -> None:
    options: dict[str, Any] = {"epochs": 2, "seed": 3, "clip": 1.0, "precision": "mixed_float16"}
    ours = trained(nn.Batches(X, Y, 16), nn.Adam(), nn.cross_entropy, **options)
    options = {"num_epochs": 2, "random_state": 3, "max_grad_norm": 1.0, "precision": "16-mixed"}
    options |= {"batch_size": 16, "validation_data": (X, Y), "metrics": ["acc"]}
    same = trained((X, Y), "Adam", criterion="sparse_categorical_crossentropy", **options)
    for ours_there, same_there in zip(leaves(ours), leaves(same), strict=True):
        assert_same_bits(ours_there, same_there, because="the same training")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: trained((X, Y), "lion", "mse", epochs=1), r"'lion' \(did you mean nn\.Lion\(1e-4"),
        (lambda: trained((X, Y), "adam", "categorical_crossentropy", epochs=1), "argmax"),
        (lambda: trained((X, Y), "adam", "mse", epochs=1, precision="bf16"), "or 'bfloat16'"),
        (lambda: trained((X, Y), "adam", "mse", epochs=1, lr=1), r"nn\.Adam\(1e-3\)"),
        (lambda: trained((X, Y), "adam", "mse", epoch=1), "mean 'epochs'"),
        (lambda: trained((X, Y), "adam", "mse", epochs=1, num_epochs=1), "mean the same"),
        (lambda: trained([(X, Y)], "adam", "mse", epochs=1, size=2), "a list, has its own"),
        (lambda: trained([(X, Y)], Y, "adam", epochs=1), r"give \(x, y\) as one argument"),
        (lambda: nn.build(nn.Dense(2, 2), "swish", device="cpu"), "mean 'silu'"),
        (lambda: llm.load("no-folder", engine="jx", n_ctx=5, n_gpu_layers=9), "mean device="),
    ],
)
def test_other_meanings_are_refused_with_what_to_give(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        call()


def test_a_softmax_of_a_module_cannot_be_left_out_so_the_name_of_keras_is_refused() -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Softmax(-1))
    with pytest.raises(ConfigurationError, match="cross_entropy', which takes logits"):
        nn.train(module, (X, Y), "adam", "binary_crossentropy", epochs=1, device="cpu")


def test_an_unknown_keyword_is_a_type_error_too() -> None:
    with pytest.raises(TypeError, match=r"^predict has no quux=; it takes model, data, size"):
        nn.predict(X, X, quux=1)  # type: ignore[call-arg]


def test_functions_of_torch_take_a_device() -> None:
    torch = pytest.importorskip("torch")
    here = anydevice.device("cpu", engine="jax")
    assert torch.zeros(2, device=here).device == torch.device(here) == torch.device("cpu")
    assert torch.nn.Linear(2, 2).to(here).weight.device.type == "cpu"
    with pytest.raises(anydevice.AnyDeviceError, match="opencl"):
        torch.ones(2).to(anydevice.Device("opencl:0"))
