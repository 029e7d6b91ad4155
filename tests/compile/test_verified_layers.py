"""`verify=` on models of our own layers: right ones pass on every engine, wrong ones are caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn, ops
from anydevice._core.record import replace
from anydevice._nn.layer import Layer, Run
from tests.compile.conftest import refused, verified
from tests.nn.conftest import ENGINES
from tests.nn.test_layers import example, parameters_of

Apply = Callable[[Any, Any], Any]

NORM, LEAKY = nn.BatchNorm(3), nn.LeakyReLU(0.2)
CONV = nn.Conv1d(3, 4, 3, padding=1)
BACK = nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1)
GRU, LSTM = nn.GRU(3, 4), nn.LSTM(3, 4)
SHORT = nn.Residual(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))

SHAPES: dict[Layer, tuple[int, ...]] = {
    NORM: (3, 5, 4),
    LEAKY: (6,),
    CONV: (3, 7),
    BACK: (3, 5, 4),
    GRU: (6, 3),
    LSTM: (6, 3),
    SHORT: (3, 5, 4),
    nn.GlobalAvgPool(): (3, 5, 4),
    nn.GlobalMaxPool(): (3, 7),
}


def turned(weight: Any, gates: int) -> Any:
    """A weight whose first two gates have changed places."""
    size = weight.shape[0] // gates
    parts = [ops.slice_axis(weight, 0, at * size, (at + 1) * size) for at in range(gates)]
    return ops.concat([parts[1], parts[0], *parts[2:]], axis=0)


def gates_turned(layer: Layer, gates: int) -> Apply:
    return lambda p, x: layer.apply({k: turned(w, gates) for k, w in p.items()}, x, Run())


def with_weight(layer: Layer, name: str, change: Callable[[Any], Any]) -> Apply:
    return lambda p, x: layer.apply({**p, name: change(p[name])}, x, Run())


def without(layer: Layer, name: str) -> Apply:
    return with_weight(layer, name, lambda w: ops.multiply(w, 0.0))


MUTANTS: dict[str, tuple[Layer, Apply]] = {
    "batch norm by the batch": (NORM, lambda p, x: NORM.apply(p, x, Run(training=True))),
    "batch norm without its mean": (NORM, without(NORM, "mean")),
    "batch norm of another eps": (NORM, lambda p, x: replace(NORM, eps=1e-2).apply(p, x, Run())),
    "batch norm of the variance for the root": (
        NORM,
        with_weight(NORM, "variance", lambda w: ops.multiply(w, w)),
    ),
    "another slope": (LEAKY, lambda p, x: nn.LeakyReLU(0.21).apply(p, x, Run())),
    "kernels turned round": (CONV, with_weight(CONV, "weight", lambda w: ops.flip(w, 2))),
    "kernels of images turned round": (
        BACK,
        with_weight(BACK, "weight", lambda w: ops.flip(w, (2, 3))),
    ),
    "gates of a GRU changed places": (GRU, gates_turned(GRU, 3)),
    "gates of an LSTM changed places": (LSTM, gates_turned(LSTM, 4)),
    "a GRU without its recurrent bias": (GRU, without(GRU, "recurrent_bias")),
    "an LSTM that forgets": (LSTM, without(LSTM, "recurrent")),
    "a sequence backwards": (LSTM, lambda p, x: LSTM.apply(p, ops.flip(x, 1), Run())),
    "a shortcut left out": (
        SHORT,
        lambda p, x: ops.add(nn.Conv2d(3, 3, 1).apply(p["layer"], x, Run()), x),
    ),
    "the largest for the mean": (
        nn.GlobalAvgPool(),
        lambda p, x: nn.GlobalMaxPool().apply(p, x, Run()),
    ),
    "the mean for the largest": (
        nn.GlobalMaxPool(),
        lambda p, x: nn.GlobalAvgPool().apply(p, x, Run()),
    ),
}


class Mutant(nn.Layer):
    """A layer that is right in float64, and otherwise what a row of the table says."""

    right: Layer
    name: str

    def output(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.right.output(shape)

    def initial(self, generator: Any) -> Any:
        return self.right.initial(generator)

    def apply(self, parameters: Any, x: Any, run: Run) -> Any:
        if x.dtype == np.float64:
            return self.right.apply(parameters, x, run)
        return MUTANTS[self.name][1](parameters, x)


def model_of(layer: Layer, right: Layer) -> tuple[nn.Model, Any]:
    here = anydevice.device("cpu", engine="numpy")
    model = nn.Model(layer, SHAPES[right], device=here).with_parameters(parameters_of(right))
    return model, example(right, SHAPES[right])


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_layers_are_caught(name: str) -> None:
    right, _ = MUTANTS[name]
    model, x = model_of(Mutant(right, name), right)
    refused(model, "numpy", example=x)


IMAGES = nn.Chain(BACK, nn.BatchNorm(4), LEAKY, nn.Residual(nn.Conv2d(4, 4, 1)), nn.GlobalAvgPool())
SEQUENCES = nn.Chain(LSTM, nn.GRU(4, 4), nn.Transpose(), nn.Conv1d(4, 5, 3), nn.GlobalMaxPool())
SHAPES |= {IMAGES: (3, 5, 4), SEQUENCES: (6, 3)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layer", [IMAGES, SEQUENCES], ids=["images", "sequences"])
def test_right_layers_pass(layer: Layer, engine: str) -> None:
    """Part by part; on JAX, compiled too."""
    model, x = model_of(layer, layer)
    checked = verified(model, engine, x, optimize="default" if engine == "jax" else "none")
    assert checked.calls == 12
    assert checked.parts >= len(layer.parts)


@pytest.mark.parametrize("precision", ["mixed", "float16", "bfloat16"])
def test_batch_norm_is_right_in_16_bits(precision: str) -> None:
    """Also where the variance is more than float16 holds."""
    model, x = model_of(NORM, NORM)
    far = {**model.parameters, "variance": np.full(3, 1e5, np.float32)}
    for each in (model, model.with_parameters(far)):
        verified(each, "torch", x, precision=precision)
