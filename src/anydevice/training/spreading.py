"""How a training lies on its devices: on one, or on the devices of a mesh.

The steps stay the same functions. On several devices of JAX, only where their arrays lie changes,
and the compiler adds what the devices tell each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from anydevice.core.device import Device
from anydevice.core.engine import Absent
from anydevice.core.record import replace
from anydevice.core.text import format_size
from anydevice.core.trees import Tree, leaves, mapped
from anydevice.core.warn import warn
from anydevice.errors import ConfigurationError
from anydevice.memory.stats import memory_stats
from anydevice.parallel.mesh import Mesh, devices_of
from anydevice.parallel.placing import gather
from anydevice.training.batches import placer, rows_of
from anydevice.training.steps import StepState
from anydevice.transfer.moving import to_device

Function = Callable[..., Any]

STRATEGIES = ("auto", "replicate", "shard")
_HELD = 4
"""Numbers that a training holds for each parameter: itself, its gradient and two moments."""


class Spread:
    """A training on one device. `text` says how it lies on several."""

    text: str | None = None
    is_several = False
    """Whether several processes train."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.place = placer(device)
        """Moves a batch to where steps take it."""

    @property
    def reads_to(self) -> Device:
        """Where a file is read to before `state` places it."""
        return self.device

    @property
    def is_ahead(self) -> bool:
        """Whether batches can be placed ahead by another thread."""
        return True

    def parameters(self, tree: Tree) -> Tree:
        """Parameters where steps take them."""
        return to_device(tree, self.device, convert=True)

    def state(self, state: StepState) -> StepState:
        """All that steps change, where they take it."""
        return state

    def numbers(self, tree: Tree) -> Tree:
        """Single numbers where steps take them."""
        return tree

    def whole(self, tree: Tree) -> Tree:
        """A tree of parameters on one device, in one piece each."""
        return tree

    def gradients(self, function: Function, loss: Function) -> Function:
        """A function like this one: the loss and the gradients of a whole batch.

        `loss` is the function that they are of.
        """
        return function


class MeshSpread(Spread):
    """A training on several devices of one process, which JAX drives."""

    def __init__(self, mesh: Mesh, text: str) -> None:
        from anydevice.parallel import jax_mesh

        super().__init__(mesh.devices[0])
        self.text = text
        self._mesh, self._jax = mesh, jax_mesh
        self._to_first = self.place
        self.place = self._divided
        self._is_first = True

    @property
    def reads_to(self) -> Device:
        return self.device if self._mesh.shard == 1 else Device("cpu", engine="numpy")

    @property
    def is_ahead(self) -> bool:
        return False

    def parameters(self, tree: Tree) -> Tree:
        # One after the other: no device ever holds all of them.
        return mapped(lambda x: self._sharded(super(MeshSpread, self).parameters(x)), tree)

    def state(self, state: StepState) -> StepState:
        parameters, optimizer, total = (
            None if tree is None else mapped(self._sharded, tree)
            for tree in (state.parameters, state.optimizer, state.total)
        )
        scale = None if state.scale is None else self.numbers(state.scale)
        return replace(state, parameters=parameters, optimizer=optimizer, total=total, scale=scale)

    def numbers(self, tree: Tree) -> Tree:
        return mapped(lambda x: self._jax.replicated(x, self._mesh), tree)

    def whole(self, tree: Tree) -> Tree:
        return gather(tree)

    def _sharded(self, x: Any) -> Any:
        return self._jax.sharded(x, self._mesh)

    def _divided(self, batch: Any) -> Any:
        rows, size = rows_of(batch), self._mesh.size
        is_first, self._is_first = self._is_first, False
        if rows % size and is_first:  # the last batch of an epoch is often a small one
            warn(
                f"batches of {rows} rows do not divide over {size} devices, so each of these "
                f"computes all of such a batch; take a size that is a multiple of {size}"
            )
        return mapped(lambda x: self._jax.divided(x, self._mesh), self._to_first(batch))


def mesh_of(device: Any, devices: Any, strategy: str) -> tuple[Any, Mesh | None]:
    """The device of a training, and the mesh where there are several; checks both arguments."""
    if isinstance(device, list | tuple):
        raise ConfigurationError(
            f"device= is one device, and {device!r} is a list; use devices= for several",
            source="device=",
        )
    if strategy not in STRATEGIES:
        raise ConfigurationError(
            f"strategy is one of {', '.join(STRATEGIES)}, not {strategy!r}", source="strategy"
        )
    if devices is None:
        if strategy != "auto":
            raise ConfigurationError(
                f"strategy={strategy!r} is for several devices; give devices= too",
                source="strategy",
            )
        return device, None
    if device is not None:
        raise ConfigurationError(
            "device= and devices= are both given; use devices= alone", source="devices="
        )
    mesh = devices if isinstance(devices, Mesh) else Mesh(devices_of(devices))
    return mesh.devices[0], mesh if mesh.size > 1 else None


def spread_of(mesh: Mesh | None, strategy: str, device: Device, parameters: Tree) -> Spread:
    """How a training of these parameters lies on a mesh; raises `UnsupportedError` if it cannot."""
    if mesh is None:
        return Spread(device)
    if device.engine != "jax":
        raise Absent(
            f"{device.engine} trains on one device a process, and {mesh.size} were given",
            instead="give one device, or a model that JAX trains",
            code="no_collectives",
        ).error()
    mesh, text = _chosen(mesh, strategy, parameters)
    return MeshSpread(mesh, text)


def _chosen(mesh: Mesh, strategy: str, parameters: Tree) -> tuple[Mesh, str]:
    """The mesh with the sizes of a strategy, and which that is and why."""
    why = "as asked"
    if strategy == "auto" and mesh.shard > 1:
        text = f"{mesh.replicate} groups that hold all of it, {mesh.shard} devices each"
        return mesh, f"{mesh.size} devices: {text}, as the mesh says"
    if strategy == "auto":
        strategy, why = _fitting(mesh, parameters)
    size = mesh.size
    sizes = (size, 1) if strategy == "replicate" else (1, size)
    return Mesh(mesh.devices, *sizes), f"{size} devices, {strategy}: {why}"


def _fitting(mesh: Mesh, parameters: Tree) -> tuple[str, str]:
    needed = _HELD * sum(4 * int(np.prod(x.shape)) for x in leaves(parameters))
    device = mesh.devices[0]
    available = memory_stats(device).available
    if available is not None and device.kind == "cpu":  # one memory for all of them
        available //= len(mesh.devices)
    what = f"weights, gradients and optimizer state take {format_size(needed)}"
    if available is None:
        return "replicate", f"{what}, and {device} does not say how much it has"
    there = f"{format_size(available)} available to each device"
    if needed <= available // 2:
        return "replicate", f"{what}, less than half of {there}"
    return "shard", f"{what}, more than half of {there}"
