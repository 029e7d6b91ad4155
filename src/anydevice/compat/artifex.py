"""Artifex's device management over anydevice: change the import, and its examples run.

>>> from anydevice.compat.artifex import DeviceManager, MemoryStrategy
>>> DeviceManager().optimize_for_model_size(500_000).memory_strategy is MemoryStrategy.CONSERVATIVE
True

A manager speaks of what JAX can drive. Nothing here imports JAX before one of its devices is
asked for.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace
from typing import Any

from anydevice.choose.discovery import discover
from anydevice.choose.report import Report
from anydevice.choose.scope import why
from anydevice.compat.artifex_capabilities import (
    CUDADetector,
    DeviceCapabilities,
    DeviceDetector,
    DeviceType,
    MachineDetector,
    why_no_gpu,
)
from anydevice.compat.artifex_configuration import DeviceConfiguration, MemoryStrategy
from anydevice.compat.artifex_models import MLP
from anydevice.compat.artifex_placement import JAXDeviceManager
from anydevice.engines import registry
from anydevice.errors import ConfigurationError

__all__ = [
    "MLP",
    "CUDADetector",
    "DeviceCapabilities",
    "DeviceConfiguration",
    "DeviceDetector",
    "DeviceManager",
    "DeviceType",
    "JAXDeviceManager",
    "MachineDetector",
    "MemoryStrategy",
    "configure_for_generative_models",
    "get_default_device",
    "get_device_manager",
    "has_gpu",
    "print_device_info",
]

_MEDIUM, _LARGE = 1_000_000, 100_000_000


class DeviceManager:
    """What this machine has for JAX, and the settings in force.

    A `config` takes effect for the whole process at once; without one nothing is changed, and
    `config` shows what is in force. A `detector` of your own says what the capabilities are; the
    devices of `jax_manager` are then still those that JAX really has.
    """

    def __init__(
        self, config: DeviceConfiguration | None = None, detector: DeviceDetector | None = None
    ) -> None:
        if config is not None:
            config.take_effect()
        self._config = config if config is not None else DeviceConfiguration.in_force()
        self._detector = detector if detector is not None else MachineDetector()
        self._detected: tuple[Report, DeviceCapabilities] | None = None

    @property
    def config(self) -> DeviceConfiguration:
        """The settings; a change takes effect with the next manager that is made with them."""
        return self._config

    @property
    def capabilities(self) -> DeviceCapabilities:
        """What the detector says; it is asked again when the machine is looked at again."""
        report = discover()
        if self._detected is None or self._detected[0] is not report:
            self._detected = (report, _ask(self._detector))
        return self._detected[1]

    @property
    def jax_manager(self) -> JAXDeviceManager:
        """The devices as JAX's own objects."""
        return JAXDeviceManager()

    @property
    def has_gpu(self) -> bool:
        """Whether the devices that compute are GPUs."""
        return self.capabilities.device_type is DeviceType.GPU

    @property
    def device_count(self) -> int:
        """How many devices compute: those of the best kind."""
        return self.capabilities.device_count

    @property
    def gpu_count(self) -> int:
        """How many of them are GPUs."""
        return self.device_count if self.has_gpu else 0

    def get_device_info(self) -> dict[str, Any]:
        """All of it as plain data.

        `backend` is JAX's word ("gpu", "tpu", "cpu") for where it computes by default, and
        `default_device` the device's name. `why_no_gpu` has a sentence for every cause, with what
        mends it, where JAX has no GPU or TPU.
        """
        capabilities, config = self.capabilities, self._config
        chosen = why(engine="jax").device
        return {
            "backend": chosen.kind if chosen else None,
            "default_device": str(chosen) if chosen else None,
            "device_type": capabilities.device_type.value,
            "device_count": capabilities.device_count,
            "gpu_count": self.gpu_count,
            "total_memory_mb": capabilities.total_memory_mb,
            "memory_strategy": config.memory_strategy.value,
            "memory_fraction": config.effective_memory_fraction,
            "mixed_precision": config.enable_mixed_precision,
            "compute_capability": capabilities.compute_capability,
            "cuda_version": capabilities.cuda_version,
            "driver_version": capabilities.driver_version,
            "jax_version": registry.version_of("jax"),
            "why_no_gpu": list(why_no_gpu()),
        }

    def optimize_for_model_size(self, parameter_count: int) -> DeviceConfiguration:
        """These settings with the memory strategy for a model of that many parameters.

        Below a million it is CONSERVATIVE, below a hundred million BALANCED, else AGGRESSIVE. The
        result takes effect when a manager is made with it.
        """
        if parameter_count < _MEDIUM:
            strategy = MemoryStrategy.CONSERVATIVE
        elif parameter_count < _LARGE:
            strategy = MemoryStrategy.BALANCED
        else:
            strategy = MemoryStrategy.AGGRESSIVE
        return replace(self._config, memory_strategy=strategy, memory_fraction=None)


_lock = threading.Lock()
_global: DeviceManager | None = None


def get_device_manager(
    config: DeviceConfiguration | None = None, force_reinit: bool = False
) -> DeviceManager:
    """The one manager of the process, made on first use; `force_reinit` makes it anew.

    A `config` for a manager that is there already is passed over with a warning.
    """
    global _global
    with _lock:
        if _global is None or force_reinit:
            _global = DeviceManager(config)
        elif config is not None and config != _global.config:
            warnings.warn(
                "the global device manager is there already and keeps its configuration; "
                "pass force_reinit=True to make it anew",
                stacklevel=2,
            )
        return _global


def has_gpu() -> bool:
    """Whether JAX has a GPU here."""
    return get_device_manager().has_gpu


def get_default_device() -> Any:
    """The `jax.Device` that anydevice chooses here, for `jax.device_put` and the like.

    It may be the CPU's, with one warning that says why.
    """
    return get_device_manager().jax_manager.get_default_device()


def print_device_info() -> None:
    """Print what `get_device_info` says, a line each, without what is unknown."""
    print("Devices for JAX")
    for name, value in get_device_manager().get_device_info().items():
        if isinstance(value, list):
            for sentence in value:
                print(f"  no GPU: {sentence}")
        elif value is not None:
            print(f"  {name.replace('_', ' ')}: {value}")


def configure_for_generative_models(
    memory_strategy: MemoryStrategy = MemoryStrategy.BALANCED,
    enable_mixed_precision: bool = True,
) -> DeviceManager:
    """The global manager, made anew with settings for generative models.

    They are compiled, in 32 bits, and in 16 where the device does that well and
    `enable_mixed_precision` is on.
    """
    config = DeviceConfiguration(
        memory_strategy=memory_strategy,
        enable_x64=False,
        enable_jit=True,
        enable_mixed_precision=enable_mixed_precision,
    )
    return get_device_manager(config, force_reinit=True)


def _ask(detector: DeviceDetector) -> DeviceCapabilities:
    said = detector.detect_capabilities()
    if not isinstance(said, DeviceCapabilities):
        raise ConfigurationError(
            f"{type(detector).__name__}.detect_capabilities() returned {said!r} instead of "
            "DeviceCapabilities"
        )
    return said
