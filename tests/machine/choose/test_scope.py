"""`device`, `use_device`, `set_device`: where a choice comes from, and who sees it."""

from __future__ import annotations

import asyncio
import pickle
import threading
import warnings
from pathlib import Path

import numpy
import pytest

import anydevice
from anydevice import Device, nn, testing
from anydevice._core.finding import BackendScan, Facts, RawDevice, Reason
from anydevice._machine.choose.scope import why
from anydevice._machine.settings.files import user_file
from anydevice.errors import AnyDeviceWarning, ConfigurationError, DeviceNotFoundError
from tests.programs import output_of

TOO_OLD = Reason("too_old", "too old", "buy another")
NO_LIBRARY = BackendScan(
    "cuda", present=True, devices=(RawDevice(0, "gpu", Facts(name="RTX 4070"), reason=TOO_OLD),)
)


@pytest.fixture(autouse=True)
def empty_home(home: Path) -> None:
    pass


def test_without_a_wish_the_first_of_the_order() -> None:
    with testing.fake_machine(keep_settings=True, cuda=1, rocm=1):
        chosen = anydevice.device()
        assert (str(chosen), chosen.chosen_by) == ("cuda:0", "order of backends")


def test_it_ends_at_the_cpu_with_one_warning_that_gives_every_reason() -> None:
    with testing.fake_machine(keep_settings=True, scans=[NO_LIBRARY]):
        with pytest.warns(UserWarning, match="using cpu: cuda:0: too old") as said:
            assert str(anydevice.device()) == "cpu"
        assert len(said) == 1
        warning = said[0].message
        assert "fix: buy another" in str(warning)
        assert isinstance(warning, AnyDeviceWarning)
        assert [(each.code, each.fix) for each in warning.reasons] == [("too_old", "buy another")]
        with pytest.raises(DeviceNotFoundError) as caught:
            anydevice.device("cuda")
        assert (caught.value.code, caught.value.reasons[0].fix) == ("too_old", "buy another")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert str(anydevice.device()) == "cpu"


def test_a_machine_without_accelerators_says_that() -> None:
    with testing.fake_machine(keep_settings=True):
        with pytest.warns(UserWarning, match="no accelerator is in this machine"):
            anydevice.device()
        assert str(anydevice.device("cpu")) == "cpu"  # asking for it warns of nothing
    with testing.fake_machine(keep_settings=True, scans=[NO_LIBRARY]):
        assert str(anydevice.device("cpu")) == "cpu"


@pytest.mark.parametrize(
    "asked", ["gpu", "cuda", "cuda:1", "tpu", ["tpu", "rocm"], Device("cuda:1")]
)
def test_what_is_asked_for_is_met_or_an_error(asked: object) -> None:
    with (
        testing.fake_machine(keep_settings=True, scans=[NO_LIBRARY]),
        pytest.raises(DeviceNotFoundError) as caught,
    ):
        anydevice.device(asked)  # type: ignore[arg-type]
    assert "argument" in str(caught.value)
    assert "anydevice doctor" in str(caught.value)
    assert {finding.backend for finding in caught.value.findings} >= {"cuda", "cpu"}


@pytest.mark.parametrize("asked", ["nope", "cuda:x", [], [3], 7])
def test_what_names_no_device_is_a_configuration_error(asked: object) -> None:
    with pytest.raises((ConfigurationError, TypeError)):
        anydevice.device(asked)  # type: ignore[arg-type]


def test_min_free_lists_what_each_has() -> None:
    with testing.fake_machine(keep_settings=True, cuda=2, memory="16GiB", free=["4GiB", "9GiB"]):
        assert str(anydevice.device("cuda", min_free="8GiB")) == "cuda:1"
        with pytest.raises(DeviceNotFoundError) as caught:
            anydevice.device("cuda", min_free="10GiB")
        assert "cuda:0: 4.0 GiB free of 16.0 GiB, 10.0 GiB needed" in str(caught.value)
        assert "cuda:1: 9.0 GiB free" in str(caught.value)
        with pytest.raises(ConfigurationError, match="not a size"):
            anydevice.device("cuda", min_free="plenty")
        with pytest.raises(DeviceNotFoundError, match="no device of this machine fits") as caught:
            anydevice.device(min_free="999TiB")
        assert "cuda:0: 4.0 GiB free of 16.0 GiB" in str(caught.value)
        assert "cpu: " in str(caught.value)


def test_an_engine_is_asked_for_by_name() -> None:
    assert anydevice.device("cpu", engine="jax").engine == "jax"
    with pytest.raises(ConfigurationError, match="there is no engine 'tensorflow'"):
        anydevice.device(engine="tensorflow")
    with pytest.raises(DeviceNotFoundError, match="cupy"):
        anydevice.device("cpu", engine="cupy")


def test_a_block_decides_within_and_not_after() -> None:
    with testing.fake_machine(keep_settings=True, cuda=3):
        with anydevice.use_device("cuda:2") as here:
            assert anydevice.device() == here == Device("cuda:2")
            assert anydevice.device().chosen_by == "use_device"
            with anydevice.use_device("cpu"):
                assert str(anydevice.device()) == "cpu"
            assert str(anydevice.device()) == "cuda:2"
            assert str(anydevice.device("cuda:1")) == "cuda:1"
        assert str(anydevice.device()) == "cuda:0"


def test_a_block_ends_with_an_exception_and_may_be_entered_again() -> None:
    block = anydevice.use_device("cuda:1")
    with testing.fake_machine(keep_settings=True, cuda=2):
        with pytest.raises(ValueError, match="mine"), block:
            raise ValueError("mine")
        assert str(anydevice.device()) == "cuda:0"
        with block, block:
            assert str(anydevice.device()) == "cuda:1"
        assert str(anydevice.device()) == "cuda:0"


def test_a_decorated_function_has_its_device() -> None:
    @anydevice.use_device("cuda:1")
    def where() -> str:
        return str(anydevice.device())

    @anydevice.use_device("cuda:1")
    async def where_later() -> str:
        await asyncio.sleep(0)
        return str(anydevice.device())

    with testing.fake_machine(keep_settings=True, cuda=2):
        assert (where(), where(), asyncio.run(where_later())) == ("cuda:1", "cuda:1", "cuda:1")
        assert str(anydevice.device()) == "cuda:0"


def test_a_block_is_of_its_thread_and_task_alone() -> None:
    async def in_block(name: str) -> str:
        with anydevice.use_device(name):
            await asyncio.sleep(0.01)
            return str(anydevice.device())

    async def both() -> list[str]:
        return await asyncio.gather(in_block("cuda:0"), in_block("cuda:1"))

    seen: list[str] = []
    with testing.fake_machine(keep_settings=True, cuda=2):
        with anydevice.use_device("cuda:1"):
            thread = threading.Thread(target=lambda: seen.append(str(anydevice.device())))
            thread.start()
            thread.join()
        assert seen == ["cuda:0"]
        assert asyncio.run(both()) == ["cuda:0", "cuda:1"]


def test_the_process_s_device_is_set_and_undone() -> None:
    with testing.fake_machine(keep_settings=True, cuda=2):
        assert str(anydevice.set_device("cuda:1")) == "cuda:1"
        assert anydevice.device().chosen_by == "set_device"
        with pytest.raises(DeviceNotFoundError):
            anydevice.set_device("rocm")
        anydevice.discover(refresh=True)
        assert str(anydevice.device()) == "cuda:1"
        assert anydevice.set_device(None) is None
        assert str(anydevice.device()) == "cuda:0"


def test_native_sets_the_library_s_own_default() -> None:
    import torch

    with anydevice.use_device("cpu", engine="torch", native=True):
        assert torch.get_default_device() == torch.device("cpu")


def test_the_chain_in_its_order(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    def chosen() -> tuple[str, str | None]:
        device = anydevice.device()
        return str(device), device.chosen_by

    with testing.fake_machine(keep_settings=True, cuda=4, rocm=1, tpu=1):
        assert chosen() == ("cuda:0", "order of backends")
        anydevice.configure(order=["rocm"])
        assert chosen() == ("rocm:0", "configure")
        (home / "anydevice.toml").write_text('device = "tpu"\n')
        assert chosen() == ("tpu:0", "user file")
        Path("anydevice.toml").write_text('device = "cuda:1"\n')
        assert chosen() == ("cuda:1", "project file")
        monkeypatch.setenv("ANYDEVICE_DEVICE", "cuda:2")
        assert chosen() == ("cuda:2", "environment")
        anydevice.set_device("cuda:3")
        assert chosen() == ("cuda:3", "set_device")
        with anydevice.use_device("cpu"):
            assert chosen() == ("cpu", "use_device")
            assert str(anydevice.device("rocm")) == "rocm:0"


def test_a_preference_that_does_not_work_is_passed_over_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ANYDEVICE_DEVICE", "rocm, tpu")
    with (
        testing.fake_machine(keep_settings=True, cuda=1),
        pytest.warns(UserWarning, match="environment asks for rocm"),
    ):
        assert str(anydevice.device()) == "cuda:0"
    monkeypatch.setenv("ANYDEVICE_DEVICE", "gpuu")
    with pytest.raises(ConfigurationError, match="ANYDEVICE_DEVICE: there is no backend 'gpuu'"):
        anydevice.device()
    monkeypatch.setenv("ANYDEVICE_DEVICE", "auto")
    with testing.fake_machine(keep_settings=True, cuda=1):
        assert str(anydevice.device()) == "cuda:0"


@pytest.mark.needs("torch")
def test_the_engine_comes_down_the_chain_too(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    (home / "anydevice.toml").write_text('engine = "jax"\n')
    assert anydevice.device("cpu").engine == "jax"
    with testing.fake_machine(keep_settings=True, cuda=1):
        assert anydevice.device().engine == "jax"
        monkeypatch.setenv("ANYDEVICE_ENGINE", "torch")
        assert anydevice.device().engine == "torch"
    monkeypatch.setenv("ANYDEVICE_ENGINE", "nope")
    with pytest.raises(ConfigurationError, match="ANYDEVICE_ENGINE"):
        anydevice.device()


def test_a_preferred_engine_that_drives_nothing_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYDEVICE_ENGINE", "cupy")
    words = "using cpu: ANYDEVICE_ENGINE asks for cupy: cpu: cupy does not drive"
    with testing.fake_machine(keep_settings=True), pytest.warns(UserWarning, match=words):
        assert (str(anydevice.device()), anydevice.device().engine) == ("cpu", "numpy")


def test_auto_after_other_names_leaves_it_to_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    with testing.fake_machine(keep_settings=True, cuda=1):
        assert str(anydevice.device(["tpu", "auto"])) == "cuda:0"
        monkeypatch.setenv("ANYDEVICE_DEVICE", "tpu, auto")
        assert str(anydevice.device()) == "cuda:0"


@pytest.mark.parametrize("variable", ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"])
def test_a_launcher_s_rank_picks_the_card(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "2")
    with testing.fake_machine(keep_settings=True, cuda=4):
        assert str(anydevice.device()) == "cuda:2"
        assert str(anydevice.device("gpu")) == "cuda:2"
        assert str(anydevice.device("gpu:0")) == str(anydevice.device("GPU:0")) == "cuda:0"
        assert str(anydevice.device("cuda:1")) == "cuda:1"
        monkeypatch.setenv(variable, " ")
        assert str(anydevice.device()) == "cuda:0"
    monkeypatch.setenv(variable, "two")
    with pytest.raises(ConfigurationError, match=variable):
        anydevice.device()


@pytest.mark.needs("torch")
def test_prefer_takes_effect_at_once_and_is_forgotten(home: Path) -> None:
    with testing.fake_machine(keep_settings=True, cuda=2):
        assert anydevice.prefer("cuda:1") == home / "anydevice.toml"
        assert anydevice.device().chosen_by == "user file"
        assert str(anydevice.device()) == "cuda:1"
        anydevice.prefer("cpu", engine="torch")
        assert (str(anydevice.device()), anydevice.device().engine) == ("cpu", "torch")
        anydevice.prefer("")
        assert str(anydevice.device()) == "cuda:0"
        assert not (home / "anydevice.toml").exists()
    with pytest.raises(ConfigurationError, match="the backends are"):
        anydevice.prefer("nvidea")
    with pytest.raises(ConfigurationError, match="the engines are"):
        anydevice.prefer("cpu", engine="nope")


def test_prefer_keeps_comments_and_writes_the_project_s_file(home: Path) -> None:
    project = Path("anydevice.toml")
    text = '# ours\nx64 = false # as ever\n\n[env]\nA = "1"\n'
    project.write_text(text)
    assert anydevice.prefer("cuda") == project.resolve()
    written = project.read_text()
    assert "# ours\nx64 = false # as ever\n" in written
    assert written.index('device = "cuda"') < written.index("[env]")
    assert not (home / "anydevice.toml").exists()
    anydevice.prefer(None)
    assert "device" not in project.read_text()


def test_the_choice_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with testing.fake_machine(cuda=1, engines=["numpy"]):
        anydevice.device()  # before somebody listens
        with caplog.at_level("DEBUG", logger="anydevice"):
            anydevice.device()
            anydevice.device()  # the same choice, from memory
            with pytest.raises(DeviceNotFoundError):
                anydevice.device("rocm")
        lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert {record.name for record in caplog.records} == {"anydevice"}
    assert lines == [
        ("DEBUG", "order of backends, cuda: cuda:0 is usable"),
        ("INFO", "using cuda:0 with numpy, chosen by order of backends"),
        ("DEBUG", "argument, rocm: this machine has no rocm: not in this fake machine"),
    ]


SILENT = """
import sys, anydevice
anydevice.device("cpu")
assert "logging" not in sys.modules, "the choice itself needs no logging"
import logging
anydevice.device("cpu")
assert not logging.getLogger("anydevice").handlers
logging.basicConfig(level="INFO", stream=sys.stdout)
anydevice.device("cpu:0")
"""


def test_nothing_is_logged_unless_somebody_listens(home: Path) -> None:
    line = "INFO:anydevice:using cpu with numpy, chosen by argument\n"
    assert output_of("-W", "error", "-c", SILENT) == line


@pytest.mark.parametrize("written", ["", "# ours\n", 'device = "cpu"\n'])
def test_a_file_that_is_not_ours_stays_when_it_is_empty(home: Path, written: str) -> None:
    project = Path("anydevice.toml")
    project.write_text(written)
    anydevice.prefer("cpu")
    anydevice.prefer(None)
    assert project.read_text() in ("", "# ours\n")


def test_a_file_of_ours_stays_while_anything_else_is_in_it(home: Path) -> None:
    project = Path("anydevice.toml")
    anydevice.prefer("cpu", project=True)
    project.write_text(project.read_text() + "x64 = true\n")
    anydevice.prefer(None)
    assert "x64 = true" in project.read_text()


def test_forgetting_where_there_is_nothing_writes_nothing(home: Path) -> None:
    assert anydevice.prefer(None) is None
    assert list(home.iterdir()) == []


def test_a_link_stays_a_link(home: Path, tmp_path: Path) -> None:
    real = tmp_path / "elsewhere.toml"
    real.write_text("# mine\n")
    (home / "anydevice.toml").symlink_to(real)
    anydevice.prefer("cpu")
    assert (home / "anydevice.toml").is_symlink()
    assert real.read_text() == '# mine\ndevice = "cpu"\n'


def test_why_gives_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYDEVICE_DEVICE", "rocm")
    with testing.fake_machine(keep_settings=True, scans=[NO_LIBRARY]):
        steps = why().steps
    sources = ["environment", "order of backends", "order of backends"]
    assert [step.source for step in steps] == sources
    assert steps[-1].taken
    assert why("tpu").device is None


def test_a_generator_cannot_be_decorated() -> None:
    def steps():  # type: ignore[no-untyped-def]
        yield 1

    with pytest.raises(ConfigurationError, match=r"steps\(\) is a generator"):
        anydevice.use_device("cpu")(steps)


def test_a_fake_machine_ignores_settings(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("ANYDEVICE_DEVICE", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "1")
    (home / "anydevice.toml").write_text('device = "cpu"\n')
    Path("anydevice.toml").write_text('device = "cpu"\n')
    anydevice.set_device("cpu")
    with testing.fake_machine(cuda=2):
        assert str(anydevice.device()) == "cuda:0"
        anydevice.prefer("cuda:1")
        anydevice.set_device("cpu")
        assert anydevice.device().chosen_by == "set_device"
        anydevice.set_device(None)
        assert anydevice.device().chosen_by == "user file"
    assert (home / "anydevice.toml").read_text() == 'device = "cpu"\n'
    assert anydevice.device().chosen_by == "set_device"


def test_ranks_do_not_end_at_one_card_for_want_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with testing.fake_machine(cuda=2, free=["16GiB", "1GiB"]):
        monkeypatch.setenv("LOCAL_RANK", "1")
        with pytest.raises(DeviceNotFoundError, match=r"cuda:1: 1\.0 GiB free"):
            anydevice.device("cuda", min_free="8GiB")
        monkeypatch.delenv("LOCAL_RANK")
        assert str(anydevice.device("cuda", min_free="8GiB")) == "cuda:0"


def test_several_devices_are_preferred_in_their_order(home: Path) -> None:
    anydevice.prefer(["cuda:1", "cpu"])
    assert (home / "anydevice.toml").read_text().endswith('\ndevice = ["cuda:1", "cpu"]\n')
    assert str(anydevice.device()) == "cpu"
    anydevice.prefer("tpu, cpu")
    assert (home / "anydevice.toml").read_text().endswith('\ndevice = ["tpu", "cpu"]\n')


def test_what_is_missing_for_an_engine_comes_with_its_fix() -> None:
    with pytest.raises(DeviceNotFoundError, match=r"cupy does not drive it|pip install"):
        anydevice.device("cpu", engine="cupy")
    no_card = Reason("no_card", "no NVIDIA card")
    absent = BackendScan("cuda", present=False, stage="driver", reason=no_card)
    words = "this machine has no cuda: no NVIDIA card"
    with testing.fake_machine(scans=[absent]), pytest.raises(DeviceNotFoundError, match=words):
        anydevice.device("cuda")


def test_an_engine_is_free_until_somebody_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    picked = anydevice.device("cpu")
    assert picked.engine == "numpy"
    assert picked.engine_is_free
    assert anydevice.device(picked).engine_is_free
    with anydevice.use_device("cpu"):
        assert anydevice.device().engine_is_free
    assert pickle.loads(pickle.dumps(picked)).engine_is_free

    named = anydevice.device("cpu", engine="numpy")
    assert not named.engine_is_free
    assert not anydevice.device(named).engine_is_free
    with anydevice.use_device("cpu", engine="numpy"):
        assert not anydevice.device().engine_is_free
    assert not pickle.loads(pickle.dumps(named)).engine_is_free

    monkeypatch.setenv("ANYDEVICE_ENGINE", "numpy")
    assert not anydevice.device("cpu").engine_is_free


def test_where_one_device_is_used_a_list_is_refused(tmp_path: Path) -> None:
    """`device` takes it in order of priority; elsewhere it might be meant for several at once."""
    x, several = numpy.ones(2), ["cpu:0", "cpu:1"]
    for call in (
        lambda: anydevice.to_device(x, several),  # type: ignore[arg-type]
        lambda: nn.build(nn.Dense(2, 2), device=several),  # type: ignore[arg-type]
        lambda: nn.load(tmp_path / "no.safetensors", several),  # type: ignore[arg-type]
        lambda: anydevice.compile(numpy.sin, several),  # type: ignore[arg-type]
        lambda: anydevice.rng(0, several),  # type: ignore[arg-type]
        lambda: list(anydevice.prefetch([x], several)),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigurationError, match=r"this takes one device, not the list .*"):
            call()
    assert anydevice.device(several) == anydevice.Device("cpu:0")


def test_a_change_between_calls_counts_at_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm `device()` reads the environment and the settings files in every call."""
    file = user_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    with testing.fake_machine(keep_settings=True, cuda=2, rocm=1):
        assert [str(anydevice.device()) for _ in range(3)] == ["cuda:0"] * 3
        file.write_text('device = "rocm"\n')
        assert [str(anydevice.device()) for _ in range(3)] == ["rocm:0"] * 3
        file.write_text('device = "cpu" \n')
        assert str(anydevice.device()) == "cpu"
        monkeypatch.setenv("ANYDEVICE_DEVICE", "cuda:1")
        assert [str(anydevice.device()) for _ in range(3)] == ["cuda:1"] * 3
        monkeypatch.setenv("ANYDEVICE_DEVICE", "cuda:0")
        assert str(anydevice.device()) == "cuda:0"
        monkeypatch.delenv("ANYDEVICE_DEVICE")
        file.unlink()
        assert str(anydevice.device()) == "cuda:0"
