"""Torchless's choice of a backend, spelled in Python over anydevice.

>>> from anydevice.compat.torchless import BackendPreference, init_backend
>>> init_backend(BackendPreference.CPU).name()
'CPU'

What is a `Result` there is a value or an exception here: `DeviceNotFoundError` where the backend
is not usable or has no room, with the reason for every device that was looked at.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from enum import Enum

from anydevice.choose.choice import Choice, choose
from anydevice.choose.discovery import devices, discover, free_memory
from anydevice.choose.scope import device, make_request
from anydevice.core.backends import BACKENDS
from anydevice.core.device import Device
from anydevice.core.finding import Finding
from anydevice.core.record import Record, replace
from anydevice.core.sizes import format_size
from anydevice.errors import DeviceNotFoundError

_ORDER = ("cuda", "rocm", "metal", "opencl", "cpu")


class BackendPreference(Enum):
    """The best backend of this machine (`AUTO`), or one by name; both spellings are the same."""

    AUTO = "auto"
    CUDA = "cuda"
    ROCM = "rocm"
    METAL = "metal"
    OPENCL = "opencl"
    CPU = "cpu"

    Auto = AUTO
    Cuda = CUDA
    Rocm = ROCM
    Metal = METAL
    OpenCL = OPENCL
    Cpu = CPU


class Backend(Record):
    """A backend that is ready for use; `device` is the device of it to put data on."""

    device: Device

    def name(self) -> str:
        """Its name as people write it: "CUDA", "ROCm", "Metal", "OpenCL" or "CPU"."""
        return _label(self.device.backend)


def init_backend(preference: BackendPreference = BackendPreference.AUTO) -> Backend:
    """The backend that is asked for.

    `AUTO` takes what a block, the environment or a file asks for if it is usable, else the first
    usable one of CUDA, ROCm, Metal, OpenCL and CPU. A warning says why what was asked for is
    passed over, or, where it ends at the CPU, what is wrong with the accelerators that are here.

    Raises `DeviceNotFoundError` where a backend that is asked for by name is not usable.
    """
    return _init(preference, 0)


def init_backend_with_memory_check(preference: BackendPreference, required_bytes: int) -> Backend:
    """The same, but only of devices with so many bytes of free memory.

    Raises `DeviceNotFoundError`, which says what each device has, where none has the room.
    """
    return _init(preference, required_bytes)


def discover_backends() -> tuple[Finding, ...]:
    """What is known of every backend, usable or not, in order of choice."""
    found = {finding.backend: finding for finding in discover()}
    known = (found.pop(name) for name in _ORDER if name in found)
    return (*known, *found.values())


def print_backend_summary() -> None:
    """Print every backend with its devices and memory, or with its error, and the best one."""
    print("\n".join(_summary()))


def _init(preference: BackendPreference, min_free: int) -> Backend:
    if preference is not BackendPreference.AUTO:
        return Backend(device(preference.value, min_free=min_free))
    choice = _automatically(min_free)
    chosen, passed_over = choice.device, choice.passed_over
    if chosen is None:
        reasons = "; ".join(step.outcome for step in passed_over)
        raise DeviceNotFoundError(f"no backend is usable: {reasons}", tuple(discover()))
    unmet = [s.outcome for s in passed_over if chosen.kind == "cpu" or s.source != "configure"]
    if unmet:
        warnings.warn(f"using {chosen}: {'; '.join(unmet)}", stacklevel=3)
    return Backend(chosen)


def _automatically(min_free: int) -> Choice:
    """What is asked for somewhere, else the first usable one in Torchless's order."""
    request = make_request(None, engine=None, min_free=min_free)
    # An OpenCL device that is the CPU itself would come before the CPU, and is slower.
    only_the_cpu = {found.kind for found in devices("opencl")} == {"cpu"}
    ours = (name for name in _ORDER if name != "opencl" or not only_the_cpu)
    request = replace(request, order=(*request.order, *ours))
    return choose(request, discover().findings, free_memory)


def _summary() -> Iterator[str]:
    yield "Backends of this machine"
    for finding in discover_backends():
        tier = "" if finding.tier == "stable" else f" ({finding.tier})"
        yield f"{'✓' if finding.usable else '✗'} {_label(finding.backend)}{tier}"
        for found in finding.devices:
            yield f"    [{found.index}] {_described(found)}"
        if not finding.usable:
            reason = finding.reason or "not in this machine"
            yield f"    Error: {reason} (stage: {finding.stage})"
            if finding.mend:
                yield f"    Mend: {finding.mend}"
    best = _automatically(0).device
    yield f"\nRecommended: {_label(best.backend) if best else 'nothing'}"


def _described(found: Device) -> str:
    facts = found.facts
    parts = [f"{facts.name}: {format_size(facts.total_memory)}"]
    if facts.free_memory is not None:
        parts.append(f"{format_size(facts.free_memory)} free")
    if facts.memory_kind == "unified":
        parts.append("unified memory")
    return ", ".join(parts)


def _label(backend: str) -> str:
    return BACKENDS[backend].label if backend in BACKENDS else backend
