"""Joining the processes that a launcher started. Each library joins them in its own `mesh.py`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from anydevice._core.device import Device
from anydevice._core.hooks import is_loaded
from anydevice._core.protocols import Launched, Processes
from anydevice._core.record import Record
from anydevice._libraries.registry import part
from anydevice._machine.choose.scope import one_device
from anydevice._machine.discovery.discover import devices as devices_of_backend
from anydevice._machine.engines import registry
from anydevice._parallel.mesh import Mesh, no_collectives
from anydevice.errors import ConfigurationError

_PORT = 29500
_RING = "MLX_HOSTFILE"
TOGETHER = ("torch", "jax", "mlx")
"""Engines with collectives, in order of preference."""


def initialize(device: Device | str | None = None, *, engine: str | None = None) -> Mesh:
    """Join the processes that a launcher started, and return the mesh over their devices.

    It understands the variables of torchrun, Slurm, Open MPI, Kubernetes jobs and mlx.launch. A
    process alone is a mesh of one: nothing is imported or started for it.

    >>> initialize("cpu").size
    1

    PyTorch, JAX or MLX drives them: the `engine`, or the engine of the device or of
    `ANYDEVICE_ENGINE`, else an imported one, else the first that is installed. A process of PyTorch
    or MLX has one device, by default `anydevice.device()`. A process of JAX has all devices of a
    backend, also alone if JAX was requested, unless one is named, as in `"cuda:0"`. An existing
    group of `torch.distributed` or `jax.distributed` is used.

    All processes must run the same program: `nn.train(…, devices=mesh)` gives each its rows of
    the same batches.

    Raises `ConfigurationError` if variables contradict each other or lack the address of the first
    process, and `UnsupportedError` for an engine without collectives.
    """
    chosen = one_device(device, engine=engine)
    existing: Processes | None = None
    if is_loaded("torch.distributed"):
        existing = part("torch", "mesh").existing()
    is_there = existing is not None or _is_jax_joined()
    launcher = None if is_there else launched(os.environ)
    if not is_there and (launcher is None or launcher.size == 1):
        of_jax = chosen.engine == "jax" and not chosen.engine_is_free
        return Mesh(_of_jax(device, chosen) if of_jax else [chosen])
    engine = _engine_for(chosen, existing is not None)
    place = one_device(str(chosen) if device is None else device, engine=engine)
    if engine == "jax":
        if not _is_jax_joined():  # a group of PyTorch may be there
            launcher = launcher or launched(os.environ)
            if launcher is None:
                return Mesh(_of_jax(device, place))
            _take_own_cards(place, launcher)
        processes = part("jax", "mesh").join(launcher)
        return Mesh(_of_jax(device, place), group=processes if processes.size > 1 else None)
    if engine == "mlx":
        return Mesh([place], group=part("mlx", "mesh").join(launcher))
    group = existing or part("torch", "mesh").join(launcher, place)
    return Mesh([place], group=group if group.size > 1 else None)


def _engine_for(device: Device, has_group: bool) -> str:
    """Return the engine of the processes: the requested, a joined, else an installed one."""
    if not device.engine_is_free:
        if device.engine not in TOGETHER:
            raise no_collectives(
                f"processes of {device.engine} do not compute together",
                "take torch, jax or mlx, as in `anydevice launch --engine jax`",
            )
        return device.engine
    if has_group or _is_jax_joined():
        return "torch" if has_group else "jax"
    if _RING in os.environ:
        return "mlx"
    status = device.status
    candidates = [name for name in TOGETHER if status is None or name in status.engines]
    if not candidates:
        raise no_collectives(
            f"no library that is installed computes on {device} in several processes",
            "install torch, jax or mlx",
        )
    return min(candidates, key=lambda name: not registry.loaded(name))


_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}


def _take_own_cards(place: Device, launcher: Launched) -> None:
    """Hide the cards of other processes on this machine: JAX takes all that it sees."""
    cards, processes = devices_of_backend(place.backend), launcher.here or 1
    variable = _VISIBLE.get(place.backend)
    if variable is None or processes == 1 or len(cards) < processes:
        return
    names = os.environ.get(variable, "").split(",")
    names = names if len(names) == len(cards) else [str(card.index) for card in cards]
    share = len(cards) // processes
    os.environ[variable] = ",".join(names[launcher.local * share : (launcher.local + 1) * share])


def _of_jax(device: Device | str | None, place: Device) -> list[Device]:
    """Return the devices of a process of JAX: all of a backend, unless one of them is named."""
    if isinstance(device, Device) or (device is not None and ":" in device):
        return [place]
    return [device.served_by("jax") for device in devices_of_backend(place.backend)]


def _is_jax_joined() -> bool:
    return is_loaded("jax") and bool(part("jax", "mesh").is_joined())


def launched(variables: Mapping[str, str]) -> Launched | None:
    """Return the rank, the size and the address that a launcher has set; `None` without one.

    >>> launched({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host"}).rank
    1
    >>> launched({"PATH": "/bin"})
    """
    for names in _LAUNCHERS:
        if names.rank in variables and names.size in variables:
            return _check_variables(names, variables)
    if _RING in variables and "MLX_RANK" in variables:  # of mlx.launch
        hosts = json.loads(Path(variables[_RING]).read_text())
        rank, (address, _, port) = _number(variables, "MLX_RANK"), hosts[0][0].rpartition(":")
        here = len(hosts) if address == "127.0.0.1" else None
        return Launched(
            rank, len(hosts), rank, here, address, int(port) - 1
        )  # the ring has its own
    return None


class _Names(Record):
    """The names of a launcher's variables."""

    launcher: str
    rank: str
    size: str
    local: str
    here: str


_LOCAL = ("LOCAL_RANK", "LOCAL_SIZE")
_LAUNCHERS = (
    _Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    # Variables of a step: a script of sbatch has SLURM_PROCID too, and is one process.
    _Names(
        "Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"
    ),
    _Names("Open MPI", *(f"OMPI_COMM_WORLD_{n}" for n in ("RANK", "SIZE", *_LOCAL))),
    # An indexed job; jobs of Kubeflow have torchrun's names.
    _Names("Kubernetes", "JOB_COMPLETION_INDEX", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
)


def _check_variables(names: _Names, variables: Mapping[str, str]) -> Launched:
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
    """Return the first of a list of hosts as Slurm writes it.

    >>> first_host("node[07-09,12],other"), first_host("gpu-1,gpu-2"), first_host("one")
    ('node07', 'gpu-1', 'one')
    """
    match = re.match(r"([^,\[]+)(?:\[([^,\-\]]+)[^\]]*\])?([^,]*)", hosts)
    return "".join(part or "" for part in match.groups()) if match else hosts


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables[name]
    # Slurm writes "4(x2)" for two machines with four tasks each.
    digits = re.match(r"\d+", text)
    if digits is None:
        raise ConfigurationError(f"{name} must be an integer, not {text!r}", source=name)
    return int(digits[0])
