"""Digits on every engine with gradients: are they read well, and is the training the same?

    PYTHONPATH=src python bench/digits.py [--epochs 10] [--optimize none]

The net of `examples/digits.py` is trained from one seed on each engine that is installed here; the
loss of every step is compared between them, step by step.
"""

from __future__ import annotations

import argparse
import itertools
import runpy
import time
from pathlib import Path
from typing import Any

import numpy as np

import anydevice
from anydevice import nn

Row = tuple[str, str, bool]
ACCURACY, CURVES = 0.97, 1e-3
EXAMPLE = Path(__file__).parents[1] / "examples/digits.py"


class Losses(nn.Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.of_steps: list[float] = []

    def step(self, event: Any) -> None:
        self.of_steps.append(event.loss())


def main() -> list[Row]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--optimize", default="none")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_known_args()[0]
    digits = runpy.run_path(str(EXAMPLE))
    curves: dict[str, Any] = {}
    rows: list[Row] = []
    for engine in ("torch", "jax", "mlx"):
        try:
            device = anydevice.device(options.device, engine=engine)
            rows.append(trained(digits, device, options, curves))
        except anydevice.DeviceNotFoundError as error:
            print(f"– {engine}: {str(error).splitlines()[0]}")
    for first, second in itertools.combinations(curves, 2):
        off = float(np.abs(curves[first] - curves[second]).max())
        said = f"{off:.1e} at most over {len(curves[first])} steps (bar {CURVES:.0e})"
        rows.append((f"losses of {first} and {second}", said, off <= CURVES))
    for name, said, right in rows:
        print(f"{'✓' if right else '✗'} {name:<28} {said}")
    return rows


def trained(digits: Any, device: Any, options: Any, curves: dict[str, Any]) -> Row:
    """Train on one engine: its losses go into `curves`, and how well it reads comes back."""
    losses = Losses()
    began = time.perf_counter()
    model, _ = digits["fitted"](
        digits["network"](), device, options.epochs, 0, options.optimize, [losses]
    )
    seconds = time.perf_counter() - began
    curves[device.engine] = np.array(losses.of_steps)
    fast = anydevice.compile(model, device, optimize="none")
    right = digits["accuracy"](fast, *digits["held_out"]())
    said = f"{right:.2%} of held-out digits (bar {ACCURACY:.0%}), {seconds:.1f} s"
    return (f"digits on {device.engine}, {device}", said, right >= ACCURACY)


if __name__ == "__main__":
    main()
