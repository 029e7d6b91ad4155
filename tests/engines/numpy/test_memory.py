"""Arrays of NumPy and their memory."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from anydevice._core.engine import Storage
from anydevice._machine.engines import registry
from anydevice.errors import UnsupportedError

engine = registry.load("numpy")


def test_numpy_says_what_was_to_be_made() -> None:
    memory = engine.memory
    with pytest.raises(MemoryError) as caught:
        np.empty((2**40, 2**10), np.float64)
    assert memory.ran_out(caught.value)
    assert memory.asked(caught.value) == 2**53
    assert memory.asked(MemoryError()) is None


def storage(x: np.ndarray) -> Storage:
    found = engine.storage(x)
    assert found is not None
    return found


def test_parts_of_one_file_share_its_mapping(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(bytes(4096))
    mapped = np.memmap(path, np.float32, "r")
    first, rest = storage(mapped[:10]), storage(mapped[10:])
    assert first.allocation == rest.allocation
    assert first.size == 4096
    assert rest.offset - first.offset == 40


@pytest.mark.parametrize("make", [bytes, bytearray, lambda size: mmap.mmap(-1, size)])
def test_arrays_over_one_buffer_share_it(make) -> None:
    buffer = make(64)
    head, tail = (np.frombuffer(buffer, np.float32, 4, offset) for offset in (0, 32))
    assert storage(head).allocation == storage(tail).allocation
    assert (storage(head).size, storage(tail).offset) == (64, 32)


def test_views_backwards_and_other_byte_orders() -> None:
    whole = np.arange(6, dtype=np.int32)
    back = storage(whole[::-1])
    assert back.allocation == storage(whole).allocation
    assert (back.offset, back.strides) == (20, (-4,))
    assert engine.address(np.zeros(3, ">f4")) is None
    assert engine.address(np.zeros(3, "<f4")) is not None


def lender(array: np.ndarray) -> SimpleNamespace:
    """Memory that is described, but is no buffer of Python's."""
    return SimpleNamespace(array=array, __array_interface__=array.__array_interface__)


def test_of_memory_that_another_object_lends_the_outermost_array_is_known() -> None:
    numbers = np.arange(12, dtype=np.int32).reshape(3, 4)
    lent = np.asarray(lender(numbers[:, ::-2]))
    found = storage(lent[1:])
    assert found.address == numbers.ctypes.data + 4
    assert found.size == 44
    assert found.offset == 24
    assert engine.storage(np.asarray(lender(numbers[:0, ::-2]))) is None


def test_an_array_elsewhere_cannot_be_taken_over() -> None:
    class Elsewhere:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 4, 0

        def __dlpack__(self, **options: object) -> object:
            raise BufferError("it lies on an OpenCL device")

    with pytest.raises(UnsupportedError, match="it lies on an OpenCL device; copy it"):
        engine.adopt(Elsewhere())
