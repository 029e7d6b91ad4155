"""An epoch of a ResNet-8 on images of 32×32, against the same training written by hand.

    PYTHONPATH=src python bench/resnet_training.py [--engine torch jax] [--turns 9]

2,048 images in batches of 64, SGD with momentum. By hand is, in PyTorch, a `torch.nn.Module`,
`torch.optim.SGD` and a loop; in JAX, a step under `jax.jit` with the channels last, as they are
usually written there. Both sides take epochs in turn after one to warm up, so that a busy machine
slows both; figures are medians, and ratios are medians of those of neighbours. Where others
compute too, the ratio of CPU seconds says more, with one core: `OMP_NUM_THREADS=1 taskset -c 0`.
Each engine runs in a process of its own. `--optimize` is that of `nn.train`, which by itself
compiles no training of one epoch by PyTorch on a CPU. `--count` takes fewer images.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

# CPUs that claim AMX and fail it exist; the figures are for all.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import numpy as np

import anydevice
from anydevice import nn
from anydevice._train.step_config import default_optimize

Row = tuple[str, str, bool]
Epoch = Callable[[], float]

BATCH, RATE, MOMENTUM = 64, 0.05, 0.9
BAR = 1.05


def block(inputs: int, outputs: int, stride: int) -> nn.Layer:
    inside = nn.Chain(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm(outputs), "relu",
        nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm(outputs),
    )  # fmt: skip
    if stride == 1:
        return nn.Chain(nn.Residual(inside), "relu")
    shortcut = nn.Chain(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm(outputs))
    return nn.Chain(nn.Residual(inside, shortcut), "relu")


def network(device: anydevice.Device | str = "cpu") -> nn.Model:
    return nn.build(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm(16), "relu",
        block(16, 16, 1), block(16, 32, 2), block(32, 64, 2),
        nn.GlobalAvgPool(), nn.Dense(64, 10), input_shape=(3, 32, 32), device=device,
    )  # fmt: skip


def images(count: int) -> tuple[Any, Any]:
    """Noise around a pattern for each of ten classes."""
    drawn = np.random.default_rng(0)
    labels = drawn.integers(0, 10, count).astype(np.int32)
    patterns = drawn.normal(size=(10, 3, 32, 32)).astype(np.float32)
    noise = drawn.normal(size=(count, 3, 32, 32)).astype(np.float32)
    return patterns[labels] * 0.3 + noise, labels


def ours(engine: str, count: int, optimize: str | None) -> Epoch:
    where = anydevice.device("cpu", engine=engine)
    data = nn.Batches(*images(count), BATCH)
    model = network(where)
    training = nn.Training(
        model, nn.SGD(RATE, momentum=MOMENTUM), data, "cross_entropy", device=where,
        optimize=optimize or default_optimize(where, model, 1, len(data)),
    )  # fmt: skip
    epochs = iter(training.epochs(1000))

    def epoch() -> float:
        next(epochs)
        for batch in training:
            loss = training.step(batch)
        return float(anydevice.to_numpy(loss))

    return epoch


def of_torch(count: int) -> Epoch:
    import torch
    from torch.nn import functional as f

    class Block(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            conv = torch.nn.Conv2d
            self.one = conv(inputs, outputs, 3, stride, 1, bias=False)
            self.two = conv(outputs, outputs, 3, 1, 1, bias=False)
            self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(outputs) for _ in range(3))
            self.beside = conv(inputs, outputs, 1, stride, bias=False) if stride > 1 else None

        def forward(self, x: Any) -> Any:
            y = self.norms[1](self.two(f.relu(self.norms[0](self.one(x)))))
            return f.relu(y + (x if self.beside is None else self.norms[2](self.beside(x))))

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, 1, 1, bias=False), torch.nn.BatchNorm2d(16), torch.nn.ReLU(),
        Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM)
    x, y = (torch.from_numpy(each) for each in images(count))
    y = y.long()

    def epoch() -> float:
        order = torch.randperm(count)
        for at in range(0, count, BATCH):
            rows = order[at : at + BATCH]
            optimizer.zero_grad()
            loss = f.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
        return float(loss.detach())

    return epoch


def of_jax(count: int) -> Epoch:
    import jax
    import jax.numpy as jnp

    def conv(x: Any, weight: Any, stride: int) -> Any:
        side = weight.shape[0] // 2
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, weight, (stride, stride), [(side, side)] * 2, dimension_numbers=layout
        )

    def norm(x: Any, p: Any, state: Any) -> Any:
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        many = x.size // x.shape[-1]
        news = mean, variance * (many / (many - 1))
        state = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state, news)
        return (x - mean) * (jax.lax.rsqrt(variance + 1e-5) * p[0]) + p[1], state

    sizes = [(3, 16, 1), (16, 16, 1), (16, 32, 2), (32, 64, 2)]
    drawn = np.random.default_rng(0)

    def weight(side: int, inputs: int, outputs: int) -> Any:
        deviation = 1 / np.sqrt(inputs * side * side)
        return jnp.asarray(drawn.normal(0, deviation, (side, side, inputs, outputs)), jnp.float32)

    def affine(size: int) -> Any:
        return [jnp.ones(size), jnp.zeros(size)]

    parameters: list[Any] = []
    for place, (inputs, outputs, stride) in enumerate(sizes):
        part = {"one": weight(3, inputs, outputs), "norms": [affine(outputs)]}
        if place:
            part["two"] = weight(3, outputs, outputs)
            part["norms"].append(affine(outputs))
        if stride > 1:
            part["beside"] = weight(1, inputs, outputs)
            part["norms"].append(affine(outputs))
        parameters.append(part)
    parameters.append({"weight": weight(1, 64, 10)[0, 0], "bias": jnp.zeros(10)})
    means = [
        [(jnp.zeros_like(scale), jnp.ones_like(scale)) for scale, _ in part["norms"]]
        for part in parameters[:-1]
    ]

    def forward(parameters: Any, means: Any, x: Any) -> Any:
        new = []
        for part, state, (_, _, stride) in zip(parameters, means, sizes, strict=False):
            first, one = norm(conv(x, part["one"], stride), part["norms"][0], state[0])
            found = [one]
            y = jax.nn.relu(first)
            if "two" in part:
                y, two = norm(conv(y, part["two"], 1), part["norms"][1], state[1])
                found.append(two)
                if "beside" in part:
                    x, three = norm(conv(x, part["beside"], stride), part["norms"][2], state[2])
                    found.append(three)
                y = jax.nn.relu(y + x)
            x = y
            new.append(found)
        last = parameters[-1]
        return x.mean((1, 2)) @ last["weight"] + last["bias"], new

    def loss_of(parameters: Any, means: Any, x: Any, y: Any) -> Any:
        logits, new = forward(parameters, means, x)
        logs = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(logs, y[:, None], 1).mean(), new

    def step(parameters: Any, velocities: Any, means: Any, x: Any, y: Any) -> Any:
        (loss, means), slopes = jax.value_and_grad(loss_of, has_aux=True)(parameters, means, x, y)
        velocities = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocities, slopes)
        parameters = jax.tree.map(lambda p, v: p - RATE * v, parameters, velocities)
        return parameters, velocities, means, loss

    x, y = images(count)
    x = np.ascontiguousarray(x.transpose(0, 2, 3, 1))
    order = np.random.default_rng(1)
    compiled: Any = jax.jit(step)
    held: list[Any] = [parameters, jax.tree.map(jnp.zeros_like, parameters), means]

    def epoch() -> float:
        rows = order.permutation(count)
        for at in range(0, count, BATCH):
            taken = rows[at : at + BATCH]
            *held[:], loss = compiled(*held, x[taken], y[taken])
        return float(loss)

    return epoch


def measure(engine: str, turns: int, count: int, optimize: str | None) -> Row:
    by_hand = of_torch if engine == "torch" else of_jax
    sides = {"by hand": by_hand(count), "anydevice": ours(engine, count, optimize)}
    for epoch in sides.values():
        epoch()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    computing: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, float] = {}
    for turn in range(turns):
        for name in sorted(sides, reverse=bool(turn % 2)):
            began, worked = time.perf_counter(), time.process_time()
            losses[name] = sides[name]()
            computing[name].append(time.process_time() - worked)
            seconds[name].append(time.perf_counter() - began)
    hand, mine = (statistics.median(seconds[name]) for name in ("by hand", "anydevice"))
    ratio = ratio_of(seconds)
    said = (
        f"by hand {hand:.2f} s, anydevice {mine:.2f} s: {ratio:.2f} × (bar {BAR}), "
        f"{ratio_of(computing):.2f} × the CPU seconds"
    )
    return f"ResNet-8, an epoch, {engine}", said, ratio <= BAR and max(losses.values()) < 2.3


def ratio_of(times: dict[str, list[float]]) -> float:
    pairs = zip(times["anydevice"], times["by hand"], strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


def main() -> list[Row]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", nargs="+", default=["torch", "jax"])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--count", type=int, default=2048)
    parser.add_argument("--optimize", choices=("none", "default", "aggressive"))
    options = parser.parse_known_args()[0]
    rows: list[Row] = []
    if len(options.engine) == 1:
        rows = [measure(options.engine[0], options.turns, options.count, options.optimize)]
    else:
        for engine in options.engine:
            call = [sys.executable, *sys.argv, "--engine", engine]
            said = subprocess.run(call, check=True, stdout=subprocess.PIPE, text=True).stdout
            mark, name, text = said.strip().splitlines()[-1].split("  ", 2)
            rows.append((name.strip(), text.strip(), mark == "✓"))
    for name, text, good in rows:
        print(f"{'✓' if good else '✗'}  {name}  {text}")
    return rows


if __name__ == "__main__":
    main()
