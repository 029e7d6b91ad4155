"""Model files: trees of arrays with metadata, as one safetensors file with a hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from anydevice import __version__
from anydevice._arrays.memory.out_of_memory import translating_oom
from anydevice._arrays.move import to_numpy
from anydevice._core.device import Device
from anydevice._core.dtypes import as_dtype
from anydevice._core.files import PlainFile, count_json, expanded, parse_json, write_whole
from anydevice._core.record import Record
from anydevice._core.text import shortened, update_command
from anydevice._core.trees import leaves
from anydevice._formats.load import CHUNK, load_file
from anydevice._formats.safetensors import Header, header_of, open_safetensors, read_header
from anydevice.errors import ConfigurationError, TransferError

VERSION = 1
"""The version of this format; a file with a greater one is from a newer anydevice."""

SUFFIX = ".safetensors"
_KEY, _HASH = "anydevice", "sha256"
_DEEPEST = 400
"""Levels of JSON in a description: a layer inside another one takes four."""
_RESUME = {"model": "; go on with it by nn.train(…, resume=path)"}


class Contents(Record):
    """The content of a file: trees by name, metadata, and the anydevice that wrote it."""

    trees: Mapping[str, Any]
    metadata: Mapping[str, Any]
    written_by: str


def checked_path(path: Any) -> Path:
    """Return the path of a model file; raises `ConfigurationError` for another suffix."""
    checked = expanded(path)
    if checked.suffix != SUFFIX:
        raise ConfigurationError(
            f"{path}: the file is a safetensors file, so its name must end with {SUFFIX}",
            source="path",
        )
    return checked


def write(path: Path, kind: str, trees: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    """Write trees of arrays, and metadata that JSON can hold, whole or not at all."""
    with translating_oom(what=f"{path} cannot be written"):
        _write(path, kind, trees, metadata)


def _write(path: Path, kind: str, trees: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    arrays: dict[str, Any] = {}
    described = {name: _describe_tree(tree, name, arrays) for name, tree in trees.items()}
    tensors = {name: np.ascontiguousarray(to_numpy(array)) for name, array in arrays.items()}
    text = json.dumps(
        {
            "kind": kind,
            "version": VERSION,
            "anydevice": __version__,
            "trees": described,
            "said": dict(metadata),
        },
        ensure_ascii=False,
    )
    try:
        count_json(text.encode(), deepest=_DEEPEST)
    except ValueError as error:
        raise ConfigurationError(f"{path} could not be read again: {error}") from error
    table: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        dtype = as_dtype(tensor.dtype)
        if dtype.code is None or dtype.packed:
            raise TransferError(f"{name}: a safetensors file holds no {dtype}", name)
        table[name] = {
            "dtype": dtype.code,
            "shape": list(arrays[name].shape),  # NumPy gives an axis to arrays without any
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    digest = _hash_of(text, table)
    for tensor in tensors.values():
        digest.update(_bytes(tensor))
    own = {_KEY: text, _HASH: digest.hexdigest()}
    header = json.dumps({"__metadata__": own, **table}, ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)

    def pieces() -> Iterator[Any]:
        yield len(header).to_bytes(8, "little")
        yield header
        yield from map(_bytes, tensors.values())

    write_whole(path, pieces())


def read(path: Path, kind: str, device: Device) -> Contents:
    """Read a model file, with its arrays on a device; raise `TransferError` if damaged or newer."""
    # Opened once: another process may replace the file meanwhile.
    with translating_oom(what=f"{path} cannot be read"), open_safetensors(path) as file:
        header = header_of(file)
        metadata = _metadata(path, header, kind)
        _check_hash(file, header)
        arrays = load_file(file, header, device, progress=False)
    try:
        trees = {name: _fill_tree(tree, arrays) for name, tree in metadata["trees"].items()}
        return Contents(trees, metadata["said"], str(metadata.get("anydevice", "unknown")))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TransferError(
            f"{path}: its description does not fit its tensors ({shortened(str(error))})"
        ) from error


def kind_of(path: Path) -> str | None:
    """Return the kind of a model file; `None` if there is none, or it cannot be read."""
    try:
        return str(_parse_description(read_header(path).metadata[_KEY])["kind"])
    except (TransferError, ValueError, KeyError, TypeError):
        return None


def misread(path: Path, written_by: str, error: Exception) -> TransferError:
    """Return the error for an undamaged file that this anydevice cannot read."""
    return TransferError(
        f"{path} holds what anydevice {__version__} cannot read ({shortened(str(error), 200)}); "
        f"it was written by anydevice {shortened(written_by)}. Where that is newer, run: "
        f"{update_command()}"
    )


def _metadata(path: Path, header: Header, kind: str) -> dict[str, Any]:
    text = header.metadata.get(_KEY)
    if text is None:
        raise TransferError(
            f"{path} holds tensors, but no description of a model; it was not written by "
            "nn.save or nn.train. Read its tensors with anydevice.load_weights"
        )
    try:
        read: dict[str, Any] = _parse_description(text)
        version, own_kind = read["version"], str(read["kind"])
        if type(version) is not int:
            raise ValueError(f"its version is {version!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise TransferError(
            f"{path}: its description is damaged ({shortened(str(error))})"
        ) from error
    if version > VERSION:
        raise TransferError(
            f"{path} has version {version} of its format, and this anydevice knows {VERSION}; "
            f"run: {update_command()}"
        )
    if own_kind != kind:
        raise TransferError(
            f"{path} holds a {shortened(own_kind)}, not a {kind}{_RESUME.get(kind, '')}"
        )
    return read


def _parse_description(text: str) -> Any:
    """Parse a description, in which a loss may be NaN; raises `ValueError` if it is damaged."""
    return parse_json(text.encode(), finite=False, deepest=_DEEPEST)


def _check_hash(file: PlainFile, header: Header) -> None:
    start = min((entry.start for entry in header.entries.values()), default=file.size)
    table = {
        name: {
            "dtype": entry.dtype.code,
            "shape": list(entry.shape),
            "data_offsets": [entry.start - start, entry.start + entry.nbytes - start],
        }
        for name, entry in header.entries.items()
    }
    digest = _hash_of(header.metadata[_KEY], table)
    for position in range(start, file.size, CHUNK):
        digest.update(file.read(min(CHUNK, file.size - position), position))
    if digest.hexdigest() != header.metadata.get(_HASH):
        raise TransferError(
            f"{file.path} is damaged: its hash is not the one that was written; "
            "take another copy of it"
        )


def _hash_of(text: str, table: Mapping[str, Any]) -> Any:
    return hashlib.sha256(json.dumps([text, table], sort_keys=True).encode())


def _bytes(array: Any) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))


def _describe_tree(tree: Any, path: str, arrays: dict[str, Any]) -> Any:
    """Return a tree as JSON, with a name in place of each array; add the arrays to `arrays`."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        if not all(isinstance(key, str) for key in tree):
            raise ConfigurationError(f"{path}: keys must be strings to be saved, not {list(tree)}")
        return {"dict": {key: _describe_tree(tree[key], f"{path}.{key}", arrays) for key in tree}}
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        parts = enumerate(tree)
        return {kind: [_describe_tree(part, f"{path}.{at}", arrays) for at, part in parts]}
    assert len(leaves(tree)) == 1
    name = path
    while name in arrays:
        name += "_"
    arrays[name] = tree
    return name


def _fill_tree(tree: Any, arrays: Mapping[str, Any]) -> Any:
    if tree is None:
        return None
    if isinstance(tree, str):
        return arrays[tree]
    ((kind, parts),) = tree.items()
    if kind == "dict":
        return {key: _fill_tree(part, arrays) for key, part in parts.items()}
    filled = [_fill_tree(part, arrays) for part in parts]
    return filled if kind == "list" else tuple(filled)
