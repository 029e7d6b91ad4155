"""Trees of arrays over several devices: divided into rows, sharded, gathered, replicated."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

from anydevice._arrays.move import is_array, to_device
from anydevice._arrays.trees.tree import flatten
from anydevice._libraries.registry import is_torch_module, part
from anydevice._machine.engines.registry import owner_of
from anydevice._parallel.mesh import Devices, Mesh, devices_of, no_collectives
from anydevice.errors import ConfigurationError


def row_ranges(rows: int, parts: int) -> list[tuple[int, int]]:
    """Return the start and end of each of `parts`; longer ones come first.

    >>> row_ranges(50, 4)
    [(0, 13), (13, 26), (26, 38), (38, 50)]
    >>> row_ranges(2, 3)
    [(0, 1), (1, 2), (2, 2)]
    """
    size, more = divmod(rows, parts)
    ends = [number * size + min(number, more) for number in range(parts + 1)]
    return list(pairwise(ends))


def split_batch(data: Any, devices: Devices | Mesh) -> list[Any]:
    """Return the rows of a tree of arrays divided over devices: one tree for each, on that device.

    >>> [len(part) for part in split_batch(numpy.arange(5), ["cpu"])]
    [5]

    If rows do not divide evenly, the first parts have one more, and the last ones may have none.
    For a mesh over several processes, only the parts of this process are returned. Raises
    `ConfigurationError` if arrays differ in their number of rows.
    """
    here: tuple[Any, ...]
    if isinstance(devices, Mesh):
        here, count = devices.devices, devices.size
        first = devices.rank * len(here)
    else:
        here = _each_of(devices)
        first, count = 0, len(here)
    leaves, rebuild = flatten(data, is_array)
    ranges = row_ranges(_rows(leaves), count)[first : first + len(here)]
    return [
        to_device(rebuild([x[start:stop] for x in leaves.values]), device)
        for (start, stop), device in zip(ranges, here, strict=True)
    ]


def replicate(model: Any, devices: Devices | Mesh) -> list[Any]:
    """Return a copy of a model, or of any tree of arrays, on each of the devices.

    >>> len(replicate(nn.build(nn.Dense(2, 3), device="cpu"), ["cpu"]))
    1

    A module of PyTorch is copied before it is moved: the given one stays where it is.
    """
    here = devices.devices if isinstance(devices, Mesh) else _each_of(devices)
    in_place = is_torch_module(model)
    return [to_device(copy.deepcopy(model) if in_place else model, device) for device in here]


def shard(tree: Any, mesh: Mesh) -> Any:
    """Return the same tree with every array divided over the devices of a mesh.

    Each array is cut along its longest axis that divides evenly by `mesh.shard`, and copied to
    the `mesh.replicate` groups; one without such an axis is copied to every device.

    >>> shard({"weight": numpy.ones((4, 2), "float32")}, Mesh("cpu"))["weight"].shape
    (4, 2)

    JAX holds such arrays; over processes, PyTorch does too, as a `DTensor`. Raises
    `UnsupportedError` for other engines and more than one device.
    """
    if mesh.size > 1 and mesh.engine not in ("jax", "torch"):
        raise no_collectives(
            f"{mesh.engine} does not shard over {mesh.size} processes",
            "take devices of PyTorch or JAX",
        )

    def placed(x: Any) -> Any:
        if not _is_spread(x):  # a spread array moves from its devices, without being gathered
            x = to_device(x, mesh.devices[0], convert=True)
        return x if mesh.size == 1 else part(str(mesh.engine), "mesh").sharded(x, mesh)

    leaves, rebuild = flatten(tree, is_array)
    # Leaf by leaf: one device never holds more than one whole array.
    return rebuild([placed(x) for x in leaves.values])


def gather(tree: Any) -> Any:
    """Return the same tree with every sharded array in one piece, on one device.

    >>> gather(shard(numpy.ones(4, "float32"), Mesh("cpu"))).shape
    (4,)
    """
    leaves, rebuild = flatten(tree, is_array)
    return rebuild([_gather_array(x) for x in leaves.values])


def _is_spread(x: Any) -> bool:
    owner = owner_of(x)
    if getattr(x, "is_fully_addressable", True) is False:
        return True
    return hasattr(x, "full_tensor") or (owner is not None and len(owner.devices_of(x)) > 1)


def _gather_array(x: Any) -> Any:
    if hasattr(x, "full_tensor"):  # a DTensor of PyTorch
        return part("torch", "mesh").whole_of(x)
    if getattr(x, "is_fully_addressable", True) is False:  # of JAX, in several processes
        return part("jax", "mesh").gathered(x)
    owner = owner_of(x)
    places = () if owner is None else owner.devices_of(x)
    if owner is None or len(places) < 2 or owner.shares_memory:
        return x
    return owner.move(x, places[0])


def _each_of(devices: Devices) -> tuple[Any, ...]:
    """Return the devices of a list, each by any engine: they need not compute together."""
    if isinstance(devices, str):
        return devices_of(devices)
    names = [devices] if not isinstance(devices, list | tuple) else list(devices)
    if not names:
        raise ConfigurationError("devices is empty; name at least one", source="devices")
    return tuple(names)


def _rows(leaves: Any) -> int:
    counts = [tuple(x.shape)[:1] for x in leaves.values]
    if len(set(counts)) != 1 or counts[0] == ():
        shapes = ", ".join(
            f"{leaf.path or 'data'} {tuple(x.shape)}"
            for leaf, x in zip(leaves, leaves.values, strict=True)
        )
        raise ConfigurationError(
            f"the arrays of a batch must have the same number of rows; they are {shapes or 'none'}",
            source="data",
        )
    return int(counts[0][0])
