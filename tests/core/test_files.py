"""Files are written whole or not at all, and read within limits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anydevice._core import files
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
def test_files_get_the_usual_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain").write_bytes(b"")
    monkeypatch.setattr(os, "umask", lambda _: pytest.fail("other threads make files, too"))
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


def test_text_is_written_as_it_is_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with files.writing(path):
        pass
    assert list(tmp_path.iterdir()) == []
    with files.writing(path) as write:
        write("ä\r\nb\n")
    assert path.read_bytes() == "ä\r\nb\n".encode()


def test_what_cannot_be_written_is_said_before_and_then(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path, reason in ((tmp_path / "file" / "below", "Not a directory"), (tmp_path, "directory")):
        with pytest.raises(TransferError, match=f"cannot be written: .*{reason}"):
            files.check_writable(path)
        with pytest.raises(TransferError, match=f"cannot be written: .*{reason}"):
            files.write_whole(path, [b""])
    files.check_writable(tmp_path / "other")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    with pytest.raises(TransferError, match="cannot be written: its name holds a null character"):
        files.write_whole(tmp_path / "a\0b", [b""])


ENDLESS = """
import sys
from pathlib import Path
from anydevice._core.files import write_whole
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


def refused(path: Path, **how: Any) -> str:
    """Return why a file is not read; it is found without waiting."""
    began = time.monotonic()
    with pytest.raises(OSError, match=r"Errno") as caught:
        files.read_small(path, **how)
    assert time.monotonic() - began < 60
    assert caught.value.filename == str(path)
    return str(caught.value.strerror)


@posix
def test_only_ordinary_files_are_read_and_nothing_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for name in ("pipe", "link", "zeros"):
        assert refused(tmp_path / name) == "it is not an ordinary file"
    assert refused(tmp_path) == "Is a directory"
    with pytest.raises(FileNotFoundError):
        files.read_small(tmp_path / "nowhere")
    assert refused(Path(f"{tmp_path}/a\0b")) == "its name holds a null character"


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert files.read_small(path, limit=5) == b"12345"
    assert refused(path, limit=4) == "it has more than 4 bytes"
    os.truncate(path, 2**40)  # takes no room on the disk
    assert "more than 1048576 bytes" in refused(path)


@posix
def test_what_somebody_else_could_have_written_is_not_trusted(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"{}")
    link.symlink_to(path)
    assert files.read_small(link, trusted=True) == b"{}"
    assert files.distrust(link) is None
    path.chmod(0o646)
    said = "it may be written by everyone"
    for each in (path, link):
        assert refused(each, trusted=True) == files.distrust(each) == said
    assert files.read_small(path) == b"{}"
    path.chmod(0o664)
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(link, 65534, -1, follow_symlinks=False)
    assert refused(link, trusted=True) == "the link belongs to another user"
    os.chown(path, 65534, -1)
    assert refused(path, trusted=True) == files.distrust(path) == "it belongs to another user"


BAD_JSON = {
    b"": "Expecting value",
    b"[" * 100_000: "nested more than 64",
    b'{"a":' * 65 + b"1" + b"}" * 65: "nested more than 64",
    b'{"a": ' + b"9" * 5000 + b"}": "more than 300 digits",
    b'{"a": -' + b"9" * 301 + b"}": "more than 300 digits",
    b'{"version": Infinity}': "JSON has no Infinity",
    b"[NaN]": "JSON has no NaN",
    b"[1e999]": "too large for a number",
    b'{"a\0b": 1}': "control character",
    b"\xff\xfe{}": "codec can't decode",
    b'"' + b"\\" * 99_999: "Unterminated string",
}


@pytest.mark.parametrize("data", BAD_JSON, ids=BAD_JSON.values())
def test_whatever_is_wrong_with_json_is_a_value_error(data: bytes) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match=BAD_JSON[data]):
        files.parse_json(data)
    assert time.monotonic() - began < 60


def test_brackets_in_strings_do_not_nest_and_infinity_may_be_asked_for() -> None:
    assert files.parse_json(b'["' + b"[" * 100 + b'\\"", 1]') == ["[" * 100 + '"', 1]
    assert files.parse_json(b"[" * 64 + b"]" * 64)
    assert files.parse_json(b"[Infinity, 1e999]", finite=False) == [float("inf")] * 2


BAD_TOML = {
    b"a = " + b"[" * 10_000: "nested more than 64",
    b"a = " + b"[" * 65 + b"]" * 65: "nested more than 64",
    b".".join([b"a"] * 100) + b" = 1": "nested more than 64",
    b"a = " + b"9" * 5000: "digits",
    b"a = " + b"9" * 301: "more than 300 digits",
    b"a = '\0'": "line 1",
    b"\xff": "codec can't decode",
    b"a = = 1": "line 1",
}


@pytest.mark.parametrize("data", BAD_TOML, ids=range(len(BAD_TOML)))
def test_whatever_is_wrong_with_toml_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=BAD_TOML[data]):
        files.parse_toml(data)
    assert files.parse_toml(b"a = [1]\n[b]\nc = 2") == {"a": [1], "b": {"c": 2}}


@posix
def test_what_is_no_ordinary_file_is_not_replaced(tmp_path: Path) -> None:
    path, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(path)
    link.symlink_to(path)
    for each in (path, link):
        with pytest.raises(TransferError, match="cannot be written: it is not an ordinary file"):
            files.write_whole(each, [b"new"])
        with pytest.raises(OSError, match="not an ordinary file"), files.writing(each) as write:
            write("new")
    assert path.is_fifo()
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


@posix
def test_a_read_only_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o444)
    for write in (lambda: files.write_whole(path, [b"new"]), lambda: files.check_writable(path)):
        with pytest.raises(TransferError, match="cannot be written: it is read-only"):
            write()
    assert path.read_bytes() == b"old"
    assert path.stat().st_mode & 0o777 == 0o444
    assert os.listdir(tmp_path) == ["file"]


@posix
@pytest.mark.skipif(os.name == "posix" and os.geteuid() != 0, reason="only root can give it away")
def test_another_user_s_link_is_not_followed(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"old")
    link.symlink_to(path)
    os.chown(link, 65534, -1, follow_symlinks=False)
    with pytest.raises(TransferError, match="cannot be written: the link belongs to another user"):
        files.write_whole(link, [b"new"])
    assert path.read_bytes() == b"old"


@posix
def test_what_replaces_a_private_file_is_private_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o600)
    seen: list[int] = []

    def pieces() -> Iterator[bytes]:
        seen.extend(each.stat().st_mode & 0o777 for each in tmp_path.iterdir())
        yield b"new"

    files.write_whole(path, pieces())
    assert seen == [0o600, 0o600]
    assert path.stat().st_mode & 0o777 == 0o600


@posix
def test_what_another_process_writes_is_no_leftover(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def pieces() -> Iterator[bytes]:
        yield b"one "
        files.remove_leftovers(path)  # as a second training on this file does when it begins
        yield b"two"

    files.write_whole(path, pieces())
    assert path.read_bytes() == b"one two"
