"""Safetensors files that are damaged in thousands of ways, hostile, or too large for the host.

Each mutated file is either refused with a `TransferError` that names it, or read; what is read is
what the reference library reads. In both cases memory stays within a small multiple of the file.
"""

from __future__ import annotations

import json
import math
import random
import string
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from anydevice._core.device import Device
from anydevice._core.dtypes import BY_CODE
from anydevice._formats.load import load_weights
from anydevice._formats.safetensors import read_header
from anydevice.errors import OutOfMemoryError, TransferError
from tests.comparing import assert_same_bits
from tests.faults.damage import (
    by_length,
    by_offset,
    by_value,
    content,
    cut_off,
    drawn_out,
    header_at_random,
    mostly_header,
)

CPU = Device("cpu", engine="numpy")
soak = pytest.mark.soak
SMALL = 128 * 1024
"""Bytes for the objects of a small header, the file's path, the error and its trace."""


@pytest.fixture(autouse=True)
def everything_is_imported(tmp_path: Path) -> None:
    """What is loaded on first use would else count as memory of the first file that is read."""
    for row in BY_CODE.values():
        row.numpy()
    path = tmp_path / "first.safetensors"
    path.write_bytes(content({}, b""))
    load_weights(path, CPU)


def sound(dice: random.Random) -> tuple[dict[str, Any], bytes]:
    """A sound model of a few tensors, of any types and shapes."""
    header: dict[str, Any] = {}
    at = 0
    if dice.random() < 0.5:
        header["__metadata__"] = {"format": "pt", "ü\n": '"\\'}
    for number in range(dice.randint(0, 5)):
        code = dice.choice([code for code, row in BY_CODE.items() if not row.packed])
        shape = [dice.choice([0, 1, 2, 3, 5]) for _ in range(dice.randint(0, 3))]
        size = BY_CODE[code].itemsize * math.prod(shape)
        entry = {"dtype": code, "shape": shape, "data_offsets": [at, at + size]}
        header[f"layers.{number}.weight"] = entry
        at += size
    return header, bytes(dice.choice([0, 1]) for _ in range(at))


# --- ways to damage a file -------------------------------------------------------------------


def unharmed(dice: random.Random, raw: bytes) -> bytes:
    return raw


WAYS: list[Callable[[random.Random, bytes], bytes]] = [
    *(mostly_header, header_at_random, header_at_random, by_value, by_value, by_value),
    *(by_offset, by_length, cut_off, drawn_out, unharmed),
]


# --- the bar ---------------------------------------------------------------------------------


def attempt(path: Path) -> tuple[dict[str, Any] | None, str]:
    """What was read, or how it was refused."""
    try:
        return load_weights(path, CPU), ""
    except TransferError as error:
        return None, str(error)


def read_both(path: Path, raw: bytes) -> bool:
    """Whether we read the file; that we read it rightly, or refuse it well, is asserted."""
    path.write_bytes(raw)
    tracemalloc.start()
    found, refusal = attempt(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= len(raw) + SMALL, f"{peak} bytes were allocated for a file of {len(raw)}"
    if found is None:
        assert refusal.startswith(str(path))
        assert len(refusal) < 1000
        return False
    theirs = dict(safetensors.deserialize(raw))
    assert found.keys() == theirs.keys()
    for name, array in found.items():
        assert array.shape == tuple(theirs[name]["shape"])
        dtype = BY_CODE[theirs[name]["dtype"]].numpy()
        expected = np.frombuffer(theirs[name]["data"], dtype).reshape(array.shape)
        assert_same_bits(array, expected, because="loading only copies")
    return True


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 550), *(pytest.param(seed, 1_000, marks=soak) for seed in range(2, 12))]
)
def test_mutated_files_are_refused_or_read_rightly(tmp_path: Path, seed: int, count: int) -> None:
    dice = random.Random(seed)
    outcomes = []
    for number in range(count):
        raw = content(*sound(dice))
        way = WAYS[number % len(WAYS)]
        damaged = way(dice, raw)
        try:
            outcomes.append(read_both(tmp_path / "model.safetensors", damaged))
        except BaseException:
            sys.stderr.write(f"mutation {number}, {way.__name__}: {damaged!r}\n")
            raise
    # A fuzzer that is always refused, or never, would find nothing.
    assert 0.1 < sum(outcomes) / count < 0.6


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}
    raw = content(header, bytes(12))
    for length in range(len(raw)):
        assert not read_both(tmp_path / "model.safetensors", raw[:length]), length
    assert read_both(tmp_path / "model.safetensors", raw)


def test_mutated_indexes_are_refused_or_read_rightly(tmp_path: Path) -> None:
    tensors = {"a": "1.safetensors", "b": "2.safetensors"}
    entry = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    for name, file in tensors.items():
        (tmp_path / file).write_bytes(content({name: entry}, b"1"))
    index = tmp_path / "model.safetensors.index.json"
    sound_index = json.dumps({"metadata": {"total_size": 2}, "weight_map": tensors}).encode()
    dice, outcomes = random.Random(3), []
    for _ in range(500):
        damaged = header_at_random(dice, content(sound_index, b""))[8:]
        index.write_bytes(damaged)
        found, refusal = attempt(tmp_path)
        if found is None:
            assert refusal.startswith(str(tmp_path)), (refusal, damaged)
        else:
            named = json.loads(damaged)["weight_map"]
            assert {name: tensors[name] for name in found} == named
        outcomes.append(found is not None)
    assert 0.02 < sum(outcomes) / len(outcomes) < 0.6


# --- hostile on purpose ----------------------------------------------------------------------

LARGE = 16 * 2**20
UNPARSED = {
    "lists in a shape": (b'{"a":{"shape":[', b"[],"),
    "lists in a field of its own": (b'{"a":{"x":[', b"[],"),
    "objects in a list": (b'{"a":{"x":[', b'{"":0},'),
    "lists after a bracket in a text": (b'{"[]\\"[":{"x":[', b"[],"),
    "brackets alone": (b"", b"["),
    "short keys": (b'{"__metadata__":{', b'"ab":"",'),
}
PARSED = {
    "numbers in a shape": (b'{"a":{"shape":[', b"65536,"),
    "short texts": (b'{"a":{"x":[', b'"ab",'),
    "as many lists as may be": (b'{"a":{"x":[', b"[],             "),
    "short texts and an escape": (b'{"a":{"x":["\\u00fc",', b'"ab",'),
    "one wide character": ('{"a":{"x":"🙂"},'.encode(), b" "),
    "an endless number": (b'{"a":{"shape":[', b"9"),
    "an endless name": (b'{"', b"n"),
    "backslashes": (b'{"', b"\\\\"),
    "quotes": (b"{", b'"'),
}


def peak_of_refusal(path: Path, start: bytes, repeated: bytes, size: int) -> float:
    """The most memory that was allocated, in sizes of the file."""
    raw = content(start + repeated * (size // len(repeated)), b"")
    path.write_bytes(raw)
    tracemalloc.start()
    with pytest.raises(TransferError):
        load_weights(path, CPU)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return (peak - SMALL) / len(raw)


@pytest.mark.parametrize("name", UNPARSED)
def test_a_header_of_brackets_takes_no_more_memory_than_its_file(tmp_path: Path, name: str) -> None:
    size = LARGE if name == "lists in a field of its own" else LARGE // 16
    assert peak_of_refusal(tmp_path / "model.safetensors", *UNPARSED[name], size) <= 1


@pytest.mark.parametrize("name", PARSED)
def test_a_hostile_header_takes_a_bounded_multiple_of_its_file(tmp_path: Path, name: str) -> None:
    # A valid header takes about 8 times its size.
    assert peak_of_refusal(tmp_path / "model.safetensors", *PARSED[name], LARGE // 16) <= 15


def metadata_of(count: int, value: str) -> bytes:
    """A valid header of metadata alone, with keys of four characters."""
    letters = string.ascii_letters + string.digits
    keys = map("".join, islice(product(letters, repeat=4), count))
    return json.dumps({"__metadata__": dict.fromkeys(keys, value)}, separators=(",", ":")).encode()


@pytest.mark.parametrize("count", [50_000, 88_000, 200_000])
def test_metadata_of_short_keys_takes_bounded_memory(tmp_path: Path, count: int) -> None:
    """Its dict takes most just after it has grown, which is at 87,382 keys and at 174,763."""
    path = tmp_path / "model.safetensors"
    header = metadata_of(count, "v" * 6)
    path.write_bytes(content(header))
    tracemalloc.start()
    metadata = read_header(path).metadata
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (peak - SMALL) / len(header) <= 15
    with safetensors.safe_open(path, framework="np") as reference:
        assert metadata == reference.metadata()


@pytest.mark.parametrize("count", [1000, 20_000])
def test_a_header_of_very_many_tensors_with_short_names_is_read(tmp_path: Path, count: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({f"{n:x}": np.ones(1, np.uint8) for n in range(count)}, path)
    assert len(read_header(path).entries) == count


def tensors_of_one_byte(count: int) -> bytes:
    entries = (
        f'"{at}":{{"dtype":"U8","shape":[1],"data_offsets":[{at},{at + 1}]}}' for at in range(count)
    )
    return f"{{{','.join(entries)}}}".encode()


LONGEST = {
    "lists": lambda: b'{"a":{"x":[' + b"[]," * 33_000_000,
    "a million tensors": lambda: tensors_of_one_byte(1_000_000),
    "texts": lambda: b'{"a":{"x":[' + b'"ab",' * 19_800_000,
    "numbers": lambda: b'{"a":{"shape":[' + b"65536," * 16_500_000,
    "a wide character": lambda: '{"a":{"x":"🙂"},'.encode() + b" " * 99_000_000,
    "quotes": lambda: b"{" + b'"' * 99_000_000,
    "backslashes": lambda: b'{"' + b"\\\\" * 49_500_000,
    "brackets": lambda: b"[" * 99_000_000,
    "metadata": lambda: b'{"__metadata__":{"a":"' + b"x" * 99_000_000 + b'"}}',
    "tensors": lambda: tensors_of_one_byte(130_000),
}
"""Headers up to the format's own limit; the last two are valid, and are read."""

READ_WITHIN_LIMITS = """
import resource, sys, time
from pathlib import Path
from anydevice.errors import TransferError
from anydevice._formats.safetensors import read_header
began = time.process_time()  # others may keep the machine busy
try:
    read_header(Path(sys.argv[1]))
    print("read")
except TransferError:
    print("refused")
print(time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted as on Linux")
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("lists", "a million tensors") else pytest.param(name, marks=soak)
        for name in LONGEST
    ],
)
def test_the_longest_headers_take_a_moment_and_little_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.safetensors"
    header = LONGEST[name]()
    path.write_bytes(content(header, bytes(130_000 if name == "tensors" else 0)))
    del header
    # Through a shell: a child begins with the peak of its parent.
    command = ("/bin/sh", "-c", '"$0" -c "$1" "$2"', sys.executable, READ_WITHIN_LIMITS, str(path))
    outcome, seconds, mebibytes = subprocess.check_output(command, text=True).split()
    assert outcome == ("read" if name in ("metadata", "tensors") else "refused")
    assert float(seconds) < 5
    assert float(mebibytes) < 256


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is set as on Linux")
def test_a_model_too_large_for_the_host_is_out_of_memory(tmp_path: Path) -> None:
    import resource

    size = 16 * 2**30
    header = {"large": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    path = tmp_path / "model.safetensors"
    path.write_bytes(content(header, b""))
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size + size)  # a hole: it takes no room on the disk
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + size // 2, before[1]))
    try:
        with pytest.raises(
            OutOfMemoryError, match=r"the tensor 'large': cpu is .*: 16\.0 GiB were asked for"
        ) as caught:
            load_weights(path, CPU)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert caught.value.asked == size
