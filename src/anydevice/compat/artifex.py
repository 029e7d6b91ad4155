"""Artifex's configuration: the same settings as `anydevice.configure`, under Artifex's names.

What a machine can do, in Artifex's words, and who finds it out.

Artifex's placement: JAX's own devices, and data divided among them.

Artifex's `MLP`, as a model of anydevice: it moves, compiles, trains and saves like any other.

Artifex's device management over anydevice: change the import, and its examples run.

>>> from anydevice.compat.artifex import DeviceManager, MemoryStrategy
>>> DeviceManager().optimize_for_model_size(500_000).memory_strategy is MemoryStrategy.CONSERVATIVE
True

A manager speaks of what JAX can drive. Nothing here imports JAX before one of its devices is
asked for.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import Any, Protocol, Self, runtime_checkable

from anydevice.choose.scope import device, why
from anydevice.choose.scope import device as choose_device
from anydevice.core.choice import accelerators_passed_over
from anydevice.core.device import Device
from anydevice.core.finding import compare_versions
from anydevice.discovery._discover import devices, discover
from anydevice.discovery.report import Report
from anydevice.engines import registry
from anydevice.errors import ConfigurationError, DeviceNotFoundError
from anydevice.nn.layer import Layer
from anydevice.nn.layers import Chain, Dense, Dropout
from anydevice.nn.model import Model
from anydevice.nn.recompute import recompute
from anydevice.settings.config import STRATEGIES, Config, change, current

_PLATFORMS = {"gpu": ("cuda", "rocm", "metal")}


class MemoryStrategy(Enum):
    """How much of a GPU's memory this process may take: 60 %, 75 %, 90 %, or a fraction."""

    CONSERVATIVE = "conservative"
    BALANCED = "balanced"
    AGGRESSIVE = "aggressive"
    CUSTOM = "custom"


@dataclass
class DeviceConfiguration:
    """Settings for a `DeviceManager`, which lets them take effect; they may be changed until then.

    An explicit `memory_fraction` goes before the strategy; `MemoryStrategy.CUSTOM` needs one.
    `platform_priority` names backends ("cuda", "rocm", "tpu", "cpu"), or "gpu" for every GPU.
    `environment_variables` are set for the whole process, `XLA_FLAGS` merged with those there are.
    """

    memory_strategy: MemoryStrategy = MemoryStrategy.BALANCED
    memory_fraction: float | None = None
    enable_x64: bool = False
    enable_jit: bool = True
    platform_priority: Sequence[str] | None = None
    environment_variables: Mapping[str, str] = field(default_factory=dict)
    enable_mixed_precision: bool = False

    @classmethod
    def in_force(cls) -> Self:
        """The settings that `anydevice.configure` and the settings files have set here.

        Where they limit no memory, the strategy is Artifex's default, which it is until it takes
        effect.
        """
        config, _ = current()
        return cls(
            memory_strategy=_strategy(config),
            memory_fraction=None if config.memory in STRATEGIES else config.memory_fraction,
            enable_x64=config.x64,
            enable_jit=config.jit,
            platform_priority=list(config.order) or None,
            environment_variables=dict(config.env),
            enable_mixed_precision=config.mixed_precision,
        )

    @property
    def effective_memory_fraction(self) -> float | None:
        """The share that counts: the explicit one, else the strategy's.

        `None` where `anydevice.configure` was given an amount such as "20GiB" instead of a share.
        """
        if self.memory_fraction is not None:
            return self.memory_fraction
        return STRATEGIES.get(self.memory_strategy.value)

    def take_effect(self) -> None:
        """Make these the settings of the process, all of them or, where one is wrong, none.

        Raises `ConfigurationError` for a wrong value. What comes too late for JAX, because it has
        started already, is said in a warning, and so is `MemoryStrategy.AGGRESSIVE` on a GPU that
        others use too.
        """
        order = [
            backend
            for platform in self.platform_priority or ()
            for backend in _PLATFORMS.get(platform, (platform,))
        ]
        change(
            {
                "memory": self._share(),
                "x64": self.enable_x64,
                "jit": self.enable_jit,
                "mixed_precision": self.enable_mixed_precision,
                "order": order or None,
                "env": dict(self.environment_variables) or None,
            },
            insist=False,
        )

    def _share(self) -> str | float:
        fraction = self.memory_fraction
        if fraction is None:
            if self.memory_strategy is MemoryStrategy.CUSTOM:
                raise ConfigurationError(
                    "MemoryStrategy.CUSTOM says nothing by itself; give memory_fraction too, "
                    "such as memory_fraction=0.8"
                )
            return str(self.memory_strategy.value)
        if not 0 < fraction <= 1:
            raise ConfigurationError(
                f"memory_fraction={fraction!r} is not a share: it is above 0 and at most 1"
            )
        return fraction


def _strategy(config: Config) -> MemoryStrategy:
    if config.memory is None:
        return MemoryStrategy.BALANCED
    named = config.memory in STRATEGIES
    return MemoryStrategy(config.memory) if named else MemoryStrategy.CUSTOM


_OLDEST_WITH_TENSOR_CORES = "7.0"


class DeviceType(Enum):
    """The kind of device that computes."""

    CPU = "cpu"
    GPU = "gpu"
    TPU = "tpu"


@dataclass(frozen=True)
class DeviceCapabilities:
    """The devices of the best kind that this machine has, and what they can do.

    `total_memory_mb` is the memory of one of them, in units of 2**20 bytes. What nobody could
    tell, or what a CPU does not have, is `None`.
    """

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
    """Whatever has this one method can be given to a `DeviceManager`.

    For every choice of anydevice, not only a manager's, a package offers a probe by the entry
    point `anydevice.probes` instead.
    """

    def detect_capabilities(self) -> DeviceCapabilities:
        """What there is to compute on."""
        ...


class MachineDetector:
    """What anydevice found on this machine that JAX can drive: the detector of a manager."""

    def detect_capabilities(self) -> DeviceCapabilities:
        """The first backend, in order of choice, that is not the CPU; else the CPU."""
        accelerators = [place for place in jax_places() if place.kind != "cpu"]
        first = accelerators[0].backend if accelerators else "cpu"
        return capabilities_of(jax_places(first))


class CUDADetector:
    """NVIDIA GPUs alone: any other accelerator does not count."""

    def detect_capabilities(self) -> DeviceCapabilities:
        """The NVIDIA GPUs that JAX can drive, or the CPU where there is none."""
        return capabilities_of(jax_places("cuda") or jax_places("cpu"))


def jax_places(kind: str | None = None) -> tuple[Device, ...]:
    """The usable devices that JAX can drive, in order of choice; one kind or backend if asked."""
    return tuple(
        place.served_by("jax")
        for place in devices(kind)
        if place.standing and "jax" in place.standing.engines
    )


def capabilities_of(places: tuple[Device, ...]) -> DeviceCapabilities:
    """What equal devices can do together, read from the first of them."""
    if not places:  # JAX is not installed: the CPU is there all the same
        return DeviceCapabilities(DeviceType.CPU, device_count=1)
    first, count = places[0], len(places)
    facts = first.facts
    if first.kind == "cpu":
        return DeviceCapabilities(DeviceType.CPU, count, supports_distributed=count > 1)
    total = facts.total_memory
    return DeviceCapabilities(
        device_type=DeviceType(first.kind),
        device_count=count,
        total_memory_mb=None if total is None else total // 2**20,
        compute_capability=facts.compute_capability,
        cuda_version=facts.runtime_version if first.backend == "cuda" else None,
        driver_version=facts.driver_version,
        supports_mixed_precision=_is_quick_in_16_bits(first),
        supports_distributed=count > 1,
    )


def why_no_gpu() -> tuple[str, ...]:
    """Why JAX has no GPU or TPU here, a sentence for each cause, with what mends it.

    Empty where it has one.
    """
    if any(place.kind != "cpu" for place in jax_places()):
        return ()
    report = discover()
    other = [place for place in report.devices if place.usable and place.kind != "cpu"]
    sentences = (*accelerators_passed_over(report.findings), *map(_not_for_jax, other))
    return sentences or ("no accelerator is in this machine",)


def _not_for_jax(place: Device) -> str:
    standing = place.standing
    for refusal in standing.refusals if standing else ():
        if refusal.engine == "jax":
            mend = f" (mend: {refusal.mend})" if refusal.mend else ""
            return f"{place} is usable, but not by JAX: {refusal.reason}{mend}"
    return f"{place} is usable, but JAX does not drive {place.backend}"


def _is_quick_in_16_bits(place: Device) -> bool:
    if place.backend != "cuda":
        return True
    capability = place.facts.compute_capability
    return capability is not None and compare_versions(capability, _OLDEST_WITH_TENSOR_CORES) >= 0


class JAXDeviceManager:
    """The devices of this machine as JAX's own objects, for `jax.device_put` and the like."""

    @property
    def devices(self) -> list[Any]:
        """Every device that JAX can drive: accelerators first, then the CPU."""
        return [place.native for place in jax_places()]

    @property
    def gpu_devices(self) -> list[Any]:
        """The GPUs that JAX can drive; none where there is none."""
        return [place.native for place in jax_places("gpu")]

    @property
    def cpu_devices(self) -> list[Any]:
        """The CPU, or as many CPU devices as JAX was told to show."""
        return [place.native for place in jax_places("cpu")]

    def get_default_device(self) -> Any:
        """The `jax.Device` that anydevice chooses here.

        It may be the CPU's, with one warning that says why. Raises `DeviceNotFoundError` where
        JAX is not installed or does not drive the device that is asked for.
        """
        return device(engine="jax").native

    def distribute_data(self, data: Any, target_devices: Sequence[Any] | None = None) -> list[Any]:
        """`data` cut along its first axis, one piece a device, each piece on its device.

        `data` is an array or any nest of arrays with the same first axis. What is left over goes
        to the first devices, one row each; with fewer rows than devices, the last ones get none.
        Without `target_devices` it is every GPU, else every TPU, else every CPU device.
        """
        import jax

        targets = self._best() if target_devices is None else list(target_devices)
        if not targets:
            raise DeviceNotFoundError(
                "target_devices is empty; leave it out for the best devices of this machine. "
                + "; ".join(why_no_gpu())
            )
        bounds = _bounds(_rows(jax.tree.leaves(data)), len(targets))
        return [
            jax.device_put(_cut(jax, data, start, stop), target)
            for (start, stop), target in zip(bounds, targets, strict=False)
        ]

    def _best(self) -> list[Any]:
        places = jax_places("gpu") or jax_places("tpu") or jax_places("cpu")
        return [place.native for place in places]


def _cut(jax: Any, data: Any, start: int, stop: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[start:stop], data)


def _rows(leaves: Sequence[Any]) -> int:
    shapes = [getattr(leaf, "shape", ()) for leaf in leaves]
    lengths = {shape[0] if shape else None for shape in shapes}
    if len(lengths) == 1 and (rows := lengths.pop()) is not None:
        return int(rows)
    raise ConfigurationError(
        "distribute_data cuts along the first axis, which must be there and equally long in every "
        f"array; the shapes are {', '.join(map(str, shapes)) or 'none: there is no array'}"
    )


def _bounds(rows: int, pieces: int) -> Iterator[tuple[int, int]]:
    """Where to cut, the longer pieces first.

    >>> list(_bounds(10, 3)), list(_bounds(2, 3)), list(_bounds(0, 3))
    ([(0, 4), (4, 7), (7, 10)], [(0, 1), (1, 2)], [(0, 0)])
    """
    each, left_over = divmod(rows, pieces)
    start = 0
    for piece in range(min(pieces, rows) or 1):
        stop = start + each + (piece < left_over)
        yield start, stop
        start = stop


def MLP(  # noqa: N802, a class there
    hidden_dims: Sequence[int],
    in_features: int,
    activation: str | None = "gelu",
    *,
    output_activation: str | None = None,
    dropout_rate: float = 0.0,
    use_bias: bool = True,
    use_gradient_checkpointing: bool = False,
    rngs: Any = None,
) -> Model:
    """Dense layers one after the other, on the default device of JAX; the last one is the output.

    `activation` follows every layer but the last, `output_activation` that one. With
    `use_gradient_checkpointing`, activations are computed again for gradients, and not kept.
    `rngs` is a seed, or flax's `nnx.Rngs`, of which one key is drawn.

    >>> from anydevice import use_device
    >>> with use_device("cpu"):
    ...     mlp = MLP([16, 16, 4], in_features=8, use_gradient_checkpointing=True, rngs=0)
    >>> mlp.output_shape, mlp.parameter_count
    ((4,), 484)

    Raises `ConfigurationError` where a size is not a whole number of 1 or more.
    """
    sizes = [in_features, *hidden_dims]
    if len(sizes) < 2:
        raise ConfigurationError("an MLP has one layer at least", "hidden_dims=")
    layers: list[Layer] = []
    for number, (inputs, outputs) in enumerate(pairwise(sizes), 1):
        last = number == len(sizes) - 1
        follows = output_activation if last else activation
        layers.append(Dense(inputs, outputs, bias=use_bias, activation=follows))
        if dropout_rate and not last:
            layers.append(Dropout(dropout_rate))
    model = Model(Chain(*layers), seed=_seed(rngs), device=choose_device(engine="jax"))
    return recompute(model) if use_gradient_checkpointing else model


def _seed(rngs: Any) -> int:
    if rngs is None or isinstance(rngs, int):
        return rngs or 0
    import jax

    return int(jax.random.bits(rngs.params()))


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
