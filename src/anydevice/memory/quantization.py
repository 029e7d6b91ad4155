"""The bytes of quantized weights: what each format keeps for a matrix, counted by its own rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any

from anydevice.core.record import Record
from anydevice.errors import ConfigurationError

Matrix = Callable[[int, int, int], int]
"""The bytes of a matrix of so many rows and columns, in a model of elements of so many bytes."""


class Quantization(Record):
    """How a model's matrices are kept: the format's name, its rule, and the modules left alone."""

    method: str
    bits: float
    matrix_bytes: Matrix
    skipped: tuple[str, ...]
    assumed: tuple[str, ...] = ()

    def skips(self, module: str) -> bool:
        """Whether the module of that path keeps its plain weights."""
        return any(_matches(pattern, module) for pattern in self.skipped)


def quantization_of(values: Mapping[str, Any] | None, source: str) -> Quantization | None:
    """What a config's `quantization_config` says; `None` where the weights are plain.

    >>> quantization_of({"quant_method": "gptq", "bits": 4, "group_size": 128}, "").method
    'gptq'

    A format that is not known is counted by its bits, and `assumed` says so.
    """
    if not values:
        return None
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"{source}: quantization_config is not an object", source)
    method = str(values.get("quant_method") or _unnamed(values)).lower()
    skipped = _skipped(values)
    if method == "bitsandbytes":
        return _bitsandbytes(values, skipped)
    if method == "gptq":
        return _gptq(values, skipped)
    if method == "awq":
        return _awq(values, skipped)
    if method == "fp8":
        return _blocks_of_float8(values, skipped)
    if method == "compressed-tensors":
        return _compressed(values, skipped)
    bits = float(values.get("bits") or values.get("nbits") or _bits_in(method))
    note = (
        f"the quantization {method!r} is not one of those known exactly: {bits:g} bits a weight "
        "and one scale for each 64 of them are assumed"
    )

    def roughly(rows: int, columns: int, width: int) -> int:
        return ceil(rows * columns * bits / 8) + ceil(rows * columns / 64) * width

    return Quantization(method, bits, roughly, skipped, (note,))


def _bitsandbytes(values: Mapping[str, Any], skipped: tuple[str, ...]) -> Quantization:
    if not values.get("load_in_4bit"):
        # Each row has its largest value beside it, in 32 bits.
        return Quantization(
            "bitsandbytes 8-bit", 8, lambda rows, columns, _: rows * columns + 4 * rows, skipped
        )
    nested = bool(values.get("bnb_4bit_use_double_quant"))

    def four_bits(rows: int, columns: int, width: int) -> int:
        blocks = ceil(rows * columns / 64)
        table = 16 * 4
        if not nested:
            return ceil(rows * columns / 2) + blocks * 4 + table
        # The blocks' scales are bytes themselves, in blocks of 256, with a table and an offset.
        return ceil(rows * columns / 2) + blocks + ceil(blocks / 256) * 4 + 256 * 4 + 4 + table

    return Quantization("bitsandbytes 4-bit", 4, four_bits, skipped)


def _gptq(values: Mapping[str, Any], skipped: tuple[str, ...]) -> Quantization:
    bits = int(values.get("bits") or 4)
    group = int(values.get("group_size") or 128)

    def packed(rows: int, columns: int, width: int) -> int:
        groups = 1 if group <= 0 else ceil(columns / group)
        weights = ceil(columns * bits / 32) * rows * 4
        zeros = groups * ceil(rows * bits / 32) * 4
        return weights + zeros + groups * rows * 2 + columns * 4

    return Quantization("gptq", bits, packed, skipped)


def _awq(values: Mapping[str, Any], skipped: tuple[str, ...]) -> Quantization:
    bits = int(values.get("bits") or values.get("w_bit") or 4)
    group = int(values.get("group_size") or values.get("q_group_size") or 128)

    def packed(rows: int, columns: int, width: int) -> int:
        groups = 1 if group <= 0 else ceil(columns / group)
        across = ceil(rows * bits / 32) * 4
        return (columns + groups) * across + groups * rows * 2

    return Quantization("awq", bits, packed, skipped)


def _blocks_of_float8(values: Mapping[str, Any], skipped: tuple[str, ...]) -> Quantization:
    block = values.get("weight_block_size") or (128, 128)

    def scaled(rows: int, columns: int, width: int) -> int:
        return rows * columns + ceil(rows / int(block[0])) * ceil(columns / int(block[1])) * 4

    return Quantization("fp8", 8, scaled, skipped)


def _compressed(values: Mapping[str, Any], skipped: tuple[str, ...]) -> Quantization:
    """The first group's scheme is taken for all: groups that differ are rare, and said."""
    groups = [group for group in (values.get("config_groups") or {}).values() if group]
    scheme = (groups[0].get("weights") if groups else None) or {
        "num_bits": 8,
        "strategy": "channel",
    }
    bits = int(scheme.get("num_bits") or 8)
    strategy = scheme.get("strategy") or ("group" if scheme.get("group_size") else "tensor")
    size = int(scheme.get("group_size") or 128)
    block = scheme.get("block_structure") or (128, 128)
    symmetric = scheme.get("symmetric", True)
    notes = (
        ("its groups of layers are quantized differently: the first group's way is taken for all",)
        if len(groups) > 1
        else ()
    )

    def scales(rows: int, columns: int) -> int:
        if strategy in ("group", "tensor_group"):
            return rows * ceil(columns / size)
        if strategy == "block":
            return ceil(rows / int(block[0])) * ceil(columns / int(block[1]))
        return rows if strategy == "channel" else 1

    def compressed(rows: int, columns: int, width: int) -> int:
        packed = bits < 8
        number = scales(rows, columns)
        weights = rows * ceil(columns * bits / 32) * 4 + 16 if packed else rows * columns
        zeros = 0 if symmetric else ceil(number * bits / 8)
        return weights + number * width + zeros

    return Quantization(f"compressed-tensors {bits}-bit", bits, compressed, skipped, notes)


def _unnamed(values: Mapping[str, Any]) -> str:
    if values.get("load_in_4bit") or values.get("load_in_8bit"):
        return "bitsandbytes"
    return "unnamed"


def _bits_in(method: str) -> int:
    """The bits that a format's name gives away: 4 for `mxfp4`, 8 for `fbgemm_fp8`."""
    found = re.search(r"(\d+)", method)
    return int(found[1]) if found and 1 <= int(found[1]) <= 16 else 8


def _skipped(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The modules that keep plain weights: those that are named, and always the head."""
    named: list[str] = ["lm_head"]
    for key in ("modules_to_not_convert", "llm_int8_skip_modules", "ignore", "ignored_layers"):
        entries = values.get(key)
        if isinstance(entries, Sequence) and not isinstance(entries, str):
            named += [str(entry) for entry in entries]
    return tuple(dict.fromkeys(named))


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error:
            return False
    return pattern == module or f".{pattern}." in f".{module}."
