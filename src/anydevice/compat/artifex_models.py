"""Artifex's `MLP`, as a model of anydevice: it moves, compiles, trains and saves like any other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from anydevice.choose.scope import device as choose_device
from anydevice.errors import ConfigurationError
from anydevice.nn.chain import Chain
from anydevice.nn.dropping import Dropout
from anydevice.nn.layer import Layer
from anydevice.nn.layers import Dense
from anydevice.nn.model import Model
from anydevice.nn.recomputing import recompute


def MLP(  # noqa: N802, a class there
    hidden_dims: Sequence[int],
    in_features: int,
    activation: str | None = "gelu",
    *,
    output_activation: str | None = None,
    dropout_rate: float = 0.0,
    use_bias: bool = True,
    use_gradient_checkpointing: bool = False,
    rngs: Any = None,
) -> Model:
    """Dense layers one after the other, on the default device of JAX; the last one is the output.

    `activation` follows every layer but the last, `output_activation` that one. With
    `use_gradient_checkpointing`, activations are computed again for gradients, and not kept.
    `rngs` is a seed, or flax's `nnx.Rngs`, of which one key is drawn.

    >>> from anydevice import use_device
    >>> with use_device("cpu"):
    ...     mlp = MLP([16, 16, 4], in_features=8, use_gradient_checkpointing=True, rngs=0)
    >>> mlp.output_shape, mlp.parameter_count
    ((4,), 484)

    Raises `ConfigurationError` where a size is not a whole number of 1 or more.
    """
    sizes = [in_features, *hidden_dims]
    if len(sizes) < 2:
        raise ConfigurationError("an MLP has one layer at least", "hidden_dims=")
    layers: list[Layer] = []
    for number, (inputs, outputs) in enumerate(pairwise(sizes), 1):
        last = number == len(sizes) - 1
        follows = output_activation if last else activation
        layers.append(Dense(inputs, outputs, bias=use_bias, activation=follows))
        if dropout_rate and not last:
            layers.append(Dropout(dropout_rate))
    model = Model(Chain(*layers), seed=_seed(rngs), device=choose_device(engine="jax"))
    return recompute(model) if use_gradient_checkpointing else model


def _seed(rngs: Any) -> int:
    if rngs is None or isinstance(rngs, int):
        return rngs or 0
    import jax

    return int(jax.random.bits(rngs.params()))
