"""`to_device`, `to_numpy` and `device_of`: trees of arrays are moved to a device and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NoReturn, TypeGuard

from anydevice._arrays.copy import download, move, upload
from anydevice._arrays.memory.out_of_memory import raise_if_oom
from anydevice._arrays.share import SharedMemory, can_hold, cast, shared_memory
from anydevice._arrays.trees.tree import Leaf, Leaves, flatten
from anydevice._core import hooks
from anydevice._core.array import Array
from anydevice._core.device import Device, not_driven
from anydevice._core.dtypes import DType, as_dtype
from anydevice._core.engine import Engine
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
)

_numeric: dict[Any, bool] = {}
_base_of = attrgetter("base")
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
    that library where it can live on the device, and becomes the engine's where it cannot;
    `convert=True` makes every array the engine's. What is already there is returned as it is.
    Between libraries a copy is made; `copy=False` may share memory instead, where both can.

    `device` may be a `Device`, a name, or a library's own object, such as a `torch.device`.
    `tree` may be an array or any tree of dicts, lists, tuples, dataclasses, modules, optimizer
    states, and types added with `register_type`. A `torch.nn.Module` is moved in place and
    returned. Arrays that occur twice stay one array.

    >>> import anydevice, numpy
    >>> anydevice.to_device({"weight": numpy.ones(3), "name": "layer"}, "cpu")["name"]
    'layer'

    `dtype`, a name or a library's own dtype, is for the floating arrays: they are cast to it, and
    integers, booleans and complex numbers stay as they are. Numbers too large for it become
    infinite.

    >>> tree = {"weight": numpy.ones(2), "ids": numpy.arange(2)}
    >>> anydevice.to_device(tree, anydevice.device("cpu", engine="numpy"), dtype="float16")
    {'weight': array([1., 1.], dtype=float16), 'ids': array([0, 1])}

    Otherwise precision is never lost silently: where the engine has no 64-bit dtypes, such an array
    is refused unless `narrow=True`. Raises `DeviceNotFoundError` if the device is not usable,
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

    >>> import anydevice, numpy
    >>> anydevice.device_of({"x": numpy.ones(2), "y": 3}), anydevice.device_of("text")
    (Device("cpu", engine='numpy'), None)

    Its engine is the library of the arrays, so `device_of(x)(constant)` gives an array of the same
    library. If the arrays are of several libraries, it is the default engine of the device.

    Raises `DeviceMismatchError`, with two paths, if they are on different devices, or an array is
    sharded over several.
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

    The arguments, which may be trees, are those of the call by name; where they are all on one
    device, the library's message tells whether others are not. Returns for any other error.
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
    """Wait until all work that was started on the device has ended.

    Raises `OutOfMemoryError` if that ran out of memory.
    """
    target = one_device(device)
    if target.engine:
        try:
            registry.load(target.engine).synchronize(target)
        except Exception as error:
            raise_if_oom(error, target)
            raise


def take_over(tree: object) -> None:
    """Tell the libraries that the calling thread now uses arrays that another one placed."""
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
    """Whether `x` is to be moved; one without data is too, and is refused by its path."""
    return is_array(x) or ((owner := owner_of(x)) is not None and owner.is_meta(x))


class Destination:
    """A usable device and its engine, looked up once and kept.

    `engines` are the libraries whose arrays can live there.
    """

    def __init__(self, device: Device) -> None:
        if device.engine is None:
            raise not_driven(device)
        status = device.status
        self.device = device
        self.engine: Engine = registry.load(device.engine)
        self.engines = frozenset(status.engines if status else (device.engine,))
        self.already_there: dict[type, Callable[[Any], bool]] = {}
        """By the type of an array: a quick test whether it is here already."""
        self.from_host: set[type] = set()
        """Types of host arrays, which become the engine's."""

    def keeps(self, owner: Engine) -> bool:
        """Whether an array of that library stays in it when it is sent here."""
        return owner.name == self.engine.name or (
            owner.name != "numpy" and owner.name in self.engines
        )

    def remember(self, array: Array, owner: Engine) -> None:
        """Remember how to tell quickly that an array of this type is here already."""
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


_kept: dict[tuple[str, int, str | None], tuple[object, Destination]] = {}


def destination_of(device: Device | str) -> Destination:
    """Return the destination for a device or its name.

    Raises `DeviceNotFoundError` if the device is not usable.
    """
    if not isinstance(device, Device):
        return destination_of(one_device(device))
    key = (device._backend, device._index, device._engine)
    known = _kept.get(key)
    if known is not None and known[0] is discovery.kept_report():
        return known[1]
    usable = device if device.usable else one_device(device)
    destination = Destination(usable)
    _kept[key] = (discovery.discover(), destination)
    return destination


class _Move:
    """One call of `to_device`: where to, with which options, and the leaves that errors name."""

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
        done = {view.position for shared in together for view in shared.views}
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
                    moved[position] = _host_copy(value, owner)
                    from_host.append(position)
                    if owner.name == "numpy":
                        target.from_host.add(type(value))
            except Exception as error:
                _raise_named(self.leaves, position, error, target.device)
        self._upload(moved, from_host)
        if self.dtype is not None:
            self._cast(moved, [n for n in range(len(moved)) if n not in done], ahead=False)
        bare = _Move(target, self.convert, self.copy, self.narrow, None, None)
        for shared in together:
            try:
                (memory,) = bare.all([shared.memory])
            except Exception as error:
                _raise_named(self.leaves, shared.views[0].position, error, target.device)
            for position, view in shared.views_of(memory, self._engine_for(shared.owner)).items():
                moved[position] = view
        return moved

    def _cast(self, moved: list[Array], positions: Iterable[int], *, ahead: bool) -> None:
        """Cast the floating arrays at these positions, before or after they are moved.

        The smaller of the two dtypes is moved.
        """
        for position in positions:
            value = moved[position]
            owner = _owner(value)
            try:
                if (dtype := self._other_dtype(value, owner)) is None:
                    continue
                if not ahead or dtype.itemsize <= owner.dtype_of(value).itemsize:
                    moved[position] = cast(value, owner, dtype)
            except Exception as error:
                _raise_named(self.leaves, position, error, self.target.device)

    def _other_dtype(self, value: Array, owner: Engine) -> DType | None:
        """Return the dtype that an array is cast to; `None` if it stays as it is."""
        if self.dtype is None or owner.is_meta(value):
            return None
        own = owner.dtype_of(value)
        return None if own.kind != "float" or own == self.dtype else self.dtype

    def _stays(self, owner: Engine) -> bool:
        target = self.target
        return owner.name == target.engine.name or (not self.convert and target.keeps(owner))

    def _engine_for(self, owner: Engine) -> Engine:
        return owner if self._stays(owner) else self.target.engine

    def _sharing(self, values: Sequence[Array], leaves: Leaves) -> list[SharedMemory]:
        """Return the memory that several of the arrays share, and can share on the target too."""
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
        if not owner.has_views:
            return False
        if getattr(value, "requires_grad", False) and not leaf.kept:
            return False  # a gradient has to flow through the copy of this very array
        is_there = self._stays(owner) and owner.devices_of(value) == (self.target.device,)
        return not is_there or self._other_dtype(value, owner) is not None

    def _within_library(self, value: Array, owner: Engine, position: int) -> Array:
        target, places = self.target, owner.devices_of(value)
        if owner.shares_memory and target.device in places:
            # Such a library computes lazily, and another thread could not do it later.
            owner.finish([value])
            return value
        if places == (target.device,):
            target.remember(value, owner)
            return value
        detached = self.leaves is not None and self.leaves[position].kept
        return move(value, owner, places, target.device, detached=detached)

    def _share_memory(self, value: Array, owner: Engine) -> Array | None:
        """Return the same memory in the target's library; `None` if it cannot be shared."""
        engine = self.target.engine
        try:
            adopted = engine.adopt(owner.export(value))
        except Exception:  # each library refuses with its own errors; then a copy is made
            return None
        return adopted if engine.devices_of(adopted) == (self.target.device,) else None

    def _upload(self, moved: list[Array], positions: list[int]) -> None:
        """Replace the host arrays at these positions by arrays of the target's engine."""
        target, failed_at = self.target, [0]
        try:
            arrays = [moved[position] for position in positions]
            placed = upload(arrays, target.engine, target.device, self.narrow, failed_at)
        except Exception as error:
            _raise_named(self.leaves, positions[failed_at[-1]], error, target.device)
        for position, array in zip(positions, placed, strict=True):
            moved[position] = array


def _host_copy(value: Array, owner: Engine) -> Array:
    return value if owner.name == "numpy" else download(value, owner)


def _on_host(values: Sequence[Array], leaves: Leaves | None) -> list[Array]:
    host = list(values)

    def copied(value: Array, position: int) -> Array:
        owner = _owner(value)
        try:
            return _host_copy(value, owner)
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
    """Raise an error that names the leaf, from this one, or this one where it does so already."""
    if isinstance(error, TransferError):
        raise error
    path = leaves[position].path if leaves else ""
    raise_if_oom(error, place, what=path)
    reason = str(error) if isinstance(error, AnyDeviceError) else f"{type(error).__name__}: {error}"
    raise TransferError(f"{path or 'the array'}: {reason}", path) from error


hooks.to_device.register(to_device)
