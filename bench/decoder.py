"""The decoder written in ops against the same one written by hand, in one run, both compiled.

    PYTHONPATH=src python bench/decoder.py [--engines torch,jax,mlx] [--quick]

For each library: reading a text of many tokens, and one token with a cache. Each figure is the
median of several, both sides in turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1]))

import decoders_by_hand

from anydevice import device
from anydevice._core.trees import mapped
from anydevice._llm import decoder
from anydevice._llm.description import describe
from anydevice._machine.engines import registry
from anydevice._plan.config import as_config
from tests.llm.random_weights import random_parameters

DECODER = describe(
    as_config(
        {"model_type": "llama", "vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 2}
        | {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1408}
    )
)
KEYS = 512
BAR = 0.95

Row = tuple[str, float, float, bool]
Step = Callable[[], Any]


def in_turn(by_hand: Step, ours: Step, finish: Callable[[Any], None], runs: int) -> list[float]:
    """The median seconds of each, taken alternately after two unmeasured runs of both."""
    times: list[list[float]] = [[], []]
    for turn in range(runs + 2):
        for call, kept in zip((by_hand, ours), times, strict=True):
            began = time.perf_counter()
            finish(call())
            if turn > 1:
                kept.append(time.perf_counter() - began)
    return [statistics.median(kept) for kept in times]


class Cached:
    """One token after the other through a cache that the step takes and gives back."""

    def __init__(self, forward: Callable[..., Any], cache: Any, *arguments: Any) -> None:
        self.forward, self.cache, self.arguments = forward, cache, arguments

    def __call__(self) -> Any:
        cache, self.cache = self.cache, None
        logits, self.cache = self.forward(*self.arguments, cache)
        return logits


def rows_of(name: str, tokens: int, runs: int) -> list[Row]:
    engine = registry.load(name)
    place = engine.devices()[0]
    compiler = engine.compiler

    def put(tree: Any) -> Any:
        return mapped(lambda x: engine.place(x, place), tree)

    def forward(parameters: Any, ids: Any, start: Any, count: Any, cache: Any) -> Any:
        hidden, cache = decoder.forward(DECODER, parameters, ids, start, count, cache)
        return decoder.logits(DECODER, parameters, hidden), cache

    def finish(result: Any) -> None:
        engine.finish(result)

    parameters = put(random_parameters(DECODER, 0, device("cpu", engine="numpy")))
    ours = compiler.compile(forward)
    hand = compiler.compile(getattr(decoders_by_hand, name)(DECODER))
    drawn = np.random.default_rng(0)
    ids = put(drawn.integers(0, DECODER.vocabulary, (1, tokens)).astype(np.int32))
    none = put(np.array([0], np.int32)), put(np.array([tokens], np.int32))
    found, expected = (
        engine.to_host(function(parameters, ids, *none, None)[0]) for function in (ours, hand)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
    plain, mine = in_turn(
        lambda: hand(parameters, ids, *none, None)[0],
        lambda: ours(parameters, ids, *none, None)[0],
        finish,
        runs,
    )
    rows = [(f"{name}, {tokens} tokens", plain, mine, plain / mine >= BAR)]
    one, at, count = (put(np.array(x, np.int32)) for x in ([[7]], [KEYS // 2], [1]))
    steps = [
        Cached(
            function,
            decoder.new_cache(DECODER, 1, KEYS, parameters["embedding"]),
            parameters,
            one,
            at,
            count,
        )
        for function in (hand, ours)
    ]
    plain, mine = in_turn(steps[0], steps[1], finish, runs * 4)
    rows.append((f"{name}, one of {KEYS} tokens", plain, mine, plain / mine >= BAR))
    return rows


def main() -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", default="torch,jax,mlx")
    parser.add_argument("--quick", action="store_true", help="fewer tokens, and fewer turns")
    options = parser.parse_args()
    rows: list[Row] = []
    for name in options.engines.split(","):
        rows += rows_of(name, 64 if options.quick else 256, 5 if options.quick else 15)
    for name, plain, mine, right in rows:
        said = f"by hand {plain * 1e3:7.2f} ms, in ops {mine * 1e3:7.2f} ms: {plain / mine:.2f} ×"
        print(f"{'✓' if right else '✗'} {name:<24} {said} (bar {BAR:g})")
    return rows


if __name__ == "__main__":
    main()
