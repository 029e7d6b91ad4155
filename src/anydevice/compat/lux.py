"""Lux.jl's device functions, spelled in Python over anydevice.

>>> from anydevice.compat import lux
>>> lux.supported_gpu_backends()
('CUDA', 'AMDGPU', 'Metal')
>>> lux.cpu_device()
LuxCPUDevice()

A device is callable where Julia pipes: `x |> gdev` is `gdev(x)`. A function that ends in `!`
there has no mark here: `gpu_backend!` is `gpu_backend`.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Iterable
from typing import Any

from anydevice.choose.scope import forget, make_request, why
from anydevice.core.backends import BACKENDS
from anydevice.core.choice import Request, Wish, accelerators_passed_over, choose
from anydevice.core.device import Device
from anydevice.core.finding import Tier
from anydevice.core.record import replace
from anydevice.discovery._discover import devices, discover, free_memory
from anydevice.engines import registry
from anydevice.errors import ConfigurationError, DeviceNotFoundError
from anydevice.settings.preferences import prefer
from anydevice.transfer.moving import device_of
from anydevice.transfer.prefetching import Prefetch, prefetch
from anydevice.transfer.random.generator import Random, rng


class AbstractLuxDevice(Device):
    """What every device of Lux is: an anydevice `Device`, equal to the one of the same place."""

    __slots__ = ()
    _of_backend: str

    @property
    def tier(self) -> Tier:
        """How far its backend can be relied on: "stable", "experimental" or "untested"."""
        return BACKENDS[self.backend].tier

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.index or ''})"


class LuxCPUDevice(AbstractLuxDevice):
    """The CPU, which is always there."""

    __slots__ = ()
    _of_backend = "cpu"

    def __init__(self) -> None:
        super().__init__(self._of_backend)

    def __reduce__(self) -> tuple[object, ...]:
        return LuxCPUDevice, ()


class AbstractLuxGPUDevice(AbstractLuxDevice):
    """What every GPU of Lux is: `isinstance(device, AbstractLuxGPUDevice)` asks for any of them.

    Make one by hand with `LuxCUDADevice(1)`, whether or not this machine has it; `functional` says
    whether it works.
    """

    __slots__ = ()

    def __init__(
        self, index: int = 0, *, engine: str | None = None, chosen_by: str | None = None
    ) -> None:
        super().__init__(self._of_backend, index, engine=engine, chosen_by=chosen_by)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.index, self._engine, self.chosen_by)


class LuxCUDADevice(AbstractLuxGPUDevice):
    """An NVIDIA GPU: `cuda:0` of anydevice."""

    __slots__ = ()
    _of_backend = "cuda"


class LuxAMDGPUDevice(AbstractLuxGPUDevice):
    """An AMD GPU: `rocm:0` of anydevice."""

    __slots__ = ()
    _of_backend = "rocm"


class LuxMetalDevice(AbstractLuxGPUDevice):
    """An Apple GPU: `metal:0` of anydevice. Its `tier` says that no hardware was at hand."""

    __slots__ = ()
    _of_backend = "metal"


_GPUS: dict[str, type[AbstractLuxGPUDevice]] = {
    "CUDA": LuxCUDADevice,
    "AMDGPU": LuxAMDGPUDevice,
    "Metal": LuxMetalDevice,
}
_BACKENDS = {kind._of_backend: kind for kind in _GPUS.values()}


def supported_gpu_backends() -> tuple[str, ...]:
    """The GPU backends in order of choice; supported, which is not the same as working here."""
    return tuple(_GPUS)


def cpu_device() -> LuxCPUDevice:
    """The CPU, which is always there."""
    return LuxCPUDevice()


def gpu_device(force_gpu_usage: bool = False) -> AbstractLuxDevice:
    """The GPU to use: the preferred one if it works, else the first backend that works.

    An engine that the environment or a file asks for serves it if it can.
    Without a GPU that works it is the CPU, with a warning that says for each backend what is wrong
    and what to install; with `force_gpu_usage` it is a `DeviceNotFoundError` that says the same.
    """
    request = make_request(None, engine=None, min_free=None)
    preferred = _preferred(request)
    wish = Wish("preference", (*preferred, *_BACKENDS), binding=True)
    choice = choose(replace(request, wishes=(wish,)), discover().findings, free_memory)
    chosen = choice.device
    if chosen is None:
        reasons = f"no GPU works here: {_reasons(tuple(_BACKENDS), request.engine)}"
        if force_gpu_usage:
            raise DeviceNotFoundError(reasons, tuple(discover()))
        warnings.warn(f"using the CPU: {reasons}", stacklevel=2)
        return LuxCPUDevice()
    met = not {str(chosen), chosen.backend}.isdisjoint(preferred)
    if preferred and not met:
        asked = ", ".join(preferred)
        text = f"using {chosen}, because {asked} is preferred but does not work"
        warnings.warn(f"{text}: {_reasons(preferred, request.engine)}", stacklevel=2)
    for step in choice.passed_over:  # an engine that had to be given up
        text = f"using {chosen} with {chosen.engine}: {step.source} asks for {step.asked}"
        warnings.warn(f"{text}, but {step.outcome}", stacklevel=2)
    source = "preference" if met else "order of backends"
    return _BACKENDS[chosen.backend](chosen.index, engine=chosen.engine, chosen_by=source)


def gpu_backend(backend: str | Device | None = "") -> None:
    """Save the preferred GPU backend for every later run, and for this one at once.

    Takes one of `supported_gpu_backends()` or a device; `""` or `None` deletes the preference. It
    is kept where `anydevice.prefer` keeps it. Raises `ConfigurationError` with the valid names for
    any other, and where the file cannot be written.
    """
    name = _backend_of(backend) if backend else None
    if name and name not in _BACKENDS:
        raise _refused(backend)
    prefer(name)


def reset_gpu_device() -> None:
    """Forget what was found and chosen: the next `gpu_device()` looks at the machine again."""
    forget()
    discover(refresh=True)


def functional(device: str | Device | type[AbstractLuxDevice]) -> bool:
    """Whether it works here: a device, its type (`LuxCUDADevice`), or a backend's name."""
    if isinstance(device, Device):
        return device.usable
    return bool(devices(_backend_of(device)))


def loaded(device: str | Device | type[AbstractLuxDevice]) -> bool:
    """Whether a library that can drive it is installed, be the hardware there or not."""
    backend = _backend_of(device)
    builds = (registry.installed(engine) for engine in registry.engines_for(backend))
    made_for_it = (b.installed and (backend == "cpu" or backend in b.runtimes) for b in builds)
    return functional(device) or any(made_for_it)


def get_device(x: Any) -> Device | None:
    """Where the arrays of `x` are, under Lux's name; `None` where it holds none.

    Raises `DeviceMismatchError`, which names two of them, where they are in several places.
    """
    found = device_of(x)
    if found is None:
        return None
    if found == LuxCPUDevice():
        return LuxCPUDevice()
    kind = _BACKENDS.get(found.backend)
    return kind(found.index) if kind else found


class DeviceIterator(Prefetch):
    """The batches of a loader on a device, placed ahead of the loop; earlier ones are let go."""

    def __init__(self, device: Device | str, loader: Iterable[Any]) -> None:
        ahead = prefetch(loader, device)
        super().__init__(ahead.loader, ahead.device, ahead.depth)


def default_device_rng(device: Device | str, seed: int | None = None) -> Random:
    """Random numbers for a device: those of the seed, which are the same on every device.

    Without a seed, each call gives a generator of its own that nobody can foretell.
    """
    return rng(secrets.randbits(64) if seed is None else seed, device)


def _backend_of(device: str | Device | type[AbstractLuxDevice]) -> str:
    """Our name of what Lux calls CUDA, AMDGPU and Metal."""
    if isinstance(device, Device):
        return device.backend
    if isinstance(device, type):
        return device._of_backend
    for name, kind in _GPUS.items():
        if device.strip().lower() == name.lower():
            return kind._of_backend
    raise _refused(device)


def _refused(backend: object) -> ConfigurationError:
    valid = ", ".join(map(repr, _GPUS))
    return ConfigurationError(
        f"{backend!r} is not a GPU backend of Lux; the valid names are {valid}, and '' for none"
    )


def _preferred(request: Request) -> tuple[str, ...]:
    """The GPUs that a block, the environment or a file asks for, first choice first."""
    names = (name for wish in request.wishes for name in wish.names)
    return tuple(name for name in names if name.partition(":")[0] in _BACKENDS)


def _reasons(names: tuple[str, ...], engine: str | None) -> str:
    """Why none of these can be had; what is simply not here is said only where nothing else is."""
    report = discover()
    backends = {name: name.partition(":")[0] for name in names}
    stopped = accelerators_passed_over([f for f in report if f.backend in backends.values()])
    refused = [
        why(name, engine=engine).steps[0].outcome
        for name, backend in backends.items()
        if backend in report and report[backend].usable
    ]
    return "; ".join((*stopped, *refused)) or f"this machine has no {' or '.join(names)}"


def _rebuild(
    kind: type[AbstractLuxGPUDevice], index: int, engine: str | None, chosen_by: str | None
) -> AbstractLuxGPUDevice:
    return kind(index, engine=engine, chosen_by=chosen_by)
