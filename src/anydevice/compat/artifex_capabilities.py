"""What a machine can do, in Artifex's words, and who finds it out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

from anydevice.choose.choice import accelerators_passed_over
from anydevice.choose.discovery import devices, discover
from anydevice.core.device import Device
from anydevice.core.facts import compare_versions

_OLDEST_WITH_TENSOR_CORES = "7.0"


class DeviceType(Enum):
    """The kind of device that computes."""

    CPU = "cpu"
    GPU = "gpu"
    TPU = "tpu"


@dataclass(frozen=True)
class DeviceCapabilities:
    """The devices of the best kind that this machine has, and what they can do.

    `total_memory_mb` is the memory of one of them, in units of 2**20 bytes. What nobody could
    tell, or what a CPU does not have, is `None`.
    """

    device_type: DeviceType
    device_count: int
    total_memory_mb: int | None = None
    compute_capability: str | None = None
    cuda_version: str | None = None
    driver_version: str | None = None
    supports_mixed_precision: bool = False
    supports_distributed: bool = False


@runtime_checkable
class DeviceDetector(Protocol):
    """Whatever has this one method can be given to a `DeviceManager`.

    For every choice of anydevice, not only a manager's, a package offers a probe by the entry
    point `anydevice.probes` instead.
    """

    def detect_capabilities(self) -> DeviceCapabilities:
        """What there is to compute on."""
        ...


class MachineDetector:
    """What anydevice found on this machine that JAX can drive: the detector of a manager."""

    def detect_capabilities(self) -> DeviceCapabilities:
        """The first backend, in order of choice, that is not the CPU; else the CPU."""
        accelerators = [place for place in jax_places() if place.kind != "cpu"]
        first = accelerators[0].backend if accelerators else "cpu"
        return capabilities_of(jax_places(first))


class CUDADetector:
    """NVIDIA GPUs alone: any other accelerator does not count."""

    def detect_capabilities(self) -> DeviceCapabilities:
        """The NVIDIA GPUs that JAX can drive, or the CPU where there is none."""
        return capabilities_of(jax_places("cuda") or jax_places("cpu"))


def jax_places(kind: str | None = None) -> tuple[Device, ...]:
    """The usable devices that JAX can drive, in order of choice; one kind or backend if asked."""
    return tuple(
        place.served_by("jax")
        for place in devices(kind)
        if place.standing and "jax" in place.standing.engines
    )


def capabilities_of(places: tuple[Device, ...]) -> DeviceCapabilities:
    """What equal devices can do together, read from the first of them."""
    if not places:  # JAX is not installed: the CPU is there all the same
        return DeviceCapabilities(DeviceType.CPU, device_count=1)
    first, count = places[0], len(places)
    facts = first.facts
    if first.kind == "cpu":
        return DeviceCapabilities(DeviceType.CPU, count, supports_distributed=count > 1)
    total = facts.total_memory
    return DeviceCapabilities(
        device_type=DeviceType(first.kind),
        device_count=count,
        total_memory_mb=None if total is None else total // 2**20,
        compute_capability=facts.compute_capability,
        cuda_version=facts.runtime_version if first.backend == "cuda" else None,
        driver_version=facts.driver_version,
        supports_mixed_precision=_is_quick_in_16_bits(first),
        supports_distributed=count > 1,
    )


def why_no_gpu() -> tuple[str, ...]:
    """Why JAX has no GPU or TPU here, a sentence for each cause, with what mends it.

    Empty where it has one.
    """
    if any(place.kind != "cpu" for place in jax_places()):
        return ()
    report = discover()
    other = [place for place in report.devices if place.usable and place.kind != "cpu"]
    sentences = (*accelerators_passed_over(report.findings), *map(_not_for_jax, other))
    return sentences or ("no accelerator is in this machine",)


def _not_for_jax(place: Device) -> str:
    standing = place.standing
    for refusal in standing.refusals if standing else ():
        if refusal.engine == "jax":
            mend = f" (mend: {refusal.mend})" if refusal.mend else ""
            return f"{place} is usable, but not by JAX: {refusal.reason}{mend}"
    return f"{place} is usable, but JAX does not drive {place.backend}"


def _is_quick_in_16_bits(place: Device) -> bool:
    if place.backend != "cuda":
        return True
    capability = place.facts.compute_capability
    return capability is not None and compare_versions(capability, _OLDEST_WITH_TENSOR_CORES) >= 0
