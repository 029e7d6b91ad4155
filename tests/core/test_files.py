"""Files are written whole or not at all, and keep their permissions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from anydevice.core import files
from anydevice.errors import TransferError

posix = pytest.mark.skipif(os.name != "posix", reason="permissions and links as POSIX has them")


def test_pieces_become_one_file_in_a_new_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    files.write_whole(path, [b"one ", bytearray(b"two "), memoryview(b"three")])
    assert path.read_bytes() == b"one two three"
    assert [each.name for each in path.parent.iterdir()] == ["file"]


def test_what_fails_on_the_way_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def pieces() -> Iterator[bytes]:
        yield b"new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write_whole(path, pieces())
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@posix
@pytest.mark.parametrize("writer", ["whole", "text"])
def test_permissions_and_links_stay(tmp_path: Path, writer: str) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    target.chmod(0o640)
    link.symlink_to(target)
    if writer == "whole":
        files.write_whole(link, [b"new"])
    else:
        with files.writing(link) as write:
            write("new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert target.stat().st_mode & 0o777 == 0o640


@posix
def test_files_get_the_rights_of_new_files_and_the_mask_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain").write_bytes(b"")

    def mask(_: int) -> int:
        raise AssertionError("other threads make files, too")

    monkeypatch.setattr(os, "umask", mask)
    files.write_whole(tmp_path / "numbers", [b"x"])
    assert (tmp_path / "numbers").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_only_what_writers_of_this_file_left_is_removed(tmp_path: Path) -> None:
    own, others = f".run[1].{'a' * 16}.part", [f".run1.{'a' * 16}.part", ".run[1].mine.part"]
    others.append(f".run[1].b.{'a' * 16}.part")
    for name in (own, *others):
        (tmp_path / name).write_bytes(b"")
    files.remove_leftovers(tmp_path / "run[1]")
    assert sorted(os.listdir(tmp_path)) == sorted(others)
    files.remove_leftovers(tmp_path / "nowhere" / "run")


def test_text_is_written_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with files.writing(path) as write:
        write("ä\r\nb\n")
    assert path.read_bytes() == "ä\r\nb\n".encode()


def test_a_block_that_writes_nothing_changes_nothing(tmp_path: Path) -> None:
    with files.writing(tmp_path / "file"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_said_before_and_then(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path, reason in ((tmp_path / "file" / "below", "Not a directory"), (tmp_path, "directory")):
        with pytest.raises(TransferError, match=f"cannot be written: .*{reason}"):
            files.check_writable(path)
        with pytest.raises(TransferError, match=f"cannot be written: .*{reason}"):
            files.write_whole(path, [b""])
    files.check_writable(tmp_path / "other")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


ENDLESS = """
import sys
from pathlib import Path
from anydevice.core.files import write_whole
path = Path(sys.argv[1])
print("writing", flush=True)
while True:
    write_whole(path, [b"x" * 4096] * 64)
"""


@posix
def test_a_killed_writer_leaves_a_whole_file_and_leftovers_can_go(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    for turn in range(8):
        writer = subprocess.Popen(
            [sys.executable, "-c", ENDLESS, str(path)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        time.sleep(0.003 * turn)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        assert path.read_bytes() in (b"old", b"x" * 4096 * 64)
    (tmp_path / ".file.0123456789abcdef.part").write_bytes(b"half")
    (tmp_path / ".file.mine.part").write_bytes(b"somebody's")
    files.remove_leftovers(path)
    assert sorted(each.name for each in tmp_path.iterdir()) == [".file.mine.part", "file"]
