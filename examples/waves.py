"""Sequences: an LSTM that tells the forms of waves apart, however long they are.

    python examples/waves.py [--device cuda:0] [--engine torch] [--layer gru]

A wave is a sine, a square, a saw or noise, of any frequency and phase, under noise. The model reads
it step by step and answers after the last one. It is trained on 48 steps and also tested on 96: its
parameters do not depend on the length.

Exits with 1 if fewer than 90 % of the test waves are named correctly.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy

import anydevice
from anydevice import nn

FORMS = ("sine", "square", "saw", "noise")
STEPS, BATCH, WANTED = 48, 32, 0.9


def main() -> int:
    """Train, verify and test; the exit code is 0 if it is accurate enough."""
    options = arguments()
    where = options.device
    if options.engine is not None:
        where = anydevice.device(options.device, engine=options.engine)
    model = network(options.layer, options.seed)
    print(f"{model}\n")

    data = nn.Batches(*waves(960, STEPS, seed=1), BATCH)
    done = nn.train(
        model,
        data,
        nn.AdamW(nn.CosineRate(1e-2, steps=options.epochs * len(data))),
        "cross_entropy",
        epochs=options.epochs,
        device=where,
        clip=1.0,
        seed=options.seed,
    )
    if done.stopped == "Ctrl-C":
        sys.exit(130)
    trained, losses = done.model, done.history.losses
    print(f"trained on {anydevice.device_of(trained)}: loss {losses[0]:.2f} → {losses[-1]:.3f}")

    series, forms = waves(256, STEPS, seed=2)
    fast = anydevice.compile(trained, where, optimize="none", verify=series[:4])
    print(f"verified there: {fast.report.checked}")
    right = {}
    for steps in (STEPS, 2 * STEPS):
        test = waves(256, steps, seed=2)
        found = nn.evaluate(trained, test, "cross_entropy", metrics="accuracy", optimize="none")
        right[steps] = found["accuracy"]
        print(f"named correctly: {right[steps]:.1%} of {found.examples} waves of {steps} steps")
    one = int((forms == FORMS.index("saw")).argmax())
    guess = FORMS[int(nn.predict(trained, series[[one]], optimize="none").argmax())]
    print(f"\n{drawn(series[one])}\nis a {guess}")
    return 0 if right[STEPS] >= WANTED else 1


def network(layer: str = "lstm", seed: int = 0) -> nn.Model:
    """The model, with parameters that depend only on the seed."""
    kind = {"lstm": nn.LSTM, "gru": nn.GRU}[layer]
    return nn.build(
        kind(1, 32, last=True),
        nn.Dense(32, len(FORMS)),
        input_shape=(STEPS, 1),
        seed=seed,
        device="cpu",
    )


def waves(count: int, steps: int, seed: int) -> tuple[Any, Any]:
    """Series (count, steps, 1) and the number of the form of each."""
    drawn = numpy.random.default_rng(seed)
    forms = drawn.integers(0, len(FORMS), count).astype("int32")
    period, phase = drawn.uniform(8, 16, (count, 1)), drawn.uniform(0, 1, (count, 1))
    turns = numpy.arange(steps) / period + phase
    sine = numpy.sin(2 * numpy.pi * turns)
    saw = 2 * (turns % 1) - 1
    every = numpy.stack([sine, numpy.sign(sine), saw, drawn.uniform(-1, 1, (count, steps))])
    series = every[forms, numpy.arange(count)] + drawn.normal(0, 0.1, (count, steps))
    return series[:, :, None].astype("float32"), forms


def drawn(series: Any) -> str:
    """A series as text."""
    heights = numpy.clip(((1.2 - series[:, 0]) * 2.5).round(), 0, 6)
    return "\n".join("  " + "".join(" *"[int(at == row)] for at in heights) for row in range(7))


def arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="such as cpu, cuda:1 or metal")
    parser.add_argument("--engine", help="the array library: torch, jax or mlx")
    parser.add_argument("--layer", choices=("lstm", "gru"), default="lstm")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
