"""The device of a call (`device`), of a block (`use_device`) and of the process (`set_device`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from functools import wraps
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any, TypeVar, cast

from anydevice._core.backends import AUTO, NOT_YET
from anydevice._core.choice import Choice, FreeMemory, Request, Wish, choose
from anydevice._core.device import Device, unknown_backend
from anydevice._core.hooks import is_loaded
from anydevice._core.record import Record, replace
from anydevice._core.text import parse_size, warn
from anydevice._machine.choose.measurements import measured_engines
from anydevice._machine.discovery.discover import Report, discover, free_memory, on_refresh
from anydevice._machine.engines import registry
from anydevice._machine.settings import config as settings
from anydevice._machine.settings.config import (
    check_engine,
    check_wish,
    forget_files,
    read_files,
    split_wishes,
    variables,
)
from anydevice.errors import AnyDeviceWarning, ConfigurationError, DeviceNotFoundError

Function = TypeVar("Function", bound=Callable[..., Any])
Spec = str | Device | Sequence[str | Device] | None
_block: ContextVar[Device | None] = ContextVar("anydevice_block", default=None)
_process: Device | None = None
_said: set[str] = set()
_known_choices: dict[object, _KnownChoice] = {}  # by the key of a simple request
_modules = tuple(row.module for row in registry.BUILT_IN.values())
_MAX_KNOWN_CHOICES = 64

_UNASKED = ("configure", "order of backends")
_INSISTING = ("argument", "use_device", "set_device")
_LOCAL_RANKS = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "SLURM_LOCALID",
)

SETTING_VARIABLES = ("ANYDEVICE_DEVICE", "ANYDEVICE_ENGINE", "ANYDEVICE_HOME", *_LOCAL_RANKS)
"""The environment variables that affect the choice of a device."""

_variables = variables(SETTING_VARIABLES)


def device(
    spec: Spec = None, *, engine: str | None = None, min_free: int | str | None = None
) -> Device:
    """Return the device to use: the requested one, or the best one of this machine.

    `device()` follows the chain: a `use_device` block, `set_device`, the environment
    (`ANYDEVICE_DEVICE`, `ANYDEVICE_ENGINE`), the project's file, the user's file, the order of
    `configure`, the order of backends. If it falls back to the CPU, one warning gives every reason.
    If a `spec` cannot be met, `DeviceNotFoundError` is raised. It is a backend or device ("cuda",
    "cuda:1"), a kind ("gpu", "tpu", "cpu"), the first GPU ("gpu:0"), a library's own object
    (`torch.device`, `jax.Device`, …; its library is then the engine), or a list in order of
    priority. `engine` is the array library; the default is the one that `anydevice bench --save`
    found fastest on the device, if it was run. `min_free` skips devices with less free memory
    (bytes or "20GiB").

    >>> str(anydevice.device(["tpu", "cpu"]))
    'cpu'
    """
    global _modules
    key = _key(spec, engine) if min_free is None else None
    level = None
    if "logging" in sys.modules:  # a choice from memory is logged to new listeners
        import logging

        level = logging.getLogger("anydevice").getEffectiveLevel()
    situation = (settings.state(), _variables(), [name in sys.modules for name in _modules], level)
    block, process = _block.get(), _process
    known = None if key is None else _known_choices.get(key)
    if known is not None and known.holds(situation, block):
        return known.device
    settings.apply_files()
    request = make_request(spec, engine=engine, min_free=min_free)
    report = discover()
    weighed: list[Device] = []

    def free(device: Device) -> int | None:
        weighed.append(device)
        return free_memory(device)

    choice = _choose(request, report, free)
    _log(choice)
    if choice.device is None:
        raise DeviceNotFoundError(_not_found(choice), report.findings, choice.reasons)
    _warn_if_passed_over(choice)
    # Without the report's status: its properties are read anew when they are used.
    chosen = choice.device
    served = chosen.engine, chosen.chosen_by
    result = Device(chosen).served_by(*served, picked=chosen.engine_is_free)
    if key is not None and not weighed:
        if len(_known_choices) >= _MAX_KNOWN_CHOICES:
            _known_choices.clear()
        _known_choices[key] = _KnownChoice(situation, block, process, report, result)
        _modules = tuple(row.module for row in registry.rows().values())
    return result


def one_device(spec: str | Device | None = None, *, engine: str | None = None) -> Device:
    """Return `device(spec, engine=engine)`, but refuse a list, which may mean several devices."""
    if isinstance(spec, list | tuple):
        named = [str(one) for one in spec]
        raise ConfigurationError(
            f"this takes one device, not the list {named}; anydevice.device({named}) returns its "
            "first usable one",
            "device=",
        )
    return device(spec, engine=engine)


def why(spec: Spec = None, *, engine: str | None = None) -> Choice:
    """Return the steps of `device()` as it would choose now; does not raise if nothing fits."""
    return _choose(make_request(spec, engine=engine, min_free=None), discover())


def _choose(request: Request, report: Report, free: FreeMemory = free_memory) -> Choice:
    known = replace(request, measured=measured_engines(report.devices))
    return choose(known, report.findings, free)


class _KnownChoice(Record):
    """A chosen device and everything that the choice depended on."""

    situation: object
    block: Device | None
    process: Device | None
    report: Report
    device: Device

    def holds(self, situation: object, block: Device | None) -> bool:
        """Whether the same would be chosen now."""
        return (
            self.situation == situation
            # By identity: devices that are equal may have other engines.
            and self.block is block
            and self.process is _process
            and self.report is discover()
        )


def _key(spec: Any, engine: str | None) -> object:
    """Return the cache key of a simple request; `None` for any other."""
    if engine is not None and type(engine) is not str:
        return None
    if spec is None or type(spec) is str:
        return spec, engine
    if type(spec) is Device:
        return spec.backend, spec.index, spec.engine_asked, spec.engine_is_free, engine
    return None


def set_device(spec: Spec, *, engine: str | None = None) -> Device | None:
    """Make this the device of the whole process, and return it; `set_device(None)` undoes it.

    Raises `DeviceNotFoundError` if it is not usable, and keeps the previous one.
    """
    global _process
    _process = None if spec is None else device(spec, engine=engine)
    return _process


class use_device:  # noqa: N801 - it is used like a function
    """Make this the device of a block or decorated function, for the current thread or task.

    >>> with anydevice.use_device("cpu") as here:
    ...     anydevice.device() == here
    True

    With `native=True` the engine's own default device is set too: new arrays of the library in the
    block are then created there. Raises `DeviceNotFoundError` on entering if the device is not
    usable. A decorated function may be a coroutine, but not a generator, because its steps run in
    its caller's blocks.
    """

    def __init__(self, spec: Spec, *, engine: str | None = None, native: bool = False) -> None:
        self._arguments = (spec, engine, native)
        self._entered: list[ExitStack] = []

    def __enter__(self) -> Device:
        spec, engine, native = self._arguments
        chosen = device(spec, engine=engine)
        with ExitStack() as stack:
            stack.callback(_block.reset, _block.set(chosen))
            if native and chosen.engine:
                stack.enter_context(registry.load(chosen.engine).default_scope(chosen))
            self._entered.append(stack.pop_all())
        return chosen

    def __exit__(self, *raised: Any) -> bool | None:
        return self._entered.pop().__exit__(*raised)

    def __call__(self, function: Function) -> Function:
        spec, engine, native = self._arguments
        if isgeneratorfunction(function) or isasyncgenfunction(function):
            raise ConfigurationError(
                f"{function.__name__}() is a generator and runs in its caller's blocks; "
                "write `with use_device(…)` inside of it",
                "use_device",
            )

        if iscoroutinefunction(function):

            @wraps(function)
            async def in_block(*arguments: Any, **named: Any) -> Any:
                with use_device(spec, engine=engine, native=native):
                    return await function(*arguments, **named)

        else:

            @wraps(function)
            def in_block(*arguments: Any, **named: Any) -> Any:
                with use_device(spec, engine=engine, native=native):
                    return function(*arguments, **named)

        return cast("Function", in_block)


def block_device() -> Device | None:
    """Return the device of the caller's `use_device` block; `None` outside of any."""
    return _block.get()


class _EngineWish(Record):
    """An engine and the source that requests it; `picked` if it only comes with a device."""

    engine: str | None
    source: str | None
    picked: bool = False


def make_request(spec: Spec, *, engine: str | None, min_free: int | str | None) -> Request:
    """Return everything that a choice depends on: arguments, scopes, environment and files."""
    wishes: list[Wish] = []
    engines: list[_EngineWish] = []
    if spec is not None and not isinstance(spec, str | Device | list | tuple):
        spec = _native_device(spec)
    if engine is not None:
        check_engine(engine, "engine=")
        engines.append(_EngineWish(engine, "argument"))
    if spec is not None and spec != AUTO:
        wishes.append(_argument(spec, engines))
    else:
        for scoped, source in ((_block.get(), "use_device"), (_process, "set_device")):
            if scoped is not None:
                wishes.append(Wish(source, (str(scoped),), binding=True))
                if scoped.engine:
                    engines.append(_EngineWish(scoped.engine, source, scoped.engine_is_free))
    preferred: list[Wish] = []
    _add_environment(preferred, engines)
    for file in reversed(read_files()):
        if file.wishes and file.wishes != (AUTO,):
            preferred.append(Wish(file.origin, file.wishes, detail=str(file.path)))
        if file.engine:
            engines.append(_EngineWish(file.engine, file.origin))
    if spec is None or spec == AUTO:
        wishes += preferred
    config, _ = settings.current()
    first = engines[0] if engines else _EngineWish(None, None)
    return Request(
        wishes=tuple(wishes),
        engine=first.engine,
        engine_source=first.source,
        engine_binding=first.source in _INSISTING,
        engine_picked=first.picked,
        min_free=parse_size(min_free) if min_free is not None else 0,
        order=config.order,
        local_rank=_local_rank(),
        loaded=frozenset(registry.loaded_engines()),
    )


def _argument(spec: Spec, engines: list[_EngineWish]) -> Wish:
    assert spec is not None
    named = list(spec) if isinstance(spec, Sequence) and not isinstance(spec, str) else [spec]
    named = [one if isinstance(one, str | Device) else _native_device(one) for one in named]
    names = tuple(name for one in named for name in split_wishes(str(one)))
    if not names:
        raise ConfigurationError(
            f"{spec!r} names no device; leave it out for the best one", "device()"
        )
    if isinstance(named[0], Device) and len(named) == 1 and named[0].engine_asked:
        engines.append(_EngineWish(named[0].engine_asked, "argument", named[0].engine_is_free))
    for name in names:
        check_wish(name, "device()")
    return Wish("argument", names, binding=True)


def _native_device(spec: Any) -> Device:
    """Return the device of a library's own object; else raise `ConfigurationError`."""
    known = device_from_library(spec)
    if known is not None:
        return known
    kind = type(spec)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    raise ConfigurationError(
        f"an object of type {name} does not name a device; give a backend and an index, such as "
        "'cuda:0'. Functions that move data take it first: to_device(data, device)",
        "device()",
    )


def _add_environment(wishes: list[Wish], engines: list[_EngineWish]) -> None:
    names = split_wishes(os.environ.get("ANYDEVICE_DEVICE", ""))
    for name in names:
        check_wish(name, "ANYDEVICE_DEVICE")
    if names and names != (AUTO,):
        wishes.append(Wish("environment", names, detail="ANYDEVICE_DEVICE"))
    engine = os.environ.get("ANYDEVICE_ENGINE", "").strip().lower()
    if engine:
        check_engine(engine, "ANYDEVICE_ENGINE")
        engines.append(_EngineWish(engine, "ANYDEVICE_ENGINE"))


def _local_rank() -> int | None:
    for name in _LOCAL_RANKS:
        text = os.environ.get(name, "").strip()
        if not text:
            continue
        if not text.isdecimal():
            raise ConfigurationError(f"{name}={text!r} is not the number of a process", name)
        return int(text)
    return None


def _not_found(choice: Choice) -> str:
    wishes = [step.asked for step in choice.steps[-1:] if step.source not in _UNASKED]
    lines = [
        f"no usable device matches {wishes[0]!r}" if wishes else "no device of this machine fits"
    ]
    lines += [f"  {step.source}: {step.outcome}" for step in choice.steps]
    lines.append("  anydevice doctor explains each; anydevice.devices() lists what is usable")
    return "\n".join(lines)


def _log(choice: Choice) -> None:
    """Log the device and why, and each step; nothing listens if `logging` is not imported yet."""
    if not is_loaded("logging"):
        return
    import logging

    logger = logging.getLogger("anydevice")
    for step in choice.steps:
        logger.debug("%s, %s: %s", step.source, step.asked, step.outcome)
    if choice.device is not None:
        reasons = "".join(f"; {step.outcome}" for step in choice.passed_over)
        chosen = choice.device, choice.device.engine, choice.device.chosen_by
        logger.info("using %s with %s, chosen by %s%s", *chosen, reasons)


def _warn_if_passed_over(choice: Choice) -> None:
    """Warn once if a preference was not met, or an automatic choice fell back to the CPU."""
    assert choice.device is not None
    at_the_end = choice.device.kind == "cpu" and choice.steps[-1].source == "order of backends"
    unmet = [
        # A variable has no article.
        f"{'' if step.source.isupper() else 'the '}{step.source} asks for {step.asked}: "
        f"{step.outcome}"
        if step.source not in _UNASKED
        else step.outcome
        for step in choice.passed_over
        if at_the_end or step.source not in _UNASKED
    ]
    if at_the_end and not unmet:
        unmet = ["no accelerator is in this machine"]
    text = f"using {choice.device}: " + "; ".join(unmet)
    if unmet and text not in _said:
        _said.add(text)
        warn(AnyDeviceWarning(text, choice.reasons))


def forget() -> None:
    """Forget the process's device and given warnings, so that the choice runs again."""
    set_process_device(None)
    forget_warnings()


@on_refresh
def forget_warnings() -> None:
    """Repeat warnings that were given before."""
    _said.clear()
    _known_choices.clear()
    forget_files()


def set_process_device(device: Device | None) -> Device | None:
    """Set the device of the process without checking it, and return the former one."""
    global _process
    before, _process = _process, device
    return before


_PACKAGES = {"jaxlib": "jax", "pyopencl": "opencl"}
"""The engine of packages that have another name."""

_NAMES = ("device", "devicetype")
"""Names of the classes of such objects; MLX's `mlx.core.cpu` is of the second."""


def device_from_library(spec: Any) -> Device | None:
    """Return the device that a library's own object stands for, with its engine, or `None`."""
    kind = type(spec)
    package = kind.__module__.partition(".")[0]
    name = _PACKAGES.get(package, package)
    if kind.__name__.lower() not in _NAMES or name not in registry.loaded_engines():
        return None
    engine = registry.load(name)
    for device in engine.devices():
        if _is_same(engine.native(device), spec):
            return Device(device, engine=name)
    if getattr(spec, "type", None) in NOT_YET:
        raise ConfigurationError(unknown_backend(spec.type), repr(spec))
    names = ", ".join(map(str, engine.devices())) or "no device"
    raise DeviceNotFoundError(f"{name} itself has no {spec!r} here; it sees {names}")


def _is_same(native: Any, spec: Any) -> bool:
    if hasattr(spec, "type") and hasattr(spec, "index"):  # to PyTorch, no index is the first
        return bool(native.type == spec.type) and (native.index or 0) == (spec.index or 0)
    return bool(native == spec)
