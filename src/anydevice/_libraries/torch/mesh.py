"""Processes of PyTorch: joining them by `torch.distributed`, and tensors over them (`DTensor`)."""

from __future__ import annotations

import atexit
import io
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from anydevice._core.device import Device
from anydevice._core.engine import Absent
from anydevice._core.protocols import Launched
from anydevice._core.record import Record, replace
from anydevice._core.trees import mapped
from anydevice._libraries.exchange import HostExchange
from anydevice._libraries.group import PortBoard, free_port, meet, seal, stop_watching, unseal
from anydevice._machine.engines import registry

if TYPE_CHECKING:
    from anydevice._parallel.mesh import Mesh

# The names before PyTorch 2.13 are deprecated.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_reduce_scatter = (
    getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
)


Rows = tuple[int, int, int]
"""First row of a part of a batch, number of rows of the part, number of rows of the batch."""


_stores: list[Any] = []  # PyTorch calls their methods, and does not keep the objects


class Group(HostExchange):
    """The processes of a `torch.distributed` group: the rank of this one, and their number."""

    def sum(self, tensors: Sequence[torch.Tensor], share: float = 1.0) -> list[Any]:
        """Return the sums of tensors over all processes, each weighted by the process's share."""
        flat = torch.cat([x.detach().reshape(-1).to(torch.float32) for x in tensors])
        if share != 1.0:
            flat *= share
        distributed.all_reduce(flat)
        parts = flat.split([x.numel() for x in tensors])
        return [part.view(x.shape).to(x.dtype) for part, x in zip(parts, tensors, strict=True)]

    def of_processes(self, numbers: Sequence[float], device: Device) -> Callable[[], Any]:
        """Send numbers to all; return a function that waits for everyone's, a tensor of rows."""
        rows = [[0.0] * len(numbers)] * self.size
        rows[self.rank] = list(numbers)
        table = torch.tensor(rows, device=registry.load("torch").native(device))
        work = distributed.all_reduce(table, async_op=True)  # supported by every backend

        def wait() -> Any:
            work.wait()
            return table

        return wait

    def every(self, numbers: Any) -> Any:
        device = {"nccl": "cuda", "xccl": "xpu"}.get(distributed.get_backend(), "cpu")
        own = torch.from_numpy(np.array(numbers)).to(device)
        rows = own.new_empty((self.size, *own.shape))
        _all_gather(rows.view(-1, *own.shape[1:]), own)
        return rows.cpu().numpy()

    def copy_from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write the first process's numbers into the tensors of all others."""
        for x in tensors:
            distributed.broadcast(x, 0)

    def sum_gradients(self, weights: Sequence[torch.Tensor]) -> None:
        """Replace gradients by their sums; a weight unused in all processes has none."""
        is_used = [float(x.grad is not None) for x in weights]
        known = torch.tensor(is_used, device=weights[0].device)
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in weights]
        known, *sums = self.sum([known, *gradients])
        for x, gradient, is_known in zip(weights, sums, known.tolist(), strict=True):
            x.grad = gradient if is_known else None


def existing() -> Group | None:
    """Return the group that this process has already joined, for example through Ray."""
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return Group(distributed.get_rank(), distributed.get_world_size())


def join(launched: Launched, device: Device) -> Group:
    """Join the processes that a launcher started, as a `torch.distributed` group."""
    backend = "gloo"
    if device.backend in ("cuda", "rocm") and distributed.is_nccl_available():
        torch.cuda.set_device(device.index)
        # NCCL rejects two processes on one card.
        backend = (
            "nccl" if (launched.here or launched.size) <= torch.cuda.device_count() else "gloo"
        )
    elif device.backend == "xpu" and distributed.is_xccl_available():
        torch.xpu.set_device(device.index)
        backend = "xccl"
    if launched.is_local:
        for _, name in socket.if_nameindex():
            if name.startswith("lo"):
                os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name
    board = meet(_find_port(launched), _count_collectives)
    Group.key = board.key
    if isinstance(board, PortBoard):
        store = _SealedStore(board)
        _stores[:] = [store]
    else:
        store = distributed.FileStore(str(Path(board.folder or "") / "store"), launched.size)
    rank, size = launched.rank, launched.size
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size)
    atexit.register(leave)
    return Group(launched.rank, launched.size)


def _find_port(launched: Launched) -> Launched:
    """Return the port of the first process, which it announces in torchrun's store."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return launched
    store = next(distributed.rendezvous("env://", launched.rank, launched.size))[0]
    if launched.rank == 0:
        store.set("anydevice port", str(free_port()))
    return replace(launched, port=int(store.get("anydevice port")))


class _SealedStore(distributed.Store):  # type: ignore[misc]
    """A store on a board that other programs may reach: its values carry an HMAC."""

    def __init__(self, board: PortBoard) -> None:
        super().__init__()
        self._board = board

    def set(self, name: str, value: bytes | str) -> None:
        value = value.encode() if isinstance(value, str) else bytes(value)
        self._board.write(f"store {name}", seal(self._board.key, name, value))

    def get(self, name: str) -> bytes:
        self.wait([name])
        return unseal(self._board.key, name, self._board.read(f"store {name}") or b"")

    def add(self, name: str, amount: int) -> int:
        return int(self._board.ask("add", f"store {name}", amount))

    def check(self, names: Sequence[str]) -> bool:
        return all(self._board.ask("get", f"store {name}") is not None for name in names)

    def wait(self, names: Sequence[str], timeout: timedelta = timedelta(seconds=300)) -> None:
        until = time.monotonic() + timeout.total_seconds()
        while not self.check(names):
            if time.monotonic() > until:
                raise TimeoutError(f"no process has set {', '.join(names)}")
            time.sleep(0.005)

    def delete_key(self, name: str) -> bool:
        return self._board.ask("delete", f"store {name}") is None


def _count_collectives() -> dict[str, int]:
    """Return the number of collectives that this process has entered, by group."""
    names = dict(distributed.distributed_c10d._world.pg_names)
    return {name: group._get_sequence_number_for_group() for group, name in names.items()}


def leave() -> None:
    """End the group with the program; one that failed does not wait for the others."""
    if not distributed.is_initialized() or getattr(sys, "last_value", None) is not None:
        return
    stop_watching()
    if distributed.get_backend() == "gloo":
        with suppress(Exception):  # for example, another process is gone
            distributed.monitored_barrier(timeout=timedelta(seconds=10))
    with suppress(Exception):
        distributed.destroy_process_group()


def part_of(x: torch.Tensor) -> Any:
    """Return the local part of a `DTensor`; any other tensor is returned whole."""
    return x.to_local() if hasattr(x, "to_local") else x


class Layout(Record):
    """The layout of a tensor over the processes of a mesh: the axis it is cut along, its shape."""

    mesh: Mesh
    axis: int | None
    shape: tuple[int, ...]

    @property
    def placements(self) -> list[Any]:
        return [Replicate(), Replicate() if self.axis is None else Shard(self.axis)]

    def joined(self, part: torch.Tensor) -> Any:
        """Return the tensor made of each process's part."""
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            part, grid_of(self.mesh), self.placements, run_check=False, shape=self.shape,
            stride=stride,
        )  # fmt: skip

    def gathered(self, part: torch.Tensor) -> Any:
        """Gather the whole tensor from its parts; gradients are summed."""
        return self.whole(part, sums=True)

    def whole(self, part: torch.Tensor, sums: bool = False) -> Any:
        """Gather the whole tensor; without `sums`, a gradient comes from this process alone."""
        copies, parts = (grid_of(self.mesh).get_group(axis) for axis in (0, 1))
        size = 1 if self.axis is None else self.shape[self.axis]
        return _Gathered.apply(part, self.axis, size, parts, copies if sums else None)


class _Gathered(torch.autograd.Function):  # type: ignore[misc]
    """The parts of a group joined along `axis` if any; gradients are summed over both groups."""

    @staticmethod
    def forward(part: torch.Tensor, axis: int | None, size: int, parts: Any, copies: Any) -> Any:
        if axis is None:
            return part.clone()
        rows = part.movedim(axis, 0)
        share = -(-size // parts.size())
        every = rows.new_empty((share * parts.size(), *rows.shape[1:]))
        # The call of a `DTensor` would crash a process with a gloo group and tensors on a card.
        _all_gather(every, _pad_rows(rows, share), group=parts)
        return every[:size].movedim(0, axis).contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.axis, _, ctx.parts, ctx.copies = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None, None, None, None]:
        [gradient], parts, copies = gradients, ctx.parts, ctx.copies
        if ctx.axis is None:
            own = gradient.clone()
            if copies is not None:
                distributed.all_reduce(own, group=parts)
        else:
            rows = gradient.movedim(ctx.axis, 0)
            share = -(-len(rows) // parts.size())
            start = min(share * parts.rank(), len(rows))
            stop = min(start + share, len(rows))
            own = rows[start:stop]
            if copies is not None:
                own = rows.new_empty((share, *rows.shape[1:]))
                padded = _pad_rows(rows, share * parts.size())
                _reduce_scatter(own, padded, group=parts)
            own = own[: stop - start].movedim(0, ctx.axis).contiguous()
        if copies is not None and copies.size() > 1:
            distributed.all_reduce(own, group=copies)
        return own, None, None, None, None


def whole_of(x: torch.Tensor) -> Any:
    """Return the whole of a `DTensor`; empty in a process that has no part in it."""
    *others, last = x.placements
    is_plain = type(last) is Shard and all(type(placement) is Replicate for placement in others)
    if not is_plain or x.device_mesh.get_coordinate() is None:
        return x.full_tensor()
    group = x.device_mesh.get_group(len(others))
    return _Gathered.apply(x.to_local(), last.dim, x.shape[last.dim], group, None)


def _pad_rows(rows: torch.Tensor, count: int) -> Any:
    """Pad rows with zeros to `count`, so that all processes have the same size."""
    missing = count - len(rows)
    if not missing:
        return rows.contiguous()
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])


def layout_of(x: torch.Tensor, mesh: Mesh) -> Layout:
    """Return the layout of a tensor: cut along its longest axis that divides evenly, if any."""
    shape = tuple(x.shape)
    axes = [axis for axis, size in enumerate(shape) if size]
    even = [axis for axis in axes if shape[axis] % mesh.shard == 0]
    longest = max(even or axes, key=lambda axis: shape[axis], default=None)
    return Layout(mesh, longest, shape)


def sharded(x: torch.Tensor, mesh: Mesh) -> Any:
    """Cut a tensor into a `DTensor` with the first process's values, unless it is cut already."""
    if isinstance(x, DTensor):
        return x
    return distribute_tensor(x.detach(), grid_of(mesh), layout_of(x, mesh).placements)


def is_cut(x: torch.Tensor) -> bool:
    """Whether each process has only a part of the tensor."""
    return isinstance(x, DTensor)


def cut_as(other: torch.Tensor, x: torch.Tensor) -> Any:
    """Return a tensor that all processes have, cut like `other` if the shapes are equal."""
    if not isinstance(other, DTensor) or isinstance(x, DTensor):
        return x
    if getattr(x, "shape", None) != other.shape:
        return x
    there = x.to(other.device, other.dtype)
    return distribute_tensor(there, other.device_mesh, other.placements)


def joined_as(other: torch.Tensor, part: torch.Tensor) -> Any:
    """Return a tensor cut like `other`, from each process's part."""
    if not isinstance(other, DTensor) or part.shape != other.to_local().shape:
        return part
    return DTensor.from_local(
        part, other.device_mesh, other.placements, run_check=False, shape=other.shape,
        stride=other.stride(),
    )  # fmt: skip


def fully_sharded(module: torch.nn.Module, mesh: Mesh) -> Any:
    """Shard the module in place by FSDP2, block by block; gradients become global sums."""
    try:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        force_sums = FSDPModule.set_force_sum_reduction_for_comms
    except (ImportError, AttributeError):
        raise Absent(
            f"PyTorch {torch.__version__} cannot sum the gradients of sharded modules",
            instead="run: pip install --upgrade torch",
            code="no_collectives",
        ).error() from None

    def placed(x: torch.Tensor) -> Any:
        axis = layout_of(x, mesh).axis or 0
        return Shard(axis if x.ndim and x.shape[axis] % mesh.shard == 0 else 0)

    for part in (*_blocks(module), module):
        fully_shard(part, mesh=grid_of(mesh), reshard_after_forward=True, shard_placement_fn=placed)
        part.set_gradient_divide_factor(1.0)
        force_sums(part, True)
    return module


def _blocks(module: torch.nn.Module) -> list[Any]:
    """Return the parts of the module's lists and chains, unless they share weights with others."""
    chains = [
        x for x in module.modules() if isinstance(x, torch.nn.ModuleList | torch.nn.Sequential)
    ]
    inner = {id(part) for chain in chains for part in chain}
    users: dict[int, int] = {}
    for part in module.modules():
        for x in part.parameters(recurse=False):
            users[id(x)] = users.get(id(x), 0) + 1
    blocks = [part for chain in chains for part in chain if list(part.parameters())]
    blocks = [
        part for part in blocks if not any(id(x) in inner for x in part.modules() if x is not part)
    ]
    return [part for part in blocks if all(users[id(x)] == 1 for x in part.parameters())]


class JoinedLoss:
    """A loss of (output, y) that is no mean over rows, such as a loss over masked tokens.

    Once it `is_on`, each process computes the loss of all outputs, joined by a DTensor, and
    differentiates by its own. `rows` describe the local part: its first row, its number of rows and
    the rows of the batch; its share of the batch; and the ranges of all processes.
    """

    def __init__(self, loss: Any, mesh: Mesh) -> None:
        self.loss, self.is_on = loss, False
        self.rows: tuple[Rows, float, Sequence[tuple[int, int]]] | None = None
        self._mesh = mesh
        self.__name__ = getattr(loss, "__name__", type(loss).__name__)

    def __call__(self, output: Any, y: Any) -> Any:
        if self.rows is None:
            return self.loss(output, y)
        return self.loss(mapped(self._join_rows, output), mapped(self._join_rows, y))

    def _join_rows(self, x: torch.Tensor) -> Any:
        """Return the rows of all processes."""
        assert self.rows is not None, "rows are joined while a part is computed"
        (_, count, _), share, ranges = self.rows
        if not getattr(x, "ndim", 0) or x.shape[0] % count:
            return x
        times = x.shape[0] // count
        most = (ranges[0][1] - ranges[0][0]) * times
        own = x if share else x[:0]
        # A DTensor needs parts of equal size.
        part = torch.cat([own, own.new_zeros((most - own.shape[0], *x.shape[1:]))])
        at = Layout(self._mesh, 0, (most * self._mesh.size, *x.shape[1:]))
        every_row = at.whole(part)
        valid_rows = [
            every_row[rank * most : rank * most + (stop - start) * times]
            for rank, (start, stop) in enumerate(ranges)
        ]
        return torch.cat(valid_rows)


def whole(x: torch.Tensor) -> Any:
    """Return the whole tensor, whether or not it is cut."""
    return whole_of(x) if isinstance(x, DTensor) else x


def clip_parts(
    parts: Sequence[torch.Tensor], counts: Sequence[bool], limit: float, mesh: Mesh
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Clip gradients that are divided over processes to a global norm; return both."""
    squares = [x.float().square().sum() for x, own in zip(parts, counts, strict=True) if own]
    square = torch.stack(squares).sum() if squares else parts[0].new_zeros((), dtype=torch.float32)
    norm = summed(square, mesh).sqrt()
    factor = limit / torch.clamp(norm, min=limit)
    return [(x * factor).to(x.dtype) for x in parts], norm


def summed(x: torch.Tensor, mesh: Mesh) -> Any:
    """Return the sum of a tensor over the processes of one group of shards."""
    total = x.detach().clone()
    distributed.all_reduce(total, group=grid_of(mesh).get_group(1))
    return total


def grid_of(mesh: Mesh) -> Any:
    """Return the mesh as a PyTorch mesh with two axes."""
    sizes = mesh.replicate, mesh.shard
    kind = "cuda" if mesh.devices[0].backend in ("cuda", "rocm") else mesh.devices[0].backend
    return _make_grid(kind, sizes, distributed.group.WORLD)


@lru_cache(maxsize=16)
def _make_grid(kind: str, sizes: tuple[int, int], world: Any) -> Any:
    return init_device_mesh(kind, sizes, mesh_dim_names=("replicate", "shard"))


def has_started_gpu() -> bool:
    """Whether PyTorch has started CUDA or SYCL in this process."""
    return bool(torch.cuda.is_initialized() or torch.xpu.is_initialized())


_SETTINGS = ("default_dtype", "deterministic_debug_mode", "float32_matmul_precision")


def pack(value: Any, pickler: Any = pickle.Pickler) -> bytes:
    """Return a value as bytes, with PyTorch's settings; tensors keep shared storages."""
    buffer, settings = io.BytesIO(), [getattr(torch, f"get_{name}")() for name in _SETTINGS]
    module = SimpleNamespace(__name__="pickle", Pickler=pickler)
    torch.save((settings, value), buffer, pickle_module=module, pickle_protocol=5)
    return buffer.getvalue()


def unpack(data: bytes, device: Device) -> Any:
    """Return the value of `pack`, with tensors of cards on the device; runs its sender's code."""
    native = str(registry.load("torch").native(device))
    places = {f"cuda:{index}": native for index in range(torch.cuda.device_count())}
    settings, value = torch.load(io.BytesIO(data), map_location=places, weights_only=False)
    for name, setting in zip(_SETTINGS, settings, strict=True):
        getattr(torch, f"set_{name}")(setting)
    return value


def set_threads(count: int) -> None:
    torch.set_num_threads(count)
