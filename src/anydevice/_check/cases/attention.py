"""Cases of what decoders are made of: rotary positions, attention, its cache, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, nan
from typing import Any

import numpy as np

from anydevice._check import budgets
from anydevice._check.cases.case import (
    EVERYTHING,
    FLOATS,
    LARGE,
    LARGE_KERNELS,
    Call,
    Case,
    Draw,
    Make,
    Row,
    call,
    per_element,
)
from anydevice._check.cases.layers import HEADS, KV_HEADS, SIZE
from anydevice._check.reference import seen_keys

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
LONGROPE: Mapping[str, Any] = {
    "rope_type": "longrope",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "short_factor": [1 + pair / 64 for pair in range(32)],
    "long_factor": [1 + pair**1.2 for pair in range(32)],
}
DYNAMIC: Mapping[str, Any] = {
    "rope_type": "dynamic",
    "factor": 4.0,
    "original_max_position_embeddings": 2048,
}


def _rotate(
    batch: int, heads: int, tokens: int, size: int, *, first: int = 0, **options: Any
) -> Make:
    def make(draw: Draw) -> Call:
        positions = np.arange(first, first + tokens, dtype=np.int32)
        return call(draw.normal(batch, heads, tokens, size), positions, **options)

    return make


_MORE_YARN = {**YARN, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.3}
_EXACT_YARN = {**YARN, "attention_factor": 1.25, "truncate": False}

_LENGTHS = np.array([4096, 4097, 9, 131072], np.int32)


def _of_lengths(scaling: Mapping[str, Any]) -> Make:
    """Texts of which two are longer than the original context, all at near positions."""

    def make(draw: Draw) -> Call:
        positions = draw.integers(0, 300, 4, 5)
        return call(draw.normal(4, 2, 5, 64), positions, scaling=scaling, length=_LENGTHS)

    return make


_FAR = (9999, 10000, 16384, 32768, 65535, 65536, 100003, 131071, 1000003)


def _turned_at(places: tuple[int, ...], **options: Any) -> Make:
    at = np.array(places, np.int32)
    return lambda draw: call(draw.normal(1, 3, len(at), 128), at, **options)


def _rope_of_nan(draw: Draw) -> Call:
    x = draw.normal(1, 2, 3, 8)
    x[0, 0, 1, 2], x[0, 1, 2, 7] = nan, inf
    return call(x, np.array([1, 2, 3], np.int32))


_ROPE = Row(
    "rope",
    (
        Case("17 tokens of 4 heads", _rotate(1, 4, 17, SIZE)),
        Case("17 tokens, interleaved", _rotate(1, 4, 17, SIZE, interleaved=True)),
        Case("one token far on", _rotate(2, 3, 1, 64, first=4095)),
        Case(
            "each text its own positions",
            lambda draw: call(draw.normal(3, 2, 5, 16), draw.integers(0, 300, 3, 5)),
        ),
        Case(
            "each text its own far positions",
            lambda draw: call(draw.normal(9, 2, 5, 64), draw.integers(0, 200000, 9, 5)),
            LARGE_KERNELS,
        ),
        Case("the smallest head", _rotate(1, 1, 3, 2)),
        Case("no tokens", _rotate(1, 2, 0, 8)),
        Case("heads that lie apart", _rotate(2, 3, 5, 64), strided=True),
        Case("Llama 3", _rotate(1, 2, 9, SIZE, first=9000, theta=5e5, scaling=LLAMA3)),
        Case("linear", _rotate(1, 2, 9, 64, scaling={"type": "linear", "factor": 4.0})),
        Case("default", _rotate(1, 2, 9, 64, scaling={"rope_type": "default"})),
        Case("YaRN", _rotate(1, 2, 9, SIZE, first=100, scaling=YARN)),
        Case("YaRN, every key", _rotate(1, 2, 9, 64, theta=1e6, scaling=_MORE_YARN)),
        Case("YaRN, its own factor", _rotate(1, 2, 9, SIZE, interleaved=True, scaling=_EXACT_YARN)),
        Case("LongRoPE", _rotate(1, 2, 9, 64, scaling=LONGROPE)),
        Case("LongRoPE, longer", _rotate(1, 2, 9, 64, first=4095, scaling=LONGROPE)),
        Case("LongRoPE, a length", _rotate(1, 2, 9, 64, scaling=LONGROPE, length=4097), LARGE),
        Case("LongRoPE, just short", _rotate(1, 2, 9, 64, scaling=LONGROPE, length=4096), LARGE),
        Case("LongRoPE, lengths", _of_lengths(LONGROPE)),
        Case(
            "LongRoPE, its own factor",
            _rotate(1, 2, 9, 64, scaling={**LONGROPE, "attention_factor": 1.5}),
            LARGE,
        ),
        Case("dynamic", _rotate(1, 2, 9, 64, scaling=DYNAMIC)),
        Case("dynamic, longer", _rotate(1, 2, 9, 64, first=3000, scaling=DYNAMIC)),
        Case("dynamic, a length", _rotate(1, 2, 9, 64, scaling=DYNAMIC, length=9000), LARGE),
        Case("dynamic, lengths", _of_lengths(DYNAMIC)),
        Case("a length without need", _rotate(1, 2, 9, 64, length=9000), LARGE),
        Case("beyond position 10,000", _turned_at(_FAR)),
        Case("beyond position 10,000, interleaved", _turned_at(_FAR, interleaved=True), LARGE),
        Case("beyond position 10,000, Llama 3", _turned_at(_FAR, theta=5e5, scaling=LLAMA3), LARGE),
        Case("beyond position 10,000, YaRN", _turned_at(_FAR, scaling=YARN), LARGE),
        Case("many tokens of 33 heads", _rotate(2, 33, 300, 64, first=9000), LARGE_KERNELS),
        Case("many tokens, interleaved", _rotate(9, 3, 1031, 32, interleaved=True), LARGE_KERNELS),
        Case("a wide head", _rotate(1, 2, 5, 512), LARGE_KERNELS),
        Case("a head that is no power of two", _rotate(1, 3, 5, 80)),
        Case("a large theta", _rotate(1, 2, 9, 64, first=500, theta=1e7)),
        Case(
            "heads that lie apart, interleaved",
            _rotate(2, 3, 5, 64, interleaved=True),
            strided=True,
        ),
        Case("nan and infinities", _rope_of_nan),
    ),
    budget=budgets.of_rope,
    inside="float32",  # the angles are, whatever is turned by them
    gradient=_rotate(1, 2, 2, 4, first=3),
    gpu={
        "16,384 tokens of 32 heads": _rotate(1, HEADS, 16384, SIZE),
        "one token of 32 heads": _rotate(1, HEADS, 1, SIZE, first=4095),
    },
    cpu={"256 tokens of 32 heads": _rotate(1, HEADS, 256, SIZE)},
    operations=per_element(3),
)


def _attend(
    batch: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    queries: int = 5,
    keys: int = 5,
    size: int = 64,
    *,
    value_size: int | None = None,
    lengths: tuple[int, ...] | None = None,
    mask: tuple[int, ...] | None = None,
    growing: bool = False,
    spread: float = 1.0,
    sinks: float | None = None,
    **options: Any,
) -> Make:
    """`sinks` is the middle of their range; `value_size` is that of values where it is another."""

    def make(draw: Draw) -> Call:
        q = draw.normal(batch, heads, queries, size, spread=spread)
        k = draw.normal(batch, kv_heads, keys, size, spread=spread)
        values = size if value_size is None else value_size
        v = (draw.positive if growing else draw.normal)(batch, kv_heads, keys, values)
        chosen = dict(options)
        if sinks is not None:
            chosen["sinks"] = draw.normal(heads, middle=sinks)
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
    q, k, v = (draw.normal(2, 2, tokens, 8) for tokens in (3, 4, 4))
    return call(q, k, v, mask=mask)


def _hide_keys(make: Make, holding: float = nan) -> Make:
    """Return the call with NaN in the keys and values that no query may see."""

    def drawn(draw: Draw) -> Call:
        made = make(draw)
        q, k, v = made.arguments
        chosen = {name: made.options[name] for name in ("mask", "lengths") if name in made.options}
        seen = seen_keys(q, k, **chosen).any(2)
        grouped = seen.reshape(k.shape[0], k.shape[1], -1, k.shape[2]).any(2)
        k[~grouped], v[~grouped] = holding, holding
        return call(q, k, v, **made.options)

    return drawn


def _far_below(draw: Draw) -> Call:
    """Scores of about -400 for all keys: without taking away the largest, no weight is left."""
    q, k = draw.positive(1, 2, 5, 64), draw.positive(1, 2, 33, 64)
    return call(-8 * q, 8 * k, draw.normal(1, 2, 33, 64), scale=0.1)


def _visible_nan(draw: Draw) -> Call:
    """NaN in a key that the second text sees, and in values of the first.

    No infinities: products that split numbers in two, as GPUs do for float32, make NaN of them.
    """
    made = _attend(2, 4, 2, 3, 9, 32)(draw)
    q, k, v = made.arguments
    k[1, 0, 4], v[0, 1, 5, 7], v[0, 0, 2, 3] = nan, nan, nan
    return call(q, k, v)


def _with_sinks(*sinks: float, **options: Any) -> Make:
    """The same call with just these sinks."""

    def make(draw: Draw) -> Call:
        made = _attend(1, len(sinks), 1, 3, 9, 32, **options)(draw)
        return call(*made.arguments, **{**made.options, "sinks": draw.listed(sinks)})

    return make


def _attention_operations(made: Call) -> int:
    """Two products for each pair of a query and a key that it may see."""
    q, k, v = made.arguments
    queries, keys = q.shape[2], k.shape[2]
    pairs = queries * keys
    if made.options.get("causal"):
        pairs -= queries * (queries - 1) // 2
    return int(2 * q.shape[0] * q.shape[1] * pairs * (q.shape[3] + v.shape[3]))


def _step(batch: int, keys: int) -> Make:
    """One decoding step with a cache that is full."""
    return _attend(batch, HEADS, KV_HEADS, 1, keys, SIZE, lengths=(keys,) * batch, causal=True)


_EXCLUDING = {
    "beyond the lengths": _attend(2, 4, 2, 3, 40, 64, lengths=(7, 33)),
    "beyond the lengths, causal": _attend(2, 4, 2, 3, 40, 64, lengths=(7, 33), causal=True),
    "beyond the lengths, one token": _attend(2, 8, 2, 1, 900, SIZE, lengths=(77, 650), causal=True),
    "beyond the lengths, a window": _attend(
        2, 4, 2, 2, 33, 32, lengths=(9, 30), causal=True, window=4
    ),
    "in padding": _attend(2, 4, 2, 9, 9, 32, mask=(2, 9)),
    "in padding, causal": _attend(2, 4, 2, 9, 9, 32, mask=(2, 9), causal=True),
    "in padding, one token": _attend(2, 4, 2, 1, 33, 64, mask=(2, 33)),
    "where a mask is for all": _attend(2, 4, 2, 6, 9, 32, mask=(2, 1, 1, 9)),
    "where each head has a mask": _attend(2, 4, 4, 2, 9, 32, mask=(2, 4, 2, 9)),
    "beyond the lengths, capped": _attend(2, 4, 2, 3, 40, 64, lengths=(7, 33), soft_cap=5.0),
    "beyond the lengths, with sinks": _attend(
        2, 4, 2, 1, 40, 64, lengths=(7, 33), causal=True, sinks=1.0
    ),
    "in padding, short values": _attend(2, 4, 2, 9, 9, 32, mask=(2, 9), value_size=24),
}
"""Calls in which some keys are excluded from every query."""

_ATTENTION = Row(
    "attention",
    (
        Case("33 tokens, causal, grouped heads", _attend(2, 8, 2, 33, 33, SIZE, causal=True)),
        Case("not causal", _attend(1, 4, 4, 7, 19, 64)),
        Case("one token with a cache", _attend(1, 8, 2, 1, 130, SIZE, lengths=(77,), causal=True)),
        Case(
            "one token with a long cache",
            _attend(2, 8, 2, 1, 2500, SIZE, lengths=(1733, 2500), causal=True),
        ),
        Case(
            "one token with a window",
            _attend(1, 4, 2, 1, 600, 64, lengths=(500,), causal=True, window=100),
        ),
        Case(
            "one token with a long cache, all at once",
            _attend(
                2,
                8,
                2,
                1,
                2500,
                32,
                lengths=(1733, 40),
                causal=True,
                window=700,
                soft_cap=4.0,
                sinks=0.5,
                value_size=24,
            ),
            LARGE_KERNELS,
        ),
        Case("lengths without an order", _attend(2, 4, 2, 3, 9, 32, lengths=(4, 9))),
        Case("heads that lie apart", _attend(2, 4, 2, 7, 7, 64, causal=True), strided=True),
        Case(
            "one token, heads that lie apart",
            _attend(2, 4, 2, 1, 33, 64, lengths=(9, 33), causal=True),
            strided=True,
        ),
        Case(
            "two texts of different length",
            _attend(2, 4, 2, 3, 40, 64, lengths=(7, 40), causal=True),
        ),
        Case("sums that grow", _attend(1, 2, 1, 1, 2049, 64, growing=True, scale=0.01)),
        Case("many keys", _attend(1, 2, 1, 65, 700, 64, causal=True)),
        Case("a window", _attend(1, 4, 2, 20, 33, 32, causal=True, window=5)),
        Case(
            "a window with a cache",
            _attend(2, 4, 2, 2, 33, 32, lengths=(9, 30), causal=True, window=4),
        ),
        Case("padding", _attend(2, 4, 2, 9, 9, 32, mask=(2, 9), causal=True)),
        Case("a mask of its own for each head", _attend(2, 4, 2, 6, 9, 32, mask=(2, 4, 6, 9))),
        Case("a mask for all", _attend(2, 4, 2, 6, 9, 32, mask=(1, 1, 6, 9))),
        Case("a query that sees nothing", _nothing_seen),
        Case("more queries than valid keys", _attend(1, 2, 1, 4, 6, 16, lengths=(2,), causal=True)),
        Case("nothing valid", _attend(2, 2, 1, 1, 6, 16, lengths=(0, 3), causal=True)),
        Case(
            "lengths out of range",
            _attend(3, 4, 2, 1, 33, 32, lengths=(-7, 2**31 - 1, -(2**31)), causal=True),
        ),
        Case(
            "lengths out of range, a window",
            _attend(2, 4, 2, 5, 9, 32, lengths=(2**31 - 1, -1), causal=True, window=4),
        ),
        Case("lengths out of range, no order", _attend(2, 2, 1, 3, 9, 16, lengths=(-1, 99))),
        Case("a window wider than all", _attend(1, 2, 1, 5, 9, 32, causal=True, window=2**40)),
        Case("a scale of zero", _attend(1, 2, 1, 5, 9, 32, causal=True, scale=0)),
        Case("its own scale", _attend(1, 2, 2, 5, 5, 16, scale=0.5)),
        Case("odd head", _attend(1, 3, 1, 5, 7, 40, causal=True)),
        Case("one query, one key", _attend(1, 1, 1, 1, 1, 8, causal=True)),
        Case("259 tokens of 36 heads", _attend(1, 36, 4, 259, 259, 32, causal=True), LARGE_KERNELS),
        Case("67 queries, 5,003 keys", _attend(1, 4, 2, 67, 5003, 32, causal=True), LARGE_KERNELS),
        Case("1,031 queries", _attend(1, 1, 1, 1031, 1031, 16, causal=True), LARGE),
        Case("70 heads", _attend(1, 70, 70, 3, 5, 16, causal=True), LARGE_KERNELS),
        Case("300 queries, not causal", _attend(1, 3, 3, 300, 517, 32), LARGE),
        Case(
            "one token of 40 heads, 3,001 keys",
            _attend(1, 40, 5, 1, 3001, 64, lengths=(2999,), causal=True),
            LARGE_KERNELS,
        ),
        Case(
            "40,009 keys",
            _attend(1, 2, 1, 1, 40009, 64, lengths=(40001,), causal=True),
            LARGE_KERNELS,
        ),
        Case("70,001 keys", _attend(1, 1, 1, 2, 70001, 16), LARGE),
        Case(
            "33 texts",
            _attend(33, 4, 2, 1, 65, 64, lengths=tuple(range(2, 68, 2)), causal=True),
            LARGE_KERNELS,
        ),
        Case("300 texts", _attend(300, 2, 2, 3, 5, 16, causal=True), LARGE),
        Case("a wide head", _attend(1, 2, 1, 5, 33, 256, causal=True), LARGE_KERNELS),
        Case("a long mask", _attend(2, 4, 2, 70, 517, 32, mask=(2, 1, 70, 517)), LARGE),
        Case(
            "all at once",
            _attend(
                2, 4, 2, 7, 77, 32, lengths=(70, 33), mask=(2, 77), causal=True, window=9, scale=0.3
            ),
            LARGE_KERNELS,
        ),
        Case("a wide window", _attend(1, 2, 1, 130, 700, 32, causal=True, window=300), LARGE),
        Case("large scores", _attend(1, 4, 2, 7, 33, 64, spread=8.0, causal=True), LARGE_KERNELS),
        Case(
            "large scores of one token",
            _attend(1, 4, 2, 1, 333, 64, spread=8.0, lengths=(300,), causal=True),
            LARGE_KERNELS,
        ),
        Case("scores far below zero", _far_below, LARGE_KERNELS),
        Case("nan that is seen", _visible_nan, LARGE_KERNELS),
        *(
            Case(f"nan {place}", _hide_keys(make), LARGE_KERNELS)
            for place, make in _EXCLUDING.items()
        ),
        Case("infinity in padding", _hide_keys(_EXCLUDING["in padding"], inf), LARGE_KERNELS),
        Case("a soft cap", _attend(2, 4, 2, 9, 9, 32, causal=True, soft_cap=2.0, spread=2.0)),
        Case(
            "a soft cap, one token",
            _attend(2, 8, 2, 1, 130, 64, lengths=(77, 130), causal=True, soft_cap=50.0, scale=0.5),
        ),
        Case(
            "a soft cap, large scores, padding",
            _attend(2, 4, 2, 6, 9, 32, mask=(2, 9), soft_cap=30.0, spread=8.0),
        ),
        Case(
            "a soft cap, a window",
            _attend(1, 4, 2, 7, 40, 64, causal=True, window=5, soft_cap=3),
            LARGE_KERNELS,
        ),
        Case("sinks", _attend(2, 6, 2, 5, 5, 64, causal=True, sinks=0.0)),
        Case(
            "sinks, one token with a window",
            _attend(2, 8, 2, 1, 200, 64, lengths=(150, 33), causal=True, window=20, sinks=2.0),
        ),
        Case("sinks for one head each", _attend(1, 4, 4, 7, 19, 32, sinks=-1.0)),
        Case("sinks, padding", _attend(2, 4, 2, 6, 9, 32, mask=(2, 4, 6, 9), sinks=0.0)),
        Case("sinks beside nothing valid", _attend(2, 2, 1, 1, 6, 16, lengths=(0, 3), sinks=1.0)),
        Case("large sinks", _with_sinks(40.0, -40.0, 9.0, -9.0)),
        Case("sinks without weight", _with_sinks(-inf, 0.0, -inf, 1.0, lengths=(0,))),
        Case("sinks of nan", _with_sinks(nan, 0.0, 1.0, nan), LARGE_KERNELS),
        Case("sinks of 40 heads", _attend(1, 40, 8, 3, 17, 32, causal=True, sinks=1.0), LARGE),
        Case("short values", _attend(2, 4, 2, 7, 9, 48, causal=True, value_size=32)),
        Case("short values, not causal", _attend(1, 4, 4, 7, 19, 48, value_size=32)),
        Case("as many queries as keys, short values", _attend(1, 4, 1, 9, 9, 48, value_size=32)),
        Case(
            "short values, one token",
            _attend(2, 8, 8, 1, 130, 96, lengths=(77, 130), causal=True, value_size=64),
        ),
        Case("long values", _attend(2, 4, 2, 5, 9, 16, mask=(2, 9), causal=True, value_size=40)),
        Case("values of one number", _attend(1, 2, 1, 3, 9, 16, value_size=1)),
        Case("values of none", _attend(1, 2, 1, 3, 9, 16, value_size=0)),
        Case(
            "a soft cap, sinks and short values",
            _attend(
                2,
                4,
                2,
                5,
                33,
                48,
                lengths=(9, 30),
                mask=(2, 33),
                causal=True,
                window=12,
                soft_cap=4.0,
                sinks=0.5,
                value_size=24,
            ),
        ),
    ),
    budget=budgets.of_attention,
    gradient=_attend(1, 2, 1, 3, 3, 4, causal=True),
    gpu={
        "4,096 tokens": _attend(1, HEADS, KV_HEADS, 4096, 4096, SIZE, causal=True),
        "16,384 tokens": _attend(1, HEADS, KV_HEADS, 16384, 16384, SIZE, causal=True),
        "decoding 1 × 4,096": _step(1, 4096),
        "decoding 1 × 32,768": _step(1, 32768),
        "decoding 16 × 4,096": _step(16, 4096),
    },
    cpu={
        "256 tokens": _attend(1, HEADS, KV_HEADS, 256, 256, SIZE, causal=True),
        "decoding 1 × 1,024": _step(1, 1024),
    },
    operations=_attention_operations,
)


def _cache_write(
    batch: int, heads: int, keys: int, size: int, tokens: int, positions: Any = None
) -> Make:
    def make(draw: Draw) -> Call:
        cache, new = (draw.digits(batch, heads, count, size) for count in (keys, tokens))
        at = np.arange(tokens) + 1 if positions is None else np.array(positions)
        return call(cache, new, at.astype(np.int32))

    return make


def _special_write(draw: Draw) -> Call:
    cache = draw.special(2.0, 3.0, 4.0).reshape(1, 2, 3, 2)
    return call(cache, cache[:, ::-1, 1:2], np.array([2], np.int32))


_CACHE_WRITE = Row(
    "cache_write",
    (
        Case("five tokens", _cache_write(2, 3, 33, 16, 5)),
        Case("one token", _cache_write(1, 8, 130, SIZE, 1, [77])),
        Case("each text its own place", _cache_write(2, 2, 9, 8, 2, [[1, 7], [0, 3]])),
        Case("the first and the last", _cache_write(1, 2, 9, 8, 2, [0, 8])),
        Case("out of range", _cache_write(2, 2, 9, 8, 3, [[-1, 2, 9], [8, 100, -9]])),
        Case("no tokens", _cache_write(1, 2, 9, 8, 0)),
        Case("beyond place 65,535", _cache_write(1, 2, 70001, 4, 3, [65536, 70000, 65535]), LARGE),
        Case("far out of range", _cache_write(1, 2, 9, 8, 4, [2**31 - 1, 65536, -(2**31), 3])),
        Case("many tokens", _cache_write(2, 33, 517, 32, 259), LARGE),
        Case("33 texts", _cache_write(33, 2, 65, 8, 1, [[2 * text] for text in range(33)]), LARGE),
        Case("heads that lie apart", _cache_write(2, 3, 33, 16, 5), strided=True),
        Case("nan and infinities", _special_write, FLOATS),
    ),
    dtypes=EVERYTHING,
    signs=True,
    gpu={"one token": _cache_write(1, KV_HEADS, 4096, SIZE, 1, [4095])},
    cpu={"one token": _cache_write(1, KV_HEADS, 1024, SIZE, 1, [1023])},
    moved=lambda made, result_bytes: 2 * int(made.arguments[1].nbytes),
    operations=lambda made: 0,
)

# Experts


def _mix(
    tokens: int,
    k: int,
    count: int,
    hidden: int = 32,
    inner: int = 24,
    *,
    biased: bool = False,
    spread: float = 1.0,
    chosen: Any = None,
    **options: Any,
) -> Make:
    """`k` of `count` experts for each token; `chosen` are just those."""

    def make(draw: Draw) -> Call:
        x = draw.normal(tokens, hidden, spread=spread)
        gate_up = draw.normal(count, 2 * inner, hidden, spread=hidden**-0.5)
        down = draw.normal(count, hidden, inner, spread=inner**-0.5)
        numbers = draw.integers(0, count, tokens, k)
        if chosen is not None:
            numbers = np.broadcast_to(np.array(chosen, np.int32), (tokens, k)).copy()
        given = dict(options)
        if biased:
            given["gate_up_bias"] = draw.normal(count, 2 * inner)
            given["down_bias"] = draw.normal(count, hidden)
        return call(x, gate_up, down, numbers, draw.normal(tokens, k), **given)

    return make


def _nan_of_its_own(draw: Draw) -> Call:
    """NaN and infinity in one token, in one weight, and in the expert that one token chose."""
    x, gate_up, down, _, weights = _mix(9, 2, 5)(draw).arguments
    chosen = np.array([[0, 1]] * 7 + [[3, 2], [2, 0]], np.int32)
    x[1, 3], x[2, 0], weights[4, 1] = nan, inf, nan
    down[3, 7, 5] = nan
    return call(x, gate_up, down, chosen, weights)


def _nan_not_chosen(choices: Any, count: int) -> Make:
    """Put NaN into experts that are not chosen, and into the weights of ids out of range."""

    def make(draw: Draw) -> Call:
        chosen = np.array(choices, np.int32)
        tokens, k = chosen.shape
        made = _mix(tokens, k, count, biased=True, chosen=choices)(draw)
        *stacks, weights = (made.arguments[at] for at in (1, 2, 4))
        for stack in (*stacks, made.options["gate_up_bias"], made.options["down_bias"]):
            stack[np.setdiff1d(np.arange(count), chosen)] = nan
        weights[(chosen < 0) | (chosen >= count)] = nan
        return made

    return make


def _expert_operations(made: Call) -> int:
    """Three products of a vector for each choice."""
    _, _, down, chosen, _ = made.arguments
    return int(6 * np.prod(chosen.shape) * down.shape[1] * down.shape[2])


def _expert_bytes(made: Call, result_bytes: int) -> int:
    """Each expert that can be chosen is read once."""
    x, gate_up, down, chosen, weights = made.arguments
    used = min(int(np.prod(chosen.shape)), len(down))
    matrices = (gate_up.nbytes + down.nbytes) // len(down) * used
    return int(x.nbytes + chosen.nbytes + weights.nbytes + matrices + result_bytes)


_CLIPPED: dict[str, Any] = {"activation": "clipped_swiglu"}

_EXPERTS = Row(
    "experts",
    (
        Case("9 tokens, 2 of 4", _mix(9, 2, 4)),
        Case("one token, 2 of 8", _mix(1, 2, 8)),
        Case("one token, biases", _mix(1, 4, 8, biased=True)),
        Case("3 tokens, 2 of 16", _mix(3, 2, 16)),
        Case("67 tokens, 3 of 5, biases", _mix(67, 3, 5, biased=True)),
        Case("40 tokens, 8 of 64", _mix(40, 8, 64, 16, 8), LARGE),
        Case("clipped", _mix(9, 2, 4, biased=True, spread=4.0, **_CLIPPED)),
        Case("clipped, one token", _mix(1, 4, 8, biased=True, spread=4.0, **_CLIPPED)),
        Case("another limit", _mix(9, 2, 4, spread=4.0, alpha=1.3, limit=2, **_CLIPPED), LARGE),
        Case("gelu", _mix(9, 2, 4, activation="geglu"), LARGE),
        Case("gelu, one token", _mix(1, 2, 4, activation="geglu", spread=4.0)),
        Case("gelu by tanh", _mix(9, 2, 4, activation="geglu_tanh"), LARGE),
        Case("gelu by tanh, one token", _mix(1, 2, 4, activation="geglu_tanh", spread=4.0)),
        Case("one of one", _mix(5, 1, 1), LARGE),
        Case("all of them", _mix(5, 4, 4, chosen=[3, 0, 2, 1]), LARGE),
        Case("all tokens choose one", _mix(33, 1, 7, chosen=[[5]]), LARGE),
        Case("an expert twice", _mix(5, 3, 4, chosen=[[2, 2, 0]]), LARGE),
        Case("an expert twice, one token", _mix(1, 3, 4, chosen=[[2, 2, 0]]), LARGE),
        Case("none for some", _mix(4, 2, 3, chosen=[[-1, 1], [2, -1], [-1, -1], [0, 0]])),
        Case("none for one token", _mix(1, 3, 4, chosen=[[-1, 2, -1]]), LARGE),
        Case("none at all", _mix(5, 2, 3, chosen=[[-1, -1]]), LARGE),
        Case("out of range", _mix(4, 2, 3, chosen=[[3, 1], [2, 2**31 - 1], [-(2**31), 0], [1, 9]])),
        Case("out of range, few", _mix(2, 2, 6, chosen=[[6, 1], [2**31 - 1, -(2**31)]]), LARGE),
        Case("no tokens", _mix(0, 2, 3), LARGE),
        Case("no choices", _mix(3, 0, 3), LARGE),
        Case("one number each", _mix(3, 2, 3, 1, 1), LARGE),
        Case("matrices that lie apart", _mix(9, 2, 4, biased=True), strided=True),
        Case("one token, matrices that lie apart", _mix(1, 2, 8), strided=True),
        Case("odd widths", _mix(5, 2, 3, 1031, 517), LARGE),
        Case("one token, wide", _mix(1, 2, 4, 1031, 517), LARGE),
        Case("1,031 tokens, 4 of 16", _mix(1031, 4, 16), LARGE),
        Case("259 tokens, 2 of 300", _mix(259, 2, 300, 16, 8), LARGE),
        Case("nan of its own", _nan_of_its_own),
        Case(
            "nan that was not chosen", _nan_not_chosen([[0, 3], [3, -1], [0, 0]], 5), LARGE_KERNELS
        ),
        Case("nan that was not chosen, few", _nan_not_chosen([[0, 3], [3, -1]], 9), LARGE_KERNELS),
    ),
    budget=budgets.of_experts,
    gradient=_mix(3, 2, 3, 4, 3, biased=True),
    gpu={
        "one token, 8 of 128": _mix(1, 8, 128, 2048, 768),
        "4,096 tokens, 8 of 128": _mix(4096, 8, 128, 2048, 768),
    },
    cpu={
        "one token, 2 of 8": _mix(1, 2, 8, 1024, 512),
        "256 tokens, 2 of 8": _mix(256, 2, 8, 1024, 512),
    },
    moved=_expert_bytes,
    operations=_expert_operations,
)

ATTENTION: tuple[Row, ...] = (_ROPE, _ATTENTION, _CACHE_WRITE, _EXPERTS)
