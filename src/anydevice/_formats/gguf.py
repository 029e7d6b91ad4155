"""GGUF files: header, tensors, and the metadata as the files that Hugging Face's folders have.

A file is a magic number, counts, the metadata, a table of tensors, and their bytes. Files may come
from anyone: each count and length is compared with the rest of the file before it is used, and
arrays of metadata stay packed, so that a header never takes more than about twice its bytes.
The package `gguf` unpacks blocks and knows the names of tensors.

Metadata that is not known here could change what the model computes, so it is refused by name.
"""

from __future__ import annotations

import math
import operator
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, overload

import numpy as np

from anydevice._core.checks import is_number
from anydevice._core.dtypes import DTYPES, DType
from anydevice._core.files import PlainFile, Stamp
from anydevice._core.quantized import BLOCK_TYPES, QuantizedWeight
from anydevice._core.record import NOTHING, Record, replace
from anydevice._core.rope_scaling import frequencies
from anydevice._core.text import install_command, shortened
from anydevice._formats.quantized import dequantize, unpack_blocks
from anydevice._formats.safetensors import StoredTensor
from anydevice.errors import ConfigurationError, TransferError, UnsupportedError

MAGIC = b"GGUF"
LONGEST_KEY, LONGEST_NAME = 2**16 - 1, 255
MOST_DIMENSIONS = 4
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_AGAIN = "it is damaged or incomplete: download it again"
_WINDOW = 2**20
_SMALLEST = 24
"""Bytes of the magic number, the version and the numbers of tensors and keys."""
_SIZE = struct.Struct("<Q")
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)

_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_NUMBERS |= {12: "d"}


class Packing(Record):
    """How tensors of one type are stored: elements and bytes of a block, and their dtype."""

    name: str
    elements: int
    bytes: int
    dtype: DType = DTYPES["float32"]


PACKINGS = {
    0: Packing("F32", 1, 4),
    1: Packing("F16", 1, 2, DTYPES["float16"]),
    30: Packing("BF16", 1, 2, DTYPES["bfloat16"]),
}
PACKINGS |= {row.number: Packing(n, row.columns, row.bytes) for n, row in BLOCK_TYPES.items()}
"""The types of tensors that are read without the package `gguf`, by the format's numbers."""


class Strings(Sequence[str]):
    """A list of strings, decoded one by one on access."""

    def __init__(self, text: bytes, ends: Any) -> None:
        self._text, self._ends = text, ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = operator.index(index)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(index)
        start = int(self._ends[number - 1]) if number else 0
        return self._text[start : int(self._ends[number])].decode("utf-8")

    def __iter__(self) -> Iterator[str]:
        start = 0
        for end in self._ends:
            yield self._text[start:end].decode("utf-8")
            start = int(end)


class GgufTensor(StoredTensor):
    """A tensor of a GGUF file. Reading unpacks it; blocks lie along its last axis."""

    packing: Packing
    bytewise: bool = False
    """Whether `blocks` unpacks each code of 5 and 6 bits into a byte of its own."""

    def read(self, file: PlainFile, target: Any, first: int) -> None:
        packing = self.packing
        blocks = -(-target.size // packing.elements)
        with np.errstate(all="ignore"):
            if packing.name in BLOCK_TYPES:
                values = dequantize(self.blocks(file, first, (1, blocks * packing.elements)))[0]
            else:
                raw = self._bytes(file, [first], blocks)
                if packing.elements == 1:
                    values = raw.view(packing.dtype.numpy())
                else:
                    gguf = gguf_package()
                    values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[packing.name])
        self.convert(values[: target.size], target)

    @property
    def scheme(self) -> str | None:
        """The scheme of its quantized weights; None if it is read as floating-point numbers."""
        return self.packing.name.lower() if self.packing.name in BLOCK_TYPES else None

    def blocks(
        self, file: PlainFile, first: int | Sequence[int], shape: tuple[int, int]
    ) -> QuantizedWeight:
        """Return rows of whole blocks as they are stored, from the element `first` on.

        `first` may also have the first element of each row. Raises `TransferError` for scales that
        are NaN or infinite.
        """
        parts = [first] if isinstance(first, int) else first
        size = prod(shape) // self.packing.elements // len(parts)
        raw = self._bytes(file, parts, size)
        weight = unpack_blocks(self.packing.name, raw, shape, self.bytewise)
        for array in map(np.asarray, weight.arrays.values()):
            if array.dtype.kind not in "iu" and not np.isfinite(array).all():
                raise self.error(f"it has scales that are NaN or infinite; {_AGAIN}")
        return weight

    def _bytes(self, file: PlainFile, first: Sequence[int], blocks: int) -> Any:
        """Return the bytes of `blocks` blocks from each element in `first` on."""
        raw = np.empty((len(first), blocks * self.packing.bytes), np.uint8)
        for row, element in zip(raw, first, strict=True):
            start = element // self.packing.elements * self.packing.bytes
            file.read_into(row.data, self.start + start)
        return raw.reshape(-1)

    def as_matrix(self) -> GgufTensor:
        """Return a vector as a matrix of one row."""
        return replace(self, shape=(1, *self.shape))


class GgufFile(Record):
    """The header of a file: metadata and tensors by name; `stamp` identifies its state.

    `spans` are the first byte and the end of each value of the metadata, with its type.
    """

    path: Path
    stamp: Stamp
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    spans: Mapping[str, tuple[int, int]] = NOTHING

    def expect(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a value of the metadata; raise `ConfigurationError` if it is of another type."""
        value = self.metadata.get(key, default)
        wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind in (int, float))
        if value is not default and wrong:
            raise ConfigurationError(
                f"{self.path}: {key} is {shortened(repr(value))}, which is not valid; {_AGAIN}",
                str(self.path),
            )
        return value


def read_gguf(path: Path) -> GgufFile:
    """Return the checked header of a file, with the tensors of all files of a split model.

    Each tensor lies inside its file, has a type that can be unpacked, and shares no byte with
    another. Raises `TransferError` otherwise, with the file's path and the key or tensor.
    """
    file = _read_one(path)
    count = file.expect("split.count", int, 1)
    return file if count in (0, 1) else _join(file, count)


def _join(file: GgufFile, count: int) -> GgufFile:
    """Return the header of the first file of a split model, with the tensors of all."""
    match = _SPLIT.fullmatch(file.path.name)
    if match is None or int(match[3]) != count:
        raise TransferError(
            f"{file.path} is one of {count} files of a model, and the others are found by its name "
            f"only if it ends in -00001-of-{count:05}.gguf: give it the name that it had",
            "split.count",
        )
    parts: list[GgufFile] = []
    tensors: dict[str, GgufTensor] = {}
    for number in range(count):
        path = file.path.with_name(f"{match[1]}-{number + 1:05}-of-{match[3]}.gguf")
        if not path.exists():
            raise TransferError(f"{path} is missing, one of {count} files: download it", str(path))
        parts.append(file if path == file.path else _read_one(path))
        own = parts[-1].metadata
        if (own.get("split.no"), own.get("split.count")) != (number, count) or (
            tensors.keys() & parts[-1].tensors.keys()
        ):
            raise TransferError(f"{path} does not belong to {parts[0].path}; {_AGAIN}", str(path))
        tensors |= parts[-1].tensors
    if len(tensors) != parts[0].expect("split.tensors.count", int, len(tensors)):
        raise TransferError(f"{parts[0].path}: its files lack tensors; {_AGAIN}", "split.count")
    return replace(parts[0], tensors=tensors)


def _read_one(path: Path) -> GgufFile:
    with PlainFile(path) as file:
        try:
            return _read(file)
        except (UnicodeDecodeError, struct.error, _DamagedError) as error:
            raise TransferError(f"{path}: {error}; {_AGAIN}") from error


class _DamagedError(ValueError):
    """The header is inconsistent."""


class _Cursor:
    """Reads a file from front to back through a window."""

    def __init__(self, file: PlainFile) -> None:
        self._file = file
        self._window = bytearray()
        self._start = self._at = 0

    @property
    def position(self) -> int:
        return self._start + self._at

    @property
    def left(self) -> int:
        return self._file.size - self.position

    def take(self, size: int, what: str) -> bytearray:
        if size > self.left:
            raise _DamagedError(f"it ends inside {what}, which has {size} bytes")
        if self._at + size > len(self._window):
            self._start, self._at = self.position, 0
            length = min(max(size, _WINDOW), self._file.size - self._start)
            self._window = self._file.read(length, self._start)
        self._at += size
        return self._window[self._at - size : self._at]

    def number(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def count(self, least: int, what: str) -> int:
        """Read a count of items that take at least `least` bytes each."""
        count = int(self.number("Q", what))
        if count > self.left // least:
            raise _DamagedError(f"it says that {what} is {count}, which its size does not allow")
        return count

    def strings_within(self, limit: int, text: bytearray) -> list[int]:
        """Append the next strings, as far as the window holds them, and return their sizes."""
        window, at, end = self._window, self._at, len(self._window)
        sizes: list[int] = []
        while len(sizes) < limit and at + 8 <= end:
            (size,) = _SIZE.unpack_from(window, at)
            if size > end - at - 8:
                break
            text += window[at + 8 : at + 8 + size]
            sizes.append(size)
            at += 8 + size
        self._at = at
        return sizes

    def string(self, what: str, limit: int | None = None) -> str:
        size = self.count(1, f"the length of {what}")
        if limit is not None and size > limit:
            raise _DamagedError(f"{what} has {size} bytes; at most {limit} are allowed")
        return self.take(size, what).decode("utf-8")


def _read(file: PlainFile) -> GgufFile:
    cursor = _Cursor(file)
    if not MAGIC.startswith(bytes(cursor.take(min(4, file.size), "its magic number"))):
        raise TransferError(f"{file.path} is not a GGUF file: it does not begin with {MAGIC!r}")
    if file.size < _SMALLEST:
        raise TransferError(
            f"{file.path} has {file.size} bytes, and a GGUF file has at least {_SMALLEST}; "
            "it is incomplete: download it again"
        )
    version = cursor.number("I", "its version")
    if version not in _VERSIONS:
        raise TransferError(
            f"{file.path} is version {version} of GGUF, and versions 2 and 3, little-endian, "
            "are read; convert the model again with a current llama.cpp"
        )
    count = cursor.count(24, "the number of tensors")
    metadata, spans = _metadata(cursor)
    table = [_entry(cursor) for _ in range(count)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        raise _DamagedError(f"its alignment is {shortened(repr(alignment))}")
    base = -(-cursor.position // alignment) * alignment
    tensors = _tensors(file, table, base, alignment)
    return GgufFile(file.path, file.stamp, metadata, tensors, spans)


def _metadata(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    metadata: dict[str, Any] = {}
    spans: dict[str, tuple[int, int]] = {}
    for _ in range(cursor.count(13, "the number of keys")):
        key = cursor.string("a key", LONGEST_KEY)
        if key in metadata:
            raise _DamagedError(f"the key {shortened(key)!r} occurs twice")
        start = cursor.position
        metadata[key] = _value(cursor, key)
        spans[key] = start, cursor.position
    return metadata, spans


def _value(cursor: _Cursor, key: str) -> Any:
    what = f"the value of {shortened(key)!r}"
    kind = cursor.number("I", what)
    if kind in _NUMBERS:
        return cursor.number(_NUMBERS[kind], what)
    if kind == _STRING:
        return cursor.string(what)
    if kind != _ARRAY:
        raise _DamagedError(f"{what} has the unknown type {kind}")
    kind = cursor.number("I", what)
    if kind in _NUMBERS:
        dtype = np.dtype(f"<{_NUMBERS[kind]}") if kind != _BOOL else np.dtype(np.bool_)
        count = cursor.count(dtype.itemsize, f"the number of elements of {shortened(key)!r}")
        return np.frombuffer(cursor.take(count * dtype.itemsize, what), dtype)
    if kind == _STRING:
        return _strings(cursor, what)
    raise _DamagedError(f"{what} is an array of the type {kind}, which is not read")


def _strings(cursor: _Cursor, what: str) -> Strings:
    count = cursor.count(8, f"the number of strings in {what}")
    text, sizes = bytearray(), np.empty(count, np.int64)
    done = 0
    while done < count:
        batch = cursor.strings_within(count - done, text)
        if not batch:  # the next string reaches beyond the window
            batch = [cursor.count(1, f"the length of a string in {what}")]
            text += cursor.take(batch[0], what)
        sizes[done : done + len(batch)] = batch
        done += len(batch)
    ends = np.cumsum(sizes)
    text.decode("utf-8")
    inner = ends[ends < len(text)]
    if (np.frombuffer(text, np.uint8)[inner] & 0xC0 == 0x80).any():
        raise _DamagedError(f"{what} has strings that are not UTF-8")
    return Strings(bytes(text), ends)


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string("the name of a tensor", LONGEST_NAME)
    what = f"the entry of the tensor {shortened(name)!r}"
    axes = cursor.number("I", what)
    if not 1 <= axes <= MOST_DIMENSIONS:
        raise _DamagedError(f"the tensor {shortened(name)!r} has {axes} dimensions")
    sizes = struct.unpack(f"<{axes}Q", cursor.take(8 * axes, what))
    return name, sizes[::-1], cursor.number("I", what), cursor.number("Q", what)


def _tensors(
    file: PlainFile, table: list[tuple[str, tuple[int, ...], int, int]], base: int, alignment: int
) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in table:
        what = f"the tensor {shortened(name)!r}"
        if name in tensors:
            raise _DamagedError(f"{what} occurs twice")
        packing = _packing(kind)
        if isinstance(packing, str):
            raise TransferError(
                f"{file.path}: {what} has the type {packing}, which is not read; types that are: "
                f"{', '.join(row.name for row in PACKINGS.values())}, and those that the package "
                "gguf unpacks",
                name,
            )
        if 0 in shape or prod(shape) >= 2**62 or shape[-1] % packing.elements or offset % alignment:
            raise _DamagedError(f"{what} of the shape {shape} at byte {offset} cannot be")
        start, size = base + offset, prod(shape) // packing.elements * packing.bytes
        dtype = packing.dtype
        tensor = GgufTensor(name, file.path, file.stamp, dtype, shape, start, size, packing)
        if start + size > file.size:
            raise _DamagedError(f"{what} ends behind the end of the file")
        tensors[name] = tensor
    reached, before = 0, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
        if tensor.start < reached:
            raise _DamagedError(f"the tensors {before!r} and {tensor.name!r} share bytes")
        reached, before = tensor.start + tensor.nbytes, tensor.name
    return tensors


@lru_cache(maxsize=64)
def _packing(kind: int) -> Packing | str:
    """Return how tensors of a type are stored, or the type's name if nothing unpacks it.

    The package `gguf` knows more types, which it unpacks into floating-point numbers.
    """
    if kind in PACKINGS:
        return PACKINGS[kind]
    gguf = gguf_package()
    try:
        theirs = gguf.GGMLQuantizationType(kind)
    except ValueError:
        return f"number {kind}"
    elements, size = gguf.GGML_QUANT_SIZES[theirs]
    try:
        gguf.quants.dequantize(np.zeros(size, np.uint8), theirs)
    except NotImplementedError:
        return str(theirs.name)
    return Packing(theirs.name, elements, size)


def gguf_package() -> ModuleType:
    """Return the package `gguf`; raise `UnsupportedError` if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise UnsupportedError(
            "GGUF files need the package gguf, which is not installed; "
            f"run: {install_command('llm')}"
        ) from error
    return gguf


# --- names of tensors -------------------------------------------------------------------------

_TABLES = re.compile(
    r"rope_(freqs|factors_long|factors_short)\.weight|.*\.(attn_rot_embd|rope_freqs)\.weight"
)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def named_tensors(file: GgufFile, names: Iterable[str]) -> dict[str, GgufTensor]:
    """Return the tensors of a file by those of `names` that Hugging Face's folders have for them.

    Several names may stand for one tensor; an expert is a row of its stack. A tensor without any
    of the names keeps its own. Tables of rope are left to `config_values`.
    """
    tensors: dict[str, GgufTensor] = {}
    for name, (own, expert) in gguf_names(file.metadata["general.architecture"], names).items():
        tensor = file.tensors.get(own)
        if tensor is not None and expert is not None and len(tensor.shape) == 3:
            tensor = tensor.row(expert) if expert < tensor.shape[0] else None
        if tensor is not None:
            tensors[name] = tensor
    used = {tensor.name for tensor in tensors.values()}
    rest = {name: tensor for name, tensor in file.tensors.items() if name not in used}
    return tensors | {name: t for name, t in rest.items() if not _TABLES.fullmatch(name)}


def gguf_names(architecture: str, names: Iterable[str]) -> dict[str, tuple[str, int | None]]:
    """Return GGUF's name of each tensor of a folder, "" if it has none, and an expert's number."""
    gguf = gguf_package()
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    known = gguf.get_tensor_name_map(kind, 1)
    result: dict[str, tuple[str, int | None]] = {}
    for name in names:
        layer, expert = _LAYER.match(name), _EXPERT.fullmatch(name)
        plain = f"{expert[1]}.{expert[3]}" if expert else name
        if layer:
            plain = plain.replace(layer[0], "model.layers.0.", 1)
        own = known.get_name(plain, try_suffixes=(".weight", ".bias")) or ""
        if layer:
            own = own.replace("blk.0.", f"blk.{layer[1]}.", 1)
        result[name] = own, int(expert[2]) if expert else None
    return result


# --- metadata as a config ---------------------------------------------------------------------

CONFIG_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "norm_epsilon",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "attention.scale": "attention_multiplier",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Keys of GGUF, behind the name of the architecture, and the same keys of a `config.json`."""

_OTHER_KEYS = {
    "attention.value_length",
    "attention.causal",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.finetuned",
    "use_parallel_residual",
    "tensor_data_layout",
}
"""Keys that are read separately, or that do not affect the computation."""


def config_values(file: GgufFile) -> dict[str, Any]:
    """Return the metadata as the values of a `config.json`, without its `model_type`.

    `partial_rotary_factor` is the part of a head that rope rotates, if the file says so. Raises
    `UnsupportedError` for a key that is unknown and `ConfigurationError` for an invalid value.
    """
    name = file.metadata["general.architecture"]
    own = {
        key.removeprefix(f"{name}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{name}.")
    }
    unknown = sorted(own.keys() - CONFIG_KEYS.keys() - _OTHER_KEYS)
    if unknown or own.get("attention.causal", True) is not True:
        key = f"{name}.{unknown[0] if unknown else 'attention.causal'}"
        raise UnsupportedError(
            f"{file.path}: its key {shortened(key)} is unknown and could change what the model "
            "computes; get the model as a folder of safetensors files"
        )
    values: dict[str, Any] = {
        CONFIG_KEYS[key]: _number(file, key, own[key]) for key in own if key in CONFIG_KEYS
    }
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.shape) == 2:
        values["vocab_size"] = embedding.shape[0]
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    values["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    values["dtype"] = _dtype(file)
    for key in ("bos", "eos"):
        token = file.expect(f"tokenizer.ggml.{key}_token_id", int)
        if token is not None:
            values[f"{key}_token_id"] = token
    size = values.get("head_dim")
    if size is not None and own.get("attention.value_length", size) != size:
        raise UnsupportedError(f"{file.path}: keys and values of different sizes are not supported")
    rotated = file.expect(f"{name}.rope.dimension_count", int)
    heads, hidden = values.get("num_attention_heads", 0), values.get("hidden_size", 0)
    if rotated is not None and all(isinstance(x, int) and x > 0 for x in (heads, hidden)):
        values["partial_rotary_factor"] = float(rotated / (size or hidden / heads))
    return values | _rope(file, own, values)


def _number(file: GgufFile, key: str, value: Any) -> int | float | None:
    """Return a number; a list with one number a layer must repeat one number."""
    if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
        value = value[0].item()
    if not is_number(value):
        raise UnsupportedError(
            f"{file.path}: {key} must be one number for all layers, not {shortened(repr(value))}"
        )
    if isinstance(value, int):
        return value
    if not math.isfinite(value):
        raise ConfigurationError(f"{file.path}: {key} is {value}", str(file.path))
    # The shortest decimal that rounds to the same float32, as the converter read it.
    return float(np.format_float_scientific(np.float32(value), unique=True))


def _dtype(file: GgufFile) -> str:
    """Return the dtype of most weights; packed ones count as bfloat16."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        packed = tensor.packing.elements > 1
        name = "bfloat16" if packed else tensor.dtype.name
        sizes[name] = sizes.get(name, 0) + math.prod(tensor.shape)
    return max(sizes, key=lambda name: sizes[name]) if sizes else "bfloat16"


def _rope(file: GgufFile, own: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    kind = own.get("rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        return {"rope_scaling": _llama3(file, values)}
    if "rope_factors_long.weight" in file.tensors or kind == "longrope":
        return _longrope(file, own)
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn") or "rope.scaling.attn_factor" in own:
        raise UnsupportedError(
            f"{file.path}: rope scaling of the kind {shortened(repr(kind))} is not supported"
        )
    scaling = {"rope_type": kind, "factor": _number(file, "factor", own.get("rope.scaling.factor"))}
    if "rope.scaling.original_context_length" in own:
        context = own["rope.scaling.original_context_length"]
        scaling["original_max_position_embeddings"] = _number(file, "context", context)
    return {"rope_scaling": scaling}


def _llama3(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return Llama 3's rope scaling, which files store as one factor a frequency.

    Its other three parameters are the same in all models; the factors must match them.
    """
    factors = _floats(file, "rope_freqs.weight")
    theta = float(values.get("rope_theta", 10000.0))
    scaling = {
        "rope_type": "llama3",
        "factor": max(factors, default=0.0),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    size = 2 * len(factors)
    try:
        plain, _ = frequencies(size, theta, None)
        scaled, _ = frequencies(size, theta, scaling)
    except (ConfigurationError, ArithmeticError):
        plain, scaled = [], []
    expected = [a / b for a, b in zip(plain, scaled, strict=True)]
    if len(expected) != len(factors) or not np.allclose(factors, expected, rtol=1e-4):
        raise UnsupportedError(
            f"{file.path}: its rope factors (rope_freqs.weight) are not those of Llama 3; "
            "get the model as a folder of safetensors files"
        )
    return scaling


def _longrope(file: GgufFile, own: Mapping[str, Any]) -> dict[str, Any]:
    long, short = (_floats(file, f"rope_factors_{kind}.weight") for kind in ("long", "short"))
    context = own.get("rope.scaling.original_context_length")
    return {
        "rope_scaling": {"rope_type": "longrope", "long_factor": long, "short_factor": short},
        "original_max_position_embeddings": _number(file, "original_context_length", context),
    }


def _floats(file: GgufFile, name: str) -> list[float]:
    tensor = file.tensors.get(name)
    if tensor is None or len(tensor.shape) != 1 or tensor.shape[0] > 4096:
        raise UnsupportedError(
            f"{file.path}: its rope factors ({name}) are missing or of another shape"
        )
    numbers = np.empty(tensor.shape, np.float32)
    with PlainFile(file.path, file.stamp) as opened:
        tensor.read(opened, numbers, 0)
    return [float(np.format_float_scientific(each, unique=True)) for each in numbers]


_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Keys of GGUF behind `general.sampling.`, and the same options of `generate`."""


def sampling_values(file: GgufFile) -> dict[str, Any]:
    """Return the options of `generate` that a file recommends."""
    values = {
        option: file.expect(f"general.sampling.{name}", int if name == "top_k" else float)
        for name, option in _SAMPLING.items()
    }
    return {option: value for option, value in values.items() if value is not None}
