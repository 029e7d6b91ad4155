"""Quantized blocks that are made here: as the package gguf unpacks them, and how near they are."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from anydevice._core.quantized import BLOCK_TYPES, QuantizedWeight
from anydevice._formats.load import OpenFiles, Segment
from anydevice._formats.quantize import (
    FALLBACKS,
    QUANTIZERS,
    SCHEMES,
    encode,
    fitting,
    quantize_blocks,
    quantizer_of,
)
from anydevice._formats.quantized import dequantize, unpack_blocks
from anydevice._formats.safetensors import read_header
from anydevice.errors import TransferError
from tests.comparing import COPIED, EXACT, SAME_PROGRAM, assert_same_bits, assert_same_values

gguf = pytest.importorskip("gguf")

BITS = {"Q8_0": 8, "Q6_K": 6, "Q5_K": 5, "Q5_1": 5, "Q5_0": 5, "Q4_K": 4, "Q4_1": 4, "Q4_0": 4}
BITS |= {"IQ4_NL": 4, "Q3_K": 3, "Q2_K": 2}
SHARED = {"Q6_K": 16, "Q3_K": 16, "Q2_K": 16}
"""Numbers that share a scale; 32 in the other types."""


def numbers(rows: int = 64, columns: int = 512, seed: int = 3) -> Any:
    """Normal numbers, as weights are, with a few that stand out."""
    rng = np.random.default_rng(seed)
    return (rng.standard_t(6, (rows, columns)) * 0.02).astype(np.float32)


def unpacked(kind: str, raw: Any, shape: tuple[int, ...]) -> Any:
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(shape)


def rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def test_every_type_is_tested() -> None:
    assert {*BITS} == {*QUANTIZERS}
    assert {*SCHEMES} == {kind.lower() for kind in BITS} | {"fp8"}


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_blocks_are_what_the_package_unpacks(kind: str) -> None:
    x = numbers()
    raw = quantize_blocks(kind, x)
    assert raw.nbytes == x.size // BLOCK_TYPES[kind].columns * BLOCK_TYPES[kind].bytes
    ours = dequantize(unpack_blocks(kind, raw, x.shape))
    assert_same_values(ours, unpacked(kind, raw, x.shape), because=EXACT)


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_the_error_is_that_of_rounding_to_the_step(kind: str) -> None:
    """Of uniform numbers: a step divided by the root of 12; the scale itself is rounded too."""
    x = np.random.default_rng(1).uniform(-1, 1, (64, 512)).astype(np.float32)
    error = x - unpacked(kind, quantize_blocks(kind, x), x.shape)
    blocks = x.reshape(-1, SHARED.get(kind, 32))
    span = blocks.max(1) - blocks.min(1)
    if kind in ("Q8_0", "Q6_K", "Q5_0", "Q4_0", "Q3_K", "IQ4_NL"):
        span = 2 * np.abs(blocks).max(1)
    step = span / (2 ** BITS[kind] - 1)
    # Scales that are searched give less; Q8_0's are not, and IQ4_NL's levels are for other numbers.
    worst = 1.02 if kind in ("Q8_0", "IQ4_NL") else 0.94
    assert 0.75 < rms(error) / (rms(step) / 12**0.5) < worst


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_the_error_is_no_larger_than_the_package_makes_it(kind: str) -> None:
    x = numbers()
    theirs = gguf.quants.quantize(x, gguf.GGMLQuantizationType[kind])
    ours = quantize_blocks(kind, x)
    if kind == "Q8_0":
        assert_same_bits(ours, theirs.reshape(-1), because=EXACT)
    else:
        error, other = (rms(x - unpacked(kind, raw, x.shape)) for raw in (ours, theirs))
        assert error < 0.98 * other


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_odd_numbers_stay_finite(kind: str) -> None:
    x = np.zeros((8, 256), np.float32)
    x[1], x[2], x[3], x[4, 77], x[5] = 0.5, -0.5, 1e-30, 60000.0, -65504.0
    x[6], x[7] = 1e-6, np.linspace(3, 4, 256)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = unpacked(kind, quantize_blocks(kind, x), x.shape)
    assert np.isfinite(y).all()
    assert_same_values(y[0], x[0], because=EXACT)
    np.testing.assert_allclose(y[[1, 2, 5]], x[[1, 2, 5]], rtol=0.02)
    assert np.abs(y[3]).max() < 1e-6
    assert abs(y[4, 77] - 60000) < 60000 * 0.1
    assert np.abs(np.delete(y[4], 77)).max() <= 60000 / 2 ** (BITS[kind] - 1)
    np.testing.assert_allclose(y[7], x[7], rtol=0.5 if kind == "Q2_K" else 0.3)


def test_fp8_scales_rows_to_its_largest_number() -> None:
    x = numbers()
    x[5] = 0
    weight = quantizer_of("fp8")(x)
    y = dequantize(weight)
    assert (weight.scheme, weight.block, weight.codes.dtype) == ("fp8", 512, np.uint8)
    largest = np.abs(x).max(1, keepdims=True)
    assert_same_values(y[5], x[5], because=EXACT)
    # Three bits behind the leading one; below 2 ** -6 of the scale, steps of 2 ** -9.
    assert (np.abs(x - y) <= np.maximum(np.abs(x) / 16, largest / 448 / 2**9) * 1.001).all()


@pytest.mark.parametrize("kind", sorted(FALLBACKS))
def test_rows_of_other_lengths_get_another_type(kind: str) -> None:
    assert fitting(kind, 512) == kind
    assert fitting(kind, 96) == FALLBACKS[kind]
    assert fitting(kind, 90) == fitting("Q4_0", 90) == ""


# --- stored tensors ---------------------------------------------------------------------------


def stored(folder: Path, x: Any) -> Any:
    save_file({"a.weight": x}, folder / "x.safetensors")
    return read_header(folder / "x.safetensors").entries["a.weight"]


def encoded(tensor: Any, kind: str, arrange: Any = None) -> Any:
    sizes: list[int] = []
    with OpenFiles() as files:
        chunks = list(encode(Segment(tensor, arrange), kind, files.of(tensor), sizes.append))
    assert sum(sizes) == tensor.nbytes
    return np.concatenate(chunks)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_K"])
def test_tensors_are_encoded_in_order_by_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    x = numbers(40, 768)
    tensor = stored(tmp_path, x)
    whole = {"F32": x, "F16": x.astype(np.float16)}
    expected = whole[kind].view(np.uint8).ravel() if kind in whole else quantize_blocks(kind, x)
    assert_same_bits(encoded(tensor, kind), expected, because=COPIED)
    monkeypatch.setattr("anydevice._formats.quantize._READ", 2048)
    assert_same_bits(encoded(tensor, kind), expected, because=SAME_PROGRAM)
    turned = encoded(tensor, kind, lambda rows: rows[::-1])
    assert_same_bits(turned, expected.reshape(40, -1)[::-1].ravel(), because=SAME_PROGRAM)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 70000.0])
def test_numbers_that_no_scale_can_hold_are_refused(tmp_path: Path, kind: str, bad: float) -> None:
    x = numbers(4, 256)
    x[2, 100] = bad
    tensor = stored(tmp_path, x)
    with pytest.raises(TransferError, match=r"x\.safetensors.*a\.weight.*NaN") as caught:
        list(encode(Segment(tensor), kind, OpenFiles().of(tensor), lambda size: None))
    assert caught.value.path == "a.weight"


def test_schemes_are_those_of_files() -> None:
    x = numbers(4)
    weight = quantizer_of("q4_k")(x)
    assert isinstance(weight, QuantizedWeight)
    assert (weight.scheme, weight.shape) == ("q4_k", (4, 512))
    assert_same_values(
        dequantize(weight), unpacked("Q4_K", quantize_blocks("Q4_K", x), x.shape), because=EXACT
    )
