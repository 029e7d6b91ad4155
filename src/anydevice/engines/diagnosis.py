"""The command that would mend a refusal, for this machine.

Every command takes packages by name from the default index. What the index holds decides: its
PyTorch for Linux carries CUDA, that for Windows does not; which CUDA, and for which cards, depends
on the release. The rows below say so, the newest first.

Why an installed library cannot drive a device, in the sentence that a user needs.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Sequence

from anydevice.core.backends import BACKENDS
from anydevice.core.finding import Facts, Refusal, compare_versions, version_numbers
from anydevice.core.record import Record
from anydevice.engines.installed import Build, distributions

_SYSTEMS = {"linux": "Linux", "win32": "Windows", "darwin": "macOS"}
_PROCESSORS = {"x86_64": "x86-64", "amd64": "x86-64", "aarch64": "arm64", "arm64": "arm64"}
_ANYWHERE = ("Linux", "Windows", "macOS")
_BOTH = ("x86-64", "arm64")
_SAFE_CUDA = 12  # every driver that anydevice supports runs what was made for CUDA 12


class Machine(Record):
    """What decides which packages of the index fit."""

    system: str
    processor: str
    python: tuple[int, int]


class Recipe(Record):
    """One requirement that brings a backend to an engine, and where it fits.

    `runtime` is the major release of CUDA or ROCm it was made for, `oldest_card` the oldest
    compute capability it carries, `newest_python` the last Python it was published for, and
    `since` the first release of the library that knows this requirement. `in_extra` marks what
    `anydevice[backend]` installs.
    """

    requirement: str
    systems: tuple[str, ...] = _ANYWHERE
    processors: tuple[str, ...] = _BOTH
    runtime: int | None = None
    oldest_card: str | None = None
    newest_python: tuple[int, int] | None = None
    since: str | None = None
    in_extra: bool = False


_LINUX, _WINDOWS, _MAC = ("Linux",), ("Windows",), ("macOS",)
_X86, _ARM = ("x86-64",), ("arm64",)

RECIPES: dict[tuple[str, str], tuple[Recipe, ...]] = {
    ("torch", "cuda"): (
        Recipe("torch", _LINUX, _X86, 13, "7.5", in_extra=True),
        Recipe("torch<2.11", _LINUX, _X86, 12, "7.0", newest_python=(3, 14)),
        Recipe("torch<2.8", _LINUX, _X86, 12, "5.0", newest_python=(3, 13)),
        Recipe("torch", _LINUX, _ARM, 13, "8.0", in_extra=True),
    ),
    ("jax", "cuda"): (
        Recipe("jax[cuda13]", _LINUX, _BOTH, 13, "7.5", since="0.7"),
        Recipe("jax[cuda12]", _LINUX, _BOTH, 12, "5.2"),
    ),
    ("cupy", "cuda"): (
        Recipe("cupy-cuda12x[ctk]", _LINUX, _BOTH, 12, "5.0"),
        Recipe("cupy-cuda12x[ctk]", _WINDOWS, _X86, 12, "5.0", in_extra=True),
    ),
    ("jax", "rocm"): (
        Recipe("jax[rocm7-local]", _LINUX, _X86, 7, since="0.10", in_extra=True),
        Recipe("jax[rocm]==0.5.0", _LINUX, _X86, 6, newest_python=(3, 12)),
    ),
    ("cupy", "rocm"): (
        Recipe("cupy-rocm-7-0", _LINUX, _X86, 7),
        Recipe("cupy-rocm-5-0", _LINUX, _X86, 5, newest_python=(3, 12)),
    ),
    ("mlx", "metal"): (Recipe("mlx", _MAC, _ARM, in_extra=True),),
    ("torch", "metal"): (Recipe("torch", _MAC, _ARM),),
    ("opencl", "opencl"): (Recipe("pyopencl", in_extra=True),),
    ("jax", "tpu"): (Recipe("jax[tpu]", _LINUX, _X86, in_extra=True),),
    ("numpy", "cpu"): (Recipe("numpy"),),
    ("torch", "cpu"): (Recipe("torch"),),
    ("jax", "cpu"): (Recipe("jax"),),
    ("mlx", "cpu"): (Recipe("mlx", _MAC, _ARM), Recipe("mlx[cpu]", _LINUX)),
}


def mend(
    backend: str, facts: Facts, builds: Sequence[Build], machine: Machine | None = None
) -> str | None:
    """The one best step for a device that none of `builds` can drive; `None` if none is known.

    A library that is installed already goes before another one; `builds` come in order of choice.
    """
    machine = machine or this_machine()
    for build in (build for build in builds if build.installed):
        command = command_for(build, backend, facts, machine)
        if command:
            return command
    for build in builds:
        recipe = _recipe(build.engine, backend, facts, machine)
        if recipe and recipe.in_extra and not any(build.installed for build in builds):
            return f"pip install {_quoted(f'anydevice[{backend}]')}"
    for build in builds:
        command = command_for(build, backend, facts, machine)
        if command:
            return command
    if backend == "cuda" and _runtime_here(backend, facts) < _SAFE_CUDA:
        return "update the NVIDIA driver to version 525 or newer"
    return None


def command_for(
    build: Build, backend: str, facts: Facts, machine: Machine | None = None
) -> str | None:
    """The command that makes this engine's library drive the device; `None` if none can."""
    recipe = _recipe(build.engine, backend, facts, machine or this_machine())
    if recipe is None:
        return None
    obstacles = _in_the_way(build.engine, recipe)
    removal = f"pip uninstall --yes {' '.join(obstacles)} && " if obstacles else ""
    words = ["pip install"]
    if build.installed and build.engine == "torch":
        # Another build of the same release counts as installed, so pip would leave it alone.
        words.append("--force-reinstall")
    elif build.version and recipe.since and compare_versions(build.version, recipe.since) < 0:
        words.append("--upgrade")
    words.append(_quoted(recipe.requirement))
    words += _tied_to(build)
    return removal + " ".join(words)


def this_machine() -> Machine:
    """The system, processor and Python that packages are chosen for here."""
    processor = platform.machine().lower()
    return Machine(
        _SYSTEMS.get(sys.platform, sys.platform),
        _PROCESSORS.get(processor, processor),
        sys.version_info[:2],
    )


def _recipe(engine: str, backend: str, facts: Facts, machine: Machine) -> Recipe | None:
    for recipe in RECIPES.get((engine, backend), ()):
        if (
            machine.system in recipe.systems
            and machine.processor in recipe.processors
            and (recipe.newest_python is None or machine.python <= recipe.newest_python)
            and _runtime_fits(recipe, backend, facts)
            and _card_fits(recipe, facts)
        ):
            return recipe
    return None


def _runtime_fits(recipe: Recipe, backend: str, facts: Facts) -> bool:
    if recipe.runtime is None:
        return True
    here = _runtime_here(backend, facts)
    # An NVIDIA driver also runs what was made for earlier releases; ROCm has to be the same one.
    return recipe.runtime <= here if backend == "cuda" else recipe.runtime == here


def _runtime_here(backend: str, facts: Facts) -> int:
    numbers = version_numbers(facts.runtime_version or "")
    if numbers:
        return numbers[0]
    return _SAFE_CUDA if backend == "cuda" else 7


def _card_fits(recipe: Recipe, facts: Facts) -> bool:
    card = facts.compute_capability
    return not card or not recipe.oldest_card or compare_versions(card, recipe.oldest_card) >= 0


def _in_the_way(engine: str, recipe: Recipe) -> list[str]:
    """Installed packages that keep the requirement from being used."""
    names = sorted(distributions())
    wanted = recipe.requirement.partition("[")[0]
    if engine == "cupy":
        here = [name for name in names if re.fullmatch(r"cupy(-cuda\d+x?|-rocm-\d+-\d+)?", name)]
        return [] if here == [wanted] else here
    if engine == "jax" and (match := re.search(r"\[(cuda\d+|rocm\d+)", recipe.requirement)):
        plugins = [name for name in names if re.fullmatch(r"jax-(cuda|rocm)\d+-\w+", name)]
        return [name for name in plugins if not name.startswith(f"jax-{match[1]}-")]
    return []


def _tied_to(build: Build) -> list[str]:
    """Packages that fit one release of the library only, and so have to change with it."""
    if build.engine != "torch" or not build.installed:
        return []
    names = distributions()
    return [name for name in ("torchvision", "torchaudio") if name in names]


def _quoted(requirement: str) -> str:
    """A requirement as a POSIX shell and cmd both take it.

    >>> _quoted("torch<2.11"), _quoted("numpy")
    ('"torch<2.11"', 'numpy')
    """
    return requirement if re.fullmatch(r"[\w.-]+", requirement) else f'"{requirement}"'


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
