"""Headers of safetensors files, of one file or of a sharded model, read and checked.

A file is eight bytes with the length of its header, the header in JSON, and the tensors' bytes
without a gap. Nothing here allocates an array. Every tensor of a header that is returned lies
inside its file, has the bytes that its shape and dtype need, and shares none with another.

Files may come from anyone. Brackets, keys and commas of a header are counted before `json` parses
it, since many empty lists take little text and much memory. Duplicate keys, NaN, infinity and text
that is not valid Unicode are refused.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from math import isinf, prod
from operator import attrgetter
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Self

from anydevice._core.dtypes import BY_CODE, DType
from anydevice._core.files import PlainFile, Stamp, count_json
from anydevice._core.quantized import QuantizedWeight
from anydevice._core.record import NOTHING, Record, replace
from anydevice._core.text import shortened
from anydevice.errors import TransferError

MODEL_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
LONGEST_HEADER = 100_000_000
"""Bytes: the format's own limit for a header, and ours for an index."""

MOST_DIMENSIONS = 32
"""The most axes of an array in the oldest NumPy that we support."""

_LONGEST_NUMBER = 400
"""Characters of a number; a float has at most some 330."""

# A tensor has three brackets and four keys in at least 50 bytes of JSON, 64 in a large header, as
# names and offsets are longer. Small headers may have any number.
_BYTES_EACH, _BYTES_A_KEY = 16, 12
_SPARE_BRACKETS, _SPARE_KEYS = 1000, 4000

_NAMED_DUPLICATES = 2**20
"""Bytes of JSON up to which the message names a duplicate key: finding it takes memory."""

_PICKLED = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
_PICKLED_CONTENT = re.compile(rb"PK\x03\x04|\x80[\x02-\x05]")
_AGAIN = "it is damaged or incomplete: download or save it again"
_METADATA = "__metadata__"


class StoredTensor(Record):
    """A tensor of a file, from byte `start` on; `dtype` is the dtype of its unpacked elements."""

    name: str
    path: Path
    stamp: Stamp
    dtype: DType
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def read(self, file: PlainFile, target: Any, first: int) -> None:
        """Fill a flat array with the elements from `first`, a multiple of 256, in its dtype."""
        raise NotImplementedError

    @property
    def scheme(self) -> str | None:
        """The scheme of its quantized weights; None if it is read as floating-point numbers."""
        return None

    @property
    def whole(self) -> bool:
        """Whether it is read as a whole, because it is several tensors, or rows are spread."""
        return False

    def blocks(self, file: PlainFile, first: int, shape: tuple[int, int]) -> QuantizedWeight:
        """Return rows of a tensor with a `scheme` as they are stored, from element `first` on."""
        raise NotImplementedError

    def row(self, number: int) -> Self:
        """Return one row of the first axis as a tensor of its own."""
        size = self.nbytes // self.shape[0]
        start = self.start + number * size
        return replace(self, shape=self.shape[1:], start=start, nbytes=size)

    def convert(self, source: Any, target: Any) -> None:
        """Copy numbers into another dtype; raise if a finite number becomes infinite."""
        import numpy as np  # reading a header needs no NumPy

        with np.errstate(all="ignore"):
            target[...] = source
        if source.dtype == target.dtype:
            return
        finite = np.isfinite(target)
        if not finite.all() and (np.isfinite(source) & ~finite).any():
            raise self.error(
                f"it holds numbers that {target.dtype} cannot; load it as {self.dtype}"
            )

    def check_numbers(self, numbers: Any, kind: str, dtype: Any) -> None:
        """Raise if a number is NaN, or too large for `dtype`, in which `kind` has its scales."""
        import numpy as np

        if not max(numbers.max(), -numbers.min()) <= np.finfo(dtype).max:
            raise self.error(f"it holds NaN, or numbers that {kind} cannot; download it again")

    def error(self, problem: str) -> TransferError:
        name = shortened(self.name)
        return TransferError(f"{self.path}: the tensor {name!r}: {problem}", self.name)


class SafeTensor(StoredTensor):
    def read(self, file: PlainFile, target: Any, first: int) -> None:
        import numpy as np

        same = target.dtype.name == self.dtype.name
        stored = target if same else np.empty(target.size, self.dtype.numpy())
        file.read_into(stored.view(np.uint8).data, self.start + first * stored.itemsize)
        if self.dtype.kind == "bool" and stored.size and stored.view(np.uint8).max() > 1:
            raise self.error("it is BOOL, and holds bytes that are neither 0 nor 1")
        if not same:
            self.convert(stored, target)


class Header(Record):
    """The header of one file in the state `stamp`: tensors by name, in order, and metadata."""

    path: Path
    stamp: Stamp
    entries: Mapping[str, SafeTensor]
    metadata: Mapping[str, str] = NOTHING


def read_model(path: Path) -> Mapping[str, SafeTensor]:
    """Return every tensor of a file, a folder or a sharded index by name, from the headers.

    A folder is read through its index, if it has one. Otherwise it holds one safetensors file, or
    one of several is called model.safetensors. The tensors of an index come in the index's order;
    tensors that it does not name are ignored. Every error is a `TransferError` with the path.
    """
    source = source_of(path)
    return read_index(source) if is_index(source) else read_header(source).entries


def is_index(path: Path) -> bool:
    """Whether a file is an index of others, by its name."""
    return path.suffix == ".json"


def read_header(path: Path) -> Header:
    with open_safetensors(path) as file:
        return header_of(file)


def open_safetensors(path: Path) -> PlainFile:
    """Open a file; raises `TransferError` if it has the suffix of a pickle."""
    if path.suffix.lower() in _PICKLED:
        raise _pickle_error(path)
    return PlainFile(path)


def header_of(file: PlainFile) -> Header:
    path = file.path
    if file.size < 8:
        raise TransferError(
            f"{path} has {file.size} bytes, and a safetensors file has at least 8; {_AGAIN}"
        )
    start = file.read(8, 0)
    length = int.from_bytes(start, "little")
    if not 0 < length <= min(file.size - 8, LONGEST_HEADER):
        raise _wrong_length(file, start, length)
    text = file.read(length, 8)
    try:
        header = _parse_object(text)
        metadata = _strings(header.pop(_METADATA, {}))
        entries = _read_entries(header, 8 + length, file)
    except ValueError as error:
        raise TransferError(f"{path}: its header is not valid: {error}; {_AGAIN}") from error
    except TransferError as error:
        raise TransferError(f"{path}: {error}", error.path) from error
    return Header(path, file.stamp, entries, metadata)


def _read_entries(header: Mapping[str, Any], base: int, file: PlainFile) -> dict[str, SafeTensor]:
    """Return the tensors of a header, whose bytes begin at `base`."""
    entries = {}
    for name, value in header.items():
        try:
            entries[name] = _read_entry(name, value, base, file)
        except ValueError as error:
            raise ValueError(f"the tensor {_short(name)}: {error}") from error
    _check_cover(entries, base, file.size)
    return entries


def _parse_object(raw: bytearray) -> dict[str, Any]:
    """Parse a JSON object; raises `ValueError` for anything else. Empties `raw`."""
    keys = _check_size(raw)
    text = raw.decode()
    raw.clear()  # it may be large, and the parsed object is larger
    try:
        decoder = _CHECKING_DECODER if _UNUSUAL_NUMBER.search(text) else _DECODER
        parsed = _object(decoder.decode(text))
    except json.JSONDecodeError as error:
        raise ValueError(str(error)) from None  # the original error would keep the text alive
    if keys != _check_strings(parsed):
        # A hook in the first pass would need a list of all pairs beside each dict.
        if len(text) <= _NAMED_DUPLICATES:
            json.loads(text, object_pairs_hook=_unique)
        raise ValueError("a key occurs twice in one object")
    return parsed


def _check_size(text: bytearray) -> int:
    """Return the number of keys; raise `ValueError` if parsing would take too much memory."""
    most = _SPARE_BRACKETS + len(text) // _BYTES_EACH
    most_keys = _SPARE_KEYS + len(text) // _BYTES_A_KEY
    opened, keys = count_json(text)
    if opened > most:
        raise ValueError(f"more than {most} lists and objects in {len(text)} bytes")
    if keys > most_keys:
        raise ValueError(f"more than {most_keys} keys in {len(text)} bytes")
    return keys


def _check_strings(tree: Any) -> int:
    """Count the keys of all objects; raise for half of a surrogate pair, which is no character."""
    keys, waiting = 0, [iter((tree,))]
    while waiting:
        for value in waiting[-1]:
            if isinstance(value, str):
                if not value.isascii():
                    value.encode()
            elif isinstance(value, dict):
                keys += len(value)
                waiting += [iter(value), iter(value.values())]
                break
            elif isinstance(value, list):
                waiting.append(iter(value))
                break
        else:
            waiting.pop()
    return keys


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict; raise `ValueError` for duplicate keys."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {_short(key)} occurs twice in one object")
    return unique


def _float(text: str) -> float:
    value = float(text) if len(text) <= _LONGEST_NUMBER else float("inf")
    if isinf(value):
        raise ValueError(f"expected a number that a float can hold, found {reprlib.repr(text)}")
    return value


def _integer(text: str) -> float:
    if len(text) < 19 and text != "-0":
        return int(text)
    value = _float(text)  # bounds the digits
    return value if text == "-0" else int(text)  # the reference reader takes no -0 for an integer


def _refuse_constant(text: str) -> None:
    raise ValueError(f"expected a value, found {text}")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_CHECKING_DECODER = json.JSONDecoder(
    parse_float=_float, parse_int=_integer, parse_constant=_refuse_constant
)
_UNUSUAL_NUMBER = re.compile(r"[\[,:\s](?:-0|-?\d{19}|-?\d+[.eE])")
"""Negative zero, a long number or a fraction: only these need the slower decoder."""


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _type_error("an object", value)
    return value


def _strings(value: Any) -> dict[str, str]:
    texts = _object(value)
    for text in texts.values():
        if not isinstance(text, str):
            raise _type_error("a string", text)
    return texts


def _type_error(expected: str, value: Any) -> ValueError:
    return ValueError(f"expected {expected}, found {reprlib.repr(value)}")


def _read_entry(name: str, fields: Any, base: int, file: PlainFile) -> SafeTensor:
    if not isinstance(fields, dict):
        raise _type_error("an object", fields)
    if not {"dtype", "shape", "data_offsets"} <= fields.keys():
        missing = [key for key in ("dtype", "shape", "data_offsets") if key not in fields]
        raise _wrong(name, f"it has no {' and no '.join(missing)}")
    code = fields["dtype"]
    if not isinstance(code, str):
        raise _type_error("the name of a dtype", code)
    for key, limit in (("shape", MOST_DIMENSIONS), ("data_offsets", 2)):
        value = fields[key]
        if not isinstance(value, list) or len(value) > limit:
            raise _type_error(f"a list of at most {limit} integers", value)
        for number in value:
            if type(number) is not int or not 0 <= number < 2**64:
                raise _type_error("an integer from 0 to 2**64 - 1", number)
    shape, offsets = tuple(fields["shape"]), tuple(fields["data_offsets"])
    if code not in _READABLE:
        raise _wrong_dtype(name, code)
    dtype, itemsize = _READABLE[code]
    strides = itemsize
    for length in shape:
        strides *= length or 1
    # Even an array without elements must have strides that a signed 64-bit integer can hold.
    if strides >= 2**63:
        raise _wrong(name, f"its shape {_short(shape)} is larger than any array can be")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _wrong(name, f"its data_offsets {_short(offsets)} are not a start and an end")
    start, stop = base + offsets[0], base + offsets[1]
    if stop > file.size:
        raise _wrong(name, f"it ends at byte {stop}, but the file has only {file.size} bytes")
    needed = prod(shape) * itemsize
    if stop - start != needed:
        raise _wrong(
            name, f"its shape {_short(shape)} of {dtype} needs {needed} bytes, not {stop - start}"
        )
    return SafeTensor(name, file.path, file.stamp, dtype, shape, start, needed)


_READABLE = {code: (row, row.itemsize) for code, row in BY_CODE.items() if not row.packed}


def _wrong_dtype(name: str, code: str) -> TransferError:
    readable = ", ".join(_READABLE)
    if code not in BY_CODE:
        return _wrong(name, f"its dtype {code[:40]!r} is not known; known are {readable}", "")
    return _wrong(
        name,
        f"its dtype {code} packs elements of {BY_CODE[code].bits} bits into bytes, which no engine "
        f"reads; save it as one of {readable}",
        "",
    )


def _check_cover(entries: Mapping[str, SafeTensor], base: int, size: int) -> None:
    """Check that every byte after the header belongs to exactly one tensor."""
    reached, before = base, ""
    for entry in sorted(entries.values(), key=attrgetter("start", "nbytes")):
        if entry.start < reached:
            owner = _short(before) if before else "the header"
            raise _wrong(entry.name, f"its bytes overlap with those of {owner}")
        if entry.start > reached:
            raise _wrong(entry.name, f"{entry.start - reached} bytes before it belong to no tensor")
        reached, before = entry.start + entry.nbytes, entry.name
    if reached != size:
        raise TransferError(f"its last {size - reached} bytes belong to no tensor; {_AGAIN}")


def read_index(path: Path) -> dict[str, SafeTensor]:
    """Read every tensor that an index names, as `read_model` does."""
    files = _weight_map(path)
    paths = {file: _shard_path(path, file) for file in dict.fromkeys(files.values())}
    missing = [file for file, shard in paths.items() if not os.path.exists(shard)]
    if missing:
        raise TransferError(
            f"{path}: {len(missing)} of its {len(paths)} files are missing: "
            f"{_list_names(missing)}; download them again"
        )
    headers = {file: read_header(shard) for file, shard in paths.items()}
    for name, file in files.items():
        if name not in headers[file].entries:
            raise TransferError(
                f"{path}: it says that {paths[file].name} holds the tensor {_short(name)}, which "
                "it does not; index and files are not of one model: download both again",
                name,
            )
    return {name: headers[file].entries[name] for name, file in files.items()}


def _weight_map(path: Path) -> dict[str, str]:
    with PlainFile(path) as file:
        if file.size > LONGEST_HEADER:
            raise TransferError(
                f"{path} has {file.size} bytes; an index has at most {LONGEST_HEADER}"
            )
        text = file.read(file.size, 0)
    try:
        index = _parse_object(text)
        files = _strings(index["weight_map"]) if "weight_map" in index else None
    except ValueError as error:
        raise TransferError(f"{path} is not a valid index: {error}; {_AGAIN}") from error
    if files is None:
        raise TransferError(f"{path} is not an index of safetensors files: it has no weight_map")
    return files


def _shard_path(index: Path, file: str) -> Path:
    """Return the file that an index names; one outside the index's folder is refused."""
    inside = PurePosixPath(file)
    plain = inside.parts and not inside.is_absolute() and ".." not in inside.parts
    if not plain or PureWindowsPath(file).drive or "\\" in file or "\0" in file:
        raise TransferError(
            f"{index}: it names the file {_short(file)}; only files in the index's own folder are "
            "read, so put it there and name it without a path"
        )
    return index.parent.joinpath(*inside.parts)


def source_of(path: Path) -> Path:
    """Return the file or the index of a path; a folder must have one of them."""
    if not os.path.isdir(path):
        return path
    try:
        names = sorted(name for name in os.listdir(path) if not name.startswith("."))
    except OSError as error:
        raise TransferError(f"{path} cannot be read: {error.strerror}") from error
    if INDEX_NAME in names:
        return path / INDEX_NAME
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    indexes = indexes or [name for name in names if name.lower().endswith(".safetensors")]
    if len(indexes) == 1 or MODEL_NAME in indexes:
        return path / (MODEL_NAME if MODEL_NAME in indexes else indexes[0])
    if indexes:
        raise TransferError(
            f"{path} has {len(indexes)} candidate files ({_list_names(indexes)}) "
            f"and no {INDEX_NAME}; name one of them"
        )
    pickled = [name for name in names if Path(name).suffix.lower() in _PICKLED]
    if pickled:
        raise _pickle_error(path / pickled[0])
    packed = [name for name in names if name.lower().endswith(".gguf")]
    if packed:
        raise TransferError(
            f"{path} holds GGUF files ({_list_names(packed)}) and no .safetensors file; "
            "give anydevice.llm.load or anydevice chat the path of one"
        )
    raise TransferError(
        f"{path} holds no .safetensors file; give the folder or the file with the weights, or "
        "download it again"
    )


def _wrong_length(file: PlainFile, start: bytearray, length: int) -> TransferError:
    """Return the error for a header of an impossible length, or for a file of another kind."""
    if _PICKLED_CONTENT.match(start):
        return _pickle_error(file.path)
    if start == b"version ":
        return TransferError(
            f"{file.path} is not the tensors but a pointer to them, as Git LFS leaves it; "
            "run: git lfs pull"
        )
    most = min(file.size - 8, LONGEST_HEADER)
    return TransferError(
        f"{file.path}: its header says that it is {length} bytes long, and it can be 1 to {most}; "
        f"this is not a safetensors file, or {_AGAIN}"
    )


def _pickle_error(path: Path) -> TransferError:
    name = path.with_suffix(".safetensors").name
    if name == path.name:  # a pickle under a wrong name, which must not be written over
        name = f"{path.stem}.converted.safetensors"
    return TransferError(
        f"{path} is a pickle, which can run any program when it is read, so it is never read here. "
        "Convert it first, where you trust its maker: safetensors.torch.save_file("
        f"torch.load({path.name!r}, weights_only=True), {name!r})"
    )


def _wrong(name: str, problem: str, then: str = f"; {_AGAIN}") -> TransferError:
    return TransferError(f"the tensor {_short(name)}: {problem}{then}", name)


def _list_names(names: Sequence[str]) -> str:
    shown = [shortened(name) for name in names[:5]]
    return ", ".join((*shown, "…") if names[5:] else shown)


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 100 else f"{shown[:99]}…"
