"""Files that are read by position, from several threads, and that change meanwhile."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from anydevice._core import files
from anydevice._core.files import PlainFile
from anydevice.errors import TransferError
from tests.comparing import assert_same_bits


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_a_read_that_fails_is_said(file: Path) -> None:
    file.write_bytes(b"12345678")
    opened = PlainFile(file)
    opened.close()
    # The number is free again, so the system refuses to read by it.
    with pytest.raises(TransferError, match="cannot be read: Bad file descriptor"):
        opened.read(4, 0)


@pytest.mark.skipif(os.name != "posix", reason="an opened file can be replaced")
def test_a_file_that_was_replaced_is_refused(file: Path) -> None:
    file.write_bytes(b"before")
    with PlainFile(file) as opened:
        other = file.with_name("other")
        other.write_bytes(b"later!")
        other.replace(file)
        assert opened.read(6, 0) == b"before", "an opened file is read to its end"
        opened.confirm_unchanged()
    with pytest.raises(TransferError, match="was changed while it was being read"):
        PlainFile(file, opened.stamp)


@pytest.mark.parametrize("in_turns", [False, True])
def test_threads_read(file: Path, in_turns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if in_turns:
        monkeypatch.setattr(files, "_read_at", files._read_in_turns)
    whole = np.random.default_rng(0).integers(0, 256, 3_000_000, dtype=np.uint8)
    file.write_bytes(whole.tobytes())
    found = np.zeros_like(whole)
    with PlainFile(file) as opened:

        def fill(start: int) -> None:
            for first in range(start, len(whole), 400_000):
                part = found[first : first + 100_000]
                opened.read_into(memoryview(part), first)

        threads = [threading.Thread(target=fill, args=(at * 100_000,)) for at in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(TransferError, match="became shorter"):
            opened.read(1, len(whole))
        big = opened.read(2_500_000, 1)
    assert_same_bits(found, whole, because="it is only read")
    assert big == whole[1:2_500_001].tobytes()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="this system does not list them")
def test_no_file_stays_open(file: Path) -> None:
    file.write_bytes(b"before")
    before = len(os.listdir("/proc/self/fd"))
    with PlainFile(file) as opened:
        assert len(os.listdir("/proc/self/fd")) == before + 1
    file.write_bytes(b"something longer")
    with pytest.raises(TransferError):
        PlainFile(file, opened.stamp)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("dated_back", [False, True])
def test_a_file_that_was_written_to_is_refused(file: Path, dated_back: bool) -> None:
    file.write_bytes(b"before")
    times = file.stat()
    with PlainFile(file) as opened:
        opened.confirm_unchanged()
        with file.open("r+b" if dated_back else "ab") as stream:
            stream.write(b"after!")
        if dated_back:
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(TransferError, match="was changed while it was being read"):
            opened.confirm_unchanged()
