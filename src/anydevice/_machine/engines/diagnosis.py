"""Why an installed library cannot drive a device, and the command that fixes it here."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Sequence

from anydevice._core.backends import BACKENDS
from anydevice._core.finding import Facts, Reason, Refusal, compare_versions, version_numbers
from anydevice._core.record import Record, replace
from anydevice._core.text import joined
from anydevice._machine.engines.installed import Build, distributions
from anydevice._machine.engines.registry import row_of
from anydevice._machine.engines.requirements import (
    DRIVERS,
    INDEXES,
    JETSON,
    REQUIREMENTS,
    USE_ANOTHER,
    Requirement,
)

OLDEST_CAPABILITY = {"jax": {12: "5.2", 13: "7.5"}, "cupy": {11: "3.5", 12: "5.0", 13: "7.5"}}
"""The oldest compute capability that a library's build for a CUDA major release runs on."""


def refusal(build: Build, backend: str, facts: Facts) -> Refusal | None:
    """Return why `build` cannot drive such a device, with the command that helps, or `None`."""
    reason = why_not(build, backend, facts)
    if reason is None:
        return None
    return Refusal(build.engine, replace(reason, fix=command_for(build, backend, facts)))


def why_not(build: Build, backend: str, facts: Facts) -> Reason | None:
    """Return the reason alone, without a fix."""
    if not build.installed:
        return Reason("library_missing", f"{build.library} is not installed")
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


def _not_made_for(build: Build, backend: str) -> Reason:
    label = BACKENDS[backend].label if backend in BACKENDS else backend
    if build.engine == "jax":
        plugin = "TPU plugin (libtpu)" if backend == "tpu" else f"{label} plugin"
        return Reason("plugin_missing", f"{build.name} has no {plugin}")
    others = " and ".join(BACKENDS[other].label for other in build.runtimes if other in BACKENDS)
    if others:
        return Reason("other_build", f"{build.name} is a build for {others}, not for {label}")
    if backend == "metal":
        return Reason("other_build", f"{build.name} has no Metal: only its builds for macOS do")
    return Reason("cpu_only_build", f"{build.name} is a CPU-only build")


def _driver_too_old(build: Build, facts: Facts) -> Reason | None:
    needs, serves = build.runtimes["cuda"], facts.runtime_version
    if not needs or not serves or version_numbers(needs)[:1] <= version_numbers(serves)[:1]:
        # Within a major release, a driver runs what was made for a later minor one.
        return None
    driver = f"driver {facts.driver_version}" if facts.driver_version else "the driver"
    text = f"{build.name} needs CUDA {needs}, but {driver} serves CUDA {serves}"
    return Reason("version_mismatch", text)


def _card_not_in_build(build: Build, facts: Facts) -> Reason | None:
    card = facts.compute_capability
    if not card:
        return None
    carried = build.architectures()
    if carried:
        if any(_runs_on(name, card) for name in carried):
            return None
        made_for = ", ".join(dict.fromkeys(_capability(name) for name in carried))
        text = f"{build.name} was built for sm {made_for}; this card is {card}"
        return Reason("card_not_in_build", text)
    majors = version_numbers(build.runtimes["cuda"])[:1]
    oldest = OLDEST_CAPABILITY.get(build.engine, {}).get(majors[0]) if majors else None
    if oldest and compare_versions(card, oldest) < 0:
        text = f"{build.name} for CUDA {majors[0]} needs compute capability {oldest} or newer"
        return Reason("card_not_in_build", f"{text}; this card is {card}")
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


def _other_rocm(build: Build, facts: Facts) -> Reason | None:
    # PyTorch brings the whole runtime along; JAX and CuPy use the one of the machine.
    needs, here = build.runtimes["rocm"], facts.runtime_version
    if build.engine == "torch" or not needs or not here:
        return None
    if version_numbers(needs)[:1] == version_numbers(here)[:1]:
        return None
    text = f"{build.name} needs ROCm {needs}, but this machine has ROCm {here}"
    return Reason("version_mismatch", text)


def _architecture_not_in_build(build: Build, facts: Facts) -> Reason | None:
    if not facts.architecture or os.environ.get("HSA_OVERRIDE_GFX_VERSION"):
        return None
    card = facts.architecture.partition(":")[0]
    carried = tuple(dict.fromkeys(name.partition(":")[0] for name in build.architectures()))
    if not carried or card in carried or any(name.endswith("-generic") for name in carried):
        return None
    text = f"{build.name} was built for {', '.join(carried)}; this card is {card}"
    return Reason("card_not_in_build", text)


_FOREIGN = (
    (
        "out_of_memory",
        r"out of memory|OUT_OF_(DEVICE_|HOST_)?MEMORY|MemoryError|RESOURCE_EXHAUSTED|ALLOC_FAILED"
        r"|ALLOCATION_FAILURE|no memory left",
    ),
    ("hidden", r"VISIBLE_(DEVICES|CHIPS)"),
    ("version_mismatch", r"version mismatch|CUDA driver version is insufficient"),
    ("cpu_only_build", r"not compiled with (CUDA|XPU)"),
    (
        "cuda_library_missing",
        r"lib(cuda|cudart|cublas|cublasLt|cudnn|cusparse|cufft|nvrtc|nvJitLink)[\w.-]*"
        r"(: cannot open|.* not found)|Unable to (load|find) (CUDA|cuDNN|cuBLAS)"
        r"|(cudart|cublas|nvrtc)64_\d+\.dll",
    ),
    ("card_not_in_build", r"no kernel image"),
    (
        "device_mismatch",
        r"incompatible devices for|tensors to be on the same device|not on the expected device"
        r"|Array device must be same as the current device",
    ),
    ("driver_defect", r"unknown target CPU"),
    ("no_permission", r"Permission denied|[Nn]o permission|NOT_PERMITTED"),
)
"""Patterns in the messages of array libraries and drivers, by code; the first match counts."""


def code_of_message(message: str) -> str:
    """Return the code for a library's error message; "failed" for an unknown one."""
    return next((code for code, signs in _FOREIGN if re.search(signs, message)), "failed")


_SYSTEMS = {"linux": "Linux", "win32": "Windows", "darwin": "macOS"}
_PROCESSORS = {"x86_64": "x86-64", "amd64": "x86-64", "aarch64": "arm64", "arm64": "arm64"}


class Platform(Record):
    """The platform that packages are chosen for."""

    system: str
    processor: str
    python: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.system} {self.processor}"


def best_fix(
    backend: str, facts: Facts, builds: Sequence[Build], where: Platform | None = None
) -> str | None:
    """Return the best fix for a device that none of `builds` can drive; `None` if unknown."""
    where = where or this_platform()
    for build in sorted(builds, key=lambda build: not build.installed):
        command = command_for(build, backend, facts, where)
        if command:
            return command
    pairs = [(build.engine, backend) for build in builds]
    rows = [row for pair in pairs for row in REQUIREMENTS.get(pair, ()) if row.is_supported]
    if not rows:
        return None
    published = [row for row in rows if _is_published(row, where)]
    on_card = [row for row in published if _card_fits(row, backend, facts, where)]
    if on_card:
        least = min((row.runtime for row in on_card), key=version_numbers)
        what = f"the NVIDIA driver to {DRIVERS[least]}" if backend == "cuda" else f"ROCm to {least}"
        return f"update {what} or newer, or {USE_ANOTHER}"
    names = joined(row_of(engine).label for engine, _ in pairs if (engine, backend) in REQUIREMENTS)
    version = ".".join(map(str, where.python))
    lack = f"for {where} and Python {version}" if not published else "with code for this card"
    return f"{USE_ANOTHER}: no supported release of {names} is published {lack}"


def command_for(
    build: Build, backend: str, facts: Facts, where: Platform | None = None
) -> str | None:
    """Return the command that makes this engine's library drive the device; `None` if none can."""
    row = _fitting(build.engine, backend, facts, where or this_platform())
    if row is None:
        return None
    obstacles = _in_the_way(build.engine, row)
    removal = f"pip uninstall --yes {' '.join(obstacles)} && " if obstacles else ""
    words = ["pip install"]
    is_torch = build.installed and build.engine == "torch"
    if is_torch:
        # Another build of the same release counts as installed, so pip would leave it alone.
        words.append("--force-reinstall")
    elif build.version and compare_versions(build.version, row.oldest) < 0:
        words.append("--upgrade")
    words.append(_quote_spec(row.spec))
    if is_torch:
        # These fit one release of torch only, so they have to change with it.
        words += [name for name in ("torchvision", "torchaudio") if name in distributions()]
    if row.index:
        words.append(f"--index-url {INDEXES}{row.index}")
    return removal + " ".join(words)


def this_platform() -> Platform:
    """Return the system, processor and Python that packages are chosen for here."""
    processor = platform.machine().lower()
    return Platform(
        _SYSTEMS.get(sys.platform, sys.platform),
        _PROCESSORS.get(processor, processor),
        sys.version_info[:2],
    )


def _fitting(engine: str, backend: str, facts: Facts, where: Platform) -> Requirement | None:
    for row in REQUIREMENTS.get((engine, backend), ()):
        if (
            row.is_supported
            and _is_published(row, where)
            and _runtime_fits(row, backend, facts)
            and _card_fits(row, backend, facts, where)
        ):
            return row
    return None


def _is_published(row: Requirement, where: Platform) -> bool:
    in_time = row.newest_python is None or where.python <= row.newest_python
    return in_time and str(where) in row.cards


def _card_fits(row: Requirement, backend: str, facts: Facts, where: Platform) -> bool:
    cards = row.cards[str(where)]
    if backend == "cuda":
        card = facts.compute_capability
        return not card or (card not in JETSON and any(_runs_on(name, card) for name in cards))
    card = str(facts.details.get("architecture_override") or facts.architecture or "")
    return not cards or not card or card.partition(":")[0] in cards


def _runtime_fits(row: Requirement, backend: str, facts: Facts) -> bool:
    here = facts.runtime_version
    if not row.runtime:
        return True
    if backend == "cuda" and here:  # a driver also runs what was made for earlier releases
        return version_numbers(row.runtime)[:1] <= version_numbers(here)[:1]
    if backend == "cuda":
        driver = facts.driver_version or DRIVERS["12"]  # the oldest that anydevice supports
        return compare_versions(driver, DRIVERS[row.runtime]) >= 0
    if row.index:
        return not here or compare_versions(here, row.runtime) >= 0
    return here is not None and version_numbers(here)[:1] == version_numbers(row.runtime)[:1]


def _in_the_way(engine: str, row: Requirement) -> list[str]:
    """Installed packages that keep the requirement from being used."""
    names = sorted(distributions())
    wanted = row.spec.partition("[")[0]
    if engine == "cupy":
        here = [name for name in names if re.fullmatch(r"cupy(-cuda\d+x?|-rocm-\d+-\d+)?", name)]
        return [] if here == [wanted] else here
    if engine == "jax" and (match := re.search(r"\[(cuda\d+|rocm\d+)", row.spec)):
        plugins = [name for name in names if re.fullmatch(r"jax-(cuda|rocm)\d+-\w+", name)]
        return [name for name in plugins if not name.startswith(f"jax-{match[1]}-")]
    return []


def _quote_spec(spec: str) -> str:
    """A requirement as a POSIX shell and cmd both take it.

    >>> _quote_spec("torch<2.11"), _quote_spec("numpy")
    ('"torch<2.11"', 'numpy')
    """
    return spec if re.fullmatch(r"[\w.-]+", spec) else f'"{spec}"'
