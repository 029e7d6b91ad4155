"""Axiom.jl's models: defined, trained, compiled, checked and kept, spelled over `anydevice.nn`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy

from anydevice.choose.scope import device as current_device
from anydevice.core.device import Device
from anydevice.errors import ConfigurationError, VerificationError
from anydevice.nn import optimizers
from anydevice.nn.activations import Activation
from anydevice.nn.layer import Layer
from anydevice.nn.layers import Dense as DenseLayer
from anydevice.nn.losses import Loss, cross_entropy
from anydevice.nn.model import Model, build
from anydevice.nn.recomputing import recompute
from anydevice.run.checking_models import Property
from anydevice.run.compiling import Compiled
from anydevice.run.compiling import compile as make_compiled
from anydevice.run.saving import load, save
from anydevice.run.training import train as train_model
from anydevice.transfer.moving import to_numpy

relu, gelu, tanh = Activation("relu"), Activation("gelu"), Activation("tanh")
sigmoid, softmax = Activation("sigmoid"), Activation("softmax")

_EXAMPLES = 8


def Dense(inputs: int, outputs: int, *, bias: bool = True) -> Model:  # noqa: N802 - Axiom's name
    """A dense layer as a model of its own, on the current backend.

    >>> from anydevice import use_device
    >>> with use_device("cpu"):
    ...     Dense(784, 128).output_shape
    (128,)
    """
    return build(DenseLayer(inputs, outputs, bias))


def chain(*parts: Model | Layer | str, input_shape: Any = None, seed: int = 0) -> Model:
    """Layers one behind the other, on the current backend; there, `@axiom begin … end`.

    The parameters are drawn anew, for each layer by itself: those of a `Dense` that is given are
    not used. `input_shape` is that of one example, where the first layer does not say it.

    >>> from anydevice import use_device
    >>> with use_device("cpu"):
    ...     chain(Dense(784, 128), relu, Dense(128, 10), softmax).parameter_count
    101770
    """
    layers = [part.layer if isinstance(part, Model) else part for part in parts]
    return build(*layers, input_shape=input_shape, seed=seed)


def Adam(lr: float = 1e-3) -> optimizers.Adam:  # noqa: N802 - Axiom's name
    """Adam with this rate."""
    return optimizers.Adam(lr)


def CrossEntropyLoss() -> Loss:  # noqa: N802 - Axiom's name
    """The cross entropy. A softmax at the end of the model is part of it, and not applied twice."""
    return cross_entropy


def train(
    model: Model,
    data: Any,
    optimizer: optimizers.Optimizer,
    loss: Loss | str = cross_entropy,
    *,
    epochs: int = 1,
    **options: Any,
) -> Model:
    """The trained model, on the current backend; there, `train!`, which changes what it is given.

    `data` and the other options are those of `nn.train`; its `device` is another backend.
    """
    if options.get("device") is None:
        options["device"] = current_device()
    return train_model(model, data, optimizer, loss, epochs=epochs, **options).model


def save_model(model: Model, path: str | os.PathLike[str]) -> None:
    """Write a model to a `.safetensors` file, whole or not at all."""
    save(model, path)


def load_model(path: str | os.PathLike[str]) -> Model:
    """The model of a file, on the current backend."""
    return load(path)


def compile(  # noqa: A001 - Axiom's name
    model: Any,
    *,
    backend: Device | str | None = None,
    optimize: str = "default",
    precision: str = "float32",
    verify: Any = False,
    properties: Iterable[Property] = (),
) -> Compiled:
    """The model compiled for a backend, the current one where none is given.

    With `verify=True` it is checked there on random examples, with `verify=x` on those; so are the
    `properties`. Raises `VerificationError` with the first layer that is wrong.
    """
    example = None if verify is False or verify is None else verify
    if example is True:
        example = _examples(model)
    return make_compiled(
        model,
        current_device() if backend is None else backend,
        optimize=optimize,
        precision=precision,
        verify=example,
        properties=tuple(properties),
    )


def enable_checkpointing(model: Model) -> Model:
    """The model whose activations are computed again for gradients, and not kept."""
    return recompute(model)


def is_finite(y: Any) -> bool:
    """Whether every number of an array of any library is finite."""
    return bool(numpy.isfinite(numpy.asarray(to_numpy(y), "float64")).all())


def prove(inputs: Iterable[Any], holds: Callable[[Any], object]) -> int:
    """Check a property for all of a set of inputs; there, `@prove ∀x ∈ inputs. …`.

    Each of them is tried. Returns how many there were, and raises `VerificationError` with the
    first for which it does not hold.

    >>> prove(range(10), lambda x: x * x >= x)
    10
    """
    count = 0
    for count, x in enumerate(inputs, 1):
        if not holds(x):
            where = f"inputs[{count - 1}]"
            raise VerificationError(f"the property does not hold for {where}: {x!r}", where=where)
    return count


def _examples(model: Any) -> Any:
    """A few random examples for one of our own models."""
    if isinstance(model, Compiled):
        model = model.model
    if not isinstance(model, Model):
        raise ConfigurationError(
            "verify=True draws examples for models of anydevice, whose shapes are known; "
            f"give an example for a {type(model).__name__}: verify=x",
            source="verify=",
        )
    shape = (_EXAMPLES, *model.input_shape)
    numbers = numpy.random.default_rng(0)
    ids = model.layer.takes_ids_below
    if ids is not None:
        return numbers.integers(0, ids, shape, "int32")
    return numbers.standard_normal(shape, "float32")
