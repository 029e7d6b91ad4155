"""Cases of the parts of decoders: rotary positions, attention, its cache, experts, fused layers.

Fused layers, logits and draws are no ops, but an engine may have kernels for them. These are used
only after a check (`_engines/trust.py`), like the kernels of ops. An engine without the kernel, or
whose kernel does not take a case, is unsupported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, nan
from typing import Any

import numpy as np

from anydevice._check import budgets, reference
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
    index,
    per_element,
    planted,
    size_of,
)
from anydevice._check.cases.layers import HEADS, KV_HEADS, SIZE
from anydevice._check.cases.quantized import draw_weight
from anydevice._core.engine import LayerConfig
from anydevice._core.quantized import QuantizedWeight
from anydevice._core.record import NOTHING, replace
from anydevice._ops.dispatch import own_version
from anydevice.errors import UnsupportedError

Array = np.ndarray[Any, Any]

ROUNDINGS = 6.0
"""Error allowed in a fused layer: roundings to 16 bits of a usual element."""
EIGHT_BITS = 2.0**18
"""Error units, as `coarse`, if inputs are rounded to int8 in blocks."""

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
    """Draw four texts, two longer than the original context, all at near positions."""

    def make(draw: Draw) -> Call:
        positions = draw.integers(0, 300, 4, 5)
        return call(draw.normal(4, 2, 5, 64), positions, scaling=scaling, length=_LENGTHS)

    return make


_FAR = (9999, 10000, 16384, 32768, 65535, 65536, 100003, 131071, 1000003)


def _turned_at(places: tuple[int, ...], **options: Any) -> Make:
    at = np.array(places, np.int32)
    return lambda draw: call(draw.normal(1, 3, len(at), 128), at, **options)


_OF_NAN: Mapping[tuple[int, ...], float] = {(0, 0, 1, 2): nan, (0, 1, 2, 7): inf}
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
        Case("nan and infinities", planted((1, 2, 3, 8), _OF_NAN, np.array([1, 2, 3], np.int32))),
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
    """Draw a call of attention; `sinks` is their mean, and `value_size` is `size` by default."""

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
    """Put `holding` into the keys and values that no query may see."""

    def drawn(draw: Draw) -> Call:
        made = make(draw)
        q, k, v = made.arguments
        chosen = {name: made.options[name] for name in ("mask", "lengths") if name in made.options}
        visible = reference.seen_keys(q, k, **chosen).any(2)
        grouped = visible.reshape(k.shape[0], k.shape[1], -1, k.shape[2]).any(2)
        k[~grouped], v[~grouped] = holding, holding
        return call(q, k, v, **made.options)

    return drawn


def _far_below(draw: Draw) -> Call:
    """Draw scores of about -400: their exponentials are 0 unless the largest is subtracted."""
    q, k = draw.positive(1, 2, 5, 64), draw.positive(1, 2, 33, 64)
    return call(-8 * q, 8 * k, draw.normal(1, 2, 33, 64), scale=0.1)


def _visible_nan(draw: Draw) -> Call:
    """Put NaN into a key that the second text sees, and into values of the first.

    No infinities: products that split numbers in two, as GPUs do for float32, make NaN of them.
    """
    made = _attend(2, 4, 2, 3, 9, 32)(draw)
    q, k, v = made.arguments
    k[1, 0, 4], v[0, 1, 5, 7], v[0, 0, 2, 3] = nan, nan, nan
    return call(q, k, v)


def _with_sinks(*sinks: float, **options: Any) -> Make:
    """Draw a call with these sinks, one for each head."""

    def make(draw: Draw) -> Call:
        made = _attend(1, len(sinks), 1, 3, 9, 32, **options)(draw)
        return call(*made.arguments, **{**made.options, "sinks": draw.listed(sinks)})

    return make


def _attention_operations(made: Call) -> int:
    """Count two products for each pair of a query and a visible key."""
    q, k, v = made.arguments
    queries, keys = q.shape[2], k.shape[2]
    pairs = queries * keys
    if made.options.get("causal"):
        pairs -= queries * (queries - 1) // 2
    return int(2 * q.shape[0] * q.shape[1] * pairs * (q.shape[3] + v.shape[3]))


def _step(batch: int, keys: int) -> Make:
    """Draw one decoding step with a full cache."""
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

_EVERY_OPTION: dict[str, Any] = {"causal": True, "soft_cap": 4.0, "sinks": 0.5, "value_size": 24}

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
            _attend(2, 8, 2, 1, 2500, 32, lengths=(1733, 40), window=700, **_EVERY_OPTION),
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
        Case("a negative scale", _attend(1, 4, 2, 9, 9, 64, causal=True, scale=-2.0)),
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
            _attend(2, 4, 2, 5, 33, 48, lengths=(9, 30), mask=(2, 33), window=12, **_EVERY_OPTION),
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
    """Draw `k` of `count` experts for each token, unless `chosen` names them."""

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
    """Put NaN or infinity into two tokens, one weight, and the expert that one token chose."""
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


def _expert_bytes(made: Call, result_bytes: int) -> int:
    """Count each expert that can be chosen as read once."""
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
        Case("67 tokens, 3 of 5, biases", _mix(67, 3, 5, biased=True)),
        Case("clipped", _mix(9, 2, 4, biased=True, spread=4.0, **_CLIPPED)),
        Case("clipped, one token", _mix(1, 4, 8, biased=True, spread=4.0, **_CLIPPED)),
        Case("gelu, one token", _mix(1, 2, 4, activation="geglu", spread=4.0)),
        Case("gelu by tanh, one token", _mix(1, 2, 4, activation="geglu_tanh", spread=4.0)),
        Case("all tokens choose one", _mix(33, 1, 7, chosen=[[5]]), LARGE),
        Case("an expert twice", _mix(5, 3, 4, chosen=[[2, 2, 0]]), LARGE),
        Case("an expert twice, one token", _mix(1, 3, 4, chosen=[[2, 2, 0]]), LARGE),
        Case("none for some", _mix(4, 2, 3, chosen=[[-1, 1], [2, -1], [-1, -1], [0, 0]])),
        Case("out of range", _mix(4, 2, 3, chosen=[[3, 1], [2, 2**31 - 1], [-(2**31), 0], [1, 9]])),
        Case("out of range, few", _mix(2, 2, 6, chosen=[[6, 1], [2**31 - 1, -(2**31)]]), LARGE),
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
    # Three matrix-vector products for each choice.
    operations=lambda made: 6 * size_of(made.arguments[3]) * size_of(made.arguments[2][0]),
)

ATTENTION: tuple[Row, ...] = (_ROPE, _ATTENTION, _CACHE_WRITE, _EXPERTS)


# Fused layers, logits and draws


def _own(name: str) -> Callable[..., Any]:
    """Return a function that calls the engine's kernel, or raises `UnsupportedError`."""

    def run(*arguments: Any) -> Any:
        result = own_version(arguments[0], name, lambda *arguments: NotImplemented)(*arguments)
        if result is NotImplemented:
            raise UnsupportedError(f"there is no kernel for this {name}; use ops for each step")
        return result

    return run


def _rms(x: Array, weight: Array, eps: float) -> Array:
    return reference.call("rmsnorm", x, weight, eps)


def _plain(weight: Any) -> Array:
    """Return the numbers of a weight, which may be quantized and in parts."""
    if isinstance(weight, tuple):
        return np.concatenate([_plain(part) for part in weight])
    if isinstance(weight, QuantizedWeight):
        return np.asarray(reference.call("dequantize", weight))
    return np.asarray(weight)


def _layer_reference(
    x: Array, positions: Array, keys: Array, values: Array, attention_norm: Array, qkv: Array,
    output: Array, mlp_norm: Array, gate_up: Array, down: Array, qkv_bias: Any, output_bias: Any,
    query_norm: Any, key_norm: Any, config: LayerConfig,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Compute one token of each row; a ring of keys is overwritten from its start."""
    qkv, output, gate_up, down = (_plain(weight) for weight in (qkv, output, gate_up, down))
    keys, values = keys.copy(), values.copy()
    rows, heads, kv_heads, slots = len(x), config.heads, config.kv_heads, keys.shape[2]
    stream = x[:, 0]
    y = _rms(stream, attention_norm, config.eps) @ qkv.T + (0 if qkv_bias is None else qkv_bias)
    y = y.reshape(rows, heads + 2 * kv_heads, config.size)
    q, k, v = y[:, :heads], y[:, heads : heads + kv_heads], y[:, heads + kv_heads :]
    if query_norm is not None:
        q, k = _rms(q, query_norm, config.eps), _rms(k, key_norm, config.eps)
    q, k = _rotate_part(q, positions, config), _rotate_part(k, positions, config)
    assert config.ring or (positions < slots).all(), "only a ring goes round"
    keys[np.arange(rows), :, positions % slots] = k
    values[np.arange(rows), :, positions % slots] = v
    lengths = np.minimum(positions + 1, slots)
    options = {"scale": config.scale, "lengths": lengths}
    attended = reference.call("attention", q[:, :, None], keys, values, **options)
    added = attended.reshape(rows, -1) @ output.T + (0 if output_bias is None else output_bias)
    stream = stream + config.factor * added
    gate, up = np.split(_rms(stream, mlp_norm, config.eps) @ gate_up.T, 2, axis=-1)
    added = reference.call("swiglu", gate, up) @ down.T
    return (stream + config.factor * added)[:, None], keys, values


def _rotate_part(x: Array, positions: Array, config: LayerConfig) -> Array:
    """Rotate the first elements of each head, (rows, heads, size)."""
    result = x.copy()
    if config.rotated:
        steps, factor = reference.frequencies(config.rotated, config.theta, dict(config.scaling))
        angles = positions[:, None, None].astype(np.float32) * np.float32(steps)  # as `ops.rope`
        cosine, sine = np.cos(np.float64(angles)) * factor, np.sin(np.float64(angles)) * factor
        first, second = reference.halves(config.rotated, config.interleaved)
        left, right = (x[..., : config.rotated][..., half] for half in (first, second))
        part = result[..., : config.rotated]
        part[..., first] = left * cosine - right * sine
        part[..., second] = right * cosine + left * sine
    return result


def _of_layer(want: Sequence[Array], coarse: float, *arguments: Any) -> list[Array]:
    config = next(value for value in arguments if isinstance(value, LayerConfig))
    return [_of_rows(x, coarse if config.exact else max(coarse, EIGHT_BITS)) for x in want]


def _of_rows(want: Array, coarse: float) -> Array:
    """Return the error of a few roundings to 16 bits of a typical element of the row."""
    return ROUNDINGS * max(coarse, 64.0) * np.sqrt(np.square(want).mean(-1, keepdims=True))


def _layer(
    config: LayerConfig, hidden: int, inner: int, slots: int, positions: tuple[int, ...], *,
    biased: bool = False, normed: bool = False, tokens: int = 1,
    only: tuple[int, ...] | None = None, schemes: Mapping[str, tuple[str, ...]] = NOTHING,
) -> Make:  # fmt: skip
    rows, size = len(positions), config.size
    wide = (config.heads + 2 * config.kv_heads) * size

    def make(draw: Draw) -> Call:
        def matrix(name: str, outputs: int, inputs: int) -> Any:
            if name not in schemes:
                return draw.normal(outputs, inputs, spread=inputs**-0.5)
            first, *others = schemes[name]
            share = outputs // (1 + len(others))
            sizes = outputs - share * len(others), *[share] * len(others)
            parts = zip((first, *others), sizes, strict=True)
            weights = tuple(draw_weight(draw, scheme, rows, inputs) for scheme, rows in parts)
            return weights if others else weights[0]

        def scale(width: int) -> Array:
            return draw.normal(width, spread=0.2, middle=1.0)

        # Queries and keys are large enough that attention picks out a few.
        qkv = matrix("qkv", wide, hidden)
        weights = (
            scale(hidden), qkv, matrix("output", hidden, config.heads * size), scale(hidden),
            matrix("gate_up", 2 * inner, hidden), matrix("down", hidden, inner),
        )  # fmt: skip
        cache = [draw.normal(rows, config.kv_heads, slots, size) for _ in range(2)]
        biases = (draw.normal(wide), draw.normal(hidden)) if biased else (None, None)
        norms = (scale(size), scale(size)) if normed else (None, None)
        rest = () if only is None else (np.array(only, np.int32),)
        at, x = np.array(positions, np.int32), draw.normal(rows, tokens, hidden)
        return call(x, at, *cache, *weights, *biases, *norms, config, *rest)

    return make


def _scale_to(scaling: Mapping[str, Any], context: int) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted({**scaling, "original_max_position_embeddings": context}.items()))


_PLAIN = LayerConfig(4, 2, 64, 1e-5, 64**-0.5, rotated=64)
_BIASED = LayerConfig(
    8, 2, 64, 1e-6, 0.1, rotated=64, theta=500000.0, scaling=_scale_to(LLAMA3, 64)
)
_NORMED = LayerConfig(6, 3, 80, 1e-6, 80**-0.5, rotated=80, scaling=_scale_to(YARN, 32))
_HALF = LayerConfig(4, 1, 96, 1e-5, 96**-0.5, rotated=48, interleaved=True, factor=0.22)
_RING = LayerConfig(4, 4, 128, 1e-5, 128**-0.5, rotated=128, ring=True)
_WIDE = LayerConfig(16, 2, 128, 1e-5, 128**-0.5, rotated=128)
_ODD_SIZES = "norms of heads, sizes that are no power of two"
_SOME_SCHEMES = {
    "qkv": ("q4_k", "q6_k"), "output": ("q8_0",), "gate_up": ("q5_0",), "down": ("q3_k",),
}  # fmt: skip
_OTHER_SCHEMES = {
    "qkv": ("q4_1",), "output": ("q2_k",), "gate_up": ("q8_0",), "down": ("q4_0", "q8_0"),
}  # fmt: skip


DECODER_LAYER = Row(
    "decoder_layer",
    (
        Case("one row, a few keys", _layer(_PLAIN, 256, 320, 40, (3,))),
        Case("three rows of unequal lengths", _layer(_PLAIN, 256, 320, 70, (0, 5, 69))),
        Case(
            "nine rows with biases",
            _layer(_BIASED, 200, 264, 33, (0, 1, 2, 3, 8, 15, 16, 31, 32), biased=True),
        ),
        Case(_ODD_SIZES, _layer(_NORMED, 248, 312, 50, (7, 49), normed=True)),
        Case("half rotated, by neighbours", _layer(_HALF, 256, 256, 20, (6,))),
        Case("a ring that went round", _layer(_RING, 256, 320, 24, (5, 23, 24, 77))),
        Case("no positions", _layer(LayerConfig(4, 2, 64, 1e-5, 0.125), 256, 320, 40, (4,))),
        Case("seventeen rows, longer", _layer(_WIDE, 512, 640, 700, tuple(range(3, 700, 41)))),
        *(
            Case(
                f"{', '.join(map('+'.join, schemes.values()))}, {len(at)} rows, exact: {exact}",
                _layer(
                    replace(_PLAIN, exact=exact), 256, 512, 40, at, schemes=schemes, biased=biased
                ),
            )
            for schemes, at, exact, biased in (
                (_SOME_SCHEMES, (7,), False, False),
                (_OTHER_SCHEMES, (3,), False, True),
                (_OTHER_SCHEMES, (5,), True, False),
                (_SOME_SCHEMES, (0, 5, 39), True, True),
                (dict.fromkeys(_SOME_SCHEMES, ("float8",)), (9,), False, True),
            )
        ),
    ),
    ("float16", "bfloat16"),
    budget=_of_layer,
    function=_own("decoder_layer"),
    reference=_layer_reference,
)


def _prompt_reference(
    x: Array, positions: Array, keys: Array, values: Array, *others: Any
) -> tuple[Array, Array, Array]:
    """Compute token by token, from an empty cache; the last argument may pick one token."""
    only = others[11] if len(others) > 11 else None
    outputs = []
    for at in range(x.shape[1]):
        token = x[:, at : at + 1]
        y, keys, values = _layer_reference(token, positions + at, keys, values, *others[:11])
        outputs.append(y)
    result = np.concatenate(outputs, 1)
    return result if only is None else result[np.arange(len(x)), only][:, None], keys, values


PROMPT_LAYER = replace(
    DECODER_LAYER,
    op="prompt_layer",
    cases=(
        Case("three tokens", _layer(_PLAIN, 256, 320, 40, (0,), tokens=3)),
        Case("two rows with biases", _layer(_BIASED, 200, 264, 33, (0, 0), biased=True, tokens=33)),
        Case(_ODD_SIZES, _layer(_NORMED, 248, 312, 50, (0,), normed=True, tokens=21)),
        Case("half rotated, by neighbours", _layer(_HALF, 256, 256, 20, (0,), tokens=17)),
        Case(
            "no positions",
            _layer(LayerConfig(4, 4, 64, 1e-5, 0.125), 256, 320, 40, (0,), tokens=9),
        ),
        Case("the last tokens alone", _layer(_PLAIN, 256, 320, 40, (0, 0), tokens=9, only=(8, 3))),
        Case(
            "many tokens",
            _layer(replace(_WIDE, heads=8), 256, 320, 150, (0,), tokens=150),
        ),
        Case("quantized", _layer(_PLAIN, 256, 512, 40, (0,), tokens=9, schemes=_SOME_SCHEMES)),
    ),
    function=_own("prompt_layer"),
    reference=_prompt_reference,
)


def _logits_call(rows: int, width: int, words: int, *quantized: Any) -> Make:
    def make(draw: Draw) -> Call:
        head: Any = draw.normal(words, width, spread=width**-0.5)
        if quantized:
            head = draw_weight(draw, quantized[0], words, width)
        return call(
            draw.normal(rows, width), draw.normal(width, middle=1.0), head, 1e-5, *quantized[1:]
        )

    return make


FINAL_LOGITS = Row(
    "final_logits",
    (
        Case("one row", _logits_call(1, 256, 500)),
        Case("one row, odd sizes", _logits_call(1, 200, 333)),
        Case("five rows", _logits_call(5, 256, 333)),
        Case("thirty rows", _logits_call(30, 512, 500)),
        Case("one row, q6_k", _logits_call(1, 512, 500, "q6_k", False)),
        Case("two rows, q6_k", _logits_call(2, 512, 500, "q6_k", False)),
    ),
    ("float16", "bfloat16"),
    budget=lambda want, coarse, *arguments: _of_rows(
        want, max(coarse, EIGHT_BITS) if arguments[-1] is False else coarse
    ),
    function=_own("final_logits"),
    reference=lambda x, norm, head, eps, exact=True: _rms(x, norm, eps) @ _plain(head).T,
)


DRAW = (0x1F83D9AB, 0x5BE0CD19, 0x367CD507, 0x510E527F, 3, 28, -40.0)
"""Constants as `draw_token` takes them."""


def _wrap(x: Array) -> Array:
    """Wrap integers to 32 bits."""
    return (x + 2**31) % 2**32 - 2**31


def _hash(x: Array, between: int, rounds: int) -> Array:
    for number in range(rounds):
        x = _wrap(_wrap(x * _wrap(2 * x + 1)) + between + number)
    return x


def _draw_reference(
    logits: Array, numbers: Array, seeds: Array, place: Array, greedy: bool, top_p: bool,
    min_p: bool, constants: tuple[Any, ...],
) -> Array:  # fmt: skip
    finite: Any = np.isfinite(logits).all(1)
    logits = np.where(finite[:, None], logits, 0.0)
    if greedy:
        return np.where(finite, np.argmax(logits, 1), -1)
    by_seed, by_place, by_token, between, rounds, _, _ = constants
    key = _hash(_wrap(seeds * by_seed), between, rounds)
    key = _hash(_wrap(key + _wrap(place * by_place)), between, rounds)[:, None]
    token = _wrap(_wrap(np.arange(logits.shape[1]) * by_token) + key)
    number = _wrap(_hash(token, between, rounds) * _wrap(2 * key + 1))
    chance = (np.where(number < 0, -1 - number, number) + 0.5) / 2**31
    x = logits * numbers[0]
    x = x - x.max(1, keepdims=True)
    score = x - np.log(-np.log1p(-chance))
    if top_p:
        order = np.argsort(-x, axis=1, kind="stable")
        weights = np.take_along_axis(np.exp(x), order, 1)
        above = np.cumsum(weights, 1) - weights
        nucleus = above < numbers[1] * weights.sum(1, keepdims=True)
        faint = np.empty_like(nucleus)
        np.put_along_axis(faint, order, ~nucleus, 1)
        score = np.where(faint, -np.inf, score)
    if min_p:
        score = np.where(x < numbers[2], -np.inf, score)
    return np.where(finite, np.argmax(score, 1), -1)


def _logits(
    rows: int, width: int, heat: float, top_p: float = 1.0, min_p: float = 0.0, *,
    greedy: bool = False, damaged: bool = False,
) -> Make:  # fmt: skip
    def make(draw: Draw) -> Call:
        distance = np.log(min_p) if min_p else -np.inf
        numbers = np.array([1 / heat, top_p, distance, 1.0, 0.0], np.float32)
        seeds, place = draw.integers(-(2**31), 2**31 - 1, rows), draw.integers(0, 5000, rows)
        spread = draw.normal(rows, width, spread=4.0)
        if damaged:
            spread[0, width // 2], spread[-1, -1] = np.nan, -np.inf
        return call(spread, numbers, seeds, place, greedy, top_p < 1, min_p > 0, DRAW)

    return make


DRAW_TOKEN = Row(
    "draw_token",
    (
        Case("three rows", _logits(3, 1000, 1.0)),
        Case("the likeliest that reach a part", _logits(3, 1000, 0.8, top_p=0.9)),
        Case("those that are not too faint", _logits(5, 777, 1.2, min_p=0.05)),
        Case("a large vocabulary, both", _logits(3, 20011, 1.0, top_p=0.95, min_p=0.01)),
        Case("few words, cold", _logits(9, 7, 0.2, top_p=0.5)),
        Case("cold, only the likeliest", _logits(9, 777, 1e-3, min_p=1.0)),
        Case("the likeliest", _logits(3, 20011, 1.0, greedy=True)),
        Case("many words", _logits(2, 40000, 0.7)),
        Case("cold, of many words", _logits(3, 5000, 1e-6)),
        Case("NaN and infinity", _logits(3, 3000, 1.0, damaged=True)),
        Case("NaN and infinity, the likeliest", _logits(3, 3000, 1.0, greedy=True, damaged=True)),
        Case("NaN and infinity, of a part", _logits(3, 3000, 1.0, top_p=0.9, damaged=True)),
    ),
    ("float32", "float16", "bfloat16"),
    gives=index,
    function=_own("draw_token"),
    reference=_draw_reference,
)


def _embedding_call(scheme: str, *ids: int) -> Make:
    def make(draw: Draw) -> Call:
        table = draw_weight(draw, scheme, 40, 256)
        return call(draw.normal(8), table, np.array([ids], np.int32))

    return make


QUANTIZED_EMBEDDING = Row(
    "quantized_embedding",
    (
        Case("one token", _embedding_call("q8_0", 7)),
        Case("three tokens", _embedding_call("q4_k", 39, 0, 39)),
        Case("tokens that do not exist", _embedding_call("q6_k", -1, 3, 40)),
    ),
    ("float16", "bfloat16"),
    budget=lambda want, coarse, like, table, ids: budgets.of_dequantize(
        want, coarse, table, "float32", ids
    ),
    inside="float32",
    function=_own("quantized_embedding"),
    reference=lambda like, table, ids: reference.call("dequantize", table, rows=ids),
)

OTHERS: Mapping[str, Row] = {
    row.op: row
    for row in (DECODER_LAYER, PROMPT_LAYER, FINAL_LOGITS, DRAW_TOKEN, QUANTIZED_EMBEDDING)
}
"""Rows of kernels that are no ops; `TABLE` has the rows of ops."""
