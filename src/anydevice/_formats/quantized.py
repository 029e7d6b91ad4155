"""Blocks of quantized numbers as files have them, unpacked into `QuantizedWeight` and back.

Layouts are those of GGUF (ggml-quants), the OCP Microscaling formats (MXFP4) and the packages that
wrote the files; each function names its own. NumPy only: an engine places the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from anydevice._core.quantized import BLOCK_TYPES, QuantizedWeight, low_bits
from anydevice._core.record import Record
from anydevice._engines import quantized as host

if TYPE_CHECKING:
    from anydevice._core.array import HostArray

FLOAT8_TABLES: dict[str, tuple[float, ...]] = {
    name: tuple(np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32).tolist())
    for name, dtype in (
        ("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
        ("float8_e5m2", ml_dtypes.float8_e5m2),
    )
}
"""The number of each byte of a float8, by the name of the dtype."""

dequantize = host.dequantize
unpack_codes = partial(host.codes_of, split=host.split_codes)


def block_scales(weight: QuantizedWeight) -> tuple[HostArray, HostArray | None]:
    """Return the scale and the minimum of each block in float32, of a weight with NumPy arrays."""
    scales = host.block_scales(weight.scales, weight.super_scales, host.as_float32)
    if weight.minimums is None:
        return scales, None
    return scales, host.block_scales(weight.minimums, weight.super_minimums, host.as_float32)


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


def unpack_stream(raw: HostArray, bits: int) -> HostArray:
    """Return the codes that lie in bytes (…, bytes) without gaps, the first in the lowest bits.

    >>> unpack_stream(np.array([0b10_001_000, 0b1_100_011_0], 'uint8'), 3).tolist()[:5]
    [0, 1, 2, 3, 4]
    """
    if 8 % bits == 0:
        return host.split_codes(raw, bits)
    planes: HostArray = np.unpackbits(raw, axis=-1, bitorder="little")
    planes = planes[..., : planes.shape[-1] // bits * bits].reshape(*raw.shape[:-1], -1, bits)
    return np.packbits(planes, axis=-1, bitorder="little")[..., 0]


# --- GGUF's blocks ----------------------------------------------------------------------------


class Codes(Record):
    """The bytes of a block that hold `bits` of each code: byte i of `size` has codes i, size + i, …

    The first code is in its lowest bits. With a `size` of 0, bits or bytes are in their order.
    """

    start: int
    stop: int
    size: int
    bits: int


_LOW, _NIBBLES = (
    {"Q8_0": Codes(2, 34, 0, 8), "Q2_K": Codes(16, 80, 32, 2), "Q3_K": Codes(32, 96, 32, 2)},
    {"Q4_0": (2, 18, 16), "Q4_1": (4, 20, 16), "Q5_0": (6, 22, 16), "Q5_1": (8, 24, 16),
     "Q4_K": (16, 144, 32), "Q5_K": (48, 176, 32), "Q6_K": (0, 128, 64),
     "IQ4_NL": (2, 18, 16), "IQ4_XS": (8, 136, 16), "MXFP4": (1, 17, 16)},
)  # fmt: skip
LOW = _LOW | {kind: Codes(*place, 4) for kind, place in _NIBBLES.items()}
"""The low bits of codes in the blocks of each type."""
HIGH = {
    "Q5_0": Codes(2, 6, 0, 1),
    "Q5_1": Codes(4, 8, 0, 1),
    "Q3_K": Codes(0, 32, 32, 1),
    "Q5_K": Codes(16, 48, 32, 1),
    "Q6_K": Codes(128, 192, 32, 2),
}
"""The high bits of codes of 3, 5 and 6 bits."""


def unpack_blocks(
    kind: str, raw: HostArray, shape: Sequence[int], whole: bool = False
) -> QuantizedWeight:
    """Return a weight from the bytes of its blocks in a GGUF file.

    `kind` is a name in `BLOCK_TYPES`; `shape` is (…, rows, columns), and columns are whole blocks.
    With `whole`, each code of 5 and 6 bits has a byte of its own, and the weight has 8 bits.

    Words of several codes are computed at once, in arrays of the size of `raw`: unpack about 256 kB
    at a time, which stay in a core's cache.
    """
    block, blocks = BLOCK_TYPES[kind], raw.reshape(-1, BLOCK_TYPES[kind].bytes)
    low, high = LOW[kind], HIGH.get(kind)
    fields = _scales(kind, blocks)
    whole = whole and block.bits in (5, 6)
    if whole and high is not None:
        codes = _spread(blocks, low)
        above = _spread(blocks, high).view(np.uint64)
        codes.view(np.uint64)[:] |= above << np.uint64(low.bits)
        fields["codes"] = codes
    else:
        fields["codes"] = _order(blocks, low)
        fields |= {} if high is None else {"high": _order(blocks, high)}
    if kind == "Q8_0":
        fields["codes"] ^= np.uint8(128)
    return QuantizedWeight(
        scheme=kind.lower(),
        shape=tuple(shape),
        bits=8 if whole else block.bits,
        block=block.scaled,
        zero=block.zero,
        table=block.table,
        **{name: value.reshape(*shape[:-1], -1) for name, value in fields.items()},
    )


def pack_blocks(kind: str, codes: HostArray, scales: HostArray) -> HostArray:
    """Return the bytes of blocks, (n, bytes), from codes of uint8 (n, columns).

    `scales` are all bytes of each block that hold no codes, in their order.
    """
    block, parts = BLOCK_TYPES[kind], [(LOW[kind], codes & ((1 << LOW[kind].bits) - 1))]
    if kind in HIGH:
        parts.append((HIGH[kind], codes >> LOW[kind].bits))
    raw, rest = np.empty((len(codes), block.bytes), np.uint8), np.ones(block.bytes, np.bool_)
    for place, bits in parts:
        own = slice(place.start, place.stop)
        rest[own] = False
        if place.size:  # codes that share a byte become neighbours
            bits = bits.reshape(len(codes), -1, 8 // place.bits, place.size).swapaxes(2, 3)
        raw[:, own] = _pack(bits.reshape(len(codes), -1), place.bits)
    raw[:, rest] = scales
    return raw


def _field(raw: HostArray, start: int, stop: int, dtype: Any = np.uint32) -> HostArray:
    """Return bytes of each block as words; a block's are copied at once."""
    item, blocks = np.dtype((np.void, stop - start)), len(raw)
    field: HostArray = np.ndarray(blocks, item, raw, start, raw.strides[:1]).copy().view(dtype)
    return field.reshape(blocks, -1)


def _half(raw: HostArray, start: int) -> HostArray:
    """Return the float16 at a byte of each block."""
    return _field(raw, start, start + 2, np.float16)


def _spread(raw: HostArray, place: Codes) -> HostArray:
    """Return codes in their order, each in a byte."""
    if not place.size:
        return np.unpackbits(raw[:, place.start : place.stop], axis=-1, bitorder="little")
    words = _field(raw, place.start, place.stop)
    mask, item = np.uint32(((1 << place.bits) - 1) * 0x01010101), np.dtype((np.void, place.size))
    spread = np.empty((words.nbytes // place.size, 8 // place.bits), item)
    for number in range(8 // place.bits):
        part = words >> np.uint32(number * place.bits)
        part &= mask
        spread[:, number] = part.reshape(-1).view(item)
    return spread.view(np.uint8).reshape(len(raw), -1)


def _order(raw: HostArray, place: Codes) -> HostArray:
    """Return packed codes in their order."""
    if not place.size:
        return _field(raw, place.start, place.stop, np.uint8)
    if place.bits == 4:
        words, half = _field(raw, place.start, place.stop), np.dtype((np.void, place.size // 2))
        packed = np.empty((words.nbytes // place.size, 2), half)
        for number, shifted in enumerate((words, words >> np.uint32(4))):
            part = shifted & np.uint32(0x0F0F0F0F)
            part |= part >> np.uint32(4)
            packed[:, number] = part.view("<u2").astype(np.uint8).reshape(-1).view(half)
        return packed.view(np.uint8).reshape(len(raw), -1)
    codes = _spread(raw, place)
    if place.bits == 1:
        return np.packbits(codes, axis=-1, bitorder="little")
    words = codes.view(np.uint32)
    words |= words >> np.uint32(6)
    words |= words >> np.uint32(12)
    return words.astype(np.uint8)


def has_finite_scales(kind: str, raw: HostArray) -> bool:
    """Whether no scale or minimum in float16 is NaN or infinite; blocks of MXFP4 have none."""
    start = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}.get(kind, 0)
    halves = _field(raw, start, start + 2 + 2 * BLOCK_TYPES[kind].minimums, np.uint16)
    return kind == "MXFP4" or bool(((halves & 0x7C00) != 0x7C00).all())


def _scales(kind: str, raw: HostArray) -> dict[str, Any]:
    """Return the scales and minimums of blocks, as `QuantizedWeight` has them."""
    if kind == "MXFP4":
        return {"scales": power_scales(raw[:, :1])}
    if BLOCK_TYPES[kind].columns == 32:
        fields = {"scales": _half(raw, 0)}
        return fields | {"minimums": _half(raw, 2)} if BLOCK_TYPES[kind].minimums else fields
    if kind == "Q6_K":
        return {"scales": _field(raw, 192, 208, np.int8), "super_scales": _half(raw, 208)}
    if kind == "Q3_K":
        scales = _spread(raw, Codes(96, 104, 8, 4)) | _spread(raw, Codes(104, 108, 4, 2)) << 4
        return {"scales": scales.view(np.int8) - np.int8(32), "super_scales": _half(raw, 108)}
    if kind == "IQ4_XS":
        upper = _field(raw, 2, 4, np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)
        scales = host.split_codes(raw[:, 4:8], 4) | ((upper & 3) << 4).astype(np.uint8)
        return {"scales": scales.view(np.int8) - np.int8(32), "super_scales": _half(raw, 0)}
    start = 80 if kind == "Q2_K" else 0
    if kind == "Q2_K":
        words = _field(raw, 0, 16)
        scales, minimums = words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F
    else:  # 8 of 6 bits each: the upper bits of the last four are in the bytes of the first four
        words, shape = _field(raw, 4, 16), (len(raw), 2)
        scales, minimums = np.empty(shape, np.uint32), np.empty(shape, np.uint32)
        scales[:, 0], minimums[:, 0] = (words[:, :2] & 0x3F3F3F3F).T
        above, rest = (words[:, :2] >> 2) & 0x30303030, words[:, 2]
        scales[:, 1] = (rest & 0x0F0F0F0F) | above[:, 0]
        minimums[:, 1] = ((rest >> 4) & 0x0F0F0F0F) | above[:, 1]
    return {
        "scales": scales.view(np.int8), "super_scales": _half(raw, start),
        "minimums": minimums.view(np.int8), "super_minimums": -_half(raw, start + 2),
    }  # fmt: skip


def power_scales(exponents: HostArray) -> HostArray:
    """Return half the powers of two that e8m0 stands for, exactly, in bfloat16."""
    wide = exponents.astype(np.uint16)
    halves = np.where(wide < 2, 0x20 << wide, (wide - 1) << 7).astype(np.uint16)
    return halves.view(ml_dtypes.bfloat16)
