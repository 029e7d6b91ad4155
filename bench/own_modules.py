"""How long training users' own modules takes, against the same loop by hand.

    PYTHONPATH=src python bench/own_modules.py [--only step tiny torch nnx equinox mlx]

The first row is `nn.Training.step` on a module of PyTorch with steps of about 5 ms: steps of ours
and by hand take turns, on one thread, and the figure is the ratio of their medians. The second is
the loop `for batch in training` over a tiny MLP, in processor time. The others are
epochs of `nn.train`, which take turns with epochs by hand, in processor time, each with the
optimizer of the library; first epochs, which compile, are left out. JAX compiles on both sides,
PyTorch and MLX on neither. Curves are compared epoch by epoch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Row = tuple[str, str, bool]
Step = Callable[[Any, Any], Any]
RATE, CLASSES = 1e-3, 10
numbers = np.random.default_rng(0)


def batches(count: int, rows: int, width: int) -> list[tuple[Any, Any]]:
    x = numbers.standard_normal((count, rows, width)).astype(np.float32)
    return [(each, each[:, :CLASSES].argmax(1)) for each in x]


def as_tensors(data: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    import torch

    return [(torch.tensor(x), torch.tensor(y)) for x, y in data]


def torch_parts(width: int) -> tuple[Any, Any, Any, Step]:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, 512), torch.nn.ReLU(), torch.nn.BatchNorm1d(512),
        torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, CLASSES),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    loss = torch.nn.functional.cross_entropy

    def step(x: Any, y: Any) -> Any:
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return model, optimizer, loss, step


def nnx_parts(width: int) -> tuple[Any, Any, Any, Step]:
    import optax  # type: ignore[import-untyped]
    from flax import nnx

    rngs: Any = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(width, 512, rngs=rngs), nnx.relu, nnx.BatchNorm(512, rngs=rngs),
        nnx.Linear(512, 512, rngs=rngs), nnx.relu, nnx.Linear(512, CLASSES, rngs=rngs),
    )  # fmt: skip
    optimizer = optax.adamw(RATE)
    kept = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    def loss(output: Any, y: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(output, y).mean()

    def whole(model: Any, kept: Any, x: Any, y: Any) -> Any:
        value, gradients = nnx.value_and_grad(lambda model: loss(model(x), y))(model)
        kept.update(model, gradients)
        return value

    fast: Any = nnx.jit(whole)
    return model, optimizer, loss, lambda x, y: fast(model, kept, x, y.astype(np.int32))


def equinox_parts(width: int) -> tuple[Any, Any, Any, Step]:
    import equinox as eqx
    import jax
    import optax

    model = eqx.nn.MLP(width, CLASSES, 512, 2, key=jax.random.key(0))
    optimizer = optax.adamw(RATE)
    now = [model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))]

    def loss(output: Any, y: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(output, y).mean()

    def whole(model: Any, state: Any, x: Any, y: Any) -> Any:
        def value_of(model: Any) -> Any:
            return loss(jax.vmap(model)(x), y)

        differentiated: Any = eqx.filter_value_and_grad(value_of)
        value, gradients = differentiated(model)
        changes, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
        return value, eqx.apply_updates(model, changes), state

    fast: Any = eqx.filter_jit(whole)

    def step(x: Any, y: Any) -> Any:
        value, *now[:] = fast(*now, x, y.astype(np.int32))
        return value

    return jax.vmap(model), optimizer, loss, step


def mlx_parts(width: int) -> tuple[Any, Any, Any, Step]:
    import mlx.core as mx
    import mlx.nn as modules
    from mlx.optimizers import AdamW

    mx.random.seed(0)
    model = modules.Sequential(
        modules.Linear(width, 512), modules.ReLU(), modules.BatchNorm(512),
        modules.Linear(512, 512), modules.ReLU(), modules.Linear(512, CLASSES),
    )  # fmt: skip
    mx.eval(model.parameters())
    optimizer = AdamW(RATE)

    def loss(output: Any, y: Any) -> Any:
        return modules.losses.cross_entropy(output, y).mean()

    both = modules.value_and_grad(model, lambda x, y: loss(model(x), y))

    def step(x: Any, y: Any) -> Any:
        value, gradients = both(mx.array(x), mx.array(y.astype(np.int32)))
        optimizer.update(model, gradients)
        mx.eval(value, model.parameters(), optimizer.state)
        return value

    return model, optimizer, loss, step


PARTS: dict[str, Any] = {
    "torch": torch_parts, "nnx": nnx_parts, "equinox": equinox_parts, "mlx": mlx_parts
}  # fmt: skip


def one_step(turns: int = 300) -> Row:
    """`nn.Training.step`, step by step in turn with the same by hand."""
    import torch

    from anydevice import nn

    torch.set_num_threads(1)
    width = 256
    data = batches(8, 96, width)
    data = as_tensors(data)
    model, optimizer, loss, _ = torch_parts(width)
    training = nn.Training(model, optimizer, None, loss, device="cpu")
    *_, by_hand = torch_parts(width)
    times: list[tuple[float, float]] = []
    for turn in range(turns + 10):
        batch = data[turn % len(data)]
        began = time.perf_counter()
        training.step(batch)
        middle = time.perf_counter()
        by_hand(*batch)
        times.append((middle - began, time.perf_counter() - middle))
    ours, theirs = zip(*times[10:], strict=True)
    ratio = statistics.median(ours) / statistics.median(theirs)
    each = statistics.median(theirs) * 1e3
    text = f"{(ratio - 1) * 100:+.1f} % of {each:.1f} ms"
    return "a step of nn.Training on torch", text, ratio <= 1.03


def tiny_loop(turns: int = 200, batches_each: int = 20) -> Row:
    """A loop over a tiny MLP, in turn with the same by hand, in processor time."""
    import torch

    from anydevice import nn

    torch.set_num_threads(1)
    data = as_tensors(batches(batches_each, 64, 64))

    def parts() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.ReLU(),
            torch.nn.Linear(128, CLASSES),
        )  # fmt: skip
        return model, torch.optim.AdamW(model.parameters(), lr=RATE)

    loss = torch.nn.functional.cross_entropy
    training = nn.Training(*parts(), data, loss, device="cpu")
    model, optimizer = parts()
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(turns + 5):
        began = time.process_time()
        for batch in training:
            training.step(batch)
        middle = time.process_time()
        for x, y in data:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
        ours.append(middle - began)
        theirs.append(time.process_time() - middle)
    ratio = statistics.median(ours[5:]) / statistics.median(theirs[5:])
    each = statistics.median(theirs[5:]) / batches_each * 1e6
    return "a loop over a tiny MLP", f"{ratio:.3f} x by hand ({each:.0f} us)", ratio <= 1.05


def epochs(name: str, count: int) -> list[Row]:
    """Epochs of `nn.train`, in turn with epochs by hand."""
    from anydevice import nn

    width = 256
    data = batches(24, 128, width)
    if name == "torch":  # as its loaders give them
        data = as_tensors(data)
    model, optimizer, loss, _ = PARTS[name](width)
    *_, by_hand = PARTS[name](width)
    ours: list[float] = []
    theirs: list[float] = []
    curve: list[float] = []
    began = time.process_time()

    def epoch(_: Any) -> None:
        nonlocal began
        ours.append(time.process_time() - began)
        began = time.process_time()
        losses = [by_hand(x, y) for x, y in data]
        curve.append(float(np.mean([float(each) for each in losses])))
        theirs.append(time.process_time() - began)
        began = time.process_time()

    how = "default" if name in ("nnx", "equinox") else "none"
    done = nn.train(
        model, data, optimizer, loss, epochs=count, device="cpu", optimize=how,
        callbacks=epoch, progress=False,
    )  # fmt: skip
    speed = statistics.median(theirs[1:]) / statistics.median(ours[1:])
    apart = max(abs(a - b) / b for a, b in zip(done.history.losses, curve, strict=True))
    each = statistics.median(theirs[1:]) / len(data) * 1e3
    return [
        (f"nn.train of a module, {name}", f"{speed:.2f} x by hand ({each:.1f} ms)", speed >= 0.95),
        (f"its curve, {name}", f"{apart:.1e} apart", apart <= 1e-6),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=["step", "tiny", *PARTS])
    parser.add_argument("--epochs", type=int, default=20)
    given = parser.parse_args()
    for name in given.only:
        loops = {"step": one_step, "tiny": tiny_loop}
        rows = [loops[name]()] if name in loops else epochs(name, given.epochs)
        for what, text, holds in rows:
            print(f"{what:<34} {text:<30} {'ok' if holds else 'MISSED'}", flush=True)


if __name__ == "__main__":
    main()
