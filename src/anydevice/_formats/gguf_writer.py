"""GGUF files written: header, metadata, and tensors that are quantized on their way.

The types of a mixture such as "q4_k_m" are chosen tensor by tensor, as llama.cpp's quantizer does.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anydevice._core.files import write_whole
from anydevice._core.quantized import BLOCK_TYPES
from anydevice._core.record import Record
from anydevice._formats.gguf import PACKINGS
from anydevice._formats.load import Advance, OpenFiles, Segment
from anydevice._formats.quantize import encode, fitting

if TYPE_CHECKING:
    from anydevice._core.array import HostArray

ALIGNMENT = 32
"""The bytes of which the place of each tensor in a file is a multiple."""
_CODES = {np.dtype(np.int32): 5, np.dtype(np.float32): 6}


class FileType(Record):
    """A mixture: the type of most matrices, and the format's number for the file."""

    kind: str
    number: int


FILE_TYPES = {
    "f16": FileType("F16", 1),
    "q4_0": FileType("Q4_0", 2),
    "q4_1": FileType("Q4_1", 3),
    "q8_0": FileType("Q8_0", 7),
    "q5_0": FileType("Q5_0", 8),
    "q5_1": FileType("Q5_1", 9),
    "q4_k_m": FileType("Q4_K", 15),
    "q5_k_m": FileType("Q5_K", 17),
    "q6_k": FileType("Q6_K", 18),
}
"""The types of files that are written."""


class NewTensor(Record):
    """A tensor of a new file: the stored tensors that it consists of, in order, or its numbers."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Segment, ...] = ()
    numbers: HostArray | None = None
    kind: str = "F32"

    @property
    def nbytes(self) -> int:
        """The size in the file, without padding."""
        size = prod(self.shape)
        if self.kind in ("F32", "F16"):
            return size * (4 if self.kind == "F32" else 2)
        return size // BLOCK_TYPES[self.kind].columns * BLOCK_TYPES[self.kind].bytes


def choose_kind(tensor: NewTensor, file_type: str, layers: int, experts: int, tied: bool) -> str:
    """Return the type of a tensor in a file; `tied` says that the embedding is the head."""
    kind, name, columns = FILE_TYPES[file_type].kind, tensor.name, tensor.shape[-1]
    if len(tensor.shape) < 2 or not name.endswith(".weight") or ".ffn_gate_inp" in name:
        return "F32"
    if kind == "F16":
        return kind
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        kind = "Q8_0" if kind == "Q8_0" or columns % 256 else "Q6_K"
    elif file_type.endswith("_m") and name.startswith("blk."):
        _, number, part, *_ = name.split(".")
        layer, eighth = int(number), layers // 8
        # The first and last eighth of the layers, and each third between them.
        fine = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
        if experts == 8 and part in ("attn_v", "attn_k"):
            kind = "Q8_0"
        elif part in ("attn_v", "ffn_down", "ffn_down_exps"):
            kind = "Q6_K" if fine else kind
        elif part == "attn_qkv":
            kind = "Q5_K" if kind == "Q4_K" else "Q6_K"
        elif experts == 8 and part == "attn_output":
            kind = "Q5_K"
    return fitting(kind, columns) or "F16"


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Sequence[NewTensor], advance: Advance
) -> None:
    """Write a file, whole or not at all; bytes in the metadata are values as a file has them."""
    write_whole(path, _pieces(metadata, tensors, advance))


def _pieces(
    metadata: Mapping[str, Any], tensors: Sequence[NewTensor], advance: Advance
) -> Iterator[Any]:
    yield header(metadata, tensors)
    with OpenFiles() as files:
        for tensor in tensors:
            if tensor.numbers is not None:
                yield tensor.numbers.astype(np.float32).tobytes()
            for part in tensor.parts:
                yield from encode(part, tensor.kind, files.of(part.tensor), advance)
            yield bytes(-tensor.nbytes % ALIGNMENT)


def header(metadata: Mapping[str, Any], tensors: Sequence[NewTensor]) -> bytes:
    """Return everything in front of the bytes of the tensors."""
    numbers = {packing.name: number for number, packing in PACKINGS.items()}
    text = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        text += _string(key) + (value if isinstance(value, bytes) else _value(value))
    offset = 0
    for tensor in tensors:
        sizes = tensor.shape[::-1]
        text += _string(tensor.name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        text += struct.pack("<IQ", numbers[tensor.kind], offset)
        offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return bytes(text) + bytes(-len(text) % ALIGNMENT)


def _value(value: Any) -> bytes:
    """Return the type of a value of the metadata, and the value."""
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", 9, _CODES[value.dtype], value.size) + value.tobytes()
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    code, number = {bool: ("?", 7), int: ("I", 4), float: ("f", 6)}[type(value)]
    return struct.pack(f"<I{code}", number, value)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()
