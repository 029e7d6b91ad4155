"""Processes that compute together, by `torch.distributed`: joining them, and what they exchange."""

from __future__ import annotations

import atexit
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from anydevice.choose.scope import one_device
from anydevice.core.device import Device
from anydevice.core.record import Record
from anydevice.errors import ConfigurationError
from anydevice.parallel.mesh import Mesh

_PORT = 29500
_LAST_WAIT = timedelta(seconds=10)


class Launched(Record):
    """What a launcher says in the environment: the number of this process, and of how many.

    `here` is how many of them are on this machine, `None` if it does not say.
    """

    rank: int
    size: int
    local: int
    here: int | None
    address: str
    port: int


class Group(Record):
    """The processes of a `torch.distributed` group: the number of this one, and how many."""

    rank: int
    size: int

    def sum(self, tensors: Sequence[Any], share: float = 1.0) -> list[Any]:
        """The sums over all processes of tensors, each times the share of its process."""
        import torch
        import torch.distributed as distributed

        flat = torch.cat([x.detach().reshape(-1).to(torch.float32) for x in tensors])
        if share != 1.0:
            flat *= share
        distributed.all_reduce(flat)
        parts = flat.split([x.numel() for x in tensors])
        return [part.view(x.shape).to(x.dtype) for part, x in zip(parts, tensors, strict=True)]

    def largest(self, number: float, like: Any) -> float:
        """The largest of a number that each process has."""
        import torch
        import torch.distributed as distributed

        held = torch.tensor([number], dtype=torch.float64, device=like.device)
        distributed.all_reduce(held, op=distributed.ReduceOp.MAX)
        return float(held[0])

    def of_first(self, value: Any) -> Any:
        """A small value of the first process, in each of them."""
        import torch.distributed as distributed

        held = [value]
        distributed.broadcast_object_list(held)
        return held[0]

    def copy_from_first(self, tensors: Sequence[Any]) -> None:
        """Write the first process's numbers into the tensors of all others."""
        import torch.distributed as distributed

        for x in tensors:
            distributed.broadcast(x, 0)

    def wait(self) -> None:
        """Wait until every process has come here."""
        import torch.distributed as distributed

        distributed.barrier()

    def sharder(self, mesh: Mesh) -> Callable[[Any], Any]:
        """A function that cuts a tensor, which all processes hold, into a `DTensor` over them."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        grid = init_device_mesh(mesh.devices[0].backend, (mesh.replicate, mesh.shard))

        def sharded(x: Any) -> Any:
            axes = [axis for axis, size in enumerate(x.shape) if size and size % mesh.shard == 0]
            longest = max(axes, key=lambda axis: x.shape[axis], default=None)
            cut = Replicate() if longest is None else Shard(longest)
            return distribute_tensor(x, grid, [Replicate(), cut])

        return sharded


def initialize(device: Device | str | None = None) -> Mesh:
    """Join the processes that a launcher started, and return the mesh over their devices.

    The variables of torchrun, Slurm, Open MPI and Kubernetes jobs are understood. A process alone
    is a mesh of one: nothing is imported or started for it.

    >>> initialize("cpu").size
    1

    Each process has one device, by default the one that `anydevice.device()` gives it, which
    PyTorch drives. A `torch.distributed` group that is there already is used as it is. All
    processes must run the same program: `nn.train(…, devices=mesh)` gives each its rows of the
    same batches.

    Raises `ConfigurationError` if variables contradict each other, or do not say where the first
    process is.
    """
    group = _existing()
    if group is None:
        found = launched(os.environ)
        if found is None or found.size == 1:
            return Mesh([one_device(device)])
        group = _joined(found, one_device(device, engine="torch"))
    if group.size == 1:
        return Mesh([one_device(device)])
    return Mesh([one_device(device, engine="torch")], group=group)


def launched(variables: Mapping[str, str]) -> Launched | None:
    """What the variables of a launcher say; `None` without one.

    >>> launched({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host"}).rank
    1
    >>> launched({"PATH": "/bin"})
    """
    for names in _LAUNCHERS:
        given = [variables.get(name) for name in (names.rank, names.size)]
        if None not in given:
            return _checked(names, variables)
    return None


class _Names(Record):
    """The names of a launcher's variables."""

    launcher: str
    rank: str
    size: str
    local: str
    here: str


_LAUNCHERS = (
    _Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    # Those of a step: a script of sbatch has SLURM_PROCID too, and is one process.
    _Names(
        "Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"
    ),
    _Names(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # An indexed job; those of Kubeflow have torchrun's names.
    _Names("Kubernetes", "JOB_COMPLETION_INDEX", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
)


def _checked(names: _Names, variables: Mapping[str, str]) -> Launched:
    rank, size = (_number(variables, name) for name in (names.rank, names.size))
    local = _number(variables, names.local) if names.local in variables else 0
    here = _number(variables, names.here) if names.here in variables else None
    if not 0 <= rank < size:
        raise ConfigurationError(
            f"{names.rank}={rank} is not below {names.size}={size}", source=names.rank
        )
    port = _number(variables, "MASTER_PORT") if "MASTER_PORT" in variables else None
    if port is None:  # the same in all processes of a job, and others in other jobs
        port = _PORT + int(re.sub(r"\D", "", variables.get("SLURM_JOB_ID", "")) or 0) % 20_000
    return Launched(rank, size, local, here, _address(names, variables, size, here), port)


def _address(names: _Names, variables: Mapping[str, str], size: int, here: int | None) -> str:
    """Where the first process is."""
    given = variables.get("MASTER_ADDR")
    if given:
        return given
    hosts = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST")
    if names.launcher == "Slurm" and hosts:
        return first_host(hosts)
    if size == 1 or here == size:
        return "127.0.0.1"
    raise ConfigurationError(
        f"{names.launcher} started {size} processes, and MASTER_ADDR, the host of the first one, "
        "is not set; set it, and MASTER_PORT, in all of them",
        source="MASTER_ADDR",
    )


def first_host(hosts: str) -> str:
    """The first of a list of hosts as Slurm writes it.

    >>> first_host("node[07-09,12],other"), first_host("gpu-1,gpu-2"), first_host("one")
    ('node07', 'gpu-1', 'one')
    """
    found = re.match(r"([^,\[]+)(?:\[([^,\-\]]+)[^\]]*\])?([^,]*)", hosts)
    return "".join(part or "" for part in found.groups()) if found else hosts


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables[name]
    # Slurm writes "4(x2)" for two machines with four tasks each.
    digits = re.match(r"\d+", text)
    if digits is None:
        raise ConfigurationError(f"{name} must be an integer, not {text!r}", source=name)
    return int(digits[0])


def _existing() -> Group | None:
    """The group that this process is in already: a user's own, or one of Ray or Lightning."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return Group(distributed.get_rank(), distributed.get_world_size())


def _joined(found: Launched, device: Device) -> Group:
    import torch
    import torch.distributed as distributed

    backend = "gloo"
    if device.backend in ("cuda", "rocm") and distributed.is_nccl_available():
        torch.cuda.set_device(device.index)
        # NCCL refuses two processes on one card.
        backend = "nccl" if (found.here or found.size) <= torch.cuda.device_count() else "gloo"
    distributed.init_process_group(
        backend,
        init_method=f"tcp://{found.address}:{found.port}"
        if "TORCHELASTIC_RUN_ID" not in os.environ
        else "env://",
        rank=found.rank,
        world_size=found.size,
    )
    atexit.register(leave)
    return Group(found.rank, found.size)


def leave() -> None:
    """End the group when the program ends: one that leaves early would take others with it."""
    import torch.distributed as distributed

    if not distributed.is_initialized():
        return
    with suppress(Exception):
        failed = getattr(sys, "last_value", None) is not None
        if not failed and distributed.get_backend() == "gloo":
            distributed.monitored_barrier(timeout=_LAST_WAIT)
        distributed.destroy_process_group()
