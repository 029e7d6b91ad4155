"""Arrays over the devices of a mesh, by JAX's own sharding. Importing this imports JAX."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from anydevice.core.device import Device
from anydevice.engines import registry
from anydevice.parallel.mesh import Mesh

_AXES = ("replicate", "shard")


def sharded(x: Any, mesh: Mesh) -> Any:
    """An array cut along its longest axis that divides evenly; a copy everywhere without one."""
    spec: list[str | None] = [None] * x.ndim
    axes = [axis for axis, size in enumerate(x.shape) if size and size % mesh.shard == 0]
    if axes and mesh.shard > 1:
        longest = max(axes, key=lambda axis: x.shape[axis])
        spec[longest] = "shard"
    return jax.device_put(x, NamedSharding(_native(mesh), PartitionSpec(*spec)))


def replicated(x: Any, mesh: Mesh) -> Any:
    """A copy of an array on every device."""
    return jax.device_put(x, NamedSharding(_native(mesh), PartitionSpec()))


def divided(x: Any, mesh: Mesh) -> Any:
    """The rows of an array, divided over all devices; a copy everywhere where that is uneven."""
    if not x.ndim or x.shape[0] % mesh.size:
        return replicated(x, mesh)
    return jax.device_put(x, NamedSharding(_native(mesh), PartitionSpec(_AXES)))


def bytes_a_device(tree: Any) -> dict[Device, int]:
    """The bytes of the arrays of a tree on each device."""
    engine = registry.load("jax")
    places = {engine.native(device): device for device in engine.devices()}
    found: dict[Device, int] = {}
    for x in jax.tree.leaves(tree):
        for part in x.addressable_shards:
            place = places[part.device]
            found[place] = found.get(place, 0) + part.data.nbytes
    return found


def _native(mesh: Mesh) -> Any:
    return _made(mesh.devices, mesh.replicate, mesh.shard)


@lru_cache(maxsize=64)
def _made(devices: tuple[Device, ...], replicate: int, shard: int) -> Any:
    engine = registry.load("jax")
    natives = np.array([engine.native(device) for device in devices], dtype=object)
    grid = natives.reshape(replicate, shard)
    return jax.sharding.Mesh(grid, _AXES, axis_types=(AxisType.Auto, AxisType.Auto))
