"""A small transformer that learns two poems, character by character, and writes in their style.

    python examples/characters.py [--device cuda:0] [--engine torch] [--optimize default]

Compiling takes longer than training a model this small, so it is not compiled, except with
`--optimize default` or JAX, which would otherwise compile every op by itself.

It learns from poems of Lewis Carroll in `data/carroll.txt` which character comes next. Exits with 1
if most of its words are not in the poems.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

import anydevice
from anydevice import nn

TEXT = (Path(__file__).parent / "data/carroll.txt").read_text("utf-8")
LETTERS = sorted(set(TEXT))
CONTEXT, BATCH, SIZE, LAYERS, HEADS = 32, 16, 64, 2, 4
EPOCHS = 5
BEGINNING = "The Walrus and the "
WRITTEN = 200
BOLDNESS = 0.3


def main() -> int:
    """Train and generate; the exit code is 0 if most words are in the text."""
    options = arguments()
    # Matrices as small as these are multiplied by one thread before several have met. PyTorch
    # reads this when it is loaded, and that is not before it is used.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    where = options.device
    if options.engine is not None:
        where = anydevice.device(options.device, engine=options.engine)
    model = network(options.seed)
    print(f"{len(TEXT):,} characters, {len(LETTERS)} of them different.\n{model}\n")

    each = max(1, options.steps // EPOCHS)
    optimizer = nn.AdamW(nn.WarmUp(20, nn.CosineRate(6e-3, steps=EPOCHS * each)), beta2=0.99)
    done = nn.train(
        model,
        Windows(each),
        optimizer,
        nn.cross_entropy,
        epochs=EPOCHS,
        device=where,
        seed=options.seed,
        clip=1.0,
        optimize=options.optimize,
    )
    if done.stopped == "Ctrl-C":
        sys.exit(130)
    losses = ", ".join(f"{loss:.2f}" for loss in done.history.losses)
    print(f"trained on {anydevice.device_of(done.model)}: losses {losses}")
    print(f"a random guess has a loss of {numpy.log(len(LETTERS)):.2f}\n")

    fast = anydevice.compile(done.model, where, optimize=options.optimize)
    written = write(fast, BEGINNING, WRITTEN, options.seed)
    print(written)
    share = known_words(written)
    print(f"\n{share:.0%} of its words are words of the poems")
    return 0 if share > 0.5 else 1


def network(seed: int = 0) -> nn.Model:
    """A decoder: each character attends to those before it."""
    block = nn.TransformerBlock(SIZE, HEADS, hidden=3 * SIZE // 2, causal=True, rope=True)
    return nn.build(
        nn.Embedding(len(LETTERS), SIZE),
        *[block] * LAYERS,
        nn.RMSNorm(SIZE),
        nn.Dense(SIZE, len(LETTERS), bias=False),
        input_shape=CONTEXT,
        seed=seed,
        device="cpu",
    )


class Windows:
    """Random windows of the text, and the same windows shifted by one character.

    They depend only on the seed and the epoch, so that training can be resumed.
    """

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self._letters = numbers(TEXT)

    def __len__(self) -> int:
        return self.batches

    def __call__(self, seed: int, epoch: int) -> Iterator[tuple[Any, Any]]:
        """The batches of an epoch."""
        random = numpy.random.default_rng((seed, epoch))
        for _ in range(self.batches):
            starts = random.integers(0, len(self._letters) - CONTEXT, (BATCH, 1))
            places = starts + numpy.arange(CONTEXT)
            yield self._letters[places], self._letters[places + 1]


def numbers(text: str) -> Any:
    """The id of each character."""
    return numpy.array([LETTERS.index(letter) for letter in text], "int32")


def write(model: Any, beginning: str, count: int, seed: int) -> str:
    """The beginning and `count` more characters, sampled from the model.

    Every call has the same shape, so that the model is compiled once. The padding at the end is
    not seen by the characters before it.
    """
    random = numpy.random.default_rng(seed)
    text = beginning
    for _ in range(count):
        seen = numbers(text[-CONTEXT:])
        filled = numpy.zeros((1, CONTEXT), "int32")
        filled[0, : len(seen)] = seen
        expected = anydevice.to_numpy(model(filled))[0, len(seen) - 1].astype("float64") / BOLDNESS
        chances = numpy.exp(expected - expected.max())
        text += LETTERS[random.choice(len(LETTERS), p=chances / chances.sum())]
    return text


def known_words(written: str) -> float:
    """The share of words that are in the poems, without the last one, which may be incomplete."""
    known = set(re.findall(r"[\w']+", TEXT))
    words = re.findall(r"[\w']+", written)[:-1]
    return sum(word in known for word in words) / len(words)


def arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="such as cpu, cuda:1 or metal")
    parser.add_argument("--engine", help="the array library: torch, jax or mlx")
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--optimize", choices=("none", "default", "aggressive"))
    options = parser.parse_args()
    if options.optimize is None:
        options.optimize = "default" if options.engine == "jax" else "none"
    return options


if __name__ == "__main__":
    sys.exit(main())
