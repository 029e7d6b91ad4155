"""Memory limits: the part of a device that this process may use, set in each library."""

from __future__ import annotations

import os
from contextlib import suppress

from anydevice._core.device import Device
from anydevice._core.engine import Engine
from anydevice._core.locks import ForkSafeLock
from anydevice._core.record import Record
from anydevice._core.text import format_size
from anydevice._machine.discovery.discover import devices
from anydevice._machine.engines import registry
from anydevice._machine.engines.library_settings import Variables, jax_started
from anydevice._machine.settings.config import STRATEGIES, Config, on_memory

# `anydevice.configure` loads from here, so that the limits follow what it sets.
from anydevice._machine.settings.config import configure as configure
from anydevice.errors import ConfigurationError, DeviceNotFoundError

_JAX_BACKENDS = ("cuda", "rocm")
_JAX_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_JAX_FRACTIONS = (_JAX_FRACTION, "XLA_CLIENT_MEM_FRACTION")
"""The name that every release reads, and the one of later releases, which refuse both at once."""
_MUCH = STRATEGIES["aggressive"]


class Effect(Record):
    """The limit in bytes of one library on one device, and why it has no effect, if it has none."""

    engine: str
    device: Device
    limit: int
    why_not: str | None = None


_lock = ForkSafeLock(reentrant=True)
_config: Config | None = None
_effects: dict[tuple[str, Device], Effect] = {}
_jax_variables = Variables()


def check_limit(config: Config) -> None:
    """Raise `ConfigurationError` for a limit that comes too late for JAX."""
    for engine, device in started_jax():
        limit = limit_of(device, config)
        if limit is not None and (sentence := engine.memory.set_limit(device, limit)):
            raise ConfigurationError(
                f"configure(): memory={config.memory!r} comes too late: {sentence}", "configure()"
            )


def set_limit(config: Config | None) -> list[str]:
    """Limit every library to `config.memory`, or lift the limits; return warnings."""
    global _config
    with _lock.native:
        warned = _lift() if config is None else []
        _config = config
        if config is None:
            return warned
        registry.when_loaded(_hold)
        _tell_jax(config)
        for engine in registry.started_engines():
            _hold(engine)
        warned += [
            effect.why_not
            for effect in _effects.values()
            if effect.why_not and effect.device.kind != "cpu"
        ]
        return warned + _shared_gpus(config)


def told_to_jax() -> float | None:
    """Return the fraction of a GPU's memory that the environment gives JAX, or `None`."""
    for name in _JAX_FRACTIONS:
        with suppress(KeyError, ValueError):
            return float(os.environ[name])
    return None


def in_force() -> Config | None:
    """Return the settings whose limit is in force; `None` if there is no limit."""
    return _config


def limit_of(device: Device, config: Config) -> int | None:
    """Return the most bytes of a device that the settings allow; `None` if there is no limit.

    A fraction is one of the memory that this process could get, and no limit if that is unknown.
    An amount is never more than that memory.
    """
    try:
        facts = device.facts
    except DeviceNotFoundError:  # JAX may show several CPU devices where the machine has one
        return None
    total = facts.obtainable_memory
    if total is None:
        return config.memory_limit
    fraction = config.memory_fraction
    if fraction is not None:
        return int(total * fraction)
    return None if config.memory_limit is None else min(total, config.memory_limit)


def started_jax() -> list[tuple[Engine, Device]]:
    """Return JAX with each GPU that it has started; asks nothing of a JAX that has not."""
    if not jax_started():
        return []
    engine = registry.load("jax")
    return [(engine, device) for device in engine.devices() if device.backend in _JAX_BACKENDS]


def _hold(engine: Engine) -> None:
    """Set the limit in force in one library, on each of its devices."""
    with _lock.native:
        config = _config
        if config is None or (engine.name == "jax" and not jax_started()):
            return  # asking JAX for its devices would start it
        pairs = ((device, limit_of(device, config)) for device in engine.devices())
        limits = {device: limit for device, limit in pairs if limit is not None}
        if engine.shares_memory and limits:
            limits = dict.fromkeys(limits, min(limits.values()))
        for device, limit in limits.items():
            why_not = engine.memory.set_limit(device, limit)
            _effects[engine.name, device] = Effect(engine.name, device, limit, why_not)


def _lift() -> list[str]:
    """Lift every limit; returns warnings for those that stay."""
    warned = []
    for name, device in list(_effects):
        effect = _effects.pop((name, device))
        if effect.why_not is None:
            warned.append(registry.load(name).memory.set_limit(device, None))
    if _jax_variables:
        _jax_variables.put({})
        warned += [engine.memory.set_limit(device, None) for engine, device in started_jax()]
    return list(dict.fromkeys(sentence for sentence in warned if sentence))


def _tell_jax(config: Config) -> None:
    """Put JAX's fraction of a GPU into the environment, until it has started."""
    if jax_started():
        return
    fraction = config.memory_fraction
    if fraction is None:  # an amount: JAX takes one fraction for all GPUs
        shares = []
        for device in devices("gpu"):
            limit, total = limit_of(device, config), device.facts.total_memory
            if device.backend in _JAX_BACKENDS and limit and total:
                shares.append(limit / total)
        fraction = min(shares, default=None)
    variables: dict[str, str | None] = {}
    if fraction is not None:
        variables = {**dict.fromkeys(_JAX_FRACTIONS), _JAX_FRACTION: f"{fraction:.6f}"}
    _jax_variables.put(variables)


def _shared_gpus(config: Config) -> list[str]:
    """Return a warning for each GPU whose limit leaves too little for other programs."""
    share = config.memory_fraction
    if share is None or share < _MUCH:
        return []
    warned = []
    for device in devices("gpu"):
        facts = device.facts
        free, total = facts.free_memory, facts.total_memory
        if facts.memory_kind == "unified":
            reason = "its memory is the machine's, which every program shares"
        elif free is not None and total and free + _held_here(device) < share * total:
            reason = (
                f"only {format_size(free)} of its {format_size(total)} are free, and other "
                "programs hold much of the rest"
            )
        else:
            continue
        warned.append(
            f"memory={config.memory!r} lets this process take {share:.0%} of {device}, but "
            f"{reason}; memory='conservative' is for GPUs that are shared"
        )
    return warned


def _held_here(device: Device) -> int:
    """Return the bytes of a device that the loaded libraries of this process hold."""
    engines = (engine for engine in registry.started_engines() if device in engine.devices())
    uses = (engine.memory.use(device) for engine in engines)
    return sum(use.reserved for use in uses if use)


on_memory(check_limit, set_limit)
