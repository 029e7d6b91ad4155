"""A fake machine: its devices, what is on them, and engines that refuse as cards do."""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property, wraps
from itertools import islice
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from anydevice._core import hooks
from anydevice._core.backends import BACKENDS
from anydevice._core.device import Device
from anydevice._core.dtypes import DType
from anydevice._core.engine import Absent, Engine, Memory, MemoryUse
from anydevice._core.finding import BackendScan, DeviceStatus, Facts
from anydevice._core.locks import ForkSafeLock
from anydevice._core.record import replace
from anydevice._core.text import joined, warn
from anydevice._machine.choose import limits
from anydevice._machine.discovery.discover import discover, machine_from
from anydevice._machine.engines import registry
from anydevice._machine.engines.library_settings import enough_virtual_cpus, virtual_cpus
from anydevice._machine.settings import config
from anydevice._machine.settings.config import Config
from anydevice._ops import dispatch


class _Allocation(NamedTuple):
    """Memory that an array takes of a device, until its weak reference ends."""

    array: weakref.ref[Any]
    engine: str
    device: Device
    size: int


class Machine:
    """The fake devices of a block, which arrays are on each, and what they take of its memory."""

    def __init__(self, scans: Iterable[BackendScan]) -> None:
        self._scans = tuple(scans)
        self._lock = ForkSafeLock(reentrant=True)  # an array may end while this thread holds it
        self._allocations: dict[int, _Allocation] = {}
        self._free: dict[Device, int] = {}
        self._in_use: Counter[tuple[str, Device]] = Counter()
        self._peak: Counter[tuple[str, Device]] = Counter()
        self._limit: dict[tuple[str, Device], int | None] = {}
        self._driven: dict[str, tuple[Device, ...]] = {}
        self._real: set[Device] = set()
        self._donatable: set[int] = set()
        self._follows_torch = False
        self._copies = threading.local()

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Let discovery and the engines know this machine alone."""
        with machine_from(lambda limit: self._scans), ExitStack() as block:
            for device in discover().devices:
                if device.status is not None and device.status.facts.details.get("fake"):
                    self._add(device, device.status)
                else:
                    self._real.add(device)
            real_free_memory = hooks.free_memory.function
            assert real_free_memory is not None

            def free_memory(backend: str, index: int, facts: Facts) -> Facts:
                device = Device(backend, index)
                if device not in self._free or facts.free_memory is None:
                    return real_free_memory(backend, index, facts)
                return replace(facts, free_memory=self.free(device))

            block.callback(hooks.free_memory.register, real_free_memory)
            hooks.free_memory.register(free_memory)
            self._block, self._thread = block, threading.get_ident()
            block.enter_context(_engines_as(self._disguise))
            block.enter_context(_own_changes())
            self.follow_torch()
            yield

    def follow_torch(self) -> None:
        """Have PyTorch's own functions keep to the fake devices, in this thread."""
        may = self.driven_by("torch") and not self._follows_torch
        if may and "torch" in sys.modules and threading.get_ident() == self._thread:
            from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes

            if not modes():  # a mode that somebody entered later ends sooner
                self._follows_torch = True
                self._block.enter_context(torch_mode(self))

    def _disguise(self, engine: Engine) -> Engine:
        if not self.driven_by(engine.name):
            return cast("Engine", EngineWithoutCards(engine, self))
        if engine.name == "torch":
            self.follow_torch()
        if engine.name == "jax":
            self._block.enter_context(enough_virtual_cpus(1 + len(self.driven_by("jax"))))
        return cast("Engine", FakeEngine(engine, self))

    def _add(self, device: Device, status: DeviceStatus) -> None:
        facts = status.facts
        free = facts.obtainable_memory if facts.free_memory is None else facts.free_memory
        if free is not None:
            self._free[device] = free
        for name in status.engines:
            self._driven[name] = (*self.driven_by(name), device)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Mark that this thread copies to another device, and does not compute."""
        self._copies.under_way = True
        try:
            yield
        finally:
            self._copies.under_way = False

    def has_real(self, device: Device) -> bool:
        """Whether a device of the computer is part of this machine, and not replaced by a fake."""
        return device.backend == "cpu" or device in self._real

    def driven_by(self, engine: str) -> tuple[Device, ...]:
        """Return the fake devices that an engine drives."""
        return self._driven.get(engine, ())

    def place_of(self, x: Any) -> Device | None:
        """Return the device that an array was placed or computed on; `None` if unknown."""
        known = self._allocations.get(id(memory_of(x)))
        return known.device if known else None

    def common_place(self, arrays: Iterable[Any]) -> Device | None:
        """Return the device of the arrays; raise PyTorch's error if there are two."""
        first: Device | None = None
        for x in () if getattr(self._copies, "under_way", False) else arrays:
            here = self.place_of(x)
            if here is None or (here.backend == "cpu" and not x.ndim):
                continue  # a single number of the host goes with any device
            if first is not None and here != first:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two "
                    f"devices, {first} and {here}!"
                )
            first = here
        return first

    def keep(self, x: Any, engine: str, device: Device, *, is_view: bool = False) -> None:
        """Record where an array is and count it, unless its memory is known; raise if full."""
        memory = memory_of(x)
        key = id(memory)
        with self._lock.native:
            if key in self._allocations:
                return
            size = 0 if is_view else size_of(memory)
            self.require(size, engine, device)
            is_exiting = sys.is_finalizing  # then, modules are gone
            array = weakref.ref(memory, lambda _: None if is_exiting() else self._end(key))
            self._allocations[key] = _Allocation(array, engine, device, size)
            if engine == "jax":
                self._donatable.add(key)
            self._count(size, engine, device)

    def require(self, size: int, engine: str, device: Device) -> None:
        """Raise the error of the engine's library if a device has less memory left than that."""
        with self._lock.native:
            self._end_deleted()
            left = self._free.get(device, size)
            limit = self._limit.get((engine, device))
            if limit is not None:
                left = min(left, limit - self._in_use[engine, device])
        if size > left:
            raise out_of_memory(
                f"{BACKENDS[device.backend].label} out of memory. Tried to allocate {size} bytes. "
                f"GPU {device.index} has {self.free(device)} bytes free",
                engine,
                size,
            )

    def free(self, device: Device) -> int:
        """Return the bytes of a fake device that are free now."""
        with self._lock.native:
            self._end_deleted()
            return self._free[device]

    def use(self, engine: str, device: Device) -> MemoryUse:
        """Return the memory of a device that the arrays of an engine take."""
        with self._lock.native:
            self._end_deleted()
            key = (engine, device)
            in_use = self._in_use[key]
            return MemoryUse(in_use, in_use, self._peak[key], self._limit.get(key))

    def limit_use(self, engine: str, device: Device, limit: int | None) -> None:
        """Set or remove an engine's limit."""
        self._limit[engine, device] = limit

    def reset_peak(self, engine: str, device: Device) -> None:
        with self._lock.native:
            self._peak[engine, device] = self._in_use[engine, device]

    def _count(self, size: int, engine: str, device: Device) -> None:
        key = (engine, device)
        self._in_use[key] += size
        self._peak[key] = max(self._peak[key], self._in_use[key])
        if device in self._free:
            self._free[device] -= size

    def _end(self, key: int) -> None:
        with self._lock.native:
            self._donatable.discard(key)
            ended = self._allocations.pop(key, None)
            if ended is not None:
                self._count(-ended.size, ended.engine, ended.device)

    def _end_deleted(self) -> None:
        """Give back the memory of JAX's arrays that were donated: the objects may live longer."""
        for key in tuple(self._donatable):
            array = self._allocations[key].array()
            if array is not None and array.is_deleted():
                self._end(key)


class EngineWithoutCards:
    """An engine that drives no fake device, and of the real ones only those of the fake machine."""

    def __init__(self, engine: Engine, machine: Machine) -> None:
        self._engine, self._machine = engine, machine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def devices(self) -> tuple[Device, ...]:
        return tuple(d for d in self._engine.devices() if self._machine.has_real(d))

    @cached_property
    def memory(self) -> _FakeMemory:
        return _FakeMemory(self._engine.name, self._engine.memory, self._machine)


class FakeEngine(EngineWithoutCards):
    """An engine that knows fake devices besides the CPU; its library computes as usual."""

    def __init__(self, engine: Engine, machine: Machine) -> None:
        super().__init__(engine, machine)
        self._fakes = machine.driven_by(engine.name)
        spare = virtual_cpus() - len(self._fakes) if engine.name == "jax" else -1
        self._stand_ins = {
            fake: Device("cpu", spare + number if spare >= 0 else 0)
            for number, fake in enumerate(self._fakes)
        }
        self._stood_for = {place: fake for fake, place in self._stand_ins.items() if place.index}

    def devices(self) -> tuple[Device, ...]:
        cpus = (device for device in self._engine.devices() if device.backend == "cpu")
        return (*(device for device in cpus if device not in self._stood_for), *self._fakes)

    def native(self, device: Device) -> Any:
        if self._engine.name == "jax" and virtual_cpus() < len(self._fakes):
            warn(
                f"JAX's own functions take {joined(map(str, self._fakes))} for one device, because "
                f"JAX shows {virtual_cpus()} on the CPU in this process; enter fake_machine before "
                "JAX starts, and set no number of devices"
            )
        return self._engine.native(self._stand_ins.get(device, device))

    def synchronize(self, device: Device) -> None:
        self._engine.synchronize(self._stand_ins.get(device, device))

    def default_scope(self, device: Device) -> AbstractContextManager[Any]:
        return self._engine.default_scope(self._stand_ins.get(device, device))

    def devices_of(self, x: Any) -> tuple[Device, ...]:
        if self._engine.shares_memory:
            return (*self._fakes, *self._engine.devices_of(x))
        known = self._machine.place_of(x)
        if known is not None:
            return (known,)
        return tuple(self._stood_for.get(place, place) for place in self._engine.devices_of(x))

    def to_host(self, x: Any) -> Any:
        with self._machine.copying():
            return self._engine.to_host(x)

    def empty(self, shape: tuple[int, ...], dtype: DType, device: Device) -> Any:
        self._machine.require(prod(shape) * dtype.itemsize, self._engine.name, device)
        with self._machine.copying():
            made = self._engine.empty(shape, dtype, self._stand_ins.get(device, device))
        return self.kept(made, device)

    def place(self, x: Any, device: Device, *, narrow: bool = False) -> Any:
        with self._machine.copying():
            placed = self._engine.place(x, self._stand_ins.get(device, device), narrow=narrow)
        return self.kept(placed, device)

    def move(self, x: Any, device: Device) -> Any:
        places = self.devices_of(x)
        if places == (device,) or (self._engine.shares_memory and device in places):
            return x
        if getattr(x, "requires_grad", False):
            return _moved_with_gradient(self, x, device)
        self._machine.require(x.nbytes, self._engine.name, device)
        with self._machine.copying():
            moved = self._engine.move(x, self._stand_ins.get(device, device))
            if moved is x:  # to the library, both are the CPU
                moved = getattr(x, "clone" if hasattr(x, "clone") else "copy")()
        return self.kept(moved, device)

    def export(self, x: Any) -> Any:
        if self._machine.place_of(x) in self._fakes:
            raise Absent(
                "memory of a fake device is not shared", "copy the array with to_device"
            ).error()
        return self._engine.export(x)

    def view(self, x: Any, *layout: Any) -> Any:
        made, here = self._engine.view(x, *layout), self._machine.place_of(x)
        if here is not None:
            self._machine.keep(made, self._engine.name, here, is_view=True)
        return made

    def separate(self, stacked: Any) -> list[Any]:
        rows: list[Any] = self._following(self._engine.separate)(stacked)
        return rows

    def matmul(self, a: Any, b: Any) -> Any:
        return self._following(self._engine.matmul)(a, b)

    @cached_property
    def ops(self) -> Any:
        return self._follow_array(self._engine.ops)

    @cached_property
    def autodiff(self) -> Any:
        return self._follow_array(self._engine.autodiff, across=True)

    @cached_property
    def compiler(self) -> Any:
        return self._follow_array(self._engine.compiler)

    @cached_property
    def fused(self) -> dict[str, Callable[..., Any]]:
        return {name: self._following(own) for name, own in self._engine.fused.items()}

    def _follow_array(self, part: Any, *, across: bool = False) -> Any:
        if isinstance(part, Absent):
            return part
        names = (name for name in dir(part) if not name.startswith("_"))
        own = {name: self._following(getattr(part, name), across=across) for name in names}
        return SimpleNamespace(**own)

    def _following(self, function: Any, *, across: bool = False) -> Any:
        """Return the function with results on its operands' device; `across` allows several."""
        if not callable(function):
            return function
        is_compiling = _is_compiling(self._engine.name)

        @wraps(function)
        def run(*arguments: Any, **named: Any) -> Any:
            if is_compiling():
                return function(*arguments, **named)
            operands = list(self.arrays((arguments, named)))
            is_across = across and len({self._machine.place_of(x) for x in operands}) > 1
            here = None if is_across else self._machine.common_place(operands)
            result = function(*arguments, **named)
            if callable(result):
                return self._following(result, across=across)
            return result if here is None else self.kept(result, here)

        return run

    def kept(self, result: Any, device: Device) -> Any:
        for x in self.arrays(result):
            if self._engine.devices_of(x):  # nothing is anywhere of PyTorch's meta tensors
                self._machine.keep(x, self._engine.name, device)
        return result

    def arrays(self, tree: Any) -> Iterator[Any]:
        if isinstance(tree, dict):
            tree = tree.values()
        elif not isinstance(tree, list | tuple):
            if self._engine.owns(tree) and not self._engine.is_traced(tree):
                yield tree
            return
        for part in tree:
            yield from self.arrays(part)


def _is_compiling(engine: str) -> Callable[[], bool]:
    """Whether a compiler that reads Python looks through a function of the engine now."""
    if engine != "torch":
        return bool
    import torch

    ask: Callable[[], bool] = torch.compiler.is_compiling
    return ask


class _FakeMemory:
    """The memory of fake devices, and that of a library elsewhere."""

    def __init__(self, engine: str, memory: Memory, machine: Machine) -> None:
        self._engine, self._memory, self._machine = engine, memory, machine

    def use(self, device: Device) -> MemoryUse | None:
        if device in self._machine.driven_by(self._engine):
            return self._machine.use(self._engine, device)
        return self._memory.use(device) if self._machine.has_real(device) else None

    def reset_peak(self, device: Device) -> None:
        if device in self._machine.driven_by(self._engine):
            self._machine.reset_peak(self._engine, device)
        else:
            self._memory.reset_peak(device)

    def set_limit(self, device: Device, limit: int | None) -> str | None:
        if device in self._machine.driven_by(self._engine):
            self._machine.limit_use(self._engine, device, limit)
            return None
        return self._memory.set_limit(device, limit)

    def release(self, device: Device) -> None:
        if device not in self._machine.driven_by(self._engine):
            self._memory.release(device)

    def ran_out(self, error: BaseException) -> bool:
        if isinstance(error, _FakeMemoryError):
            return error.engine == self._engine
        return self._memory.ran_out(error)

    def asked(self, error: BaseException) -> int | None:
        return error.asked if isinstance(error, _FakeMemoryError) else self._memory.asked(error)


def torch_mode(machine: Machine) -> AbstractContextManager[Any]:
    """Let results of PyTorch in this thread be on the device of their operands."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    across = (aten.copy_, aten.index, aten.index_put, aten.index_put_)
    """Functions that take operands of the host beside those of a device."""

    class Following(TorchDispatchMode):  # type: ignore[misc]
        supports_higher_order_operators = True

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # else it imports PyTorch's compiler, which takes seconds

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

        @classmethod
        def is_infra_mode(cls) -> bool:  # what older releases ask instead
            return True

        def __torch_dispatch__(
            self, function: Any, types: Any, arguments: Any = (), named: Any = None
        ) -> Any:
            engine, named = cast("FakeEngine", registry.load("torch")), named or {}
            operands = engine.arrays((arguments, named))
            if getattr(function, "overloadpacket", function) in across:
                operands = islice(operands, 1)
            here = machine.common_place(operands)
            result = function(*arguments, **named)
            return result if here is None else engine.kept(result, here)

    mode: AbstractContextManager[Any] = Following()
    return mode


def _moved_with_gradient(engine: FakeEngine, x: Any, device: Device) -> Any:
    """Return a tensor of PyTorch on another device; its gradient goes back to the first one."""
    import torch

    class Moved(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, given: Any) -> Any:
            context.origin = engine.devices_of(given)[0]
            return engine.move(given.detach(), device)

        @staticmethod
        def backward(context: Any, slope: Any) -> Any:
            return engine.move(slope.detach(), context.origin)

    return Moved.apply(x)


def memory_of(x: Any) -> Any:
    """Return the object that owns the memory of an array and of its views."""
    if hasattr(x, "untyped_storage"):
        try:
            return x.untyped_storage()
        except (RuntimeError, NotImplementedError):  # a sparse tensor has several
            return x
    while isinstance(base := getattr(x, "base", None), type(x)):
        x = base
    return x


def size_of(memory: Any) -> int:
    try:
        size: int = memory.nbytes() if callable(memory.nbytes) else memory.nbytes
    except RuntimeError:  # of a sparse tensor, whose parts are counted
        return 0
    return size


class _FakeMemoryError(MemoryError):
    """A fake device has too little free memory for an array."""

    def __init__(self, message: str, engine: str, size: int) -> None:
        super().__init__(message)
        self.engine, self.asked = engine, size


def out_of_memory(message: str, engine: str, size: int) -> Exception:
    """Return the error that an engine's library raises without memory."""
    if engine != "torch":
        return _FakeMemoryError(message, engine, size)
    import torch

    error: Exception = torch.OutOfMemoryError(message)
    return error


@contextmanager
def _own_changes() -> Iterator[None]:
    """Undo every `configure()` of the block at its end."""
    before = config.changes()
    try:
        yield
    finally:
        now = config.changes()
        names = [name for name in {*before, *now} if before.get(name) != now.get(name)]
        if names:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what a library that has started keeps
                config.change({name: before.get(name) for name in names}, insist=False)


@contextmanager
def _engines_as(disguise: registry.Disguise) -> Iterator[None]:
    """Disguise every engine in the block; memory limits apply to the disguised engines."""
    limit = _lifted_limit()
    before = registry.exchange(disguise)
    try:
        _look_up_again(limit)
        yield
    finally:
        limit = _lifted_limit()
        registry.exchange(before)
        _look_up_again(limit)


def _lifted_limit() -> Config | None:
    limit = limits.in_force()
    limits.set_limit(None)
    return limit


def _look_up_again(limit: Config | None) -> None:
    registry.forget_owners()
    dispatch.forget()
    if limit is not None:
        limits.set_limit(limit)
