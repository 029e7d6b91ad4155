"""What it costs to call an op through anydevice.ops, over the library's own function.

    python bench/calling_ops.py [--quick]

On the CPU, with arrays so small that hardly anything but the call is measured. The two sides are
called in turn, and each figure is the median of the differences between them, over the turns in
which nothing else kept the core busy. A composite op is measured only where the engine has a
version of its own, for the library's function is one call.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from anydevice import ops
from anydevice.ops import dispatch

BAR = 2e-6

Row = tuple[str, str, bool]
Calls = dict[str, tuple[Callable[[], Any], Callable[[], Any]]]


def seconds(call: Callable[[], Any], times: int) -> float:
    """The time of this thread that one call takes, the mean over several in a row.

    What other programs take of the core is not counted, and nor is what the library does on
    threads of its own.
    """
    began = time.thread_time()
    for _ in range(times):
        call()
    return (time.thread_time() - began) / times


def cost(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """The median seconds of their call, and of what ours takes more, both in turn.

    Of all turns, only the quarter that took least in all counts: in others, programs on the same
    core had emptied its caches.
    """
    turns = []
    for turn in range(rounds + 2):
        first, second = seconds(theirs, 50), seconds(ours, 50)
        if turn >= 2:
            turns.append((first + second, first, second - first))
    quiet = sorted(turns)[: max(1, rounds // 4)]
    plain, more = (statistics.median(turn[at] for turn in quiet) for at in (1, 2))
    return plain, more


def of_torch() -> Calls:
    import torch

    torch.set_num_threads(1)
    x, y = torch.rand(8, 8), torch.rand(8, 8)
    weight, ids = torch.rand(8), torch.arange(8)
    functional: Any = torch.nn.functional
    return {
        "add": (lambda: ops.add(x, y), lambda: torch.add(x, y)),
        "multiply by 0.5": (lambda: ops.multiply(x, 0.5), lambda: torch.mul(x, 0.5)),
        "exp": (lambda: ops.exp(x), lambda: torch.exp(x)),
        "relu": (lambda: ops.relu(x), lambda: torch.relu(x)),
        "mean": (lambda: ops.mean(x, -1), lambda: torch.mean(x, -1)),
        "sum": (lambda: ops.sum(x, -1), lambda: torch.sum(x, -1)),
        "reshape": (lambda: ops.reshape(x, (4, 16)), lambda: torch.reshape(x, (4, 16))),
        "permute": (lambda: ops.permute(x, (1, 0)), lambda: torch.permute(x, (1, 0))),
        "concat": (lambda: ops.concat([x, y]), lambda: torch.cat([x, y])),
        "matmul": (lambda: ops.matmul(x, y), lambda: torch.matmul(x, y)),
        "linear": (lambda: ops.linear(x, y), lambda: functional.linear(x, y)),
        "softmax": (lambda: ops.softmax(x), lambda: torch.softmax(x, -1)),
        "silu": (lambda: ops.silu(x), lambda: functional.silu(x)),
        "gelu": (lambda: ops.gelu(x), lambda: functional.gelu(x)),
        "rmsnorm": (
            lambda: ops.rmsnorm(x, weight),
            lambda: functional.rms_norm(x, (8,), weight, 1e-6),
        ),
        "layernorm": (
            lambda: ops.layernorm(x, weight, weight),
            lambda: functional.layer_norm(x, (8,), weight, weight),
        ),
        "embedding": (lambda: ops.embedding(x, ids), lambda: functional.embedding(ids, x)),
    }


def of_jax() -> Calls:
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_platforms", "cpu")
    x, y = jnp.ones((8, 8)), jnp.ones((8, 8))
    return {
        "add": (lambda: ops.add(x, y), lambda: jnp.add(x, y)),
        "multiply by 0.5": (lambda: ops.multiply(x, 0.5), lambda: jnp.multiply(x, 0.5)),
        "exp": (lambda: ops.exp(x), lambda: jnp.exp(x)),
        "sum": (lambda: ops.sum(x, -1), lambda: jnp.sum(x, -1)),
        "reshape": (lambda: ops.reshape(x, (4, 16)), lambda: jnp.reshape(x, (4, 16))),
        "matmul": (lambda: ops.matmul(x, y), lambda: jnp.matmul(x, y)),
        "softmax": (lambda: ops.softmax(x), lambda: jax.nn.softmax(x, -1)),
        "silu": (lambda: ops.silu(x), lambda: jax.nn.silu(x)),
    }


def of_mlx() -> Calls:
    """MLX computes later; what is measured is what writes down that it is to."""
    import mlx.core as mx

    mx.set_default_device(mx.cpu)  # type: ignore[arg-type,unused-ignore]
    x, y, weight = mx.ones((8, 8)), mx.ones((8, 8)), mx.ones(8)
    return {
        "add": (lambda: ops.add(x, y), lambda: mx.add(x, y)),
        "multiply by 0.5": (lambda: ops.multiply(x, 0.5), lambda: mx.multiply(x, 0.5)),
        "exp": (lambda: ops.exp(x), lambda: mx.exp(x)),
        "sum": (lambda: ops.sum(x, -1), lambda: mx.sum(x, -1)),
        "reshape": (lambda: ops.reshape(x, (4, 16)), lambda: mx.reshape(x, (4, 16))),
        "matmul": (lambda: ops.matmul(x, y), lambda: mx.matmul(x, y)),
        "softmax": (lambda: ops.softmax(x), lambda: mx.softmax(x, -1)),
        "rmsnorm": (lambda: ops.rmsnorm(x, weight), lambda: mx.fast.rms_norm(x, weight, 1e-6)),
        "layernorm": (
            lambda: ops.layernorm(x, weight, weight),
            lambda: mx.fast.layer_norm(x, weight, weight, 1e-5),
        ),
    }


def of_numpy() -> Calls:
    import numpy as np

    x, y = np.ones((8, 8), np.float32), np.ones((8, 8), np.float32)
    return {
        "add": (lambda: ops.add(x, y), lambda: np.add(x, y)),
        "exp": (lambda: ops.exp(x), lambda: np.exp(x)),
        "sum": (lambda: ops.sum(x, -1), lambda: np.sum(x, -1)),
        "reshape": (lambda: ops.reshape(x, (4, 16)), lambda: np.reshape(x, (4, 16))),
        "matmul": (lambda: ops.matmul(x, y), lambda: np.matmul(x, y)),
    }


LIBRARIES: dict[str, Callable[[], Calls]] = {
    "torch": of_torch,
    "jax": of_jax,
    "mlx": of_mlx,
    "numpy": of_numpy,
}
COMPOSITE = ("linear", "softmax", "silu", "gelu", "rmsnorm", "layernorm", "embedding")


def measured(engine: str, calls: Calls, rounds: int) -> list[Row]:
    rows = []
    for name, (ours, theirs) in calls.items():
        ours()
        if name in COMPOSITE and name not in dispatch._fused[engine]:
            rows.append((f"{engine}: {name}", "its definition is used: several calls", True))
            continue
        plain, more = cost(ours, theirs, rounds)
        said = f"{plain * 1e6:6.2f} µs + {more * 1e6:5.2f} µs (bar {BAR * 1e6:g})"
        rows.append((f"{engine}: {name}", said, more <= BAR))
    return rows


def looking_up(rounds: int) -> Row:
    """The lookup alone."""
    import numpy as np

    x = np.ones(8)
    _, more = cost(lambda: dispatch.primitives(x), lambda: x, rounds)
    return ("finding the engine", f"{more * 1e6:.2f} µs (bar 0.5)", more <= 0.5e-6)


def main() -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    rounds = 41 if parser.parse_known_args()[0].quick else 401
    rows = [looking_up(rounds)]
    for engine, calls in LIBRARIES.items():
        if find_spec(engine) is not None:
            rows += measured(engine, calls(), rounds)
    for name, said, right in rows:
        print(f"{'✓' if right else '✗'} {name:<24} {said}")
    return rows


if __name__ == "__main__":
    main()
