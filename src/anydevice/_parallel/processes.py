"""Processes that compute together: joining them, and what they exchange.

Those of PyTorch by `torch.distributed`, those of MLX by its ring; `jax_mesh` has those of JAX.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np

from anydevice._core.device import Device
from anydevice._core.engine import Absent
from anydevice._core.record import Record
from anydevice._machine.choose.scope import one_device
from anydevice._machine.discovery.discover import devices as devices_of_backend
from anydevice._machine.engines import registry
from anydevice._parallel.mesh import HostExchange, Mesh, Processes
from anydevice.errors import ConfigurationError

_PORT = 29500
_LAST_WAIT = 10.0
"""Seconds that a process which has ended waits for the others."""
_FIRST_WAIT = 60.0
"""Seconds until it is left to PyTorch to find the first process, or to say that it is not there."""
_RING = "MLX_HOSTFILE"
TOGETHER = ("torch", "jax", "mlx")
"""Engines whose processes compute together; the first of them where all are free to be taken."""


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


class Group(Processes):
    """The processes of a `torch.distributed` group: the number of this one, and how many."""

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

    def of_processes(self, numbers: Sequence[float], device: Device) -> Callable[[], Any]:
        """Tell the others some numbers; what waits for those of each, a tensor of rows."""
        import torch
        import torch.distributed as distributed

        rows = [[0.0] * len(numbers)] * self.size
        rows[self.rank] = list(numbers)
        found = torch.tensor(rows, device=registry.load("torch").native(device))
        work = distributed.all_reduce(found, async_op=True)  # which every backend has everywhere

        def waited() -> Any:
            work.wait()
            return found

        return waited

    def of_first(self, value: Any, root: int = 0) -> Any:
        """A small value of the first process, or of another one, in each of them."""
        import torch.distributed as distributed

        held = [value]
        distributed.broadcast_object_list(held, src=root)
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


class RingProcesses(HostExchange):
    """The processes of a ring of MLX."""

    def every(self, numbers: Any) -> Any:
        import mlx.core as mx

        flat = mx.array(np.ascontiguousarray(numbers).reshape(-1))
        found = np.array(mx.distributed.all_gather(flat, group=_ring()))
        return found.reshape(self.size, *numbers.shape)

    def sum(self, arrays: Sequence[Any], share: float = 1.0) -> list[Any]:
        """The sums over all processes of arrays, each times the share of its process.

        A function that compilers can trace. An array of a process without a share does not count,
        whatever its numbers.
        """
        import mlx.core as mx

        flat = mx.concatenate([x.reshape(-1).astype(mx.float32) for x in arrays])
        flat = flat * share if share else mx.zeros_like(flat)
        total = mx.distributed.all_sum(flat, group=_ring())
        ends = np.cumsum([x.size for x in arrays])[:-1].tolist()
        parts = mx.split(total, ends)
        return [
            part.reshape(x.shape).astype(x.dtype) for part, x in zip(parts, arrays, strict=True)
        ]

    def from_first(self, x: Any) -> Any:
        """An array of the first process, in each of them."""
        import mlx.core as mx

        own = x if self.rank == 0 else mx.zeros_like(x)
        return mx.distributed.all_sum(own, group=_ring())

    def of_processes(self, numbers: Sequence[int]) -> Any:
        """The numbers of each process, one row each: an array that is there once all have asked."""
        import mlx.core as mx

        own = mx.array(list(numbers), mx.int32)
        return mx.distributed.all_gather(own, group=_ring()).reshape(self.size, len(numbers))

    def largest(self, number: float, like: Any = None) -> float:
        """The largest of a number that each process has."""
        return float(self.every(np.asarray([number], np.float32)).max())


_rings: list[Any] = []


def _ring() -> Any:
    """The ring that a launcher told MLX about; `UnsupportedError` without one."""
    import mlx.core as mx

    if not _rings:
        if _RING not in os.environ:
            raise Absent(
                "MLX does not know where its processes are",
                instead="start them with `anydevice launch --engine mlx` on one machine, or with "
                "`mlx.launch` on several",
                code="no_collectives",
            ).error()
        _rings.append(mx.distributed.init(strict=True, backend="ring"))
    return _rings[0]


def initialize(device: Device | str | None = None, *, engine: str | None = None) -> Mesh:
    """Join the processes that a launcher started, and return the mesh over their devices.

    The variables of torchrun, Slurm, Open MPI, Kubernetes jobs and mlx.launch are understood. A
    process alone is a mesh of one: nothing is imported or started for it.

    >>> initialize("cpu").size
    1

    PyTorch, JAX or MLX drives them: the `engine`, or the one that the device or `ANYDEVICE_ENGINE`
    asks for, else one that is imported already, else the first that is installed. A process of
    PyTorch or MLX has one device, by default the one that `anydevice.device()` gives it. One of JAX
    has all of a backend, also where it is alone, if JAX was asked for; `"cuda:0"` is that one. A
    group that is there already, of `torch.distributed` or `jax.distributed`, is used as it is.

    All processes must run the same program: `nn.train(…, devices=mesh)` gives each its rows of
    the same batches.

    Raises `ConfigurationError` if variables contradict each other, or do not say where the first
    process is, and `UnsupportedError` for an engine whose processes cannot compute together.
    """
    chosen, existing = one_device(device, engine=engine), _existing()
    is_there = existing is not None or _is_jax_joined()
    found = None if is_there else launched(os.environ)
    if not is_there and (found is None or found.size == 1):
        of_jax = chosen.engine == "jax" and not chosen.engine_is_free
        return Mesh(_of_jax(device, chosen) if of_jax else [chosen])
    engine = _engine_for(chosen, existing is not None)
    place = one_device(str(chosen) if device is None else device, engine=engine)
    if engine == "jax":
        return _over_jax(device, place, found)
    if engine == "mlx":
        return Mesh([place], group=RingProcesses(_ring().rank(), _ring().size()))
    group = existing or _joined(cast(Launched, found), place)
    return Mesh([place], group=group if group.size > 1 else None)


def _engine_for(device: Device, has_group: bool) -> str:
    """The engine that processes compute with: one that is asked for, is there, or can."""
    if not device.engine_is_free:
        if device.engine not in TOGETHER:
            raise Absent(
                f"processes of {device.engine} do not compute together",
                instead="take torch, jax or mlx, as in `anydevice launch --engine jax`",
                code="no_collectives",
            ).error()
        return device.engine
    if has_group or _is_jax_joined():
        return "torch" if has_group else "jax"
    if _RING in os.environ:
        return "mlx"
    status = device.status
    able = [name for name in TOGETHER if status is None or name in status.engines]
    if not able:
        raise Absent(
            f"no library that is installed computes on {device} in several processes",
            instead="install torch, jax or mlx",
            code="no_collectives",
        ).error()
    return min(able, key=lambda name: not registry.loaded(name))


def _over_jax(device: Any, place: Device, found: Launched | None) -> Mesh:
    from anydevice._parallel import jax_mesh

    if not _is_jax_joined():  # whatever group of PyTorch is there
        found = found or launched(os.environ)
        if found is None:
            return Mesh(_of_jax(device, place))
        _take_own_cards(place, found)
    group = jax_mesh.joined(found)
    return Mesh(_of_jax(device, place), group=group if group.size > 1 else None)


_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}


def _take_own_cards(place: Device, found: Launched) -> None:
    """Show this process its share of the machine's cards alone: JAX takes all that it sees."""
    cards, processes = devices_of_backend(place.backend), found.here or 1
    variable = _VISIBLE.get(place.backend)
    if variable is None or processes == 1 or len(cards) < processes:
        return
    names = os.environ.get(variable, "").split(",")
    names = names if len(names) == len(cards) else [str(card.index) for card in cards]
    share = len(cards) // processes
    os.environ[variable] = ",".join(names[found.local * share : (found.local + 1) * share])


def _of_jax(device: Device | str | None, place: Device) -> list[Device]:
    """The devices of a process of JAX: all of a backend, unless one of them is named."""
    if isinstance(device, Device) or (device is not None and ":" in device):
        return [place]
    return [each.served_by("jax") for each in devices_of_backend(place.backend)]


def _is_jax_joined() -> bool:
    jax: Any = sys.modules.get("jax")
    return jax is not None and bool(jax.distributed.is_initialized())


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
    if _RING in variables and "MLX_RANK" in variables:  # of mlx.launch
        size = len(json.loads(Path(variables[_RING]).read_text()))
        rank = _number(variables, "MLX_RANK")
        return Launched(rank, size, rank, None, "", 0)
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
    place = "env://"
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        place = f"tcp://{found.address}:{found.port}"
        _await_first(found)
    try:
        distributed.init_process_group(
            backend, init_method=place, rank=found.rank, world_size=found.size
        )
    except distributed.DistNetworkError as error:
        if found.rank or not _is_taken(found.port):
            raise
        raise ConfigurationError(
            f"another program has port {found.port} of this machine, at which the first process is "
            "to be found; set MASTER_PORT to another one in all processes",
            source="MASTER_PORT",
        ) from error
    atexit.register(leave)
    return Group(found.rank, found.size)


def _is_taken(port: int) -> bool:
    with socket.socket() as own:
        try:
            own.bind(("", port))
        except OSError:
            return True
    return False


def _await_first(found: Launched) -> None:
    """Wait until the first process listens: PyTorch looks for it less and less often."""
    until = time.monotonic() + _FIRST_WAIT
    while found.rank and time.monotonic() < until:
        try:
            socket.create_connection((found.address, found.port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.01)


def leave() -> None:
    """End the group when the program ends: one that leaves early would take others with it.

    A program that failed does not wait for the others, which may wait for it: they see its end.
    """
    import torch.distributed as distributed

    if not distributed.is_initialized() or getattr(sys, "last_value", None) is not None:
        return
    if distributed.get_backend() == "gloo":
        with suppress(Exception):  # such as that the first process is gone
            _await_others(distributed.distributed_c10d._get_default_store())
    with suppress(Exception):
        distributed.destroy_process_group()


def _await_others(store: Any) -> None:
    """Wait until all have come here, but not for ever: one may have ended in the middle.

    A barrier of PyTorch would wait for half an hour, and a group does not end during one. The first
    process, which has the store, waits until the others have seen it: they would ask one that is
    gone, and PyTorch writes pages about that.
    """
    import torch.distributed as distributed

    until, size = time.monotonic() + _LAST_WAIT, distributed.get_world_size()

    def count(name: str, own: int, wanted: int) -> None:
        found = store.add(name, own)
        while found < wanted and time.monotonic() < until:
            time.sleep(0.01)
            found = store.add(name, 0)

    count("anydevice/left", 1, size)
    is_first = distributed.get_rank() == 0
    count("anydevice/seen", int(not is_first), size - 1 if is_first else 0)
