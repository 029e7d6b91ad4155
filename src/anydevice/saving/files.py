"""Nests of arrays with a description, as one safetensors file that knows its own hash.

The tensors lie in the file as in any other of that format, and other programs can read them. The
description is JSON in the file's own remarks, together with the version of this form and a hash of
all that matters.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from anydevice import __version__
from anydevice.core.device import Device
from anydevice.core.dtypes import as_dtype
from anydevice.core.files import write_whole
from anydevice.core.record import Record
from anydevice.core.trees import leaves
from anydevice.errors import ConfigurationError, TransferError
from anydevice.transfer.moving import to_numpy
from anydevice.transfer.weights.files import PlainFile
from anydevice.transfer.weights.loading import CHUNK, load_weights
from anydevice.transfer.weights.safetensors import Header, read_header

VERSION = 1
"""Of this form of files; one with a greater number is from a newer anydevice."""

SUFFIX = ".safetensors"
_REMARK, _HASH = "anydevice", "sha256"


class Contents(Record):
    """What a file holds: the nests by name, what was written of them, and by which anydevice."""

    trees: Mapping[str, Any]
    said: Mapping[str, Any]
    written_by: str


def checked_path(path: Any) -> Path:
    """The path of such a file; raises `ConfigurationError` where it has not its suffix."""
    checked = Path(path).expanduser()
    if checked.suffix != SUFFIX:
        raise ConfigurationError(
            f"{path}: the file is a safetensors file, so its name must end with {SUFFIX}",
            source="path",
        )
    return checked


def write(path: Path, kind: str, trees: Mapping[str, Any], said: Mapping[str, Any]) -> None:
    """Write nests of arrays, and what is said of them (ready for JSON), whole or not at all."""
    names: dict[str, Any] = {}
    nests = {name: _described(tree, name, names) for name, tree in trees.items()}
    tensors = {name: np.ascontiguousarray(to_numpy(array)) for name, array in names.items()}
    # NumPy makes arrays without axes longer on the way, and their shapes are in the nests' arrays.
    shapes = {name: tuple(names[name].shape) for name in names}
    remark = {
        "kind": kind,
        "version": VERSION,
        "anydevice": __version__,
        "trees": nests,
        "said": dict(said),
    }
    text = json.dumps(remark, ensure_ascii=False)
    table: dict[str, Any] = {}
    end = 0
    for name, array in tensors.items():
        table[name] = {
            "dtype": _code(name, array),
            "shape": list(shapes[name]),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    digest = _begun(text, table)
    for array in tensors.values():
        digest.update(_bytes(array))
    remarks = {_REMARK: text, _HASH: digest.hexdigest()}
    header = json.dumps({"__metadata__": remarks, **table}, ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)

    def pieces() -> Iterator[Any]:
        yield len(header).to_bytes(8, "little")
        yield header
        for array in tensors.values():
            yield _bytes(array)

    write_whole(path, pieces())


def read(path: Path, kind: str, device: Device) -> Contents:
    """What such a file holds, its arrays on a device.

    Raises `TransferError`, with the path, where the file is damaged, newer, or of another kind.
    """
    header = read_header(path)
    remark = _remark(path, header, kind)
    _check_hash(path, header)
    arrays = load_weights(path, device, progress=False)
    try:
        trees = {name: _filled(nest, arrays) for name, nest in remark["trees"].items()}
        return Contents(trees, remark["said"], str(remark.get("anydevice", "unknown")))
    except (KeyError, TypeError, AttributeError) as error:
        raise TransferError(
            f"{path}: its description does not fit its tensors ({error})"
        ) from error


def kind_of(path: Path) -> str | None:
    """The kind of such a file; `None` where there is none, or one that cannot be read."""
    try:
        return str(json.loads(read_header(path).metadata[_REMARK])["kind"])
    except (TransferError, ValueError, KeyError, TypeError):
        return None


def misread(path: Path, written_by: str, error: Exception) -> TransferError:
    """The error for a file that is whole, and holds what this anydevice does not know."""
    return TransferError(
        f"{path} holds what anydevice {__version__} cannot read ({error}); it was written by "
        f"anydevice {written_by}. Where that is newer, run: pip install --upgrade anydevice"
    )


def _remark(path: Path, header: Header, kind: str) -> dict[str, Any]:
    text = header.metadata.get(_REMARK)
    if text is None:
        raise TransferError(
            f"{path} holds tensors, but no description of a model; it was not written by "
            "nn.save or nn.train. Read its tensors with anydevice.load_weights"
        )
    try:
        remark: dict[str, Any] = json.loads(text)
        version, found = int(remark["version"]), str(remark["kind"])
    except (ValueError, KeyError, TypeError) as error:
        raise TransferError(f"{path}: its description is damaged ({error})") from error
    if version > VERSION:
        raise TransferError(
            f"{path} has version {version} of this form, and this anydevice knows {VERSION}; "
            "run: pip install --upgrade anydevice"
        )
    if found != kind:
        raise TransferError(f"{path} holds a {found}, not a {kind}{_OTHERWISE.get(kind, '')}")
    return remark


_OTHERWISE = {"model": "; go on with it by nn.train(…, resume=path)"}


def _check_hash(path: Path, header: Header) -> None:
    table = {
        name: {
            "dtype": entry.dtype.code,
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.stop],
        }
        for name, entry in header.entries.items()
    }
    start = min((entry.start for entry in header.entries.values()), default=header.stamp.size)
    for row in table.values():
        row["data_offsets"] = [offset - start for offset in row["data_offsets"]]  # type: ignore[operator,union-attr]
    digest = _begun(header.metadata[_REMARK], table)
    with PlainFile(path, header.stamp) as file:
        for at in range(start, header.stamp.size, CHUNK):
            digest.update(file.read(min(CHUNK, header.stamp.size - at), at))
        file.confirm_unchanged()
    if digest.hexdigest() != header.metadata.get(_HASH):
        raise TransferError(
            f"{path} is damaged: its hash is not that of what was written; take another copy of it"
        )


def _begun(text: str, table: Mapping[str, Any]) -> Any:
    return hashlib.sha256(json.dumps([text, table], sort_keys=True).encode())


def _code(name: str, array: Any) -> str:
    dtype = as_dtype(array.dtype)
    if dtype.code is None or dtype.packed:
        raise TransferError(f"{name}: a safetensors file holds no {dtype}", name)
    return dtype.code


def _bytes(array: Any) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))


def _described(tree: Any, path: str, names: dict[str, Any]) -> Any:
    """A nest as JSON, a tensor's name in place of each array; the arrays go into `names`."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        if not all(isinstance(key, str) for key in tree):
            raise ConfigurationError(f"{path}: keys must be texts to be saved, not {list(tree)}")
        return {"dict": {key: _described(tree[key], f"{path}.{key}", names) for key in tree}}
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [_described(part, f"{path}.{at}", names) for at, part in enumerate(tree)]}
    assert len(leaves(tree)) == 1
    name = path
    while name in names:
        name += "_"
    names[name] = tree
    return name


def _filled(nest: Any, arrays: Mapping[str, Any]) -> Any:
    if nest is None:
        return None
    if isinstance(nest, str):
        return arrays[nest]
    ((kind, parts),) = nest.items()
    if kind == "dict":
        return {key: _filled(part, arrays) for key, part in parts.items()}
    filled = [_filled(part, arrays) for part in parts]
    return filled if kind == "list" else tuple(filled)
