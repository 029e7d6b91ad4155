"""How much of a device this process may take, and how each array library is held to it.

Nothing is limited unless somebody asks: `configure(memory=…)`, or a settings file. A library that
is imported already is limited at once, any other when anydevice first loads it. JAX takes its
limit from the environment when it starts, so it is told there, and one that has started is an
error for who asked in a program, and a warning for who asked in a file.
"""

from __future__ import annotations

from anydevice.core.device import Device
from anydevice.core.engine import Engine
from anydevice.core.locks import ForkSafeLock
from anydevice.core.record import Record
from anydevice.core.text import format_size
from anydevice.discovery._discover import devices
from anydevice.engines import registry
from anydevice.engines.library_settings import Variables, jax_started
from anydevice.errors import ConfigurationError, DeviceNotFoundError
from anydevice.settings.config import STRATEGIES, Config

_JAX_BACKENDS = ("cuda", "rocm")
_JAX_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_JAX_VARIABLES = (_JAX_FRACTION, "XLA_CLIENT_MEM_FRACTION")
"""The name that every release reads, and that of later ones, which refuse to find both."""
_MUCH = STRATEGIES["aggressive"]


class Effect(Record):
    """What a budget does to one library on one device: a limit in bytes, or why it has none."""

    engine: str
    device: Device
    limit: int
    why_not: str | None = None


_lock = ForkSafeLock(reentrant=True)
_budget: Config | None = None
_effects: dict[tuple[str, Device], Effect] = {}
_of_jax = Variables()


def check_budget(config: Config) -> None:
    """Refuse, with `ConfigurationError`, a budget that comes too late for JAX."""
    for engine, device in started_jax():
        limit = limit_of(device, config)
        sentence = None if limit is None else engine.memory.set_limit(device, limit)
        if sentence is not None:
            raise ConfigurationError(
                f"configure(): memory={config.memory!r} comes too late: {sentence}", "configure()"
            )


def set_budget(config: Config | None) -> list[str]:
    """Hold every library to the `memory` of these settings, now or when it loads.

    `None` lifts what was set before. Returns the sentences that a person should be told: of a
    library on an accelerator that it has no effect on, and of a GPU that others use as well.
    """
    global _budget
    with _lock.native:
        said = _lift() if config is None else []
        _budget = config
        if config is None:
            return said
        registry.when_loaded(_hold)
        _tell_jax(config)
        for engine in registry.started_engines():
            _hold(engine)
        said += [
            effect.why_not
            for effect in _effects.values()
            if effect.why_not and effect.device.kind != "cpu"
        ]
        return said + _about_shared_gpus(config)


def limit_of(device: Device, config: Config) -> int | None:
    """The most bytes of a device that the settings allow; `None` where they allow everything.

    It is `None`, too, where a share is allowed of a size that is not known.

    A fraction is one of all memory that this process could ever get there. An amount is never
    more than that.

    >>> limit_of(Device("cpu"), Config(memory="1GiB"))
    1073741824
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
    """JAX with each GPU that it has started; asks nothing of a JAX that has not."""
    if not jax_started():
        return []
    engine = registry.load("jax")
    return [(engine, device) for device in engine.devices() if device.backend in _JAX_BACKENDS]


def _hold(engine: Engine) -> None:
    """Hold one library to the budget in force, on each of its devices."""
    with _lock.native:
        config = _budget
        if config is None or (engine.name == "jax" and not jax_started()):
            return  # asking JAX for its devices would start it
        found = ((device, limit_of(device, config)) for device in engine.devices())
        limits = {device: limit for device, limit in found if limit is not None}
        if engine.shares_memory and limits:
            limits = dict.fromkeys(limits, min(limits.values()))
        for device, limit in limits.items():
            why_not = engine.memory.set_limit(device, limit)
            _effects[engine.name, device] = Effect(engine.name, device, limit, why_not)


def _lift() -> list[str]:
    """Lift every limit that was set; what stays is said."""
    said = []
    for name, device in list(_effects):
        effect = _effects.pop((name, device))
        if effect.why_not is None:
            said.append(registry.load(name).memory.set_limit(device, None))
    if _of_jax:
        _of_jax.put({})
        said += [engine.memory.set_limit(device, None) for engine, device in started_jax()]
    return list(dict.fromkeys(sentence for sentence in said if sentence))


def _tell_jax(config: Config) -> None:
    """Put JAX's share of a GPU into the environment, while it is still to start."""
    if jax_started():
        return
    fraction = _jax_fraction(config)
    told: dict[str, str | None] = {}
    if fraction is not None:
        told = {**dict.fromkeys(_JAX_VARIABLES), _JAX_FRACTION: f"{fraction:.6f}"}
    _of_jax.put(told)


def _jax_fraction(config: Config) -> float | None:
    """The one share for all GPUs, which JAX takes; none where an amount meets no GPU."""
    if config.memory_fraction is not None:
        return config.memory_fraction
    shares = []
    for device in devices("gpu"):
        limit = limit_of(device, config)
        total = device.facts.total_memory
        if device.backend in _JAX_BACKENDS and limit and total:
            shares.append(limit / total)
    return min(shares, default=None)


def _about_shared_gpus(config: Config) -> list[str]:
    """A sentence for each GPU of which so much is asked that others on it would have too little."""
    share = config.memory_fraction
    if share is None or share < _MUCH:
        return []
    said = []
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
        said.append(
            f"memory={config.memory!r} lets this process take {share:.0%} of {device}, but "
            f"{reason}; memory='conservative' is for GPUs that are shared"
        )
    return said


def _held_here(device: Device) -> int:
    """The bytes of a device that the loaded libraries of this process hold."""
    held = 0
    for engine in registry.started_engines():
        if device in engine.devices():
            use = engine.memory.use(device)
            held += use.reserved if use else 0
    return held
