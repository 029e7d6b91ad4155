"""What is no layer, no name and no shape is answered with what to give in its place."""

from __future__ import annotations

import inspect
import re
from ast import literal_eval
from collections.abc import Callable
from typing import Any

import pytest

from anydevice import nn
from anydevice._nn.layer import Layer
from anydevice._nn.layers import ACTIVATIONS
from anydevice.errors import ConfigurationError
from anydevice.nn import _ACTIVATIONS as NAMED
from anydevice.nn import _ELSEWHERE
from tests.optional import torch
from tests.programs import output_of

MODEL = nn.build(nn.Dense(2, 2), device="cpu")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: [nn.Dense(2, 2), "relu"], r"is not a layer; .* one by one: nn\.build\(\*layers\)"),
        (lambda: nn.Dense, r"Dense is a class and not a layer; give one of it, Dense\(…\)"),
        (lambda: None, r"this NoneType is not a layer; give a layer such as nn.Dense\(4, 2\)"),
        (lambda: MODEL, r"this Model is not a layer; give its \.layer"),
        (lambda: torch.nn.Linear(2, 2), r"stays as it is: anydevice\.compile takes it"),
    ],
    ids=["list", "class", "nothing", "model", "module"],
)
def test_what_is_no_layer(make: Callable[[], Any], said: str) -> None:
    given = make()
    with pytest.raises(ConfigurationError, match=said):
        nn.build(given, device="cpu")
    with pytest.raises(ConfigurationError, match=said):
        nn.Chain("relu", given)
    assert nn.build(MODEL.layer, "relu", device="cpu").output_shape == (2,)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(1, 8, 3), (1, 28, 28)),
        (nn.Conv2d(4, 8, 64), (4, 224, 224)),
        (nn.MaxPool2d(2), (3, 28, 28)),
        (nn.LayerNorm(64), (128, 64)),
        (nn.TransformerBlock(32, 4), (128, 32)),
        (nn.Embedding(100, 8), (128,)),
        (nn.Chain(nn.Embedding(100, 8), nn.PositionEmbedding(20, 8)), (16,)),
        (nn.PositionEmbedding(3, 8), (1, 8)),
        (nn.Flatten(), (28, 28)),
        (nn.Chain(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Dense(2 * 26 * 26, 4)), (1, 28, 28)),
    ],
    ids=lambda value: value.label if isinstance(value, Layer) else "",
)
def test_the_shape_that_is_shown_is_one_that_fits(layer: Layer, shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        nn.build(layer, device="cpu")
    shown = re.findall(r"as in input_shape=(\(.*\))$", str(caught.value))
    assert literal_eval(shown[0]) == shape
    layer.output(shape)


def test_where_no_usual_shape_fits_the_first_part_is_asked() -> None:
    odd = nn.Chain(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Dense(1001, 4))
    with pytest.raises(ConfigurationError, match=r"input_shape=\(1, 28, 28\)"):
        nn.build(odd, device="cpu")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Linear", "'Linear'; did you mean nn.Dense?"),
        ("Conv2D", "'Conv2D'; did you mean nn.Conv2d?"),
        ("Sequential", "'Sequential'; did you mean nn.build or nn.Chain?"),
        ("CrossEntropyLoss", "'CrossEntropyLoss'; did you mean nn.cross_entropy?"),
        ("Adamw", "'Adamw'; did you mean nn.AdamW?"),
        ("ReLU", "'ReLU'; activations are named, as in nn.build(nn.Dense(4, 2), \"relu\")"),
        ("Quux", "'Quux'"),
    ],
)
def test_a_name_of_another_library(name: str, said: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(nn, name)
    assert str(caught.value) == f"module 'anydevice.nn' has no attribute {said}"


def test_the_names_that_are_proposed_are_there() -> None:
    assert set(ACTIVATIONS) == NAMED
    for meant in _ELSEWHERE.values():
        for name in re.findall(r"nn\.(\w+)", meant):
            assert name in nn.__all__
    assert not {name.lower() for name in nn.__all__} & set(_ELSEWHERE)


def test_a_name_that_nobody_reads_about_costs_nothing() -> None:
    asked = "import sys; from anydevice import nn; from anydevice._nn import layers; "
    told = f"{asked}print('difflib' in sys.modules, hasattr(nn, 'Linear'))"
    assert output_of("-c", told) == "False False\n"


def test_arguments_can_be_found_and_are_named_when_they_are_wrong() -> None:
    assert list(inspect.signature(nn.Dense).parameters)[:3] == ["inputs", "outputs", "bias"]
    assert inspect.signature(nn.AdamW).parameters["decay"].default == nn.AdamW().decay
    with pytest.raises(
        TypeError,
        match=r"Adam has no lr \(did you mean rate\?\); it takes rate, beta1, beta2, eps, decay",
    ):
        nn.Adam(lr=0.1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"needs outputs; it takes .*; nn.Dense\(None, 2\) takes"):
        nn.Dense(2)  # type: ignore[call-arg]
    assert nn.Adam(0.1, 0.8).beta1 == 0.8
