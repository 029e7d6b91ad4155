"""What it costs to call an op through anydevice.ops, over the library's own function.

    python bench/calling_ops.py [--quick] [--only torch,jax]

On the CPU, with arrays so small that hardly anything but the call is measured. The two sides are
called in turn, and the bar is for the median, over all turns, of the difference between them.
Beside it stands that median over the quietest quarter of the turns: those in which programs on the
same core had least emptied its caches.

Every op is here that stands for one call of a library's function. Others are several: those for
which an engine has no version of its own, and those that fix what a function leaves open, such as
what is read at an index out of range, or the dtype of an index.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from anydevice import ops
from anydevice._ops import dispatch

BAR = 2e-6
LOOKUP_BAR = 0.5e-6

Row = tuple[str, str, bool]
Call = Callable[[], Any]
Calls = dict[str, tuple[Call, Call]]


class Cost(NamedTuple):
    """Seconds: of the library's call, of what ours takes more, and of that in quiet turns."""

    plain: float
    more: float
    quiet: float


def seconds(call: Call, times: int) -> float:
    """The time of this thread that one call takes, the mean over several in a row.

    What other programs take of the core is not counted, and nor is what the library does on
    threads of its own.
    """
    began = time.thread_time()
    for _ in range(times):
        call()
    return (time.thread_time() - began) / times


def cost(ours: Call, theirs: Call, rounds: int) -> Cost:
    """What the two calls take, in turn; which of them comes first changes from turn to turn."""
    turns = []
    for turn in range(rounds + 2):
        if turn % 2:
            second, first = seconds(ours, 50), seconds(theirs, 50)
        else:
            first, second = seconds(theirs, 50), seconds(ours, 50)
        if turn >= 2:
            turns.append((first + second, first, second - first))
    quiet = sorted(turns)[: max(1, rounds // 4)]
    return Cost(
        statistics.median(plain for _, plain, _ in turns),
        statistics.median(more for *_, more in turns),
        statistics.median(more for *_, more in quiet),
    )


def pair(
    ours: Callable[..., Any], theirs: Callable[..., Any], *arguments: Any
) -> tuple[Call, Call]:
    """Both called with the same arguments, by place."""
    if len(arguments) == 1:
        (x,) = arguments
        return lambda: ours(x), lambda: theirs(x)
    if len(arguments) == 2:
        x, y = arguments
        return lambda: ours(x, y), lambda: theirs(x, y)
    x, y, z = arguments
    return lambda: ours(x, y, z), lambda: theirs(x, y, z)


def alike(library: Any, names: str, *arguments: Any, **renamed: str) -> Calls:
    """The ops of these names, each beside the library's function of that name, or `renamed`."""
    return {
        name: pair(getattr(ops, name), getattr(library, renamed.get(name, name)), *arguments)
        for name in names.split()
    }


ONE = "exp log sqrt sin cos tanh floor negative abs isnan"
TWO = "add subtract multiply divide power maximum minimum equal less less_equal greater"
TRUTHS = "logical_and logical_or"


def of_torch() -> Calls:
    import torch

    torch.set_num_threads(1)
    x, y, weight = torch.rand(8, 8), torch.rand(8, 8), torch.rand(8)
    seen, heads, image = x < y, torch.rand(1, 2, 4, 8), torch.rand(1, 2, 8, 8)
    filters = torch.rand(3, 2, 3, 3)
    library: Any = torch
    functional: Any = torch.nn.functional
    theirs = {"power": "pow", "equal": "eq", "less": "lt", "less_equal": "le", "greater": "gt"}
    return {
        **alike(library, f"{ONE} rsqrt sigmoid erf relu round isfinite", x, negative="neg"),
        **alike(functional, "silu gelu", x),
        **alike(library, TWO, x, y, **theirs),
        **alike(library, TRUTHS, seen, seen),
        **alike(library, "any all", seen, -1),
        **alike(library, "prod logsumexp cumulative_sum", x, -1, cumulative_sum="cumsum"),
        **alike(library, "zeros_like", x),
        **alike(library, "outer", weight, weight),
        "flip": pair(ops.flip, torch.flip, x, (0,)),
        "stack": (lambda: ops.stack([x, y]), lambda: torch.stack([x, y])),
        "clip": pair(ops.clip, torch.clamp, x, 0.25, 0.75),
        **alike(library, "logical_not", seen),
        **alike(library, "where", seen, x, y),
        **alike(library, "sum mean max min", x, -1, max="amax", min="amin"),
        **alike(library, "softmax log_softmax", x, -1),
        **alike(library, "reshape", x, (4, 16)),
        **alike(library, "permute", x, (1, 0)),
        **alike(library, "broadcast_to", x, (3, 8, 8)),
        **alike(library, "matmul", x, y),
        **alike(functional, "linear", x, y),
        "multiply by 0.5": pair(ops.multiply, torch.mul, x, 0.5),
        "concat": (lambda: ops.concat([x, y]), lambda: torch.cat([x, y])),
        "slice_axis": (lambda: ops.slice_axis(x, 1, 2, 6), lambda: x[:, 2:6]),
        "astype": (lambda: ops.astype(x, "float16"), lambda: x.to(torch.float16)),
        "mean_squared_error": pair(ops.mean_squared_error, functional.mse_loss, x, y),
        "rmsnorm": (
            lambda: ops.rmsnorm(x, weight),
            lambda: functional.rms_norm(x, (8,), weight, 1e-6),
        ),
        "layernorm": (
            lambda: ops.layernorm(x, weight, weight),
            lambda: functional.layer_norm(x, (8,), weight, weight),
        ),
        "attention": pair(
            ops.attention, functional.scaled_dot_product_attention, heads, heads, heads
        ),
        "conv2d": pair(ops.conv2d, functional.conv2d, image, filters),
        "max_pool2d": pair(ops.max_pool2d, functional.max_pool2d, image, 2),
        "avg_pool2d": pair(ops.avg_pool2d, functional.avg_pool2d, image, 2),
    }


def of_jax() -> Calls:
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_platforms", "cpu")
    x, y, seen = jnp.ones((8, 8)), jnp.ones((8, 8)), jnp.ones((8, 8), bool)
    return {
        **alike(jnp, f"{ONE} sign isfinite", x),
        **alike(jax.nn, "sigmoid relu silu", x),
        **alike(jax.lax, "rsqrt erf", x),
        **alike(jnp, TWO, x, y),
        **alike(jnp, TRUTHS, seen, seen),
        **alike(jnp, "logical_not", seen),
        **alike(jnp, "where", seen, x, y),
        **alike(jnp, "sum mean max min argmax argmin sort prod", x, -1),
        **alike(jnp, "cumulative_sum", x, -1, cumulative_sum="cumsum"),
        "flip": pair(ops.flip, jnp.flip, x, (0,)),
        "stack": (lambda: ops.stack([x, y]), lambda: jnp.stack([x, y])),
        "clip": pair(ops.clip, jnp.clip, x, 0.25, 0.75),
        **alike(jax.nn, "softmax log_softmax", x, -1),
        **alike(jnp, "reshape", x, (4, 16)),
        **alike(jnp, "permute", x, (1, 0), permute="transpose"),
        **alike(jnp, "broadcast_to", x, (3, 8, 8)),
        **alike(jnp, "matmul", x, y),
        "multiply by 0.5": pair(ops.multiply, jnp.multiply, x, 0.5),
        "gelu": (lambda: ops.gelu(x), lambda: jax.nn.gelu(x, approximate=False)),
        "concat": (lambda: ops.concat([x, y]), lambda: jnp.concatenate([x, y])),
        "slice_axis": (lambda: ops.slice_axis(x, 1, 2, 6), lambda: x[:, 2:6]),
        "astype": (lambda: ops.astype(x, "float16"), lambda: x.astype(jnp.float16)),
    }


def of_mlx() -> Calls:
    """MLX computes later; what is measured is what writes down that it is to."""
    import mlx.core as mx

    mx.set_default_device(mx.cpu)  # type: ignore[arg-type,unused-ignore]
    x, y, weight = mx.ones((8, 8)), mx.ones((8, 8)), mx.ones(8)
    seen, heads, scale = x < y, mx.ones((1, 2, 4, 8)), 8**-0.5
    attention = mx.fast.scaled_dot_product_attention
    return {
        **alike(mx, f"{ONE} rsqrt sigmoid erf round isfinite", x),
        **alike(mx, "any all", seen, -1),
        **alike(mx, "prod sort cumulative_sum", x, -1, cumulative_sum="cumsum"),
        **alike(mx, TWO, x, y),
        **alike(mx, TRUTHS, seen, seen),
        **alike(mx, "logical_not", seen),
        **alike(mx, "where", seen, x, y),
        **alike(mx, "sum max min softmax", x, -1),
        **alike(mx, "reshape", x, (4, 16)),
        **alike(mx, "permute", x, (1, 0), permute="transpose"),
        **alike(mx, "broadcast_to", x, (3, 8, 8)),
        **alike(mx, "matmul", x, y),
        "multiply by 0.5": pair(ops.multiply, mx.multiply, x, 0.5),
        "relu": (lambda: ops.relu(x), lambda: mx.maximum(x, 0)),
        "concat": (lambda: ops.concat([x, y]), lambda: mx.concatenate([x, y])),
        "slice_axis": (lambda: ops.slice_axis(x, 1, 2, 6), lambda: x[:, 2:6]),
        "astype": (lambda: ops.astype(x, "float16"), lambda: x.astype(mx.float16)),
        "rmsnorm": (lambda: ops.rmsnorm(x, weight), lambda: mx.fast.rms_norm(x, weight, 1e-6)),
        "layernorm": (
            lambda: ops.layernorm(x, weight, weight),
            lambda: mx.fast.layer_norm(x, weight, weight, 1e-5),
        ),
        "attention": (
            lambda: ops.attention(heads, heads, heads),
            lambda: attention(heads, heads, heads, scale=scale),
        ),
    }


def of_numpy() -> Calls:
    import numpy as np

    x, y = np.ones((8, 8), np.float32), np.ones((8, 8), np.float32)
    seen = np.ones((8, 8), bool)
    return {
        **alike(np, f"{ONE} sign round isfinite", x),
        **alike(np, "any all", seen, -1),
        **alike(np, "prod cumulative_sum", x, -1, cumulative_sum="cumsum"),
        **alike(np, TWO, x, y),
        **alike(np, TRUTHS, seen, seen),
        **alike(np, "logical_not", seen),
        **alike(np, "where", seen, x, y),
        **alike(np, "sum max min", x, -1),
        **alike(np, "reshape", x, (4, 16)),
        **alike(np, "permute", x, (1, 0), permute="transpose"),
        **alike(np, "broadcast_to", x, (3, 8, 8)),
        **alike(np, "matmul", x, y),
        "multiply by 0.5": pair(ops.multiply, np.multiply, x, 0.5),
        "relu": (lambda: ops.relu(x), lambda: np.maximum(x, 0)),
        "concat": (lambda: ops.concat([x, y]), lambda: np.concatenate([x, y])),
        "slice_axis": (lambda: ops.slice_axis(x, 1, 2, 6), lambda: x[:, 2:6]),
        "astype": (lambda: ops.astype(x, "float16"), lambda: x.astype(np.float16)),
    }


LIBRARIES: dict[str, Callable[[], Calls]] = {
    "torch": of_torch,
    "jax": of_jax,
    "mlx": of_mlx,
    "numpy": of_numpy,
}


def measured(engine: str, calls: Calls, rounds: int, names: Sequence[str]) -> list[Row]:
    rows = []
    for name, (ours, theirs) in calls.items():
        if names and name not in names:
            continue
        ours(), theirs()
        plain, more, quiet = (each * 1e6 for each in cost(ours, theirs, rounds))
        said = f"{plain:6.2f} µs + {more:5.2f} µs (bar {BAR * 1e6:g}; {quiet:5.2f} in quiet turns)"
        rows.append((f"{engine}: {name}", said, more * 1e-6 <= BAR))
        print_row(rows[-1])
    return rows


def looking_up(rounds: int) -> Row:
    """The lookup alone."""
    import numpy as np

    x = np.ones(8)
    dispatch.primitives(x)
    _, more, quiet = cost(lambda: dispatch.primitives(x), lambda: x, rounds)
    said = f"{more * 1e6:.2f} µs (bar {LOOKUP_BAR * 1e6:g}; {quiet * 1e6:.2f} in quiet turns)"
    row = ("finding the engine", said, more <= LOOKUP_BAR)
    print_row(row)
    return row


def print_row(row: Row) -> None:
    name, said, right = row
    print(f"{'✓' if right else '✗'} {name:<26} {said}", flush=True)


def main() -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--only", default=",".join(LIBRARIES), help="engines, by comma")
    parser.add_argument("--ops", default="", help="ops, by comma; all where not given")
    asked = parser.parse_known_args()[0]
    rounds = 41 if asked.quick else 401
    names = [name for name in asked.ops.split(",") if name]
    rows = [looking_up(rounds)]
    for engine in asked.only.split(","):
        if find_spec(engine) is not None:
            rows += measured(engine, LIBRARIES[engine](), rounds, names)
    missed = [name for name, _, right in rows if not right]
    print(f"{len(rows) - len(missed)} of {len(rows)} within their bars")
    return rows


if __name__ == "__main__":
    main()
