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

from anydevice.choose.choice import accelerators_passed_over
from anydevice.choose.discovery import devices, discover
from anydevice.choose.scope import device, make_request, why
from anydevice.core.backends import BACKENDS
from anydevice.core.device import Device
from anydevice.core.finding import Finding
from anydevice.core.record import Record
from anydevice.core.sizes import format_size

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
    usable one of CUDA, ROCm, Metal, OpenCL and CPU. If that is the CPU although an accelerator is
    here, a warning says what is wrong with it and what mends it.

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
    automatic = preference is BackendPreference.AUTO
    names = _automatic_names() if automatic else [preference.value]
    chosen = device(names, min_free=min_free)
    if automatic and chosen.kind == "cpu":
        for sentence in accelerators_passed_over(tuple(discover())):
            warnings.warn(f"using {chosen}: {sentence}", stacklevel=3)
    return Backend(chosen)


def _automatic_names() -> list[str]:
    wishes = make_request(None, engine=None, min_free=None).wishes
    asked = [name for wish in wishes for name in wish.names]
    # An OpenCL device that is the CPU itself would come before the CPU, and is slower.
    opencl = [str(found) for found in devices("opencl") if found.kind != "cpu"]
    order = (opencl if name == "opencl" else [name] for name in _ORDER)
    return [*asked, *(name for names in order for name in names)]


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
    best = why(_automatic_names()).device
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
