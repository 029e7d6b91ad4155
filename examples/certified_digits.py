"""Digits that nobody can make it misread: a classifier trained with bounds, and proofs about it.

    python examples/certified_digits.py [--device cuda:0] [--engine torch] [--plot certified.svg]

Two networks are trained: one plainly, one with `proofs.certified`. For test images it is then
proved, or refuted by a counterexample, that no change of each pixel by up to 0.06 of its range
makes the network read another digit, whatever the order of its float32 sums. The plot shows which
share is certified for smaller and larger changes.

Exits with 1 if fewer than 90 % of the images are certified for the network that was trained so.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy

import anydevice
from anydevice import nn, proofs

DIGITS = Path(__file__).parent / "data/digits.npz"
HELD_OUT, BATCH = 360, 64
CHANGE, WANTED = 0.06, 0.9
CHANGES = (0.0, 0.02, 0.04, CHANGE, 0.08)


class Share(NamedTuple):
    """Of how many images something is certified, and of how many it is refuted."""

    certified: float
    refuted: float


def main() -> int:
    """Train both networks, certify them, and draw the plot."""
    options = arguments()
    where = place(options.device, options.engine)
    images, labels = held_out(options.seed)
    models = {
        "plain": fitted("cross_entropy", where, options),
        "certified": fitted(robust_loss(options.epochs), where, options),
    }
    for name, model in models.items():
        right = (guesses(model, images) == labels).mean()
        print(f"{name} training: {right:.1%} of {len(labels)} test digits are read correctly")

    images, labels = images[: options.images], labels[: options.images]
    curves: dict[str, list[Share]] = {name: [] for name in models}
    for name, model in models.items():
        for change in CHANGES if options.plot else (CHANGE,):
            begin = time.monotonic()
            share = certified_share(model, images, labels, change)
            took = time.monotonic() - begin
            curves[name].append(share)
            print(
                f"{name}, each pixel changed by up to {change:g}: {share.certified:.0%} certified, "
                f"{share.refuted:.0%} refuted, {took:.1f} s for {len(labels)} images"
            )
    if options.plot:
        Path(options.plot).write_text(drawn(curves), "utf-8")
        print(f"plot: {options.plot}")
    best = curves["certified"][CHANGES.index(CHANGE) if options.plot else 0]
    return 0 if best.certified >= WANTED else 1


def network(seed: int = 0) -> nn.Model:
    """A small network over 64 pixels."""
    return nn.build(
        nn.Flatten(),
        nn.Dense(64, 128),
        "relu",
        nn.Dense(128, 128),
        "relu",
        nn.Dense(128, 10),
        input_shape=(1, 8, 8),
        seed=seed,
        device="cpu",
    )


def robust_loss(epochs: int) -> Any:
    """Trained for a little more than what is to be certified, which grows in the first half."""
    steps = epochs * (len(kept_for_training()[0]) // BATCH)
    return proofs.certified("cross_entropy", 0.075, share=0.6, ramp=steps // 2, low=0, high=1)


def fitted(loss: Any, where: Any, options: argparse.Namespace) -> nn.Model:
    """The network after training, in NumPy, where small proofs are quickest."""
    data = nn.Batches(*kept_for_training(options.seed), BATCH, whole_only=True)
    rate = nn.CosineRate(3e-3, steps=options.epochs * len(data))
    done = nn.train(
        network(options.seed),
        data,
        nn.Adam(rate),
        loss,
        epochs=options.epochs,
        device=where,
        optimize="none",
        seed=options.seed,
    )
    if done.stopped == "Ctrl-C":
        sys.exit(130)
    here = anydevice.device("cpu", engine="numpy")
    model: nn.Model = anydevice.to_device(done.model, here, convert=True)
    return model


def certified_share(model: nn.Model, images: Any, labels: Any, change: float) -> Share:
    """For which share of the images no such change makes the model read something else."""
    results = [
        proofs.prove(
            model,
            proofs.same_class(int(label)),
            over=proofs.ball(image, change, low=0, high=1),
            limit=2,
        )
        for image, label in zip(images, labels, strict=True)
    ]
    kinds = [type(each) for each in results]
    count = len(kinds)
    return Share(kinds.count(proofs.Proof) / count, kinds.count(proofs.Counterexample) / count)


def guesses(model: nn.Model, images: Any) -> Any:
    """The digit that the model reads in each image."""
    return anydevice.to_numpy(model(images)).argmax(axis=1)


def kept_for_training(seed: int = 0) -> tuple[Any, Any]:
    """The training images (count, 1, 8, 8), from 0 to 1, and their digits."""
    images, labels = _shuffled(seed)
    return images[HELD_OUT:], labels[HELD_OUT:]


def held_out(seed: int = 0) -> tuple[Any, Any]:
    """The test images and their digits."""
    images, labels = _shuffled(seed)
    return images[:HELD_OUT], labels[:HELD_OUT]


def drawn(curves: dict[str, list[Share]]) -> str:
    """Both curves as SVG: the share that is certified over the size of the change."""
    wide, high, left, bottom = 420, 260, 46, 40
    colours = {"plain": "#c2410c", "certified": "#0b6bcb"}

    def at(change: float, share: float) -> str:
        x = left + change / CHANGES[-1] * (wide - left - 12)
        return f"{x:.1f},{12 + (1 - share) * (high - bottom - 12):.1f}"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img" '
        'aria-label="Share of digits certified, over the size of the change, for two trainings">',
        f'<rect width="{wide}" height="{high}" fill="#fff"/>',
        '<g font-family="system-ui,sans-serif" font-size="12" fill="#222">',
    ]
    for share in (0.0, 0.5, 1.0):
        x, y = at(0, share).split(",")
        end = at(CHANGES[-1], share).split(",")[0]
        lines.append(f'<path d="M{x} {y}H{end}" stroke="#8884"/>')
        lines.append(f'<text x="{left - 6}" y="{y}" dy="4" text-anchor="end">{share:.0%}</text>')
    for change in CHANGES:
        x = at(change, 0).split(",")[0]
        lines.append(
            f'<text x="{x}" y="{high - bottom + 16}" text-anchor="middle">{change:g}</text>'
        )
    middle = (wide + left) / 2
    lines.append(
        f'<text x="{middle}" y="{high - 6}" text-anchor="middle">change of each pixel, of a range '
        "of 1; at 0 it is plain accuracy</text>"
    )
    for row, (name, shares) in enumerate(curves.items()):
        colour = colours[name]
        points = " ".join(
            at(change, share.certified) for change, share in zip(CHANGES, shares, strict=True)
        )
        dash = ' stroke-dasharray="5 3"' if row == 0 else ""
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
        )
        place = high - bottom - 14 - 16 * row
        lines.append(f'<text x="{left + 10}" y="{place}" fill="{colour}">{name} training</text>')
    return "\n".join([*lines, "</g>", "</svg>", ""])


def place(device: str | None, engine: str | None) -> anydevice.Device | str | None:
    """The device to train on; without `--engine`, training finds an engine with gradients."""
    return device if engine is None else anydevice.device(device, engine=engine)


def arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="such as cpu, cuda:1 or metal")
    parser.add_argument("--engine", help="the array library that trains: torch, jax or mlx")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the test images")
    parser.add_argument("--plot", help="an SVG file with the shares for several changes")
    return parser.parse_args()


def _shuffled(seed: int) -> tuple[Any, Any]:
    """All images, shuffled: the file is sorted by writer. scikit-learn has the same images."""
    try:
        data = import_module("sklearn.datasets").load_digits()
        images, labels = data.images, data.target
    except ImportError:
        with numpy.load(DIGITS) as file:
            images, labels = file["images"], file["labels"]
    order = numpy.random.default_rng(seed).permutation(len(images))
    return images[order, None].astype("float32") / 16, labels[order].astype("int32")


if __name__ == "__main__":
    sys.exit(main())
