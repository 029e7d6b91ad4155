"""Processes that compute together, by `torch.distributed`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from anydevice.core.record import Record

if TYPE_CHECKING:
    from anydevice.parallel.mesh import Mesh


class Group(Record):
    """The processes of a `torch.distributed` group: the number of this one, and how many."""

    rank: int
    size: int

    def sharder(self, mesh: Mesh) -> Callable[[Any], Any]:
        """A function that cuts a tensor, which all processes hold, into a `DTensor` over them."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        kind = mesh.devices[0].backend
        grid = init_device_mesh(kind, (mesh.replicate, mesh.shard))

        def sharded(x: Any) -> Any:
            axes = [axis for axis, size in enumerate(x.shape) if size and size % mesh.shard == 0]
            longest = max(axes, key=lambda axis: x.shape[axis], default=None)
            cut = Replicate() if longest is None else Shard(longest)
            return distribute_tensor(x, grid, [Replicate(), cut])

        return sharded
