"""Weights from files onto devices: values, order, types, memory, progress, and refusals."""

from __future__ import annotations

import io
import json
import os
import sys
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from anydevice._arrays.move import to_numpy
from anydevice._core import files
from anydevice._core.device import Device
from anydevice._core.dtypes import BY_CODE
from anydevice._core.finding import DeviceStatus, Facts
from anydevice._core.locks import side_by_side
from anydevice._core.progress import ProgressBar
from anydevice._formats import load as loading
from anydevice._formats.load import load_weights
from anydevice._machine.engines import registry
from anydevice.errors import (
    ConfigurationError,
    DeviceNotFoundError,
    OutOfMemoryError,
    TransferError,
    UnsupportedError,
)
from tests.comparing import assert_same_bits
from tests.faults.damage import content

CPU = Device("cpu", engine="numpy")


def write(path: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> Path:
    """A file of our own making: the reference library's writer has no float8 from NumPy."""
    codes = {row.name: code for code, row in BY_CODE.items()}
    header: dict[str, Any] = {}
    at = 0
    for name, array in arrays.items():
        offsets = [at, at + array.nbytes]
        code = codes[array.dtype.name]
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": offsets}
        at += array.nbytes
    path.write_bytes(content(header, b"".join(array.tobytes() for array in arrays.values())))
    return path


def write_index(folder: Path, files: dict[str, str]) -> Path:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    return index


def same(a: Any, b: Any) -> bool:
    assert_same_bits(a, b, because="it is only read, and converted by NumPy")
    return True


def samples() -> dict[str, np.ndarray[Any, Any]]:
    """One tensor of every type that can be read, with bytes of every value where they may be."""
    random = np.random.default_rng(7)
    found = {}
    for code, row in BY_CODE.items():
        if not row.packed:
            raw = random.integers(0, 2 if code == "BOOL" else 256, 24 * row.itemsize, np.uint8)
            found[f"tensor of {code}"] = raw.view(row.numpy()).reshape(2, 3, 4)
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


# --- values ----------------------------------------------------------------------------------


def test_every_type_is_read_bit_for_bit(file: Path) -> None:
    arrays = samples()
    found = load_weights(write(file, arrays), CPU)
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert same(found[name], array), name
        assert found[name].flags.owndata
        assert found[name].flags.writeable
        assert found[name].flags.aligned


def test_the_reference_library_s_file_is_read(file: Path) -> None:
    arrays = {
        "scalar": np.array(3.5, np.float32),
        "empty": np.ones((0, 4), np.float16),
        "many": np.arange(3_000_000, dtype=np.int32),
    }
    safetensors.numpy.save_file(arrays, file)
    found = load_weights(str(file), "cpu")
    assert set(found) == set(arrays)
    assert all(same(found[name], arrays[name]) for name in arrays)


@pytest.mark.parametrize("engine", ["numpy", "torch", "jax", "mlx"])
def test_the_arrays_are_those_of_the_device_s_engine(file: Path, engine: str) -> None:
    arrays = {
        "f32": np.arange(6, dtype=np.float32).reshape(2, 3),
        "f16": np.ones((), np.float16),
        "bf16": np.arange(5).astype(ml_dtypes.bfloat16),
        "bool": np.array([True, False]),
        "i32": np.zeros((2, 0), np.int32),
    }
    found = load_weights(write(file, arrays), Device("cpu", engine=engine))
    assert all(registry.load(engine).owns(array) for array in found.values())
    back = to_numpy(found)
    assert list(back) == list(arrays)
    assert all(same(back[name], arrays[name]) for name in arrays)


def test_tensors_come_in_the_header_s_order_however_they_lie(file: Path) -> None:
    one = {"dtype": "U8", "shape": [1]}
    header = {"late": {**one, "data_offsets": [1, 2]}, "early": {**one, "data_offsets": [0, 1]}}
    file.write_bytes(content(header, b"\x01\x02"))
    found = load_weights(file, CPU)
    assert [(name, int(array[0])) for name, array in found.items()] == [("late", 2), ("early", 1)]


def test_a_sharded_model_comes_in_its_index_s_order(tmp_path: Path) -> None:
    write(tmp_path / "1.safetensors", {"a": np.float32([1]), "d": np.float32([4])})
    write(tmp_path / "2.safetensors", {"b": np.float32([2]), "c": np.float32([3])})
    files = {"d": 1, "c": 2, "b": 2, "a": 1}
    write_index(tmp_path, {name: f"{number}.safetensors" for name, number in files.items()})
    found = {name: float(array[0]) for name, array in load_weights(tmp_path, CPU).items()}
    assert list(found.items()) == [("d", 4), ("c", 3), ("b", 2), ("a", 1)]


def test_a_path_may_start_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    write(tmp_path / "model.safetensors", {"a": np.float32([1])})
    assert list(load_weights("~/model.safetensors", CPU)) == ["a"]


# --- dtype= ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", ["float16", "bfloat16", "float32", np.float64, np.dtype("<f4")])
def test_only_floating_point_numbers_are_converted(file: Path, wanted: Any) -> None:
    arrays = {
        "f64": np.float64([[1.1, -2.5]]),
        "f32": np.float32([0.1, np.inf, -np.inf, np.nan]),
        "bf16": np.arange(4).astype(ml_dtypes.bfloat16),
        "f8": np.float32([0.5, 2]).astype(ml_dtypes.float8_e4m3fn),
        "i64": np.int64([2**40]),
        "bool": np.array([True]),
        "c64": np.complex64([1j]),
    }
    found = load_weights(write(file, arrays), CPU, wanted)
    real = np.dtype(ml_dtypes.bfloat16 if wanted == "bfloat16" else wanted)
    for name in ("f64", "f32", "bf16", "f8"):
        assert same(found[name], arrays[name].astype(real)), name
    for name in ("i64", "bool", "c64"):
        assert same(found[name], arrays[name]), name


def test_conversion_goes_chunk_by_chunk(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "CHUNK", 64)
    array = np.random.default_rng(0).normal(size=(7, 31)).astype(np.float32)
    found = load_weights(write(file, {"a": array}), CPU, "bfloat16")
    assert same(found["a"], array.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    ("number", "wanted"), [(70000.0, "float16"), (1e30, "float8_e4m3fn"), (-1.0, "float8_e8m0fnu")]
)
def test_a_number_that_does_not_fit_is_an_error(file: Path, number: float, wanted: str) -> None:
    write(file, {"fine": np.float32([1]), "large": np.float32([1, number])})
    with pytest.raises(TransferError, match=f"'large': it holds numbers that {wanted} cannot"):
        load_weights(file, CPU, wanted)


@pytest.mark.parametrize("wanted", ["int8", "bool", "complex64", "float4_e2m1fn"])
def test_a_type_that_weights_cannot_become_is_refused(file: Path, wanted: str) -> None:
    with pytest.raises(ConfigurationError, match=f"cannot be loaded as {wanted}"):
        load_weights(file, CPU, wanted)


def test_an_unknown_type_is_refused_with_the_known_ones(file: Path) -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'bfloat16'"):
        load_weights(file, CPU, "bf16")


# --- refusals --------------------------------------------------------------------------------


def test_a_tensor_that_the_engine_cannot_hold_is_named(file: Path) -> None:
    write(file, {"fine": np.float32([1]), "layer.scale": np.float64([1])})
    with pytest.raises(UnsupportedError, match=r"'layer\.scale': JAX.* float64") as caught:
        load_weights(file, Device("cpu", engine="jax"))
    assert str(file) in str(caught.value)
    assert load_weights(file, Device("cpu", engine="jax"), "float32")["layer.scale"].shape == (1,)


@pytest.mark.parametrize(
    ("error", "ours"),
    [(MemoryError(), OutOfMemoryError), (ValueError("no"), TransferError)],
    ids=["no room", "another error"],
)
def test_an_error_keeps_none_of_what_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, ours: type[Exception]
) -> None:
    placed: list[weakref.ref[Any]] = []

    def place(x: Any, device: Device) -> Any:
        if len(placed) == 3:
            raise error
        array = np.array(x)
        placed.append(weakref.ref(array))
        return array

    engine = SimpleNamespace(name="three", place=place, memory=registry.load("numpy").memory)
    monkeypatch.setattr(loading.registry, "load", lambda name: engine)
    for file in ("1", "2"):  # the fourth tensor is in the second file
        arrays = {f"{file}.{n}": np.ones(8, np.float32) for n in range(2)}
        write(tmp_path / f"{file}.safetensors", arrays)
    write_index(tmp_path, {name: f"{name[0]}.safetensors" for name in ("1.0", "1.1", "2.0", "2.1")})
    with pytest.raises(ours, match=r"the tensor '2\.1'") as kept:
        load_weights(tmp_path, CPU)
    assert kept.value.__traceback__ is not None
    assert [array() for array in placed] == [None] * 3


def test_bytes_that_are_no_booleans_are_refused(file: Path) -> None:
    raw = bytearray(write(file, {"mask": np.array([True, False])}).read_bytes())
    raw[-1] = 7
    file.write_bytes(raw)
    with pytest.raises(TransferError, match="'mask': it is BOOL, and holds bytes that are neither"):
        load_weights(file, CPU)


def test_a_device_that_cannot_be_used_is_refused(file: Path) -> None:
    with pytest.raises(DeviceNotFoundError):
        load_weights(write(file, {}), "cuda:99")
    bare = Device.seen("cuda", 0, DeviceStatus("gpu", Facts(name="a card")))
    with pytest.raises(DeviceNotFoundError, match="no installed library drives cuda:0"):
        load_weights(file, bare)


def test_a_big_endian_machine_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(UnsupportedError, match="little-endian"):
        load_weights(write(file, {}), CPU)


def meddle(monkeypatch: pytest.MonkeyPatch, at_read: int, action: Callable[[], object]) -> None:
    """Have `action` happen to the file just before the system reads from it for the n-th time.

    The first two reads of a file are its header's length and its header.
    """
    real, reads = files._read_at, iter(range(1, 100))

    def read(file: int, buffers: list[memoryview], position: int) -> int:
        if next(reads) == at_read:
            action()
        return real(file, buffers, position)

    monkeypatch.setattr(files, "_read_at", read)


@pytest.mark.parametrize(
    ("at_read", "size", "words"),
    [
        (4, 5000, r"became shorter .* now ends at byte 5000"),
        (3, 100_000, "was changed while it was"),
    ],
)
def test_a_file_whose_size_changes_while_it_is_read_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch, at_read: int, size: int, words: str
) -> None:
    monkeypatch.setattr(loading, "CHUNK", 4096)
    write(file, {"a": np.zeros(2048, np.float32), "b": np.zeros(2048, np.float32)})
    meddle(monkeypatch, at_read, lambda: os.truncate(file, size))
    with pytest.raises(TransferError, match=words):
        load_weights(file, CPU)


@pytest.mark.skipif(os.name != "posix", reason="an opened file can be replaced")
@pytest.mark.parametrize("sharded", [False, True])
def test_a_replaced_file(file: Path, monkeypatch: pytest.MonkeyPatch, sharded: bool) -> None:
    """A file is read to its end; a shard is opened again after its header, and is refused."""
    write(file, {"a": np.zeros(4, np.float32)})
    other = write(file.with_name("other"), {"a": np.ones(4, np.float32)})
    index = write_index(file.parent, {"a": file.name})
    meddle(monkeypatch, 3, lambda: other.replace(file))  # the first read may be that of the index
    if not sharded:
        assert load_weights(file, CPU)["a"].max() == 0
        return
    with pytest.raises(TransferError, match="was changed while it was being read"):
        load_weights(index, CPU)


def test_nothing_is_allocated_before_every_file_was_checked(tmp_path: Path) -> None:
    write(tmp_path / "1.safetensors", {"a": np.zeros(4_000_000, np.float32)})
    (tmp_path / "2.safetensors").write_bytes(b"damaged")
    write_index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    with traced() as peak, pytest.raises(TransferError, match="has 7 bytes"):
        load_weights(tmp_path, CPU)
    assert peak() < 500_000


# --- memory ----------------------------------------------------------------------------------


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """A block, and how many bytes Python and NumPy held at most within it."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


MEGABYTE = 2**20


@pytest.mark.parametrize(
    ("engine", "dtype", "allowed"),
    [
        ("numpy", None, 33 * MEGABYTE),
        ("numpy", "float16", (16 + 8 + 8) * MEGABYTE),  # and one chunk, and what overflow looks at
        ("torch", None, (32 + 2 * 4 + 1) * MEGABYTE),  # and one tensor that is on its way
    ],
)
def test_one_tensor_is_held_twice(file: Path, engine: str, dtype: str | None, allowed: int) -> None:
    write(file, {f"layer {i}": np.ones(MEGABYTE, np.float32) for i in range(8)})
    device = Device("cpu", engine=engine)
    load_weights(file, device, dtype)
    with traced() as peak:
        found = load_weights(file, device, dtype)
        assert peak() < allowed
    assert len(found) == 8


# --- progress --------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """To be called by the test itself: before a test, pytest puts its own stream back."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    return stream


@pytest.fixture
def small(file: Path) -> Path:
    return write(file, {"a": np.zeros(1000, np.float32)})


@pytest.mark.parametrize(
    ("limits", "progress", "shown"),
    [
        ({}, None, False),
        ({"LARGE": 100}, None, True),
        ({"SLOW": 0.0}, None, True),
        ({}, True, True),
        ({"LARGE": 0}, False, False),
    ],
)
def test_a_large_or_slow_load_shows_a_bar_or_as_asked(
    small: Path, monkeypatch: pytest.MonkeyPatch, limits: Any, progress: Any, shown: bool
) -> None:
    terminal = on_a_terminal(monkeypatch)
    for name, value in limits.items():
        monkeypatch.setattr(loading, name, value)
    load_weights(small, CPU, progress=progress)
    printed = terminal.getvalue()
    assert ("loading weights" in printed and "3.9/3.9 KiB" in printed) if shown else not printed


def test_no_byte_of_many_threads_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(monkeypatch)
    told: list[int] = []

    def tell(bar: object, done: int, *_: object) -> None:
        time.sleep(1e-4 * (done % 3))  # other threads go on while a sum is shown
        told.append(done)

    monkeypatch.setattr(ProgressBar, "tell", tell)
    with loading.progress_in_bytes(lambda: 320, True, "loading") as advance:
        side_by_side(*[lambda: [*map(advance, [1] * 20)]] * 16)
    assert told == list(range(321))


def test_the_bar_ends_with_an_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    write(file, {"a": np.float32([1e9])})
    with pytest.raises(TransferError):
        load_weights(file, CPU, "float16", progress=True)
    assert terminal.getvalue().endswith("\x1b[?25h\r\x1b[1A\x1b[2K\x1b[?25h")


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_no_terminal(small: Path, monkeypatch: pytest.MonkeyPatch, stream: Any) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(load_weights(small, CPU, progress=True)) == ["a"]
    assert stream is None or stream.getvalue() == ""
