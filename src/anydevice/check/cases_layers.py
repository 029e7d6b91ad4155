"""Cases of the ops that models are made of: products, norms, losses, images, attention."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, nan, prod
from typing import Any

import numpy as np

from anydevice.check import budgets
from anydevice.check.case import (
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
    loss,
    per_element,
    size_of,
)
from anydevice.check.reference import seen_keys

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, SIZE, VOCABULARY = 4096, 14336, 32, 8, 128, 32000
"""The shape of a 7B model."""

# Products


def _product(a: tuple[int, ...], b: tuple[int, ...], kind: str = "normal") -> Make:
    return lambda draw: call(getattr(draw, kind)(*a), getattr(draw, kind)(*b))


def _times_zero(*shape: int) -> Make:
    """NaN and infinities in the first, and zeros where they meet the second."""

    def make(draw: Draw) -> Call:
        rows, inner, columns = shape
        a, b = draw.normal(rows, inner), draw.normal(inner, columns)
        a[0, 0], a[1, inner // 2], a[2, -1] = nan, inf, -inf
        b[[0, inner // 2, -1]] = 0
        return call(a, b)

    return make


def _times_zero_of_weights(draw: Draw) -> Call:
    x, weight = _times_zero(3, 65, 33)(draw).arguments
    return call(x, np.ascontiguousarray(weight.T), None)


def _zero_times(draw: Draw) -> Call:
    """The same with NaN in the weights, for a few tokens."""
    x, weight = draw.normal(2, 65), draw.normal(33, 65)
    x[:, 7] = 0
    weight[3, 7], weight[-1, 7] = nan, inf
    return call(x, weight, None)


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
        Case("517 × 1031 × 519", _product((517, 1031), (1031, 519)), LARGE),
        Case("a long sum", _product((3, 100003), (100003, 5), "positive"), LARGE),
        Case("one row, a long sum", _product((1, 100003), (100003, 3), "positive"), LARGE),
        Case("many rows", _product((70001, 5), (5, 3)), LARGE),
        Case("many columns", _product((3, 5), (5, 70001)), LARGE),
        Case("many batches", _product((300, 3, 17), (300, 17, 5)), LARGE),
        Case("batches of two axes", _product((3, 40, 5, 17), (1, 40, 17, 9)), LARGE),
        Case("nan and infinities times zero", _times_zero(3, 5, 4)),
        Case("nan and infinities times zero, larger", _times_zero(130, 257, 65)),
        Case("nan and infinities times zero, one column", _times_zero(3, 65, 1)),
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
        Case(
            "257 tokens, 1031 → 519 with a bias",
            _layer((257,), 1031, 519, bias=True),
            LARGE_KERNELS,
        ),
        Case("one token, 257 → 40009", _layer((1,), 257, 40009, bias=True), LARGE_KERNELS),
        Case("many tokens, 33 → 17", _layer((7, 4099), 33, 17, bias=True), LARGE),
        Case("one token, a long sum", _product((1, 40009), (65, 40009), "positive"), LARGE_KERNELS),
        Case("nan and infinities times zero", _times_zero_of_weights),
        Case("nan in the weights times zero", _zero_times),
        Case(
            "nan and infinities in the bias",
            lambda draw: call(draw.normal(2, 5), draw.normal(3, 5), draw.listed([nan, inf, -inf])),
        ),
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


def _partly_out(draw: Draw) -> Call:
    """Half of each row is -inf, as where a mask is added to scores."""
    x = draw.normal(5, 1001, spread=3.0)
    x[draw.chance(5, 1001)] = -inf
    return call(x)


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
            Case("from behind", _row(3, 257, 5, axis=-2)),
            Case("the first axis", _row(257, 5, axis=0)),
            Case("half of it -inf", _partly_out),
            Case("many rows", _row(4099, 257), LARGE_KERNELS),
            Case("very many rows", _row(70001, 5), LARGE_KERNELS),
            Case("long columns", _row(4099, 65, axis=0), LARGE),
            Case("far below zero", lambda draw: call(draw.uniform(-2000, -1000, 3, 1001))),
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
        Case(
            "small beside the usual eps",
            lambda draw: call(draw.normal(2, 64, spread=0.001), draw.positive(64)),
        ),
        Case("many rows", _scaled(4099, 257), LARGE_KERNELS),
        Case("very many rows", _scaled(70001, 5), LARGE_KERNELS),
    ),
    budget=budgets.of_rmsnorm,
    gradient=_scaled(3, 5),
    gpu={"16,384 rows of 4096": _scaled(16384, HIDDEN)},
    cpu={"1,024 rows of 4096": _scaled(1024, HIDDEN)},
    operations=per_element(4),
)


def _normed(*shape: int, middle: float = 0.0, spread: float = 1.0) -> Make:
    def make(draw: Draw) -> Call:
        x = draw.normal(*shape, middle=middle, spread=spread)
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
        Case("small beside the usual eps", _normed(2, 64, spread=0.003)),
        Case("one column", _normed(5, 1)),
        Case("many rows", _normed(4099, 257), LARGE_KERNELS),
        Case("very many rows", _normed(70001, 5), LARGE_KERNELS),
        Case(
            "nan, infinities and zeros",
            lambda draw: call(draw.listed(_NOT_FINITE), draw.positive(3), draw.normal(3)),
        ),
    ),
    budget=budgets.of_layernorm,
    gradient=_normed(3, 5),
    gpu={"16,384 rows of 4096": _normed(16384, HIDDEN)},
    cpu={"1,024 rows of 4096": _normed(1024, HIDDEN)},
    operations=per_element(7),
)

# Losses

_LONG = ("float32", "bfloat16", "float64")
"""The dtypes in which the square of a large number is one too."""


def _classes(*shape: int, kind: str = "normal") -> Make:
    *outer, classes = shape
    return lambda draw: call(getattr(draw, kind)(*shape), draw.integers(0, classes, *outer))


def _far_outside(draw: Draw) -> Call:
    return call(draw.normal(2, 9), np.array([3, 65536 + 3], np.int32))


def _outside(draw: Draw) -> Call:
    return call(draw.normal(4, 9), np.array([0, 9, 3, -1], np.int32))


def _far_classes(draw: Draw) -> Call:
    """Targets beyond what 16 bits can number, each the most or the least probable."""
    logits = draw.normal(4, 70001)
    targets = np.array([65535, 65536, 70000, 0], np.int32)
    logits[np.arange(4), targets] = draw.listed([9, -9, 9, -9])
    return call(logits, targets)


def _some_impossible(draw: Draw) -> Call:
    """Classes that are no target have -inf, but for one, which is the target: the loss is inf."""
    logits = draw.normal(3, 9)
    logits[:, 4] = -inf
    return call(logits, np.array([0, 8, 4], np.int32))


def _possible(draw: Draw) -> Call:
    logits = draw.normal(3, 9)
    logits[:, 4] = -inf
    return call(logits, np.array([0, 8, 3], np.int32))


def _classes_of_nan(draw: Draw) -> Call:
    logits = draw.normal(3, 9)
    logits[1, 4] = nan
    return call(logits, np.array([0, 8, 3], np.int32))


_CROSS_ENTROPY = Row(
    "cross_entropy",
    (
        Case("2 × 7 tokens of 32000", _classes(2, 7, VOCABULARY)),
        Case("one row", _classes(1, 10)),
        Case("no axis", _classes(11)),
        Case("one class", _classes(5, 1)),
        Case("the last counts most", _classes(6, 100, kind="heavy")),
        Case("targets out of range", _outside),
        Case("targets far out of range", _far_outside),
        Case("targets above 65,535", _far_classes, LARGE),
        Case("many tokens", _classes(3, 1031, 257), LARGE),
        Case("very many tokens", _classes(70001, 5), LARGE),
        Case("large", lambda draw: call(draw.uniform(-1e4, 1e4, 5, 33), draw.integers(0, 33, 5))),
        Case("far below zero", lambda draw: call(draw.uniform(-2e3, -1e3, 5, 33), np.arange(5))),
        Case("one class is impossible", _possible),
        Case("the target is impossible", _some_impossible),
        Case("nan", _classes_of_nan),
        Case("rows that lie apart", _classes(3, 5, 65), strided=True),
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
        Case(
            "a million that grow",
            lambda draw: call(4 + draw.positive(1031, 970), draw.positive(1031, 970)),
            LARGE,
        ),
        Case(
            "the end of a million",
            lambda draw: call(draw.heavy(1, 1000003), draw.normal(1, 1000003)),
            LARGE,
        ),
        Case("elements that lie apart", _product((9, 33), (9, 33)), strided=True),
        Case("large", lambda draw: call(draw.large(9), draw.normal(9)), _LONG),
        Case("nan", lambda draw: call(draw.listed([1, nan, 2]), draw.normal(3))),
        Case("infinities", lambda draw: call(draw.normal(3), draw.listed([1, inf, 2]))),
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


def _image_of_nan(draw: Draw) -> Call:
    x, weight = draw.normal(1, 2, 6, 7), draw.normal(3, 2, 3, 3)
    x[0, 0, 2, 3], x[0, 1, 5, 6] = nan, inf
    weight[1] = 0
    return call(x, weight, None)


_CONV2D = Row(
    "conv2d",
    (
        Case("3 × 3 over 16 channels", _image((2, 16, 13, 11), (9, 16, 3, 3), padding=1)),
        Case("patches of 4", _image((1, 3, 32, 32), (17, 3, 4, 4), stride=4)),
        Case("one pixel", _image((2, 5, 1, 1), (3, 5, 1, 1))),
        Case("what is left over", _image((1, 2, 10, 9), (3, 2, 3, 2), bias=False, stride=2)),
        Case("no images", _image((0, 2, 5, 5), (3, 2, 3, 3))),
        Case(
            "its own stride and padding on each axis",
            _image((2, 3, 9, 11), (4, 3, 3, 2), stride=(2, 1), padding=(1, 2)),
        ),
        Case("a large image", _image((3, 5, 131, 67), (7, 5, 3, 3), padding=1), LARGE),
        Case("many channels", _image((1, 65, 17, 19), (130, 65, 3, 3), padding=1), LARGE),
        Case(
            "7 × 7 of large steps",
            _image((2, 3, 65, 67), (33, 3, 7, 7), stride=2, padding=3),
            LARGE,
        ),
        Case("many images", _image((300, 2, 5, 5), (3, 2, 3, 3)), LARGE),
        Case("pixels that lie apart", _image((2, 3, 9, 11), (4, 3, 3, 3)), strided=True),
        Case("nan and infinities times zero", _image_of_nan),
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


def _pooled_nan(draw: Draw) -> Call:
    x = draw.normal(1, 2, 6, 6)
    x[0, 0, 0, 1], x[0, 0, 3, 2], x[0, 1, 5, 5] = nan, inf, -inf
    x[0, 1, :2, :2] = -inf
    return call(x, 2)


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
            Case(
                "its own size and stride on each axis",
                lambda draw: call(draw.normal(2, 3, 9, 11), (3, 2), (1, 3)),
            ),
            Case("a large image", _pooled(2, 33, 131, 133, size=3, stride=2), LARGE),
            Case("many channels", _pooled(5, 300, 17, 19), LARGE),
            Case("below zero", lambda draw: call(-draw.positive(1, 2, 6, 6), 2)),
            Case("pixels that lie apart", _pooled(2, 3, 8, 6), strided=True),
            Case("nan and infinities", _pooled_nan),
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
    _pool(
        "avg_pool2d",
        budgets.of_magnitudes(
            "avg_pool2d",
            lambda x, size, stride=None: prod((size, size) if isinstance(size, int) else size),
        ),
    ),
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

_FAR = (9999, 10000, 16384, 32768, 65535, 65536, 100003, 131071)


def _turned_at(places: tuple[int, ...], **options: Any) -> Make:
    at = np.array(places, np.int32)
    return lambda draw: call(draw.normal(1, 3, len(at), 128), at, **options)


def _turned_nan(draw: Draw) -> Call:
    x = draw.normal(1, 2, 3, 8)
    x[0, 0, 1, 2], x[0, 1, 2, 7] = nan, inf
    return call(x, np.array([1, 2, 3], np.int32))


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
        Case("beyond position 10,000", _turned_at(_FAR)),
        Case("beyond position 10,000, interleaved", _turned_at(_FAR, interleaved=True), LARGE),
        Case("beyond position 10,000, Llama 3", _turned_at(_FAR, theta=5e5, scaling=LLAMA3), LARGE),
        Case("beyond position 10,000, YaRN", _turned_at(_FAR, scaling=YARN), LARGE),
        Case("many tokens of 33 heads", _turned(2, 33, 300, 64, first=9000), LARGE_KERNELS),
        Case("many tokens, interleaved", _turned(9, 3, 1031, 32, interleaved=True), LARGE_KERNELS),
        Case("a wide head", _turned(1, 2, 5, 512), LARGE_KERNELS),
        Case("a head that is no power of two", _turned(1, 3, 5, 80)),
        Case("a large theta", _turned(1, 2, 9, 64, first=500, theta=1e7)),
        Case(
            "heads that lie apart, interleaved",
            _turned(2, 3, 5, 64, interleaved=True),
            strided=True,
        ),
        Case("nan and infinities", _turned_nan),
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
    spread: float = 1.0,
    **options: Any,
) -> Make:
    def make(draw: Draw) -> Call:
        q = draw.normal(batch, heads, queries, size, spread=spread)
        k = draw.normal(batch, kv_heads, keys, size, spread=spread)
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


def _excluded(make: Make, holding: float = nan) -> Make:
    """The same call with NaN in the keys and values that no query may see."""

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


def _seeing_nan(draw: Draw) -> Call:
    """NaN in a key that the second text sees, and in values of the first."""
    made = _seen(2, 4, 2, 3, 9, 32)(draw)
    q, k, v = made.arguments
    k[1, 0, 4], v[0, 1, 5, 7], v[0, 0, 2, 3] = nan, nan, inf
    return call(q, k, v)


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


_EXCLUDING = {
    "beyond the lengths": _seen(2, 4, 2, 3, 40, 64, lengths=(7, 33)),
    "beyond the lengths, causal": _seen(2, 4, 2, 3, 40, 64, lengths=(7, 33), causal=True),
    "beyond the lengths, one token": _seen(2, 8, 2, 1, 700, SIZE, lengths=(77, 650), causal=True),
    "beyond the lengths, a window": _seen(
        2, 4, 2, 2, 33, 32, lengths=(9, 30), causal=True, window=4
    ),
    "in padding": _seen(2, 4, 2, 9, 9, 32, mask=(2, 9)),
    "in padding, causal": _seen(2, 4, 2, 9, 9, 32, mask=(2, 9), causal=True),
    "in padding, one token": _seen(2, 4, 2, 1, 33, 64, mask=(2, 33)),
    "where a mask is for all": _seen(2, 4, 2, 6, 9, 32, mask=(2, 1, 1, 9)),
    "where each head has a mask": _seen(2, 4, 4, 2, 9, 32, mask=(2, 4, 2, 9)),
}
"""Calls in which some keys are excluded from every query."""

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
        Case("259 tokens of 36 heads", _seen(1, 36, 4, 259, 259, 64, causal=True), LARGE_KERNELS),
        Case("67 queries, 5,003 keys", _seen(1, 4, 2, 67, 5003, 32, causal=True), LARGE_KERNELS),
        Case("300 queries, not causal", _seen(1, 3, 3, 300, 517, 32), LARGE),
        Case(
            "one token of 40 heads, 9,001 keys",
            _seen(1, 40, 5, 1, 9001, 64, lengths=(8999,), causal=True),
            LARGE_KERNELS,
        ),
        Case(
            "40,009 keys",
            _seen(1, 2, 1, 1, 40009, 64, lengths=(40001,), causal=True),
            LARGE_KERNELS,
        ),
        Case("70,001 keys", _seen(1, 1, 1, 2, 70001, 16), LARGE),
        Case(
            "33 texts",
            _seen(33, 4, 2, 1, 65, 64, lengths=tuple(range(2, 68, 2)), causal=True),
            LARGE_KERNELS,
        ),
        Case("300 texts", _seen(300, 2, 2, 3, 5, 16, causal=True), LARGE),
        Case("a wide head", _seen(1, 2, 1, 5, 33, 256, causal=True), LARGE_KERNELS),
        Case("a long mask", _seen(2, 4, 2, 70, 517, 32, mask=(2, 1, 70, 517)), LARGE),
        Case("a wide window", _seen(1, 2, 1, 130, 700, 32, causal=True, window=300), LARGE),
        Case("large scores", _seen(1, 4, 2, 7, 33, 64, spread=8.0, causal=True), LARGE_KERNELS),
        Case(
            "large scores of one token",
            _seen(1, 4, 2, 1, 333, 64, spread=8.0, lengths=(300,), causal=True),
            LARGE_KERNELS,
        ),
        Case("scores far below zero", _far_below, LARGE_KERNELS),
        Case("nan that is seen", _seeing_nan, LARGE_KERNELS),
        *(
            Case(f"nan {place}", _excluded(make), LARGE_KERNELS)
            for place, make in _EXCLUDING.items()
        ),
        Case("infinity in padding", _excluded(_EXCLUDING["in padding"], inf), LARGE_KERNELS),
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
        cache, new = (draw.digits(batch, heads, count, size) for count in (keys, tokens))
        at = np.arange(tokens) + 1 if positions is None else np.array(positions)
        return call(cache, new, at.astype(np.int32))

    return make


def _written_special(draw: Draw) -> Call:
    cache = draw.special(2.0, 3.0, 4.0).reshape(1, 2, 3, 2)
    return call(cache, cache[:, ::-1, 1:2], np.array([2], np.int32))


_CACHE_WRITE = Row(
    "cache_write",
    (
        Case("five tokens", _written(2, 3, 33, 16, 5)),
        Case("one token", _written(1, 8, 130, SIZE, 1, [77])),
        Case("each text its own place", _written(2, 2, 9, 8, 2, [[1, 7], [0, 3]])),
        Case("the first and the last", _written(1, 2, 9, 8, 2, [0, 8])),
        Case("out of range", _written(2, 2, 9, 8, 3, [[-1, 2, 9], [8, 100, -9]])),
        Case("no tokens", _written(1, 2, 9, 8, 0)),
        Case("beyond place 65,535", _written(1, 2, 70001, 4, 3, [65536, 70000, 65535]), LARGE),
        Case("far out of range", _written(1, 2, 9, 8, 4, [2**31 - 1, 65536, -(2**31), 3])),
        Case("many tokens", _written(2, 33, 517, 32, 259), LARGE),
        Case("33 texts", _written(33, 2, 65, 8, 1, [[2 * text] for text in range(33)]), LARGE),
        Case("heads that lie apart", _written(2, 3, 33, 16, 5), strided=True),
        Case("nan and infinities", _written_special, FLOATS),
    ),
    dtypes=EVERYTHING,
    signs=True,
    gpu={"one token": _written(1, KV_HEADS, 4096, SIZE, 1, [4095])},
    cpu={"one token": _written(1, KV_HEADS, 1024, SIZE, 1, [1023])},
    moved=lambda made, result_bytes: 2 * int(made.arguments[1].nbytes),
    operations=lambda made: 0,
)

ATTENTION: tuple[Row, ...] = (_ROPE, _ATTENTION, _CACHE_WRITE)
