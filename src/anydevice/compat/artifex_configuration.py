"""Artifex's configuration: the same settings as `anydevice.configure`, under Artifex's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

from anydevice.choose.settings import STRATEGIES, Config, change, current
from anydevice.errors import ConfigurationError

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
