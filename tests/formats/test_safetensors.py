"""The headers of safetensors files and of sharded models: read, and everything wrong refused."""

from __future__ import annotations

import json
import os
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from anydevice._core.dtypes import DTYPES
from anydevice._formats.safetensors import LONGEST_HEADER, read_header, read_model
from anydevice.errors import TransferError
from tests.faults.damage import content

INDEX = "model.safetensors.index.json"


def tensor(dtype: str, shape: list[Any], start: Any, stop: Any, **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop], **more}


ONE = tensor("U8", [1], 0, 1)


def alone(data: bytes = b"1", **fields: Any) -> bytes:
    """A file of one tensor, which is a byte but for these fields."""
    return content({"a": {**ONE, **fields}}, data)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


# --- files that are right --------------------------------------------------------------------


def test_a_header_holds_every_tensor_as_it_is_listed(file: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "second": tensor("BF16", [2, 3], 4, 16),
        "first": tensor("F32", [], 0, 4),
        "empty": tensor("I64", [0, 7], 16, 16),
    }
    file.write_bytes(content(header, bytes(16)))
    read = read_header(file)
    base = file.stat().st_size - 16
    assert list(read.entries) == ["second", "first", "empty"]
    assert read.entries["second"].dtype is DTYPES["bfloat16"]
    assert read.entries["second"].shape == (2, 3)
    assert (read.entries["second"].start, read.entries["second"].nbytes) == (base + 4, 12)
    assert (read.entries["first"].shape, read.entries["first"].nbytes) == ((), 4)
    assert read.entries["empty"].nbytes == 0
    assert read.metadata == {"format": "pt"}


def test_the_reference_library_s_file_is_read(file: Path) -> None:
    arrays = {"a/ü": np.arange(6, dtype=np.int16).reshape(2, 3), "b": np.ones((), np.complex64)}
    safetensors.numpy.save_file(arrays, file, metadata={"note": 'quoted "so" \\ 🙂'})
    read = read_header(file)
    assert read.metadata == {"note": 'quoted "so" \\ 🙂'}
    raw = file.read_bytes()
    for name, array in arrays.items():
        entry = read.entries[name]
        assert (entry.dtype.name, entry.shape) == (array.dtype.name, array.shape)
        assert raw[entry.start :][: entry.nbytes] == array.tobytes()


NESTED = b'{"a":%b,"x":%b}}' % (json.dumps(ONE).encode()[:-1], b"[" * 62 + b"]" * 62)
BRACKETS = {"__metadata__": {"tree": "[{" * 5000, '"': '\\"['}, "layers[0]" + "[" * 100: ONE}
OWN = [1, -2.5e3, "x", {"y": [True, False, None], "z": {}}, []]
BETWEEN = {"a": ONE, "b": tensor("F32", [0], 1, 1), "c": tensor("I8", [1], 1, 2)}
SMALLEST = {f"{n:x}": tensor("U8", [], n, n + 1) for n in range(4096)}
RIGHT = {
    "no tensors": content(b"{}"),
    "white space around": content(b' \n{"a": %b } ' % json.dumps(ONE).encode(), b"1"),
    "an escaped name": content(b'{"\\u00fc\\n\\ud83d\\ude42":%b}' % json.dumps(ONE).encode(), b"1"),
    "an empty name": content({"": ONE}, b"1"),
    "fields of the writer's own": alone(note=OWN),
    "empty tensors between": content(BETWEEN, b"12"),
    "brackets in texts": content(BRACKETS, b"1"),
    "the smallest tensors": content(SMALLEST, bytes(4096)),
    "nested 64 levels deep": content(NESTED, b"1"),
    "32 dimensions": alone(shape=[1] * 32),
    "an unaligned tensor": content({"a": ONE, "b": tensor("F32", [1], 1, 5)}, b"12345"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_the_reference_library_reads_we_read_alike(file: Path, name: str) -> None:
    file.write_bytes(RIGHT[name])
    theirs = dict(safetensors.deserialize(RIGHT[name]))
    ours = read_header(file).entries
    assert ours.keys() == theirs.keys()
    for key, entry in ours.items():
        assert (entry.dtype.code, list(entry.shape)) == (theirs[key]["dtype"], theirs[key]["shape"])


# --- files that are wrong --------------------------------------------------------------------

HUGE = 2**64 - 1
TWICE = b'{"a":%b,"a":%b}' % ((json.dumps(ONE).encode(),) * 2)
LONG_TWICE = b'{"%b":%b,"%b":1}' % (b"n" * 99, json.dumps(ONE).encode(), b"n" * 99)
OVERLAP = {"a": tensor("U8", [2], 0, 2), "b": tensor("U8", [2], 1, 3)}
WRONG: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "has 0 bytes"),
    "seven bytes": (b"1234567", "has 7 bytes"),
    "a header of length 0": (content(b""), "says that it is 0 bytes"),
    "a header beyond the file": (b"\x03\0\0\0\0\0\0\0{}", "3 bytes long, and it can be 1 to 2"),
    "a header of 2**64 - 1": (b"\xff" * 8 + b"{}", "18446744073709551615 bytes long"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "run: git lfs pull"),
    "a zipped pickle": (b"PK\x03\x04" + bytes(40), "is a pickle.*never read"),
    "a bare pickle": (b"\x80\x02}q\x00." + bytes(40), "is a pickle.*never read"),
    "a header that is not UTF-8": (content(b'{"\xff": 1}'), "can't decode byte 0xff"),
    "half of a surrogate pair": (content(b'{"\\ud800": 1}'), "surrogates not allowed"),
    "half a pair in a field's name": (content(b'{"a":{"\\udc00": 1}}'), "surrogates not allowed"),
    "half of a pair in a list": (content(b'{"a":{"x":["\\ud800"]}}'), "surrogates not allowed"),
    "half in metadata": (content(b'{"__metadata__":{"a":"\\ud800x"}}'), "surrogates not allowed"),
    "an escape that is none": (content(b'{"\\q": 1}'), "escape"),
    "a bare word": (content(b"hello"), r"Expecting value: .*\(char 0\)"),
    "a list": (content(b"[]"), r"expected an object, found \[\]"),
    "a byte order mark": (content(b"\xef\xbb\xbf{}"), "Expecting value"),
    "an end in the middle": (content(b'{"a"'), r"Expecting ':' delimiter: .*\(char 4\)"),
    "a second value": (content(b"{} {}"), "Extra data"),
    "null bytes after it": (content(b"{}\0\0"), "Extra data"),
    "a line break in a name": (content(b'{"a\n": 1}'), "Invalid control character"),
    "a comma too many": (content(b'{"a": {},}'), "property name|trailing comma"),
    "no comma": (content(b'{"__metadata__": {} "a"'), "Expecting ',' delimiter"),
    "a name twice": (content(TWICE, b"1"), "the key 'a' occurs twice"),
    "a long name twice": (content(LONG_TWICE, b"1"), "the key 'n{98}… occurs twice"),
    "a field twice": (content(b'{"a":{"dtype":"U8","dtype":"I8"}}'), "key 'dtype' occurs twice"),
    "nested too deep": (content(b'{"a":{"x":' + b"[" * 100_000), "nested more than 64 levels"),
    "nested 65 levels deep": (alone(x=json.loads("[" * 63 + "]" * 63)), "is nested more than 64"),
    "too many lists": (alone(x=[[]] * 2000), "more than [0-9]+ lists and objects in [0-9]+ bytes"),
    "objects nested too deep": (content(b'{"a":{"x":' + b'{"x":' * 100_000), "nested more than 64"),
    "a huge number": (content(b'{"a":{"x":' + b"9" * 1_000_000), "a number that a float can hold"),
    "an infinite number": (content(b'{"a":{"x":1e999}}'), "a number that a float can hold"),
    "NaN": (content(b'{"a":{"x":NaN}}'), "expected a value, found NaN"),
    "metadata that is a number": (content({"__metadata__": 1}), "expected an object"),
    "metadata that is nothing": (content({"__metadata__": None}), "expected an object"),
    "metadata of numbers": (content({"__metadata__": {"a": 1}}), "expected a string, found 1"),
    "an entry that is a number": (content({"a": 1}), "'a': expected an object"),
    "an entry that is a list": (content({"a": ["U8", [1], [0, 1]]}, b"1"), "expected an object"),
    "no dtype": (content({"a": {"shape": [], "data_offsets": [0, 0]}}), "'a': it has no dtype"),
    "nothing in it": (content({"a": {}}), "no dtype and no shape and no data_offsets"),
    "a dtype of a number": (alone(dtype=1), "the name of a dtype"),
    "an unknown dtype": (alone(dtype="X9"), "'X9' is not known.*BF16"),
    "a packed dtype": (alone(dtype="F4", shape=[2]), "F4 packs elements of 4 bits"),
    "a shape of a number": (alone(shape=1), "a list of at most 32 integers"),
    "a shape of texts": (alone(shape=["1"]), "an integer from 0"),
    "a shape of truths": (alone(shape=[True]), "an integer from 0"),
    "a shape of fractions": (alone(shape=[1.0]), "an integer from 0"),
    "a negative length": (alone(shape=[-1]), "an integer from 0"),
    "a negative zero": (
        content(b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'),
        "an integer from 0",
    ),
    "a length of 2**64": (alone(shape=[2**64]), "an integer from 0"),
    "a length of many digits": (alone(shape=[10**99]), "an integer from 0"),
    "a list not ended": (content(b'{"a":{"shape":[1 2]}}'), "Expecting ',' delimiter"),
    "33 dimensions": (alone(shape=[1] * 33), "a list of at most 32 integers"),
    "a product that overflows": (
        alone(b"", dtype="F64", shape=[2**32, 2**32], data_offsets=[0, 0]),
        "larger than any array can be",
    ),
    "an empty array without strides": (
        alone(b"", shape=[HUGE, 0, HUGE], data_offsets=[0, 0]),
        "larger than any array can be",
    ),
    "one offset": (alone(data_offsets=[0]), "not a start and an end"),
    "three offsets": (alone(data_offsets=[0, 1, 2]), "a list of at most 2"),
    "offsets in reverse": (alone(data_offsets=[1, 0]), "not a start and an end"),
    "an offset beyond the file": (alone(shape=[2], data_offsets=[0, 2]), "has only 69 bytes"),
    "offsets of 2**64 - 1": (alone(b"", shape=[0], data_offsets=[HUGE] * 2), "it ends at byte"),
    "too few bytes": (
        alone(b"1234", dtype="F32", shape=[2], data_offsets=[0, 4]),
        r"\(2,\) of float32 needs 8",
    ),
    "too many bytes": (
        alone(bytes(8), dtype="F32", shape=[], data_offsets=[0, 8]),
        "needs 4 bytes, not 8",
    ),
    "an overlap": (content(OVERLAP, b"123"), "'b': its bytes overlap with those of 'a'"),
    "the same bytes twice": (content({"a": ONE, "b": ONE}, b"1"), "'b': its bytes overlap"),
    "a gap": (
        content({"a": ONE, "b": tensor("U8", [1], 2, 3)}, b"123"),
        "'b': 1 bytes before it belong to no tensor",
    ),
    "a gap at the front": (alone(b"12", data_offsets=[1, 2]), "1 bytes before it"),
    "bytes left over": (alone(b"123"), "its last 2 bytes belong to no tensor"),
    "bytes and no tensor": (content({}, b"1"), "its last 1 bytes belong to no tensor"),
}
STRICTER = {"a name twice", "metadata that is nothing", "an entry that is a list", "33 dimensions"}
STRICTER |= {"an empty array without strides", "nested 65 levels deep", "too many lists"}
STRICTER |= {"a packed dtype"}
"""What the reference library reads, of a name twice the last one, and we refuse on purpose."""


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_with_the_file(file: Path, name: str) -> None:
    raw, words = WRONG[name]
    file.write_bytes(raw)
    with pytest.raises(TransferError) as caught:
        read_header(file)
    message = str(caught.value)
    assert message.startswith(str(file))
    assert re.search(words, message, re.DOTALL), message
    assert name != "too few bytes" or caught.value.path == "a"
    assert len(message) < len(str(file)) * 2 + 500
    with nullcontext() if name in STRICTER else pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(raw)


def test_a_header_above_the_limit_is_not_read(file: Path) -> None:
    with file.open("wb") as stream:
        stream.write((100_000_001).to_bytes(8, "little"))
        stream.truncate(200_000_000)  # a hole: it takes no room on the disk
    with pytest.raises(TransferError, match="100000001 bytes long, and it can be 1 to 100000000"):
        read_header(file)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".PKL"])
def test_a_pickle_is_refused_by_its_name(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"pytorch_model{suffix}"
    path.write_bytes(content({}))
    with pytest.raises(
        TransferError, match=r"never read.*safetensors\.torch\.save_file\("
    ) as caught:
        read_model(path)
    assert "pytorch_model.safetensors" in str(caught.value)


# --- what a path can stand for ---------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A model of two files: three tensors in the index, and one beside it that it does not name."""
    (tmp_path / "1.safetensors").write_bytes(
        content({"b": ONE, "spare": tensor("U8", [1], 1, 2)}, b"1x")
    )
    (tmp_path / "2.safetensors").write_bytes(
        content({"a": ONE, "c": tensor("U8", [2], 1, 3)}, b"234")
    )
    write_index(tmp_path, {"c": "2.safetensors", "b": "1.safetensors", "a": "2.safetensors"})
    return tmp_path


def write_index(folder: Path, weight_map: Any) -> Path:
    index = {"metadata": {"total_size": 4, "more": [1, {}]}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    return folder / INDEX


def test_a_sharded_model_comes_in_the_order_of_its_index(sharded: Path) -> None:
    for path in (sharded, sharded / INDEX):
        model = read_model(path)
        assert list(model) == ["c", "b", "a"]
        assert model["a"].path == model["c"].path
        assert model["b"].path == sharded / "1.safetensors"
        assert model["c"].shape == (2,)
    (sharded / "blobs").mkdir()
    (sharded / "2.safetensors").rename(sharded / "blobs" / "0123abcd")
    (sharded / "2.safetensors").symlink_to(sharded / "blobs" / "0123abcd")
    (sharded / "model.safetensors").write_bytes(alone())  # an index goes before single files
    assert list(read_model(sharded)) == ["c", "b", "a"]
    (sharded / INDEX).rename(sharded / "unet.safetensors.index.json")
    assert list(read_model(sharded)) == ["c", "b", "a"]
    (sharded / "part").mkdir()
    (sharded / "1.safetensors").rename(sharded / "part" / "1.safetensors")
    write_index(sharded, {"b": "part/1.safetensors"})
    assert list(read_model(sharded / INDEX)) == ["b"]


def test_a_folder_with_one_file_stands_for_it(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(alone())
    (tmp_path / "._weights.safetensors").write_bytes(b"what a Mac leaves on foreign disks")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert list(read_model(tmp_path)) == ["a"]


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"{number}.safetensors").write_bytes(content({}))
    with pytest.raises(TransferError, match=r"7 candidate.*0\.safetensors.*4\.safetensors, …\)"):
        read_model(tmp_path)


def test_a_folder_with_nothing_to_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match=r"holds no \.safetensors file; .*or download it again"):
        read_model(tmp_path)
    (tmp_path / "x.gguf").touch()
    with pytest.raises(TransferError, match=r"\(x\.gguf\) .*; give anydevice\.llm\.load .* one"):
        read_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(TransferError, match=r"pytorch_model\.bin is a pickle"):
        read_model(tmp_path)


def test_missing_shards_are_named(sharded: Path) -> None:
    (sharded / "2.safetensors").unlink()
    (sharded / "2.safetensors").symlink_to(sharded / "gone")
    with pytest.raises(TransferError, match=r"1 of its 2 files are missing: 2\.safetensors"):
        read_model(sharded)

    write_index(sharded, {"a": "n" * 5000})
    with pytest.raises(TransferError, match="1 of its 1 files are missing"):
        read_model(sharded)


def test_a_shard_that_does_not_fit_is_named(sharded: Path) -> None:
    shard = sharded / "2.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(TransferError) as caught:
        read_model(sharded)
    assert str(caught.value).startswith(f"{shard}: the tensor 'c': it ends at byte")
    write_index(sharded, {"a": "1.safetensors"})
    with pytest.raises(TransferError, match=r"1\.safetensors holds the tensor 'a'") as caught:
        read_model(sharded)
    assert caught.value.path == "a"


OUTSIDE = ["../1.safetensors", "sub/../../1.safetensors", "/etc/1.safetensors", "", ".", "a\0b"]
OUTSIDE += ["C:1.safetensors", "sub\\1.safetensors", "\\\\server\\share\\1.safetensors"]
SAID_OF = dict.fromkeys(OUTSIDE, "only files in the index's own folder are read")
SAID_OF["pytorch_model.bin"] = "is a pickle"


@pytest.mark.parametrize("name", SAID_OF)
def test_files_outside_the_folder_and_pickles_are_refused(sharded: Path, name: str) -> None:
    (sharded / "pytorch_model.bin").write_bytes(b"")
    write_index(sharded, {"a": name})
    with pytest.raises(TransferError, match=SAID_OF[name]):
        read_model(sharded)


BAD_INDEX = {
    "not JSON": (b"<html>", "not a valid index: Expecting value"),
    "no map": (b'{"metadata": {}}', "no weight_map"),
    "a map of numbers": (b'{"weight_map": {"a": 1}}', "expected a string, found 1"),
    "a list": (b'{"weight_map": ["a"]}', "expected an object"),
    "a tensor twice": (b'{"weight_map": {"a": "x", "a": "y"}}', "'a' occurs twice"),
    "cut off": (b'{"weight_map": {"a": "x"', "Expecting ',' delimiter"),
    "deep": (b'{"metadata": ' + b"[" * 100_000, "nested more than 64"),
    "empty": (b"", "Expecting value"),
}


@pytest.mark.parametrize("name", BAD_INDEX)
def test_a_wrong_index_is_said(tmp_path: Path, name: str) -> None:
    (tmp_path / INDEX).write_bytes(BAD_INDEX[name][0])
    with pytest.raises(TransferError) as caught:
        read_model(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / INDEX))
    assert BAD_INDEX[name][1] in str(caught.value)


def test_an_index_above_the_limit_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / INDEX).open("wb") as stream:
        stream.truncate(LONGEST_HEADER + 1)
    with pytest.raises(TransferError, match="an index has at most 100000000"):
        read_model(tmp_path)


# --- files as the system gives them ----------------------------------------------------------


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match=f"there is no file {tmp_path / 'x'}"):
        read_model(tmp_path / "x")
    with pytest.raises(TransferError, match="cannot be read: its name holds a null"):
        read_model(tmp_path / "a\0b")
    with pytest.raises(TransferError, match="cannot be read: File name too long"):
        read_model(tmp_path / ("n" * 5000))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_and_a_device_are_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    for path in (tmp_path, Path(os.devnull)):
        with pytest.raises(TransferError, match="is not an ordinary file"):
            read_model(path)


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The administrator, as whom tests often run, may list every folder: nothing real refuses him.
    def refuse(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(TransferError, match=f"{tmp_path} cannot be read: Permission denied"):
        read_model(tmp_path)
