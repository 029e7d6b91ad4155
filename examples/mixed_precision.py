"""Mixed precision: 16 bits where it is safe, 32 where it is not, and what that costs in accuracy.

    python examples/mixed_precision.py [--device cuda:0] [--engine torch]

A network is trained twice from the same seed: in float32, and in mixed precision, with products in
16 bits and parameters, sums and losses in 32. The trained model is then used in each precision, and
compared with a float64 copy of itself.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy

import anydevice
from anydevice import nn

DIGITS = Path(__file__).parent / "data/digits.npz"
PRECISIONS = ("float32", "mixed", "bfloat16", "float16")
HELD_OUT = 360
EPOCHS = 6


def main() -> int:
    """Train and run in several precisions; the exit code is 0 if all of them are accurate."""
    where = place()
    with numpy.load(DIGITS) as file:
        pictures, labels = file["images"].reshape(-1, 64), file["labels"].astype("int32")
    order = numpy.random.default_rng(0).permutation(len(labels))
    pictures, labels = pictures[order].astype("float32") / 16, labels[order]
    unseen, digits = pictures[:HELD_OUT], labels[:HELD_OUT]
    data = nn.Batches(pictures[HELD_OUT:], labels[HELD_OUT:], 64, whole_only=True)

    trained: dict[str, nn.Model] = {}
    print("Trained in      loss        parameters  correct")
    for precision in ("float32", "mixed"):
        done = nn.train(
            network(),
            data,
            nn.AdamW(5e-3),
            "cross_entropy",
            epochs=EPOCHS,
            device=where,
            precision=precision,
            optimize="none",
        )
        if done.stopped == "Ctrl-C":
            return 130
        trained[precision] = done.model
        kept = str(done.model.parameters[0]["weight"].dtype).removeprefix("torch.")
        kept = kept.removeprefix("mlx.core.")
        right = accuracy(done.model, unseen, digits)
        print(f"{precision:<14}  {done.history.losses[-1]:<10.4f}  {kept:<10}  {right:.1%}")

    print("\nUsed in         weights     correct       largest error, as a share of the tolerance")
    worst = 1.0
    for precision in PRECISIONS:
        fast = anydevice.compile(
            trained["mixed"], where, optimize="none", precision=precision, verify=unseen
        )
        right = accuracy(fast, unseen, digits)
        size = sum(x.nbytes for x in anydevice.to_numpy(leaves(fast.parameters)))
        checked = fast.report.checked
        largest = numpy.nan if checked is None else checked.largest
        print(f"{precision:<14}  {size / 1024:<6.1f} KiB  {right:<12.1%}  {largest:.2f}")
        worst = min(worst, right)
    return 0 if worst > 0.9 else 1


def network() -> nn.Model:
    """A network of three layers, always with the same parameters."""
    layers = nn.Dense(64, 96), "relu", nn.Dense(96, 64), "relu", nn.Dense(64, 10)
    return nn.build(*layers, seed=0, device="cpu")


def accuracy(model: Any, pictures: Any, labels: Any) -> float:
    """The share of images that the model reads correctly."""
    return float((anydevice.to_numpy(model(pictures)).argmax(axis=1) == labels).mean())


def leaves(tree: Any) -> list[Any]:
    """The arrays of a tree."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [x for part in tree for x in leaves(part)] if isinstance(tree, list) else [tree]


def place() -> anydevice.Device | str | None:
    """The device of the command line; training finds an engine with gradients for it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="such as cpu, cuda:1 or metal")
    parser.add_argument("--engine", help="the array library: torch, jax or mlx")
    options = parser.parse_args()
    if options.engine is None:
        return str(options.device) if options.device else None
    return anydevice.device(options.device, engine=options.engine)


if __name__ == "__main__":
    sys.exit(main())
