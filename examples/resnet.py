"""A small ResNet: images of shapes, batch norm whose statistics are state, verified and saved.

    python examples/resnet.py [--device cuda:0] [--engine torch] [--optimize none]

The images are drawn here: a disc, a square or a cross, of any color and size, anywhere in 32×32
pixels of noise. In training, batch norm uses the statistics of each batch; the trained model uses
those that it collected, so that an image is seen alike alone and among others.

Exits with 1 if fewer than 95 % of the test images are named correctly.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy

import anydevice
from anydevice import nn

SHAPES = ("disc", "square", "cross")
SIDE, BATCH, WANTED = 32, 32, 0.95


def main() -> int:
    """Train, verify, evaluate, save and load; the exit code is 0 if it is accurate enough."""
    options = arguments()
    where = options.device
    if options.engine is not None:
        where = anydevice.device(options.device, engine=options.engine)
    model = resnet(options.seed)
    print(f"{model}\n")

    data = nn.Batches(*images(512, seed=1), BATCH)
    rate = nn.CosineRate(1e-2, steps=options.epochs * len(data))
    done = nn.train(
        model,
        data,
        nn.AdamW(rate),
        "cross_entropy",
        epochs=options.epochs,
        device=where,
        seed=options.seed,
        optimize=options.optimize,
    )
    if done.stopped == "Ctrl-C":
        sys.exit(130)
    trained, losses = done.model, done.history.losses
    home = anydevice.device_of(trained)
    print(f"trained on {home}: loss {losses[0]:.2f} → {losses[-1]:.3f}")

    pictures, labels = images(128, seed=2)
    fast = anydevice.compile(trained, where, optimize=options.optimize, verify=pictures[:4])
    print(f"verified there: {fast.report.checked}")
    found = nn.evaluate(trained, (pictures, labels), "cross_entropy", metrics="accuracy")
    print(f"named correctly: {found['accuracy']:.1%} of {found.examples} test images")
    alone, among = (anydevice.to_numpy(trained(pictures[:count]))[0] for count in (1, 32))
    print(f"alone and among others, an image differs by {abs(alone - among).max():.0e}")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "resnet.safetensors")
        nn.save(trained, path)
        again = nn.load(path, "cpu")
    state = again.parameters[1]["mean"]  # of the first batch norm: training has moved it from 0
    kept = numpy.array_equal(
        anydevice.to_numpy(state), anydevice.to_numpy(trained.parameters[1]["mean"])
    )
    print(f"saved and loaded: the statistics are {'the same' if kept else 'NOT the same'}")
    return 0 if found["accuracy"] >= WANTED and kept else 1


def resnet(seed: int = 0) -> nn.Model:
    """A ResNet-8: a convolution, three blocks of two, and a dense layer."""
    return nn.build(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm(16),
        "relu",
        block(16, 16),
        "relu",
        block(16, 32, stride=2),
        "relu",
        block(32, 64, stride=2),
        "relu",
        nn.GlobalAvgPool(),
        nn.Dense(64, len(SHAPES)),
        input_shape=(3, SIDE, SIDE),
        seed=seed,
        device="cpu",
    )


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Layer:
    """Two convolutions around which the input goes on, changed in size where they change it."""
    inside = nn.Chain(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
        nn.BatchNorm(outputs),
        "relu",
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm(outputs),
    )
    if stride == 1:
        return nn.Residual(inside)
    shortcut = nn.Chain(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm(outputs))
    return nn.Residual(inside, shortcut)


def images(count: int, seed: int) -> tuple[Any, Any]:
    """Images (count, 3, 32, 32) and the number of the shape in each."""
    drawn = numpy.random.default_rng(seed)
    labels = drawn.integers(0, len(SHAPES), count).astype("int32")
    size = drawn.uniform(6, 11, (count, 1, 1))
    down, along = drawn.uniform(size, SIDE - size, (2, count, 1, 1))
    rows, columns = numpy.mgrid[:SIDE, :SIDE]
    y, x = abs(rows - down), abs(columns - along)
    farthest, nearest = numpy.maximum(x, y), numpy.minimum(x, y)
    inside = numpy.stack(
        [x**2 + y**2 <= size**2, farthest <= size * 0.9, (farthest <= size) & (nearest <= size / 3)]
    )
    shapes = inside[labels, numpy.arange(count)][:, None]
    colors = drawn.uniform(0.3, 1, (count, 3, 1, 1))
    noise = drawn.normal(0, 0.1, (count, 3, SIDE, SIDE))
    return (shapes * colors + noise).astype("float32"), labels


def arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="such as cpu, cuda:1 or metal")
    parser.add_argument("--engine", help="the array library: torch, jax or mlx")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--optimize", choices=("none", "default", "aggressive"), default="none")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
