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

import decoders_by_hand

from anydevice.check import decoder
from anydevice.check.decoder import DecoderShape
from anydevice.core.trees import mapped
from anydevice.engines import registry

SHAPE = DecoderShape(
    vocabulary=4096, hidden=512, layers=2, heads=8, kv_heads=4, size=64, intermediate=1408
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
    device = engine.devices()[0]
    compiler = engine.compiler

    def put(tree: Any) -> Any:
        return mapped(lambda x: engine.place(x, device), tree)

    def forward(parameters: Any, ids: Any, positions: Any, cache: Any) -> Any:
        return decoder.forward(parameters, SHAPE, ids, positions, cache)

    def finish(result: Any) -> None:
        engine.finish(result)

    parameters = put(decoder.random_parameters(SHAPE))
    ours = compiler.compile(forward)
    hand = compiler.compile(getattr(decoders_by_hand, name)(SHAPE))
    drawn = np.random.default_rng(0)
    ids = put(drawn.integers(0, SHAPE.vocabulary, (1, tokens)).astype(np.int32))
    places = put(np.arange(tokens, dtype=np.int32))
    found, expected = (
        engine.to_host(function(parameters, ids, places, None)[0]) for function in (ours, hand)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
    plain, mine = in_turn(
        lambda: hand(parameters, ids, places, None)[0],
        lambda: ours(parameters, ids, places, None)[0],
        finish,
        runs,
    )
    rows = [(f"{name}, {tokens} tokens", plain, mine, plain / mine >= BAR)]
    one, at = put(np.array([[7]], np.int32)), put(np.array([KEYS // 2], np.int32))
    steps = [
        Cached(
            function,
            decoder.empty_cache(SHAPE, 1, KEYS, parameters["embedding"]),
            parameters,
            one,
            at,
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
