"""Settings files that are wrong, unreadable, or written by many at once, and killed writers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from unittest.mock import Mock

import pytest

import anydevice
from anydevice._machine.settings import files
from anydevice._machine.settings.files import user_file
from anydevice.errors import ConfigurationError
from tests.programs import output_of

GARBAGE = {
    "not TOML": ("device = = cuda\n", "line 1"),
    "binary": ("\x00\x01\x02\x03", "line 1"),
    "half a line": ('# mine\n\ndevice = "cu', "line 3"),
    "wrong type": ("# mine\ndevice = 3\n", "line 2"),
    "wrong type in a list": ('x64 = true\n\ndevice = ["cuda", 1]\n', "line 3"),
    "a table": ('[device]\nname = "cuda"\n', "line 1"),
    "unknown backend": ('# a\n# b\ndevice = "cudda"\n', "line 3"),
    "another library's word": ('device = "mps"\n', "line 1"),
    "unknown engine": ('device = "cpu"\nengine = "tensorflow"\n', "line 2"),
    "wrong engine type": ("engine = true\n", "line 1"),
    "wrong order": ('order = ["cuda", "nope"]\n', "line 1"),
    "wrong memory": ('# c\nmemory = "lots"\n', "line 2"),
    "memory without end": ("memory = inf\n", "line 1"),
    "wrong switch": ('x64 = "yes"\n', "line 1"),
    "wrong table": ('env = "A=1"\n', "line 1"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_a_wrong_file_is_an_error_that_names_file_and_line(home: Path, name: str) -> None:
    content, line = GARBAGE[name]
    user_file().write_text(content)
    with pytest.raises(ConfigurationError) as caught:
        anydevice.device()
    assert str(user_file()) in str(caught.value)
    assert line in str(caught.value)
    assert caught.value.source == f"{user_file()}, {line}"


def test_a_wrong_file_hides_no_device_and_is_not_written_over(home: Path) -> None:
    user_file().write_bytes(b'# fine\ndevice = "\xff\xfe"\n')
    with pytest.raises(ConfigurationError, match=r"line 2: this is not UTF-8"):
        anydevice.device()
    user_file().write_text("device = = cuda\n")
    with pytest.raises(ConfigurationError, match="line 1"):
        anydevice.prefer("cpu")
    assert user_file().read_text() == "device = = cuda\n"
    user_file().write_text("time_limit = true\n")
    assert anydevice.discover(refresh=True)["cpu"].usable
    with pytest.raises(ConfigurationError, match="line 1: time_limit: True is not a number"):
        anydevice.device("cpu")


def test_an_unknown_setting_is_a_warning(home: Path) -> None:
    user_file().write_text('device = "cpu"\ndevcie = "cuda"\n')
    with pytest.warns(UserWarning, match=r"line 2: there is no setting 'devcie'"):
        assert anydevice.device().chosen_by == "user file"


def test_a_folder_in_the_file_s_place_is_passed_over_with_a_warning(home: Path) -> None:
    user_file().mkdir(parents=True)
    with pytest.warns(UserWarning, match="cannot be read"):
        assert anydevice.device("cpu").backend == "cpu"
    with pytest.raises(ConfigurationError, match="cannot be written"):
        anydevice.prefer("cpu")


def test_an_unknown_users_home_is_empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANYDEVICE_HOME", "~nobody-of-that-name/anydevice")
    monkeypatch.setattr(files, "_said_no_home", False)
    with pytest.warns(UserWarning, match="no home folder, so no settings are read"):
        assert anydevice.discover(refresh=True)["cpu"].usable
    assert anydevice.device("cpu").backend == "cpu"


def test_without_locks_files_are_hidden(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError("this file system has no locks")))
    replaced: list[str] = []
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (replaced.append(a.name), real(a, b)))
    anydevice.prefer("cpu")
    assert replaced[0].endswith(".part")
    assert [p.name for p in home.iterdir()] == ["anydevice.toml"]


def test_the_ends_of_lines_are_kept(home: Path) -> None:
    user_file().write_bytes(b"# mine\r\nx64 = false\r\n")
    anydevice.prefer("cpu")
    assert user_file().read_bytes().startswith(b"# mine\r\nx64 = false\r\n")
    assert anydevice.device().chosen_by == "user file"


def as_unprivileged_user(code: str, home: Path) -> str:
    """Return the output of code that runs as a user without rights, also if root runs the tests.

    Everything is imported before the rights are given up: the interpreter may lie in a folder
    that only root can enter.
    """
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("only root can become somebody who may not read a file")
    for place in (home, *home.parents[:-1]):
        if place.stat().st_uid == 0:
            place.chmod(place.stat().st_mode | 0o055)
    before = (
        "import os, warnings, tomllib, tomlkit, anydevice, anydevice._machine.choose.scope\n"
        "from anydevice._machine.settings.config import prefer, read_files\n"
        "from anydevice._machine.settings.files import user_file\n"
        "from anydevice.errors import ConfigurationError\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    )
    return output_of("-c", before + code, env={"ANYDEVICE_HOME": str(home)})


def test_an_unreadable_file_is_a_warning_and_the_default(home: Path) -> None:
    user_file().write_text('device = "cuda"\n')
    user_file().chmod(0o000)
    said = as_unprivileged_user(
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always'); print(read_files())\n"
        "print(said[0].message)\n",
        home,
    )
    assert said.startswith("()\n")
    assert f"{user_file()} cannot be read (Permission denied); going on without it" in said


def test_a_read_only_folder_is_an_error_that_says_what_to_do(home: Path) -> None:
    user_file().write_text('device = "cpu"\n')
    home.chmod(0o555)
    said = as_unprivileged_user(
        "try: prefer('cuda')\nexcept ConfigurationError as error: print('refused:', error)\n", home
    )
    assert said.startswith("refused:")
    assert "cannot be written (Permission denied); nothing was changed" in said
    assert "ANYDEVICE_DEVICE" in said
    assert user_file().read_text() == 'device = "cpu"\n'


def test_a_full_disk_leaves_the_old_file(home: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a small disk cannot be mounted without root's rights")
    try:
        os.environ["ANYDEVICE_HOME"] = str(disk)
        user_file().write_text('# mine\ndevice = "cpu"\n')
        with pytest.raises(OSError, match="No space"):
            (disk / "filler").write_bytes(b"x" * 2**20)
        with pytest.raises(ConfigurationError, match=r"cannot be written \(No space"):
            anydevice.prefer("cuda")
        assert user_file().read_text() == '# mine\ndevice = "cpu"\n'
        assert sorted(p.name for p in disk.iterdir()) == ["anydevice.toml", "filler"]
    finally:
        subprocess.run(["umount", str(disk)], check=False)


WRITER = """
import sys, anydevice
names = ("cuda", "rocm", "metal", "opencl", "tpu", "cpu")
for turn in range(int(sys.argv[1])):
    anydevice.prefer(names[turn % len(names)])
    if turn == 0:
        print("writing", flush=True)
"""


def whole(path: Path) -> None:
    content = tomllib.loads(path.read_text())
    assert content["device"] in ("cuda", "rocm", "metal", "opencl", "tpu", "cpu")
    assert content["x64"] is False
    assert path.read_text().startswith("# keep me\n")


def test_64_threads_and_8_processes_write_at_once(home: Path) -> None:
    user_file().write_text('# keep me\nx64 = false\ndevice = "cpu"\n')
    processes = [
        subprocess.Popen([sys.executable, "-c", WRITER, "10"], stdout=subprocess.DEVNULL)
        for _ in range(8)
    ]
    errors: list[BaseException] = []

    def write(name: str) -> None:
        try:
            anydevice.prefer(name)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(("cuda", "cpu")[i % 2],)) for i in range(64)]
    for thread in threads:
        thread.start()
    while any(process.poll() is None for process in processes):
        whole(user_file())
    for thread in threads:
        thread.join()
    assert errors == []
    assert [process.returncode for process in processes] == [0] * 8
    whole(user_file())
    assert [p.name for p in home.iterdir()] == ["anydevice.toml"]


@pytest.mark.parametrize("times", [10, pytest.param(200, marks=pytest.mark.soak)])
def test_a_writer_that_is_killed_leaves_a_whole_file(home: Path, times: int) -> None:
    user_file().write_text('# keep me\nx64 = false\ndevice = "cpu"\n')
    for turn in range(times):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, "1000000"], stdout=subprocess.PIPE)
        assert writer.stdout.readline() == b"writing\n"
        time.sleep(0.0007 * (turn % 97))  # somewhere in its many writes
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        whole(user_file())
        assert {p.name for p in home.iterdir()} <= {"anydevice.toml", ".anydevice.toml.new"}
    anydevice.prefer("cuda")
    assert [p.name for p in home.iterdir()] == ["anydevice.toml"]
