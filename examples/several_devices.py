"""One training, unchanged, on one device, on several, and in several processes.

    python examples/several_devices.py [--device cuda] [--engine jax]
    anydevice launch -n 4 examples/several_devices.py

It is the same script in each process, and the losses are the same in all three ways. With
`--engine jax` and `XLA_FLAGS=--xla_force_host_platform_device_count=8`, a CPU has eight devices.
"""

from __future__ import annotations

import argparse
import sys
import warnings

import numpy

from anydevice import nn, parallel

ROWS, SIZE, CLASSES, BATCH = 600, 32, 8, 64


def main() -> int:
    """Train; the exit code is 0 if it has learned something."""
    options = arguments()
    with warnings.catch_warnings(record=True, action="always") as said:
        mesh = parallel.initialize(options.device, engine=options.engine)
    trained = nn.train(
        network(),
        data(),
        nn.AdamW(1e-3),
        "cross_entropy",
        epochs=options.epochs,
        devices=mesh,
        strategy=options.strategy,
        clip=1.0,
        seed=0,
        progress=False,
        save=options.save,
        resume=True if options.save else None,
    )
    if trained.stopped == "Ctrl-C":
        return 130
    if mesh.rank == 0:  # all of them have the same losses, and one tells them
        for warning in said:
            print(f"   {warning.message}")
        print(trained.report)
        print("losses", " → ".join(f"{loss:.7f}" for loss in trained.history.losses))
    return 0 if trained.history.losses[-1] < trained.history.losses[0] else 1


def network() -> nn.Model:
    """A network in host memory: the training places it."""
    layers = nn.Dense(SIZE, 128), "gelu", nn.Dropout(0.1), nn.Dense(128, CLASSES)
    return nn.build(*layers, input_shape=SIZE, device="cpu")


def data() -> nn.Batches:
    """The same batches in every process, which takes its rows of each; the last has 24 rows."""
    numbers = numpy.random.default_rng(0)
    centers = numbers.standard_normal((CLASSES, SIZE))
    labels = numbers.integers(0, CLASSES, ROWS)
    rows = centers[labels] + numbers.standard_normal((ROWS, SIZE))
    return nn.Batches(rows.astype("float32"), labels.astype("int32"), BATCH)


def arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="such as cpu, cuda or cuda:1")
    parser.add_argument("--engine", help="the array library: torch, jax or mlx")
    parser.add_argument("--strategy", default="auto", help="auto, replicate or shard")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save", help="a .safetensors file to save to, and to go on from")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
