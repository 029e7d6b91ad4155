"""Cases of attention, its positions and its cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from anydevice.check import budgets
from anydevice.check.cases_layers import HEADS, KV_HEADS, SIZE
from anydevice.check.drawing import Call, Draw, call
from anydevice.check.rows import EVERYTHING, Benchmark, Case, Make, Row, per_element

LLAMA3: Mapping[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
}


def _turned(
    batch: int, heads: int, tokens: int, size: int, *, first: int = 0, **options: Any
) -> Make:
    def make(draw: Draw) -> Call:
        positions = np.arange(first, first + tokens, dtype=np.int32)
        return call(draw.normal(batch, heads, tokens, size), positions, **options)

    return make


def _each_its_own(draw: Draw) -> Call:
    return call(draw.normal(3, 2, 5, 16), draw.whole(0, 300, 3, 5))


_MORE_YARN = {**YARN, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.3}
_EXACT_YARN = {**YARN, "attention_factor": 1.25, "truncate": False}

_ROPE = Row(
    "rope",
    (
        Case("17 tokens of 4 heads", _turned(1, 4, 17, SIZE)),
        Case("17 tokens, interleaved", _turned(1, 4, 17, SIZE, interleaved=True)),
        Case("one token far on", _turned(2, 3, 1, 64, first=4095)),
        Case("each text its own positions", _each_its_own),
        Case("the smallest head", _turned(1, 1, 3, 2)),
        Case("no tokens", _turned(1, 2, 0, 8)),
        Case("heads that lie apart", _turned(2, 3, 5, 64), strided=True),
        Case("Llama 3", _turned(1, 2, 9, SIZE, first=9000, theta=5e5, scaling=LLAMA3)),
        Case("linear", _turned(1, 2, 9, 64, scaling={"type": "linear", "factor": 4.0})),
        Case("default", _turned(1, 2, 9, 64, scaling={"rope_type": "default"})),
        Case("YaRN", _turned(1, 2, 9, SIZE, first=100, scaling=YARN)),
        Case("YaRN, every key", _turned(1, 2, 9, 64, theta=1e6, scaling=_MORE_YARN)),
        Case(
            "YaRN, its own factor",
            _turned(1, 2, 9, SIZE, interleaved=True, scaling=_EXACT_YARN),
        ),
    ),
    budget=budgets.of_rope,
    inside="float32",  # the angles are, whatever is turned by them
    gradient=_turned(1, 2, 2, 4, first=3),
    benchmarks=(
        Benchmark("16,384 tokens of 32 heads", "gpu", _turned(1, HEADS, 16384, SIZE)),
        Benchmark("one token of 32 heads", "gpu", _turned(1, HEADS, 1, SIZE, first=4095)),
        Benchmark("256 tokens of 32 heads", "cpu", _turned(1, HEADS, 256, SIZE)),
    ),
    operations=per_element(3),
)


def _seen(
    batch: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    queries: int = 5,
    keys: int = 5,
    size: int = 64,
    *,
    lengths: tuple[int, ...] | None = None,
    mask: tuple[int, ...] | None = None,
    growing: bool = False,
    **options: Any,
) -> Make:
    def make(draw: Draw) -> Call:
        q = draw.normal(batch, heads, queries, size)
        k = draw.normal(batch, kv_heads, keys, size)
        v = (draw.positive if growing else draw.normal)(batch, kv_heads, keys, size)
        chosen = dict(options)
        if lengths is not None:
            chosen["lengths"] = np.array(lengths, np.int32)
        if mask is not None:
            chosen["mask"] = draw.chance(*mask, of=0.7)
        return call(q, k, v, **chosen)

    return make


def _nothing_seen(draw: Draw) -> Call:
    mask = np.ones((2, 1, 3, 4), bool)
    mask[0, 0, 1] = False
    mask[1] = False
    return call(
        draw.normal(2, 2, 3, 8), draw.normal(2, 2, 4, 8), draw.normal(2, 2, 4, 8), mask=mask
    )


def _attended(made: Call) -> int:
    """Two products for each pair of a query and a key that it may see."""
    q, k, v = made.arguments
    queries, keys = q.shape[2], k.shape[2]
    pairs = queries * keys
    if made.options.get("causal"):
        pairs -= queries * (queries - 1) // 2
    return int(2 * q.shape[0] * q.shape[1] * pairs * (q.shape[3] + v.shape[3]))


def _step(batch: int, keys: int) -> Make:
    """One decoding step with a cache that is full."""
    return _seen(batch, HEADS, KV_HEADS, 1, keys, SIZE, lengths=(keys,) * batch, causal=True)


_ATTENTION = Row(
    "attention",
    (
        Case("33 tokens, causal, grouped heads", _seen(2, 8, 2, 33, 33, SIZE, causal=True)),
        Case("not causal", _seen(1, 4, 4, 7, 19, 64)),
        Case("one token with a cache", _seen(1, 8, 2, 1, 130, SIZE, lengths=(77,), causal=True)),
        Case(
            "one token with a long cache",
            _seen(2, 8, 2, 1, 2500, SIZE, lengths=(1733, 2500), causal=True),
        ),
        Case(
            "one token with a window",
            _seen(1, 4, 2, 1, 600, 64, lengths=(500,), causal=True, window=100),
        ),
        Case("lengths without an order", _seen(2, 4, 2, 3, 9, 32, lengths=(4, 9))),
        Case("heads that lie apart", _seen(2, 4, 2, 7, 7, 64, causal=True), strided=True),
        Case(
            "one token, heads that lie apart",
            _seen(2, 4, 2, 1, 33, 64, lengths=(9, 33), causal=True),
            strided=True,
        ),
        Case(
            "two texts of different length",
            _seen(2, 4, 2, 3, 40, 64, lengths=(7, 40), causal=True),
        ),
        Case("sums that grow", _seen(1, 2, 1, 1, 2049, 64, growing=True, scale=0.01)),
        Case("many keys", _seen(1, 2, 1, 65, 700, 64, causal=True)),
        Case("a window", _seen(1, 4, 2, 20, 33, 32, causal=True, window=5)),
        Case(
            "a window with a cache",
            _seen(2, 4, 2, 2, 33, 32, lengths=(9, 30), causal=True, window=4),
        ),
        Case("padding", _seen(2, 4, 2, 9, 9, 32, mask=(2, 9), causal=True)),
        Case("a mask of its own for each head", _seen(2, 4, 2, 6, 9, 32, mask=(2, 4, 6, 9))),
        Case("a mask for all", _seen(2, 4, 2, 6, 9, 32, mask=(1, 1, 6, 9))),
        Case("a query that sees nothing", _nothing_seen),
        Case("more queries than valid keys", _seen(1, 2, 1, 4, 6, 16, lengths=(2,), causal=True)),
        Case("nothing valid", _seen(2, 2, 1, 1, 6, 16, lengths=(0, 3), causal=True)),
        Case(
            "lengths out of range",
            _seen(3, 4, 2, 1, 33, 32, lengths=(-7, 2**31 - 1, -(2**31)), causal=True),
        ),
        Case(
            "lengths out of range, a window",
            _seen(2, 4, 2, 5, 9, 32, lengths=(2**31 - 1, -1), causal=True, window=4),
        ),
        Case("lengths out of range, no order", _seen(2, 2, 1, 3, 9, 16, lengths=(-1, 99))),
        Case("a window wider than all", _seen(1, 2, 1, 5, 9, 32, causal=True, window=2**40)),
        Case("a scale of zero", _seen(1, 2, 1, 5, 9, 32, causal=True, scale=0)),
        Case("its own scale", _seen(1, 2, 2, 5, 5, 16, scale=0.5)),
        Case("odd head", _seen(1, 3, 1, 5, 7, 40, causal=True)),
        Case("one query, one key", _seen(1, 1, 1, 1, 1, 8, causal=True)),
    ),
    budget=budgets.of_attention,
    gradient=_seen(1, 2, 1, 3, 3, 4, causal=True),
    benchmarks=(
        Benchmark("4,096 tokens", "gpu", _seen(1, HEADS, KV_HEADS, 4096, 4096, SIZE, causal=True)),
        Benchmark(
            "16,384 tokens", "gpu", _seen(1, HEADS, KV_HEADS, 16384, 16384, SIZE, causal=True)
        ),
        Benchmark("decoding 1 × 4,096", "gpu", _step(1, 4096)),
        Benchmark("decoding 1 × 32,768", "gpu", _step(1, 32768)),
        Benchmark("decoding 16 × 4,096", "gpu", _step(16, 4096)),
        Benchmark("256 tokens", "cpu", _seen(1, HEADS, KV_HEADS, 256, 256, SIZE, causal=True)),
        Benchmark("decoding 1 × 1,024", "cpu", _step(1, 1024)),
    ),
    operations=_attended,
)


def _written(
    batch: int, heads: int, keys: int, size: int, tokens: int, positions: Any = None
) -> Make:
    def make(draw: Draw) -> Call:
        at = np.arange(tokens) + 1 if positions is None else np.array(positions)
        return call(
            draw.normal(batch, heads, keys, size),
            draw.normal(batch, heads, tokens, size),
            at.astype(np.int32),
        )

    return make


def _only_what_is_new(made: Call, result_bytes: int) -> int:
    return 2 * int(made.arguments[1].nbytes)


_CACHE_WRITE = Row(
    "cache_write",
    (
        Case("five tokens", _written(2, 3, 33, 16, 5)),
        Case("one token", _written(1, 8, 130, SIZE, 1, [77])),
        Case("each text its own place", _written(2, 2, 9, 8, 2, [[1, 7], [0, 3]])),
        Case("the first and the last", _written(1, 2, 9, 8, 2, [0, 8])),
        Case("out of range", _written(2, 2, 9, 8, 3, [[-1, 2, 9], [8, 100, -9]])),
        Case("no tokens", _written(1, 2, 9, 8, 0)),
    ),
    dtypes=EVERYTHING,
    benchmarks=(
        Benchmark("one token", "gpu", _written(1, KV_HEADS, 4096, SIZE, 1, [4095])),
        Benchmark("one token", "cpu", _written(1, KV_HEADS, 1024, SIZE, 1, [1023])),
    ),
    moved=_only_what_is_new,
    operations=lambda made: 0,
)

ATTENTION: tuple[Row, ...] = (_ROPE, _ATTENTION, _CACHE_WRITE)
