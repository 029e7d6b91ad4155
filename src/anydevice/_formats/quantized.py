"""Blocks of quantized numbers as files have them, unpacked into `QuantizedWeight` and back.

Layouts are those of GGUF (ggml-quants), the OCP Microscaling formats (MXFP4) and the packages that
wrote the files; each function names its own. NumPy only: an engine places the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from anydevice._core.quantized import SUPER_BLOCK, QuantizedWeight, low_bits
from anydevice._core.record import Record

if TYPE_CHECKING:
    from anydevice._core.array import HostArray

IQ4_NL_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The 16 levels of IQ4_NL and IQ4_XS (ggml's `kvalues_iq4nl`)."""
FP4_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The numbers of e2m1, doubled, so that they are integers; scales are halved."""

FLOAT8_TABLES: dict[str, tuple[float, ...]] = {
    name: tuple(np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32).tolist())
    for name, dtype in (
        ("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
        ("float8_e5m2", ml_dtypes.float8_e5m2),
    )
}
"""The number of each byte of a float8, by the name of the dtype."""


def pack_codes(codes: HostArray, bits: int) -> tuple[HostArray, HostArray | None]:
    """Pack codes (…, columns) of uint8; return their low bits, and their high bits if any.

    >>> [part.tolist() for part in pack_codes(np.array([33, 2, 0, 63], 'uint8'), 6)]
    [[33, 240], [194]]
    """
    low = low_bits(bits)
    return _pack(codes & ((1 << low) - 1), low), _pack(codes >> low, bits - low)


def _pack(codes: HostArray, bits: int) -> Any:
    """Pack codes of 1, 2, 4 or 8 bits into bytes, the first in the lowest bits; None for 0 bits."""
    if bits in (0, 8):
        return codes if bits else None
    packed: HostArray = codes[..., :: 8 // bits].copy()
    for place in range(1, 8 // bits):
        packed |= codes[..., place :: 8 // bits] << (place * bits)
    return packed


def unpack_codes(weight: QuantizedWeight) -> HostArray:
    """Return the codes of a weight with NumPy arrays, (…, columns) of uint8."""
    codes: HostArray = _unpack(weight.codes, weight.low_bits)
    if weight.high is not None:
        codes |= _unpack(weight.high, weight.bits - weight.low_bits) << weight.low_bits
    return codes


def _unpack(packed: Any, bits: int) -> HostArray:
    if bits == 8:
        return np.array(packed)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes: HostArray = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return codes.reshape(*packed.shape[:-1], -1)


def unpack_stream(raw: HostArray, bits: int) -> HostArray:
    """Return the codes that lie in bytes (…, bytes) without gaps, the first in the lowest bits.

    >>> unpack_stream(np.array([0b10_001_000, 0b1_100_011_0], 'uint8'), 3).tolist()[:5]
    [0, 1, 2, 3, 4]
    """
    if 8 % bits == 0:
        return _unpack(raw, bits)
    planes: HostArray = np.unpackbits(raw, axis=-1, bitorder="little")
    planes = planes[..., : planes.shape[-1] // bits * bits].reshape(*raw.shape[:-1], -1, bits)
    return np.packbits(planes, axis=-1, bitorder="little")[..., 0]


def block_scales(weight: QuantizedWeight) -> tuple[HostArray, HostArray | None]:
    """Return the scale and the minimum of each block in float32, of a weight with NumPy arrays."""
    scales = _multiply(weight.scales, weight.super_scales)
    if weight.minimums is None:
        return scales, None
    return scales, _multiply(weight.minimums, weight.super_minimums)


def _multiply(values: Any, factors: Any) -> HostArray:
    wide: HostArray = np.asarray(values).astype(np.float32)
    if factors is None:
        return wide
    grouped: HostArray = wide.reshape(*factors.shape, -1) * factors.astype(np.float32)[..., None]
    return grouped.reshape(wide.shape)


def dequantize(weight: QuantizedWeight) -> HostArray:
    """Return the numbers of a weight with NumPy arrays in float32, as the formats define them."""
    codes = unpack_codes(weight)
    if weight.table is None:
        numbers = codes.astype(np.float32) - np.float32(weight.zero)
    else:
        numbers = np.asarray(weight.table, np.float32)[codes]
    scales, minimums = block_scales(weight)
    blocks = numbers.reshape(*scales.shape, -1)
    blocks *= scales[..., None]
    if minimums is not None:
        blocks += minimums[..., None]
    return numbers.reshape(weight.shape)


class BlockType(Record):
    """A block type of GGUF: columns and bytes of a block, and how rows of them are unpacked."""

    columns: int
    bytes: int
    unpack: Callable[..., dict[str, Any]]
    wide: bool = False
    """Whether its codes have 5 or 6 bits."""


def unpack_blocks(
    kind: str, raw: HostArray, shape: Sequence[int], whole: bool = False
) -> QuantizedWeight:
    """Return a weight from the bytes of its blocks in a GGUF file.

    `kind` is a name in `BLOCK_TYPES`; `shape` is (…, rows, columns), and columns are whole blocks.
    With `whole`, each code of 5, 6 or 8 bits has a byte of its own, and the weight has 8 bits.

    Words of several codes are computed at once, in arrays of the size of `raw`: unpack about 256 kB
    at a time, which stay in a core's cache.
    """
    block = BLOCK_TYPES[kind]
    rows = shape[:-1]
    fields = block.unpack(raw.reshape(-1, block.bytes), **({"whole": whole} if block.wide else {}))
    merged: dict[str, Any] = {
        name: value.reshape(*rows, -1) if isinstance(value, np.ndarray) else value
        for name, value in fields.items()
    }
    return QuantizedWeight(scheme=kind.lower(), shape=tuple(shape), **merged)


def _field(raw: HostArray, start: int, stop: int, dtype: Any = np.uint32) -> HostArray:
    """Return bytes of each block as words; a block's are copied at once."""
    item, blocks = np.dtype((np.void, stop - start)), len(raw)
    field: HostArray = np.ndarray(blocks, item, raw, start, raw.strides[:1]).copy().view(dtype)
    return field.reshape(blocks, -1)


def _half(raw: HostArray, start: int) -> HostArray:
    """Return the float16 at a byte of each block."""
    return _field(raw, start, start + 2, np.float16)


def _interleave(parts: Sequence[HostArray], size: int) -> HostArray:
    """Return `size` bytes of each part in turn, (blocks, …)."""
    item = np.dtype((np.void, size))
    joined = np.empty((parts[0].nbytes // size, len(parts)), item)
    for place, part in enumerate(parts):
        joined[:, place] = part.reshape(-1).view(item)
    return joined.view(np.uint8).reshape(len(parts[0]), -1)


def _pairs(raw: HostArray, start: int, stop: int, size: int) -> HostArray:
    """Return packed codes in their order, where byte i of `size` has code i and, above, size + i.

    Two bytes are a word: `0xba`, `0xdc` become `0xca` and `0xdb`.
    """
    words = _field(raw, start, stop)
    low = words & 0x0F0F0F0F
    words &= 0xF0F0F0F0
    high = words >> 8
    words >>= 4
    high |= words
    np.right_shift(low, 4, out=words)
    low |= words
    parts = [half.view(np.uint16).astype(np.uint8) for half in (low, high)]
    return _interleave(parts, size // 2)


def _quarters(raw: HostArray, start: int, stop: int) -> HostArray:
    """Return packed codes of 2 bits in their order; byte i of 32 has codes i, 32 + i, 64 + i, …"""
    words, parts = _field(raw, start, stop), []
    for place in (0, 2, 4, 6):
        four = words >> place
        four &= 0x03030303
        four |= four >> 6
        four |= four >> 12
        parts.append(four.astype(np.uint8))
    return _interleave(parts, 8)


def _eighths(raw: HostArray, start: int, stop: int) -> HostArray:
    """Return packed bits in their order; byte i of 32 has bits i, 32 + i, 64 + i, …"""
    words = _field(raw, start, stop)
    parts = [(words >> place) & 0x01010101 for place in range(8)]
    return np.packbits(_interleave(parts, 32), axis=-1, bitorder="little")


def _bytes(raw: HostArray, start: int, stop: int, size: int, bits: int, top: int) -> HostArray:
    """Return codes in their order, each in a byte and shifted to below bit `top`.

    Byte i of `size` has codes i, size + i, …, the first in its lowest `bits`.
    """
    words, ones = _field(raw, start, stop), ((1 << bits) - 1) << (top - bits)
    mask, parts = np.uint32(ones * 0x01010101), []
    for place in range(0, 8, bits):
        shift = place - (top - bits)
        parts.append(words >> shift if shift > 0 else words << -shift)
        parts[-1] &= mask
    return _interleave(parts, size)


def _q4(raw: HostArray, start: int) -> dict[str, Any]:
    minimum: dict[str, Any] = {"minimums": _half(raw, 2)} if start == 4 else {"zero": 8}
    codes = _pairs(raw, start, start + 16, 16)
    return {"bits": 4, "block": 32, "codes": codes, "scales": _half(raw, 0), **minimum}


def _q5(raw: HostArray, start: int, whole: bool) -> dict[str, Any]:
    minimum: dict[str, Any] = {"minimums": _half(raw, 2)} if start == 8 else {"zero": 16}
    high = _field(raw, start - 4, start, np.uint8)
    codes: dict[str, Any]
    if whole:
        above = np.unpackbits(high, axis=-1, bitorder="little").view(np.uint32) << 4
        codes = _whole(_bytes(raw, start, start + 16, 16, 4, 4), above)
    else:
        codes = {"bits": 5, "codes": _pairs(raw, start, start + 16, 16), "high": high}
    return {"block": 32, **codes, "scales": _half(raw, 0), **minimum}


def _whole(low: HostArray, above: HostArray) -> dict[str, Any]:
    low |= above.view(np.uint8).reshape(low.shape)
    return {"bits": 8, "codes": low}


def _q8_0(raw: HostArray) -> dict[str, Any]:
    codes = (_field(raw, 2, 34) ^ 0x80808080).view(np.uint8)
    return {"bits": 8, "block": 32, "codes": codes, "scales": _half(raw, 0), "zero": 128}


def _q2_k(raw: HostArray) -> dict[str, Any]:
    words = _field(raw, 0, 16)
    return {
        "bits": 2, "block": 16, "codes": _quarters(raw, 16, 80),
        "scales": (words & 0x0F0F0F0F).view(np.int8), "super_scales": _half(raw, 80),
        "minimums": ((words >> 4) & 0x0F0F0F0F).view(np.int8), "super_minimums": -_half(raw, 82),
    }  # fmt: skip


def _q3_k(raw: HostArray) -> dict[str, Any]:
    scales = _bytes(raw, 96, 104, 8, 4, 4) | _bytes(raw, 104, 108, 4, 2, 6)
    return {
        "bits": 3, "block": 16, "codes": _quarters(raw, 32, 96), "high": _eighths(raw, 0, 32),
        "zero": 4, "scales": scales.view(np.int8) - np.int8(32), "super_scales": _half(raw, 108),
    }  # fmt: skip


def _scales_of_6_bits(raw: HostArray) -> dict[str, Any]:
    """Return the scales and minimums of 8 blocks from the first 16 bytes of a K-quant."""
    words = _field(raw, 4, 16)
    scales, minimums = np.empty((2, len(raw), 2), np.uint32)
    scales[:, 0], minimums[:, 0] = (words[:, :2] & 0x3F3F3F3F).T
    above, rest = (words[:, :2] >> 2) & 0x30303030, words[:, 2]
    scales[:, 1] = (rest & 0x0F0F0F0F) | above[:, 0]
    minimums[:, 1] = ((rest >> 4) & 0x0F0F0F0F) | above[:, 1]
    return {
        "block": 32,
        "scales": scales.view(np.int8), "super_scales": _half(raw, 0),
        "minimums": minimums.view(np.int8), "super_minimums": -_half(raw, 2),
    }  # fmt: skip


def _q4_k(raw: HostArray) -> dict[str, Any]:
    return {"bits": 4, "codes": _pairs(raw, 16, 144, 32), **_scales_of_6_bits(raw)}


def _q5_k(raw: HostArray, whole: bool) -> dict[str, Any]:
    codes: dict[str, Any]
    if whole:
        codes = _whole(_bytes(raw, 48, 176, 32, 4, 4), _bytes(raw, 16, 48, 32, 1, 5))
    else:
        codes = {"bits": 5, "codes": _pairs(raw, 48, 176, 32), "high": _eighths(raw, 16, 48)}
    return {**codes, **_scales_of_6_bits(raw)}


def _q6_k(raw: HostArray, whole: bool) -> dict[str, Any]:
    codes: dict[str, Any]
    if whole:
        codes = _whole(_bytes(raw, 0, 128, 64, 4, 4), _bytes(raw, 128, 192, 32, 2, 6))
    else:
        codes = {"bits": 6, "codes": _pairs(raw, 0, 128, 64), "high": _quarters(raw, 128, 192)}
    return {
        **codes, "block": 16, "zero": 32,
        "scales": _field(raw, 192, 208, np.int8),
        "super_scales": _half(raw, 208),
    }  # fmt: skip


def _iq4_nl(raw: HostArray) -> dict[str, Any]:
    return {
        "bits": 4, "block": 32, "codes": _pairs(raw, 2, 18, 16), "scales": _half(raw, 0),
        "table": IQ4_NL_TABLE,
    }  # fmt: skip


def _iq4_xs(raw: HostArray) -> dict[str, Any]:
    upper = _field(raw, 2, 4, np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)
    lower = (raw[:, 4:8, None] >> np.array([0, 4], np.uint8)) & 15
    scales = lower.reshape(-1, 8) | ((upper & 3) << 4).astype(np.uint8)
    return {
        "bits": 4, "block": 32, "codes": _pairs(raw, 8, 136, 16),
        "scales": scales.view(np.int8) - np.int8(32), "super_scales": _half(raw, 0),
        "table": IQ4_NL_TABLE,
    }  # fmt: skip


def _mxfp4(raw: HostArray) -> dict[str, Any]:
    return {
        "bits": 4, "block": 32, "codes": _pairs(raw, 1, 17, 16), "scales": power_scales(raw[:, :1]),
        "table": FP4_TABLE,
    }  # fmt: skip


def power_scales(exponents: HostArray) -> HostArray:
    """Return half the powers of two that e8m0 stands for, exactly, in bfloat16."""
    wide = exponents.astype(np.uint16)
    return np.where(wide < 2, 0x20 << wide, (wide - 1) << 7).astype(np.uint16).view(
        ml_dtypes.bfloat16
    )  # fmt: skip


BLOCK_TYPES = {
    "Q4_0": BlockType(32, 18, lambda raw: _q4(raw, 2)),
    "Q4_1": BlockType(32, 20, lambda raw: _q4(raw, 4)),
    "Q5_0": BlockType(32, 22, lambda raw, whole: _q5(raw, 6, whole), True),
    "Q5_1": BlockType(32, 24, lambda raw, whole: _q5(raw, 8, whole), True),
    "Q8_0": BlockType(32, 34, _q8_0),
    "Q2_K": BlockType(SUPER_BLOCK, 84, _q2_k),
    "Q3_K": BlockType(SUPER_BLOCK, 110, _q3_k),
    "Q4_K": BlockType(SUPER_BLOCK, 144, _q4_k),
    "Q5_K": BlockType(SUPER_BLOCK, 176, _q5_k, True),
    "Q6_K": BlockType(SUPER_BLOCK, 210, _q6_k, True),
    "IQ4_NL": BlockType(32, 18, _iq4_nl),
    "IQ4_XS": BlockType(SUPER_BLOCK, 136, _iq4_xs),
    "MXFP4": BlockType(32, 17, _mxfp4),
}
"""GGUF's block types whose codes and scales are kept as stored, by their names there."""
