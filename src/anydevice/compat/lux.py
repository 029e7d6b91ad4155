"""Lux.jl's device functions, spelled in Python over anydevice.

>>> from anydevice.compat import lux
>>> lux.supported_gpu_backends()
('CUDA', 'AMDGPU', 'Metal')
>>> lux.cpu_device()
LuxCPUDevice()

A device is callable: `x |> gdev` is `gdev(x)`. The `!` of a name falls away: `gpu_backend!` is
`gpu_backend`. `DistributedUtils` is over `anydevice.parallel`; `MPIBackend` and `NCCLBackend` are
the same here: the array library chooses how its processes exchange numbers.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import anydevice
from anydevice import ConfigurationError, Device, DeviceNotFoundError, nn, parallel
from anydevice._arrays.prefetch import Prefetch
from anydevice._arrays.random.generator import Random
from anydevice._core.backends import BACKENDS
from anydevice._core.choice import Wish, accelerators_passed_over, choose
from anydevice._core.finding import Tier
from anydevice._core.record import Record, replace
from anydevice._core.text import warn
from anydevice._core.trees import leaves, mapped, refilled
from anydevice._machine.choose.scope import forget, make_request, why
from anydevice._machine.discovery.discover import free_memory
from anydevice._machine.engines import registry
from anydevice._parallel.mesh import Mesh
from anydevice._parallel.placing import row_ranges
from anydevice.compat.named import NamedDevice

T = TypeVar("T", bound="AbstractLuxDistributedBackend")


class AbstractLuxDevice(NamedDevice):
    """The base class of Lux's devices: an anydevice `Device` under Lux's name."""

    @property
    def tier(self) -> Tier:
        """How well its backend is tested: "stable", "experimental" or "untested"."""
        return BACKENDS[self.backend].tier


class LuxCPUDevice(AbstractLuxDevice, backend="cpu"):
    """Return the CPU, which is always there."""


class AbstractLuxGPUDevice(AbstractLuxDevice):
    """The base class of Lux's GPUs; `functional` says whether this machine has one."""


class LuxCUDADevice(AbstractLuxGPUDevice, backend="cuda"):
    """An NVIDIA GPU: `cuda:0` of anydevice."""


class LuxAMDGPUDevice(AbstractLuxGPUDevice, backend="rocm"):
    """An AMD GPU: `rocm:0` of anydevice."""


class LuxMetalDevice(AbstractLuxGPUDevice, backend="metal"):
    """An Apple GPU: `metal:0` of anydevice."""


_GPUS = {"CUDA": LuxCUDADevice, "AMDGPU": LuxAMDGPUDevice, "Metal": LuxMetalDevice}
_KINDS = {kind.of_backend: kind for kind in _GPUS.values()}


class _TriggerPackage(Record):
    """A package of Lux that loads a GPU backend; here nothing is loaded.

    >>> LuxCUDA.functional() == functional("CUDA")
    True
    """

    backend: str

    def functional(self) -> bool:
        """Whether a GPU of this backend works here."""
        return functional(self.backend)


LuxCUDA, LuxAMDGPU = _TriggerPackage("CUDA"), _TriggerPackage("AMDGPU")


def supported_gpu_backends() -> tuple[str, ...]:
    """Return the GPU backends in order of choice, whether or not they work here."""
    return tuple(_GPUS)


def cpu_device() -> LuxCPUDevice:
    """Return the CPU, which is always there."""
    return LuxCPUDevice()


def gpu_device(force_gpu_usage: bool = False) -> AbstractLuxDevice:
    """Return the preferred GPU if it works, else the first backend that works, else the CPU.

    Falling back to the CPU warns with every reason; with `force_gpu_usage` it raises
    `DeviceNotFoundError`.
    """
    request = make_request(None, engine=None, min_free=None)
    names = (name for wish in request.wishes for name in wish.names)
    preference = Wish("preference", tuple(n for n in names if n.partition(":")[0] in _KINDS))
    order = Wish("order of backends", tuple(_KINDS), binding=True)
    wishes = (preference, order) if preference.names else (order,)
    findings = anydevice.discover().findings
    choice = choose(replace(request, wishes=wishes), findings, free_memory)
    chosen = choice.device
    if chosen is None:
        reasons = f"no GPU works here: {_reasons(order.names, request.engine)}"
        if force_gpu_usage:
            raise DeviceNotFoundError(reasons, findings)
        warn(f"using the CPU: {reasons}")
        return LuxCPUDevice()
    for step in choice.passed_over:
        if step.source == preference.source:
            text = f"using {chosen}, because {preference} is preferred but does not work"
            warn(f"{text}: {_reasons(preference.names, request.engine)}")
        else:  # an engine that had to be given up
            text = f"using {chosen} with {chosen.engine}: {step.source} asks for {step.asked}"
            warn(f"{text}, but {step.outcome}")
    kind = _KINDS[chosen.backend]
    return kind(chosen.index, engine=chosen.engine, chosen_by=chosen.chosen_by)


def cpu(x: Any) -> Any:
    """Return the arrays of `x` on the CPU; the older spelling of `cpu_device()(x)`."""
    return cpu_device()(x)


def gpu(x: Any) -> Any:
    """Return the arrays of `x` on the GPU, or on the CPU with a warning; `gpu_device()(x)`."""
    return gpu_device()(x)


def gpu_backend(backend: str | Device | None = "") -> None:
    """Save the preferred GPU backend in the project, as `prefer(…, project=True)`; "" deletes it.

    Raises `ConfigurationError` with the valid names for any other, and if the file cannot be
    written.
    """
    name = None if backend is None or backend == "" else _backend_of(backend)
    if name and name not in _KINDS:
        raise _unknown(backend)
    anydevice.prefer(name, project=True)


def reset_gpu_device() -> None:
    """Forget the choice: the next `gpu_device()` looks at the machine again."""
    forget()
    anydevice.discover(refresh=True)


def functional(device: str | Device | type[AbstractLuxDevice]) -> bool:
    """Whether a device, its type (`LuxCUDADevice`) or a backend ("CUDA") works here."""
    if isinstance(device, Device):
        return device.usable
    return bool(anydevice.devices(_backend_of(device)))


def loaded(device: str | Device | type[AbstractLuxDevice]) -> bool:
    """Whether a library that can drive it is installed, with or without the hardware."""
    backend = _backend_of(device)
    builds = (registry.installed(engine) for engine in registry.engines_for(backend))
    fitting = (b.installed and (backend == "cpu" or backend in b.runtimes) for b in builds)
    return functional(device) or any(fitting)


def get_device(x: Any) -> Device | None:
    """Return the device of the arrays in `x`, as `device_of`, under Lux's name."""
    device = anydevice.device_of(x)
    if device == LuxCPUDevice():
        return LuxCPUDevice()
    kind = _KINDS.get(device.backend) if device else None
    return kind(device.index) if device and kind else device


class DeviceIterator(Prefetch):
    """The batches of a loader on a device, moved ahead of the loop; earlier ones are released."""

    def __init__(self, device: Device | str, loader: Iterable[Any]) -> None:
        ahead = anydevice.prefetch(loader, device)
        super().__init__(ahead.loader, ahead.device, ahead.depth)


def default_device_rng(device: Device | str, seed: int | None = None) -> Random:
    """Return a generator whose numbers are the same on every device; by default, of random seed."""
    return anydevice.rng(secrets.randbits(64) if seed is None else seed, device)


class AbstractLuxDistributedBackend(Record):
    """The processes that compute together: a `parallel.Mesh` under Lux's name."""

    mesh: Mesh


class MPIBackend(AbstractLuxDistributedBackend):
    """The processes that a launcher started."""


class NCCLBackend(AbstractLuxDistributedBackend):
    """The processes that a launcher started."""


class DistributedOptimizer(nn.Optimizer):
    """Average gradients over processes with as many rows each; `nn.train` weighs them by rows."""

    backend: Any = None
    optimizer: Any = None

    def __init__(self, backend: AbstractLuxDistributedBackend, optimizer: nn.Optimizer) -> None:
        super().__init__(optimizer.rate, backend=backend, optimizer=optimizer)  # type: ignore[call-arg]

    def init(self, parameters: Any) -> Any:
        return self.optimizer.init(parameters)

    def update(
        self, parameters: Any, gradients: Any, state: Any, step: Any, rate: Any = None
    ) -> Any:
        mean = DistributedUtils.allreduce(self.backend, gradients, DistributedUtils.avg)
        return self.optimizer.update(parameters, mean, state, step, rate)


class DistributedDataContainer(Sequence[Any]):
    """The examples of this process: its share of the rows; the first processes take the rest."""

    def __init__(self, backend: AbstractLuxDistributedBackend, data: Any) -> None:
        processes = DistributedUtils.total_workers(backend)
        self.data = data
        self.range = range(*row_ranges(len(data), processes)[backend.mesh.rank])

    def __len__(self) -> int:
        return len(self.range)

    def __getitem__(self, index: Any) -> Any:
        rows = self.range[index]
        is_one = isinstance(rows, int)
        return self.data[rows if is_one else slice(rows.start, rows.stop, rows.step)]


class DistributedUtils:
    """Lux's functions of several processes: `DistributedUtils.initialize(NCCLBackend)`.

    >>> DistributedUtils.initialize(MPIBackend, "cpu")
    >>> backend = DistributedUtils.get_distributed_backend(MPIBackend)
    >>> DistributedUtils.local_rank(backend), DistributedUtils.total_workers(backend)
    (0, 1)
    """

    avg = "avg"
    DistributedOptimizer = DistributedOptimizer
    DistributedDataContainer = DistributedDataContainer
    _meshes: ClassVar[dict[type, Mesh]] = {}

    @classmethod
    def initialize(
        cls,
        backend: type[AbstractLuxDistributedBackend],
        device: Device | str | None = None,
        *,
        engine: str | None = None,
    ) -> None:
        """Join the processes that a launcher started, as `parallel.initialize` does."""
        cls._meshes[backend] = parallel.initialize(device, engine=engine)

    @classmethod
    def initialized(cls, backend: type[AbstractLuxDistributedBackend]) -> bool:
        """Whether this process has joined the others."""
        return backend in cls._meshes

    @classmethod
    def get_distributed_backend(cls, backend: type[T]) -> T:
        """Return the joined processes; raise `ConfigurationError` if there are none."""
        if not cls.initialized(backend):
            raise ConfigurationError(
                f"call DistributedUtils.initialize({backend.__name__}) first", source="backend"
            )
        return backend(cls._meshes[backend])

    @staticmethod
    def local_rank(backend: AbstractLuxDistributedBackend) -> int:
        """Return the number of this process, from 0 on."""
        return backend.mesh.rank

    @staticmethod
    def total_workers(backend: AbstractLuxDistributedBackend) -> int:
        """Return the number of processes."""
        return 1 if backend.mesh.group is None else backend.mesh.group.size

    @classmethod
    def allreduce(cls, backend: AbstractLuxDistributedBackend, x: Any, op: str = "+") -> Any:
        """Sum the arrays of a tree over all processes, or average them with `avg`."""
        if op not in ("+", cls.avg):
            raise ConfigurationError(f"op is '+' or DistributedUtils.avg, not {op!r}", source="op")
        if backend.mesh.group is None:
            return x
        share = 1.0 if op == "+" else 1.0 / cls.total_workers(backend)
        group: Any = backend.mesh.group
        here = anydevice.to_device(x, backend.mesh.devices[0], convert=True)
        return refilled(x, group.sum(leaves(here), share))

    @staticmethod
    def bcast(backend: AbstractLuxDistributedBackend, x: Any, root: int = 0) -> Any:
        """Send the arrays of one process to all of them."""
        group: Any = backend.mesh.group
        if group is None:
            return x

        def send(x: Any) -> Any:
            return type(x)(x.shape, x.dtype, bytes.fromhex(group.of_first(x.tobytes().hex(), root)))

        numbers = mapped(send, anydevice.to_numpy(x))
        return anydevice.to_device(numbers, backend.mesh.devices[0], convert=True)

    synchronize = bcast
    """For parameters, or the state of an optimizer."""


def _backend_of(device: str | Device | type[AbstractLuxDevice]) -> str:
    """Return the backend of anydevice for CUDA, AMDGPU or Metal."""
    if isinstance(device, Device):
        return device.backend
    if isinstance(device, type) and hasattr(device, "of_backend"):
        return device.of_backend
    for name, kind in _GPUS.items():
        if isinstance(device, str) and device.strip().lower() == name.lower():
            return kind.of_backend
    raise _unknown(device)


def _unknown(backend: object) -> ConfigurationError:
    valid = ", ".join(map(repr, _GPUS))
    return ConfigurationError(
        f"{backend!r} is not a GPU backend of Lux; the valid names are {valid}, and '' for none"
    )


def _reasons(names: Sequence[str], engine: str | None) -> str:
    """Return why none of these works; missing hardware counts only if it is the only reason."""
    report = anydevice.discover()
    backends = {name: name.partition(":")[0] for name in names}
    stopped = accelerators_passed_over([f for f in report if f.backend in backends.values()])
    refused = [
        why(name, engine=engine).steps[0].outcome
        for name, backend in backends.items()
        if backend in report and report[backend].usable
    ]
    return "; ".join((*stopped, *refused)) or f"this machine has no {' or '.join(names)}"
