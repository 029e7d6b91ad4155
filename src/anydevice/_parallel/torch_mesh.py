"""Tensors over the processes of a mesh, by PyTorch's `DTensor`. Importing this imports PyTorch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from anydevice._core.engine import Absent
from anydevice._core.record import Record
from anydevice._core.trees import Tree, leaves
from anydevice._parallel.mesh import Mesh
from anydevice._parallel.placing import part_of

# Their names before PyTorch 2.13 are deprecated.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_reduce_scatter = (
    getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
)


class Layout(Record):
    """How a tensor lies over the processes of a mesh: along which axis it is cut, and its shape."""

    mesh: Mesh
    axis: int | None
    shape: tuple[int, ...]

    @property
    def placements(self) -> list[Any]:
        return [Replicate(), Replicate() if self.axis is None else Shard(self.axis)]

    def joined(self, part: Any) -> Any:
        """The tensor of which each process has this part."""
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            part, grid_of(self.mesh), self.placements, run_check=False, shape=self.shape,
            stride=stride,
        )  # fmt: skip

    def gathered(self, part: Any) -> Any:
        """All numbers, of which this process has a part; gradients are sums over processes."""
        return self._whole(part, sums=True)

    def whole(self, part: Any) -> Any:
        """All numbers; the gradient of a part is that of its numbers here alone."""
        return self._whole(part, sums=False)

    def _whole(self, part: Any, sums: bool) -> Any:
        copies, parts = (grid_of(self.mesh).get_group(axis) for axis in (0, 1))
        size = 1 if self.axis is None else self.shape[self.axis]
        return _Gathered.apply(part, self.axis, size, parts, copies if sums else None)


class _Gathered(torch.autograd.Function):  # type: ignore[misc]
    """The parts of a group, joined along an axis, `None` where each process has all numbers.

    Gradients are sums over that group and over `copies`, or else those of this process.
    """

    @staticmethod
    def forward(part: Any, axis: int | None, size: int, parts: Any, copies: Any) -> Any:
        return part.clone() if axis is None else _all_gathered(part, axis, size, parts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.axis, _, ctx.parts, ctx.copies = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None, None, None, None]:
        [gradient], parts, copies = gradients, ctx.parts, ctx.copies
        if ctx.axis is None:
            found = gradient.clone()
            if copies is not None:
                distributed.all_reduce(found, group=parts)
        else:
            rows = gradient.movedim(ctx.axis, 0)
            each = -(-len(rows) // parts.size())
            start = min(each * parts.rank(), len(rows))
            stop = min(start + each, len(rows))
            found = rows[start:stop]
            if copies is not None:
                found = rows.new_empty((each, *rows.shape[1:]))
                padded = _padded(rows, each * parts.size())
                _reduce_scatter(found, padded, group=parts)
            found = found[: stop - start].movedim(0, ctx.axis).contiguous()
        if copies is not None and copies.size() > 1:
            distributed.all_reduce(found, group=copies)
        return found, None, None, None, None


def whole_of(x: Any) -> Any:
    """All numbers of a `DTensor`; none in a process that has no part in it."""
    *others, last = x.placements
    is_plain = type(last) is Shard and all(type(each) is Replicate for each in others)
    if not is_plain or x.device_mesh.get_coordinate() is None:
        return x.full_tensor()
    group = x.device_mesh.get_group(len(others))
    return _Gathered.apply(x.to_local(), last.dim, x.shape[last.dim], group, None)


def _all_gathered(part: Any, axis: int, size: int, group: Any) -> Any:
    """The parts of all processes one after the other, `size` rows along an axis.

    By the plain call: what a `DTensor` calls ends a process whose group is one of gloo and whose
    tensors are on a card, as where several processes share one.
    """
    rows = part.movedim(axis, 0)
    each = -(-size // group.size())
    every = rows.new_empty((each * group.size(), *rows.shape[1:]))
    _all_gather(every, _padded(rows, each), group=group)
    return every[:size].movedim(0, axis).contiguous()


def _padded(rows: Any, count: int) -> Any:
    """So many rows, the last ones zeros: those of all processes have one size."""
    missing = count - len(rows)
    if not missing:
        return rows.contiguous()
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])


def layout_of(x: Any, mesh: Mesh) -> Layout:
    """How a tensor is cut: along its longest axis that divides evenly, else along its longest."""
    shape = tuple(x.shape)
    axes = [axis for axis, size in enumerate(shape) if size]
    even = [axis for axis in axes if shape[axis] % mesh.shard == 0]
    longest = max(even or axes, key=lambda axis: shape[axis], default=None)
    return Layout(mesh, longest, shape)


def sharded(x: Any, mesh: Mesh) -> Any:
    """A tensor that all processes have, cut into a `DTensor`: the numbers are those of the first.

    One that is cut already stays as it is.
    """
    if isinstance(x, DTensor):
        return x
    return distribute_tensor(x.detach(), grid_of(mesh), layout_of(x, mesh).placements)


def is_cut(x: Any) -> bool:
    """Whether it is a tensor of which each process has a part."""
    return isinstance(x, DTensor)


def cut_as(other: Any, x: Any) -> Any:
    """A tensor that all processes have, cut as another one of its shape is; others as they are."""
    if not isinstance(other, DTensor) or isinstance(x, DTensor):
        return x
    if getattr(x, "shape", None) != other.shape:
        return x
    there = x.to(other.device, other.dtype)
    return distribute_tensor(there, other.device_mesh, other.placements)


def joined_as(other: Any, part: Any) -> Any:
    """A tensor that is cut as another one is, of which each process has this part."""
    if not isinstance(other, DTensor) or part.shape != other.to_local().shape:
        return part
    return DTensor.from_local(
        part, other.device_mesh, other.placements, run_check=False, shape=other.shape,
        stride=other.stride(),
    )  # fmt: skip


def fully_sharded(module: Any, mesh: Mesh) -> Any:
    """The module, sharded in place by FSDP2: its blocks one by one, so that each is gathered alone.

    Gradients become sums over all processes.
    """
    try:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        force_sums = FSDPModule.set_force_sum_reduction_for_comms
    except (ImportError, AttributeError):
        raise Absent(
            f"PyTorch {torch.__version__} cannot sum the gradients of sharded modules",
            instead="run: pip install --upgrade torch",
            code="no_collectives",
        ).error() from None

    def placed(x: Any) -> Any:
        axis = layout_of(x, mesh).axis or 0
        return Shard(axis if x.ndim and x.shape[axis] % mesh.shard == 0 else 0)

    for part in (*_blocks(module), module):
        fully_shard(part, mesh=grid_of(mesh), reshard_after_forward=True, shard_placement_fn=placed)
        part.set_gradient_divide_factor(1.0)
        force_sums(part, True)
    return module


def _blocks(module: Any) -> list[Any]:
    """The parts of its lists and chains, unless they share weights with others."""
    chains = [
        x for x in module.modules() if isinstance(x, torch.nn.ModuleList | torch.nn.Sequential)
    ]
    inner = {id(part) for chain in chains for part in chain}
    users: dict[int, int] = {}
    for part in module.modules():
        for x in part.parameters(recurse=False):
            users[id(x)] = users.get(id(x), 0) + 1
    found = [part for chain in chains for part in chain if list(part.parameters())]
    found = [
        part for part in found if not any(id(x) in inner for x in part.modules() if x is not part)
    ]
    return [part for part in found if all(users[id(x)] == 1 for x in part.parameters())]


def summed(x: Any, mesh: Mesh) -> Any:
    """The sum of a tensor over the processes that hold one copy of everything together."""
    total = x.detach().clone()
    distributed.all_reduce(total, group=grid_of(mesh).get_group(1))
    return total


def bytes_here(tree: Tree) -> int:
    """The bytes of the tensors of a tree in this process."""
    return sum(part_of(x).nbytes for x in leaves(tree))


def grid_of(mesh: Mesh) -> Any:
    """The mesh as PyTorch has it, with two axes."""
    sizes = mesh.replicate, mesh.shard
    kind = "cuda" if mesh.devices[0].backend in ("cuda", "rocm") else mesh.devices[0].backend
    return _made(kind, sizes, distributed.group.WORLD)


@lru_cache(maxsize=16)
def _made(kind: str, sizes: tuple[int, int], world: Any) -> Any:
    return init_device_mesh(kind, sizes, mesh_dim_names=("replicate", "shard"))
