"""Artifex's device manager over anydevice: change the import, and its examples run.

>>> from anydevice.compat.artifex import DeviceConfiguration, MemoryStrategy
>>> DeviceConfiguration(memory_strategy=MemoryStrategy.CONSERVATIVE).effective_memory_fraction
0.6
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import anydevice
from anydevice import ConfigurationError, DeviceNotFoundError, nn, parallel
from anydevice._core.choice import accelerators_passed_over
from anydevice._core.finding import compare_versions
from anydevice._core.locks import ForkSafeLock
from anydevice._core.text import warn
from anydevice._machine.choose.limits import told_to_jax
from anydevice._machine.choose.scope import why
from anydevice._machine.engines.registry import version_of
from anydevice._machine.settings.config import STRATEGIES, change
from anydevice._parallel.placing import row_ranges

MemoryStrategy = StrEnum("MemoryStrategy", ["CONSERVATIVE", "BALANCED", "AGGRESSIVE", "CUSTOM"])
DeviceType = StrEnum("DeviceType", ["CPU", "GPU", "TPU"])


@dataclass
class DeviceConfiguration:
    """Settings for a `DeviceManager`; `memory_fraction` overrides the strategy, CUSTOM needs it.

    The strategies are 60, 75 and 90 % of a GPU's memory. `platform_priority` lists backends, or
    "gpu" for all of them. `XLA_FLAGS` of `environment_variables` are merged.
    """

    memory_strategy: MemoryStrategy = MemoryStrategy.BALANCED
    memory_fraction: float | None = None
    enable_x64: bool = False
    enable_jit: bool = True
    platform_priority: Sequence[str] | None = None
    environment_variables: Mapping[str, str] = field(default_factory=dict)
    enable_mixed_precision: bool = False

    @property
    def effective_memory_fraction(self) -> float | None:
        """The explicit fraction, else the strategy's; `None` for an amount such as "20GiB"."""
        share = self.memory_fraction
        return STRATEGIES.get(self.memory_strategy) if share is None else share


@dataclass(frozen=True)
class DeviceCapabilities:
    """The devices of the best kind in this machine; `total_memory_mb` is in MiB, of one device."""

    device_type: DeviceType
    device_count: int
    total_memory_mb: int | None = None
    compute_capability: str | None = None
    cuda_version: str | None = None
    driver_version: str | None = None
    supports_mixed_precision: bool = False
    supports_distributed: bool = False


@runtime_checkable
class DeviceDetector(Protocol):
    """For `DeviceManager(detector=…)`; the entry point `anydevice.probes` is for every choice."""

    def detect_capabilities(self) -> DeviceCapabilities: ...


class MachineDetector:
    """The default detector: the best devices that JAX can drive, else the CPU."""

    backend: str | None = None

    def detect_capabilities(self) -> DeviceCapabilities:
        devices = _devices(self.backend) or _devices("cpu") or [anydevice.Device("cpu")]
        first, facts = devices[0], devices[0].facts
        count = sum(device.kind == first.kind for device in devices)
        cpu, cuda = first.kind == "cpu", first.backend == "cuda"
        total, capability = facts.total_memory, facts.compute_capability
        tensor_cores = not cuda or compare_versions(capability or "0", "7.0") >= 0
        return DeviceCapabilities(
            device_type=DeviceType(first.kind),
            device_count=count,
            total_memory_mb=None if cpu or total is None else total // 2**20,
            compute_capability=capability,
            cuda_version=facts.runtime_version if cuda else None,
            driver_version=facts.driver_version,
            supports_mixed_precision=tensor_cores and not cpu,
            supports_distributed=count > 1,
        )


class CUDADetector(MachineDetector):
    backend = "cuda"


class JAXDeviceManager:
    """JAX's devices, as far as the detector counts them; `DeviceNotFoundError` if JAX has fewer."""

    def __init__(self, detect: Callable[[], DeviceCapabilities] | None = None) -> None:
        self._detect = detect or MachineDetector().detect_capabilities

    devices = property(lambda self: _native([*self.counted(), *_devices("cpu")]))
    gpu_devices = property(lambda self: _native(d for d in self.counted() if d.kind == "gpu"))
    cpu_devices = property(lambda self: _native(_devices("cpu")))

    def get_default_device(self) -> Any:
        """Return the `jax.Device` of `device()`, or the first that the detector counts."""
        return self.default(anydevice.device(engine="jax")).native

    def distribute_data(self, data: Any, target_devices: Sequence[Any] | None = None) -> list[Any]:
        """Split a tree's rows over GPUs, else TPUs, else CPUs; empty targets warn and mean CPUs."""
        import jax

        targets = list(_native(self.counted()) if target_devices is None else target_devices)
        if target_devices is not None and not targets:
            here = ", ".join(str(device) for device in _devices() if device.kind != "cpu")
            reasons = _why_no_gpu() or [f"although there is {here}"]
            warn(f"using the CPU: target_devices is empty: {'; '.join(reasons)}")
        targets = targets or self.cpu_devices
        shapes = [tuple(getattr(leaf, "shape", ())) for leaf in jax.tree.leaves(data)]
        if len({shape[:1] for shape in shapes}) != 1 or () in shapes:
            shown = ", ".join(map(str, shapes)) or "none: there is no array"
            raise ConfigurationError(f"the first axes must be equally long; the shapes are {shown}")
        rows = shapes[0][0]
        ranges = row_ranges(rows, len(targets))
        return [
            jax.device_put(jax.tree.map(lambda leaf, ends=ends: leaf[slice(*ends)], data), target)
            for ends, target in zip(ranges, targets[: rows or 1], strict=False)
        ]

    def replicate_model(self, model: Any) -> list[Any]:
        """Return a copy of a model on each of the GPUs, else TPUs, else CPUs."""
        return parallel.replicate(model, self.counted() or _devices("cpu"))

    def default(self, chosen: anydevice.Device) -> anydevice.Device:
        """Return the chosen device, unless it is a GPU that the detector does not count."""
        counted = self.counted()
        if chosen.kind == "cpu" or chosen in counted:
            return chosen
        return (counted or _devices("cpu"))[0]

    def counted(self) -> list[anydevice.Device]:
        """Return the accelerators that the detector counts."""
        detected = self._detect()
        if detected.device_type is DeviceType.CPU:
            return []
        kind, count = detected.device_type.value, detected.device_count
        here = _devices(kind)
        if len(here) < count:
            reasons = "; ".join(_why_no_gpu()) or "the other devices are not usable by JAX"
            text = f"the detector counts {count} of kind {kind}, but JAX has {len(here)} here"
            raise DeviceNotFoundError(f"{text}: {reasons}", anydevice.discover().findings)
        return here[:count]


class DeviceManager:
    """The devices that the `detector` counts, and the settings in force.

    A `config` takes effect for the whole process, or raises `ConfigurationError` and changes
    nothing; settings that come too late for JAX warn. Without one, the settings in force stay, and
    BALANCED is set if nothing limits memory.
    """

    def __init__(
        self, config: DeviceConfiguration | None = None, detector: DeviceDetector | None = None
    ) -> None:
        self.config = _in_force() if config is None else _apply(config)
        self.jax_manager = JAXDeviceManager(lambda: self.capabilities)
        self._detector = detector or MachineDetector()
        self._report: anydevice.Report | None = None

    @property
    def capabilities(self) -> DeviceCapabilities:
        """The detector's answer; it is asked again after `discover(refresh=True)`."""
        if self._report is not anydevice.discover():
            self._detected = self._detector.detect_capabilities()
            self._report = anydevice.discover()
        if not isinstance(self._detected, DeviceCapabilities):
            call = f"{type(self._detector).__name__}.detect_capabilities()"
            raise ConfigurationError(f"{call} returned {self._detected!r}, not DeviceCapabilities")
        return self._detected

    @property
    def has_gpu(self) -> bool:
        return self.capabilities.device_type is DeviceType.GPU

    @property
    def device_count(self) -> int:
        return self.capabilities.device_count

    @property
    def gpu_count(self) -> int:
        return self.device_count if self.has_gpu else 0

    def get_device_info(self) -> dict[str, Any]:
        """Return devices, settings and versions as plain data, with causes in `why_no_gpu`."""
        chosen, causes = why(engine="jax").device, _why_no_gpu()
        try:
            default = chosen and self.jax_manager.default(chosen)
        except DeviceNotFoundError as error:
            default, causes = None, [str(error)]
        detected = self.capabilities
        if detected.device_type is DeviceType.CPU and not causes:
            causes = ["the detector counts no GPU"]
        return {
            "backend": default.kind if default else detected.device_type.value if chosen else None,
            "default_device": str(default) if default else None,
            **asdict(detected),
            "gpu_count": self.gpu_count,
            "memory_strategy": str(self.config.memory_strategy),
            "memory_fraction": self.config.effective_memory_fraction,
            "mixed_precision": self.config.enable_mixed_precision,
            "jax_version": version_of("jax"),
            "why_no_gpu": causes,
        }

    def optimize_for_model_size(self, parameter_count: int) -> DeviceConfiguration:
        """CONSERVATIVE below 1 million parameters, BALANCED below 100 million, else AGGRESSIVE."""
        size = (parameter_count >= 1_000_000) + (parameter_count >= 100_000_000)
        strategy = MemoryStrategy(list(STRATEGIES)[size])
        return replace(self.config, memory_strategy=strategy, memory_fraction=None)


_lock = ForkSafeLock()
_global: DeviceManager | None = None


def get_device_manager(
    config: DeviceConfiguration | None = None, force_reinit: bool = False
) -> DeviceManager:
    """Return the manager of the process; `force_reinit` replaces it, else a `config` warns."""
    global _global
    with _lock.native:
        if _global is None or force_reinit:
            _global = DeviceManager(config)
        elif config not in (None, _global.config):
            warn("config is ignored; pass force_reinit=True to apply it")
        return _global


def has_gpu() -> bool:
    return get_device_manager().has_gpu


def get_default_device() -> Any:
    """Return the `jax.Device` that `anydevice.device` chooses, with a warning if it is the CPU."""
    return get_device_manager().jax_manager.get_default_device()


def print_device_info() -> None:
    info = get_device_manager().get_device_info()
    causes = [("no GPU", cause) for cause in info.pop("why_no_gpu")]
    known = [(name, value) for name, value in (*info.items(), *causes) if value is not None]
    print("Devices for JAX", *(f"  {n.replace('_', ' ')}: {v}" for n, v in known), sep="\n")


def configure_for_generative_models(
    memory_strategy: MemoryStrategy = MemoryStrategy.BALANCED, enable_mixed_precision: bool = True
) -> DeviceManager:
    """Make a global manager with 32-bit numbers, compiled, and mixed precision if wanted."""
    config = DeviceConfiguration(memory_strategy, enable_mixed_precision=enable_mixed_precision)
    return get_device_manager(config, force_reinit=True)


def setup_data_parallel(model: Any, batch_size: int) -> tuple[list[Any], int]:
    """Return a copy of the model on each GPU, and the rows of a batch for each.

    To train over them with the losses of one device, call `nn.train(model, …, devices=…)`.
    """
    manager = get_device_manager()
    if manager.gpu_count < 2:
        return [model], batch_size
    return manager.jax_manager.replicate_model(model), batch_size // manager.gpu_count


def MLP(  # noqa: N802, its name
    hidden_dims: Sequence[int],
    in_features: int,
    activation: str | None = "gelu",
    *,
    output_activation: str | None = None,
    dropout_rate: float = 0.0,
    use_bias: bool = True,
    use_gradient_checkpointing: bool = False,
    rngs: Any = 0,
) -> nn.Model:
    """Return dense layers as a `nn.Model` on JAX's device; `rngs` is flax's `Rngs`, or a seed."""
    here = anydevice.device(engine="jax")
    if not hidden_dims:
        raise ConfigurationError("an MLP needs at least one layer", "hidden_dims=")
    *hidden, last = pairwise([in_features, *hidden_dims])
    layers: list[nn.Layer] = []
    for ends in hidden:
        layers += [nn.Dense(*ends, use_bias, activation), nn.Dropout(dropout_rate)]
    layers = [layer for layer in layers if dropout_rate or isinstance(layer, nn.Dense)]
    seed = rngs
    if callable(rngs):  # flax's streams of keys
        import jax

        seed = int(jax.random.bits(rngs()))
    model = nn.build(*layers, nn.Dense(*last, use_bias, output_activation), device=here, seed=seed)
    return nn.recompute(model) if use_gradient_checkpointing else model


def _devices(kind: str | None = None) -> list[anydevice.Device]:
    """Return the usable devices of a kind or backend that JAX can drive, accelerators first."""
    usable = [d for d in anydevice.devices(kind) if d.status and "jax" in d.status.engines]
    return [d.served_by("jax") for d in sorted(usable, key=lambda d: d.kind == "cpu")]


def _native(devices: Iterable[anydevice.Device]) -> list[Any]:
    return [device.native for device in devices]


def _why_no_gpu() -> list[str]:
    if any(device.kind != "cpu" for device in _devices()):
        return []
    causes = accelerators_passed_over(anydevice.discover().findings, "jax")
    return causes or ["no accelerator is in this machine"]


def _apply(config: DeviceConfiguration) -> DeviceConfiguration:
    share = config.memory_fraction
    memory = config.memory_strategy if share is None else share
    if memory not in STRATEGIES and not (isinstance(memory, int | float) and 0 < memory <= 1):
        text = f"CUSTOM needs memory_fraction above 0 and at most 1, not {share!r}"
        raise ConfigurationError(text, "memory_fraction=")
    gpus, priority = "cuda rocm metal", config.platform_priority or ()
    settings = {
        "memory": memory,
        "x64": config.enable_x64,
        "jit": config.enable_jit,
        "mixed_precision": config.enable_mixed_precision,
        "order": " ".join(gpus if name == "gpu" else name for name in priority) or None,
        "env": dict(config.environment_variables) or None,
    }
    change(settings, insist=False)
    return config


def _in_force() -> DeviceConfiguration:
    """Return the settings in force; sets BALANCED unless a setting or JAX's variable limits."""
    config, fraction = anydevice.configure(), told_to_jax()
    if config.memory is None and fraction is None:
        config = change({"memory": MemoryStrategy.BALANCED}, insist=False)
    named = config.memory in STRATEGIES
    strategy = MemoryStrategy(str(config.memory) if named else "custom")
    if config.memory is not None:
        fraction = None if named else config.memory_fraction
    order, env = list(config.order) or None, dict(config.env)
    x64, jit, mixed = config.x64, config.jit, config.mixed_precision
    return DeviceConfiguration(strategy, fraction, x64, jit, order, env, mixed)
