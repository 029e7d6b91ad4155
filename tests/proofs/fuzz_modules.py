"""Random small modules of PyTorch, Flax NNX, Equinox and nn, out of layers and functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from math import prod
from random import Random
from typing import Any

import numpy as np

import anydevice
from anydevice import nn
from anydevice._core.trees import mapped

Shape = tuple[int, ...]
FUNCTIONS: list[Callable[..., Any]] = [
    lambda f, a, w, x: w[0, : x.shape[-1]] + x * w[1, : x.shape[-1]] - 0.3,
    lambda f, a, w, x: a.softmax(0.5 * x @ x.swapaxes(-1, -2), -1) @ x,
    lambda f, a, w, x: f.broadcast_to(f.amax(x, -1)[..., None], (*x.shape, 2)),
    lambda f, a, w, x: f.concatenate([f.clip(x, -0.5, 0.7), -x], -1),
    lambda f, a, w, x: x * x * x / 3 + x**2 - f.exp(-f.abs(x)),
    lambda f, a, w, x: a.gelu(x) + a.silu(x) + a.sigmoid(x) - x * a.sigmoid(x),
    lambda f, a, w, x: 0.5 * x * (1 + f.tanh(0.7978845608 * (x + 0.044715 * x * x * x))),
    lambda f, a, w, x: a.relu(x) - a.leaky_relu(x, 0.2) + a.relu6(3 * x),
    lambda f, a, w, x: w[:2, : x.shape[-2]] @ x @ w[: x.shape[-1], :3],
    lambda f, a, w, x: f.maximum(x, w[2, : x.shape[-1]]) + f.minimum(x, f.tanh(x)),
    lambda f, a, w, x: (x - x.mean()) * (1 / (1 + (x * x).sum(-1)))[..., None],
    lambda f, a, w, x: a.softmax(x.reshape(1, -1, x.shape[-1])[..., 1::2], 1),
    lambda f, a, w, x: f.stack([x, 2 - x], 1).swapaxes(-1, -2),
    lambda f, a, w, x: f.where(x > 0, 0.5 * x, -x) + f.where(x < 0.3, x, 0.3 + 0 * x),
]
"""Functions of a library, its activations, a matrix of constants and an array."""


def pick(r: Random, low: int = 1, high: int = 2) -> Shape:
    """Return two sizes, for the axes of an image."""
    return r.randint(low, high), r.randint(low, high)


def make_key(r: Random) -> Any:
    return import_module("jax").random.key(r.randint(0, 9))


LAYERS: dict[str, list[Callable[..., Any]]] = {
    "torch": [
        lambda n, r, s: n.Linear(s[-1], 3, bias=r.random() < 0.5),
        lambda n, r, s: n.Conv2d(s[1], 4, pick(r), pick(r), pick(r, 0, 2), pick(r)),
        lambda n, r, s: n.Conv1d(s[1], 2 * s[1], r.randint(1, 3), 2, 1, groups=s[1]),
        lambda n, r, s: n.MaxPool2d(pick(r, 2, 3), pick(r), pick(r, 0, 1), pick(r)),
        lambda n, r, s: n.AvgPool2d(pick(r, 2, 3), pick(r), pick(r, 0, 1), r.random() < 0.2),
        lambda n, r, s: n.BatchNorm2d(s[1], affine=r.random() < 0.5),
        lambda n, r, s: n.LayerNorm(s[-r.randint(1, len(s) - 1) :]),
        lambda n, r, s: n.TransformerEncoderLayer(s[-1], 1, 3, batch_first=True),
        lambda n, r, s: n.ConvTranspose2d(s[1], 3, pick(r), pick(r), pick(r, 0, 1), dilation=2),
        lambda n, r, s: n.ConvTranspose2d(s[1], 2 * s[1], pick(r), 2, 0, pick(r, 0, 1), s[1]),
        lambda n, r, s: n.Upsample(
            None, (2, r.randint(1, 2)), r.choice(["nearest-exact", "nearest"])
        ),
        lambda n, r, s: n.Upsample(
            None, r.choice([2, 1.5]), "bilinear" if len(s) == 4 else "linear", r.random() < 0.5
        ),
        lambda n, r, s: n.Sequential(n.Conv2d(s[1], 4, 1), n.PixelShuffle(2)),
        lambda n, r, s: r.choice([n.ReflectionPad2d, n.ReplicationPad2d])((0, *pick(r), 1)),
        lambda n, r, s: r.choice([n.ELU(0.4), n.ELU(), n.Softplus(3.0), n.Mish(), n.Softplus()]),
        lambda n, r, s: r.choice([n.Hardsigmoid(), n.Hardswish(), n.PReLU(s[1]), n.PReLU()]),
        lambda n, r, s: r.choice([n.GroupNorm(1, s[1]), n.InstanceNorm2d(s[1], affine=True)]),
        lambda n, r, s: r.choice([n.RNN, n.LSTM, n.GRU])(s[-1], 2, batch_first=True),
        lambda n, r, s: n.GRU(s[-1], 1, r.randint(1, 2), bidirectional=True, batch_first=True),
    ],
    "nnx": [
        lambda n, r, s: n.Linear(s[-1], 3, use_bias=r.random() < 0.5, rngs=n.Rngs(0)),
        lambda n, r, s: n.Conv(s[-1], 4, pick(r), pick(r), kernel_dilation=pick(r), rngs=n.Rngs(0)),
        lambda n, r, s: n.Conv(s[-1], 2, (3,), 2, padding="VALID", rngs=n.Rngs(0)),
        lambda n, r, s: partial(n.max_pool, window_shape=pick(r), strides=pick(r), padding="SAME"),
        lambda n, r, s: partial(n.avg_pool, window_shape=pick(r), padding="SAME"),
        lambda n, r, s: n.BatchNorm(s[-1], use_running_average=True, rngs=n.Rngs(0)),
        lambda n, r, s: n.LayerNorm(s[-1], rngs=n.Rngs(0)),
    ],
    "equinox": [
        lambda n, r, s: n.Linear(s[-1], 3, use_bias=r.random() < 0.5, key=make_key(r)),
        lambda n, r, s: n.Conv2d(
            s[0], 2, pick(r), pick(r), pick(r, 0, 2), pick(r), key=make_key(r)
        ),
        lambda n, r, s: n.MaxPool2d(pick(r, 2, 3), pick(r), pick(r, 0, 1), r.random() < 0.2),
        lambda n, r, s: n.AvgPool2d(pick(r, 2, 3), pick(r), pick(r, 0, 1)),
        lambda n, r, s: r.choice([n.LayerNorm, n.RMSNorm])(s),
    ],
    "nn": [
        lambda n, r, s: n.Dense(s[-1], 3, activation=r.choice([None, "gelu"])),
        lambda n, r, s: r.choice(["relu", "silu", "gelu_tanh", "sigmoid", "softmax"]),
        lambda n, r, s: n.LeakyReLU(r.choice([0.2, 1.5])),
        lambda n, r, s: n.Conv2d(s[0], 3, pick(r), pick(r), pick(r, 0, 2), r.random() < 0.5),
        lambda n, r, s: n.ConvTranspose2d(s[0], 2, pick(r), 2, pick(r, 0, 1), pick(r, 0, 1)),
        lambda n, r, s: n.Conv1d(s[0], 2, r.randint(1, 3), r.randint(1, 2), r.randint(0, 2)),
        lambda n, r, s: r.choice([n.AvgPool2d, n.MaxPool2d])(pick(r), r.choice([None, pick(r)])),
        lambda n, r, s: r.choice([n.GlobalAvgPool, n.GlobalMaxPool, n.Flatten])(),
        lambda n, r, s: r.choice([n.LayerNorm(s[-1]), n.RMSNorm(s[-1]), n.BatchNorm(s[0])]),
        lambda n, r, s: r.choice([n.GroupNorm(s[0]), n.Upsample(2, r.random() < 0.7)]),
        lambda n, r, s: r.choice([n.LSTM, n.GRU])(s[-1], 2, r.random() < 0.3, r.random() < 0.7),
        lambda n, r, s: n.Bidirectional(n.GRU(s[-1], 1, r.random() < 0.3)),
        lambda n, r, s: n.Residual(n.Dense(s[-1], 3), n.Dense(s[-1], 3)),
        lambda n, r, s: n.Attention(s[-1], r.randint(1, 2), causal=r.random() < 0.5, bias=True),
        lambda n, r, s: n.TransformerBlock(s[-1], 1, hidden=3, norm=r.choice(["rms", "layer"])),
    ],
}
"""Layers for arrays of a shape; in PyTorch and NNX, its first axis is the batch."""


def draw_module(library: str, seed: int) -> tuple[Any, Shape]:
    """Return a module of random layers and functions, and the shape of an example."""
    random, numbers = Random(f"{library} {seed}"), np.random.default_rng(seed)
    weights = numbers.normal(size=(8, 8)).astype(np.float32)
    choices, layers = LAYERS[library], list[Any]()
    while not layers or random.random() < 0.8:
        if not layers:
            image = (random.randint(1, 3), *pick(random, 3, 6))
            shape = random.choice([image, pick(random, 2, 4), (4,)])
            value = shape if library in ("equinox", "nn") else (1, *shape)
            base = TOOLS.get(library, partial(open_jax, library))(shape, weights)
        try:
            draw = random.choice(choices) if layers else choices[seed % len(choices)]
            layer = draw(base[0], random, value)
            if layers and base[1] and random.random() < 0.7:
                layer = partial(random.choice(FUNCTIONS), *base[1])
            size = base[2]([*layers, layer], value)
        except Exception:  # this layer does not take this shape
            continue
        if 0 < prod(size) <= 200:
            value, layers = size, [*layers, layer]

    def change(x: Any) -> Any:
        """Change weights of float32; in new layers, many are 0 or 1."""
        is_float = str(getattr(x, "dtype", "")) == "float32"
        return (x + 0.1) * np.float32(numbers.uniform(0.5, 1.5, x.shape)) if is_float else x

    return base[3](layers, change), shape


def open_torch(shape: Shape, weights: Any) -> Any:
    import torch

    torch.manual_seed(0)  # of the weights of new layers

    class Apply(torch.nn.Module):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Any) -> Any:
            y = self.layer(x)
            return y[0] if isinstance(y, tuple) else y

    def shape_of(layers: Any, value: Shape) -> Shape:
        return tuple(Apply(layers[-1]).eval()(torch.zeros(value)).shape)

    def join(layers: Any, change: Any) -> Any:
        module = torch.nn.Sequential(*map(Apply, layers)).eval()
        with torch.no_grad():
            for x in [*module.parameters(), *module.buffers()]:
                x.copy_(torch.as_tensor(change(x.numpy())))
        return module

    return torch.nn, (torch, torch.nn.functional, torch.tensor(weights)), shape_of, join


def open_jax(library: str, shape: Shape, weights: Any) -> Any:
    jax: Any = import_module("jax")
    layers_of = import_module("flax.nnx" if library == "nnx" else "equinox.nn")

    def shape_of(layers: Any, value: Shape) -> Shape:
        given = jax.ShapeDtypeStruct(value, np.float32)
        return tuple(jax.eval_shape(lambda x: layers[-1](x), given).shape)

    def join(layers: Any, change: Any) -> Any:
        if library == "nnx":
            module = layers_of.Sequential(*layers)
            layers_of.update(module, jax.tree.map(change, layers_of.state(module)))
            return module
        wrapped = [layers_of.Lambda(x) if isinstance(x, partial) else x for x in layers]
        return jax.tree.map(change, layers_of.Sequential(wrapped))

    return layers_of, (jax.numpy, jax.nn, jax.numpy.asarray(weights)), shape_of, join


def open_native(shape: Shape, weights: Any) -> Any:
    def build(layers: Any) -> nn.Model:
        cpu = anydevice.device("cpu", engine="numpy")
        return nn.build(*layers, "relu", input_shape=shape, device=cpu)

    def join(layers: Any, change: Any) -> nn.Model:
        model = build(layers)
        return model.with_parameters(mapped(change, model.parameters))

    return nn, (), lambda layers, value: build(layers).output_shape, join


TOOLS: dict[str, Callable[[Shape, Any], Any]] = {"torch": open_torch, "nn": open_native}
"""The layers of a library, arguments of functions, the shape of an output, and how to join."""
