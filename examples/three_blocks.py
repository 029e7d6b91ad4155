"""One job on two devices: prepared on the CPU, computed on the accelerator, evaluated on the CPU.

    python examples/three_blocks.py [--device cuda:0] [--engine torch]

Each part is a `use_device` block. Applying its device to data moves the data there. With only a
CPU, all three blocks run on it, and nothing is copied.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy

import anydevice
from anydevice import nn, ops

DIGITS = Path(__file__).parent / "data/digits.npz"


def main() -> int:
    """Find the most similar images; the exit code is 0 if most of them show the same digit."""
    device = chosen()
    with numpy.load(DIGITS) as file:
        pictures, labels = file["images"], file["labels"]

    with anydevice.use_device("cpu", engine="numpy") as here:
        prepared = normalized(here(pictures))
        print(f"1. prepared on {here}: {len(prepared):,} images, mean 0 and length 1 each")

    with anydevice.use_device(device) as there:
        model = nn.build(nn.Dense(64, 1024, bias=False), "tanh", seed=3)
        likeness = alike(model(there(prepared)))
        kind = type(likeness).__module__.partition(".")[0]
        where = anydevice.device_of((model, likeness))
        shape = tuple(likeness.shape)
        print(f"2. computed on {where} with {there.engine}: {shape} numbers, by {kind}")

    with anydevice.use_device("cpu", engine="numpy") as here:
        nearest = nearest_other(anydevice.to_numpy(here(likeness)))
        right = float((labels[nearest] == labels).mean())
        print(f"3. evaluated on {here}: {right:.1%} of the images are nearest to their digit")
    return 0 if right > 0.95 else 1


def normalized(pictures: Any) -> Any:
    """Each image as a row with mean 0 and length 1."""
    rows = pictures.reshape(len(pictures), -1).astype("float32")
    rows -= rows.mean(axis=1, keepdims=True)
    return rows / numpy.linalg.norm(rows, axis=1, keepdims=True)


def alike(features: Any) -> Any:
    """The cosine similarity of all pairs of rows; made of ops, it runs wherever the rows are."""
    squares = ops.sum(ops.multiply(features, features), axis=1, keepdims=True)
    rows = ops.multiply(features, ops.rsqrt(squares))
    return ops.matmul(rows, ops.permute(rows, (1, 0)))


def nearest_other(likeness: Any) -> Any:
    """For each image, the most similar other one."""
    others = likeness.copy()
    numpy.fill_diagonal(others, -numpy.inf)
    return others.argmax(axis=1)


def chosen() -> anydevice.Device:
    """The device of the command line, else the best one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="such as cpu, cuda:1 or opencl")
    parser.add_argument("--engine", help="the array library: torch, jax, mlx, …")
    options = parser.parse_args()
    return anydevice.device(options.device, engine=options.engine)


if __name__ == "__main__":
    sys.exit(main())
