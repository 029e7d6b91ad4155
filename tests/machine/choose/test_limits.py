"""`configure(memory=…)`: which libraries are limited, when and by how much, and the warnings."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

import anydevice
from anydevice._core.device import Device
from anydevice._core.engine import MemoryUse
from anydevice._core.finding import BackendScan, Facts, RawDevice
from anydevice._machine.choose import limits
from anydevice._machine.engines import registry
from anydevice._machine.settings import config as settings
from anydevice._machine.settings.config import Config
from anydevice.errors import ConfigurationError
from anydevice.testing import fake_machine
from tests.programs import output_of

GIB = 2**30
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.fixture(autouse=True)
def clean(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (FRACTION, "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)


def in_child(script: str, **environment: str) -> dict[str, Any]:
    """Run a script in a process of its own; it prints one line of JSON."""
    printed = output_of("-W", "error", "-c", script, env={"XLA_FLAGS": "", **environment})
    answer: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return answer


class CardOfJax:
    """JAX's memory on a GPU that it has started with 75 GiB of 100; there is none here."""

    def use(self, device: Device) -> MemoryUse:
        return MemoryUse(GIB, 75 * GIB, limit=75 * GIB, preallocated=True)

    def set_limit(self, device: Device, limit: int | None) -> str | None:
        return None if limit == 75 * GIB else "JAX has already started; call it before"


class StartedJax:
    name = "jax"
    shares_memory = False
    memory = CardOfJax()

    def devices(self) -> tuple[Device, ...]:
        return (Device("cuda"), Device("cpu", 99))


@pytest.fixture
def jax_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX has started on a GPU, and no other library is loaded."""
    started = StartedJax()
    monkeypatch.setattr(limits, "jax_started", lambda: True)
    monkeypatch.setattr(registry, "jax_started", lambda: True)
    monkeypatch.setattr(registry, "load", lambda name: started)
    monkeypatch.setattr(registry, "loaded_engines", lambda: ("jax",))


def test_nothing_is_limited_unasked() -> None:
    anydevice.configure()
    anydevice.configure(time_limit=4)
    anydevice.device("cpu")
    assert limits._effects == {}
    assert FRACTION not in os.environ


@pytest.mark.parametrize(
    ("memory", "limit"),
    [(0.5, 8 * GIB), ("conservative", int(0.6 * 16 * GIB)), ("4GiB", 4 * GIB), ("1TiB", 16 * GIB)],
)
def test_a_share_is_of_the_device_and_an_amount_is_capped(memory: float | str, limit: int) -> None:
    with fake_machine(cuda=1, memory="16GiB"):
        assert limits.limit_of(Device("cuda"), Config(memory=memory)) == limit


def test_a_device_of_unknown_size_has_an_amount_but_no_share() -> None:
    unknown = BackendScan(
        "cuda", present=True, devices=(RawDevice(0, "gpu", Facts("a card")),), engines=("torch",)
    )
    with fake_machine(scans=[unknown]):
        assert limits.limit_of(Device("cuda"), Config(memory="4GiB")) == 4 * GIB
        assert limits.limit_of(Device("cuda"), Config(memory=0.5)) is None
    assert limits.limit_of(Device("cpu", 99), Config(memory=0.5)) is None


def test_without_a_setting_a_device_has_no_limit() -> None:
    assert limits.limit_of(Device("cpu"), Config()) is None


LATER = """
import json, sys
import anydevice
from anydevice._machine.engines import registry

anydevice.configure(memory="512MiB")
assert not {"mlx.core", "pyopencl", "torch"} & set(sys.modules)
limits = {}
for name in ("mlx", "opencl", "torch"):
    engine = registry.load(name)
    use = engine.memory.use(engine.devices()[0])
    limits[name] = use and use.limit
from anydevice._machine.choose import limits as held
limits["why"] = [e.why_not for e in held._effects.values() if e.engine == "torch"][0]
anydevice.configure(memory=None)
use = registry.load("mlx").memory.use(anydevice.Device("cpu"))
limits["lifted"] = use.limit
print(json.dumps(limits))
"""


@pytest.mark.needs("torch")
def test_a_library_that_loads_later_is_limited_then() -> None:
    answer = in_child(LATER)
    assert (answer["mlx"], answer["opencl"], answer["lifted"]) == (2**29, 2**29, None)
    assert answer["torch"] is None
    assert "has no effect" in answer["why"]


JAX = """
import json, os
import anydevice
from anydevice._machine.choose import limits as held
names = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
told = [[os.environ.get(name) for name in names]]
for memory in (0.6, "balanced", "1GiB", 0.9, None):
    anydevice.configure(memory=memory)
    told.append([os.environ.get(name) for name in names])
anydevice.configure(memory=0.5)
import jax
assert not jax._src.xla_bridge.backends_are_initialized()
from jaxlib import xla_client
options = xla_client.generate_pjrt_gpu_plugin_options()
jax.devices()
anydevice.configure(memory=0.7)  # JAX runs on the CPU alone, where it has no limit
after = [e.why_not for e in held._effects.values() if e.engine == "jax"]
print(json.dumps({"told": told, "fraction": options["memory_fraction"], "after": after}))
"""


def test_jax_is_told_before_it_starts() -> None:
    answer = in_child(JAX, XLA_CLIENT_MEM_FRACTION="0.3", JAX_PLATFORMS="cpu")
    own = [None, "0.3"]
    assert answer["told"] == [
        own,
        ["0.600000", None],
        ["0.750000", None],
        own,
        ["0.900000", None],
        own,
    ]
    assert answer["fraction"] == 0.5
    assert ["limit" in sentence for sentence in answer["after"]] == [True]


def test_an_amount_for_jax_is_the_smallest_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "jax_started", lambda: False)
    with fake_machine(cuda=1, rocm=1, metal=1, memory="16GiB", engines=("jax",)):
        anydevice.configure(memory="4GiB")
        assert os.environ[FRACTION] == "0.250000"
    anydevice.configure(memory=None)
    assert FRACTION not in os.environ


@pytest.mark.usefixtures("jax_on_a_gpu")
def test_too_late_for_jax_is_an_error_and_changes_nothing() -> None:
    with fake_machine(cuda=1, memory="100GiB"):
        before = anydevice.configure()
        with pytest.raises(ConfigurationError, match=r"memory=0.6 comes too late: JAX has already"):
            anydevice.configure(memory=0.6, time_limit=3)
        assert anydevice.configure() == before
        assert limits._effects == {}
        anydevice.configure(memory="balanced")  # what it has anyway
        assert [effect.why_not for effect in limits._effects.values()] == [None]
        with pytest.warns(UserWarning, match="JAX has already started"):
            anydevice.configure(memory=None)


@pytest.mark.usefixtures("jax_on_a_gpu")
def test_too_late_for_jax_is_a_warning_where_a_file_asks() -> None:
    Path("anydevice.toml").write_text("memory = 0.6\n")
    with fake_machine(cuda=1, memory="100GiB", keep_settings=True):
        with pytest.warns(UserWarning, match="JAX has already started"):
            anydevice.device("cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            anydevice.device("cpu")


@pytest.mark.usefixtures("jax_on_a_gpu")
def test_jax_is_told_anew_and_restarts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "jax_started", lambda: False)
    with fake_machine(cuda=1, memory="100GiB"):
        anydevice.configure(memory=0.6)
        monkeypatch.setattr(limits, "jax_started", lambda: True)
        with pytest.warns(UserWarning, match="JAX has already started"):
            anydevice.configure(memory=None)
        assert FRACTION not in os.environ


def test_a_file_s_value_limits_when_a_device_is_chosen_and_configure_wins() -> None:
    Path("anydevice.toml").write_text('memory = "2GiB"\n')
    mlx, cpu = registry.load("mlx").memory, Device("cpu")

    def limit() -> int | None:
        use = mlx.use(cpu)
        return use.limit

    anydevice.discover(refresh=True)
    assert limit() is None
    anydevice.device("cpu")
    assert limit() == 2 * GIB
    anydevice.configure(memory="1GiB")
    assert limit() == GIB
    anydevice.configure(memory=None)
    assert limit() == 2 * GIB
    settings.forget_changes()
    assert limit() is None


def test_devices_that_share_a_memory_share_the_smaller_limit() -> None:
    class Both:
        name = "both"
        shares_memory = True
        memory = CardOfJax()

        def devices(self) -> tuple[Device, ...]:
            return (Device("metal"), Device("cpu"))

    anydevice.configure(memory=0.5)
    with fake_machine(metal=1, memory="1GiB"):
        limits._hold(Both())  # type: ignore[arg-type]
        ours = [effect.limit for effect in limits._effects.values() if effect.engine == "both"]
    assert ours == [GIB // 2, GIB // 2]


def test_much_of_a_gpu_that_others_use_is_warned_of() -> None:
    with (
        fake_machine(cuda=1, memory="16GiB", free="4GiB"),
        pytest.warns(UserWarning, match=r"take 90% of cuda:0, but only 4.0 GiB of its 16.0 GiB"),
    ):
        anydevice.configure(memory="aggressive")
    with fake_machine(cuda=1, memory="16GiB", free="4GiB"):
        anydevice.configure(memory=0.8)
        anydevice.configure(memory="15GiB")
    with (
        fake_machine(metal=1, memory="16GiB"),
        pytest.warns(UserWarning, match="its memory is the machine's"),
    ):
        anydevice.configure(memory=0.95)


@pytest.mark.usefixtures("jax_on_a_gpu")
def test_what_this_process_holds_itself_is_not_others_use() -> None:
    with fake_machine(cuda=1, memory="100GiB", free="20GiB"):
        assert limits._held_here(Device("cuda")) == 75 * GIB
        with pytest.warns(UserWarning, match="already started") as said:
            settings.change({"memory": "aggressive"}, insist=False)
        assert not any("of its" in str(one.message) for one in said)


def test_free_memory_is_read_again_at_each_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that was passed over for want of memory is chosen once there is some."""
    from anydevice._core import hooks

    free = 2 * GIB

    def reading(backend: str, index: int, facts: Facts) -> Facts:
        return facts.__replace__(free_memory=free)

    # The hook is put back inside the block: later, it would be the hook of this fake machine.
    with fake_machine(cuda=1, memory="16GiB"), monkeypatch.context() as patch:
        patch.setattr(hooks.free_memory, "function", reading)
        with pytest.raises(anydevice.DeviceNotFoundError, match=r"2\.0 GiB"):
            anydevice.device("cuda", min_free="8GiB")
        free = 12 * GIB
        assert str(anydevice.device("cuda", min_free="8GiB")) == "cuda:0"
        free = 7 * GIB
        with pytest.raises(anydevice.DeviceNotFoundError, match=r"7\.0 GiB"):
            anydevice.device("cuda", min_free="8GiB")
