"""The engines, as data: one row each; which are installed or loaded, and whose an array is.

Nothing here imports an array library except `load`. Other packages add a row by the entry point
group `anydevice.engines`, whose entries name an `EngineRow`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any

from anydevice._core.backends import BACKENDS
from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES
from anydevice._core.engine import Absent, Engine
from anydevice._core.hooks import load as load_by_name
from anydevice._core.hooks import native as native_hook
from anydevice._core.record import NOTHING, Record
from anydevice._machine.engines.installed import Build, EntryPoint, entry_points, read_build
from anydevice._machine.engines.library_settings import jax_started, virtual_cpus
from anydevice.errors import AnyDeviceError, ConfigurationError

GROUP = "anydevice.engines"

_listeners: list[Callable[[Engine], None]] = []

Disguise = Callable[[Engine], Engine]
"""Makes another engine of one, which takes its place."""

_disguise: Disguise | None = None

_owners: dict[type, Engine | None] = {}


class EngineRow(Record):
    """One array library: how it is found, what it can drive, and what it cannot do.

    `module` is what a user imports. `target` is the engine, `"package.arrays:ENGINE"`; its other
    files lie beside `arrays`. `libraries` are the distributions that may provide the
    module, the usual one first. `lacks` says what it cannot do, on all of its devices or on those
    that the sentence names. `kernels` is the module with our own kernels for it, in a table
    `KERNELS`, and `kernel_backends` says where they run.
    """

    name: str
    label: str
    module: str
    target: str
    libraries: tuple[str, ...]
    backends: tuple[str, ...]
    lacks: Mapping[str, Absent] = NOTHING
    kernels: str = ""
    kernel_backends: tuple[str, ...] = ()


def _lacks(**parts: tuple[str, str]) -> dict[str, Absent]:
    """Return what is absent, by dtype or part of an engine, and what to do instead."""
    codes = {part: "no_dtype" if part in DTYPES else f"no_{part}" for part in parts}
    return {part: Absent(*texts, code=codes[part]) for part, texts in parts.items()}


_CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x", "cupy-rocm-7-0", "cupy-rocm-5-0", "cupy")

BUILT_IN: dict[str, EngineRow] = {
    row.name: row
    for row in (
        EngineRow(
            name="numpy",
            label="NumPy",
            module="numpy",
            target="anydevice._engines.numpy.arrays:ENGINE",
            libraries=("numpy",),
            backends=("cpu",),
            lacks=_lacks(
                autodiff=("NumPy has no autodiff", "train on torch, jax or mlx"),
                compiler=("NumPy has no compiler", "compile on torch, jax or mlx"),
                collectives=("NumPy knows one device", "use torch or jax for several"),
            ),
        ),
        EngineRow(
            name="torch",
            label="PyTorch",
            module="torch",
            target="anydevice._engines.torch.arrays:ENGINE",
            libraries=("torch",),
            backends=("cuda", "rocm", "metal", "xpu", "cpu"),
            kernels="anydevice._engines.torch.triton.fused",
            kernel_backends=("cuda", "rocm"),
            lacks=_lacks(
                float64=("PyTorch has no float64 on Metal and Arc A", "use float32, or the CPU")
            ),
        ),
        EngineRow(
            name="jax",
            label="JAX",
            module="jax",
            target="anydevice._engines.jax.arrays:ENGINE",
            libraries=("jax",),
            backends=("cuda", "rocm", "tpu", "cpu"),
            lacks=_lacks(
                float64=(
                    "JAX has no 64-bit numbers unless told so",
                    "call configure(x64=True) first, or write x64 = true in anydevice.toml",
                )
            ),
        ),
        EngineRow(
            name="mlx",
            label="MLX",
            module="mlx.core",
            target="anydevice._engines.mlx.arrays:ENGINE",
            libraries=("mlx",),
            backends=("metal", "cpu"),
            lacks=_lacks(
                float64=("MLX has no float64 on a GPU", "use float32, or the CPU"),
                complex128=("MLX has no complex128", "use complex64"),
                collectives=(
                    "MLX knows one GPU a process",
                    "run several with `anydevice launch --engine mlx`, or use torch or jax",
                ),
            ),
        ),
        EngineRow(
            name="cupy",
            label="CuPy",
            module="cupy",
            target="anydevice._engines.cupy.arrays:ENGINE",
            libraries=_CUPY,
            backends=("cuda", "rocm"),
            lacks=_lacks(
                autodiff=("CuPy has no autodiff", "train on torch or jax"),
                compiler=("CuPy compiles no models", "compile on torch or jax"),
                bfloat16=("CuPy before 14 has no bfloat16", "install a newer one, or use float16"),
            ),
        ),
        EngineRow(
            name="opencl",
            label="OpenCL",
            module="pyopencl",
            target="anydevice._engines.opencl.arrays:ENGINE",
            libraries=("pyopencl",),
            backends=("opencl",),
            kernels="anydevice._engines.opencl.fused",
            kernel_backends=("opencl",),
            lacks=_lacks(
                autodiff=("OpenCL has no autodiff", "train on torch or jax"),
                compiler=("OpenCL compiles no models", "compile on torch or jax"),
                collectives=("OpenCL devices share nothing", "use torch or jax"),
            ),
        ),
    )
}


_ALIASES = {
    "pytorch": "torch",
    "lightning": "torch",
    "np": "numpy",
    "jnp": "jax",
    "flax": "jax",
    "equinox": "jax",
    "jaxlib": "jax",
    "mx": "mlx",
    "pyopencl": "opencl",
}
"""Other names of the engines and libraries on top of them, for "did you mean"."""


def rows() -> Mapping[str, EngineRow]:
    """Return every engine by name: the built-in ones, then those that other packages add."""
    return _rows(entry_points(GROUP))[0]


def notes() -> tuple[str, ...]:
    """Return a sentence for each entry point that failed to load."""
    return _rows(entry_points(GROUP))[1]


def engine_names() -> tuple[str, ...]:
    """Return the names by which an engine may be requested."""
    return tuple(rows())


def engines_for(backend: str) -> tuple[str, ...]:
    """Return the engines that may drive a backend, in order of choice."""
    ours = BACKENDS[backend].engines if backend in BACKENDS else ()
    added = (name for name, row in rows().items() if backend in row.backends)
    return tuple(dict.fromkeys((*ours, *added)))


def installed(name: str) -> Build:
    """Return the installed build of a library; its `version` is `None` if there is none."""
    row = row_of(name)
    return read_build(row.name, row.module, row.libraries, row.backends)


def require(name: str) -> Build:
    """Return the installed build of a library; `UnsupportedError` says how to install it."""
    row, build = row_of(name), installed(name)
    if not build.installed:
        instead = f"run: pip install {row.libraries[0]}"
        raise Absent(f"{row.label} is not installed", instead, "library_missing").error()
    return build


def version_of(name: str) -> str | None:
    return installed(name).version


def with_version(name: str) -> str:
    """Return an engine and its version as a list shows them: "torch 2.13.0+cpu"."""
    version = version_of(name)
    return f"{name} {version}" if version else name


def loaded(name: str) -> bool:
    """Whether the engine's library is imported already."""
    return row_of(name).module in sys.modules


def loaded_engines() -> tuple[str, ...]:
    """Return the engines whose library is imported already."""
    return tuple(name for name, row in rows().items() if row.module in sys.modules)


def started_engines() -> tuple[Engine, ...]:
    """Return the imported engines that may hold device memory; JAX only once it started."""
    started = []
    for name in loaded_engines():
        if name == "jax" and not jax_started():
            continue
        try:
            started.append(load(name))
        except AnyDeviceError:
            continue
    return tuple(started)


def row_of(name: str) -> EngineRow:
    """Return the row of an engine; `ConfigurationError` lists the valid names."""
    row = BUILT_IN.get(name) or rows().get(name)
    if row is None:
        raise ConfigurationError(unknown_engine(name))
    return row


def unknown_engine(name: str) -> str:
    """Return the error text for an unknown engine, with the close or the valid names."""
    lowered, known = name.lower(), engine_names()
    if lowered in BACKENDS and lowered not in known:
        return f'{name!r} is a backend and no engine; write device("{lowered}")'
    meant = lowered if lowered in known else _ALIASES.get(lowered)
    hint = f" (did you mean {meant!r}?)" if meant else ""
    return f"there is no engine {name!r}{hint}; the engines are {', '.join(known)}"


@cache
def load(name: str) -> Engine:
    """Import and return an engine; `UnsupportedError` says what to do if that fails."""
    row, build = row_of(name), require(name)
    try:
        engine: Engine = load_by_name(row.target)
    except Exception as error:  # a damaged installation fails in any way it likes
        what = f"{build.name} is installed, but importing it failed with"
        raise Absent(
            f"{what} {type(error).__name__}: {error}",
            f"run: pip install --force-reinstall {row.libraries[0]}",
            "damaged_installation",
        ).error() from error
    if _disguise is not None:
        engine = _disguise(engine)
    for listener in tuple(_listeners):
        listener(engine)
    return engine


_forget_loaded = load.cache_clear  # of the function itself, also while a test replaces `load`


def exchange(disguise: Disguise | None) -> Disguise | None:
    """Have `load` disguise each engine, `None` for none, in tests; return the disguise before."""
    global _disguise
    before, _disguise = _disguise, disguise
    _forget_loaded()
    return before


def when_loaded(listener: Callable[[Engine], None]) -> None:
    """Call a function with every engine that is loaded from now on."""
    if listener not in _listeners:
        _listeners.append(listener)


def owner_of(x: Any) -> Engine | None:
    """Return the engine of the array `x`; `None` if it is no array of an imported library."""
    kind = type(x)
    if kind.__module__ == "builtins":
        return None
    if kind not in _owners:
        engines = (load(name) for name in loaded_engines())
        _owners[kind] = next((engine for engine in engines if engine.owns(x)), None)
    return _owners[kind]


def forget_owners() -> None:
    """Look up the engine of every array again."""
    _owners.clear()


def place_of(device: Device) -> Device:
    """Return the device; in a child, the CPU device that stands in for a fake one."""
    status = device.status
    if status is None or not status.facts.details.get("fake"):
        return device
    index = device.index % virtual_cpus() if device.engine == "jax" else 0
    return Device("cpu", index, engine=device.engine)


def native(device: Device, engine: str) -> Any:
    """Return the library's own object for a device; `DeviceNotFoundError` if it sees none."""
    return load(engine).native(device)


@lru_cache(maxsize=4)
def _rows(entries: tuple[EntryPoint, ...]) -> tuple[Mapping[str, EngineRow], tuple[str, ...]]:
    rows, problems = dict(BUILT_IN), []
    for entry in entries:
        origin = f"the engine {entry.name!r} of {entry.distribution} ({entry.target})"
        try:
            row = load_by_name(entry.target)
        except Exception as error:  # whatever another package does must not stop discovery
            problems.append(f"{origin} failed with {type(error).__name__}: {error}")
            continue
        if not isinstance(row, EngineRow):
            problems.append(f"{origin} is not an EngineRow but a {type(row).__name__}")
        elif row.name in rows:
            problems.append(f"{origin} is left out: there is an engine {row.name!r} already")
        else:
            rows[row.name] = row
    return MappingProxyType(rows), tuple(problems)


native_hook.register(native)
