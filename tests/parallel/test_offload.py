"""Parts in host memory and on disk, brought to a device one ahead."""

from __future__ import annotations

import ctypes
import gc
import time
from mmap import PAGESIZE
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import anydevice
from anydevice._core.device import Device
from anydevice._core.dtypes import as_dtype
from anydevice._core.engine import Engine
from anydevice._engines.cuda_driver import CudaDriver
from anydevice._machine.engines import registry
from anydevice._parallel import offload
from anydevice._parallel.offload import Fetcher, kept_in_memory, read_parts, write_parts
from anydevice.errors import AnyDeviceError, ConfigurationError, TransferError
from tests.comparing import assert_same_bits


def _parts(count: int, size: int = 1000) -> list[list[Any]]:
    drawn = np.random.default_rng(0)
    shapes = ((size, 3), (7,))
    return [[drawn.normal(size=s).astype("float32") for s in shapes] for _ in range(count)]


def _torch() -> tuple[Device, Engine]:
    pytest.importorskip("torch")
    return anydevice.device("cpu", engine="torch"), registry.load("torch")


def _stored(path: Path, parts: list[list[Any]]) -> list[list[offload.KeptArray]]:
    write_parts(path, {f"{n}.{m}": x for n, part in enumerate(parts) for m, x in enumerate(part)})
    kept = read_parts(path)
    return [[kept[f"{n}.{m}"] for m in range(len(part))] for n, part in enumerate(parts)]


def _compute(fetcher: Fetcher, number: int, expected: list[Any]) -> None:
    arrays = fetcher.acquire(number)
    for x, y in zip(arrays, expected, strict=True):
        assert_same_bits(x, y, because="it was copied alone")
    fetcher.release(number, arrays[0])


@pytest.mark.parametrize("engine", ["torch", "jax", "numpy"])
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_parts_come_in_any_order_and_again(engine: str, place: str, tmp_path: Path) -> None:
    pytest.importorskip(engine)
    own = registry.load(engine)
    parts = _parts(5)
    if place == "disk":
        kept = _stored(tmp_path / "parts.safetensors", parts)
    else:
        device = anydevice.device("cpu", engine=engine)
        kept = [[kept_in_memory(own.place(x, device), own) for x in part] for part in parts]
    fetcher = Fetcher(kept, anydevice.device("cpu", engine=engine), own)
    for number in (*range(5), *range(5), 3, 4, 0, 2, 2, 1):
        _compute(fetcher, number, parts[number])
    fetcher.close()


class _Watched(offload.KeptArray):
    """An array that notes when it is read, and takes a while."""

    log: Any = None
    name: str = ""

    def read(self, target: int, first: int, size: int) -> None:
        self.log.append(f"bring {self.name}")
        time.sleep(0.05)
        super().read(target, first, size)
        self.log.append(f"brought {self.name}")


def test_the_next_part_is_brought_while_a_part_computes() -> None:
    device, engine = _torch()
    log: list[str] = []
    arrays = [np.full(10, n, "float32") for n in range(4)]
    kept = [
        [_Watched(x.shape, as_dtype("float32"), x.ctypes.data, log=log, name=str(n))]
        for n, x in enumerate(arrays)
    ]
    fetcher = Fetcher(kept, device, engine)
    for number in range(4):
        (x,) = fetcher.acquire(number)
        log.append(f"compute {number}")
        latest = time.monotonic() + 60
        while number < 3 and f"bring {number + 1}" not in log:  # the next one comes meanwhile
            assert time.monotonic() < latest, log
            time.sleep(0.001)
        time.sleep(0.05)
        assert x.tolist() == [number] * 10, "the memory of a part that computes is its own"
        log.append(f"computed {number}")
        fetcher.release(number, x)
    fetcher.close()
    for number in range(2):  # two parts are there at once, and no third
        assert log.index(f"bring {number + 2}") > log.index(f"computed {number}"), log


class _Card:
    """A driver and `torch.cuda` whose card is host memory, where copies take until they must.

    A copy reads its memory when somebody waits for it, or when everything has had its time.
    """

    def __init__(self, can_pin: bool = True, pinned_before: bool = False) -> None:
        self.can_pin, self.pinned_before = can_pin, pinned_before
        self.fails_at = 0
        self.copies: list[tuple[int, int, int]] = []
        self.registered: dict[int, int] = {}
        self.buffers: dict[int, Any] = {}
        self.pages: set[int] = set()
        self.log: list[str] = []

    # The driver

    def enter(self) -> None: ...

    def pin(self, address: int, size: int) -> bool:
        self.log.append("pin")
        pages = range(address // PAGESIZE, (address + size - 1) // PAGESIZE + 1)
        if not self.can_pin or not self.pages.isdisjoint(pages):
            return False
        self.pages.update(pages)
        self.registered[address] = size
        return True

    def is_pinned(self, address: int, size: int) -> bool:
        return self.pinned_before

    def unpin(self, address: int) -> None:
        del self.registered[address]

    def pinned(self, size: int) -> int:
        buffer = ctypes.create_string_buffer(size)
        self.buffers[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def give_back(self, address: int) -> None:
        del self.buffers[address]

    def copy_in(self, target: int, source: int, size: int, stream: Any) -> None:
        assert stream.value == 8, "copies are on the side stream"
        sizes = {at: len(buffer) for at, buffer in self.buffers.items()} | self.registered
        is_pinned = any(at <= source and source + size <= at + sizes[at] for at in sizes)
        assert is_pinned or self.pinned_before, "others wait for all copies before them"
        self.log.append("copy")
        if self.log.count("copy") == self.fails_at:
            raise AnyDeviceError("the bus is gone")
        self.copies.append((target, source, size))

    # torch.cuda

    def current_stream(self, place: Any) -> Any:
        return SimpleNamespace(cuda_stream=7)

    def Stream(self, place: Any) -> Any:  # noqa: N802
        return SimpleNamespace(cuda_stream=8, synchronize=self.pass_time)

    def Event(self) -> Any:  # noqa: N802
        card = self

        class Event:
            behind = 0

            def record(self, stream: Any) -> None:
                self.behind = stream.cuda_stream

            def synchronize(self) -> None:
                card.log.append(f"wait {self.behind}")
                if self.behind == 8:
                    card.pass_time()

        return Event()

    def pass_time(self) -> None:
        while self.copies:
            ctypes.memmove(*self.copies.pop(0))


class _Ring:
    def __init__(self) -> None:
        self.begun = 0

    def events(self) -> list[Any]:
        return []

    def begin(self, pieces: Any, fill: Any, marks: Any) -> None:
        self.begun += 1
        for piece in pieces:
            ctypes.memmove(piece.device, piece.host, piece.size)

    def wait(self, marks: Any) -> None: ...


class _CardEngine:
    """PyTorch's engine, for which the CPU is a card."""

    def __init__(self) -> None:
        self._engine = registry.load("torch")

    def native(self, device: Any) -> Any:
        return SimpleNamespace(type="cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _on_card(
    monkeypatch: pytest.MonkeyPatch, card: _Card, parts: list[list[Any]], ring: _Ring | None
) -> Fetcher:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(offload, "driver_of", lambda index: card)
    monkeypatch.setattr(offload, "ring_of", lambda device: ring)
    for name in ("current_stream", "Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, getattr(card, name))
    kept = [[kept_in_memory(x, registry.load("numpy")) for x in part] for part in parts]
    return Fetcher(kept, anydevice.device("cpu", engine="torch"), cast(Engine, _CardEngine()))


@pytest.mark.parametrize("how", ["pins", "pinned before", "refused"])
def test_a_card_reads_pinned_memory_by_itself(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    card, ring = _Card(how == "pins", how == "pinned before"), _Ring()
    parts = _parts(4, size=100_000)
    fetcher = _on_card(monkeypatch, card, parts, ring)
    for number in (0, 1, 2, 3, 0, 1, 2, 3):
        _compute(fetcher, number, parts[number])
    if how == "refused":
        assert ring.begun >= 8
        assert 1 <= card.log.count("pin") <= 4, "each is tried once"
    else:
        assert ring.begun == 0
        assert card.log.index("wait 7") < card.log.index("copy"), "its memory is free only then"
    if how == "pins":
        assert len(card.registered) == card.log.count("pin") <= 4, "the small ones not at all"
    else:
        assert not card.registered
    fetcher.close()
    del fetcher
    gc.collect()
    assert not card.registered
    assert not card.buffers


def test_tensors_that_share_a_page_are_pinned_together(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 2**18 + 10  # floats, so that none begins or ends with a page
    memory = np.random.default_rng(0).normal(size=4 * size + 1024).astype("float32")
    first = -memory.ctypes.data % 4096 // memory.itemsize
    image = memory[first : first + 4 * size].reshape(4, size)
    card, ring = _Card(), _Ring()
    fetcher = _on_card(monkeypatch, card, [[row] for row in image], ring)
    for number in (0, 1, 2, 3, 0):
        _compute(fetcher, number, [image[number]])
    fetcher.close()
    assert ring.begun == 0
    assert len(card.registered) == 1


def test_memory_that_is_pinned_already_is_not_ours_to_unpin() -> None:
    driver = object.__new__(CudaDriver)
    for code in (0, 1, 712):  # done, refused, some of it is pinned already
        answers = SimpleNamespace(cuMemHostRegister_v2=lambda *given, code=code: code)
        driver._cuda = cast(Any, answers)
        assert driver.pin(4096, 4096) is (code == 0)


def test_a_part_that_is_computed_with_is_no_longer_read(monkeypatch: pytest.MonkeyPatch) -> None:
    card, parts = _Card(), _parts(3, size=100_000)
    fetcher = _on_card(monkeypatch, card, parts, _Ring())
    wanted = parts[0][0].copy()
    found = fetcher.acquire(0)
    parts[0][0][:] = 0  # as a program does that loads other weights after a call
    card.pass_time()
    assert_same_bits(found[0], wanted, because="it was copied alone")
    fetcher.release(0, found[0])
    fetcher.close()


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_nothing_is_in_flight_at_the_end(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    card = _Card()
    parts = _parts(5, size=100_000)
    fetcher = _on_card(monkeypatch, card, parts, _Ring())
    _compute(fetcher, 0, parts[0])
    worker = fetcher._thread
    assert worker is not None
    assert worker.is_alive()
    until = time.monotonic() + 60
    while not card.copies and time.monotonic() < until:  # the next part is brought ahead
        time.sleep(0.01)
    assert card.copies
    if how == "closed":
        fetcher.close()
    del fetcher
    worker.join(60)
    assert not worker.is_alive()
    assert not card.copies


def test_nothing_is_in_flight_where_a_copy_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    card = _Card()
    card.fails_at = 2  # the second array of the first part
    fetcher = _on_card(monkeypatch, card, _parts(3, size=100_000), _Ring())
    with pytest.raises(AnyDeviceError, match="the bus is gone"):
        fetcher.acquire(0)
    assert not card.copies


def test_memory_of_unknown_cards_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, array: Any) -> int:
        raise AssertionError("a CPU that writes there ends the process")

    monkeypatch.setattr(_CardEngine, "address", refuse, raising=False)
    parts = _parts(3)
    fetcher = _on_card(monkeypatch, _Card(), parts, None)
    for number in (0, 1, 2, 0, 1, 2):
        found = fetcher.acquire(number)
        assert_same_bits(found[0], parts[number][0], because="it was copied alone")
        fetcher.release(number, None)  # as modules do, whose results may be anything
    fetcher.close()


def test_two_parts_are_on_the_device_at_once(tmp_path: Path) -> None:
    device, engine = _torch()
    kept = _stored(tmp_path / "parts.safetensors", _parts(6, size=50_000))
    fetcher = Fetcher(kept, device, engine)
    memories = set()
    for number in range(6):
        x, y = fetcher.acquire(number)
        assert x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
        memories.add((x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()))
        fetcher.release(number, x)
    fetcher.close()
    part = sum(each.nbytes for each in kept[0])
    assert len(memories) == 2
    assert sum(size for _, size in memories) <= 2 * part + 1024


@pytest.mark.parametrize("change", ["shorter", "others"])
def test_a_changed_file_is_an_error_and_opens_again(change: str, tmp_path: Path) -> None:
    device, engine = _torch()
    path, parts = tmp_path / "parts.safetensors", _parts(3)
    fetcher = Fetcher(_stored(path, parts), device, engine)
    whole = path.read_bytes()
    with path.open("r+b") as file:
        if change == "shorter":
            file.truncate(1000)
        else:
            file.seek(len(whole) - 4000)
            file.write(bytes(100))
    with pytest.raises(TransferError, match=r"parts\.safetensors"):
        _compute(fetcher, 2, parts[2])
    path.write_bytes(whole)
    _compute(Fetcher(_stored(path, parts), device, engine), 2, parts[2])


def test_weights_that_do_not_tell_their_changes_are_refused() -> None:
    torch = pytest.importorskip("torch")
    device, engine = _torch()
    with torch.inference_mode():
        made = [[kept_in_memory(torch.ones(4), engine)] for _ in range(3)]
        across = torch.ones(4, 3).T
    with pytest.raises(ConfigurationError, match=r"made in torch\.inference_mode"):
        Fetcher(made, device, engine)
    with pytest.raises(ConfigurationError, match=r"made in torch\.inference_mode"):
        kept_in_memory(across, engine)


def test_an_array_that_was_copied_is_still_held() -> None:
    torch = pytest.importorskip("torch")
    across = torch.arange(6.0).reshape(2, 3).T
    kept = kept_in_memory(across, registry.load("torch"))
    assert kept.holder is across, "its identity says whether a model still has it"
    assert_same_bits(kept.on_host(), across, because="it was copied alone")


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="there is no file"):
        read_parts(tmp_path / "none.safetensors")
    (tmp_path / "short.safetensors").write_bytes(b"123")
    with pytest.raises(TransferError, match="at least 8"):
        read_parts(tmp_path / "short.safetensors")
