"""Setting up a training: memory, device, limits, batch size, checkpoints.

    python examples/training_setup.py [--device cuda:0] [--engine torch]

Six decisions, each one call: a device with enough memory, a limit for this process, the largest
batch, recomputed activations, compiling ahead of time, and a checkpoint to resume from.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy

import anydevice
from anydevice import nn

SIZE, DEPTH, BATCH = 64, 6, 64
ROWS = 512


def main() -> int:
    """Set up and train; the exit code is 0 if the resumed training gives the same result."""
    options = arguments()
    model = network()
    numbers = model.parameter_count

    needed = 4 * 4 * numbers  # parameters, gradients and two moments, float32 each
    where = place(options, needed)
    print(f"1. {numbers:,} parameters need {needed / 2**20:.1f} MiB: {where} has that much free")

    share = "conservative" if numbers < 10**6 else "balanced" if numbers < 10**8 else "aggressive"
    if where.kind == "cpu":
        print(f"2. on a GPU, configure(memory={share!r}) would limit this process")
    else:
        kept = anydevice.configure(memory=share)
        print(f"2. this process may use {kept.memory_fraction:.0%} of {where} ({share})")

    largest = anydevice.find_batch_size(lambda size: step(model, size, where), BATCH)
    print(f"3. a batch of {largest} fits; {BATCH} was the largest to try")

    saving = nn.recompute(model)
    again = str(saving).count("recomputed")
    print(f"4. {again} layers recompute their activations, to save memory")

    fast = anydevice.compile(saving, where, optimize="none")
    first = fast.warm_up(numpy.zeros((largest, SIZE), "float32"))
    print(f"5. compiled in {first.seconds:.2f} s, before the first batch")

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "training.safetensors")
        whole = trained(saving, where, largest, epochs=4)
        trained(saving, where, largest, epochs=2, save=file)
        resumed = trained(saving, where, largest, epochs=4, save=file, resume=True)
    off = difference(whole.model, resumed.model)
    print(f"6. stopped after 2 epochs and resumed: the parameters differ by {off:.1e}")
    losses = " → ".join(f"{loss:.4f}" for loss in whole.history.losses)
    print(f"\nlosses on {anydevice.device_of(whole.model)}: {losses}")
    return 0 if off < 1e-6 and whole.history.losses[-1] < whole.history.losses[0] else 1


def network() -> nn.Model:
    """Blocks of layers in host memory; they are moved later."""
    block = nn.Chain(nn.Dense(SIZE, SIZE), "gelu", nn.LayerNorm(SIZE))
    return nn.build(*[block] * DEPTH, nn.Dense(SIZE, 1), input_shape=SIZE, device="cpu")


def data(batch: int) -> nn.Batches:
    """Random rows, and a function of them to learn."""
    rows = numpy.random.default_rng(0).standard_normal((ROWS, SIZE)).astype("float32")
    return nn.Batches(rows, numpy.tanh(rows[:, :1] + rows[:, 1:2]), batch)


def trained(model: nn.Model, where: Any, batch: int, **options: Any) -> nn.Trained[nn.Model]:
    """Train the model, always in the same way."""
    done = nn.train(
        model,
        data(batch),
        nn.AdamW(1e-3),
        "mean_squared_error",
        device=where,
        clip=1.0,
        optimize="none",
        **options,
    )
    if done.stopped == "Ctrl-C":
        sys.exit(130)
    return done


def step(model: nn.Model, size: int, where: Any) -> Any:
    """One epoch with batches of this size, to see whether they fit into memory."""
    return trained(model, where, size, epochs=1).model.parameters


def difference(one: nn.Model, other: nn.Model) -> float:
    """The largest difference between the parameters of two models."""
    pairs = zip(flat(one.parameters), flat(other.parameters), strict=True)
    return max(float(abs(a - b).max()) for a, b in pairs)


def flat(tree: Any) -> list[Any]:
    """The arrays of a tree, in NumPy."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list):
        return [x for part in tree for x in flat(part)]
    return [anydevice.to_numpy(tree)]


def place(options: argparse.Namespace, needed: int) -> anydevice.Device:
    """The best device with enough free memory; training finds an engine for it."""
    with warnings.catch_warnings(record=True, action="always") as said:
        chosen = anydevice.device(options.device, engine=options.engine, min_free=needed)
    for warning in said:
        print(f"   {warning.message}")
    return anydevice.Device(str(chosen), engine=options.engine)


def arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="such as cpu, cuda:1 or metal")
    parser.add_argument("--engine", help="the array library: torch, jax or mlx")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
