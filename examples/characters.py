"""A small transformer that learns two poems, letter by letter, and then writes in their manner.

    python examples/characters.py [--device cuda:0] [--engine torch] [--optimize default]

A model this small is trained before most compilers have made their code, so nothing is compiled
unless `--optimize default` asks for it, or JAX is asked for, which compiles every op alone if not
all together.

It has never heard of words: it learns from the poems of Lewis Carroll in `data/carroll.txt` which
letter comes next. Exits with 1 where most of the words that it writes are none of theirs.
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
    """Learn and write; the exit code is 0 where it mostly writes words of the text."""
    options = arguments()
    # Matrices as small as these are multiplied by one thread before several have met. PyTorch
    # reads this when it is loaded, and that is not before it is used.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    where = options.device
    if options.engine is not None:
        where = anydevice.device(options.device, engine=options.engine)
    model = network(options.seed)
    print(f"{len(TEXT):,} letters, {len(LETTERS)} of them different.\n{model}\n")

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
    losses = ", ".join(f"{loss:.2f}" for loss in done.history.losses)
    print(f"trained on {anydevice.device_of(done.model)}: losses {losses}")
    print(f"a guess without knowledge would have {numpy.log(len(LETTERS)):.2f}\n")

    fast = anydevice.compile(done.model, where, optimize=options.optimize)
    written = write(fast, BEGINNING, WRITTEN, options.seed)
    print(written)
    share = known_words(written)
    print(f"\n{share:.0%} of its words are words of the poems")
    return 0 if share > 0.5 else 1


def network(seed: int = 0) -> nn.Model:
    """A decoder: each letter sees those before it."""
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
    """Pieces of the text, from random places, and the same one letter further on.

    The places follow from the seed and the epoch, so that training can be resumed.
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
    """The place of each letter in the alphabet of the poems."""
    return numpy.array([LETTERS.index(letter) for letter in text], "int32")


def write(model: Any, beginning: str, count: int, seed: int) -> str:
    """The beginning, and so many letters after it, each drawn by what the model expects.

    Every call has the same shape, so that code is compiled once: what is not written yet is filled
    up with anything, which no letter before it can see.
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
    """The share of words that the poems have too; the last one may be cut off, and is left out."""
    known = set(re.findall(r"[\w']+", TEXT))
    words = re.findall(r"[\w']+", written)[:-1]
    return sum(word in known for word in words) / len(words)


def arguments() -> argparse.Namespace:
    """What the command line says."""
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
