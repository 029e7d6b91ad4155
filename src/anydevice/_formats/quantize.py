"""Floats as quantized weights: the blocks of GGUF's types, and float8 with a scale for each row.

Scales are searched in the spirit of ggml's quantizers: for each of several spacings of the levels,
the codes are rounded, and scale and minimum are their weighted least-squares fit; the fit with the
smallest error is kept (Kawrakow, k-quants, ggml 2023). Arrays are (block, blocks) while they are
fitted, so that each operation runs over many blocks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from anydevice._arrays.stage import usable_cores
from anydevice._core.files import PlainFile
from anydevice._core.locks import side_by_side
from anydevice._core.quantized import BLOCK_TYPES, IQ4_NL_TABLE, SUPER_BLOCK, QuantizedWeight
from anydevice._formats.load import MOST_THREADS, Advance, Quantizer, Segment
from anydevice._formats.quantized import FLOAT8_TABLES, pack_blocks, unpack_blocks

if TYPE_CHECKING:
    from anydevice._core.array import HostArray

CHUNK = 2**16
"""Elements that are fitted at a time: all arrays of a fit stay in a core's cache."""
_SPACINGS = np.linspace(-1, 1, 21, dtype=np.float32)
"""The spacings that are tried, as numbers of levels beyond the largest code."""


def _dot(a: HostArray, b: HostArray) -> HostArray:
    """Return the sum of products over each block."""
    return np.einsum("kn,kn->n", a, b)  # type: ignore[no-any-return]


def _inverse(numbers: HostArray) -> HostArray:
    """Return 1 / numbers, and 0 for 0 and for numbers whose inverse is not finite."""
    inverse: HostArray = 1 / numbers
    return np.where(np.isfinite(inverse), inverse, 0)


def fit_symmetric(x: HostArray, weights: HostArray, levels: int) -> HostArray:
    """Return the scales with which codes from -levels to levels - 1 fit blocks best."""
    high, low = x.max(0), x.min(0)
    peak = np.where(high > -low, high, low)
    scale: HostArray = -peak / np.float32(levels)
    best, inverse = np.zeros_like(peak), _inverse(peak)
    for offset in _SPACINGS:
        codes = x * (inverse * -(levels + offset))
        np.clip(np.rint(codes, out=codes), -levels, levels - 1, out=codes)
        weighted = weights * codes
        products, squares = _dot(weighted, x), _dot(weighted, codes)
        fitted = products * _inverse(squares)
        gain = fitted * products  # by this the error is smaller than that of zeros
        better = gain > best
        np.copyto(scale, fitted, where=better)
        np.copyto(best, gain, where=better)
    return scale


def fit_affine(
    x: HostArray, weights: HostArray, top: int, *, negative: bool = True
) -> tuple[HostArray, HostArray]:
    """Return the scales and minimums with which codes from 0 to `top` fit blocks best.

    With `negative`, no minimum is above 0.
    """
    low = np.minimum(x.min(0), 0) if negative else x.min(0)
    span = x.max(0) - low
    shifted = x - low
    scale, minimum, inverse = span / np.float32(top), low.copy(), _inverse(span)
    total, sums = weights.sum(0), _dot(weights, x)
    best = np.full_like(low, np.inf)
    for offset in _SPACINGS:
        codes = shifted * (inverse * (top + offset))
        np.minimum(np.rint(codes, out=codes), top, out=codes)
        weighted = weights * codes
        first, second, products = weighted.sum(0), _dot(weighted, codes), _dot(weighted, x)
        determinant = total * second - first * first
        inverted = _inverse(determinant)
        slope = (total * products - sums * first) * inverted
        start = (second * sums - first * products) * inverted
        if negative:
            slope = np.where(start > 0, products * _inverse(second), slope)
            start = np.minimum(start, 0)
        error = slope * (slope * second - 2 * products)
        error += start * (start * total + 2 * (slope * first - sums))
        better = (determinant > 0) & (error < best)
        for array, new in ((scale, slope), (minimum, start), (best, error)):
            np.copyto(array, new, where=better)
    return scale, minimum


# --- codes and scales of blocks, as `pack_blocks` takes them ----------------------------------

Parts = tuple[Any, list[Any]]
"""Codes (n, columns) of uint8, and the bytes of each block that hold no codes."""


def _halves(*numbers: HostArray) -> HostArray:
    """Return the bytes of one or two float16 of each block."""
    return np.stack(numbers, -1).astype(np.float16).view(np.uint8)


def _round_half(numbers: HostArray) -> HostArray:
    """Return the numbers as float16 holds them, in float32."""
    return numbers.astype(np.float16).astype(np.float32)


def _codes(x: HostArray, top: int) -> HostArray:
    """Return scaled blocks (block, n), rounded and limited, as (n, block) of uint8."""
    rounded: HostArray = np.clip(np.rint(x), 0, top).astype(np.uint8)
    return np.ascontiguousarray(rounded.T)


def _q8_0(x: HostArray) -> Parts:
    scale = np.abs(x).max(0) / np.float32(127)
    scaled = x * _inverse(scale)
    # Halves are rounded away from zero, as in C.
    return _codes(np.trunc(scaled + np.copysign(np.float32(0.5), scaled)) + 128, 255), [
        _halves(scale)
    ]


def _small(x: HostArray, bits: int, affine: bool) -> Parts:
    """Fit Q4_0, Q4_1, Q5_0 and Q5_1."""
    weights, top = np.ones_like(x), 2**bits - 1
    if affine:
        scale, minimum = map(_round_half, fit_affine(x, weights, top, negative=False))
        return _codes((x - minimum) * _inverse(scale), top), [_halves(scale, minimum)]
    half = 2 ** (bits - 1)
    scale = _round_half(fit_symmetric(x, weights, half))
    return _codes(x * _inverse(scale) + half, top), [_halves(scale)]


def _super(scales: HostArray, top: int) -> tuple[HostArray, HostArray]:
    """Return a float16 for each row of scales, which are 0 or more, and integers up to `top`."""
    shared = _round_half(scales.max(-1) / top)
    return shared, np.clip(np.rint(scales * _inverse(shared)[:, None]), 0, top)


def _k_affine(x: HostArray, block: int, bits: int) -> Parts:
    """Fit Q2_K, Q4_K and Q5_K."""
    top, limit = 2**bits - 1, 15 if bits == 2 else 63
    weights = np.abs(x)
    if bits > 2:
        weights += np.sqrt(np.square(x).mean(0))
    fitted = fit_affine(x, weights, top)
    scale, minimum = (part.reshape(-1, SUPER_BLOCK // block) for part in fitted)
    (shared, scales), (shift, minimums) = _super(scale, limit), _super(-minimum, limit)
    start, step = (minimums * shift[:, None]).ravel(), (scales * shared[:, None]).ravel()
    codes = _codes((x + start) * _inverse(step), top)
    small, above = scales.astype(np.uint8), minimums.astype(np.uint8)
    if bits == 2:
        return codes, [small | above << 4, _halves(shared, shift)]
    both = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (small, above)]
    return codes, [_halves(shared, shift), *both, small[:, 4:] & 15 | above[:, 4:] << 4]


def _k_symmetric(x: HostArray, bits: int) -> Parts:
    """Fit Q3_K and Q6_K."""
    levels, limit = 2 ** (bits - 1), 32 if bits == 3 else 128
    scale = fit_symmetric(x, np.square(x), levels).reshape(-1, SUPER_BLOCK // 16)
    high, low = scale.max(-1), scale.min(-1)
    shared = _round_half(np.where(high > -low, high, low) / -limit)
    small = np.clip(np.rint(scale * _inverse(shared)[:, None]), -limit, limit - 1)
    step = (small * shared[:, None]).ravel()
    codes, scales = _codes(x * _inverse(step) + levels, 2 * levels - 1), small.astype(np.int8)
    if bits == 6:
        return codes, [scales.view(np.uint8), _halves(shared)]
    raised = (scales + 32).view(np.uint8)
    low_bits = raised[:, :8] & 15 | (raised[:, 8:] & 15) << 4
    high_bits = sum((raised[:, 4 * n : 4 * n + 4] >> 4) << 2 * n for n in range(4))
    return codes, [low_bits, high_bits, _halves(shared)]


def _iq4_nl(x: HostArray) -> Parts:
    levels = np.array(IQ4_NL_TABLE, np.float32)
    bounds = (levels[1:] + levels[:-1]) / 2
    high, low, weights = x.max(0), x.min(0), np.square(x)
    peak = np.where(high > -low, high, low)
    scale, inverse, best = peak / levels[0], _inverse(peak), np.zeros_like(peak)
    for offset in range(-7, 8):
        numbers = levels[np.searchsorted(bounds, x * (inverse * (levels[0] + offset)))]
        weighted = weights * numbers
        products, squares = _dot(weighted, x), _dot(weighted, numbers)
        fitted = products * _inverse(squares)
        better = fitted * products > best
        np.copyto(scale, fitted, where=better)
        np.copyto(best, fitted * products, where=better)
    scale = _round_half(scale)
    codes = np.searchsorted(bounds, x * _inverse(scale)).T.astype(np.uint8)
    return codes, [_halves(scale)]


QUANTIZERS: dict[str, Callable[[HostArray], Parts]] = {
    "Q8_0": _q8_0,
    "Q4_0": partial(_small, bits=4, affine=False),
    "Q4_1": partial(_small, bits=4, affine=True),
    "Q5_0": partial(_small, bits=5, affine=False),
    "Q5_1": partial(_small, bits=5, affine=True),
    "Q2_K": partial(_k_affine, block=16, bits=2),
    "Q3_K": partial(_k_symmetric, bits=3),
    "Q4_K": partial(_k_affine, block=32, bits=4),
    "Q5_K": partial(_k_affine, block=32, bits=5),
    "Q6_K": partial(_k_symmetric, bits=6),
    "IQ4_NL": _iq4_nl,
}
"""The functions that quantize blocks, (block, n), by GGUF's name of the type."""


def quantize_blocks(kind: str, x: HostArray) -> HostArray:
    """Return float32 numbers, whole blocks of them, as the bytes of GGUF's type `kind`."""
    block, chunks = BLOCK_TYPES[kind], []
    for start in range(0, x.size, CHUNK):
        numbers = x.reshape(-1)[start : start + CHUNK]
        with np.errstate(all="ignore"):
            codes, scales = QUANTIZERS[kind](
                np.ascontiguousarray(numbers.reshape(-1, block.scaled).T)
            )
        rows = numbers.size // block.columns
        if kind == "Q8_0":
            codes ^= np.uint8(128)
        joined = np.concatenate([part.reshape(rows, -1) for part in scales], -1)
        chunks.append(pack_blocks(kind, codes.reshape(rows, -1), joined))
    return np.concatenate(chunks).reshape(-1)


FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL"}
"""The fallbacks of types with blocks of 256, for rows that are no multiple of that."""


def fitting(kind: str, columns: int) -> str:
    """Return the type, or its fallback, for rows of this length; "" if neither fits."""
    if columns % BLOCK_TYPES[kind].columns:
        kind = FALLBACKS.get(kind, kind)
    return "" if columns % BLOCK_TYPES[kind].columns else kind


SCHEMES = (*[kind.lower() for kind in QUANTIZERS], "fp8")
"""The schemes of weights that are made while a model is loaded."""


def quantizer_of(scheme: str) -> Quantizer:
    """Return the function that quantizes rows of float32, whose columns are whole blocks."""
    return _quantize_fp8 if scheme == "fp8" else partial(_quantize_rows, scheme.upper())


def _quantize_rows(kind: str, rows: HostArray) -> QuantizedWeight:
    return unpack_blocks(kind, quantize_blocks(kind, rows), rows.shape)


def _quantize_fp8(rows: HostArray) -> QuantizedWeight:
    """Scale each row so that its largest number is float8_e4m3fn's largest."""
    scales = np.abs(rows).max(-1, keepdims=True) / np.float32(_LARGEST_FP8)
    with np.errstate(all="ignore"):
        codes = (rows * _inverse(scales)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    table = FLOAT8_TABLES["float8_e4m3fn"]
    return QuantizedWeight("fp8", rows.shape, 8, rows.shape[-1], codes, scales, table=table)


_LARGEST_FP8 = 448

# --- stored tensors, chunk by chunk -----------------------------------------------------------

_READ = 2**20
"""Elements that one thread reads and quantizes at a time."""


def encode(part: Segment, kind: str, file: PlainFile, advance: Advance) -> Iterator[HostArray]:
    """Yield the bytes of a stored tensor in a type of GGUF: "F32", "F16" or of blocks.

    Several threads read and quantize. Raises `TransferError` for NaN, infinity and numbers that
    the type cannot hold, with the tensor.
    """
    tensor, whole = part.tensor, None
    if part.arrange is not None:
        whole = np.empty(tensor.shape, np.float32)
        for first in range(0, whole.size, _READ):
            tensor.read(file, whole.reshape(-1)[first : first + _READ], first)
        whole = np.ascontiguousarray(part.arrange(whole)).reshape(-1)

    def work(first: int) -> HostArray:
        size = min(_READ, part.size - first)
        if whole is None:
            numbers = np.empty(size, np.float32)
            tensor.read(file, numbers, first)
        else:
            numbers = whole[first : first + size]
        tensor.check_numbers(numbers, kind, np.float32 if kind == "F32" else np.float16)
        advance(size * tensor.nbytes // part.size)
        if kind in ("F32", "F16"):
            return numbers.astype(np.float16 if kind == "F16" else np.float32).view(np.uint8)
        return quantize_blocks(kind, numbers)

    starts = range(0, part.size, _READ)
    threads = min(MOST_THREADS, usable_cores())
    for number in range(0, len(starts), threads):
        works = [partial(work, first) for first in starts[number : number + threads]]
        yield from side_by_side(*works)
