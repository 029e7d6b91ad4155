"""GGUF files as llama.cpp's converter writes them, by the package `gguf` and its names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Arrays = Mapping[str, Any]


def permuted(weights: Any, heads: int) -> Any:
    """Rows of each head in pairs: the first of one half, the first of the other, and so on."""
    rows = weights.shape[0] // heads // 2
    return weights.reshape(heads, 2, rows, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def merged_experts(state: Arrays) -> dict[str, Any]:
    """Experts stacked by the name of their matrix, as the converter does."""
    found: dict[str, Any] = {}
    stacks: dict[str, dict[int, Any]] = {}
    inside = re.compile(r"(.*\.(?:mlp|block_sparse_moe)\.experts)\.(\d+)\.(\w+)\.weight")
    for name, x in state.items():
        if match := inside.fullmatch(name):
            stacks.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = x
        else:
            found[name] = x
    return found | {n: np.stack([s[e] for e in sorted(s)]) for n, s in stacks.items()}


def write(
    path: Path,
    architecture: str,
    state: Arrays,
    numbers: Mapping[str, Any],
    *,
    heads: tuple[int, int] | None = None,
    unit_norm: bool = False,
    tokenizer: Mapping[str, Any] | None = None,
    packing: str = "F32",
    tables: Arrays | None = None,
    others: Mapping[str, str] | None = None,
) -> Path:
    """A file of tensors that are named as in a folder.

    `heads`, of queries and keys, are given where rows are to be permuted. `others` are types other
    than `packing`, by a part of the names that the file has.
    """
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    layers = 1 + max(int(n.split(".")[2]) for n in state if n.startswith("model.layers."))
    names = gguf.get_tensor_name_map(kind, layers)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in numbers.items():
        writer_of(writer, value)(f"{architecture}.{key}", value)
    for key, value in (tokenizer or {}).items():
        writer_of(writer, value)(key, value)
    for name, x in merged_experts(state).items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs, name
        if heads and ".q_proj." in name:
            x = permuted(x, heads[0])
        if heads and ".k_proj." in name:
            x = permuted(x, heads[1])
        if unit_norm and name.endswith("norm.weight"):
            x = x + 1
        kind = next((kind for part, kind in (others or {}).items() if part in theirs), packing)
        add(writer, theirs, x.astype(np.float32), kind if x.ndim > 1 else "F32")
    for name, x in (tables or {}).items():
        add(writer, name, x, "F32")
    finish(writer)
    return path


def writer_of(writer: Any, value: object) -> Any:
    """The method that writes metadata of this type."""
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string"}
    return getattr(writer, f"add_{kinds.get(type(value), 'array')}")


def add(writer: Any, name: str, x: Any, packing: str) -> None:
    if packing == "F32":
        writer.add_tensor(name, np.ascontiguousarray(x))
        return
    kind = gguf.GGMLQuantizationType[packing]
    writer.add_tensor(name, gguf.quants.quantize(x, kind), raw_dtype=kind)


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
