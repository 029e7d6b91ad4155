"""Why an installed library cannot drive a device, in the sentence that a user needs."""

from __future__ import annotations

import os
import re

from anydevice.core.backends import BACKENDS
from anydevice.core.facts import Facts, compare_versions, version_numbers
from anydevice.core.finding import Refusal
from anydevice.engines.builds import Build
from anydevice.engines.mending import command_for

OLDEST_CAPABILITY = {
    "jax": {12: "5.2", 13: "7.5"},
    "cupy": {11: "3.5", 12: "5.0", 13: "7.5"},
}
"""The oldest compute capability that a library's build for a CUDA major release runs on."""


def refusal(build: Build, backend: str, facts: Facts) -> Refusal | None:
    """Why `build` cannot drive a device of `backend` with these facts; `None` where it can.

    The refusal carries the command that would mend it through this same library, if there is one.
    """
    reason = why_not(build, backend, facts)
    if reason is None:
        return None
    return Refusal(build.engine, reason, command_for(build, backend, facts))


def why_not(build: Build, backend: str, facts: Facts) -> str | None:
    """The sentence alone."""
    if not build.installed:
        return f"{build.library} is not installed"
    if build.broken:
        return build.broken
    if backend == "cpu":
        return None
    if backend in build.faults:
        return build.faults[backend]
    if backend not in build.runtimes:
        return _not_made_for(build, backend)
    if backend == "cuda":
        return _driver_too_old(build, facts) or _card_not_in_build(build, facts)
    if backend == "rocm":
        return _other_rocm(build, facts) or _architecture_not_in_build(build, facts)
    return None


def _not_made_for(build: Build, backend: str) -> str:
    label = BACKENDS[backend].label if backend in BACKENDS else backend
    if build.engine == "jax":
        plugin = "TPU plugin (libtpu)" if backend == "tpu" else f"{label} plugin"
        return f"{build.name} has no {plugin}"
    others = [BACKENDS[other].label for other in build.runtimes if other in BACKENDS]
    if others:
        return f"{build.name} is a build for {' and '.join(others)}, not for {label}"
    if backend == "metal":
        return f"{build.name} has no Metal: only its builds for macOS do"
    return f"{build.name} is a CPU-only build"


def _driver_too_old(build: Build, facts: Facts) -> str | None:
    needs, serves = build.runtimes["cuda"], facts.runtime_version
    if not needs or not serves or version_numbers(needs)[:1] <= version_numbers(serves)[:1]:
        # Within a major release, a driver runs what was made for a later minor one.
        return None
    driver = f"driver {facts.driver_version}" if facts.driver_version else "the driver"
    return f"{build.name} needs CUDA {needs}, but {driver} serves CUDA {serves}"


def _card_not_in_build(build: Build, facts: Facts) -> str | None:
    card = facts.compute_capability
    if not card:
        return None
    carried = build.architectures()
    if carried:
        if any(_runs_on(name, card) for name in carried):
            return None
        made_for = ", ".join(dict.fromkeys(_capability(name) for name in carried))
        return f"{build.name} was built for sm {made_for}; this card is {card}"
    majors = version_numbers(build.runtimes["cuda"])[:1]
    oldest = OLDEST_CAPABILITY.get(build.engine, {}).get(majors[0]) if majors else None
    if oldest and compare_versions(card, oldest) < 0:
        return (
            f"{build.name} for CUDA {majors[0]} needs compute capability {oldest} or newer; "
            f"this card is {card}"
        )
    return None


def _runs_on(architecture: str, card: str) -> bool:
    # Machine code runs on its own major generation from its minor one on ("a": nowhere else);
    # code for the driver's compiler ("compute") on everything that is not older.
    made, here = version_numbers(_capability(architecture)), version_numbers(card)
    if architecture.endswith("a"):
        return made == here
    if architecture.startswith("compute_"):
        return made <= here
    return made[0] == here[0] and made <= here


def _capability(architecture: str) -> str:
    digits = re.sub(r"\D", "", architecture)
    return f"{digits[:-1]}.{digits[-1]}"


def _other_rocm(build: Build, facts: Facts) -> str | None:
    # PyTorch brings the whole runtime along; JAX and CuPy use the one of the machine.
    needs, here = build.runtimes["rocm"], facts.runtime_version
    if build.engine == "torch" or not needs or not here:
        return None
    if version_numbers(needs)[:1] == version_numbers(here)[:1]:
        return None
    return f"{build.name} needs ROCm {needs}, but this machine has ROCm {here}"


def _architecture_not_in_build(build: Build, facts: Facts) -> str | None:
    if not facts.architecture or os.environ.get("HSA_OVERRIDE_GFX_VERSION"):
        return None
    card = facts.architecture.partition(":")[0]
    carried = tuple(dict.fromkeys(name.partition(":")[0] for name in build.architectures()))
    if not carried or card in carried or any(name.endswith("-generic") for name in carried):
        return None
    return f"{build.name} was built for {', '.join(carried)}; this card is {card}"
