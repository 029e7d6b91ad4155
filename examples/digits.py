"""Handwritten digits: a small convolutional network, trained, verified and saved on any device.

    python examples/digits.py [--device cuda:0] [--engine torch] [--optimize none]

Compiling may take longer than training a model this small, so it is not compiled without
`--optimize default`.

A seed gives the same parameters, the same order of images and the same losses on every engine.
Exits with 1 if fewer than 97 % of the test images are read correctly.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

import anydevice
from anydevice import nn

DIGITS = Path(__file__).parent / "data/digits.npz"
HELD_OUT = 360
BATCH = 32
WANTED = 0.97


def main() -> int:
    """Train, verify, save and load; the exit code is 0 if the model is accurate enough."""
    options = arguments()
    where = place(options.device, options.engine)
    model = network(options.seed)
    print(f"{model}\n")

    trained, losses = fitted(model, where, options.epochs, options.seed, options.optimize)
    home = anydevice.device_of(trained)
    print(f"trained on {home} in {options.epochs} epochs: loss {losses[0]:.4f} → {losses[-1]:.4f}")

    pictures, labels = held_out()
    fast = anydevice.compile(trained, where, optimize=options.optimize, verify=pictures)
    print(f"verified there: {fast.report.checked}")
    right = accuracy(fast, pictures, labels)
    print(f"read correctly: {right:.2%} of {len(labels)} test digits")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "digits.safetensors")
        nn.save(trained, path)
        again = nn.load(path, "cpu")
        size = path.stat().st_size
    same = accuracy(again, pictures, labels) == right
    print(f"saved in {size / 1024:.0f} KiB, loaded on cpu: reads {'as' if same else 'NOT as'} well")

    print(f"\n{drawn(pictures[0, 0])}\nis read as a {guesses(fast, pictures[:1])[0]}")
    return 0 if right >= WANTED and same else 1


def network(seed: int = 0) -> nn.Model:
    """The model, with parameters that depend only on the seed."""
    return nn.build(
        nn.Conv2d(1, 16, 3, padding=1),
        "relu",
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        "relu",
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dense(128, 10),
        input_shape=(1, 8, 8),
        seed=seed,
        device="cpu",
    )


def fitted(
    model: nn.Model,
    where: anydevice.Device | str | None,
    epochs: int = 10,
    seed: int = 0,
    optimize: str = "none",
    callbacks: Sequence[nn.Callback] = (),
) -> tuple[nn.Model, list[float]]:
    """The model after training on a device, and the mean loss of each epoch."""
    pictures, labels = kept_for_training()
    data = nn.Batches(pictures, labels, BATCH, whole_only=True)
    optimizer = nn.AdamW(nn.CosineRate(1e-2, steps=epochs * len(data)))
    done = nn.train(
        model,
        data,
        optimizer,
        nn.cross_entropy,
        epochs=epochs,
        device=where,
        seed=seed,
        optimize=optimize,
        callbacks=callbacks,
    )
    if done.stopped == "Ctrl-C":
        sys.exit(130)
    return done.model, done.history.losses


def kept_for_training() -> tuple[Any, Any]:
    """The training images (count, 1, 8, 8), from 0 to 1, and their digits."""
    pictures, labels = _shuffled()
    return pictures[HELD_OUT:], labels[HELD_OUT:]


def held_out() -> tuple[Any, Any]:
    """The test images and their digits."""
    pictures, labels = _shuffled()
    return pictures[:HELD_OUT], labels[:HELD_OUT]


def accuracy(model: Any, pictures: Any, labels: Any) -> float:
    """The share of images that the model reads correctly."""
    return float((guesses(model, pictures) == labels).mean())


def guesses(model: Any, pictures: Any) -> Any:
    """The model's digit for each image."""
    return anydevice.to_numpy(model(pictures)).argmax(axis=1)


def drawn(picture: Any) -> str:
    """An image as text."""
    shades = " .:-=+*#%@"
    return "\n".join("  " + "".join(shades[int(dot * 9)] * 2 for dot in row) for row in picture)


def place(device: str | None, engine: str | None) -> anydevice.Device | str | None:
    """The device to train on; without `--engine`, training finds an engine with gradients."""
    return device if engine is None else anydevice.device(device, engine=engine)


def arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="such as cpu, cuda:1 or metal")
    parser.add_argument("--engine", help="the array library: torch, jax or mlx")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--optimize", choices=("none", "default", "aggressive"), default="none")
    return parser.parse_args()


def _shuffled() -> tuple[Any, Any]:
    """All images, shuffled: the file is sorted by writer."""
    with numpy.load(DIGITS) as file:
        pictures, labels = file["images"], file["labels"]
    order = numpy.random.default_rng(0).permutation(len(pictures))
    return pictures[order, None].astype("float32") / 16, labels[order].astype("int32")


if __name__ == "__main__":
    sys.exit(main())
