"""What every Python example of Artifex's document of its device manager calls, in its order.

The text is ours, the calls and their arguments are those of the examples, block by block. Each
runs on a machine without a GPU and on one with two fake GPUs, except where the example itself
needs a GPU or makes a model. In one call JAX has changed since: `shard.device()` is
`shard.device` today.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anydevice import configure, nn, to_numpy, use_device
from anydevice.compat.artifex import (
    MLP,
    DeviceCapabilities,
    DeviceConfiguration,
    DeviceDetector,
    DeviceManager,
    DeviceType,
    MemoryStrategy,
    configure_for_generative_models,
    get_default_device,
    get_device_manager,
    has_gpu,
    print_device_info,
)
from anydevice.errors import ConfigurationError
from tests.comparing import assert_close, assert_same_bits
from tests.machines import machine_of
from tests.programs import output_of

FLAX = "flax is not installed: the document's models are flax's"


@pytest.fixture(params=[0, 2], ids=["no GPU", "two GPUs"])
def gpus(request: pytest.FixtureRequest) -> Iterator[int]:
    """The number of GPUs of the machine that an example runs on."""
    with machine_of(cuda=request.param, memory="80GiB", engines=("jax", "numpy")):
        yield request.param


def warns_without(gpus: int, words: str) -> AbstractContextManager[Any]:
    """Expect a warning where there is no GPU to take."""
    return nullcontext() if gpus else pytest.warns(UserWarning, match=words)


# --- Quick start --------------------------------------------------------------------------------


def test_quick_start_and_capabilities(gpus: int) -> None:
    device_manager = DeviceManager()
    print(device_manager.has_gpu, device_manager.device_count, device_manager.gpu_count)
    info = device_manager.get_device_info()
    print(info["backend"], info["default_device"])
    assert device_manager.gpu_count == gpus
    assert has_gpu() == device_manager.has_gpu == bool(gpus)
    assert bool(info["why_no_gpu"]) == (not gpus)
    assert info["backend"] == ("gpu" if gpus else "cpu")
    with warns_without(gpus, "using cpu: no acc"):
        device = get_default_device()
    print(device)
    assert jax.device_put(jnp.arange(4), device).device == device
    with jax.default_device(device):
        assert jnp.arange(4).device == device
    capabilities = device_manager.capabilities
    print(capabilities.device_count, capabilities.total_memory_mb, capabilities.cuda_version)
    print(capabilities.compute_capability, capabilities.supports_distributed)
    assert capabilities.device_type is (DeviceType.GPU if gpus else DeviceType.CPU)
    assert capabilities.supports_mixed_precision is bool(gpus)


# --- DeviceConfiguration ------------------------------------------------------------------------


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("strategy", "settings", "fraction"),
    [
        ("CONSERVATIVE", {"enable_x64": False, "enable_jit": True}, 0.6),
        ("CUSTOM", {"memory_fraction": 0.8, "enable_x64": False}, 0.8),
        ("CONSERVATIVE", {"memory_fraction": 0.5}, 0.5),
        ("AGGRESSIVE", {"enable_x64": False}, 0.9),
    ],
    ids=["basic", "custom fraction", "out of memory", "mixed precision training"],
)
def test_configuration(strategy: str, settings: dict[str, Any], fraction: float) -> None:
    config = DeviceConfiguration(memory_strategy=MemoryStrategy[strategy], **settings)
    manager = DeviceManager(config)
    assert manager.config is config
    assert manager.config.effective_memory_fraction == configure().memory_fraction == fraction
    assert manager.get_device_info()["memory_fraction"] == fraction


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("preallocate", "flags"),
    [
        ("false", "--xla_gpu_cuda_data_dir=/usr/local/cuda"),
        (None, "--xla_gpu_enable_fast_min_max=true --xla_gpu_triton_gemm_any=True"),
        ("false", None),
    ],
    ids=["variables", "tuning", "memory held by preallocation"],
)
def test_environment_variables(
    preallocate: str | None, flags: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": preallocate, "XLA_FLAGS": flags}
    given = {name: value for name, value in variables.items() if value}
    jax.devices()
    with pytest.warns(UserWarning, match="was set too late: JAX has already started"):
        DeviceManager(DeviceConfiguration(environment_variables=given))
    for name, value in given.items():
        assert set(value.split()) <= set(os.environ[name].split())


JAX_NOT_STARTED = """
from anydevice.compat.artifex import DeviceConfiguration, DeviceManager
config = DeviceConfiguration(
    environment_variables={
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=3",
    }
)
device_manager = DeviceManager(config)
print(len(device_manager.jax_manager.cpu_devices))
"""


def test_environment_variables_before_jax_starts() -> None:
    assert output_of("-W", "error", "-c", JAX_NOT_STARTED) == "3\n"


def test_a_flag_that_xla_no_longer_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The document's own flags would end the process when JAX starts."""
    gone, kept = "--xla_gpu_enable_triton_softmax_fusion", "--xla_gpu_triton_gemm_any=True"
    given = {"XLA_FLAGS": f"--xla_gpu_enable_fast_min_max=true {gone}=true {kept}"}
    monkeypatch.setenv("XLA_FLAGS", "")
    jax.devices()
    with (
        pytest.warns(UserWarning, match="was set too late: JAX has already started"),
        pytest.raises(ConfigurationError, match=f"has no flag {gone}; the nearest is"),
    ):
        DeviceManager(DeviceConfiguration(environment_variables=given))
    assert os.environ["XLA_FLAGS"] == f"--xla_gpu_enable_fast_min_max=true {kept}"


# --- JAXDeviceManager ---------------------------------------------------------------------------


def test_devices_and_data_distribution(gpus: int) -> None:
    manager = DeviceManager()
    jax_manager = manager.jax_manager
    all_devices, cpu_devices = jax_manager.devices, jax_manager.cpu_devices
    gpu_devices = jax_manager.gpu_devices
    with warns_without(gpus, "using cpu: no acc"):
        default_device = jax_manager.get_default_device()
    print(all_devices, gpu_devices, cpu_devices, default_device)
    assert len(gpu_devices) == gpus
    assert default_device in all_devices
    shards = jax_manager.distribute_data(jnp.ones((16, 8, 8, 3)))
    assert [shard.device for shard in shards] == (gpu_devices or cpu_devices)
    assert sum(len(shard) for shard in shards) == 16
    assert {shard.shape[1:] for shard in shards} == {(8, 8, 3)}
    first_two = gpu_devices[:2]
    with warns_without(gpus, "using the CPU"):
        shards = jax_manager.distribute_data(jnp.ones((8, 2)), target_devices=first_two)
    assert [shard.device for shard in shards] == first_two or not gpus
    assert 32 // manager.device_count == (16 if gpus else 32 // len(shards))


def test_the_call_that_jax_itself_no_longer_has() -> None:
    """If this fails, JAX has it again: then write `shard.device()` above, as the document does."""
    with pytest.raises(TypeError, match="not callable"):
        jnp.ones(3).device()


# --- Convenience functions ----------------------------------------------------------------------


def test_the_global_manager_and_its_summary(gpus: int, capsys: pytest.CaptureFixture[str]) -> None:
    print_device_info()
    printed = capsys.readouterr().out
    assert f"gpu count: {gpus}" in printed
    assert "memory fraction: 0.75" in printed
    dm = get_device_manager()
    assert dm.config.memory_strategy is MemoryStrategy.BALANCED
    config = DeviceConfiguration(memory_strategy=MemoryStrategy.AGGRESSIVE)
    dm = get_device_manager(config, force_reinit=True)
    assert dm.config.memory_strategy is MemoryStrategy.AGGRESSIVE
    dm = configure_for_generative_models(
        memory_strategy=MemoryStrategy.BALANCED, enable_mixed_precision=True
    )
    assert dm is get_device_manager()
    assert configure().mixed_precision
    optimal_config = dm.optimize_for_model_size(150_000_000)
    assert optimal_config.memory_strategy is MemoryStrategy.AGGRESSIVE


# --- Common patterns ----------------------------------------------------------------------------


def test_pattern_training_setup(gpus: int) -> None:
    config = DeviceConfiguration(
        platform_priority=["cuda", "cpu"], enable_jit=True, memory_strategy=MemoryStrategy.BALANCED
    )
    first = DeviceManager(config)
    assert first.get_device_info()["default_device"] == ("cuda:0" if gpus else "cpu")
    fitting = DeviceManager(first.optimize_for_model_size(50_000_000))
    assert fitting.jax_manager.get_default_device() in fitting.jax_manager.devices
    assert fitting.gpu_count == gpus
    assert fitting.config.memory_strategy.value == "balanced"
    assert fitting.config.platform_priority == ["cuda", "cpu"]


def test_pattern_multi_gpu_data_parallel(gpus: int) -> None:
    nnx = pytest.importorskip("flax.nnx", reason=FLAX)
    manager = DeviceManager()
    assert (manager.gpu_count > 1) == bool(gpus)
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    copies = [jax.device_put(model, place) for place in manager.jax_manager.gpu_devices]
    places = [copy.kernel[...].device for copy in copies]
    assert places == manager.jax_manager.gpu_devices


# --- Performance tips ---------------------------------------------------------------------------


@pytest.mark.usefixtures("gpus")
def test_memory_optimization_and_jit_compilation() -> None:
    config = DeviceConfiguration(memory_strategy=MemoryStrategy.CONSERVATIVE, enable_jit=True)
    dm = DeviceManager(config)
    assert configure().memory_fraction == 0.6
    assert not jax.config.jax_disable_jit
    config.memory_strategy, config.enable_jit = MemoryStrategy.BALANCED, False
    assert dm.config.enable_jit is False
    again = DeviceManager(config)
    assert configure().memory_fraction == again.config.effective_memory_fraction == 0.75
    assert jax.config.jax_disable_jit


# --- Troubleshooting ----------------------------------------------------------------------------


def test_an_mlp_with_gradient_checkpointing() -> None:
    make = partial(MLP, hidden_dims=[64] * 20, in_features=64)
    with use_device("cpu"):
        mlp, plain, other = make(use_gradient_checkpointing=True), make(), make(rngs=1)
    assert "recomputed" in str(mlp)
    assert "recomputed" not in str(plain)
    x = jnp.ones((7, 64))

    def backward_of(model: nn.Model) -> Any:
        def loss(parameters: Any) -> Any:
            return model.layer.apply(parameters, x, nn.Run(training=True)).sum()

        return jax.vjp(loss, model.parameters)[1]

    def stored(model: nn.Model) -> int:
        """How many numbers of activations the backward pass holds."""
        arrays = jax.tree.leaves(backward_of(model))
        return sum(array.size for array in arrays if array.shape[:1] == (7,))

    assert_close(mlp(x), plain(x), terms=64 * 20)
    assert not np.allclose(mlp(x), other(x))
    for mine, right in zip(
        *(jax.tree.leaves(backward_of(each)(jnp.float32(1))) for each in (mlp, plain)), strict=True
    ):
        assert_close(mine, right, terms=64 * 20)
    assert stored(mlp) < stored(plain)


@use_device("cpu")
def test_an_mlp_as_it_is_asked_for() -> None:
    mlp = MLP([8, 3], 4, "relu", output_activation="softmax", dropout_rate=0.5, rngs=3)
    assert [layer for _, layer in mlp.layer.parts] == [
        nn.Dense(4, 8, activation="relu"),
        nn.Dropout(0.5),
        nn.Dense(8, 3, activation="softmax"),
    ]
    assert_close(np.asarray(mlp(jnp.ones((2, 4)))).sum(-1), np.ones(2, np.float32), terms=8)
    nnx = pytest.importorskip("flax.nnx", reason=FLAX)
    seeded = [MLP([3], 4, rngs=nnx.Rngs(seed)) for seed in (1, 1, 2)]
    weights = [to_numpy(model.parameters["weight"]) for model in seeded]
    assert_same_bits(weights[0], weights[1], because="the same seed, the same numbers")
    assert not np.allclose(weights[0], weights[2])
    assert MLP([3], 4, use_bias=False).parameter_count == 12
    with pytest.raises(ConfigurationError, match="at least one layer"):
        MLP([], 4)


@pytest.mark.usefixtures("gpus")
def test_slow_first_iteration() -> None:
    nnx = pytest.importorskip("flax.nnx", reason=FLAX)
    model = nnx.Linear(1, 4, rngs=nnx.Rngs(0))
    ahead = nnx.jit(lambda model, images: model(images))
    first = ahead(model, jnp.ones((1, 5, 5, 1)))
    assert first.shape == (1, 5, 5, 4)
    again = ahead(model, jnp.ones((1, 5, 5, 1)))
    assert_same_bits(first, again, because="the same compiled program, called twice")


# --- Advanced: custom detector ------------------------------------------------------------------


@pytest.mark.usefixtures("gpus")
def test_custom_detector() -> None:
    rack = DeviceCapabilities(
        compute_capability="8.0",
        device_count=4,
        device_type=DeviceType.GPU,
        supports_distributed=True,
        supports_mixed_precision=True,
        total_memory_mb=40_960,
    )
    detector = SimpleNamespace(detect_capabilities=lambda: rack)
    dm = DeviceManager(detector=detector)
    assert isinstance(detector, DeviceDetector)
    assert (dm.gpu_count, dm.capabilities.compute_capability) == (4, "8.0")
