"""Moving arrays, and plain nests of them, to a device and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anydevice.choose.scope import device as choose_device
from anydevice.core.device import Device
from anydevice.engines import registry
from anydevice.engines.ownership import owner_of
from anydevice.engines.places import place_of
from anydevice.errors import TransferError

Move = Callable[[Any], Any]


def to_device(tree: Any, device: Device | str) -> Any:
    """Every array in `tree` on `device`, in the same nest of dicts, lists and tuples.

    A NumPy array becomes an array of the device's engine. An array of another library stays in
    that library where it can live on the device, and becomes the engine's where it cannot. What
    is already there is returned as it is; what is not an array is left alone.

    >>> import anydevice, numpy
    >>> anydevice.to_device({"weight": numpy.ones(3), "name": "layer"}, "cpu")["name"]
    'layer'

    Raises `DeviceNotFoundError` where the device is not usable, and `TransferError`, naming the
    leaf, where one cannot be moved.
    """
    target = device if isinstance(device, Device) and device.usable else choose_device(device)
    return _each(tree, lambda leaf: _place(leaf, target), "")


def to_numpy(tree: Any) -> Any:
    """Every array in `tree` as a NumPy array, in the same nest."""
    return _each(tree, _to_host, "")


def synchronize(device: Device | str | None = None) -> None:
    """Wait until everything that was started on the device has ended."""
    target = choose_device(device)
    if target.engine:
        registry.load(target.engine).synchronize(place_of(target))


def _place(leaf: Any, target: Device) -> Any:
    owner = owner_of(leaf)
    if owner is None or target.engine is None or _holds_no_numbers(leaf):
        return leaf
    standing = target.standing
    place = place_of(target)
    if owner.name != "numpy" and standing and owner.name in standing.engines:
        return leaf if owner.devices_of(leaf) == (place,) else owner.move(leaf, place)
    if owner.name == target.engine:
        return leaf
    return registry.load(target.engine).from_host(owner.to_host(leaf), place)


def _holds_no_numbers(leaf: Any) -> bool:
    """Whether it is a NumPy array of texts, dates or objects, which live on the host alone."""
    return getattr(leaf.dtype, "kind", None) in ("O", "S", "U", "M", "m") or bool(
        getattr(leaf.dtype, "names", None)
    )


def _to_host(leaf: Any) -> Any:
    owner = owner_of(leaf)
    return leaf if owner is None or owner.name == "numpy" else owner.to_host(leaf)


def _each(node: Any, move: Move, path: str) -> Any:
    if type(node) is dict:
        return {key: _each(value, move, f"{path}[{key!r}]") for key, value in node.items()}
    if type(node) in (list, tuple):
        items = (_each(value, move, f"{path}[{i}]") for i, value in enumerate(node))
        return type(node)(items)
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        fields = (_each(getattr(node, name), move, f"{path}.{name}") for name in node._fields)
        return type(node)(*fields)
    try:
        return move(node)
    except Exception as error:  # each library refuses with errors of its own
        where = path or "the array"
        raise TransferError(f"{where}: {error}", path) from error
