"""`to_device`, `to_numpy` and `device_of`: trees of arrays are moved to a device and back.

Arrays that share memory share it after the move. Two views that overlap are moved as one block of
memory, and become two views of the copy. Views that do not overlap cannot tell whether they are
still neighbours, so each is moved alone, unless moving them together costs little more.

Large copies between the host and a CUDA device are staged through pinned memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NoReturn, TypeGuard, overload

import numpy as np

from anydevice._arrays.memory.out_of_memory import raise_if_oom
from anydevice._arrays.stage import WORTH_STAGING, Piece, ring_of
from anydevice._arrays.trees.tree import Leaf, Leaves, flatten
from anydevice._core import hooks
from anydevice._core.array import Array
from anydevice._core.device import Device, not_driven
from anydevice._core.dtypes import DTYPES, DType, as_dtype
from anydevice._core.engine import Engine, Storage
from anydevice._core.record import Record, replace
from anydevice._machine.choose.scope import one_device
from anydevice._machine.discovery import discover as discovery
from anydevice._machine.engines import registry
from anydevice._machine.engines.diagnosis import code_of_message
from anydevice._machine.engines.registry import owner_of
from anydevice.errors import (
    AnyDeviceError,
    ConfigurationError,
    DeviceMismatchError,
    TransferError,
    UnsupportedError,
)

MANY = 32
"""Number of arrays of one kind from which on it pays to copy them together."""
_TOGETHER = 2**28
"""Bytes of small arrays that are on the device twice for a moment."""
_MOST_WORK = 10_000
"""Limit on NumPy's search for a byte that two arrays share."""
_SOMEWHERE = 1 << 40
"""An address for comparisons: NumPy takes 0 for a missing one."""

HostArray = np.ndarray[Any, Any]
_numeric: dict[Any, bool] = {}
_base_of, _kind_of = attrgetter("base"), attrgetter("__class__", "dtype", "shape")
_NOT_NUMBERS = ("O", "S", "U", "M", "m")


def to_device(
    tree: Any,
    device: Device | str,
    *,
    convert: bool = False,
    copy: bool = True,
    narrow: bool = False,
    dtype: object = None,
) -> Any:
    """Move every array of a tree to `device`; everything else stays as it is.

    A NumPy array becomes an array of the device's engine. An array of another library stays in
    that library if it can live on the device, and otherwise becomes the engine's; `convert=True`
    makes every array the engine's. An array that is already there is returned as it is. Between
    libraries a copy is made; with `copy=False`, memory is shared if both libraries can.

    `device` may be a `Device`, a name, or a library's own object, such as a `torch.device`.
    `tree` may be an array or any tree of dicts, lists, tuples, dataclasses, modules, optimizer
    states, and types added with `register_type`. A `torch.nn.Module` is moved in place and
    returned. Arrays that occur twice stay one array.

    >>> anydevice.to_device({"weight": numpy.ones(3), "name": "layer"}, "cpu")["name"]
    'layer'

    Floating arrays are cast to `dtype`, a name or a library's own dtype; integers, booleans,
    complex numbers and quantized weights stay as they are. Numbers too large become infinite.

    >>> tree = {"weight": numpy.ones(2), "ids": numpy.arange(2)}
    >>> anydevice.to_device(tree, anydevice.device("cpu", engine="numpy"), dtype="float16")
    {'weight': array([1., 1.], dtype=float16), 'ids': array([0, 1])}

    Otherwise precision is never lost silently: if the engine has no 64-bit dtypes, such an array is
    refused unless `narrow=True`. Raises `DeviceNotFoundError` if the device is not usable,
    `OutOfMemoryError` if there is no memory for a leaf, and `TransferError` if one cannot be
    moved; both name the leaf.
    """
    target = destination_of(device)
    is_there = target.already_there.get(type(tree))
    if is_there is not None and not convert and dtype is None and is_there(tree):
        return tree
    floating = None if dtype is None else _floating(dtype)
    try:
        if _is_leaf(tree):
            return _Move(target, convert, copy, narrow, floating, None).all([tree])[0]
        leaves, rebuild = flatten(tree, _is_leaf)
        return rebuild(_Move(target, convert, copy, narrow, floating, leaves).all(leaves.values))
    except Exception as error:
        raise_if_oom(error, target.device)
        raise


def _floating(dtype: object) -> DType:
    row = as_dtype(dtype)
    if row.kind != "float":
        raise ConfigurationError(
            f"dtype={row.name!r} is not a floating dtype, and only floating arrays are cast; "
            'give one such as "float32" or "bfloat16"',
            source="dtype=",
        )
    return row


@overload
def to_numpy(tree: Array) -> HostArray: ...
@overload
def to_numpy(tree: Any) -> Any: ...
def to_numpy(tree: Any) -> Any:
    """Return the same tree with every array as a NumPy array.

    Raises `OutOfMemoryError` if the host has no memory for a leaf, or its device had none for
    computing it, and `TransferError` if one cannot be read; both name the leaf.
    """
    try:
        if _is_leaf(tree):
            return _on_host([tree], None)[0]
        leaves, rebuild = flatten(tree, _is_leaf)
        return rebuild(_on_host(leaves.values, leaves))
    except Exception as error:
        raise_if_oom(error)
        raise


def device_of(tree: object) -> Device | None:
    """Return the device of the arrays in `tree`; `None` if it has no arrays.

    >>> anydevice.device_of({"x": numpy.ones(2), "y": 3}), anydevice.device_of("text")
    (Device("cpu", engine='numpy'), None)

    Its engine is the library of the arrays, so `device_of(x)(constant)` gives an array of the same
    library. If the arrays are of several libraries, it is the default engine of the device.

    Raises `DeviceMismatchError`, with two paths, for several devices, or for a sharded array.
    """
    if is_array(tree):
        return _single(tree)
    leaves, _ = flatten(tree, is_array)
    first: Device | None = None
    for position, value in enumerate(leaves.values):
        here = _single(value, leaves, position)
        if first is None:
            first = here
        elif here == first:
            if here.engine_asked != first.engine_asked:
                first = first.served_by(None)
        else:
            paths = (leaves[0].path, leaves[position].path)
            raise _elsewhere(paths, (first,), (here,))
    return first


def refuse_mismatch(error: Exception, **arguments: object) -> None:
    """Raise `DeviceMismatchError` if arrays of the call that failed are on different devices.

    `arguments` are those of the call by name, and may be trees. If they are all on one device, the
    library's message tells whether other arrays are elsewhere. Returns for any other error.
    """
    leaves, _ = flatten(SimpleNamespace(**arguments), _is_leaf)
    places = [_owner(value).devices_of(value) for value in leaves.values]
    for position, here in enumerate(places):
        if here != places[0]:
            paths = (leaves[0].path, leaves[position].path)
            raise _elsewhere(paths, places[0], here) from error
    if isinstance(error, AnyDeviceError):
        return
    if code_of_message(str(error)) == "device_mismatch":
        there = f"{leaves[0].path} is on {_spread(places[0])}, but " if places else ""
        raise DeviceMismatchError(
            f"{there}an array that the function itself holds is elsewhere: {error}; move it with "
            "to_device, or make it an argument"
        ) from error


def _elsewhere(
    paths: tuple[str, str], first: Sequence[Device], second: Sequence[Device]
) -> DeviceMismatchError:
    return DeviceMismatchError(
        f"{paths[0]} is on {_spread(first)}, but {paths[1]} is on {_spread(second)}; move them to "
        f'one device with to_device(…, "{(first or second)[0]}")',
        paths,
    )


def synchronize(device: Device | str | None = None) -> None:
    """Wait for all work on the device; raises `OutOfMemoryError` if that ran out of memory."""
    target = one_device(device)
    if target.engine:
        try:
            registry.load(target.engine).synchronize(target)
        except Exception as error:
            raise_if_oom(error, target)
            raise


def take_over(tree: object) -> None:
    """Tell the libraries that the calling thread now uses arrays that another thread placed."""
    leaves = [tree] if is_array(tree) else flatten(tree, is_array)[0].values
    for value in leaves:
        _owner(value).receive([value])


def is_array(x: Any) -> TypeGuard[Array]:
    """Whether `x` is a numeric array of an imported library, and not a tracer."""
    owner = owner_of(x)
    if owner is None:
        return False
    if owner.name != "numpy":
        return not owner.is_traced(x)
    known = _numeric.get(x.dtype)
    if known is None:
        known = x.dtype.kind not in _NOT_NUMBERS and x.dtype.names is None
        _numeric[x.dtype] = known
    return known


def _is_leaf(x: object) -> bool:
    """Whether `x` is to be moved; an array without data counts, and is refused with its path."""
    return is_array(x) or ((owner := owner_of(x)) is not None and owner.is_meta(x))


class Destination:
    """A usable device and its engine; `engines` are the libraries whose arrays can live there."""

    def __init__(self, device: Device) -> None:
        if device.engine is None:
            raise not_driven(device)
        status = device.status
        self.device = device
        self.engine: Engine = registry.load(device.engine)
        self.engines = frozenset(status.engines if status else (device.engine,))
        self.already_there: dict[type, Callable[[Any], bool]] = {}
        """A quick test whether an array is here already, by its type."""
        self.from_host: set[type] = set()
        """Types of host arrays, which become the engine's."""

    def keeps(self, owner: Engine) -> bool:
        """Whether an array of that library stays in its library when it is moved here."""
        return owner.name == self.engine.name or (
            owner.name != "numpy" and owner.name in self.engines
        )

    def remember(self, array: Array, owner: Engine) -> None:
        """Add a quick test for arrays of this type."""
        kind = type(array)
        if kind in self.already_there:
            return
        native = owner.native(self.device)
        if any(owner.native(other) == native for other in owner.devices() if other != self.device):
            return  # on a fake machine, the library does not tell its devices apart
        if owner.name == "numpy":
            self.already_there[kind] = lambda x: True
        elif hasattr(array, "device") and array.device == native:
            self.already_there[kind] = lambda x: bool(x.device == native)


_destinations: dict[tuple[str, int, str | None], tuple[object, Destination]] = {}
"""Destinations with the discovery report for which they are valid."""


def destination_of(device: Device | str) -> Destination:
    """Return the destination for a device or a name; raises `DeviceNotFoundError` if unusable."""
    if not isinstance(device, Device):
        return destination_of(one_device(device))
    key = (device.backend, device.index, device.engine_asked)
    known = _destinations.get(key)
    if known is not None and known[0] is discovery.kept_report():
        return known[1]
    usable = device if device.usable else one_device(device)
    destination = Destination(usable)
    _destinations[key] = (discovery.discover(), destination)
    return destination


class _Move:
    """One call of `to_device`: its target and options, and the leaves that errors name."""

    def __init__(
        self,
        target: Destination,
        convert: bool,
        copy: bool,
        narrow: bool,
        dtype: DType | None,
        leaves: Leaves | None,
    ) -> None:
        self.target, self.leaves = target, leaves
        self.convert, self.copy, self.narrow, self.dtype = convert, copy, narrow, dtype

    def all(self, values: Sequence[Array]) -> list[Array]:
        """Return the arrays on the target, in their order."""
        target, moved = self.target, list(values)
        from_host: list[int] = []
        together = self._sharing(values, self.leaves) if self.copy and self.leaves else []
        done = {view.position for shared in together for view in shared.views} if together else ()
        if self.dtype is not None:
            self._cast(moved, [n for n in range(len(moved)) if n not in done], ahead=True)
        for position, value in enumerate(tuple(moved)):
            if position in done:
                continue
            if type(value) in target.from_host and self.copy:
                from_host.append(position)
                continue
            owner = _owner(value)
            try:
                if self._stays(owner):
                    moved[position] = self._within_library(value, owner, position)
                elif not self.copy and (adopted := self._share_memory(value, owner)) is not None:
                    moved[position] = adopted
                else:
                    from_host.append(position)
                    if owner.name == "numpy":
                        target.from_host.add(type(value))
                    else:
                        moved[position] = download(value, owner)
            except Exception as error:
                _raise_named(self.leaves, position, error, target.device)
        self._upload(moved, from_host)
        if self.dtype is not None:
            self._cast(moved, [n for n in range(len(moved)) if n not in done], ahead=False)
        for shared in together:
            bare = _Move(target, self.convert, self.copy, self.narrow, None, None)
            try:
                (memory,) = bare.all([shared.memory])
            except Exception as error:
                _raise_named(self.leaves, shared.views[0].position, error, target.device)
            for position, view in shared.views_of(memory, self._engine_for(shared.owner)).items():
                moved[position] = view
        return moved

    def _cast(self, moved: list[Array], positions: Iterable[int], *, ahead: bool) -> None:
        """Cast the floating arrays at these positions, so that the smaller dtype is moved."""
        for position in positions:
            value = moved[position]
            owner = _owner(value)
            try:
                leaf = self.leaves[position] if self.leaves else None
                if (dtype := self._other_dtype(value, owner, leaf)) is None:
                    continue
                if not ahead or dtype.itemsize <= owner.dtype_of(value).itemsize:
                    moved[position] = cast(value, owner, dtype)
            except Exception as error:
                _raise_named(self.leaves, position, error, self.target.device)

    def _other_dtype(self, value: Array, owner: Engine, leaf: Leaf | None) -> DType | None:
        """Return the dtype that an array is cast to; `None` if it stays as it is."""
        if self.dtype is None or owner.is_meta(value) or (leaf and leaf.is_quantized):
            return None
        own = owner.dtype_of(value)
        return None if own.kind != "float" or own == self.dtype else self.dtype

    def _stays(self, owner: Engine) -> bool:
        target = self.target
        return owner.name == target.engine.name or (not self.convert and target.keeps(owner))

    def _engine_for(self, owner: Engine) -> Engine:
        return owner if self._stays(owner) else self.target.engine

    def _sharing(self, values: Sequence[Array], leaves: Leaves) -> list[SharedMemory]:
        """Return the memory that several arrays share and can share on the target."""
        one_of_each = dict(zip(map(type, values), values, strict=True))
        engines = {kind: _owner(value) for kind, value in one_of_each.items()}
        names = {owner.name for owner in engines.values() if owner.has_views}
        only_numpy = len(one_of_each) == 1 and names == {"numpy"}
        if not names or (only_numpy and all(base is None for base in map(_base_of, values))):
            return []  # no library has views, or each array has its own memory
        going = [
            position
            for position, value in enumerate(values)
            if self._must_move(value, leaves[position], engines[type(value)])
        ]
        if len(going) < 2:
            return []
        place, blocks = self.target.device, shared_memory(values, going)
        if self.dtype is not None:
            blocks = [one for block in blocks if (one := block.cast(self.dtype)) is not None]
        return [
            shared for shared in blocks if can_hold(self._engine_for(shared.owner), place, shared)
        ]

    def _must_move(self, value: Array, leaf: Leaf, owner: Engine) -> bool:
        if not owner.has_views or (self.dtype is not None and leaf.is_quantized):
            return False
        if getattr(value, "requires_grad", False) and not leaf.kept:
            return False  # a gradient has to flow through the copy of this very array
        is_there = self._stays(owner) and owner.devices_of(value) == (self.target.device,)
        return not is_there or self._other_dtype(value, owner, leaf) is not None

    def _within_library(self, value: Array, owner: Engine, position: int) -> Array:
        target, places = self.target, owner.devices_of(value)
        if owner.shares_memory and target.device in places:
            # The library is lazy, and another thread could not compute it later.
            owner.finish([value])
            return value
        if places == (target.device,):
            target.remember(value, owner)
            return value
        detached = self.leaves is not None and self.leaves[position].kept
        return _move_within(value, owner, places, target.device, detached=detached)

    def _share_memory(self, value: Array, owner: Engine) -> Array | None:
        """Return the same memory in the target's library; `None` if it cannot be shared."""
        engine = self.target.engine
        try:
            adopted = engine.adopt(owner.export(value))
        except Exception:  # each library has its own errors; then a copy is made
            return None
        return adopted if engine.devices_of(adopted) == (self.target.device,) else None

    def _upload(self, moved: list[Array], positions: list[int]) -> None:
        """Replace the host arrays at these positions by arrays of the target's engine."""
        target, failed_at = self.target, [0]
        try:
            arrays = list(map(moved.__getitem__, positions))
            placed = upload(arrays, target.engine, target.device, self.narrow, failed_at)
        except Exception as error:
            _raise_named(self.leaves, positions[failed_at[-1]], error, target.device)
        for position, array in zip(positions, placed, strict=True):
            moved[position] = array


def _on_host(values: Sequence[Array], leaves: Leaves | None) -> list[Array]:
    host = list(values)

    def copied(value: Array, position: int) -> Array:
        owner = _owner(value)
        try:
            return download(value, owner)
        except Exception as error:
            places = owner.devices_of(value)
            _raise_named(leaves, position, error, places[0] if places else None)

    elsewhere = [n for n, value in enumerate(values) if _owner(value).name != "numpy"]
    for shared in shared_memory(values, elsewhere) if len(elsewhere) > 1 else ():
        memory = copied(shared.memory, shared.views[0].position)
        for position, view in shared.views_of(memory, _owner(memory)).items():
            host[position] = view
    for position in elsewhere:
        if host[position] is values[position]:
            host[position] = copied(values[position], position)
    return host


def _owner(value: Array) -> Engine:
    owner = owner_of(value)
    assert owner is not None
    return owner


def _single(value: Array, leaves: Leaves | None = None, position: int = 0) -> Device:
    owner = _owner(value)
    places = owner.devices_of(value)
    if len(places) == 1 or (places and owner.shares_memory):
        return places[0].served_by(owner.name, picked=True)
    path = leaves[position].path if leaves else ""
    raise DeviceMismatchError(
        f"{path or 'the array'} is sharded over {_spread(places)}; gather it first", (path, path)
    )


def _spread(places: Sequence[Device]) -> str:
    return ", ".join(map(str, places)) or "no device that anydevice knows"


def _raise_named(
    leaves: Leaves | None, position: int, error: Exception, place: Device | None
) -> NoReturn:
    """Raise an error that names the leaf; a `TransferError` names it already."""
    if isinstance(error, TransferError):
        raise error
    path = leaves[position].path if leaves else ""
    raise_if_oom(error, place, what=path)
    reason = str(error) if isinstance(error, AnyDeviceError) else f"{type(error).__name__}: {error}"
    raise TransferError(f"{path or 'the array'}: {reason}", path) from error


# Memory that arrays share


class View(Record):
    """An array as a part of a block of memory: its first byte, and its layout."""

    position: int
    """The index among the given arrays."""
    dtype: DType
    offset: int
    strides: tuple[int, ...]
    shape: tuple[int, ...]


class SharedMemory(Record):
    """Memory that several arrays share: its bytes as an array of their library, and the views."""

    memory: Array
    owner: Engine
    views: tuple[View, ...]

    def views_of(self, memory: Array, engine: Engine) -> dict[int, Array]:
        """Return the same views of a copy of the memory, by position."""
        start = _start(memory, engine)
        return {
            view.position: engine.view(
                memory, view.dtype, start + view.offset, view.strides, view.shape
            )
            for view in self.views
        }

    def cast(self, dtype: DType) -> SharedMemory | None:
        """Return the same views of a cast copy; `None` for several dtypes, or parts of elements."""
        own, size = self.views[0].dtype, self.views[0].dtype.itemsize
        if own == dtype or all(view.dtype.kind != "float" for view in self.views):
            return self
        steps = (step for view in self.views for step in (view.offset, *view.strides))
        if any(view.dtype != own for view in self.views) or any(step % size for step in steps):
            return None
        owner, count = self.owner, self.memory.shape[0] // size
        start = _start(self.memory, owner)
        copy = cast(owner.view(self.memory, own, start, (size,), (count,)), owner, dtype)
        length = (count * dtype.itemsize,)
        memory = owner.view(copy, DTYPES["uint8"], _start(copy, owner), (1,), length)
        views = (
            replace(
                view,
                dtype=dtype,
                offset=view.offset // size * dtype.itemsize,
                strides=tuple(step // size * dtype.itemsize for step in view.strides),
            )
            for view in self.views
        )
        return SharedMemory(memory, owner, tuple(views))


def _start(memory: Array, engine: Engine) -> int:
    """Return the position of an array's first byte in its allocation."""
    storage = engine.storage(memory)
    return storage.offset if storage else 0


def cast(x: Array, engine: Engine, dtype: DType) -> Array:
    """Return an array in another dtype on its device; too large numbers become infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        return engine.ops.astype(x, dtype)


def shared_memory(values: Sequence[Array], positions: Sequence[int]) -> list[SharedMemory]:
    """Return the blocks of memory, if libraries report it, in which arrays at positions overlap."""
    known = [span for position in positions if (span := _span(values[position], position))]
    spans = sorted(known, key=lambda span: (span.place, span.start))
    together: list[list[_Span]] = []
    reach = 0
    for span in spans:
        if together and span.place == together[-1][0].place and span.start < reach:
            together[-1].append(span)
            reach = max(reach, span.stop)
        else:
            together.append([span])
            reach = span.stop
    return [
        _as_shared(values, group)
        for near in together
        for group in _overlapping(near)
        if len(group) > 1
    ]


def can_hold(engine: Engine, device: Device, shared: SharedMemory) -> bool:
    """Whether an engine can have these views on a device."""
    if not engine.has_views:
        return False
    try:
        for dtype in {view.dtype for view in shared.views}:
            engine.empty((0,), dtype, device)
    except UnsupportedError:
        return False
    aligned = all(
        step % view.dtype.itemsize == 0 and step >= 0
        for view in shared.views
        for step in (view.offset, *view.strides)
    )
    return aligned or engine.name == shared.owner.name == "numpy"


class _Span(Record):
    """The bytes of an array in memory; `place` is its library, device and allocation."""

    place: tuple[str, str, int, int]
    start: int
    stop: int
    position: int
    storage: Storage
    itemsize: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.storage.shape) * self.itemsize

    def outline(self) -> Any:
        """Return an array with this layout at an invalid address: only `shares_memory` takes it."""
        interface = {
            "data": (_SOMEWHERE + self.storage.offset, True),
            "shape": self.storage.shape,
            "strides": self.storage.strides,
            "typestr": f"|V{self.itemsize}",
            "version": 3,
        }
        return np.asarray(SimpleNamespace(__array_interface__=interface))


def _span(value: Array, position: int) -> _Span | None:
    """Return the span of an array; `None` if it cannot share memory, or its memory is unknown."""
    owner = _owner(value)
    is_subclass = owner.name == "numpy" and type(value) not in (np.ndarray, np.memmap)
    if not owner.has_views or is_subclass or not getattr(value.dtype, "isnative", True):
        return None
    try:
        storage, itemsize = owner.storage(value), owner.dtype_of(value).itemsize
    except Exception:  # an unusual type or layout: moving it alone reports the error
        return None
    if storage is None or 0 in storage.shape:
        return None
    start = stop = storage.offset
    for length, stride in zip(storage.shape, storage.strides, strict=True):
        way = (length - 1) * stride
        start, stop = (start + way, stop) if way < 0 else (start, stop + way)
    place = (owner.name, str(owner.devices_of(value)[0]), *storage.allocation)
    return _Span(place, start, stop + itemsize, position, storage, itemsize)


def _overlapping(spans: list[_Span]) -> list[list[_Span]]:
    """Return neighbouring spans in groups that are moved as one, if that costs little more."""
    whole = max(span.stop for span in spans) - spans[0].start
    if whole <= 2 * sum(span.nbytes for span in spans):
        return [spans]
    groups: list[list[_Span]] = []
    for span in spans:
        met = [group for group in groups if any(_meet(span, other) for other in group)]
        groups = [group for group in groups if group not in met]
        together = (one for group in (*met, [span]) for one in group)
        groups.append(sorted(together, key=attrgetter("start")))
    return groups


def _meet(one: _Span, other: _Span) -> bool:
    if one.stop <= other.start or other.stop <= one.start:
        return False
    try:
        effort: Any = _MOST_WORK  # NumPy's own annotation knows two numbers only
        return bool(np.shares_memory(one.outline(), other.outline(), effort))
    except np.exceptions.TooHardError:
        return True


def _as_shared(values: Sequence[Array], spans: list[_Span]) -> SharedMemory:
    start, stop = spans[0].start, max(span.stop for span in spans)
    first = values[spans[0].position]
    owner = _owner(first)
    memory = owner.view(first, DTYPES["uint8"], start, (1,), (stop - start,))
    views = tuple(
        View(
            span.position,
            owner.dtype_of(values[span.position]),
            span.storage.offset - start,
            span.storage.strides,
            span.storage.shape,
        )
        for span in spans
    )
    return SharedMemory(memory, owner, views)


# Copies between the host and a device


def upload(
    arrays: Sequence[Any], engine: Engine, device: Device, narrow: bool, failed_at: list[int]
) -> list[Array]:
    """Place NumPy arrays on a device, in order; append the position of an error to `failed_at`."""
    placed: list[Any] = [None] * len(arrays)
    staged: list[int] = []
    together = _upload_together(arrays, engine, device)
    for number, array in enumerate(arrays):
        if number in together:
            placed[number] = together[number]
            continue
        try:
            target = _staged_target(array, engine, device)
            if target is None:
                placed[number] = engine.place(array, device, narrow=narrow)
            else:
                placed[number] = target
                staged.append(number)
        except Exception:
            failed_at.append(number)
            raise
    ring = ring_of(device) if staged else None
    if ring is not None:
        # They must live until the copy has ended: the pieces only know addresses.
        large = [arrays[number] for number in staged]
        sources = [np.ascontiguousarray(x, x.dtype.newbyteorder("=")) for x in large]
        targets = [_address(placed[number], engine) for number in staged]
        pairs = zip(sources, targets, strict=True)
        ring.upload([Piece(source.ctypes.data, target, source.nbytes) for source, target in pairs])
    return placed


def _upload_together(
    arrays: Sequence[HostArray], engine: Engine, device: Device
) -> dict[int, Array]:
    """Place many small arrays of one kind together; return each, by position, in its own memory."""
    if device.backend != "cuda" or len(arrays) < MANY:
        return {}
    alike: dict[object, list[int]] = defaultdict(list)
    for number, kind in enumerate(map(_kind_of, arrays)):
        alike[kind].append(number)
    placed: dict[int, Array] = {}
    for numbers in alike.values():
        first = arrays[numbers[0]]
        small = type(first) is np.ndarray and first.ndim and 0 < first.nbytes < WORTH_STAGING
        if small and len(numbers) >= MANY:
            placed.update(
                zip(numbers, _separated_rows(arrays, numbers, engine, device), strict=False)
            )
    return placed


def _separated_rows(
    arrays: Sequence[HostArray], numbers: list[int], engine: Engine, device: Device
) -> list[Array]:
    """Place arrays of one dtype and shape: packed, copied, and separated again on the device."""
    ring = ring_of(device)
    if ring is None:
        return []
    first = arrays[numbers[0]]
    dtype = as_dtype(first.dtype)
    try:
        engine.empty((1, *first.shape), dtype, device)
    except UnsupportedError:
        return []  # the plain copy reports the error, or narrows
    size = max(MANY, _TOGETHER // first.nbytes)
    rows: list[Array] = []
    for start in range(0, len(numbers), size):
        some = [arrays[number] for number in numbers[start : start + size]]
        target = engine.empty((len(some), *first.shape), dtype, device)
        ring.upload_rows(some, _address(target, engine))
        rows += engine.separate(target)
    return rows


def download(array: Array, engine: Engine) -> HostArray:
    """Return an array of an engine as a NumPy array with its own memory."""
    places = engine.devices_of(array) if _large_size(array) else ()
    ring = ring_of(places[0]) if len(places) == 1 else None
    if ring is None or engine.address(array) is None:
        return engine.to_host(array)
    engine.finish([array])
    host = np.empty(tuple(array.shape), engine.dtype_of(array).numpy())
    ring.download([Piece(host.ctypes.data, _address(array, engine), host.nbytes)])
    return host


def _move_within(
    array: Array,
    engine: Engine,
    places: Sequence[Device],
    device: Device,
    *,
    detached: bool = False,
) -> Array:
    """Move an array within its library; a large one that is `detached` goes through the ring."""
    history = getattr(array, "requires_grad", False) and not detached
    from_host = len(places) == 1 and places[0].backend == "cpu" and device.backend == "cuda"
    size = _large_size(array)
    source = engine.address(array) if from_host and not history and size else None
    ring = ring_of(device) if source is not None else None
    if source is None or ring is None:
        return engine.move(array, device)
    target = engine.empty(tuple(array.shape), engine.dtype_of(array), device)
    address = engine.address(target)
    if address is None:
        return engine.move(array, device)
    ring.upload([Piece(source, address, size)])
    return target


def _staged_target(array: HostArray, engine: Engine, device: Device) -> Array | None:
    """Return memory on the device for an array that is worth staging; `None` for any other."""
    if array.nbytes < WORTH_STAGING or ring_of(device) is None:
        return None
    try:
        target = engine.empty(array.shape, as_dtype(array.dtype), device)
    except UnsupportedError:
        return None  # the plain copy reports the error, or narrows
    return None if engine.address(target) is None else target


def _address(array: Array, engine: Engine) -> int:
    address = engine.address(array)
    assert address is not None
    return address


def _large_size(array: object) -> int:
    """Return the bytes of an array that is worth staging; 0 for any other."""
    try:
        size = getattr(array, "nbytes", 0)
    except RuntimeError:  # sparse tensors of PyTorch have none
        return 0
    return size if isinstance(size, int) and size >= WORTH_STAGING else 0


hooks.to_device.register(to_device)
