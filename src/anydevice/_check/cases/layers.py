"""Cases of the ops that models are made of: products, norms, losses, images."""

from __future__ import annotations

from functools import partial
from math import inf, nan, prod
from typing import Any

import numpy as np

from anydevice._check import budgets
from anydevice._check.cases.case import (
    FLOATS,
    LARGE,
    LARGE_KERNELS,
    NUMBERS,
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


def _times_zero(*shape: int) -> Make:
    """Put NaN and infinities into the first matrix, and zeros where they meet the second."""

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
    """Put NaN into the weights, and zeros into the tokens where they meet."""
    x, weight = draw.normal(2, 65), draw.normal(33, 65)
    x[:, 7] = 0
    weight[3, 7], weight[-1, 7] = nan, inf
    return call(x, weight, None)


_MATMUL = Row(
    "matmul",
    (
        Case("130 × 257 × 65", _product((130, 257), (257, 65))),
        Case("one row of 4096", _product((1, 4096), (4096, 96))),
        Case("one row times one column", _product((1, 561), (561, 1))),
        Case("sums that grow", _product((3, 4096), (4096, 5), "positive")),
        Case("the last counts most", lambda draw: call(draw.heavy(3, 513), draw.heavy(7, 513).T)),
        Case("batches repeated", _product((2, 1, 3, 17), (5, 17, 4))),
        Case("heads cut from one product", _product((2, 3, 5, 16), (2, 3, 16, 7)), strided=True),
        Case("nothing to add", _product((3, 0), (0, 4))),
        Case("no rows", _product((0, 5), (5, 4))),
        Case("large", lambda draw: call(draw.large(3, 17), draw.normal(17, 5, spread=0.01))),
        Case("517 × 1031 × 519", _product((517, 1031), (1031, 519)), LARGE),
        Case("a long sum", _product((3, 100003), (100003, 5), "positive"), LARGE),
        Case("one row, a long sum", _product((1, 100003), (100003, 3), "positive"), LARGE),
        Case("many rows", _product((70001, 5), (5, 3)), LARGE),
        Case("many columns", _product((3, 5), (5, 70001)), LARGE),
        Case("many batches", _product((300, 3, 17), (300, 17, 5)), LARGE),
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

_OUTER = Row(
    "outer",
    (
        Case("65 × 33", _product((65,), (33,))),
        Case("nan and infinities", lambda draw: call(draw.special(), draw.normal(5)), FLOATS),
    ),
    NUMBERS,
    gradient=_product((3,), (4,)),
    gpu={"8,192 × 8192": _product((8192,), (8192,))},
    cpu={"1,024 × 1024": _product((1024,), (1024,))},
)


def _contract(subscripts: str, *shapes: tuple[int, ...]) -> Make:
    return lambda draw: call(subscripts, *(draw.normal(*shape) for shape in shapes))


_EINSUM = Row(
    "einsum",
    (
        Case("matrices", _contract("ij,jk->ik", (33, 65), (65, 17))),
        Case("attention", _contract("bqhd,bkhd->bhqk", (2, 5, 3, 8), (2, 7, 3, 8))),
        Case("batches last", _contract("ijb,jkb->kbi", (3, 5, 4), (5, 2, 4))),
        Case("three", _contract("ij,jk,kl->il", (3, 9), (9, 7), (7, 5))),
        Case("of one, a diagonal", _contract("iji->ji", (5, 3, 5))),
        Case("of one, a trace", _contract("ii", (65, 65)), LARGE),
        Case("added up before", _contract("ij,kl->il", (9, 33), (17, 5))),
        Case("any axes", _contract("...ij,...jk->...ik", (2, 1, 3, 5), (4, 5, 2))),
        Case("any axes that are added up", _contract("...i,...i", (3, 4, 5), (4, 5)), LARGE),
        Case("spaces", _contract("i j , j -> i", (3, 5), (5,)), LARGE),
        Case(
            "nan and infinities times zero",
            lambda draw: call("ij,jk->ik", *_times_zero(3, 5, 4)(draw).arguments),
            FLOATS,
        ),
    ),
    NUMBERS,
    budget=budgets.of_magnitudes("einsum", lambda subscripts, *arrays: max(map(size_of, arrays))),
    gradient=_contract("bij,bjk->bik", (2, 3, 4), (2, 4, 2)),
    gpu={"4096³": _contract("ij,jk->ik", (4096, 4096), (4096, 4096))},
    cpu={"512³": _contract("ij,jk->ik", (512, 512), (512, 512))},
    operations=lambda made: 2 * size_of(made.arguments[1]) * made.arguments[2].shape[-1],
)

_ODD = [[[nan, 1, 2], [inf, 1, 2], [1, -inf, 2]]]
_SUMS = [
    Row(
        op,
        (
            Case("7 × 33 × 65", _product((7, 33, 65), (33, 65))),
            Case("nan", lambda draw: call(draw.listed(_ODD), draw.positive(3, 3)), FLOATS),
        ),
        NUMBERS,
        budgets.of_magnitudes(op, lambda a, b, **how: b.size),
        gradient=_product((2, 3, 4), (3, 4)),
        gpu={"64 × 4096": _product((64, 1, 4096), (1, 4096))},
        cpu={"64 × 4096": _product((64, 1, 4096), (1, 4096))},
    )
    for op in ("vecdot", "tensordot")
]

# Along a row


def _row(*shape: int, axis: int = -1, spread: float = 3.0) -> Make:
    return lambda draw: call(draw.normal(*shape, spread=spread), axis)


def _partly_out(draw: Draw) -> Call:
    """Set half of each row to -inf, as a mask that is added to scores does."""
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


def _scale(*shape: int, kind: str = "normal") -> Make:
    return lambda draw: call(getattr(draw, kind)(*shape), draw.positive(shape[-1]))


_NOT_FINITE = [[1.0, nan, 2.0], [0.0, 0.0, 0.0], [1.0, inf, 2.0]]

_RMSNORM = Row(
    "rmsnorm",
    (
        Case("three rows of 4096", _scale(3, HIDDEN)),
        Case("one row, odd width", _scale(1, 1001)),
        Case("squares that grow", _scale(2, 8192, kind="positive")),
        Case("the last counts most", _scale(4, 333, kind="heavy")),
        Case("one column", _scale(5, 1)),
        Case("no rows", _scale(0, 8)),
        Case("very long", _scale(1, 100003)),
        Case("large", _scale(3, 65, kind="large")),
        Case(
            "small beside eps",
            lambda draw: call(draw.normal(2, 64, spread=0.001), draw.positive(64), 1e-3),
        ),
        Case(
            "nan, infinities and zeros",
            lambda draw: call(draw.listed(_NOT_FINITE), draw.positive(3)),
        ),
        Case("rows that lie apart", _scale(3, 5, 64), strided=True),
        Case(
            "small beside the usual eps",
            lambda draw: call(draw.normal(2, 64, spread=0.001), draw.positive(64)),
        ),
        Case("many rows", _scale(4099, 257), LARGE_KERNELS),
        Case("very many rows", _scale(70001, 5), LARGE_KERNELS),
    ),
    budget=budgets.of_rmsnorm,
    gradient=_scale(3, 5),
    gpu={"16,384 rows of 4096": _scale(16384, HIDDEN)},
    cpu={"1,024 rows of 4096": _scale(1024, HIDDEN)},
    operations=per_element(4),
)


def _norm(*shape: int, middle: float = 0.0, spread: float = 1.0) -> Make:
    def make(draw: Draw) -> Call:
        x = draw.normal(*shape, middle=middle, spread=spread)
        return call(x, draw.positive(shape[-1]), draw.normal(shape[-1]))

    return make


_LAYERNORM = Row(
    "layernorm",
    (
        Case("three rows of 4096", _norm(3, HIDDEN)),
        Case("one row, odd width", _norm(1, 1001)),
        Case("far from zero", _norm(2, 512, middle=100.0)),
        Case("farther from zero", _norm(2, 512, middle=2000.0), ("float32", "float64")),
        Case(
            "the last counts most", lambda draw: call(draw.heavy(4, 333), draw.positive(333), None)
        ),
        Case("without weight and bias", lambda draw: call(draw.normal(3, 65), None, None, 1e-3)),
        Case("without weight", lambda draw: call(draw.normal(3, 65), None, draw.normal(65))),
        Case("no rows", _norm(0, 8)),
        Case("very long", _norm(1, 100003)),
        Case("rows that lie apart", _norm(3, 5, 64), strided=True),
        Case("small beside the usual eps", _norm(2, 64, spread=0.003)),
        Case("one column", _norm(5, 1)),
        Case("many rows", _norm(4099, 257), LARGE_KERNELS),
        Case("very many rows", _norm(70001, 5), LARGE_KERNELS),
        Case(
            "nan, infinities and zeros",
            lambda draw: call(draw.listed(_NOT_FINITE), draw.positive(3), draw.normal(3)),
        ),
    ),
    budget=budgets.of_layernorm,
    gradient=_norm(3, 5),
    gpu={"16,384 rows of 4096": _norm(16384, HIDDEN)},
    cpu={"1,024 rows of 4096": _norm(1024, HIDDEN)},
    operations=per_element(7),
)

# Losses

_LONG = ("float32", "bfloat16", "float64")
"""The dtypes in which the square of a large number is one too."""


def _classes(*shape: int, kind: str = "normal") -> Make:
    *outer, classes = shape
    return lambda draw: call(getattr(draw, kind)(*shape), draw.integers(0, classes, *outer))


def _far_classes(draw: Draw) -> Call:
    """Targets beyond what 16 bits can number, each the most or the least probable."""
    logits = draw.normal(4, 150001)
    targets = np.array([65535, 65536, 150000, 0], np.int32)
    logits[np.arange(4), targets] = draw.listed([9, -9, 9, -9])
    return call(logits, targets)


def _with_logit(value: float, at: Any, *targets: int) -> Make:
    """Set the logits of nine classes at an index to a value."""

    def make(draw: Draw) -> Call:
        logits = draw.normal(3, 9)
        logits[at] = value
        return call(logits, np.array(targets, np.int32))

    return make


_CROSS_ENTROPY = Row(
    "cross_entropy",
    (
        Case("2 × 7 tokens of 32000", _classes(2, 7, VOCABULARY)),
        Case("one row", _classes(1, 10)),
        Case("no axis", _classes(11)),
        Case("one class", _classes(5, 1)),
        Case("the last counts most", _classes(6, 100, kind="heavy")),
        Case(
            "targets out of range",
            lambda draw: call(draw.normal(4, 9), np.array([0, 9, 3, -1], np.int32)),
        ),
        Case(
            "targets far out of range",
            lambda draw: call(draw.normal(2, 9), np.array([3, 65536 + 3], np.int32)),
        ),
        Case("targets above 65,535", _far_classes, LARGE),
        Case("many tokens", _classes(3, 1031, 257), LARGE),
        Case("very many tokens", _classes(70001, 5), LARGE),
        Case("large", lambda draw: call(draw.uniform(-1e4, 1e4, 5, 33), draw.integers(0, 33, 5))),
        Case("far below zero", lambda draw: call(draw.uniform(-2e3, -1e3, 5, 33), np.arange(5))),
        Case("one class is impossible", _with_logit(-inf, np.s_[:, 4], 0, 8, 3)),
        Case("the target is impossible", _with_logit(-inf, np.s_[:, 4], 0, 8, 4)),
        Case("nan", _with_logit(nan, (1, 4), 0, 8, 3)),
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


def _image(
    x: tuple[int, ...], weight: tuple[int, ...], *, bias: bool = True, filters: int = 0, **how: Any
) -> Make:
    """Draw an image, its filters, which are counted on the axis `filters`, and a bias."""

    def make(draw: Draw) -> Call:
        b = draw.normal(weight[filters]) if bias else None
        return call(draw.normal(*x), draw.normal(*weight), b, **how)

    return make


_expand = partial(_image, filters=1)


def _conv_operations(made: Call) -> int:
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
        Case("nan and infinities times zero", _image_of_nan),
    ),
    budget=budgets.of_magnitudes(
        "conv2d", lambda x, weight, bias=None, stride=1, padding=0: size_of(weight[0])
    ),
    gradient=_image((1, 2, 4, 4), (2, 2, 3, 3), padding=1),
    gpu={"32 images, 3 × 3, 256 channels": _image((32, 256, 56, 56), (256, 256, 3, 3), padding=1)},
    cpu={"1 image, 3 × 3, 64 channels": _image((1, 64, 28, 28), (64, 64, 3, 3), padding=1)},
    operations=_conv_operations,
)


def _transposed_nan(draw: Draw) -> Call:
    x, weight = draw.normal(1, 2, 5, 4), draw.normal(2, 3, 3, 2)
    x[0, 0, 2, 3], x[0, 1, 4, 0] = nan, inf
    return call(x, weight, None, stride=2)


_CONV_TRANSPOSE2D = Row(
    "conv_transpose2d",
    (
        Case("3 × 3 over 16 channels", _expand((2, 16, 7, 5), (16, 9, 3, 3), padding=1)),
        Case("twice the size", _expand((1, 6, 9, 8), (6, 5, 2, 2), stride=2)),
        Case(
            "twice the size, odd",
            _expand((2, 3, 5, 7), (3, 4, 3, 3), stride=2, padding=1, output_padding=1),
        ),
        Case("more cut off than the kernel has", _expand((1, 2, 5, 5), (2, 3, 1, 2), padding=1)),
        Case(
            "its own numbers on each axis",
            _expand(
                (2, 3, 4, 5), (3, 4, 3, 2), stride=(2, 3), padding=(1, 0), output_padding=(0, 2)
            ),
        ),
        Case("a large image", _expand((2, 5, 65, 33), (5, 7, 4, 4), stride=2, padding=1), LARGE),
        Case("many channels", _expand((1, 65, 7, 9), (65, 130, 3, 3), stride=2), LARGE),
        Case("nan and infinities", _transposed_nan),
    ),
    budget=budgets.of_magnitudes(
        "conv_transpose2d",
        lambda x, weight, bias=None, stride=1, padding=0, output_padding=0: size_of(weight[:, 0]),
    ),
    gradient=_expand((1, 2, 3, 3), (2, 2, 3, 3), stride=2, padding=1, output_padding=1),
    gpu={"32 images of 28², 256 channels": _expand((32, 256, 28, 28), (256, 128, 2, 2), stride=2)},
    cpu={"1 image of 28², 64 channels": _expand((1, 64, 28, 28), (64, 32, 2, 2), stride=2)},
    operations=lambda made: 2 * size_of(made.arguments[0]) * size_of(made.arguments[1][0]),
)


def _pool(*shape: int, size: int = 2, **how: int) -> Make:
    return lambda draw: call(draw.normal(*shape), size, **how)


def _pool_of_nan(draw: Draw) -> Call:
    x = draw.normal(1, 2, 6, 6)
    x[0, 0, 0, 1], x[0, 0, 3, 2], x[0, 1, 5, 5] = nan, inf, -inf
    x[0, 1, :2, :2] = -inf
    return call(x, 2)


def _pooling_row(op: str, budget: Any) -> Row:
    return Row(
        op,
        (
            Case("2 × 2 of 16 channels", _pool(2, 16, 12, 10)),
            Case("the whole image", _pool(2, 3, 7, 7, size=7)),
            Case(
                "its own size and stride on each axis",
                lambda draw: call(draw.normal(2, 3, 9, 11), (3, 2), (1, 3)),
            ),
            Case("a large image", _pool(2, 33, 131, 133, size=3, stride=2), LARGE),
            Case("many channels", _pool(5, 300, 17, 19), LARGE),
            Case("below zero", lambda draw: call(-draw.positive(1, 2, 6, 6), 2)),
            Case("nan and infinities", _pool_of_nan),
        ),
        FLOATS,
        budget,
        gradient=_pool(1, 2, 4, 4),
        gpu={"32 images of 56², 256 channels": _pool(32, 256, 56, 56)},
        cpu={"1 image of 56², 64 channels": _pool(1, 64, 56, 56)},
    )


LAYERS: tuple[Row, ...] = (
    _MATMUL,
    _LINEAR,
    _OUTER,
    _EINSUM,
    *_SUMS,
    _softmax_row("softmax", budgets.of_softmax),
    _softmax_row("log_softmax", budgets.of_log_softmax),
    _RMSNORM,
    _LAYERNORM,
    _CROSS_ENTROPY,
    _MEAN_SQUARED_ERROR,
    _CONV2D,
    _CONV_TRANSPOSE2D,
    _pooling_row("max_pool2d", budgets.exact),
    _pooling_row(
        "avg_pool2d",
        budgets.of_magnitudes(
            "avg_pool2d",
            lambda x, size, stride=None: prod((size, size) if isinstance(size, int) else size),
        ),
    ),
)
