"""The settings of a process: `Config`, `configure`, and the settings files that `prefer` writes."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from anydevice._core.backends import AUTO, BACKENDS
from anydevice._core.checks import integer, is_number
from anydevice._core.device import Device, parse_kind, parse_place
from anydevice._core.files import parse_toml, read_small, writing
from anydevice._core.locks import ForkSafeLock
from anydevice._core.record import NOTHING, Record
from anydevice._core.text import joined, parse_size, printable, shortened, warn
from anydevice._machine.engines import library_settings
from anydevice._machine.engines.registry import engine_names, unknown_engine
from anydevice._machine.settings import files
from anydevice.errors import ConfigurationError, OutOfMemoryError

STRATEGIES: Mapping[str, float] = MappingProxyType(
    {"conservative": 0.60, "balanced": 0.75, "aggressive": 0.90}
)

_MADE_BY_US = "# written by anydevice; removed when no setting is left\n"
"""The first line of a settings file that `prefer` made."""

SEED = "ANYDEVICE_SEED"
VARIABLES = ("DEVICE", "ENGINE", "HOME", "SEED", "SECRET", "WAIT_LIMIT")
"""The variables for users, each after "ANYDEVICE_"."""
_OTHER_VARIABLES = ("LAUNCHER", "FAILED", "GROUP", "DATA", "PEER_PYTHON")
"""Variables that `launch` sets for its processes, and those of our own tests, as "TEST_…" is."""

_NAMES_SHOWN = 5
"""Limit on the names in one message."""


class Config(Record):
    """The settings in force; `anydevice config` prints each with its source.

    - `order`: backends in the order to try, before anydevice's own order.
    - `memory`: the share of a device's memory that this process may use: "conservative" (60 %),
      "balanced" (75 %), "aggressive" (90 %), a fraction such as 0.8, or an amount such as "20GiB".
      `None`: nothing is limited.
    - `return_memory`: trainings with PyTorch on a CPU return freed memory to the system at once, on
      Linux with glibc. Turn it off before the first training for a little more speed.
    - `threads`: the number of threads of each library that computes on the CPU, at most 1,024;
      `None`: the library's own choice.
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
    return_memory: bool = True
    threads: int | None = None
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


SETTINGS = Config._fields
_KEYS = ("device", "engine", *SETTINGS)

Origin = Literal["user file", "project file"]


class FileSettings(Record):
    """The device names and other settings of one file, each with its value, file and line."""

    origin: Origin
    path: Path
    wishes: tuple[str, ...] = ()
    engine: str | None = None
    settings: tuple[tuple[str, Any, str], ...] = ()


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
    already started on a GPU and its `memory` can no longer change. A flag in `XLA_FLAGS` that the
    installed XLA does not take is such an error too, but everything else takes effect.
    """
    return change(changes, insist=True)


def change(changes: Mapping[str, Any], *, insist: bool) -> Config:
    """Change settings as `configure` does; without `insist`, a late `memory` for JAX only warns."""
    global _revision
    checked = {name: _check(name, value, "configure()") for name, value in changes.items()}
    refused: Mapping[str, str] = {}
    if checked.get("env"):
        checked["env"], refused = _split_refused(checked["env"])
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
    if refused:
        raise _refused_error("configure()", refused)
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
    return files_state(), _revision


def seed(given: object, owner: str) -> int:
    """Return `given`, else `ANYDEVICE_SEED`, else a random seed.

    >>> seed(7, "verify")
    7
    """
    if given is not None:
        return integer("seed", given, 0, owner=owner)
    text = os.environ.get(SEED, "")
    if text.isdecimal():
        return int(text)
    random = int.from_bytes(os.urandom(4), "little")
    return integer(SEED, text, 0, owner=owner) if text else random


def unknown_variables() -> dict[str, str]:
    """Return the variables that look like ours and that nothing reads, each with advice."""
    unknown = {}
    for name in sorted(os.environ):
        prefix, _, rest = name.partition("_")
        is_known = rest in (*VARIABLES, *_OTHER_VARIABLES) or rest.startswith("TEST_")
        if prefix.upper() == "ANYDEVICE" and not (is_known and prefix.isupper()):
            from difflib import get_close_matches  # slow to load, and rarely needed

            near = get_close_matches(rest.upper(), VARIABLES, 1) or VARIABLES
            unknown[name] = f"did you mean ANYDEVICE_{' or ANYDEVICE_'.join(near)}?"
    return unknown


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


def apply_files(names: Iterable[str] = ("env", "threads", "x64", "jit", "memory")) -> None:
    """Apply the settings of the files, once for each value."""
    config, origins = current()
    pending: dict[str, Any] = {}
    for name in names:
        value = getattr(config, name)
        if name in origins and origins[name] != "configure()" and _applied.get(name) != value:
            _applied[name] = pending[name] = value
    try:
        if pending:
            _take_effect(pending, config, origins)
    except ConfigurationError:
        _applied.pop("env", None)  # so that choosing a device raises it too
        raise


def on_memory(check: CheckMemory, apply: ApplyMemory) -> None:
    """Register `check` before `configure()` changes `memory`, and `apply` after, which warns."""
    _memory_listeners.append((check, apply))


def forget_changes() -> None:
    """Undo every `configure()`; the files take effect when a device is next chosen."""
    global _revision
    with _lock.native:
        limited = "memory" in _changes or "memory" in _applied
        _changes.clear()
        _applied.clear()
        _revision += 1
    library_settings.set_variables({})
    library_settings.set_threads(None)
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
    backends = []
    for name in value:
        if not isinstance(name, str):
            raise ConfigurationError(f"{name!r} is not the name of a backend")
        backend, index = parse_place(name)
        if index is not None:
            raise ConfigurationError(f"{name!r} is one device; the order is one of backends")
        backends.append(backend)
    return tuple(backends)


def _memory(value: object) -> str | float:
    if isinstance(value, str) and value.strip().lower() in STRATEGIES:
        return value.strip().lower()
    wrong = f"{value!r} is none of {', '.join(STRATEGIES)}, a fraction such as 0.8, or '20GiB'"
    if not isinstance(value, str) and not is_number(value):
        raise ConfigurationError(wrong)
    if not isinstance(value, str) and 0 < value <= 1:
        return float(value)
    try:
        amount = parse_size(value)
    except ConfigurationError:
        raise ConfigurationError(wrong) from None
    if amount < 2**20:
        raise ConfigurationError(
            f"{value!r} is neither a fraction (above 0, at most 1) nor an amount; "
            "write amounts with their unit, such as '20GiB'"
        )
    return value if isinstance(value, str) else f"{amount}B"


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
        try:
            encoded = os.fsencode(name + text)
        except UnicodeEncodeError:
            encoded = b"\0"
        if b"\0" in encoded:
            raise ConfigurationError(
                f"{name!r}={text!r} has a character that a variable cannot hold"
            )
    return MappingProxyType(dict(value))


_CHECKS: dict[str, Callable[[object], Any]] = {
    "order": _order,
    "memory": _memory,
    "return_memory": _switch,
    "threads": lambda value: integer("the number", value, 1, 1024),
    "x64": _switch,
    "jit": _switch,
    "mixed_precision": _switch,
    "time_limit": _time_limit,
    "env": _env,
}


def _take_effect(changes: Mapping[str, Any], config: Config, origins: Mapping[str, str]) -> None:
    late: list[str] = []
    refused: Mapping[str, str] = {}
    if "env" in changes:
        variables, refused = _split_refused(config.env)
        sources = {
            file.origin for file in read_files() for name, _, _ in file.settings if name == "env"
        }
        from_project = "env" not in _changes and "project file" in sources
        late += library_settings.set_variables(variables, for_children=not from_project)
    if "threads" in changes:
        late += library_settings.set_threads(config.threads)
    if "x64" in changes:
        library_settings.set_x64(config.x64 if "x64" in origins else None)
    if "jit" in changes:
        library_settings.set_jit(config.jit if "jit" in origins else None)
    if "memory" in changes:
        late += _limit_memory(config if "memory" in origins else None)
    for sentence in late:
        warn(sentence)
    if refused:
        raise _refused_error(origins.get("env", "configure()"), refused)


def _split_refused(variables: Mapping[str, str]) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return the variables without the flags that XLA refuses, and these with their reasons."""
    flags = variables.get("XLA_FLAGS")
    if flags is None:
        return variables, {}
    from anydevice._machine.engines.xla_flags import refused_flags

    refused = refused_flags(flags)
    accepted = " ".join(flag for flag in flags.split() if flag not in refused)
    return (
        MappingProxyType({**variables, "XLA_FLAGS": accepted}) if refused else variables
    ), refused


def _refused_error(source: str, refused: Mapping[str, str]) -> ConfigurationError:
    return ConfigurationError(
        f"{source}: env: XLA_FLAGS: {'; '.join(refused.values())}. XLA would abort the process, "
        "so these flags were not set; all other settings were",
        source,
    )


def _limit_memory(config: Config | None) -> list[str]:
    return [sentence for _, apply in _memory_listeners for sentence in apply(config)]


def prefer(
    device: str | Device | Sequence[str | Device] | None = None,
    *,
    engine: str | None = None,
    project: bool = False,
) -> Path | None:
    """Save the preferred device and engine for this and every later run.

    Writes the project's `anydevice.toml` if there is one at or above the working directory, else
    the user's, and returns the file; `project=True` makes a missing project's file in the working
    directory. Comments and other settings are kept, and a file that `prefer` made goes when nothing
    is left in it. A list is tried in order:
    `prefer(["cuda", "metal"])`. `prefer(None)` or `prefer("")` deletes the preference. A device
    that is not usable now is skipped until it is.

    Raises `ConfigurationError` for an unknown backend, with the valid names, and if the file cannot
    be read or written; it is then unchanged.
    """
    names = () if device is None else (device,) if isinstance(device, str | Device) else device
    wishes = [wish for name in names for wish in split_wishes(str(name))]
    for wish in wishes:
        check_wish(wish, "prefer")
    if engine is not None:
        check_engine(engine, "prefer")
    try:
        path = (files.new_project_file if project else files.project_file)() or files.user_file()
    except OSError as error:
        raise ConfigurationError(
            "the project's file cannot be made: the working directory no longer exists "
            f"({error.strerror}); change to another one first",
            "prefer",
        ) from error
    changes: dict[str, str | list[str] | None] = {
        "device": wishes if len(wishes) > 1 else next(iter(wishes), None),
        "engine": engine,
    }
    if not os.path.exists(path) and not any(changes.values()):
        return None
    _change(path, changes)
    return path


_read: tuple[object, tuple[FileSettings, ...]] | None = None


def read_files() -> tuple[FileSettings, ...]:
    """Return the settings files, the user's before the project's, read again when changed."""
    global _read
    now, cache = files_state(), _read  # another thread may clear the cache
    if cache is None or cache[0] != now:
        read = (
            _read_file("user file", files.user_file()),
            _read_file("project file", files.project_file()),
        )
        _read = cache = (now, tuple(file for file in read if file is not None))
    return cache[1]


def forget_files() -> None:
    """Read the files again on next use, and repeat their warnings."""
    global _read
    _read = None


def _read_file(origin: Origin, path: Path | None) -> FileSettings | None:
    if path is None:
        return None
    try:
        text = files.read_home(path) if origin == "user file" else files.read_project(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        warn(f"{printable(path)} cannot be read ({error.strerror}); going on without it")
        return None
    return _interpret(origin, path, text)


def check_wish(wish: str, source: str) -> None:
    """Raise `ConfigurationError`, with the valid names, if this cannot name a device."""
    if wish == AUTO or parse_kind(wish)[0] is not None:
        return
    try:
        parse_place(wish)
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: {error}", source) from None


def check_engine(engine: str, source: str) -> None:
    """Raise `ConfigurationError`, with the valid names, for an unknown engine."""
    if engine not in engine_names():
        raise ConfigurationError(f"{source}: {unknown_engine(engine)}", source)


def split_wishes(text: str) -> tuple[str, ...]:
    """Return the names in a list such as `"cuda, cpu"`."""
    return tuple(part.strip().lower() for part in text.split(",") if part.strip())


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except UnicodeDecodeError as error:
        line = text[: error.start].count(b"\n") + 1
        source = f"{printable(path)}, line {line}"
        raise ConfigurationError(f"{source}: this is not UTF-8 text", source) from None
    except ValueError as error:
        match = re.search(r"at line (\d+)", str(error))
        line = int(match[1]) if match else text.count(b"\n") + 1
        source = f"{printable(path)}, line {line}"
        raise ConfigurationError(
            f"{source}: this is not TOML ({error}); fix the line or delete the file", source
        ) from None


def _interpret(origin: Origin, path: Path, text: bytes) -> FileSettings:
    settings: list[tuple[str, Any, str]] = []
    wishes: tuple[str, ...] = ()
    engine: str | None = None
    read = _parse(path, text)
    unknown = [key for key in read if key not in _KEYS]
    if unknown:
        names = joined(repr(shortened(key)) for key in unknown[:_NAMES_SHOWN])
        hidden = len(unknown) - _NAMES_SHOWN
        more = f", nor the {hidden} more" if hidden > 0 else ""
        warn(
            f"{printable(path)}, line {_line_of(unknown[0], text)}: there is no setting "
            f"{names}{more}; the settings are {', '.join(_KEYS)}",
        )
    for key in _KEYS:
        if key not in read:
            continue
        value = read[key]
        source = f"{printable(path)}, line {_line_of(key, text)}"
        if key == "device":
            devices = value if isinstance(value, list) else [value]
            texts = [_text(key, device, source) for device in devices]
            wishes = tuple(wish for name in texts for wish in split_wishes(name))
            for wish in wishes:
                check_wish(wish, source)
        elif key == "engine":
            engine = _text(key, value, source)
            check_engine(engine, source)
        elif key == "env" and origin == "project file" and isinstance(value, Mapping):
            if allowed := _allowed_variables(value, source):
                settings.append((key, allowed, source))
        else:
            settings.append((key, value, source))
    return FileSettings(origin, path, wishes, engine, tuple(settings))


def _allowed_variables(variables: Mapping[str, Any], source: str) -> dict[str, Any]:
    allowed, refused = library_settings.harmless(variables)
    if refused:
        names = joined(map(shortened, refused[:_NAMES_SHOWN]))
        more = f" and {len(refused) - _NAMES_SHOWN} more" if len(refused) > _NAMES_SHOWN else ""
        warn(
            f"{source}: a project's file may not set {names}{more}, but only what is known to be "
            "harmless; if you want it, put it into your own file, "
            f"{files.described(files.user_file())}"
        )
    return allowed


def _text(key: str, value: object, source: str) -> str:
    if not isinstance(value, str):
        raise ConfigurationError(
            f"{source}: {key} must be a text such as "
            f"{'numpy' if key == 'engine' else next(iter(BACKENDS))!r}, not {value!r}",
            source,
        )
    return value.strip().lower()


def _line_of(key: str, text: bytes) -> int:
    pattern = re.compile(rf"\s*(\[+\s*)?[\"']?{re.escape(key)}[\"']?\s*[=\].]")
    lines = text.decode("utf-8").splitlines()
    return next((number for number, line in enumerate(lines, 1) if pattern.match(line)), 1)


def _change(path: Path, changes: Mapping[str, str | list[str] | None]) -> None:
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    try:
        is_user_s = path == files.user_file()
        with writing(path, private=is_user_s) as write:
            read = files.read_home if is_user_s else files.read_project
            old = read(path) if path.exists() else _MADE_BY_US.encode()
            _parse(path, old)
            document = tomlkit.parse(old.decode("utf-8"))
            for key, value in changes.items():
                if value is None:
                    document.pop(key, None)
                else:
                    document[key] = value
            text = tomlkit.dumps(document)
            if text == _MADE_BY_US and not path.is_symlink():
                path.unlink(missing_ok=True)
            else:
                write(text)
    except MemoryError as error:
        raise OutOfMemoryError(f"{path} cannot be changed: no memory is left") from error
    except (TOMLKitError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} cannot be changed ({error}); nothing was changed. Change it by hand",
            str(path),
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"{files.described(path)} cannot be written ({error.strerror}); nothing was changed. "
            "Set ANYDEVICE_DEVICE instead, or ANYDEVICE_HOME to a folder that can be written",
            str(path),
        ) from error


def variables(names: Sequence[str]) -> Callable[[], tuple[object, ...]]:
    """Return a fast reader of environment variables, whose results are for comparing.

    >>> read = variables(["SOME_SWITCH"])
    >>> before = read()
    >>> os.environ["SOME_SWITCH"] = "1"
    >>> read() == before
    False
    >>> del os.environ["SOME_SWITCH"]
    >>> read() == before
    True
    """
    keys = tuple(map(os.environ.encodekey, names))

    def read() -> tuple[object, ...]:
        # Through its methods every variable takes a microsecond.
        data = getattr(os.environ, "_data", None)
        return tuple(map(os.environ.get, names) if data is None else map(data.get, keys))

    return read


_UNSETTLED = 2_000_000_000
"""Nanoseconds in which a file may change twice without another time stamp, on any file system."""

_watched: tuple[object, tuple[str, ...]] = (None, ())
_places = variables(("ANYDEVICE_HOME", "HOME", "USERPROFILE", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"))


def files_state() -> tuple[object, ...]:
    """Return a value that changes with any file of settings or measurements, and with its place."""
    global _watched
    try:
        folder = os.getcwd()
    except OSError:  # it was deleted
        folder = ""
    key = (folder, _places(), files.fake)
    if _watched[0] != key:
        paths = (*files.project_files(), files.user_file(), files.measurements_file())
        _watched = (key, tuple(map(str, paths)))
    return key, [stamp(path) for path in _watched[1] if os.path.lexists(path)]


def stamp(path: str | Path) -> object:
    """Return a value that changes with the file."""
    try:
        of_link = status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            status = os.stat(path)
        changed = max(status.st_mtime_ns, status.st_ctime_ns)
        stamp = (path, *_identity(of_link), *_identity(status))
        if time.time_ns() - changed > _UNSETTLED:
            return stamp
        return (*stamp, read_small(path, limit=files.LARGEST_CACHE))
    except OSError as error:
        return (path, error.errno)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    times = status.st_mtime_ns, status.st_ctime_ns
    return (*times, status.st_size, status.st_ino, status.st_dev, status.st_uid, status.st_mode)
