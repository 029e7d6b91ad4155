"""Arrays over the devices of a mesh, by JAX's own sharding. Importing this imports JAX."""

from __future__ import annotations

import atexit
import os
import sys
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax._src.lib import _jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from anydevice._core.device import Device
from anydevice._core.protocols import Launched
from anydevice._core.text import joined
from anydevice._libraries.exchange import HostExchange
from anydevice._libraries.group import free_port, meet, prove
from anydevice._machine.engines import registry
from anydevice._machine.engines.library_settings import jax_started
from anydevice.errors import ConfigurationError

if TYPE_CHECKING:
    from anydevice._parallel.mesh import Mesh

_AXES = ("replicate", "shard")
_HEARTBEAT = 20
"""Seconds without a heartbeat after which JAX considers a process dead."""


class JaxProcesses(HostExchange):
    def every(self, numbers: Any) -> Any:
        from jax.experimental import multihost_utils

        JaxProcesses.calls += 1
        return np.asarray(multihost_utils.process_allgather(numbers))

    def sum(self, arrays: Sequence[jax.Array], share: float = 1.0) -> list[jax.Array]:
        """Return sums over all processes, weighted by their shares; not for compiled functions."""
        engine = registry.load("jax")
        parts = [self.every(np.asarray(engine.to_host(x)) * np.float32(share)) for x in arrays]
        pairs = zip(parts, arrays, strict=True)
        return [jax.device_put(rows.sum(0).astype(x.dtype), x.sharding) for rows, x in pairs]

    def from_first(self, x: jax.Array) -> Any:
        from jax.experimental import multihost_utils

        return multihost_utils.broadcast_one_to_all(x)


def is_joined() -> bool:
    """Whether this process has already joined `jax.distributed`."""
    return bool(jax.distributed.is_initialized())


def join(launched: Launched | None) -> JaxProcesses:
    """Return the processes of `jax.distributed`, joined before JAX starts its devices."""
    if not is_joined():
        assert launched is not None, "a process alone joins none"
        if jax_started():
            raise ConfigurationError(
                "JAX has already started its devices, and can join other processes only before; "
                "call parallel.initialize() first",
                source="parallel.initialize",
            )
        board = meet(launched, lambda: {"jax": JaxProcesses.calls})
        port = board.from_first("port", str(free_port()))  # the board has the launcher's
        own = "127.0.0.1" if launched.is_local else "[::]"
        if launched.is_local:
            _jax.make_gloo_tcp_collectives = partial(_jax.make_gloo_tcp_collectives, hostname=own)
        # JAX would intercept SIGTERM as the preemption notice of a cluster.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            f"{'127.0.0.1' if launched.is_local else launched.address}:{port}",
            launched.size,
            launched.rank,
            cluster_detection_method="deactivate",
            initialization_timeout=2 * board.limit,
            coordinator_bind_address=f"{own}:{port}",
            heartbeat_timeout_seconds=_HEARTBEAT,
        )
        atexit.register(_end_failed)
        JaxProcesses.key = prove(JaxProcesses(launched.rank, launched.size).gather, launched)
    return JaxProcesses(jax.process_index(), jax.process_count())


def leave() -> None:
    """Leave the other processes, once all have called this."""
    jax.distributed.shutdown()


def _end_failed() -> None:
    """End a program that failed: JAX would wait for the others, which wait for this process."""
    error = getattr(sys, "last_value", None)
    if error is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        code = error.code if isinstance(error, SystemExit) else 1
        os._exit(code & 0xFF if isinstance(code, int) else 1)


def sharded(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Return an array cut along its longest axis that divides evenly, else replicated."""
    spec: list[str | None] = [None] * x.ndim
    axes = [axis for axis, size in enumerate(x.shape) if size and size % mesh.shard == 0]
    if axes and mesh.shard > 1:
        longest = max(axes, key=lambda axis: x.shape[axis])
        spec[longest] = "shard"
    return _place(x, mesh, PartitionSpec(*spec))


def replicated(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Return a copy of an array on every device."""
    return _place(x, mesh, PartitionSpec())


def divided(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Return an array with its rows divided over all devices, replicated if that is uneven."""
    if isinstance(x, jax.core.Tracer) and x.ndim:
        place = NamedSharding(_native(mesh), PartitionSpec(_AXES))
        return jax.lax.with_sharding_constraint(x, place)
    if not x.ndim or x.shape[0] % mesh.size:
        return replicated(x, mesh)
    return _place(x, mesh, PartitionSpec(_AXES))


def gathered(x: jax.Array) -> jax.Array:
    """Gather an array over processes onto one device of each; all of them must call this."""
    if not x.is_fully_replicated:
        x = _placed_as(NamedSharding(x.sharding.mesh, PartitionSpec()))(x)
    return x.block_until_ready().addressable_data(0)


def bytes_a_device(tree: Any) -> dict[Device, int]:
    """Return the bytes of the arrays of a tree on each device of this process."""
    engine = registry.load("jax")
    places = {engine.native(device): device for device in engine.devices()}
    sizes: Counter[Device] = Counter()
    for x in jax.tree.leaves(tree):
        for part in x.addressable_shards:
            sizes[places[part.device]] += part.data.nbytes
    return sizes


def of_processes(numbers: Sequence[int], mesh: Mesh) -> Any:
    """Return the numbers of each process, one row each, ready once all have called this."""
    JaxProcesses.calls += 1
    mine = np.asarray([numbers], np.int32)
    place = NamedSharding(_native(mesh), PartitionSpec(_AXES))
    shape = (mesh.size, len(numbers))
    spread = jax.make_array_from_callback(shape, place, lambda index: mine)
    return _one_each(len(mesh.devices), NamedSharding(_native(mesh), PartitionSpec()))(spread)


@lru_cache(maxsize=64)
def _one_each(devices: int, place: NamedSharding) -> Any:
    return jax.jit(lambda rows: rows[::devices], out_shardings=place)


def _place(x: jax.Array, mesh: Mesh, spec: PartitionSpec) -> Any:
    place = NamedSharding(_native(mesh), spec)
    if mesh.group is None:
        return jax.device_put(x, place)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if x.sharding.is_equivalent_to(place, x.ndim):
            return x
        return _placed_as(place)(x).block_until_ready()
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, place, lambda index: host[index])


@lru_cache(maxsize=64)
def _placed_as(place: NamedSharding) -> Any:
    return jax.jit(lambda x: x, out_shardings=place)


def _native(mesh: Mesh) -> Any:
    return _make_grid(mesh.devices, mesh.replicate, mesh.shard, mesh.group is not None)


@lru_cache(maxsize=64)
def _make_grid(devices: tuple[Device, ...], replicate: int, shard: int, all_processes: bool) -> Any:
    engine = registry.load("jax")
    natives = [engine.native(device) for device in devices]
    if len(set(natives)) < len(natives):  # fakes
        text = f"JAX takes {joined(map(str, devices))} for {len(set(natives))}, and needs distinct"
        raise ConfigurationError(f"{text} devices: enter fake_machine before JAX starts", "devices")
    if all_processes:
        natives = _of_each_process(natives)
    grid = np.array(natives, dtype=object).reshape(replicate, shard)
    return jax.sharding.Mesh(grid, _AXES, axis_types=(AxisType.Auto, AxisType.Auto))


def _of_each_process(own: list[Any]) -> list[Any]:
    """Return the devices of all processes that match this process's devices by position."""
    every: dict[int, list[Any]] = {}
    for device in jax.devices(own[0].platform):
        every.setdefault(device.process_index, []).append(device)
    here = every[jax.process_index()]
    at = [here.index(device) for device in own]
    if any(len(theirs) <= max(at) for theirs in every.values()):
        counts = ", ".join(str(len(theirs)) for theirs in every.values())
        raise ConfigurationError(
            f"each process needs as many devices as this one, and they have {counts}",
            source="devices",
        )
    return [every[rank][index] for rank in sorted(every) for index in at]
