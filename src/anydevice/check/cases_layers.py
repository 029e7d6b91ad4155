"""Cases of the ops that models are made of: products, norms, losses, images, attention."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, nan
from typing import Any

import numpy as np

from anydevice.check import budgets
from anydevice.check.case import (
    EVERYTHING,
    FLOATS,
    Call,
    Case,
    Draw,
    Make,
    Row,
    call,
    loss,
    per_element,
    size_of,
)

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, SIZE, VOCABULARY = 4096, 14336, 32, 8, 128, 32000
"""The shape of a 7B model."""

# Products


def _product(a: tuple[int, ...], b: tuple[int, ...], kind: str = "normal") -> Make:
    return lambda draw: call(getattr(draw, kind)(*a), getattr(draw, kind)(*b))


_MATMUL = Row(
    "matmul",
    (
        Case("130 × 257 × 65", _product((130, 257), (257, 65))),
        Case("one row of 4096", _product((1, 4096), (4096, 96))),
        Case("sums that grow", _product((3, 4096), (4096, 5), "positive")),
        Case("the last counts most", lambda draw: call(draw.heavy(3, 513), draw.heavy(7, 513).T)),
        Case("batches repeated", _product((2, 1, 3, 17), (5, 17, 4))),
        Case("transposed", _product((130, 65), (65, 33)), strided=True),
        Case("heads cut from one product", _product((2, 3, 5, 16), (2, 3, 16, 7)), strided=True),
        Case("one element", _product((1, 1), (1, 1))),
        Case("nothing to add", _product((3, 0), (0, 4))),
        Case("no rows", _product((0, 5), (5, 4))),
        Case("large", lambda draw: call(draw.large(3, 17), draw.normal(17, 5, spread=0.01))),
    ),
    budget=budgets.of_magnitudes("matmul", lambda a, b: a.shape[-1]),
    gradient=_product((2, 3, 4), (4, 5)),
    gpu={
        "8192³": _product((8192, 8192), (8192, 8192)),
        "4096³": _product((4096, 4096), (4096, 4096)),
    },
    cpu={"1024³": _product((1024, 1024), (1024, 1024))},
    operations=lambda made: 2 * size_of(made.arguments[0]) * made.arguments[1].shape[-1],
)


def _layer(rows: tuple[int, ...], into: int, out: int, *, bias: bool = False) -> Make:
    def make(draw: Draw) -> Call:
        weight = draw.normal(out, into, spread=into**-0.5)
        return call(draw.normal(*rows, into), weight, draw.normal(out) if bias else None)

    return make


_DECODING = {
    "qkv": (HIDDEN, (HEADS + 2 * KV_HEADS) * SIZE),
    "o": (HEADS * SIZE, HIDDEN),
    "gate and up": (HIDDEN, 2 * INTERMEDIATE),
    "down": (INTERMEDIATE, HIDDEN),
    "head": (HIDDEN, VOCABULARY),
}

_LINEAR = Row(
    "linear",
    (
        Case("three tokens, 4096 → 259", _layer((1, 3), HIDDEN, 259)),
        Case("one token, 4096 → 259", _layer((1, 1), HIDDEN, 259)),
        Case("many tokens, 512 → 65", _layer((2, 37), 512, 65)),
        Case("with a bias", _layer((5,), 77, 33, bias=True)),
        Case("one token with a bias, odd widths", _layer((1,), 4099, 257, bias=True)),
        Case("a vector", _layer((), 65, 7, bias=True)),
        Case("one token, sums that grow", _product((1, 4099), (257, 4099), "positive")),
        Case("one token, the last counts most", _product((1, 4099), (257, 4099), "heavy")),
        Case("rows that lie apart", _layer((2, 3), 64, 33), strided=True),
        Case("no rows", _layer((0,), 8, 4)),
    ),
    budget=budgets.of_magnitudes("linear", lambda x, weight, bias=None: x.shape[-1]),
    gradient=_layer((2, 3), 4, 5, bias=True),
    gpu={
        **{
            f"{name} of one token, {into} → {out}": _layer((1, 1), into, out)
            for name, (into, out) in _DECODING.items()
        },
        "gate of 16,384 tokens": _layer((1, 16384), HIDDEN, INTERMEDIATE),
    },
    cpu={
        "one token, 1024 → 3584": _layer((1, 1), 1024, 3584),
        "256 tokens, 1024 → 3584": _layer((1, 256), 1024, 3584),
    },
    operations=lambda made: 2 * size_of(made.arguments[0]) * len(made.arguments[1]),
)

# Along a row


def _row(*shape: int, axis: int = -1, spread: float = 3.0) -> Make:
    return lambda draw: call(draw.normal(*shape, spread=spread), axis)


def _softmax_row(op: str, budget: Any) -> Row:
    infinities = [[0.0, 1.0, -inf], [0.0, inf, 1.0], [nan, 0.0, 1.0], [-inf, -inf, -inf]]
    return Row(
        op,
        (
            Case("two rows of 32000", _row(2, VOCABULARY)),
            Case("all alike", lambda draw: call(draw.normal(1, 20011, spread=0.001))),
            Case("another axis", _row(3, 257, 5, axis=1)),
            Case("one column", _row(5, 1)),
            Case("no rows", _row(0, 9)),
            Case("very long", _row(1, 200003)),
            Case("large", lambda draw: call(draw.uniform(-60000, 60000, 3, 33))),
            Case("the last counts most", lambda draw: call(draw.heavy(5, 100))),
            Case("nan and infinities", lambda draw: call(draw.listed(infinities))),
            Case("rows that lie apart", _row(3, 5, 65), strided=True),
        ),
        budget=budget,
        gradient=_row(3, 5),
        gpu={"4,096 rows of 32000": _row(4096, VOCABULARY)},
        cpu={"64 rows of 32000": _row(64, VOCABULARY)},
        operations=per_element(5),
    )


def _scaled(*shape: int, kind: str = "normal") -> Make:
    return lambda draw: call(getattr(draw, kind)(*shape), draw.positive(shape[-1]))


_NOT_FINITE = [[1.0, nan, 2.0], [0.0, 0.0, 0.0], [1.0, inf, 2.0]]

_RMSNORM = Row(
    "rmsnorm",
    (
        Case("three rows of 4096", _scaled(3, HIDDEN)),
        Case("one row, odd width", _scaled(1, 1001)),
        Case("squares that grow", _scaled(2, 8192, kind="positive")),
        Case("the last counts most", _scaled(4, 333, kind="heavy")),
        Case("one column", _scaled(5, 1)),
        Case("no rows", _scaled(0, 8)),
        Case("very long", _scaled(1, 100003)),
        Case("large", _scaled(3, 65, kind="large")),
        Case(
            "small beside eps",
            lambda draw: call(draw.normal(2, 64, spread=0.001), draw.positive(64), 1e-3),
        ),
        Case(
            "nan, infinities and zeros",
            lambda draw: call(draw.listed(_NOT_FINITE), draw.positive(3)),
        ),
        Case("rows that lie apart", _scaled(3, 5, 64), strided=True),
    ),
    budget=budgets.of_rmsnorm,
    gradient=_scaled(3, 5),
    gpu={"16,384 rows of 4096": _scaled(16384, HIDDEN)},
    cpu={"1,024 rows of 4096": _scaled(1024, HIDDEN)},
    operations=per_element(4),
)


def _normed(*shape: int, middle: float = 0.0) -> Make:
    def make(draw: Draw) -> Call:
        x = draw.normal(*shape, middle=middle)
        return call(x, draw.positive(shape[-1]), draw.normal(shape[-1]))

    return make


_LAYERNORM = Row(
    "layernorm",
    (
        Case("three rows of 4096", _normed(3, HIDDEN)),
        Case("one row, odd width", _normed(1, 1001)),
        Case("far from zero", _normed(2, 512, middle=100.0)),
        Case(
            "the last counts most", lambda draw: call(draw.heavy(4, 333), draw.positive(333), None)
        ),
        Case("without weight and bias", lambda draw: call(draw.normal(3, 65), None, None, 1e-3)),
        Case("without weight", lambda draw: call(draw.normal(3, 65), None, draw.normal(65))),
        Case("no rows", _normed(0, 8)),
        Case("very long", _normed(1, 100003)),
        Case("rows that lie apart", _normed(3, 5, 64), strided=True),
    ),
    budget=budgets.of_layernorm,
    gradient=_normed(3, 5),
    gpu={"16,384 rows of 4096": _normed(16384, HIDDEN)},
    cpu={"1,024 rows of 4096": _normed(1024, HIDDEN)},
    operations=per_element(7),
)

# Losses


def _classes(*shape: int, kind: str = "normal") -> Make:
    *outer, classes = shape
    return lambda draw: call(getattr(draw, kind)(*shape), draw.integers(0, classes, *outer))


def _outside(draw: Draw) -> Call:
    return call(draw.normal(4, 9), np.array([0, 9, 3, -1], np.int32))


_CROSS_ENTROPY = Row(
    "cross_entropy",
    (
        Case("2 × 7 tokens of 32000", _classes(2, 7, VOCABULARY)),
        Case("one row", _classes(1, 10)),
        Case("no axis", _classes(11)),
        Case("one class", _classes(5, 1)),
        Case("the last counts most", _classes(6, 100, kind="heavy")),
        Case("targets out of range", _outside),
    ),
    budget=budgets.of_cross_entropy,
    gives=loss,
    gradient=_classes(4, 5),
    gpu={"4,096 rows of 32000": _classes(4096, VOCABULARY)},
    cpu={"64 rows of 32000": _classes(64, VOCABULARY)},
    operations=per_element(5),
)

_MEAN_SQUARED_ERROR = Row(
    "mean_squared_error",
    (
        Case("16 rows of 512", _product((16, 512), (16, 512))),
        Case("sums that grow", lambda draw: call(draw.positive(9001), draw.normal(9001))),
        Case("the last counts most", lambda draw: call(draw.heavy(1, 100), draw.normal(1, 100))),
        Case("one element", _product((1,), (1,))),
        Case("no axis", _product((), ())),
    ),
    budget=budgets.of_mean_squared_error,
    gives=loss,
    gradient=_product((3, 5), (3, 5)),
    gpu={"4,096 rows of 4096": _product((4096, 4096), (4096, 4096))},
    cpu={"512 rows of 4096": _product((512, 4096), (512, 4096))},
    operations=per_element(3),
)

# Images


def _image(x: tuple[int, ...], weight: tuple[int, ...], *, bias: bool = True, **how: Any) -> Make:
    def make(draw: Draw) -> Call:
        b = draw.normal(weight[0]) if bias else None
        return call(draw.normal(*x), draw.normal(*weight), b, **how)

    return make


def _convolved(made: Call) -> int:
    x, weight = made.arguments[:2]
    pixels = size_of(x[:, 0]) // int(made.options.get("stride", 1)) ** 2
    return 2 * pixels * size_of(weight)


_CONV2D = Row(
    "conv2d",
    (
        Case("3 × 3 over 16 channels", _image((2, 16, 13, 11), (9, 16, 3, 3), padding=1)),
        Case("patches of 4", _image((1, 3, 32, 32), (17, 3, 4, 4), stride=4)),
        Case("one pixel", _image((2, 5, 1, 1), (3, 5, 1, 1))),
        Case("what is left over", _image((1, 2, 10, 9), (3, 2, 3, 2), bias=False, stride=2)),
        Case("no images", _image((0, 2, 5, 5), (3, 2, 3, 3))),
    ),
    budget=budgets.of_magnitudes(
        "conv2d", lambda x, weight, bias=None, stride=1, padding=0: size_of(weight[0])
    ),
    gradient=_image((1, 2, 4, 4), (2, 2, 3, 3), padding=1),
    gpu={"32 images, 3 × 3, 256 channels": _image((32, 256, 56, 56), (256, 256, 3, 3), padding=1)},
    cpu={"1 image, 3 × 3, 64 channels": _image((1, 64, 28, 28), (64, 64, 3, 3), padding=1)},
    operations=_convolved,
)


def _pooled(*shape: int, size: int = 2, **how: int) -> Make:
    return lambda draw: call(draw.normal(*shape), size, **how)


def _pool(op: str, budget: Any) -> Row:
    return Row(
        op,
        (
            Case("2 × 2 of 16 channels", _pooled(2, 16, 12, 10)),
            Case("overlapping", _pooled(1, 3, 9, 11, size=3, stride=2)),
            Case("apart", _pooled(1, 2, 10, 10, size=2, stride=3)),
            Case("what is left over", _pooled(1, 2, 7, 5, size=2)),
            Case("the whole image", _pooled(2, 3, 7, 7, size=7)),
            Case("no images", _pooled(0, 3, 4, 4)),
        ),
        FLOATS,
        budget,
        gradient=_pooled(1, 2, 4, 4),
        gpu={"32 images of 56², 256 channels": _pooled(32, 256, 56, 56)},
        cpu={"1 image of 56², 64 channels": _pooled(1, 64, 56, 56)},
    )


LAYERS: tuple[Row, ...] = (
    _MATMUL,
    _LINEAR,
    _softmax_row("softmax", budgets.of_softmax),
    _softmax_row("log_softmax", budgets.of_log_softmax),
    _RMSNORM,
    _LAYERNORM,
    _CROSS_ENTROPY,
    _MEAN_SQUARED_ERROR,
    _CONV2D,
    _pool("max_pool2d", budgets.exact),
    _pool("avg_pool2d", budgets.of_magnitudes("avg_pool2d", lambda x, size, stride=None: size**2)),
)


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


_MORE_YARN = {**YARN, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.3}
_EXACT_YARN = {**YARN, "attention_factor": 1.25, "truncate": False}

_ROPE = Row(
    "rope",
    (
        Case("17 tokens of 4 heads", _turned(1, 4, 17, SIZE)),
        Case("17 tokens, interleaved", _turned(1, 4, 17, SIZE, interleaved=True)),
        Case("one token far on", _turned(2, 3, 1, 64, first=4095)),
        Case(
            "each text its own positions",
            lambda draw: call(draw.normal(3, 2, 5, 16), draw.integers(0, 300, 3, 5)),
        ),
        Case("the smallest head", _turned(1, 1, 3, 2)),
        Case("no tokens", _turned(1, 2, 0, 8)),
        Case("heads that lie apart", _turned(2, 3, 5, 64), strided=True),
        Case("Llama 3", _turned(1, 2, 9, SIZE, first=9000, theta=5e5, scaling=LLAMA3)),
        Case("linear", _turned(1, 2, 9, 64, scaling={"type": "linear", "factor": 4.0})),
        Case("default", _turned(1, 2, 9, 64, scaling={"rope_type": "default"})),
        Case("YaRN", _turned(1, 2, 9, SIZE, first=100, scaling=YARN)),
        Case("YaRN, every key", _turned(1, 2, 9, 64, theta=1e6, scaling=_MORE_YARN)),
        Case("YaRN, its own factor", _turned(1, 2, 9, SIZE, interleaved=True, scaling=_EXACT_YARN)),
    ),
    budget=budgets.of_rope,
    inside="float32",  # the angles are, whatever is turned by them
    gradient=_turned(1, 2, 2, 4, first=3),
    gpu={
        "16,384 tokens of 32 heads": _turned(1, HEADS, 16384, SIZE),
        "one token of 32 heads": _turned(1, HEADS, 1, SIZE, first=4095),
    },
    cpu={"256 tokens of 32 heads": _turned(1, HEADS, 256, SIZE)},
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
    q, k, v = (draw.normal(2, 2, tokens, 8) for tokens in (3, 4, 4))
    return call(q, k, v, mask=mask)


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
    gpu={
        "4,096 tokens": _seen(1, HEADS, KV_HEADS, 4096, 4096, SIZE, causal=True),
        "16,384 tokens": _seen(1, HEADS, KV_HEADS, 16384, 16384, SIZE, causal=True),
        "decoding 1 × 4,096": _step(1, 4096),
        "decoding 1 × 32,768": _step(1, 32768),
        "decoding 16 × 4,096": _step(16, 4096),
    },
    cpu={
        "256 tokens": _seen(1, HEADS, KV_HEADS, 256, 256, SIZE, causal=True),
        "decoding 1 × 1,024": _step(1, 1024),
    },
    operations=_attended,
)


def _written(
    batch: int, heads: int, keys: int, size: int, tokens: int, positions: Any = None
) -> Make:
    def make(draw: Draw) -> Call:
        cache, new = (draw.normal(batch, heads, count, size) for count in (keys, tokens))
        at = np.arange(tokens) + 1 if positions is None else np.array(positions)
        return call(cache, new, at.astype(np.int32))

    return make


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
    gpu={"one token": _written(1, KV_HEADS, 4096, SIZE, 1, [4095])},
    cpu={"one token": _written(1, KV_HEADS, 1024, SIZE, 1, [1023])},
    moved=lambda made, result_bytes: 2 * int(made.arguments[1].nbytes),
    operations=lambda made: 0,
)

ATTENTION: tuple[Row, ...] = (_ROPE, _ATTENTION, _CACHE_WRITE)
