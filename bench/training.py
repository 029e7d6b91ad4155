"""How fast a training step is on the CPU, against the same written by hand in that library.

    PYTHONPATH=src python bench/training.py [--quick]

By hand means: the library's own layers, its compiler and its fused optimizer (for JAX one compiled
function with donated arguments). Both sides take the same steps in turn; figures are medians. The
losses of both must agree at the end, or the row fails.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import anydevice
from anydevice import nn
from anydevice._core.protocols import StepState
from anydevice._libraries.precision import policy_of
from anydevice._train.step_config import StepConfig
from anydevice._train.stepper import stepper_for

Row = tuple[str, str, bool]
Step = Callable[[], Any]
BAR = 0.95
RATE, DECAY = 1e-3, 1e-2
WARM_UP = 4.0
"""Seconds of training before the steps that are timed, as those of a long one."""

MLP = nn.Chain(nn.Dense(784, 512), "relu", nn.Dense(512, 512), "relu", nn.Dense(512, 10))
CNN = nn.Chain(
    nn.Conv2d(1, 16, 3),
    "relu",
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3),
    "relu",
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Dense(800, 10),
)
MODELS = {"MLP": (MLP, (784,), 128), "CNN": (CNN, (1, 28, 28), 64)}


def examples(shape: tuple[int, ...], batch: int) -> tuple[Any, Any]:
    drawn = np.random.default_rng(0)
    x = drawn.normal(size=(batch, *shape)).astype(np.float32)
    return x, drawn.integers(0, 10, batch)


def ours(model: nn.Model, device: anydevice.Device, x: Any, y: Any) -> Step:
    optimizer = nn.AdamW(RATE, decay=DECAY)
    config = StepConfig(model.layer, nn.cross_entropy, optimizer, policy_of("float32", device))
    parameters = device(anydevice.to_numpy(model.parameters), convert=True)
    state = StepState(parameters, optimizer.init(parameters))
    stepper = stepper_for(device, config, state, seed=0)
    return lambda: stepper.step((x, y), RATE)


def torch_by_hand(model: nn.Model, x: Any, y: Any) -> Step:
    import torch

    layers: list[torch.nn.Module] = []
    for layer, own in zip(model.layer.layers, model.parameters, strict=True):  # type: ignore[attr-defined]
        if isinstance(layer, nn.Dense):
            made: Any = torch.nn.Linear(layer.inputs, layer.outputs)
        elif isinstance(layer, nn.Conv2d):
            outputs, inputs, *size = own["weight"].shape
            made = torch.nn.Conv2d(inputs, outputs, size)
        elif isinstance(layer, nn.MaxPool2d):
            made = torch.nn.MaxPool2d(2)
        else:
            made = torch.nn.Flatten() if isinstance(layer, nn.Flatten) else torch.nn.ReLU()
        for name, value in own.items():
            getattr(made, name).data = torch.tensor(value)
        layers.append(made)
    module = torch.nn.Sequential(*layers)
    loss_of = torch.nn.CrossEntropyLoss()
    compiled = torch.compile(lambda x, y: loss_of(module(x), y))
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=DECAY, fused=True)

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = compiled(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def jax_by_hand(model: nn.Model, x: Any, y: Any) -> Step:
    import jax
    import jax.numpy as jnp

    def applied(parameters: Any, x: Any) -> Any:
        for layer, own in zip(model.layer.layers, parameters, strict=True):  # type: ignore[attr-defined]
            if isinstance(layer, nn.Dense):
                x = x @ own["weight"].T + own["bias"]
            elif isinstance(layer, nn.Conv2d):
                x = jax.lax.conv(x, own["weight"], (1, 1), "VALID")
                x = x + own["bias"][:, None, None]
            elif isinstance(layer, nn.MaxPool2d):
                window = (1, 1, 2, 2)
                x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")
            else:
                x = x.reshape(len(x), -1) if isinstance(layer, nn.Flatten) else jax.nn.relu(x)
        return x

    def loss_of(parameters: Any, x: Any, y: Any) -> Any:
        logits = jax.nn.log_softmax(applied(parameters, x))
        return -jnp.take_along_axis(logits, y[:, None], 1).mean()

    def moved(parameters: Any, state: Any, count: Any, x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(loss_of)(parameters, x, y)
        count = count + 1

        def adam(p: Any, g: Any, m: Any, v: Any) -> Any:
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            change = m / (1 - 0.9**count) / (jnp.sqrt(v / (1 - 0.999**count)) + 1e-8)
            return p - RATE * DECAY * p - RATE * change, m, v

        tree = jax.tree_util
        new = tree.tree_map(adam, parameters, gradients, *state)
        parts = tree.tree_transpose(
            tree.tree_structure(parameters), tree.tree_structure((0, 0, 0)), new
        )
        return parts[0], parts[1:], count, value

    step_of = jax.jit(moved, donate_argnums=(0, 1, 2))
    parameters = jax.tree_util.tree_map(jnp.array, model.parameters)
    zeros = [jax.tree_util.tree_map(jnp.zeros_like, parameters) for _ in range(2)]
    held: list[Any] = [parameters, tuple(zeros), jnp.array(0)]

    def step() -> Any:
        *held[:], value = step_of(*held, x, y)
        return value

    return step


def in_turn(first: Step, second: Step, turns: int, steps: int) -> tuple[float, float, float]:
    """Median seconds of a step of each, and how far their losses are apart at the end."""
    times: tuple[list[float], list[float]] = ([], [])
    last = [0.0, 0.0]
    until = time.perf_counter() + WARM_UP
    while time.perf_counter() < until:
        first()
        second()
    for turn in range(turns + 1):
        for at, (step, kept) in enumerate(zip((first, second), times, strict=True)):
            began = time.perf_counter()
            for _ in range(steps):
                value = step()
            last[at] = float(value)
            if turn:
                kept.append((time.perf_counter() - began) / steps)
    return statistics.median(times[0]), statistics.median(times[1]), abs(last[0] - last[1])


def compared(engine: str, name: str, turns: int, steps: int) -> Row:
    layer, shape, batch = MODELS[name]
    device = anydevice.device("cpu", engine=engine)
    model = nn.Model(layer, shape, device=anydevice.device("cpu", engine="numpy"))
    x, y = device(examples(shape, batch), convert=True, narrow=True)
    by_hand = {"torch": torch_by_hand, "jax": jax_by_hand}[engine]
    plain, own, apart = in_turn(by_hand(model, x, y), ours(model, device, x, y), turns, steps)
    ratio = plain / own
    said = (
        f"{plain * 1e3:.2f} ms → {own * 1e3:.2f} ms: {ratio:.2f} × (bar {BAR}), losses {apart:.0e}"
    )
    return (f"{name} on {engine}", said, ratio >= BAR and apart < 1e-3)


def main() -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--engine", choices=("torch", "jax"), help="only this one")
    options = parser.parse_known_args()[0]
    quick = options.quick
    rows: list[Row] = []
    for engine in [options.engine] if options.engine else ("jax", "torch"):
        for kind in MODELS:
            try:
                rows.append(compared(engine, kind, 5 if quick else 21, 10))
            except Exception as error:
                rows.append((f"{kind} on {engine}", f"{type(error).__name__}: {error}", False))
            name, said, right = rows[-1]
            print(f"{'✓' if right else '✗'} {name:<28} {said}", flush=True)
    return rows


if __name__ == "__main__":
    main()
