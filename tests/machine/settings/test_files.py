"""Settings are read once, and a change takes effect at the next call."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import anydevice
from anydevice._machine.choose import scope
from anydevice._machine.settings import config, files
from anydevice.testing import fake_machine

OLD = 1_000_000_000_000_000_000
"""A time stamp long ago: files that are settled are compared by their time stamps alone."""


@pytest.fixture(autouse=True)
def machine(home: Path) -> Iterator[Path]:
    """Two backends, so that it shows which one the settings prefer; a call has been made."""
    with fake_machine(cuda=2, opencl=1, keep_settings=True):
        anydevice.device("cpu")
        yield home


def chosen() -> str:
    return str(anydevice.device("auto").backend)


def settle(path: Path) -> None:
    os.utime(path, ns=(OLD, OLD))


def test_a_project_s_file_that_appears_changes_and_goes() -> None:
    project = Path("anydevice.toml")
    for _ in range(20):
        assert chosen() == "cuda"
        project.write_text('device = "cpu"   \n')
        assert chosen() == "cpu"
        project.write_text('device = "opencl"\n')  # of the same size, and within one tick
        assert chosen() == "opencl"
        project.unlink()


@pytest.mark.parametrize("settled", [False, True])
def test_a_file_that_is_replaced_by_one_of_the_same_size_and_time(settled: bool) -> None:
    project, other = Path("anydevice.toml"), Path("other.toml")
    project.write_text('device = "cpu"   \n')
    other.write_text('device = "opencl"\n')
    if settled:
        settle(project)
        settle(other)
    assert chosen() == "cpu"
    other.replace(project)
    assert chosen() == "opencl"


def test_a_time_stamp_that_is_put_back_hides_nothing() -> None:
    project = Path("anydevice.toml")
    project.write_text('device = "cpu"   \n')
    settle(project)
    assert chosen() == "cpu"
    project.write_text('device = "opencl"\n')
    settle(project)
    assert chosen() == "opencl"


def test_the_target_of_a_link_is_followed(tmp_path: Path) -> None:
    target = tmp_path / "target.toml"
    target.write_text('device = "cpu"   \n')
    Path("anydevice.toml").symlink_to(target)
    assert chosen() == "cpu"
    target.write_text('device = "opencl"\n')
    assert chosen() == "opencl"
    target.unlink()
    assert chosen() == "cuda"
    assert files.project_file() == Path.cwd() / "anydevice.toml"  # all the same
    target.write_text('device = "cpu"\n')
    assert chosen() == "cpu"


def test_a_nearer_file_and_one_further_up(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("anydevice.toml").write_text('device = "cpu"\n')
    inner = Path("a/b")
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert chosen() == "cpu"
    Path("../anydevice.toml").write_text('device = "opencl"\n')
    assert chosen() == "opencl"
    monkeypatch.chdir("../..")
    assert chosen() == "cpu"


def test_the_user_s_file_and_another_home(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "anydevice.toml").write_text('device = "cpu"\n')
    assert chosen() == "cpu"
    other = machine / "other"
    other.mkdir()
    (other / "anydevice.toml").write_text('device = "opencl"\n')
    monkeypatch.setenv("ANYDEVICE_HOME", str(other))
    assert chosen() == "opencl"


def test_a_home_that_is_no_folder_is_named(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = machine / "plain"
    plain.touch()
    for path in (plain, Path(os.devnull)):
        monkeypatch.setenv("ANYDEVICE_HOME", str(path))
        config.forget_files()
        with pytest.warns(UserWarning, match=f"{path} is not a folder") as said:
            assert chosen() == "cuda"
        assert not any("everyone" in str(each.message) for each in said)


@pytest.mark.needs("torch")
def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYDEVICE_DEVICE", "cpu")
    assert chosen() == "cpu"
    monkeypatch.setenv("ANYDEVICE_DEVICE", "opencl")
    assert chosen() == "opencl"
    monkeypatch.delenv("ANYDEVICE_DEVICE")
    assert str(anydevice.device("cuda")) == "cuda:0"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert str(anydevice.device("cuda")) == "cuda:1"
    assert anydevice.device("cpu").engine == "numpy"
    monkeypatch.setenv("ANYDEVICE_ENGINE", "torch")
    assert anydevice.device("cpu").engine == "torch"


@pytest.mark.needs("torch")
def test_blocks_the_process_and_configure() -> None:
    with anydevice.use_device("opencl"):
        assert chosen() == "opencl"
        with anydevice.use_device("cpu", engine="torch"):
            assert (chosen(), anydevice.device().engine) == ("cpu", "torch")
        with anydevice.use_device("cpu", engine="numpy"):
            assert (chosen(), anydevice.device().engine) == ("cpu", "numpy")
        assert chosen() == "opencl"
    assert chosen() == "cuda"
    anydevice.set_device("cpu")
    assert chosen() == "cpu"
    anydevice.set_device(None)
    anydevice.configure(order="opencl")
    assert chosen() == "opencl"
    anydevice.configure(order=None)
    assert chosen() == "cuda"


def test_another_machine() -> None:
    assert str(anydevice.device("gpu")) == "cuda:0"
    with fake_machine(rocm=1):
        assert str(anydevice.device("gpu")) == "rocm:0"
    assert str(anydevice.device("gpu")) == "cuda:0"


def test_a_wrong_file_is_an_error_at_every_call_until_it_is_right() -> None:
    project = Path("anydevice.toml")
    project.write_text('device = "nope"\n')
    for _ in range(2):
        with pytest.raises(anydevice.ConfigurationError, match="there is no backend 'nope'"):
            anydevice.device("cpu")
    project.write_text('device = "cuda"\n')
    assert str(anydevice.device("cpu")) == "cpu"


def test_what_cannot_be_met_is_an_error_at_every_call() -> None:
    for _ in range(2):
        with pytest.raises(anydevice.DeviceNotFoundError):
            anydevice.device("rocm")


def test_files_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    project = Path("anydevice.toml")
    project.write_text('device = "cpu"\n')
    settle(project)
    read: list[Path] = []
    real = config._read_file
    monkeypatch.setattr(
        config, "_read_file", lambda *asked: (read.append(asked[1]), real(*asked))[1]
    )
    for spec in ("cpu", "cuda", None, "opencl") * 3:
        anydevice.device(spec)
        anydevice.configure()
    assert read.count(project.resolve()) == 1


def test_a_deleted_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert files.project_file() is None
    assert chosen() == "cuda"
    with pytest.raises(anydevice.ConfigurationError, match="working directory"):
        anydevice.prefer("cpu", project=True)


def test_free_memory_that_decides_is_read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"cuda:0": 10, "cuda:1": 20}
    monkeypatch.setattr(scope, "free_memory", lambda device: free[str(device)])
    assert str(anydevice.device("cuda")) == "cuda:1"
    free["cuda:0"] = 30
    assert str(anydevice.device("cuda")) == "cuda:0"


def test_a_warning_of_a_file_is_given_once_until_something_changes() -> None:
    Path("anydevice.toml").write_text("devcie = 1\n")

    def warned(call: Callable[[], object] = lambda: anydevice.device("cpu")) -> int:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            call()
        return len(said)

    assert [warned(), warned()] == [1, 0]
    assert [warned(lambda: anydevice.discover(refresh=True)), warned()] == [1, 0]
    Path("anydevice.toml").write_text("devcies = 1\n")
    assert [warned(), warned()] == [1, 0]


def test_a_preference_makes_the_file_of_a_project_that_has_none(home: Path) -> None:
    project = Path.cwd() / "anydevice.toml"
    assert anydevice.prefer("opencl", project=True) == project
    assert project.read_text().splitlines()[1:] == ['device = "opencl"']
    assert chosen() == "opencl"
    assert not (home / "anydevice.toml").exists()
    anydevice.prefer(None, project=True)
    assert chosen() == "cuda"
    assert not project.exists(), "it was made for this setting"


def test_a_project_s_preference_goes_into_the_file_above() -> None:
    above = Path.cwd() / "anydevice.toml"
    above.write_text("# ours\nx64 = false\n")
    below = Path.cwd() / "scripts" / "deep"
    below.mkdir(parents=True)
    os.chdir(below)
    assert anydevice.prefer("cpu", project=True) == above
    assert above.read_text() == '# ours\nx64 = false\ndevice = "cpu"\n'
    assert list(below.iterdir()) == []


def test_forgetting_the_preference_of_a_project_without_a_file_makes_none(home: Path) -> None:
    anydevice.prefer("cpu")
    assert anydevice.prefer(None, project=True) is None
    assert list(Path.cwd().iterdir()) == []
    assert chosen() == "cpu"


def test_a_project_s_preference_of_a_fake_machine_ends_with_it() -> None:
    real = Path.cwd() / "anydevice.toml"
    real.write_text('device = "opencl"\n')
    with fake_machine(cuda=2, opencl=1):
        made = anydevice.prefer("cpu", project=True)
        assert chosen() == "cpu"
        assert anydevice.device().chosen_by == "project file"
    assert not made.exists()
    assert real.read_text() == 'device = "opencl"\n'
    assert chosen() == "opencl"
