"""Cases of quantized weights: random codes and scales of every layout that formats have."""

from __future__ import annotations

from math import nan
from typing import Any

import numpy as np

from anydevice._check import budgets
from anydevice._check.cases.case import FLOATS, Call, Case, Draw, Make, Row, call, size_of
from anydevice._core.quantized import SUPER_BLOCK, QuantizedWeight, low_bits
from anydevice._core.record import Record
from anydevice._formats.quantized import FLOAT8_TABLES

_LEVELS = tuple(float(round(level**3 / 2**13)) for level in range(-127, 129))


class Scheme(Record):
    """The layout of a weight; `block` is 0 for one block a row."""

    bits: int
    block: int
    zero: int = 0
    minimums: bool = False
    integer_scales: bool = False
    table: tuple[float, ...] | None = None


SCHEMES = {
    "q8_0": Scheme(8, 32, 128),
    "q4_0": Scheme(4, 32, 8),
    "q4_1": Scheme(4, 32, minimums=True),
    "q5_0": Scheme(5, 32, 16),
    "q2_k": Scheme(2, 16, minimums=True, integer_scales=True),
    "q3_k": Scheme(3, 16, 4, integer_scales=True),
    "q4_k": Scheme(4, 32, minimums=True, integer_scales=True),
    "q6_k": Scheme(6, 16, 32, integer_scales=True),
    "4 bits with a table": Scheme(4, 32, table=_LEVELS[::17]),
    "8 bits with a table": Scheme(8, 0, table=_LEVELS),
    "float8": Scheme(8, 0, table=FLOAT8_TABLES["float8_e4m3fn"]),
}
"""One of each layout, by the name of its best known scheme."""


def draw_weight(draw: Draw, scheme: str, *shape: int) -> QuantizedWeight:
    """Draw codes and scales; the numbers of a row have a spread of about 1 / √columns."""
    layout, rows, columns = SCHEMES[scheme], shape[:-1], shape[-1]
    low, blocks = low_bits(layout.bits), columns // (layout.block or columns)
    spread = columns**-0.5 * 2.0 ** (1 - layout.bits)

    def packed(bits: int) -> Any:
        return draw.integers(0, 256, *rows, columns * bits // 8).astype(np.uint8)

    def scales(size: int, spread: float) -> Any:
        return draw.normal(*rows, size, spread=spread).astype(np.float16)

    def integers() -> Any:
        return draw.integers(-32, 64, *rows, blocks).astype(np.int8)

    fields: dict[str, Any] = {"codes": packed(low)}
    if scheme == "float8":  # whose last codes are NaN
        fields["codes"] &= 0xBF
        spread *= 64
    if layout.bits > low:
        fields["high"] = packed(layout.bits - low)
    if layout.integer_scales:
        groups = columns // SUPER_BLOCK
        fields |= {"scales": integers(), "super_scales": scales(groups, spread / 32)}
        if layout.minimums:
            fields |= {"minimums": integers(), "super_minimums": scales(groups, spread / 8)}
    else:
        fields["scales"] = scales(blocks, spread)
        if layout.minimums:
            fields["minimums"] = scales(blocks, spread * 2)
    return QuantizedWeight(
        scheme, shape, layout.bits, layout.block or columns, **fields,
        zero=layout.zero, table=layout.table,
    )  # fmt: skip


def fitting_schemes(columns: int) -> list[str]:
    """Return the schemes whose blocks divide rows of this length."""
    return [
        name
        for name, layout in SCHEMES.items()
        if columns % (SUPER_BLOCK if layout.integer_scales else 32) == 0
    ]


def _product(rows: tuple[int, ...], into: int, out: int, scheme: str, bias: bool = False) -> Make:
    def make(draw: Draw) -> Call:
        weight = draw_weight(draw, scheme, out, into)
        return call(draw.normal(*rows, into), weight, draw.normal(out) if bias else None)

    return make


def _with_nan(draw: Draw) -> Call:
    x = draw.normal(3, 64)
    x[1, 5] = nan
    return call(x, draw_weight(draw, "q4_0", 7, 64))


def _nan_scale(draw: Draw) -> Call:
    weight = draw_weight(draw, "q8_0", 7, 64)
    scales: Any = weight.scales
    scales[1, 1] = nan
    return call(weight, dtype=draw.dtype.name)


_QUANTIZED_LINEAR = Row(
    "quantized_linear",
    (
        *(
            Case(f"one token, {name}", _product((1, 1), 512, 65, name, bias=True))
            for name in SCHEMES
        ),
        *(
            Case(f"12 tokens, {name}", _product((2, 6), 512, 65, name, bias=True))
            for name in SCHEMES
        ),
        Case("70 tokens", _product((70,), 256, 33, "q5_0")),
        Case("a vector", _product((), 64, 5, "q8_0")),
        Case("no rows", _product((0,), 64, 5, "q4_1")),
        Case("many rows and columns", _product((1,), 4096, 257, "q4_k"), ("float32", "bfloat16")),
        Case("rows that lie apart", _product((2, 3), 64, 33, "q5_0"), strided=True),
        Case("nan", _with_nan),
    ),
    budget=budgets.of_quantized_linear,
    inside="float32",
    gradient=_product((2, 3), 32, 5, "q8_0", bias=True),
    gpu={
        f"{name} of one token, 4096 → 14336": _product((1, 1), 4096, 14336, name)
        for name in ("q8_0", "q4_0", "q4_k")
    },
    cpu={
        f"{name} of one token, 1024 → 3584": _product((1, 1), 1024, 3584, name)
        for name in ("q8_0", "q4_0", "q4_k")
    },
    operations=lambda made: 2 * size_of(made.arguments[0]) * int(made.arguments[1].shape[0]),
)


def _numbers(scheme: str, *shape: int, rows: Any = None) -> Make:
    def make(draw: Draw) -> Call:
        weight = draw_weight(draw, scheme, *shape)
        options = {} if rows is None else {"rows": np.array(rows, np.int32)}
        return call(weight, dtype=draw.dtype.name, **options)

    return make


_DEQUANTIZE = Row(
    "dequantize",
    (
        *(Case(name, _numbers(name, 33, 512)) for name in SCHEMES),
        Case("experts", _numbers("4 bits with a table", 3, 5, 64)),
        Case("some rows", _numbers("q6_k", 9, 256, rows=[[0, 8], [3, 3]])),
        Case("rows that do not exist", _numbers("q3_k", 9, 256, rows=[-1, 2, 9])),
        Case("nan", _nan_scale),
        Case("one matrix of experts", _numbers("q8_0", 4, 3, 64, rows=[2])),
    ),
    FLOATS,
    budget=budgets.of_dequantize,
    inside="float32",
    gpu={"q4_k, 14336 · 4096": _numbers("q4_k", 14336, 4096)},
    cpu={"q4_k, 1024 · 1024": _numbers("q4_k", 1024, 1024)},
)

QUANTIZED: tuple[Row, ...] = (_QUANTIZED_LINEAR, _DEQUANTIZE)
