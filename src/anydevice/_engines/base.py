"""The base class of engines, and helpers that several of their files share.

An engine is a folder. `arrays.py` has its class, a `BaseEngine`; beside it lie `primitives.py`,
`fused.py`, `memory.py`, `autodiff.py` and `compiler.py`. Each has one value, named after the file,
and is loaded when that is first used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, wraps
from inspect import Parameter, signature
from typing import Any

from anydevice._core.device import Device
from anydevice._core.dtypes import DType
from anydevice._core.engine import Absent, Engine, Memory, MemoryUse, Storage
from anydevice._core.hooks import load
from anydevice._core.primitives import Autodiff, Compiler, Primitives
from anydevice._core.record import Record
from anydevice._core.text import parse_size, warn
from anydevice._engines.host import known_dtype
from anydevice._machine.engines.registry import row_of
from anydevice.errors import ConfigurationError, DeviceNotFoundError

_ALLOCATION = re.compile(
    r"(?:tried to allocate|trying to allocate|out of memory allocating|unable to allocate"
    r"|out of memory to allocate|attempting to allocate|failed to allocate(?: request for)?)"
    r"\s+([\d,.]*\d)\s*([KMGT]?)(?:i?B|bytes?)\b",
    re.IGNORECASE,
)


class BaseEngine(Engine):
    """Defaults for a library that computes at once, without views and DLPack.

    `_core/engine.py` documents each method. A subclass adds `name`, `devices`, `native`, `owns`,
    `devices_of`, `empty`, `place` and `to_host`.
    """

    shares_memory = False
    has_views = False

    @cached_property
    def ops(self) -> Primitives:
        primitives: Primitives = self._part("primitives")
        if not hasattr(primitives, "slice_axis") and hasattr(primitives, "part"):
            message = f"the engine {self.name} has `part` for the primitive `slice_axis`: rename it"
            warn(DeprecationWarning(message))
            primitives.slice_axis = primitives.part  # type: ignore[method-assign]
        return primitives

    @cached_property
    def fused(self) -> Mapping[str, Callable[..., Any]]:
        return self._part("fused", {})

    @cached_property
    def memory(self) -> Memory:
        return self._part("memory", BaseMemory(self))

    @cached_property
    def autodiff(self) -> Autodiff | Absent:
        return self._optional("autodiff", "train on torch, jax or mlx")

    @cached_property
    def compiler(self) -> Compiler | Absent:
        return self._optional("compiler", "compile on torch, jax or mlx")

    @property
    def dlpack(self) -> Absent | None:
        return Absent(
            f"{self.label} has no DLPack", instead="copy the array with to_device", code="no_dlpack"
        )

    @property
    def label(self) -> str:
        """The library's name as people write it."""
        return row_of(self.name).label

    def is_traced(self, x: Any) -> bool:
        return False

    def is_meta(self, x: Any) -> bool:
        return False

    def dtype_of(self, x: Any) -> DType:
        return known_dtype(x.dtype)

    def storage(self, x: Any) -> Storage | None:
        return None

    def address(self, x: Any) -> int | None:
        return None

    def view(
        self, x: Any, dtype: DType, offset: int, strides: tuple[int, ...], shape: tuple[int, ...]
    ) -> Any:
        raise Absent(
            f"{self.label} has no views",
            instead="take a part of the array, which is a copy",
            code="no_views",
        ).error()

    def adopt(self, x: Any) -> Any:
        if self.dlpack is not None:
            raise self.dlpack.error()
        try:
            return self.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise self.not_adopted(error) from error

    def from_dlpack(self, x: Any, /) -> Any:
        """Return an array that shares another library's memory; every engine with DLPack has it."""
        raise NotImplementedError

    def export(self, x: Any) -> Any:
        return x if self.dlpack is None else self.adopt(x)

    def move(self, x: Any, device: Device) -> Any:
        self.native(device)
        places = self.devices_of(x)
        there = places == (device,) or (self.shares_memory and device in places)
        return x if there else self.place(self.to_host(x), device)

    def separate(self, stacked: Any) -> list[Any]:
        device = self.devices_of(stacked)[0]
        return [self.place(row, device) for row in self.to_host(stacked)]

    def matmul(self, a: Any, b: Any) -> Any:
        return self.ops.matmul(a, b)

    def finish(self, arrays: Any) -> None:
        pass

    def launch(self, arrays: Sequence[Any]) -> None:
        pass

    def receive(self, arrays: Sequence[Any]) -> None:
        pass

    def synchronize(self, device: Device) -> None:
        self.native(device)

    def default_scope(self, device: Device) -> AbstractContextManager[Any]:
        self.native(device)
        return nullcontext()

    def inference_scope(self, device: Device) -> AbstractContextManager[Any]:
        return nullcontext()

    def serial_scope(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def not_seen(self, device: Device) -> DeviceNotFoundError:
        """Return the error for a device that the library does not have; it lists the others."""
        visible = ", ".join(map(str, self.devices())) or "no device"
        return DeviceNotFoundError(f"{self.label} has no {device}; it sees {visible}")

    def not_adopted(self, error: Exception) -> Exception:
        """Return the error for an array whose memory the library cannot take over."""
        return Absent(
            f"{self.label} cannot take over this array: {error}",
            instead="copy it with to_device",
            code="no_dlpack",
        ).error()

    def _optional(self, part: str, instead: str) -> Any:
        row = row_of(self.name)
        absent = row.lacks.get(part)
        return absent or self._part(
            part, Absent(f"{row.label} has no {part}", instead, code=f"no_{part}")
        )

    def _part(self, file: str, default: Any = None) -> Any:
        # The row names the file of the engine's class, and the others lie beside it.
        folder = row_of(self.name).target.partition(":")[0].rpartition(".")[0]
        try:
            return load(f"{folder}.{file}:{file.upper()}")
        except ModuleNotFoundError as error:
            if error.name != f"{folder}.{file}" or default is None:
                raise
            return default


class BaseMemory:
    """Memory of a library that does not count allocations; others override `use` and more."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def use(self, device: Device) -> MemoryUse | None:
        self._engine.native(device)
        return None

    def reset_peak(self, device: Device) -> None:
        self._engine.native(device)

    def set_limit(self, device: Device, limit: int | None) -> str | None:
        self._engine.native(device)
        if limit is None:
            return None
        label = row_of(self._engine.name).label
        return (
            f"{label} takes its memory from the system, which a limit of anydevice does not reach; "
            "use the system's own: ulimit -v, or a cgroup"
        )

    def release(self, device: Device) -> None:
        self._engine.native(device)

    def ran_out(self, error: BaseException) -> bool:
        return type(error) is MemoryError

    def asked(self, error: BaseException) -> int | None:
        """Return the requested bytes: `asked` of our own errors, else from the message."""
        size: int | None = getattr(error, "asked", None)
        return amount_asked(str(error)) if size is None else size


def amount_asked(message: str) -> int | None:
    """Return the bytes that a library's message names as requested; `None` if it names none."""
    match = _ALLOCATION.search(message)
    # Libraries that write "GB" here mean 2**30 bytes, too.
    return None if match is None else parse_size(match[1].replace(",", "") + match[2])


def refuse_non_scalar(value: Any, is_array: bool) -> None:
    """Raise `TypeError` unless a function to differentiate returned a scalar."""
    if is_array and not value.shape:
        return
    result = f"an array of shape {tuple(value.shape)}" if is_array else f"a {type(value).__name__}"
    raise TypeError(
        f"a gradient needs a function that returns one number, and this one returned {result}; "
        "end it with ops.sum or ops.mean"
    )


def visible_keys(
    arange: Callable[[int], Any], queries: int, keys: int, valid: Any, causal: bool,
    window: int | None, mask: Any,
) -> Any:  # fmt: skip
    """Return the keys that each query of attention sees, broadcast to the scores, or `None`."""
    key = arange(keys)
    conditions = [] if valid is None else [key < valid]
    if causal:
        last = arange(queries)[:, None] + ((keys if valid is None else valid) - queries)
        conditions.append(key <= last)
        if window is not None:
            conditions.append(key > last - window)
    if mask is not None:
        conditions.append(mask)
    visible = None
    for condition in conditions:
        visible = condition if visible is None else visible & condition
    return visible


class ExpertBlocks(Record):
    """Choices of experts, sorted by expert and cut into blocks of `rows` for one expert each."""

    rows: int
    expert: Any
    """The expert of each block."""
    token: Any
    """The token of each row of the blocks; in padding, the number of tokens."""
    row: Any
    """The row of each choice; the number of rows for a choice of no expert."""


def expert_blocks(xp: Any, numbers: Any, count: int, tokens: int) -> ExpertBlocks:
    """Plan the blocks for the chosen experts of all tokens; no shape depends on the choices."""
    length = numbers.shape[0]
    rows = min(256, max(8, 1 << (length // count - 1).bit_length()))
    blocks = (length + min(count, length) * (rows - 1)) // rows
    counts = xp.zeros(count + 1, dtype=xp.int32).at[numbers].add(1)
    ends = xp.cumsum((counts[:count] + rows - 1) // rows)  # the end of each expert, in blocks
    order = xp.argsort(numbers).astype(xp.int32)
    expert = numbers[order]
    first = xp.concatenate([xp.zeros(1, dtype=xp.int32), ends]) * rows
    row = xp.arange(length) - (xp.cumsum(counts) - counts)[expert] + first[expert]
    row = xp.where(expert < count, row, blocks * rows).astype(xp.int32)
    # The choice of each row; `length` for a row without one.
    choice = xp.zeros(blocks * rows + 1, dtype=xp.int32).at[row].add(order - length)[:-1] + length
    reached = ends[None] <= xp.arange(blocks)[:, None]
    return ExpertBlocks(
        rows=rows,
        expert=xp.minimum(xp.sum(reached.astype(xp.int32), axis=1), count - 1),
        token=choice // (length // tokens),
        row=xp.zeros(length, dtype=xp.int32).at[order].add(row),
    )


def check_names(function: Callable[..., Any], names: Sequence[str]) -> None:
    """Raise `ConfigurationError` for names of arguments that the function does not have."""
    parameters = signature(function).parameters if names else ()
    unknown = [name for name in names if name not in parameters]
    if unknown:
        raise ConfigurationError(
            f"the function has no argument {', '.join(unknown)}; it has {', '.join(parameters)}"
        )


class CompileOptions(Record):
    """The options of `Compiler.compile`, which documents them."""

    static: Sequence[str] = ()
    donate: Sequence[str] = ()
    whole: bool = True
    max_effort: bool = False
    fixed: bool = False


def compiled_for_each(
    function: Callable[..., Any],
    static: Sequence[str],
    compile_one: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """Return the function, compiled once for each set of values of its static arguments."""
    check_names(function, static)
    whole = signature(function)
    parameters = whole.parameters
    by_name = [name for name in static if parameters[name].kind is Parameter.KEYWORD_ONLY]
    by_place = sorted(list(parameters).index(name) for name in static if name not in by_name)
    versions: dict[tuple[Any, ...], Callable[..., Any]] = {}

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        bound = whole.bind(*arguments, **named)
        bound.apply_defaults()
        places, names = list(bound.args), dict(bound.kwargs)
        constants = [places[at] for at in by_place]
        named_constants = {name: names.pop(name) for name in by_name}
        key = (*constants, *named_constants.values())
        try:
            version = versions.get(key)
        except TypeError as error:
            raise ConfigurationError(
                f"a static argument must be hashable: {error}, among {', '.join(static)}; "
                "pass a tuple or a frozen record"
            ) from error
        if version is None:

            def with_constants(*changing: Any, **others: Any) -> Any:
                arguments = list(changing)
                for at, value in zip(by_place, constants, strict=True):
                    arguments.insert(at, value)
                return function(*arguments, **others, **named_constants)

            version = versions[key] = compile_one(with_constants)
        return version(*(x for at, x in enumerate(places) if at not in by_place), **names)

    return call
