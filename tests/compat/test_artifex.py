"""Artifex's rows: X1 X2 X3 X4 X5 X6 X7 X8 X9 X11, and where X12's causes are told."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anydevice
from anydevice import (
    ConfigurationError,
    Device,
    DeviceNotFoundError,
    configure,
    device,
    discover,
    nn,
)
from anydevice._core.dtypes import DTYPES
from anydevice._core.finding import BackendScan, Facts, RawDevice, Reason
from anydevice._core.record import replace
from anydevice._machine.discovery.discover import machine_from
from anydevice._machine.engines import registry
from anydevice._report.diagnosis import explain
from anydevice.compat.artifex import (
    MLP,
    CUDADetector,
    DeviceCapabilities,
    DeviceConfiguration,
    DeviceDetector,
    DeviceManager,
    DeviceType,
    JAXDeviceManager,
    MachineDetector,
    MemoryStrategy,
    configure_for_generative_models,
    get_default_device,
    get_device_manager,
    has_gpu,
    print_device_info,
)
from anydevice.testing import fake_backend
from tests.comparing import assert_same_bits
from tests.conftest import Site
from tests.machines import machine_of

JAX = ("jax", "numpy")
MIB = 2**20


def cpu_scan(total: int) -> BackendScan:
    """The CPU, with this much memory."""
    facts = Facts("a CPU", total_memory=total, usable_memory=total, free_memory=total)
    return BackendScan("cpu", present=True, devices=(RawDevice(0, "cpu", facts),))


def gpu(backend: str = "cuda", engines: tuple[str, ...] = JAX, **facts: object) -> BackendScan:
    """One GPU that JAX drives, with these facts."""
    every = {"name": "a card", "details": {"fake": True}, **facts}
    seen = RawDevice(0, "gpu", Facts(**every))  # type: ignore[arg-type]
    return BackendScan(backend, present=True, devices=(seen,), engines=engines)


class FourCards:
    """A detector that counts how often it is asked."""

    asked = 0

    def detect_capabilities(self) -> DeviceCapabilities:
        self.asked += 1
        return DeviceCapabilities(DeviceType.GPU, 4, 80_000, "8.0", supports_mixed_precision=True)


# --- X1, X5: the manager and the capabilities ---------------------------------------------------


def test_a_manager_on_a_machine_without_a_gpu() -> None:
    with machine_of():
        manager = DeviceManager()
        assert (manager.has_gpu, manager.gpu_count) == (False, 0)
        assert manager.device_count == len(manager.jax_manager.cpu_devices)
        info = manager.get_device_info()
    assert (info["backend"], info["default_device"]) == ("cpu", "cpu")
    assert info["why_no_gpu"] == ["no accelerator is in this machine"]


def test_a_manager_on_a_machine_with_two_gpus() -> None:
    with machine_of(cuda=2, memory="80GiB", engines=JAX):
        manager = DeviceManager()
        assert (manager.has_gpu, manager.device_count, manager.gpu_count) == (True, 2, 2)
        assert isinstance(manager.config, DeviceConfiguration)
        assert isinstance(manager.jax_manager, JAXDeviceManager)
        info = manager.get_device_info()
    assert (info["backend"], info["default_device"]) == ("gpu", "cuda:0")
    assert (info["gpu_count"], info["why_no_gpu"]) == (2, [])
    assert info["jax_version"] == jax.__version__


def test_the_capabilities_of_gpus_have_every_field() -> None:
    with machine_of(cuda=2, memory="80GiB", engines=JAX):
        assert DeviceManager().capabilities == DeviceCapabilities(
            device_type=DeviceType.GPU,
            device_count=2,
            total_memory_mb=80 * 1024,
            compute_capability="9.0",
            cuda_version="13.0",
            driver_version="999.0",
            supports_mixed_precision=True,
            supports_distributed=True,
        )


@pytest.mark.parametrize(
    ("backend", "capability", "mixed"),
    [("cuda", "6.1", False), ("cuda", "7.0", True), ("cuda", None, False), ("rocm", None, True)],
)
def test_gpus_fast_in_16_bits_mix(backend: str, capability: str | None, mixed: bool) -> None:
    with machine_of(scans=[gpu(backend, compute_capability=capability)]):
        found = DeviceManager().capabilities
    assert found.supports_mixed_precision is mixed
    assert (found.supports_distributed, found.total_memory_mb) == (False, None)
    assert found.cuda_version is None


def test_the_capabilities_of_other_kinds() -> None:
    with machine_of(tpu=4, engines=JAX):
        manager = DeviceManager()
        assert manager.capabilities.device_type is DeviceType.TPU
        assert (manager.device_count, manager.gpu_count, manager.has_gpu) == (4, 0, False)
    with machine_of():
        found = DeviceManager().capabilities
    assert (found.device_type, found.total_memory_mb) == (DeviceType.CPU, None)
    assert not found.supports_mixed_precision


@pytest.mark.usefixtures("site")
def test_without_jax_the_cpu_is_all_there_is() -> None:
    with machine_of():
        assert DeviceManager().capabilities == DeviceCapabilities(DeviceType.CPU, 1)
        assert DeviceManager().get_device_info()["default_device"] is None
        with pytest.raises(DeviceNotFoundError, match="jax is not installed"):
            get_default_device()
        with pytest.raises(DeviceNotFoundError, match="jax is not installed"):
            MLP([2], 2)


# --- X2, X6: devices and data -------------------------------------------------------------------


def test_the_default_device_goes_into_jaxs_own_calls() -> None:
    with machine_of(cuda=2, engines=JAX):
        chosen = get_default_device()
        assert isinstance(chosen, jax.Device)
        assert jax.device_put(jnp.ones(3), chosen).device == chosen
        with jax.default_device(DeviceManager().jax_manager.gpu_devices[1]):
            assert jnp.zeros(2).device == DeviceManager().jax_manager.gpu_devices[1]


def test_the_default_device_may_be_the_cpu_with_a_warning() -> None:
    with machine_of(), pytest.warns(UserWarning, match="using cpu: no accelerator"):
        assert get_default_device().platform == "cpu"


def test_all_devices_gpus_and_cpus() -> None:
    with machine_of(cuda=2, engines=JAX):
        manager = DeviceManager().jax_manager
        assert len(manager.gpu_devices) == 2
        assert manager.cpu_devices == jax.devices("cpu")
        assert manager.devices == [*manager.gpu_devices, *manager.cpu_devices]
        assert all(isinstance(one, jax.Device) for one in manager.devices)
    with machine_of(cuda=1, engines=("torch",)):  # JAX does not drive it
        manager = DeviceManager()
        assert (manager.has_gpu, manager.jax_manager.gpu_devices) == (False, [])


@pytest.mark.parametrize(
    ("rows", "devices", "expected"),
    [(128, 2, [64, 64]), (10, 3, [4, 3, 3]), (2, 3, [1, 1]), (0, 3, [0]), (7, 1, [7])],
)
def test_data_is_divided_with_its_remainder(rows: int, devices: int, expected: list[int]) -> None:
    data = jnp.arange(rows * 2).reshape(rows, 2)
    with machine_of(cuda=devices, engines=JAX):
        manager = DeviceManager().jax_manager
        shards = manager.distribute_data(data)
        assert [shard.device for shard in shards] == manager.gpu_devices[: len(expected)]
    assert [len(shard) for shard in shards] == expected
    assert_same_bits(np.concatenate(shards), data, because="only divided and copied")


def test_data_is_divided_among_chosen_devices_and_in_trees() -> None:
    batch = {"x": np.ones((5, 3), np.float32), "y": np.arange(5, dtype=np.int32)}
    with machine_of(cuda=3, engines=JAX):
        manager = DeviceManager().jax_manager
        chosen = manager.gpu_devices[1:]
        for targets in (chosen, np.array(chosen), iter(chosen), tuple(chosen)):
            shards = manager.distribute_data(batch, target_devices=targets)
            assert [s["y"].device for s in shards] == chosen
            assert [s["y"].tolist() for s in shards] == [[0, 1, 2], [3, 4]]
            assert [s["x"].shape for s in shards] == [(3, 3), (2, 3)]


def test_without_gpus_data_is_divided_among_tpus_or_cpus() -> None:
    data = jnp.ones((16, 2))
    with machine_of(tpu=2, engines=JAX):
        assert len(DeviceManager().jax_manager.distribute_data(data)) == 2
    with machine_of():
        manager = DeviceManager().jax_manager
        assert len(manager.distribute_data(data)) == len(manager.cpu_devices)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"x": np.ones((5, 3)), "y": np.ones(4)}, r"the shapes are \(5, 3\), \(4,\)"),
        (np.float32(1), r"the shapes are \(\)"),
        (3, r"the shapes are \(\)"),
        ({}, "there is no array"),
    ],
)
def test_data_that_cannot_be_divided_is_refused(data: object, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        JAXDeviceManager().distribute_data(data)


def test_an_empty_list_of_devices_falls_back_to_the_cpu_with_a_warning() -> None:
    data = jnp.arange(16).reshape(8, 2)
    with machine_of():
        manager = DeviceManager().jax_manager
        with pytest.warns(UserWarning, match=r"using the CPU: target_devices is empty: no accel"):
            shards = manager.distribute_data(data, target_devices=manager.gpu_devices[:2])
        assert [shard.device for shard in shards] == jax.devices("cpu")
    assert_same_bits(np.concatenate(shards), data, because="only divided and copied")
    with machine_of(cuda=2, engines=JAX):
        manager = DeviceManager().jax_manager
        with pytest.warns(UserWarning, match="is empty: although there is cuda:0, cuda:1"):
            shards = manager.distribute_data(data, target_devices=manager.gpu_devices[2:])
        assert [shard.device for shard in shards] == manager.cpu_devices


# --- X3, X4, X8, X9: settings -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "fraction"), [("CONSERVATIVE", 0.60), ("BALANCED", 0.75), ("AGGRESSIVE", 0.90)]
)
def test_a_strategy_is_a_share_and_an_explicit_fraction_wins(
    strategy: str, fraction: float
) -> None:
    chosen = MemoryStrategy[strategy]
    with machine_of():
        manager = DeviceManager(DeviceConfiguration(memory_strategy=chosen))
        assert manager.get_device_info()["memory_fraction"] == fraction
        assert (configure().memory, configure().memory_fraction) == (chosen.value, fraction)
        DeviceManager(DeviceConfiguration(memory_strategy=chosen, memory_fraction=0.5))
        assert configure().memory_fraction == 0.5
        custom = DeviceConfiguration(memory_strategy=MemoryStrategy.CUSTOM, memory_fraction=0.8)
        assert DeviceManager(custom).config.effective_memory_fraction == 0.8
        assert configure().memory == 0.8


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (DeviceConfiguration(memory_fraction=10**9), "at most 1"),
        (DeviceConfiguration(memory_fraction="20GiB"), "at most 1"),  # type: ignore[arg-type]
        (DeviceConfiguration(memory_strategy=None), "CUSTOM needs memory_fraction"),
        (DeviceConfiguration(MemoryStrategy.CUSTOM), "CUSTOM needs memory_fraction"),
        (DeviceConfiguration(memory_fraction=80), "at most 1, not 80"),
        (DeviceConfiguration(memory_fraction=0), "at most 1, not 0"),
        (DeviceConfiguration(platform_priority=["mps"]), "did you mean 'metal'"),
        (DeviceConfiguration(enable_x64="yes"), "neither True nor False"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_setting_changes_nothing(config: DeviceConfiguration, words: str) -> None:
    before = configure()
    with pytest.raises(ConfigurationError, match=words):
        DeviceManager(config)
    assert configure() == before


def test_64_bits_and_compiling_reach_jax() -> None:
    DeviceManager(DeviceConfiguration(enable_x64=True, enable_jit=False))
    assert jnp.ones(1, np.float64).dtype == np.float64
    assert jax.config.jax_disable_jit
    assert (os.environ["JAX_ENABLE_X64"], os.environ["JAX_DISABLE_JIT"]) == ("1", "1")
    DeviceManager(DeviceConfiguration())
    assert jnp.ones(1).dtype == np.float32
    assert not jax.config.jax_disable_jit


@pytest.mark.parametrize(
    ("priority", "expected"),
    [
        *((["rocm", "cuda"], "rocm:0"), (["cpu"], "cpu"), (["gpu", "cpu"], "cuda:0")),
        *((["tpu", "cpu"], "cpu"), (None, "cuda:0")),
    ],
)
def test_the_priority_of_platforms_decides(priority: list[str] | None, expected: str) -> None:
    with machine_of(cuda=1, rocm=1, engines=JAX):
        manager = DeviceManager(DeviceConfiguration(platform_priority=priority))
        assert manager.get_device_info()["default_device"] == expected
        assert str(device()) == expected


def test_environment_variables_are_set_and_flags_merged() -> None:
    jax.devices()  # flags come too late then, which is said
    flags = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level"
    os.environ["XLA_FLAGS"] = f"{os.environ['XLA_FLAGS']} {flags}=1"
    variables = {"MY_VARIABLE": "1", "XLA_FLAGS": "--xla_gpu_autotune_level=2"}
    with pytest.warns(UserWarning, match="XLA_FLAGS was set too late: JAX has already started"):
        DeviceManager(DeviceConfiguration(environment_variables=variables))
    assert os.environ["MY_VARIABLE"] == "1"
    assert os.environ["XLA_FLAGS"].endswith(f"{flags}=2")


def test_without_a_configuration_a_manager_shows_what_is_in_force() -> None:
    configure(memory="conservative", x64=True, order=["cpu"], mixed_precision=True)
    config = DeviceManager().config
    assert config == DeviceConfiguration(
        MemoryStrategy.CONSERVATIVE,
        enable_x64=True,
        platform_priority=["cpu"],
        enable_mixed_precision=True,
    )
    configure(memory=0.8)
    assert DeviceManager().config.effective_memory_fraction == 0.8
    configure(memory="20GiB")
    assert DeviceManager().config.memory_strategy is MemoryStrategy.CUSTOM
    assert DeviceManager().config.effective_memory_fraction is None
    assert configure().memory == "20GiB"


def test_without_any_setting_balanced_is_put_in_force() -> None:
    """The machine seems to have 256 MiB, of which MLX may then take three quarters and no more."""
    configure(memory=None)
    small = replace(cpu_scan(256 * MIB), engines=("mlx", "jax", "numpy"))
    mlx, place = registry.load("mlx"), Device("cpu", engine="mlx")
    kept: list[object] = []
    gc.collect()
    mlx.memory.release(place)
    with machine_of(scans=[small]):
        assert DeviceManager().get_device_info()["memory_fraction"] == 0.75
        assert (configure().memory, configure().memory_fraction) == ("balanced", 0.75)
        with pytest.raises(Exception) as caught:  # noqa: PT011, PT012 - a library's own
            while len(kept) < 64:
                kept.append(mlx.empty((1024, 1024), DTYPES["float32"], place))
        assert mlx.memory.ran_out(caught.value)
    assert 0.6 * 64 < len(kept) <= 0.75 * 64


def test_a_fraction_in_the_environment_is_left_to_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(memory=None)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    config = DeviceManager().config
    assert (config.memory_strategy, config.memory_fraction) == (MemoryStrategy.CUSTOM, 0.9)
    assert configure().memory is None
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.9"


def test_a_configuration_may_be_changed_and_used_again() -> None:
    config = DeviceConfiguration(memory_strategy=MemoryStrategy.CONSERVATIVE)
    DeviceManager(config)
    config.memory_strategy = MemoryStrategy.BALANCED
    assert configure().memory == "conservative"
    assert DeviceManager(config).config is config
    assert configure().memory == "balanced"


AGGRESSIVE = DeviceConfiguration(memory_strategy=MemoryStrategy.AGGRESSIVE)


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ({"cuda": 1, "memory": "16GiB", "free": "4GiB"}, "cuda:0, but only 4.0 GiB of its 16.0 G"),
        ({"scans": [gpu("rocm", memory_kind="unified")]}, "rocm:0, but its memory is the machine"),
    ],
)
def test_aggressive_on_a_shared_gpu_warns(machine: dict[str, Any], words: str) -> None:
    with (
        machine_of(engines=JAX, **machine),
        pytest.warns(UserWarning, match=f"90% of {words}"),
    ):
        DeviceManager(AGGRESSIVE)


def test_aggressive_on_a_gpu_of_ones_own_is_silent() -> None:
    with machine_of(cuda=1, memory="16GiB", free="15GiB", engines=JAX):
        DeviceManager(AGGRESSIVE)
    with machine_of(cuda=1, memory="16GiB", free="4GiB", engines=JAX):
        DeviceManager(DeviceConfiguration(memory_strategy=MemoryStrategy.CONSERVATIVE))
        DeviceManager(DeviceConfiguration(MemoryStrategy.AGGRESSIVE, memory_fraction=0.2))
    with machine_of(scans=[gpu(total_memory=2**34)]):  # nobody can tell what is free
        DeviceManager(AGGRESSIVE)


@pytest.mark.parametrize("mixed", [True, False])
def test_settings_for_generative_models(mixed: bool) -> None:
    with machine_of():
        manager = configure_for_generative_models(
            memory_strategy=MemoryStrategy.CONSERVATIVE, enable_mixed_precision=mixed
        )
        assert manager is get_device_manager()
        assert manager.get_device_info()["mixed_precision"] is mixed
        assert configure().mixed_precision is mixed
        assert configure().memory == "conservative"
        assert (configure().x64, configure().jit) == (False, True)


@pytest.mark.parametrize("mixed", [True, False])
def test_mixed_precision_is_what_models_are_compiled_for(mixed: bool) -> None:
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    with machine_of():
        configure_for_generative_models(enable_mixed_precision=mixed)
        model = nn.build(nn.Dense(64, 2), device="cpu")
        compiled = anydevice.compile(model, optimize="none")
        error = np.abs(np.asarray(compiled(x)) - np.asarray(model(x))).max()
        assert compiled.report.policy.name == ("mixed" if mixed else "float32")
        assert bool(error > 1e-4) is mixed, "16 bits are seen in the result"


@pytest.mark.parametrize(
    ("parameters", "strategy"),
    [
        *((0, "conservative"), (999_999, "conservative"), (1_000_000, "balanced")),
        *((99_999_999, "balanced"), (100_000_000, "aggressive")),
    ],
)
def test_the_strategy_follows_from_the_size_of_the_model(parameters: int, strategy: str) -> None:
    config = DeviceConfiguration(
        memory_fraction=0.5, enable_jit=False, platform_priority=["cuda", "cpu"]
    )
    optimal = DeviceManager(config).optimize_for_model_size(parameters)
    assert (optimal.memory_strategy.value, optimal.memory_fraction) == (strategy, None)
    assert (optimal.enable_jit, optimal.platform_priority) == (False, ["cuda", "cpu"])
    assert config.memory_fraction == 0.5


# --- X7: the global manager ---------------------------------------------------------------------


def test_there_is_one_global_manager_and_it_is_made_anew_on_demand() -> None:
    first = get_device_manager()
    assert get_device_manager() is first
    config = DeviceConfiguration(memory_strategy=MemoryStrategy.CONSERVATIVE)
    with pytest.warns(UserWarning, match="pass force_reinit=True"):
        assert get_device_manager(config) is first
    second = get_device_manager(config, force_reinit=True)
    assert second is not first
    assert get_device_manager(config) is second


def test_has_gpu_follows_the_machine() -> None:
    with machine_of():
        assert not has_gpu()
    with machine_of(cuda=1, engines=JAX):
        assert has_gpu()


def test_the_information_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with machine_of(cuda=2, memory="80GiB", engines=JAX):
        print_device_info()
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    device = {"backend: gpu", "default device: cuda:0", "device type: gpu", "device count: 2"}
    memory = {"gpu count: 2", "memory strategy: balanced", "memory fraction: 0.75"}
    versions = {"cuda version: 13.0", "driver version: 999.0", "compute capability: 9.0"}
    assert device | memory | versions | {f"jax version: {jax.__version__}"} <= set(lines)


# --- X11: a user's own detector -----------------------------------------------------------------


def test_a_detector_of_ones_own_says_what_the_manager_has() -> None:
    detector = FourCards()
    assert isinstance(detector, DeviceDetector)
    with machine_of():
        manager = DeviceManager(detector=detector)
        assert (manager.has_gpu, manager.gpu_count, manager.device_count) == (True, 4, 4)
        assert manager.capabilities.total_memory_mb == 80_000
        assert detector.asked == 1
        discover(refresh=True)
        assert manager.device_count == 4
        assert detector.asked == 2


@pytest.mark.filterwarnings("ignore:JAX's own functions take")  # it has three devices here
def test_a_detector_and_jax_tell_one_story() -> None:
    """All that a manager says and gives follows from what the detector counts."""
    data = jnp.ones((8, 2))
    with machine_of(cuda=6, engines=JAX):
        manager = DeviceManager(detector=FourCards())
        info, devices = manager.get_device_info(), manager.jax_manager.gpu_devices
        assert (info["gpu_count"], info["backend"], info["default_device"]) == (4, "gpu", "cuda:0")
        assert (len(devices), info["why_no_gpu"]) == (4, [])
        assert manager.jax_manager.get_default_device() == devices[0]
        shards = manager.jax_manager.distribute_data(data)
        assert [shard.device for shard in shards] == devices
        assert manager.jax_manager.devices == [*devices, *manager.jax_manager.cpu_devices]


def test_a_detector_that_counts_more_than_jax_has_is_told() -> None:
    with machine_of(cuda=1, engines=JAX):
        manager = DeviceManager(detector=FourCards())
        info = manager.get_device_info()
        assert (info["gpu_count"], info["backend"], info["default_device"]) == (4, "gpu", None)
        assert info["why_no_gpu"][0].startswith("the detector counts 4 of kind gpu, but JAX has 1")
        for use in (
            lambda: manager.jax_manager.gpu_devices,
            lambda: manager.jax_manager.devices,
            lambda: manager.jax_manager.get_default_device(),
            lambda: manager.jax_manager.distribute_data(jnp.ones((8, 2))),
        ):
            with pytest.raises(DeviceNotFoundError, match="the detector counts 4 of kind gpu"):
                use()
    with machine_of():
        causes = DeviceManager(detector=FourCards()).get_device_info()["why_no_gpu"]
    assert causes == [
        "the detector counts 4 of kind gpu, but JAX has 0 here: no accelerator is in this machine"
    ]


def test_a_detector_that_counts_no_gpu_hides_those_of_the_machine() -> None:
    cpu_only = SimpleNamespace(detect_capabilities=lambda: DeviceCapabilities(DeviceType.CPU, 1))
    with machine_of(cuda=2, engines=JAX):
        manager = DeviceManager(detector=cpu_only)
        info = manager.get_device_info()
        assert (manager.has_gpu, info["backend"], info["default_device"]) == (False, "cpu", "cpu")
        assert info["why_no_gpu"] == ["the detector counts no GPU"]
        assert manager.jax_manager.gpu_devices == []
        assert manager.jax_manager.get_default_device() == jax.devices("cpu")[0]
        shards = manager.jax_manager.distribute_data(jnp.ones((8, 2)))
        assert [shard.device for shard in shards] == jax.devices("cpu")


def test_a_detector_that_says_something_else_is_refused() -> None:
    wrong = SimpleNamespace(detect_capabilities=lambda: {"device_count": 4})
    with pytest.raises(ConfigurationError, match=r"Namespace.detect_capabilities\(\) returned"):
        _ = DeviceManager(detector=wrong).capabilities


def test_the_detector_of_cuda_sees_only_cuda() -> None:
    assert isinstance(CUDADetector(), DeviceDetector)
    with machine_of(cuda=2, rocm=1, engines=JAX):
        assert CUDADetector().detect_capabilities().device_count == 2
    with machine_of(rocm=1, engines=JAX):
        assert CUDADetector().detect_capabilities().device_type is DeviceType.CPU
        assert MachineDetector().detect_capabilities().device_type is DeviceType.GPU
        assert not DeviceManager(detector=CUDADetector()).has_gpu


PROBE = """
from anydevice.testing import fake_backend
from anydevice._core.record import replace
def look(limit):
    return replace(fake_backend('cuda', 1, engines=('jax',)), backend='npu')
"""


def test_a_probe_by_entry_point_counts_for_every_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Site(tmp_path)
    package.distribution("my-npu", "1.0", "[anydevice.probes]\nnpu = my_npu_probe:look\n")
    (tmp_path / "my_npu_probe.py").write_text(PROBE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    discover(refresh=True)
    assert str(device("npu")) == "npu:0"
    assert "npu" in {finding.backend for finding in discover()}
    sys.modules.pop("my_npu_probe", None)


# --- X12: why there is no GPU -------------------------------------------------------------------


def test_the_cause_is_told_where_no_gpu_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    reason = Reason("driver_missing", "no driver", "install it")
    broken = BackendScan("cuda", present=True, stage="driver", reason=reason)
    with machine_of(scans=[broken]):
        assert DeviceManager().get_device_info()["why_no_gpu"] == [
            "cuda stopped at driver: no driver (fix: install it)"
        ]
        print_device_info()
    assert "no GPU: cuda stopped at driver" in capsys.readouterr().out


def test_a_gpu_for_other_libraries_is_told_apart() -> None:
    with machine_of(metal=1, engines=("numpy",)):
        assert DeviceManager().get_device_info()["why_no_gpu"] == ["metal:0: jax does not drive it"]


@pytest.mark.usefixtures("cupy_for_cuda")
def test_a_jax_that_is_not_made_for_the_card_is_told(card: BackendScan) -> None:
    with machine_of(scans=[card]):
        said = DeviceManager().get_device_info()["why_no_gpu"]
    assert len(said) == 1
    assert said[0].startswith("cuda:0: jax is not installed")
    assert "(fix: pip install" in said[0]


@pytest.mark.parametrize(
    "stopped",
    [
        BackendScan.stopped("cuda", "driver_missing", "no NVIDIA driver is installed"),
        BackendScan.stopped("rocm", "no_device", "amdgpu did not take it", "sudo dmesg"),
        BackendScan.stopped("tpu", "a code of a probe", "it is odd", stage="device"),
        BackendScan(
            *("cuda", True, (RawDevice(0, "gpu", Facts("card"), Reason("card_unsupported", "no")),))
        ),
    ],
)
def test_the_fix_is_the_one_of_the_doctor(stopped: BackendScan) -> None:
    with machine_of(scans=[stopped]):
        (said,) = DeviceManager().get_device_info()["why_no_gpu"]
        (explained,) = explain(discover())
    assert explained.advice
    assert said.endswith(f"(fix: {explained.advice})")


@pytest.mark.needs("torch")
def test_the_fix_is_for_the_library_that_is_asked_about(card: BackendScan) -> None:
    """PyTorch and JAX are installed for the CPU alone: whoever asks for JAX is told JAX's fix."""
    with machine_of(scans=[card]):
        said = DeviceManager().get_device_info()["why_no_gpu"]
        with pytest.warns(UserWarning, match="using cpu: cuda:0: jax") as warned:
            get_default_device()
        with pytest.raises(DeviceNotFoundError) as refused:
            device("cuda", engine="jax")
        advice = {explained.code: explained.advice for explained in explain(discover())}
    for text in (*said, str(warned[0].message), str(refused.value)):
        assert 'pip install "jax[cuda12]"' in text
        assert "torch" not in text
    assert [reason.fix for reason in refused.value.reasons] == ['pip install "jax[cuda12]"']
    assert advice["plugin_missing"] == 'pip install "jax[cuda12]"'
    assert "torch" in advice["cpu_only_build"]


def test_the_machine_may_change_under_a_manager() -> None:
    machine = [fake_backend("cpu", 1, engines=JAX)]
    with machine_from(lambda limit: machine):
        manager = DeviceManager()
        assert not manager.has_gpu
        machine.append(fake_backend("cuda", 1, engines=JAX))
        discover(refresh=True)
        assert manager.has_gpu
