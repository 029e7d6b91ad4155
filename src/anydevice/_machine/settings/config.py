"""The settings of a process: `Config`, the sources of its values, and `configure`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from anydevice._core.checks import is_number
from anydevice._core.device import parse_place
from anydevice._core.locks import ForkSafeLock
from anydevice._core.record import NOTHING, Record
from anydevice._core.text import parse_size, warn
from anydevice._machine.engines import library_settings
from anydevice._machine.settings import files
from anydevice._machine.settings.preferences import SETTINGS, FileSettings, read_files
from anydevice.errors import ConfigurationError

STRATEGIES: Mapping[str, float] = MappingProxyType(
    {"conservative": 0.60, "balanced": 0.75, "aggressive": 0.90}
)


class Config(Record):
    """The settings in force; `anydevice config` prints each with its source.

    - `order`: backends in the order to try, before anydevice's own order.
    - `memory`: the share of a device's memory that this process may use: "conservative" (60 %),
      "balanced" (75 %), "aggressive" (90 %), a fraction such as 0.8, or an amount such as "20GiB".
      `None`: nothing is limited.
    - `x64`: 64-bit numbers in JAX.
    - `jit`: compile; turn it off to debug.
    - `mixed_precision`: compile and train in "mixed" precision unless `precision` is given.
    - `time_limit`: time limit of discovery in seconds.
    - `env`: environment variables for the array libraries.

    >>> Config(memory="conservative").memory_fraction
    0.6
    """

    order: tuple[str, ...] = ()
    memory: str | float | None = None
    x64: bool = False
    jit: bool = True
    mixed_precision: bool = False
    time_limit: float = 5.0
    env: Mapping[str, str] = NOTHING

    @property
    def memory_fraction(self) -> float | None:
        """The share of a device's memory; `None` if `memory` is an amount or not set."""
        if isinstance(self.memory, str):
            return STRATEGIES.get(self.memory)
        return self.memory

    @property
    def memory_limit(self) -> int | None:
        """The amount in bytes; `None` if `memory` is a share or not set."""
        if self.memory is None or self.memory_fraction is not None:
            return None
        return parse_size(self.memory)

    def to_dict(self) -> dict[str, object]:
        """Return the settings as plain data, ready for JSON."""
        return {**super().to_dict(), "memory_fraction": self.memory_fraction}


CheckMemory = Callable[[Config], None]
ApplyMemory = Callable[[Config | None], list[str]]

_lock = ForkSafeLock()
_changes: dict[str, Any] = {}
_applied: dict[str, Any] = {}
_revision = 0
_current: tuple[object, int, Config, dict[str, str]] | None = None
_memory_listeners: list[tuple[CheckMemory, ApplyMemory]] = []


def configure(**changes: Any) -> Config:
    """Change settings of this process and return the `Config` that is now in force.

    Takes the fields of `Config` by name; `configure()` without arguments only returns the settings.
    Each takes effect at once; a warning names settings that come too late for a library that has
    already started. `configure(order=None)` resets one setting to its default.

    >>> configure(time_limit=4).time_limit
    4.0
    >>> configure(time_limit=None).time_limit
    5.0

    `memory` limits every imported array library at once, and the others when anydevice first uses
    them. A library that is imported later and used without anydevice is not limited, except JAX,
    which reads the limit from the environment. `configure(memory=None)` removes the limits.

    Raises `ConfigurationError`, and changes nothing, if a name or value is invalid, or if JAX has
    already started on a GPU and its `memory` can no longer change.
    """
    return change(changes, insist=True)


def change(changes: Mapping[str, Any], *, insist: bool) -> Config:
    """Change settings as `configure` does; without `insist`, a late `memory` for JAX only warns."""
    global _revision
    checked = {name: _check(name, value, "configure()") for name, value in changes.items()}
    if insist and checked.get("memory") is not None:
        for check, _ in _memory_listeners:
            check(Config(memory=checked["memory"]))
    with _lock.native:
        for name, value in checked.items():
            if value is None:
                _changes.pop(name, None)
            else:
                _changes[name] = value
        _revision += bool(checked)
    config, origins = current()
    _take_effect(changes, config, origins)
    return config


def current() -> tuple[Config, dict[str, str]]:
    """Return the settings in force, and the source of each that is not a default."""
    global _current
    files_read, revision = read_files(), _revision
    if _current is None or _current[0] is not files_read or _current[1] != revision:
        _current = (files_read, revision, *_merge_settings(files_read))
    return _current[2], dict(_current[3])


def changes() -> dict[str, Any]:
    """Return the settings of `configure()` in this process, by name."""
    return dict(_changes)


def state() -> tuple[object, ...]:
    """Return a value that changes when any setting does; faster than `current`."""
    return files.state(), _revision


def _merge_settings(read: Iterable[FileSettings]) -> tuple[Config, dict[str, str]]:
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for file in read:
        for name, value, source in file.settings:
            values[name] = _check(name, value, source)
            origins[name] = f"{file.origin} {source}"
    for name, value in dict(_changes).items():
        values[name], origins[name] = value, "configure()"
    return Config(**values), origins


def apply_files(names: Iterable[str] = ("env", "x64", "jit", "memory")) -> None:
    """Apply the settings of the files, once for each value."""
    config, origins = current()
    pending: dict[str, Any] = {}
    for name in names:
        value = getattr(config, name)
        if name in origins and origins[name] != "configure()" and _applied.get(name) != value:
            _applied[name] = pending[name] = value
    if pending:
        _take_effect(pending, config, origins)


def on_memory(check: CheckMemory, apply: ApplyMemory) -> None:
    """Register two functions that apply the setting `memory` to the libraries.

    `check` is called before `configure()` changes it, and raises if that is impossible. `apply` is
    called after a change, with `None` if nothing is limited any more, and returns warnings.
    """
    _memory_listeners.append((check, apply))


def forget_changes() -> None:
    """Undo every `configure()` of this process; the settings of the files remain.

    The files take effect again when a device is next chosen.
    """
    global _revision
    with _lock.native:
        limited = "memory" in _changes or "memory" in _applied
        _changes.clear()
        _applied.clear()
        _revision += 1
    library_settings.set_variables({})
    library_settings.set_x64(None)
    library_settings.set_jit(None)
    if limited:
        _limit_memory(None)


def _check(name: str, value: Any, source: str) -> Any:
    if name not in SETTINGS:
        raise ConfigurationError(
            f"{source}: there is no setting {name!r}; the settings are {', '.join(SETTINGS)}",
            source,
        )
    if value is None:
        return None
    try:
        return _CHECKS[name](value)
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: {name}: {error}", source) from None


def _order(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part for part in value.replace(",", " ").split() if part]
    if not isinstance(value, Iterable):
        raise ConfigurationError(f"{value!r} is not a list of backends such as ['cuda', 'cpu']")
    return tuple(_backend(name) for name in value)


def _backend(name: object) -> str:
    if not isinstance(name, str):
        raise ConfigurationError(f"{name!r} is not the name of a backend")
    backend, index = parse_place(name)
    if index is not None:
        raise ConfigurationError(f"{name!r} is one device; the order is one of backends")
    return backend


def _memory(value: object) -> str | float:
    if isinstance(value, str) and value.strip().lower() in STRATEGIES:
        return value.strip().lower()
    if not isinstance(value, str) and not is_number(value):
        raise ConfigurationError(_no_memory(value))
    if not isinstance(value, str) and 0 < value <= 1:
        return float(value)
    try:
        amount = parse_size(value)
    except ConfigurationError:
        raise ConfigurationError(_no_memory(value)) from None
    if amount < 2**20:
        raise ConfigurationError(
            f"{value!r} is neither a fraction (above 0, at most 1) nor an amount; "
            "write amounts with their unit, such as '20GiB'"
        )
    return value if isinstance(value, str) else f"{amount}B"


def _no_memory(value: object) -> str:
    return f"{value!r} is none of {', '.join(STRATEGIES)}, a fraction such as 0.8, or '20GiB'"


def _switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{value!r} is neither True nor False")
    return value


def _time_limit(value: object) -> float:
    if not is_number(value) or not 0 < value <= 3600:
        raise ConfigurationError(f"{value!r} is not a number of seconds between 0 and 3600")
    return float(value)


def _env(value: object) -> Mapping[str, str]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{value!r} is not a table of variables, such as {{'A': '1'}}")
    for name, text in value.items():
        if not isinstance(name, str) or not isinstance(text, str) or not name or "=" in name:
            raise ConfigurationError(f"{name!r}={text!r} is not a variable: both must be texts")
        if "\0" in name + text or not _encodes(name + text):
            raise ConfigurationError(
                f"{name!r}={text!r} has a character that a variable cannot hold"
            )
    return MappingProxyType(dict(value))


def _encodes(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


_CHECKS: dict[str, Callable[[object], Any]] = {
    "order": _order,
    "memory": _memory,
    "x64": _switch,
    "jit": _switch,
    "mixed_precision": _switch,
    "time_limit": _time_limit,
    "env": _env,
}


def _take_effect(changes: Mapping[str, Any], config: Config, origins: Mapping[str, str]) -> None:
    late: list[str] = []
    if "env" in changes:
        late += library_settings.set_variables(config.env, for_children=not _is_project_s("env"))
    if "x64" in changes:
        library_settings.set_x64(config.x64 if "x64" in origins else None)
    if "jit" in changes:
        library_settings.set_jit(config.jit if "jit" in origins else None)
    if "memory" in changes:
        late += _limit_memory(config if "memory" in origins else None)
    for sentence in late:
        warn(sentence)


def _is_project_s(name: str) -> bool:
    """Whether a setting that is in force comes from the project's file."""
    named = {
        file.origin for file in read_files() for setting in file.settings if setting[0] == name
    }
    return name not in _changes and "project file" in named


def _limit_memory(config: Config | None) -> list[str]:
    return [sentence for _, apply in _memory_listeners for sentence in apply(config)]
