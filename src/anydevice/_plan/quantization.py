"""The bytes of quantized weights in memory, as `QuantizedWeight` keeps those of each format."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import ceil, comb, gcd, prod
from typing import Any

from anydevice._core.quantized import BLOCK_TYPES
from anydevice._core.record import Record, replace
from anydevice._core.text import shortened
from anydevice._plan.families import ModelShape, integer
from anydevice.errors import ConfigurationError

MatrixBytes = Callable[[int, int, int], int]
"""The bytes of a matrix, from its rows, its columns and the bytes of an unquantized element."""

QUANTIZED = {"int8": 8.0, "int4": 4.5}
"""Bits of a weight in the usual formats; with four bits there is a scale for each 64 weights."""

BLOCK_BITS = {kind: block.memory_bits for kind, block in BLOCK_TYPES.items()}
"""Bits of a weight in memory, scales included, by GGUF's name of its type."""

SCHEMES = {k.lower(): x for k, x in BLOCK_BITS.items() if k not in ("IQ4_XS", "MXFP4")} | {"fp8": 8}
"""Schemes of weights that are made while a model is loaded, and their bits of a weight."""
OFFERED = {
    "q8_0": "8.5 bits a weight, and hardly another text than in 16 bits",
    "q4_k": "4.6 bits a weight, and somewhat worse texts; small models lose the most",
}
"""The schemes that a plan offers, the mildest first, with their price."""
WEIGHTS = ("stored", "float", *SCHEMES)
"""How weights may be kept: as they are stored, unpacked, or quantized."""

_MOST_BITS = 16

_LONGEST_PATTERN = 2000
_MOST_WAYS = 2**20
# Characters and classes of them with `* + ?`, groups of words such as `(up|down)`, `^` and `$`.
_SIMPLE_PATTERN = re.compile(
    r"(?:[\^$]|(?:\\[.\w-]|\[[\w.\-]+\]|[^\\()\[\]{}?*+|^$])[*+?]?\??"
    r"|\((?:\?:)?(?:\\\.|[\w.|-])+\))*+"
)


class Quantization(Record):
    """How a model's matrices are stored: the format, its rule, and the modules left alone."""

    method: str
    bits: float
    matrix_bytes: MatrixBytes
    skipped: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    def skips(self, module: str) -> bool:
        """Whether the module of this path is not quantized."""
        return any(
            re.match(pattern[3:], module) is not None
            if pattern.startswith("re:")
            else fnmatchcase(f"{module}.", f"{pattern}.*")
            if "*" in pattern
            else pattern == module or f".{pattern}." in f".{module}."
            for pattern in self.skipped
        )


def quantization_of(values: Mapping[str, Any] | None, source: str) -> Quantization | None:
    """Return the format of a config's `quantization_config`; `None` if there is none."""
    if not values:
        return None
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"{source}: quantization_config is not an object", source)
    method = method_of(values)
    rule = _FORMATS.get(method, _unknown)(_Settings(values, f"{source}: quantization_config"))
    skipped = ["lm_head"]  # the head is never quantized
    for key in ("modules_to_not_convert", "llm_int8_skip_modules", "ignore", "ignored_layers"):
        entries = values.get(key)
        if isinstance(entries, Sequence) and not isinstance(entries, str):
            skipped += [str(entry) for entry in entries]
    skipped = list(dict.fromkeys(skipped))
    slow = [name for name in skipped if name.startswith("re:") and not _is_quick(name[3:])]
    if slow:
        note = f"patterns of modules left alone are not followed: {', '.join(map(shortened, slow))}"
        rule = replace(rule, assumed=(*rule.assumed, note))
    return replace(rule, skipped=tuple(name for name in skipped if name not in slow))


class _Settings(Record):
    """The values of a `quantization_config`, and the file they are from."""

    values: Mapping[str, Any]
    source: str

    def get(self, *keys: str) -> Any:
        """Return the value of the first of these keys that has one."""
        return next((self.values[key] for key in keys if self.values.get(key)), None)

    def number(self, *keys: str, default: int, least: int = 1, most: int = 2**31) -> int:
        value = self.get(*keys)
        if value is None:
            return default
        return integer(f"{self.source}: {keys[0]}", value, least, most)

    def block(self, key: str) -> tuple[int, int]:
        """Return the rows and columns of a block that has one scale."""
        sizes = self.get(key) or (128, 128)
        if not isinstance(sizes, list | tuple) or len(sizes) != 2:
            raise ConfigurationError(
                f"{self.source}: {key} is two integers, rows and columns", self.source
            )
        rows, columns = (integer(f"{self.source}: {key}", size) for size in sizes)
        return rows, columns

    def inner(self, key: str) -> _Settings:
        """Return the object under a key, an empty one if it is missing."""
        values = self.get(key) or {}
        if not isinstance(values, Mapping):
            raise ConfigurationError(f"{self.source}: {key} is not an object", self.source)
        return _Settings(values, f"{self.source}: {key}")


def _unknown(config: _Settings) -> Quantization:
    method = method_of(config.values)
    digits = re.search(r"\d+", method)  # 4 for `mxfp4`, 8 for `fbgemm_fp8`
    named = int(digits[0]) if digits and 1 <= int(digits[0]) <= _MOST_BITS else 8
    bits = config.get("bits", "nbits") or named
    if not isinstance(bits, float):  # some formats have a share of a bit, on the average
        bits = integer(f"{config.source}: bits", bits, most=_MOST_BITS)
    elif not 0 < bits <= _MOST_BITS:
        raise ConfigurationError(f"{config.source}: bits cannot be {bits}", config.source)
    note = f"the quantization {method!r} is not one of those known exactly: {bits:g} bits a weight "
    note += "and one scale for each 64 of them are assumed"

    def roughly(rows: int, columns: int, width: int) -> int:
        return ceil(rows * columns * bits / 8) + ceil(rows * columns / 64) * width

    return Quantization(method, bits, roughly, assumed=(note,))


def _rule(bits: int, block: int, scale: int) -> MatrixBytes:
    """Return the rule for codes with `scale` bytes a block of columns; 0: a row is one block."""

    def matrix_bytes(rows: int, columns: int, width: int) -> int:
        blocks = columns // gcd(block, columns) if block > 0 else 1
        return rows * (ceil(columns * bits / 8) + blocks * scale)

    return matrix_bytes


_ZERO = 4
"""Bytes of the minimum that stands for a zero point."""


def _bitsandbytes(config: _Settings) -> Quantization:
    if config.get("load_in_4bit"):
        return Quantization("bitsandbytes 4-bit", 4, _rule(4, 64, 4))
    return Quantization("bitsandbytes 8-bit", 8, _rule(8, 0, 4))


def _gptq(config: _Settings) -> Quantization:
    bits = config.number("bits", default=4, most=_MOST_BITS)
    group = config.number("group_size", default=128, least=-1)
    scale = 2 if config.values.get("sym", True) else 2 + _ZERO
    return Quantization("gptq", bits, _rule(bits, group, scale))


def _awq(config: _Settings) -> Quantization:
    bits = config.number("bits", "w_bit", default=4, most=_MOST_BITS)
    group = config.number("group_size", "q_group_size", default=128, least=-1)
    return Quantization("awq", bits, _rule(bits, group, 2 + _ZERO))


def _float8(config: _Settings) -> Quantization:
    blocks = "weight_block_size"  # null for a scale of the tensor, which each row repeats
    across = 0 if config.values.get(blocks, 1) is None else config.block(blocks)[1]
    return Quantization("fp8", 8, _rule(8, across, 4))


def _compressed_tensors(config: _Settings) -> Quantization:
    """Take the scheme of the first group for all; other groups are rare, and noted."""
    named = config.inner("config_groups")
    groups = [named.inner(name) for name, group in named.values.items() if group]
    scheme = groups[0].inner("weights") if groups else named
    if scheme is named or not scheme.values:
        scheme = _Settings({"num_bits": 8, "strategy": "channel"}, config.source)
    bits = scheme.number("num_bits", default=8, most=_MOST_BITS)
    size = scheme.number("group_size", default=128, least=-1)
    usual = "tensor" if not scheme.get("group_size") else "group"
    strategy = scheme.get("strategy") or usual
    across = {"group": size, "tensor_group": size, "block": scheme.block("block_structure")[1]}
    note = "its groups of layers are quantized differently: the first group's way is taken for all"
    notes = (note,) if len(groups) > 1 else ()
    rule = _rule(
        bits, across.get(strategy, 0), 2 if scheme.values.get("symmetric", True) else 2 + _ZERO
    )
    return Quantization(f"compressed-tensors {bits}-bit", bits, rule, assumed=notes)


_FORMATS: dict[str, Callable[[_Settings], Quantization]] = {
    "bitsandbytes": _bitsandbytes,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _float8,
    "fbgemm_fp8": lambda config: Quantization("fbgemm_fp8", 8, _rule(8, 0, 4)),
    "compressed-tensors": _compressed_tensors,
    "mxfp4": lambda config: Quantization("mxfp4", 4, _rule(4, 32, 2)),
}


def method_of(values: Mapping[str, Any]) -> str:
    """Return the method of a `quantization_config`, in lower case."""
    usual = (
        "bitsandbytes" if values.get("load_in_4bit") or values.get("load_in_8bit") else "unnamed"
    )
    return str(values.get("quant_method") or usual).lower()


def _is_quick(pattern: str) -> bool:
    """Whether `re` matches a pattern in a short time; patterns may come from anyone.

    >>> _is_quick(r".*mlp.(gate|up)_proj$"), _is_quick("(a*)*b"), _is_quick(".*" * 5)
    (True, False, False)
    """
    if len(pattern) > _LONGEST_PATTERN or not _SIMPLE_PATTERN.fullmatch(pattern):
        return False
    try:
        re.compile(pattern)
    except re.error:
        return False
    # The ways to match that are tried at most, in a path of 64 characters.
    repeats = pattern.count("*") + pattern.count("+")
    groups: list[str] = re.findall(r"\([^)]*", pattern)
    choices = prod(group.count("|") + 1 for group in groups)
    return comb(64 + repeats, repeats) * choices << pattern.count("?") <= _MOST_WAYS


def quantized(shape: ModelShape, name: str) -> ModelShape:
    """Return the shape with its layers' weights quantized to "int8" or "int4", as usual."""
    if shape.quantization is not None:
        raise ConfigurationError(
            f"the weights are quantized already ({shape.quantization}): leave dtype out", "dtype"
        )
    bits = QUANTIZED[name]
    pairs = zip(shape.layer_weights, shape.layer_bytes, strict=True)
    layers = tuple(min(size, int(weights * bits / 8)) for weights, size in pairs)
    note = f"layers quantized to {name} are counted with {bits:g} bits a weight, scales included"
    changed = replace(shape, layer_bytes=layers, quantization=name, rounding=0, exact=False)
    return replace(changed, assumed=(*shape.assumed, note))


def in_scheme(shape: ModelShape, scheme: str) -> ModelShape:
    """Return the shape quantized to one of `SCHEMES`, with its head in 6 bits or more."""
    bits = SCHEMES[scheme]
    fine = SCHEMES["q6_k"] if scheme not in ("q8_0", "fp8") else bits

    def size(weights: int, width: float) -> int:
        return int(weights * width / 8)

    tied = shape.tied_embeddings
    note = f"weights quantized to {scheme} are counted with {bits:g} bits each, scales included"
    return replace(
        shape,
        layer_bytes=tuple(size(weights, bits) for weights in shape.layer_weights),
        embedding_bytes=size(shape.embedding_parameters, fine if tied else bits),
        head_bytes=size(shape.head_parameters, fine),
        quantization=scheme,
        rounding=0,
        exact=False,
        assumed=(*shape.assumed, note),
    )
