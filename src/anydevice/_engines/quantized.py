"""Quantized weights: dequantized by a library's operators, and products on the CPU by NumPy.

Few rows of x are multiplied with the codes, block by block, and only sums are scaled:
x · w = scale · (x · code - zero · Σx) + minimum · Σx. For more rows, some rows of the weight at a
time are dequantized, which stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from anydevice._core.quantized import QuantizedWeight

Array = np.ndarray[Any, Any]
Function = Callable[..., Any]

FEW_ROWS = 8
"""The most rows of x that are multiplied with codes, as measured on x86 CPUs."""
_BLOCK = 1 << 17
"""Elements of a weight that are unpacked at a time."""


def dequantizer(
    stack: Function, wide: Function, pick: Callable[[tuple[float, ...], Any], Any]
) -> Callable[[QuantizedWeight], Any]:
    """Return a function that dequantizes in float32, by the operators of a NumPy-like module.

    `wide` returns an array in float32; `pick` returns the entries of a table at uint8 indices.
    """

    def split(packed: Any, bits: int) -> Any:
        if bits == 8:
            return packed
        parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
        return stack(parts, -1).reshape(*packed.shape[:-1], packed.shape[-1] * len(parts))

    return lambda weight: _dequantize(weight, split, wide, pick)


def _dequantize(weight: QuantizedWeight, split: Function, wide: Function, pick: Function) -> Any:
    codes = codes_of(weight, split)
    numbers = wide(codes) if weight.table is None else pick(weight.table, codes)
    numbers = numbers - weight.zero if weight.zero else numbers
    numbers = numbers.reshape(*weight.scales.shape, weight.block)
    numbers = numbers * block_scales(weight.scales, weight.super_scales, wide)[..., None]
    if weight.minimums is not None:
        minimums = block_scales(weight.minimums, weight.super_minimums, wide)
        numbers = numbers + minimums[..., None]
    return numbers.reshape(weight.shape)


def codes_of(weight: QuantizedWeight, split: Function) -> Any:
    """Return the codes as uint8; `split(packed, bits)` unpacks numbers from bytes."""
    low = weight.low_bits
    codes = split(weight.codes, low)
    if weight.high is None:
        return codes
    return codes | (split(weight.high, weight.bits - low) << low)


def block_scales(scales: Any, factors: Any, wide: Function) -> Any:
    """Return scales or minimums in float32, multiplied by their super-scales."""
    if factors is None:
        return wide(scales)
    grouped = wide(scales).reshape(*factors.shape, scales.shape[-1] // factors.shape[-1])
    grouped = grouped * wide(factors)[..., None]
    return grouped.reshape(scales.shape)


# With NumPy


def dequantize(weight: QuantizedWeight) -> Array:
    """Return the numbers of a weight with NumPy arrays in float32."""
    with np.errstate(all="ignore"):
        result: Array = _dequantize(weight, split_codes, as_float32, _pick)
    return result


def split_codes(packed: Array, bits: int) -> Array:
    """Return the numbers of `bits` bits in bytes: each byte is spread over a word, by halves."""
    count = 8 // bits
    words = packed.astype(f"<u{count}", order="C")
    width, lane = 8, 8 * count
    while width > bits:
        width, lane = width // 2, lane // 2
        words |= words << (lane - width)
        words &= sum(((1 << width) - 1) << at for at in range(0, 8 * count, lane))
    return words.view(np.uint8).reshape(*packed.shape[:-1], packed.shape[-1] * count)


def as_float32(x: Array) -> Array:
    return x.astype(np.float32)


def _pick(table: tuple[float, ...], codes: Array) -> Array:
    return np.asarray(table, np.float32)[codes]


def linear(x: Array, weight: QuantizedWeight, bias: Array | None = None) -> Array:
    """Compute `ops.quantized_linear` for float32 x and NumPy arrays."""
    rows, columns = weight.shape
    inputs = np.ascontiguousarray(x.reshape(-1, columns).T)
    product = np.empty((rows, inputs.shape[1]), np.float32)
    few = inputs.shape[1] <= FEW_ROWS
    if few:
        inputs = inputs.reshape(columns // weight.block, weight.block, inputs.shape[1])
    step = max(1, _BLOCK // max(1, columns))
    with np.errstate(all="ignore"):
        for start in range(0, rows, step):
            part = slice(start, min(rows, start + step))
            arrays: Any = {name: array[part] for name, array in weight.arrays.items()}  # type: ignore[index]
            block = weight.with_arrays(arrays, (part.stop - start, columns))
            if few:
                product[part] = _scaled_sums(block, inputs)
            else:
                np.matmul(dequantize(block), inputs, out=product[part])
        result = product.T if bias is None else product.T + bias
    return np.ascontiguousarray(result).reshape(*x.shape[:-1], rows)


def _scaled_sums(weight: QuantizedWeight, inputs: Array) -> Any:
    """Return the products of rows with inputs (blocks, columns of a block, n)."""
    codes = codes_of(weight, split_codes)
    numbers = as_float32(codes) if weight.table is None else _pick(weight.table, codes)
    blocks = numbers.reshape(len(codes), *inputs.shape[:2]).transpose(1, 0, 2)
    parts = np.matmul(blocks, inputs)
    sums = inputs.sum(1)
    if weight.zero:
        parts -= weight.zero * sums[:, None]
    parts *= block_scales(weight.scales, weight.super_scales, as_float32).T[..., None]
    total = parts.sum(0)
    if weight.minimums is not None:
        total += block_scales(weight.minimums, weight.super_minimums, as_float32) @ sums
    return total
