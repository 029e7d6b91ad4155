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
from anydevice._core.names import INSTEAD, SAME, find_name, other_keywords
from anydevice._libraries.precision import PRECISIONS, policy_of
from anydevice._nn.layers import ACTIVATIONS
from anydevice._nn.losses import LOSSES
from anydevice._nn.optimizers import OPTIMIZERS
from anydevice._train.metrics import METRICS
from anydevice.errors import ConfigurationError
from tests.comparing import assert_same_bits

X = numpy.random.default_rng(0).standard_normal((40, 4)).astype("float32")
Y = (X[:, 0] > 0).astype("int32")
CPU = anydevice.device("cpu", engine="numpy")


def keywords(*functions: Callable[..., Any]) -> set[str]:
    return {name for function in functions for name in inspect.signature(function).parameters}


def fields(*kinds: type) -> set[str]:
    return {name for kind in kinds for name in kind._fields}  # type: ignore[attr-defined]


OURS: dict[str, Collection[str]] = {
    "loss": LOSSES,
    "loss of a module": LOSSES,
    "optimizer": OPTIMIZERS,
    "precision": PRECISIONS,
    "metric": METRICS,
    "activation": ACTIVATIONS,
    "training": keywords(nn.train, nn.Training),
    "evaluation": keywords(nn.evaluate, nn.predict),
    "generation": keywords(llm.LanguageModel.generate, llm.LanguageModel.stream),
    "loading": keywords(llm.load),
    "batches": keywords(nn.Batches),
    "field": fields(nn.AdamW, nn.Dense, nn.Conv2d),
    "method of a model": (),
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
        for name in re.findall(r"\b(\w+)=", advice):
            known = keywords(nn.train, llm.load, anydevice.compile, nn.Batches, nn.AdamW)
            assert name in known | set(OURS[kind]), advice
    if kind == "method of a model":
        assert not [name for name in others if name in vars(nn.Model)]


def trained(*arguments: Any, **options: Any) -> Any:
    model = nn.build(nn.Dense(4, 3), "relu", nn.Dense(3, 2), device="cpu")
    options = {"optimize": "none", "progress": False, **options}
    return nn.train(model, *arguments, **options).model.parameters


def test_other_names_train_as_ours_do() -> None:
    ours = trained(
        nn.Batches(X, Y, 16), nn.Adam(), nn.cross_entropy, epochs=2, seed=3, clip=1.0,
        precision="mixed_float16", validation=nn.Batches(X, Y, 16, shuffle=False),
    )  # fmt: skip
    same = trained(
        (X, Y), "Adam", criterion="sparse_categorical_crossentropy", num_epochs=2, random_state=3,
        max_grad_norm=1.0, precision="16-mixed", validation_data=(X, Y), batch_size=16,
        metrics=["acc"],
    )  # fmt: skip
    for layer, other in zip(ours, same, strict=True):
        for name in layer:
            assert_same_bits(layer[name], other[name], because="the same training")


@pytest.mark.parametrize(
    ("given", "meant"),
    [("32-true", "float32"), (32, "float32"), ("bf16-mixed", "mixed"), ("half", "float16")],
)
def test_other_names_of_precisions(given: Any, meant: str) -> None:
    assert policy_of(given, CPU) == policy_of(meant, CPU)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: trained((X, Y), "lion", "mse", epochs=1), r"'lion' \(did you mean nn\.Lion\(1e-4"),
        (lambda: trained((X, Y), "adam", "mean_sqared_error", epochs=1), "'mean_squared_error'"),
        (lambda: trained((X, Y), "adam", "categorical_crossentropy", epochs=1), "argmax"),
        (lambda: trained((X, Y), "adam", "mse", epochs=1, precision="bf16"), "or 'bfloat16'"),
        (lambda: trained((X, Y), "adam", "mse", epochs=1, precision="fp16"), "or 'float16'"),
        (lambda: trained((X, Y), "adam", "mse", epochs=1, lr=1), r"nn\.Adam\(1e-3\)"),
        (lambda: trained((X, Y), "adam", "mse", epoch=1), "mean 'epochs'"),
        (lambda: trained((X, Y), "adam", "mse", epochs=1, num_epochs=1), "mean the same"),
        (
            lambda: trained([(X, Y)], "adam", "mse", epochs=1, size=2),
            "this data, a list, has its own",
        ),
        (lambda: trained((X, Y), "adam", "mse", epochs=1, metrics="accurracy"), "'accuracy'"),
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
    for loss in ("sparse_categorical_crossentropy", "binary_crossentropy"):
        with pytest.raises(ConfigurationError, match="cross_entropy', which takes logits"):
            nn.train(module, (X, Y), "adam", loss, epochs=1, device="cpu")


def test_unknown_keywords_are_type_errors_too_and_signatures_stay() -> None:
    @other_keywords("generation")
    def generate(prompt: str, max_tokens: int = 3) -> int:
        return max_tokens

    assert generate("a", n_predict=5) == 5  # type: ignore[call-arg]
    assert list(inspect.signature(generate).parameters) == ["prompt", "max_tokens"]
    for wrong in ({"do_sample": True}, {"quux": 1}):
        with pytest.raises(TypeError, match=r"^generate has no \w+=.*it takes prompt, max_tokens$"):
            generate("a", **wrong)  # type: ignore[arg-type]
    assert find_name("loss", "quux", LOSSES) == (None, "")


def test_a_model_has_the_summary_of_keras_and_names_our_functions(capsys: Any) -> None:
    model = nn.build(nn.Dense(2, 2), device="cpu")
    model.summary()
    assert capsys.readouterr().out == f"{model}\n"
    with pytest.raises(AttributeError, match=r"'fit'; did you mean nn\.train\(model"):
        model.fit(X, Y)  # type: ignore[attr-defined]
    assert not hasattr(model, "quux")


def test_functions_of_torch_take_a_device() -> None:
    torch = pytest.importorskip("torch")
    here = anydevice.device("cpu", engine="jax")
    assert torch.zeros(2, device=here).device == torch.device(here) == torch.device("cpu")
    assert torch.nn.Linear(2, 2).to(here).weight.device.type == "cpu"
    with pytest.raises(anydevice.AnyDeviceError, match="opencl"):
        torch.ones(2).to(anydevice.Device("opencl:0"))
