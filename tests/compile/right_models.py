# ruff: noqa: E501 - a row is a line
"""Right models of many kinds, drawn from a seed: `verify=` must refuse none of them.

A row of `TORCH` is a function of random weights and an input of shape (rows, length, width).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from torch.nn import functional as f

from anydevice import nn, ops

T = torch.nn
PRECISIONS = ("float32", "bfloat16", "mixed", "float16")


def attend(m: Any, x: Any, *, causal: bool = False, scale: float = 1.0) -> Any:
    q, k, v = ((x @ m.w[n]).unflatten(-1, (2, -1)).transpose(1, 2) for n in range(3))
    scores = q @ k.transpose(-1, -2) * (scale / q.shape[-1] ** 0.5)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


TORCH: dict[str, Callable[[Any, Any], Any]] = {
    "mlp": lambda m, x: f.gelu(x @ m.w[0] + m.b) @ m.w[1],
    "causal attention": lambda m, x: attend(m, x, causal=True),
    "attention with large logits": lambda m, x: attend(m, x, causal=True, scale=30.0),
    "softmax by hand": lambda m, x: (e := (x - x.amax(-1, keepdim=True)).exp()) / e.sum(-1, keepdim=True),
    "softmax with large logits": lambda m, x: (x @ m.w[0] * 100).softmax(-1),
    "layer norm by hand": lambda m, x: (y := x - x.mean(-1, keepdim=True)) / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * m.b,
    "layer norm of nearly constant rows": lambda m, x: f.layer_norm(3 + x / 100, x.shape[-1:]),
    "RMS norm": lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * m.b,
    "transformer block": lambda m, x: x + f.gelu(f.layer_norm(x + attend(m, x), x.shape[-1:]) @ m.w[3]) @ m.w[2],
    "cancellation": lambda m, x: (x + 100) - 100,
    "residual that cancels": lambda m, x: (x @ m.w[0] + x) - x @ m.w[0],
    "exp": lambda m, x: torch.exp(x),
    "sigmoid by exp": lambda m, x: torch.exp(x) / (1 + torch.exp(x)),
    "division": lambda m, x: x / (x.abs() + 0.01),
    "reciprocal": lambda m, x: 1 / (0.1 + (x @ m.w[0]) ** 2),
    "argmax": lambda m, x: (x @ m.w[0]).argmax(-1),
    "sort": lambda m, x: x.sort(-1),
    "top-k": lambda m, x: torch.topk((x @ m.w[0]).softmax(-1), 2),
    "sine": lambda m, x: torch.sin(3 * x) + torch.cos(x),
    "one huge output": lambda m, x: (x @ m.w[0] * 1e3, x @ m.w[1]),
    "mixture of experts": lambda m, x: torch.stack([x @ w for w in m.w], -2).gather(-2, (x @ m.w[0])[..., :4].argmax(-1)[..., None, None].expand(*x.shape[:2], 1, x.shape[2])),
    "a scan": lambda m, x: torch.stack([h := x[:, 0] * 0] + [h := torch.tanh(x[:, t] @ m.w[0] + h @ m.w[1]) for t in range(x.shape[1])]),
}  # fmt: skip


class Right(torch.nn.Module):  # type: ignore[misc]
    """A module of four square weights and a vector that computes a row of `TORCH`."""

    def __init__(self, compute: Callable[[Any, Any], Any], width: int) -> None:
        super().__init__()
        self.w = torch.nn.ParameterList([torch.randn(width, width) / width**0.5 for _ in range(4)])
        self.b = torch.nn.Parameter(torch.randn(width))
        self.compute = compute

    def forward(self, x: Any) -> Any:
        return self.compute(self, x)


FUNCTIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "JAX norm": ("jax", lambda x: jax.nn.standardize(x)),
    "JAX logsumexp": ("jax", lambda x: jax.nn.logsumexp(x * 9, -1)),
    "JAX gelu": ("jax", lambda x: jax.nn.gelu(x * 3).sum(-1)),
    "NumPy norm": ("numpy", lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)),
    "NumPy sort": ("numpy", lambda x: (np.sort(x, -1), np.argsort(x, -1))),
    "ops": ("torch", lambda x: ops.softmax(ops.multiply(x, 5.0))),
}
MODELS: dict[str, tuple[str, Callable[[int], Any], tuple[int, ...]]] = {
    "MLP": ("torch", lambda n: T.Sequential(T.Linear(n, 2 * n), T.ReLU(), T.LayerNorm(2 * n), T.Dropout(), T.Linear(2 * n, 3)), (0,)),
    "convnet": ("torch", lambda n: T.Sequential(T.Conv2d(3, n, 3, padding=1), T.BatchNorm2d(n), T.ReLU(), T.MaxPool2d(2), T.Conv2d(n, n, 3, groups=n), T.AdaptiveAvgPool2d(1), T.Flatten(), T.Linear(n, 5)), (3, 8, 8)),
    "LSTM": ("torch", lambda n: T.LSTM(n, n, batch_first=True), (5, 0)),
    "encoder": ("torch", lambda n: T.TransformerEncoderLayer(n, 2, 2 * n, batch_first=True), (9, 0)),
    "embedding": ("torch", lambda n: T.Sequential(T.Embedding(50, n), T.GroupNorm(1, 6), T.Linear(n, 50)), (6,)),
    "nn MLP": ("torch", lambda n: nn.build(nn.Dense(n, 2 * n), "relu", nn.RMSNorm(2 * n), nn.Dense(2 * n, 4), "softmax", device="cpu"), (0,)),
    "nn convnet": ("jax", lambda n: nn.build(nn.Conv2d(3, n, 3), "gelu", nn.GlobalAvgPool(), nn.Dense(n, 4), input_shape=(3, 7, 7), device="cpu"), (3, 7, 7)),
    "nn transformer": ("numpy", lambda n: nn.build(nn.Embedding(50, n), nn.TransformerBlock(n, 2, causal=True, rope=True), nn.Dense(n, 50), input_shape=(9,), device="cpu"), (9,)),
}  # fmt: skip
"""An engine, a module of a width, and the shape of a row; 0 is the width."""

KINDS = [*TORCH, *FUNCTIONS, *MODELS]


def draw_right_model(number: int) -> tuple[Any, str, Any, str]:
    """Return a model, its engine, an example and the precision."""
    name, precision = KINDS[number % len(KINDS)], PRECISIONS[number // len(KINDS) % 4]
    draw = np.random.default_rng(number)
    torch.manual_seed(number)
    rows, length, width = (int(x) for x in draw.integers((1, 2, 1), (9, 12, 13)) * (1, 1, 4))
    shape: tuple[int, ...] = (length, width)
    if name in TORCH:
        engine, model = "torch", Right(TORCH[name], width)
    elif name in FUNCTIONS:
        engine, model = FUNCTIONS[name]
    else:
        engine, make, shape = MODELS[name]
        model = make(width)
    model = model.eval() if isinstance(model, T.Module) else model
    scale = draw.choice([0.3, 1, 3][: 2 if precision == "float16" else 3])
    x = draw.standard_normal((rows, *[n or width for n in shape])) * scale
    is_text = "embedding" in name or "nn transformer" in name
    return (
        model,
        engine,
        draw.integers(0, 50, x.shape) if is_text else x.astype(np.float32),
        precision,
    )
