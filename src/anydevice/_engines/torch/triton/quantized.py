"""Products with quantized weights, whose codes are unpacked in registers.

A single row may be quantized to int8 in blocks of 32 and multiplied with the codes four at a time
(dp4a), as llama.cpp does with Q8_1. Otherwise, tiles of the weight are dequantized to the dtype of
`x` and multiplied by matrix units. Norm, bias, gate and residual are fused as in `decode_products`.
With fewer than 8 bits, a byte holds neighbouring columns, so the columns of `x` are first
reordered: even ones, then odd ones.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from anydevice._core.quantized import QuantizedWeight
from anydevice._core.record import replace
from anydevice._engines.torch.triton import decode_products
from anydevice._engines.torch.triton.decode_products import (
    ProductTile,
    ProductTiles,
    _silu,
    begin,
    end,
    wait,
)
from anydevice._engines.torch.triton.launch import counters, overlapping, start

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def"

Weights = QuantizedWeight | tuple[QuantizedWeight, ...]

GROUP = 32
"""Numbers of `x` that share a scale; rows of weights must be whole groups."""
PART = 2048
"""Numbers of a row that one program puts in order, if the row has no norm."""

TILES: ProductTiles = {
    ("4 bits", 1): ProductTile(2, 1024, 1),
    ("8 bits", 1): ProductTile(2, 2048, 4),
    ("output, 4 bits", 1): ProductTile(4, 2048, 8),
    ("head, 4 bits", 1): ProductTile(4, 1024, 2),
    ("qkv, 8 bits", 1): ProductTile(2, 1024, 1),
    ("gate_up, 8 bits", 1): ProductTile(1, 2048, 4),
    ("down, 8 bits", 1): ProductTile(2, 2048, 2),
    ("4 bits", 16): ProductTile(32, 256, 2, stages=2, splits=4),
    ("8 bits", 16): ProductTile(64, 128, 4, stages=3, splits=2),
    ("output, 4 bits", 16): ProductTile(32, 512, 2, stages=2, splits=2),
    ("gate_up, 4 bits", 16): ProductTile(32, 512, 2, stages=2),
    ("down, 4 bits", 16): ProductTile(32, 256, 2, stages=2, splits=8),
    ("head, 4 bits", 16): ProductTile(64, 512, 2, stages=2),
    ("4 bits", 32): ProductTile(128, 256, 4, stages=2, splits=4),
    ("8 bits", 32): ProductTile(64, 128, 4, stages=3, splits=2),
    ("gate_up, 4 bits", 32): ProductTile(32, 256, 2, stages=2),
    ("down, 4 bits", 32): ProductTile(128, 256, 4, stages=2, splits=8),
    ("head, 4 bits", 32): ProductTile(128, 256, 4, stages=2),
    ("4 bits", 64): ProductTile(64, 256, 4, stages=2, splits=4),
    ("8 bits", 64): ProductTile(64, 128, 4, stages=3, splits=2),
    ("qkv, 4 bits", 64): ProductTile(32, 128, 2, stages=2, splits=4),
    ("gate_up, 4 bits", 64): ProductTile(64, 128, 4, stages=3),
    ("head, 4 bits", 64): ProductTile(128, 128, 4, stages=3),
}
"""Tiles tuned on an H200, by bits and padded rows; a key with a product goes before one without."""

FLOAT8_TILES: ProductTiles = {
    ("qkv", 1): ProductTile(4, 4096, 4),
    ("output", 1): ProductTile(2, 2048, 1),
    ("gate_up", 1): ProductTile(2, 4096, 4),
    ("down", 1): ProductTile(2, 1024, 1),
    ("head", 1): ProductTile(4, 4096, 4),
    ("op", 1): ProductTile(2, 2048, 4),
}
"""Tiles for one row and float8 weights, by product."""

BLOCK = 2**24
"""Elements of a matrix that are dequantized at a time for many rows."""
UNPACKED = ProductTile(64, 256, 4)
"""The rows and columns of a program that dequantizes, and its warps."""


@cache
def _is_float8(table: tuple[float, ...]) -> bool:
    """Whether a table has the numbers of float8 e4m3."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    own = torch.tensor(table)
    return len(own) == len(numbers) and own.allclose(numbers, rtol=0, atol=0, equal_nan=True)


@cache
def _converts_float8(device: torch.device) -> bool:
    return _has_dp4a(device) and torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def _table(table: tuple[float, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(table, dtype=torch.float32, device=device)


def serves(weight: Any, gated: bool = False) -> bool:
    """Whether the kernels take a weight: matrices of whole groups in contiguous arrays."""
    if isinstance(weight, tuple):
        return not gated and all(map(serves, weight))
    if not isinstance(weight, QuantizedWeight) or weight.ndim != 2 or not weight.shape[0]:
        return False
    columns, block = weight.shape[1], weight.block
    arrays: dict[str, Any] = dict(weight.arrays)
    return (
        columns % GROUP == 0
        and (block == GROUP // 2 or block % GROUP == 0)
        and (block & (block - 1) == 0 or block == columns)
        and {name: tuple(array.shape) for name, array in arrays.items()}
        == {name: shape for name, shape in weight.array_shapes().items() if name in arrays}
        and all(x.is_contiguous() and x.data_ptr() % 4 == 0 for x in arrays.values())
        and all(x.storage_offset() % 4 == 0 for x in arrays.values())
    )


def _rows_of_tile(rows: int) -> int:
    """Return the rows of a tile of x, as the matrix units take them."""
    return max(16, triton.next_power_of_2(rows))


def _bits(weight: QuantizedWeight) -> str:
    return "8 bits" if weight.low_bits == 8 else "4 bits"


def tile_of(
    kind: str, rows: int, weight: QuantizedWeight, tiles: ProductTiles | None, in_order: bool
) -> ProductTile:
    """Return the tile of a product with some rows, fitted to the weight."""
    bits, inputs, known = _bits(weight), weight.shape[1], tiles or TILES
    tile = known.get((f"{kind}, {bits}", rows)) or known[bits, rows]
    if in_order and tile.release == "first":
        tile = replace(tile, release="waited")
    some = _fitting_columns(weight, tile.inputs)
    splits = 1 if rows == 1 else max(1, min(tile.splits, inputs // some))
    return replace(tile, inputs=some, splits=splits)


class Arranged:
    """Some rows in the order of unpacked columns, in their dtype or as int8 with scales."""

    def __init__(
        self, x: Tensor, norm: Tensor | None, eps: float, planes: int, rounded: bool
    ) -> None:
        rows, inputs = x.shape
        self.planes, self.scales, self.sums = planes, x, x
        if planes == 1 and norm is None and not rounded:
            self.x = x
            return
        self.x = torch.empty_like(x, dtype=torch.int8 if rounded else x.dtype)
        if rounded:
            self.scales = x.new_empty((rows, inputs // GROUP), dtype=torch.float32)
            self.sums = x.new_empty((rows, 2 * inputs // GROUP), dtype=torch.float32)
        block = triton.next_power_of_2(inputs if norm is not None else min(inputs, PART))
        start(
            _arrange, (rows, triton.cdiv(inputs, block)), x.device,
            x, norm, self.x, self.scales, self.sums, inputs, eps,
            planes=planes, rounded=rounded, block=block,
            num_warps=min(16, max(1, block // 256)), **overlapping(x.device),
        )  # fmt: skip


def product(
    kind: str,
    x: Tensor,
    weights: Weights,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    factor: float = 1.0,
    tiles: ProductTiles | None = None,
    in_order: bool = False,
    exact: bool = True,
    terms: int = 1,
) -> Tensor:
    """Multiply as `decode_products.product` does; parts of a weight may have different schemes.

    Unless `exact`, a single row is rounded to int8. Each weight is a sum of `terms` numbers in
    the dtype of x; 2 terms give nearly float32. A gated weight has one part.
    """
    parts = parts_of(weights)
    rows = len(x)
    if rows == 1 and len(parts) == 1 and has_float8_rows(parts[0]):
        codes: Any = parts[0].codes
        scales: Any = parts[0].scales
        return decode_products.product(
            kind, x, codes.view(torch.float8_e4m3fn), scales=scales, norm=norm, eps=eps, bias=bias,
            gated=gated, residual=residual, factor=factor, tiles=FLOAT8_TILES, in_order=in_order,
        )  # fmt: skip
    outputs = sum(part.shape[0] for part in parts) // (2 if gated else 1)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    arranged: dict[tuple[int, bool], Arranged] = {}
    at = 0
    for part in parts:
        rounded = rows == 1 and not exact and part.table is None
        key = 1 if part.low_bits == 8 else 2, rounded
        if key not in arranged:
            arranged[key] = Arranged(x, norm, eps, *key)
        wide = part.shape[0] // (2 if gated else 1)
        share = None if bias is None else bias[at : at + part.shape[0]]
        _multiply(
            tile_of(kind, 1 if rounded else _rows_of_tile(rows), part, tiles, in_order),
            arranged[key], part, share, residual, out, at, wide, gated, factor, rounded, terms,
        )  # fmt: skip
        at += wide
    return out


def _multiply(
    tile: ProductTile, x: Arranged, weight: QuantizedWeight, bias: Tensor | None,
    residual: Tensor | None, out: Tensor, at: int, outputs: int, gated: bool, factor: float,
    rounded: bool, terms: int,
) -> None:  # fmt: skip
    """Write the columns of the result from `at` on."""
    rows, width = out.shape
    inputs, sides, device = weight.shape[1], 2 if gated else 1, out.device
    programs = triton.cdiv(outputs, tile.outputs)
    step = tile.inputs * tile.splits
    shared = {
        "inputs": inputs, "bits": weight.bits, "low": weight.low_bits, "block": weight.block,
        "zero": weight.zero, "sides": sides, "block_outputs": tile.outputs, "some": tile.inputs,
        "even": inputs % step == 0 and outputs % tile.outputs == 0, "release": tile.release,
        "num_warps": tile.warps, **overlapping(device),
    }  # fmt: skip
    # All else reads and writes the row of a matrix that begins at this column.
    out = out[:, at:] if at else out
    residual = residual[:, at:] if residual is not None and at else residual
    if rounded:
        start(
            _one_row, (programs,), device,
            x.x.view(torch.int32), x.scales, x.sums, *_words(weight), bias, residual, out,
            outputs, factor, dp4a=_has_dp4a(device), **shared,
        )  # fmt: skip
        return
    padded = _rows_of_tile(rows)
    partial = counts = None
    if tile.splits > 1:
        counts = counters(device, programs)
        shape = (tile.splits, programs * tile.outputs * sides, padded)
        partial = out.new_empty(shape, dtype=torch.float32)
    start(
        _some_rows, (programs, tile.splits), device,
        x.x, *_bytes(weight), bias, residual, out, partial, counts, rows, outputs, width, factor,
        planes=x.planes, terms=terms, float8=_as_float8(weight), block_rows=padded,
        assembly=_assembly_of(weight, out.dtype) if terms == 1 else None,
        splits=tile.splits, stages=tile.stages, **shared,
    )  # fmt: skip


def _assembly_of(weight: QuantizedWeight, dtype: torch.dtype) -> Any:
    """Return the assembly that dequantizes a weight on NVIDIA's cards, if there is one."""
    codes: Any = weight.codes
    if weight.low_bits != 4 or weight.table is not None or not _has_dp4a(codes.device):
        return None
    return _assembly(dtype, weight.zero, weight.high is not None)


@cache
def _has_dp4a(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.version.hip


def _words(weight: QuantizedWeight) -> tuple[Any, ...]:
    """Return the arrays of a weight, with the codes of 8 columns in one element."""
    arrays: Any = weight
    codes = arrays.codes.view(torch.int16 if weight.low_bits == 2 else torch.int32)
    high = arrays.high
    if high is not None and weight.bits - weight.low_bits == 2:
        high = high.view(torch.int16)
    return (codes, high, *_scales(weight))


def _bytes(weight: QuantizedWeight) -> tuple[Any, ...]:
    """Return the arrays of a weight as they are, with the table of its levels if it has one."""
    codes: Any = weight.codes
    levels = None
    if weight.table is not None and not _as_float8(weight):
        levels = _table(weight.table, codes.device)
    return (codes, weight.high, *_scales(weight), levels)


def has_float8_rows(weight: QuantizedWeight) -> bool:
    """Whether the numbers of a weight are in float8, with one scale for each row."""
    whole = weight.block == weight.shape[1] and weight.minimums is None
    return whole and weight.shape[1] % 16 == 0 and _as_float8(weight)


def multiply_rounded(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Round the rows of x to float8, with a scale for each, and multiply by the library's product.

    Both must have multiples of 16 rows.
    """
    rows, inputs = x.shape
    rounded = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    steps = x.new_empty((rows, 1), dtype=torch.float32)
    start(
        _round, (rows,), x.device, x, rounded, steps, inputs,
        block=triton.next_power_of_2(inputs), num_warps=8,
    )  # fmt: skip
    codes: Any = weight.codes
    scales: Any = weight.scales
    return torch._scaled_mm(
        rounded, codes.view(torch.float8_e4m3fn).t(), steps, scales.float().t(), bias,
        out_dtype=x.dtype, use_fast_accum=True,
    )  # fmt: skip


def _as_float8(weight: QuantizedWeight) -> bool:
    codes: Any = weight.codes
    return weight.table is not None and _converts_float8(codes.device) and _is_float8(weight.table)


def _scales(weight: QuantizedWeight) -> tuple[Any, ...]:
    return weight.scales, weight.minimums, weight.super_scales, weight.super_minimums


def dequantized(weights: Weights, dtype: torch.dtype, terms: int = 1) -> list[Tensor]:
    """Return the numbers of a matrix as the sum of some terms, each rounded to a dtype."""
    parts = parts_of(weights)
    first: Any = parts[0].codes
    count, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
    out = [torch.empty((count, inputs), dtype=dtype, device=first.device) for _ in range(terms)]
    at = 0
    for part in parts:
        _dequantize(part, None, out[0][at:], out[1][at:] if terms > 1 else None, part.shape[0])
        at += part.shape[0]
    return out


def dequantized_rows(weight: QuantizedWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows of a matrix with these numbers, rounded to a dtype; NaN if there is none."""
    out = torch.empty((*ids.shape, weight.shape[1]), dtype=dtype, device=ids.device)
    _dequantize(weight, ids, out, None, ids.numel())
    return out


def _dequantize(
    weight: QuantizedWeight, ids: Tensor | None, out: Tensor, rest: Tensor | None, count: int
) -> None:
    (rows, inputs), columns = weight.shape, _fitting_columns(weight, UNPACKED.inputs)
    some = min(UNPACKED.outputs, triton.next_power_of_2(count))
    start(
        _unpack, (triton.cdiv(count, some), triton.cdiv(inputs, columns)), out.device,
        *_bytes(weight), ids, out, rest, count, rows,
        inputs=inputs, bits=weight.bits, low=weight.low_bits, block=weight.block,
        zero=weight.zero, float8=_as_float8(weight), block_rows=some, some=columns,
        num_warps=UNPACKED.warps,
    )  # fmt: skip


def product_of_many(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Multiply many rows as if the weight were float32, a block of its rows at a time."""
    outputs, inputs = weight.shape
    y = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    step = max(1, BLOCK // inputs)
    for at in range(0, outputs, step):
        end = min(outputs, at + step)
        arrays: Any = {name: array[at:end] for name, array in weight.arrays.items()}  # type: ignore[index]
        block = weight.with_arrays(arrays, (end - at, inputs))
        high, low = dequantized(block, x.dtype, terms=2)
        wide = torch.mm(x, high.t(), out_dtype=torch.float32)
        wide += torch.mm(x, low.t(), out_dtype=torch.float32)
        y[:, at:end] = wide if bias is None else wide + bias[at:end]
    return y


def parts_of(weights: Weights) -> tuple[QuantizedWeight, ...]:
    """Return the parts of a weight, which may have different schemes."""
    return weights if isinstance(weights, tuple) else (weights,)


def _fitting_columns(weight: QuantizedWeight, columns: int) -> int:
    """Return the columns of a tile, a power of two: at most as many as given, but at least 64."""
    return max(2 * GROUP, min(columns, triton.next_power_of_2(weight.shape[1])))


# Grid (rows, inputs / block): norm a row, round it if asked, and write column c of n planes to
# place (c % n) · inputs / n + c // n.
@triton.jit
def _arrange(
    x, norm, out, scales, sums, inputs, eps, planes: tl.constexpr, rounded: tl.constexpr,
    block: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    begin(overlap, "first")
    column = tl.program_id(1) * block + tl.arange(0, block)
    here = column < inputs
    if norm is not None:
        scale = tl.load(norm + column, here, 0).to(tl.float32)
    wait(overlap, "first")
    row = tl.program_id(0).to(tl.int64)
    value = tl.load(x + row * inputs + column, here, 0).to(tl.float32)
    if norm is not None:
        value *= tl.rsqrt(tl.sum(value * value, 0) / inputs + eps) * scale
    place = row * inputs + column % planes * (inputs // planes) + column // planes
    if rounded:
        value = tl.reshape(value, (block // 32, 32))
        # A block of zeros has no step, and one with NaN an infinite one, so that its sums are NaN.
        size = tl.where(value == value, tl.abs(value), float("inf"))
        step = tl.max(size, 1) / 127.0
        inverse = tl.where(step > 1e-38, 1.0 / step, 0.0)  # of a smaller step it is infinite
        code = tl.floor(value * inverse[:, None] + 0.5)
        group = tl.program_id(1) * (block // 32) + tl.arange(0, block // 32)
        tl.store(scales + row * (inputs // 32) + group, step, group * 32 < inputs)
        half = tl.sum(tl.reshape(code, (block // 16, 16)), 1)
        half *= tl.reshape(tl.broadcast_to(step[:, None], (block // 32, 2)), (block // 16,))
        number = tl.program_id(1) * (block // 16) + tl.arange(0, block // 16)
        tl.store(sums + row * (inputs // 16) + number, half, number * 16 < inputs)
        tl.store(out + place, tl.reshape(code, (block,)).to(tl.int8), here)
    else:
        tl.store(out + place, value.to(out.dtype.element_ty), here)


# Grid (rows,): round a row to float8; its largest number is the largest of the type.
@triton.jit
def _round(x, out, steps, inputs, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    value = tl.load(x + row * inputs + column, column < inputs, 0).to(tl.float32)
    step = tl.max(tl.abs(value), 0) / 448.0
    inverse = tl.where(step > 1e-38, 1.0 / step, 0.0)  # of a smaller step it is infinite
    place = out + row * inputs + column
    tl.store(place, (value * inverse).to(out.dtype.element_ty), column < inputs)
    tl.store(steps + row, step)


@triton.jit
def _dot4(codes, x, sums, dp4a: tl.constexpr):
    """Add the products of four unsigned and four signed bytes."""
    if dp4a:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [codes, x, sums], dtype=tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
    for byte in tl.static_range(4):
        sums += ((codes >> (8 * byte)) & 0xFF) * ((x << (24 - 8 * byte)) >> 24)
    return sums


@triton.jit
def _spread(pairs):
    """Move the low 2 bits of each nibble of a 16-bit number to a byte of its own."""
    pairs = (pairs | (pairs << 8)) & 0x00330033
    return (pairs | (pairs << 4)) & 0x03030303


@triton.jit
def _codes_of_eight(word, high, bits: tl.constexpr, low: tl.constexpr):
    """Unpack 8 codes into bytes: the even columns, and the odd ones."""
    if low == 4:
        even = word & 0x0F0F0F0F
        odd = (word >> 4) & 0x0F0F0F0F
    else:
        even = _spread(word.to(tl.int32) & 0x3333)
        odd = _spread((word.to(tl.int32) >> 2) & 0x3333)
    if bits - low == 1:
        # A product with 1 + 2⁶ + 2¹² + 2¹⁸ moves bit 2k to bit 8k, and no carry gets there.
        rest = high.to(tl.int32)
        even |= ((rest & 0x55) * (0x41041 << low)) & (0x01010101 << low)
        odd |= (((rest >> 1) & 0x55) * (0x41041 << low)) & (0x01010101 << low)
    if bits - low == 2:
        rest = high.to(tl.int32)
        even |= _spread(rest & 0x3333) << low
        odd |= _spread((rest >> 2) & 0x3333) << low
    return even, odd


@triton.jit
def _read(pointer, spot, here, even: tl.constexpr):
    """Load what is read once."""
    if even:
        value = tl.load(pointer + spot, eviction_policy="evict_first")
    else:
        value = tl.load(pointer + spot, here, 0, eviction_policy="evict_first")
    return value


@triton.jit
def _read_often(pointer, here, even: tl.constexpr):
    """Load what other programs load too."""
    if even:
        value = tl.load(pointer, eviction_policy="evict_last")
    else:
        value = tl.load(pointer, here, 0, eviction_policy="evict_last")
    return value


@triton.jit
def _block_scale(
    scales, supers, line, unit, here, inputs: tl.constexpr, block: tl.constexpr,
    even: tl.constexpr,
):  # fmt: skip
    """Load scales or minimums of blocks as float32, times their super-scales."""
    scale = _read(scales, line * (inputs // block) + unit, here, even).to(tl.float32)
    if supers is not None:
        group = unit * block // 256
        scale *= _read(supers, line * (inputs // 256) + group, here, even).to(tl.float32)
    return scale


# Grid (outputs / block_outputs,): a product of one rounded row. Rows of a gated weight alternate
# with those of its second half, so that both sums of an output are neighbours.
@triton.jit
def _one_row(
    x, steps, sums, codes, high, scales, minimums, super_scales, super_minimums,
    bias, residual, out, outputs, factor, dp4a: tl.constexpr,
    inputs: tl.constexpr, bits: tl.constexpr, low: tl.constexpr, block: tl.constexpr,
    zero: tl.constexpr, sides: tl.constexpr, block_outputs: tl.constexpr, some: tl.constexpr,
    even: tl.constexpr, release: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    begin(overlap, release)
    lines: tl.constexpr = block_outputs * sides
    groups: tl.constexpr = inputs // 32
    at_once: tl.constexpr = some // 32
    words: tl.constexpr = 8 if low == 8 else 4
    halves: tl.constexpr = 2 if block == 16 else 1
    lane = tl.arange(0, lines)
    output = tl.program_id(0) * block_outputs + lane // sides
    known = output < outputs
    line = (output + lane % sides * outputs).to(tl.int64)
    group = tl.arange(0, at_once)
    word = tl.arange(0, words)[None, None, :]
    row = line[:, None, None] * (groups * words)
    total = tl.zeros([lines, at_once], tl.float32)
    spot = row + group[None, :, None] * words + word
    here = known[:, None, None] & (group < groups)[None, :, None]
    first_codes = _read(codes, spot, here, even)
    if high is not None:
        first_high = _read(high, spot, here, even)
    wait(overlap, release)
    for first in tl.static_range(0, groups, at_once):
        now = first + group
        here = known[:, None, None] & (now < groups)[None, :, None]
        spot = row + now[None, :, None] * words + word
        value = first_codes if first == 0 else _read(codes, spot, here, even)
        rest = value
        if high is not None:
            rest = first_high if first == 0 else _read(high, spot, here, even)
        # One pointer per line keeps each element in its thread: no layout conversion.
        place = x + (line * 0)[:, None, None] + now[None, :, None] * words + word
        nothing = tl.zeros([lines, at_once, words], tl.int32)
        if low == 8:
            dots = _dot4(value, tl.load(place, here, 0), nothing, dp4a)
        else:
            left, right = _codes_of_eight(value, rest, bits, low)
            dots = _dot4(left, tl.load(place, here, 0), nothing, dp4a)
            dots = _dot4(right, tl.load(place + groups * words, here, 0), dots, dp4a)
        step = tl.load(steps + now, now < groups, 0)[None, :]
        here = known[:, None] & (now < groups)[None, :]
        for half in tl.static_range(halves):
            if halves == 2:
                unit = now * 2 + half
                dot = tl.sum(tl.where(word // (words // 2) == half, dots, 0), 2)
                added = tl.load(sums + unit, now < groups, 0)[None, :]
            else:
                unit = now // (block // 32)
                dot = tl.sum(dots, 2)
                added = tl.load(sums + now * 2, now < groups, 0)[None, :]
                added += tl.load(sums + now * 2 + 1, now < groups, 0)[None, :]
            unit = (unit ^ tl.program_id(1))[None, :]  # 0, which keeps loads unvectorized
            scale = _block_scale(
                scales, super_scales, line[:, None], unit, here, inputs, block, even
            )
            part = dot.to(tl.float32) * step
            if zero > 0:
                part -= zero * added
            total += scale * part
            if minimums is not None:
                total += added * _block_scale(
                    minimums, super_minimums, line[:, None], unit, here, inputs, block, even
                )
    end(overlap, release)
    result = tl.sum(total, 1)
    if bias is not None:
        result += tl.load(bias + line, known, 0).to(tl.float32)
    place = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    if sides == 2:
        gate, up = tl.split(tl.reshape(result, (block_outputs, 2)))
        result = _silu(gate) * up
    if residual is not None:
        result = tl.load(residual + place, place < outputs, 0).to(tl.float32) + factor * result
    tl.store(out + place, result.to(out.dtype.element_ty), place < outputs)


_SCALED = """{
    .reg .b32 low, high, base, one, zero;
    mov.b32 base, BASE;
    mov.b32 one, ONE;
    mov.b32 zero, ZERO;
    and.b32 low, $4, 0x0F0F0F0F;
    shr.b32 high, $4, 4;
    and.b32 high, high, 0x0F0F0F0F;MORE
    prmt.b32 $0, low, base, 0x4140;
    prmt.b32 $1, low, base, 0x4342;
    prmt.b32 $2, high, base, 0x4140;
    prmt.b32 $3, high, base, 0x4342;
    fma.rn.KIND $0, $0, one, zero;
    fma.rn.KIND $1, $1, one, zero;
    fma.rn.KIND $2, $2, one, zero;
    fma.rn.KIND $3, $3, one, zero;
    fma.rn.KIND $0, $0, $5, $7;
    fma.rn.KIND $1, $1, $6, $8;
    fma.rn.KIND $2, $2, $5, $7;
    fma.rn.KIND $3, $3, $6, $8;
}"""
"""PTX for `_assembly`: a code below the high byte of 128 in bfloat16 is 128 + code, and below that
of 1024 in float16, 1024 + code."""


_SPLIT = tl.constexpr("""{
    .reg .b32 left, right;
    shl.b32 left, $4, 4;
    and.b32 $0, left, 0x30303030;
    shl.b32 left, $4, 2;
    and.b32 $1, left, 0x30303030;
    shr.b32 right, $4, 2;
    and.b32 $3, right, 0x30303030;
    and.b32 $2, $4, 0x30303030;
}""")
"""PTX that spreads the high bits of 6-bit codes: to bits 4 and 5 of a byte for each column."""


@cache
def _assembly(dtype: torch.dtype, zero: int, more: bool) -> str:
    """Return PTX that dequantizes four bytes of two codes each: scale · (code - zero) + minimum."""
    if dtype == torch.bfloat16:
        base, one, less, kind = "0x43434343", "0x3F803F80", 0xC300 + zero, "bf16x2"
    else:
        base, one, less, kind = "0x64646464", "0x3C003C00", 0xE400 + zero, "f16x2"
    both = "\n    or.b32 low, low, $9;\n    or.b32 high, high, $10;" if more else ""
    text = _SCALED.replace("BASE", base).replace("ONE", one).replace("KIND", kind)
    return text.replace("ZERO", f"0x{less:04X}{less:04X}").replace("MORE", both)


@triton.jit
def _scale_of_columns(
    scales, supers, line, known, start, last, inputs: tl.constexpr, block: tl.constexpr,
    lines: tl.constexpr, some: tl.constexpr, columns: tl.constexpr, even: tl.constexpr,
):  # fmt: skip
    """Load the scales of `some` inputs, and repeat each for its share of the columns."""
    blocks: tl.constexpr = some // block if block <= some else 1
    unit = start // block + tl.arange(0, blocks)[None, :]
    within = known[:, None] & (unit * block < last)
    scale = _block_scale(scales, supers, line[:, None], unit, within, inputs, block, even)
    wide = tl.broadcast_to(scale[:, :, None], (lines, blocks, columns // blocks))
    return tl.reshape(wide, (lines, columns))


@triton.jit
def _high_bits(
    high, line, pair, here, inputs: tl.constexpr, bits: tl.constexpr, low: tl.constexpr,
    even: tl.constexpr,
):  # fmt: skip
    """Load the bits of pairs of columns beyond the low ones, in their place."""
    more: tl.constexpr = bits - low
    pairs: tl.constexpr = 4 // more
    place = line[:, None] * (inputs * more // 8) + (pair // pairs)[None, :]
    rest = _read(high, place, here, even).to(tl.int32) >> (pair % pairs * 2 * more)[None, :]
    mask: tl.constexpr = (1 << more) - 1
    return (rest & mask) << low, ((rest >> more) & mask) << low


@triton.jit
def _numbers(code, levels, zero: tl.constexpr):
    if levels is not None:
        number = tl.load(levels + code)
    else:
        number = code.to(tl.float32)
        if zero > 0:
            number -= zero
    return number


@triton.jit
def _tile(
    codes, high, scales, minimums, super_scales, super_minimums, levels, line, known, start, last,
    inputs: tl.constexpr, bits: tl.constexpr, low: tl.constexpr, block: tl.constexpr,
    zero: tl.constexpr, float8: tl.constexpr, lines: tl.constexpr, some: tl.constexpr,
    even: tl.constexpr,
):  # fmt: skip
    """Dequantize `some` columns of a few lines in float32: the even ones, and the odd ones.

    With codes of 8 bits both are the same, and have all columns.
    """
    planes: tl.constexpr = 1 if low == 8 else 2
    columns: tl.constexpr = some // planes
    pair = start // planes + tl.arange(0, columns)
    here = known[:, None] & (pair * planes < last)[None, :]
    scale = _scale_of_columns(
        scales, super_scales, line, known, start, last, inputs, block, lines, some, columns,
        even,
    )  # fmt: skip
    byte = pair // 2 if low == 2 else pair
    packed = _read(codes, line[:, None] * (inputs * low // 8) + byte[None, :], here, even)
    if low == 8:
        first = packed.to(tl.float8e4nv, bitcast=True) if float8 else packed.to(tl.int32)
        left = _numbers(first, levels, zero) * scale
        right = left
    else:
        packed = packed.to(tl.int32)
        if low == 2:
            packed = packed >> (4 * (pair % 2))[None, :]
        first = packed & ((1 << low) - 1)
        second = (packed >> low) & ((1 << low) - 1)
        if high is not None:
            more, others = _high_bits(high, line, pair, here, inputs, bits, low, even)
            first |= more
            second |= others
        left = _numbers(first, levels, zero) * scale
        right = _numbers(second, levels, zero) * scale
    if minimums is not None:
        added = _scale_of_columns(
            minimums, super_minimums, line, known, start, last, inputs, block, lines, some, columns,
            even,
        )  # fmt: skip
        left += added
        right += added
    return left, right


@triton.jit
def _assembled_tile(
    codes, high, scales, minimums, super_scales, super_minimums, line, known, start, last, like,
    inputs: tl.constexpr, bits: tl.constexpr, block: tl.constexpr, lines: tl.constexpr,
    some: tl.constexpr, even: tl.constexpr, assembly: tl.constexpr,
):  # fmt: skip
    """Dequantize as `_tile` does, but in the dtype of `like`, two numbers at a time."""
    columns: tl.constexpr = some // 2
    pair = start // 2 + tl.arange(0, columns)
    here = known[:, None] & (pair * 2 < last)[None, :]
    scale = _scale_of_columns(
        scales, super_scales, line, known, start, last, inputs, block, lines, some, columns,
        even,
    ).to(like.dtype.element_ty)  # fmt: skip
    added = tl.zeros_like(scale)
    if minimums is not None:
        added = _scale_of_columns(
            minimums, super_minimums, line, known, start, last, inputs, block, lines, some, columns,
            even,
        ).to(like.dtype.element_ty)  # fmt: skip
    packed = _read(codes, line[:, None] * (inputs // 2) + pair[None, :], here, even)
    if high is not None:
        if bits == 6:
            byte = start // 4 + tl.arange(0, columns // 2)
            here = known[:, None] & (byte * 4 < last)[None, :]
            rest = _read(high, line[:, None] * (inputs // 4) + byte[None, :], here, even)
            a, b, c, d = tl.inline_asm_elementwise(
                _SPLIT, "=&r,=&r,=&r,=&r,r", [rest],
                dtype=(tl.uint8, tl.uint8, tl.uint8, tl.uint8), is_pure=True, pack=4,
            )  # fmt: skip
            more = tl.reshape(tl.join(a, c), (lines, columns))
            others = tl.reshape(tl.join(b, d), (lines, columns))
        else:
            more, others = _high_bits(high, line, pair, here, inputs, bits, 4, even)
            more, others = more.to(tl.uint8), others.to(tl.uint8)
        left, right = tl.inline_asm_elementwise(
            assembly, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r", [packed, scale, added, more, others],
            dtype=(like.dtype.element_ty, like.dtype.element_ty), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        left, right = tl.inline_asm_elementwise(
            assembly, "=&r,=&r,=&r,=&r,r,r,r,r,r", [packed, scale, added],
            dtype=(like.dtype.element_ty, like.dtype.element_ty), is_pure=True, pack=4,
        )  # fmt: skip
    return left, right


@triton.jit
def _add_product(sums, numbers, value, terms: tl.constexpr):
    """Add the product of float32 numbers, rounded to the dtype of `value` in some terms."""
    for _ in tl.static_range(terms):
        rounded = numbers.to(value.dtype)
        sums = tl.dot(value, tl.trans(rounded), sums, input_precision="ieee")
        if terms > 1:
            numbers -= rounded.to(tl.float32)
    return sums


# Grid (outputs / block_outputs, splits): split-K. Lines of a gated weight alternate, as above.
@triton.jit(do_not_specialize=["rows"])
def _some_rows(
    x, codes, high, scales, minimums, super_scales, super_minimums, levels,
    bias, residual, out, partial, counts, rows, outputs, width, factor,
    inputs: tl.constexpr, bits: tl.constexpr, low: tl.constexpr, block: tl.constexpr,
    zero: tl.constexpr, sides: tl.constexpr, block_outputs: tl.constexpr, some: tl.constexpr,
    float8: tl.constexpr, planes: tl.constexpr, terms: tl.constexpr, block_rows: tl.constexpr,
    splits: tl.constexpr, stages: tl.constexpr, even: tl.constexpr, release: tl.constexpr,
    assembly: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    share: tl.constexpr = (inputs + splits * some - 1) // (splits * some) * some
    lines: tl.constexpr = block_outputs * sides
    begin(overlap, release)
    split = tl.program_id(1)
    last = tl.minimum(split * share + share, inputs)
    lane = tl.arange(0, lines)
    output = tl.program_id(0) * block_outputs + lane // sides
    known = output < outputs
    line = (output + lane % sides * outputs).to(tl.int64)
    row = tl.arange(0, block_rows)
    pair = tl.arange(0, some // planes)
    wait(overlap, release)

    sums = tl.zeros([block_rows, lines], tl.float32)
    for step in tl.range(0, share, some, num_stages=stages):
        first = split * share + step
        if assembly is not None:
            left, right = _assembled_tile(
                codes, high, scales, minimums, super_scales, super_minimums, line, known, first,
                last, x, inputs, bits, block, lines, some, even, assembly,
            )  # fmt: skip
        else:
            left, right = _tile(
                codes, high, scales, minimums, super_scales, super_minimums, levels, line, known,
                first, last, inputs, bits, low, block, zero, float8, lines, some, even,
            )  # fmt: skip
        place = first // planes + pair
        # Rows beyond the last repeat others.
        here = (place * planes < last)[None, :] & (row >= 0)[:, None]
        where = x + (row % rows)[:, None] * inputs + place[None, :]
        value = _read_often(where, here, even)
        sums = _add_product(sums, left, value, terms)
        if planes == 2:
            value = _read_often(where + inputs // 2, here, even)
            sums = _add_product(sums, right, value, terms)

    end(overlap, release)
    is_last = True
    if splits > 1:
        # Each split stores its sums; the last to finish adds them in a fixed order.
        spot = row[:, None] * (tl.num_programs(0) * lines)
        spot += (tl.program_id(0) * lines + lane)[None, :]
        size = tl.num_programs(0) * lines * block_rows
        tl.store(partial + split * size + spot, sums)
        tl.debug_barrier()
        count = counts + tl.program_id(0)
        is_last = tl.atomic_add(count, 1, sem="acq_rel") == splits - 1
        if is_last:
            tl.store(count, 0)
            sums = tl.zeros([block_rows, lines], tl.float32)
            for index in tl.static_range(splits):
                sums += tl.load(partial + index * size + spot, cache_modifier=".cg")

    if is_last:
        result = sums
        if bias is not None:
            result += tl.load(bias + line, known, 0).to(tl.float32)[None, :]
        if sides == 2:
            gate, up = tl.split(tl.reshape(result, (block_rows, block_outputs, 2)))
            result = _silu(gate) * up
        place = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
        where = row[:, None] * width + place[None, :]
        here = (place < outputs)[None, :] & (row < rows)[:, None]
        if residual is not None:
            result = tl.load(residual + where, here, 0).to(tl.float32) + factor * result
        tl.store(out + where, result.to(out.dtype.element_ty), here)


# Grid (count / block_rows, inputs / some): the numbers of a matrix, and what rounding left.
@triton.jit(do_not_specialize=["count", "rows"])
def _unpack(
    codes, high, scales, minimums, super_scales, super_minimums, levels, ids, out, rest, count,
    rows, inputs: tl.constexpr, bits: tl.constexpr, low: tl.constexpr, block: tl.constexpr,
    zero: tl.constexpr, float8: tl.constexpr, block_rows: tl.constexpr, some: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    known = row < count
    start = tl.program_id(1) * some
    line = row.to(tl.int64)
    real = known
    if ids is not None:
        line = tl.load(ids + row, known, -1).to(tl.int64)
        real = (line >= 0) & (line < rows)
    left, right = _tile(
        codes, high, scales, minimums, super_scales, super_minimums, levels, line, real, start,
        inputs, inputs, bits, low, block, zero, float8, block_rows, some, False,
    )  # fmt: skip
    if low < 8:
        left = tl.reshape(tl.join(left, right), (block_rows, some))
    column = start + tl.arange(0, some)
    here = known[:, None] & (column < inputs)[None, :]
    if ids is not None:
        left = tl.where(real[:, None], left, float("nan"))
    place = row.to(tl.int64)[:, None] * inputs + column[None, :]
    rounded = left.to(out.dtype.element_ty)
    tl.store(out + place, rounded, here)
    if rest is not None:
        tl.store(rest + place, (left - rounded.to(tl.float32)).to(out.dtype.element_ty), here)
