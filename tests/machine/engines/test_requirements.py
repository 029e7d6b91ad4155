"""Every command that a finding prints, held against our extras and the table of requirements."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from packaging.requirements import Requirement as Specification
from packaging.version import Version

from anydevice._core.finding import BackendScan, Facts
from anydevice._core.record import replace
from anydevice._machine.discovery.libraries import findings_of
from anydevice._machine.engines import diagnosis, registry
from anydevice._machine.engines.diagnosis import Platform, best_fix, command_for
from anydevice._machine.engines.installed import distributions
from anydevice._machine.engines.requirements import (
    DRIVERS,
    EVERYWHERE,
    INDEXES,
    JETSON,
    REQUIREMENTS,
    USE_ANOTHER,
    Requirement,
)
from anydevice._machine.hardware.cuda.facts import Surroundings
from tests.machine.hardware.cuda import test_diagnosis as nvidia
from tests.machine.hardware.metal import test_reader as apple
from tests.machine.hardware.opencl import test_reader as opencl
from tests.machine.hardware.rocm import test_reader as amd
from tests.machine.tree import write_file

ROOT = Path(__file__).parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
ALL_ROWS = [row for rows in REQUIREMENTS.values() for row in rows]
FAMILIES = {"cupy-cuda13x": "cupy-cuda12x", "cupy-rocm-7-0": "cupy-cuda12x"}
"""Packages that no extra of ours names, by the one of the same library that an extra does."""


@cache
def lower_bound(spec: str) -> Version:
    """Return the oldest release that our extras allow; of the same extra, where one names it."""
    wanted = Specification(spec)
    lines = [EXTRAS["dependencies"], *EXTRAS["optional-dependencies"].values()]
    ours = [Specification(line) for group in lines for line in group if ">=" in line]
    same = [one for one in ours if one.name == FAMILIES.get(wanted.name, wanted.name)]
    exact = [one for one in same if one.extras == wanted.extras]
    plain = [one for one in same if not one.extras]
    return max(Version(one.version) for line in exact or plain or same for one in line.specifier)


def numbers(text: str | None) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text or "")))


def has_code(row: Requirement, backend: str, facts: Facts, platform: str) -> bool:
    cards = row.cards[platform]
    if backend == "rocm":
        names = (facts.details.get("architecture_override"), facts.architecture)
        card = str(next(filter(None, names), "")).split(":")[0]
        return not card or card in cards
    if backend != "cuda" or not facts.compute_capability:
        return True
    major, minor = numbers(facts.compute_capability)
    oldest = {name: divmod(int(name.split("_")[1]), 10) for name in cards}
    fits = (
        (major, minor) >= made if "compute" in name else major == made[0] and minor >= made[1]
        for name, made in oldest.items()
    )
    return facts.compute_capability not in JETSON and any(fits)


def is_served(row: Requirement, backend: str, facts: Facts) -> bool:
    needed, here = numbers(row.runtime), numbers(facts.runtime_version)
    if backend == "rocm":
        brings_its_own = row.spec == "torch"
        return (not here or here >= needed) if brings_its_own else here[:1] == needed
    driver = numbers(facts.driver_version) or (525,)
    return not needed or (here[:1] >= needed if here else driver >= numbers(DRIVERS[row.runtime]))


def fits(row: Requirement, backend: str, facts: Facts, where: Platform) -> bool:
    """Whether a requirement suits a machine: read from the table without our diagnosis."""
    return (
        str(where) in row.cards
        and where.python <= (row.newest_python or where.python)
        and (not row.newest or Version(row.newest) >= lower_bound(row.spec))
        and has_code(row, backend, facts, str(where))
        and is_served(row, backend, facts)
    )


def check_command(command: str, backend: str, facts: Facts, where: Platform) -> None:
    """Check that pip takes a command, and that its package is one of ours that fits here."""
    *removals, install = [shlex.split(part) for part in command.split(" && ")]
    for removal in removals:
        assert removal[:3] == ["pip", "uninstall", "--yes"]
        assert set(removal[3:]) <= set(distributions())
    assert install[:2] == ["pip", "install"]
    url = install.pop(install.index("--index-url") + 1) if "--index-url" in install else ""
    options = {word for word in install if word.startswith("-")} - {"--index-url"}
    assert options <= {"--force-reinstall", "--upgrade"}
    first, *others = [word for word in install[2:] if not word.startswith("-")]
    assert set(others) <= {"torchvision", "torchaudio"}
    wanted = Specification(first)
    assert not wanted.specifier, "a fixed release would grow older than our bounds"
    rows = [
        row
        for (_, drives), rows in REQUIREMENTS.items()
        for row in rows
        if (row.spec, drives) == (first, backend) and url == (row.index and INDEXES + row.index)
    ]
    assert any(fits(row, backend, facts, where) for row in rows), (command, facts, where)
    here = distributions().get(wanted.name)
    if here and (Version(here) < lower_bound(first) or first == "torch"):
        assert options, f"pip would leave {first} {here} as it is"


def check_fix(fix: str | None, backend: str, facts: Facts, where: Platform) -> None:
    """Check a fix of the library stage: a command, or else that nothing fits and the way out."""
    drives = [pair for pair in REQUIREMENTS if pair[1] == backend]
    suitable = [row for pair in drives for row in REQUIREMENTS[pair]]
    if fix is not None and fix.startswith("pip"):
        check_command(fix, backend, facts, where)
        return
    assert not any(fits(row, backend, facts, where) for row in suitable), (fix, facts, where)
    assert fix is not None
    assert USE_ANOTHER in fix
    if fix.startswith("update"):  # a driver with which something fits
        version = fix.split(" or newer")[0].rpartition(" ")[2]
        served = {driver: cuda for cuda, driver in DRIVERS.items()}.get(version, version)
        newer = replace(facts, runtime_version=served)
        assert any(fits(row, backend, newer, where) for row in suitable)


def test_the_table_has_the_bounds_of_our_extras() -> None:
    for row in ALL_ROWS:
        assert Version(row.oldest) == lower_bound(row.spec), row
        assert row.is_supported == (not row.newest or Version(row.newest) >= Version(row.oldest))
        assert set(row.cards) <= set(EVERYWHERE)
    names = {row.index for row in ALL_ROWS if row.index}
    assert names == {"cu126", "cu128", "cu130", "rocm6.4", "rocm7.2", "xpu", "cpu"}
    assert [row.index for row in ALL_ROWS if not row.is_supported] == ["rocm6.4"]


def install_jax(site, version: str, *plugins: str) -> None:
    for name in ("jax", "jaxlib"):
        site.package(name, version)
    for plugin in plugins:
        site.distribution(plugin, version)


def install_cupy(site, *names: str) -> None:
    site.package("cupy")
    for name in names:
        site.distribution(name, "13.6.0")


def install_many(site) -> None:
    site.torch("2.13.0+cpu")
    site.distribution("torchvision", "0.28.0")
    install_jax(site, "0.10.2")


TURING = b"\0sm_75 sm_80 sm_86 sm_90 sm_100 sm_120\0"
LIBRARIES: dict[str, Callable[..., object]] = {
    "none": lambda site: None,
    "torch for CPUs": lambda site: site.torch("2.13.0+cpu"),
    "torch for CUDA 13": lambda site: site.torch("2.13.0+cu130", "13.0", library=TURING),
    "an old torch": lambda site: site.torch("2.9.1+cu126", "12.6"),
    "torch for ROCm": lambda site: site.torch("2.9.1+rocm6.4", hip="6.4.43484"),
    "a damaged torch": lambda site: site.package("torch", "2.13.0"),
    "jax": lambda site: install_jax(site, "0.10.2"),
    "an old jax": lambda site: install_jax(site, "0.5.0"),
    "jax for CUDA 13": lambda site: install_jax(site, "0.10.2", "jax-cuda13-plugin"),
    "jax for ROCm 6": lambda site: install_jax(site, "0.9.0", "jax-rocm60-plugin"),
    "an old cupy": lambda site: install_cupy(site, "cupy-cuda12x"),
    "two of cupy": lambda site: install_cupy(site, "cupy-cuda11x", "cupy-cuda12x"),
    "an mlx without backend": lambda site: site.mlx("0.32.4"),
    "many": install_many,
}

CAPABILITIES = (None, "3.5", "5.0", "5.2", "6.1", "7.0", "7.2", "7.5", "8.0", "8.6", "8.7", "8.9")
CAPABILITIES += ("9.0", "10.0", "10.3", "11.0", "12.0", "12.1", "13.0")
VERSIONS = [("11.8", None), ("12.2", None), ("12.8", None), ("13.0", None), ("14.0", None)]
VERSIONS += [(None, None), (None, "535.104.05"), (None, "580.65.06")]
ARCHITECTURES = (None, "gfx803", "gfx900", "gfx906", "gfx908", "gfx90a:sramecc+:xnack-", "gfx942")
ARCHITECTURES += ("gfx950", "gfx1010", "gfx1030", "gfx1031", "gfx1100", "gfx1151", "gfx1201")
CARDS = {
    "cuda": [
        Facts("card", compute_capability=card, runtime_version=serves, driver_version=driver)
        for card in CAPABILITIES
        for serves, driver in VERSIONS
    ],
    "rocm": [
        Facts("card", architecture=name, runtime_version=version, details=details)
        for name, version in product(ARCHITECTURES, (None, "5.7", "6.2", "6.4.1", "7.0", "7.14"))
        for details in ({}, {"architecture_override": "gfx1030"})
    ],
    **{backend: [Facts("device")] for backend in ("metal", "xpu", "tpu", "opencl")},
}
PYTHONS = ((3, 11), (3, 14), (3, 15), (3, 16))
PLATFORMS = [
    Platform(*platform.split(), python) for platform, python in product(EVERYWHERE, PYTHONS)
]


MANY, FEW = slice(None), slice(None, None, 7)


@pytest.mark.parametrize("name", LIBRARIES)
def test_every_command_fits_and_there_is_one_wherever_something_fits(site, name: str) -> None:
    LIBRARIES[name](site)
    # Only options and removals depend on what is installed.
    part = MANY if name == "none" else FEW
    for backend, cards in CARDS.items():
        builds = [registry.installed(engine) for engine in registry.engines_for(backend)]
        for facts, where in list(product(cards, PLATFORMS))[part]:
            check_fix(best_fix(backend, facts, builds, where), backend, facts, where)
            for build in builds:
                command = command_for(build, backend, facts, where)
                rows = REQUIREMENTS.get((build.engine, backend), ())
                assert (command is None) == (not any(fits(r, backend, facts, where) for r in rows))
                if command:
                    check_command(command, backend, facts, where)


def test_a_planted_command_is_refused(site) -> None:
    old, where = Facts("card", compute_capability="5.2", runtime_version="12.4"), PLATFORMS[0]
    index = f"--index-url {INDEXES}"
    for command in (
        'pip install "torch<2.8"',
        "pip install torch",
        f"pip install torch {index}cu130",
        f"pip install torch {index}cu124",
        f"pip install torch {index}rocm7.2",
        'pip install "anydevice[cuda]"',
        'pip install "jax[cuda13]"',
    ):
        with pytest.raises((AssertionError, ValueError)):
            check_command(command, "cuda", old, where)
    check_command(f"pip install torch {index}cu126", "cuda", old, where)
    with pytest.raises(AssertionError):
        check_fix(USE_ANOTHER, "cuda", old, where)


def recorded_scans(folder: Path) -> list[tuple[BackendScan, str]]:
    """Return the scan of each machine that was recorded for the tests, with its platform."""
    scans = []
    for path in sorted((ROOT / "tests" / "recorded").glob("*/*.*")):
        name, linux = path.stem, "Linux x86-64"
        if path.parent.name == "cuda" and path.suffix == ".json":
            system = "win32" if name == "windows" else "linux"
            tegra = "L4T 36.3.0" if name.startswith("jetson") else None
            around = Surroundings(system, tegra=tegra, wsl=name == "wsl")
            has_driver = "driver" in json.loads(path.read_text("utf-8"))
            asked = nvidia.driver(name) if has_driver else nvidia.agreeing(nvidia.nvml(name))
            platform = {"win32": "Windows x86-64"}.get(system, linux)
            arm = name.startswith(("jetson", "gb10"))
            scan = nvidia.seen(nvidia.nvml(name), asked, around)
            scans.append((scan, "Linux arm64" if arm else platform))
        elif path.parent.name == "rocm":
            for file, content in tomllib.loads(path.read_text("utf-8"))["files"].items():
                write_file(folder / name, file, content)
            scans.append((amd.see(folder / name), linux))
        elif path.parent.name == "metal":
            processor = "x86-64" if name.startswith("macbook") else "arm64"
            scans.append((apple.see(apple.Mac(name), processor), f"macOS {processor}"))
        elif path.parent.name == "opencl":
            scans.append((opencl.recorded(name), linux))
    return scans


def test_the_recorded_machines_are_told_what_fits_them(
    site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[tuple[str, str], str | None] = {}
    for scan, platform in recorded_scans(tmp_path):
        where = Platform(*platform.split(), (3, 12))
        monkeypatch.setattr(diagnosis, "this_platform", lambda where=where: where)
        (finding,) = findings_of([scan])
        for device in finding.devices:
            status = device.status
            if status.stage == "library":
                check_fix(status.fix, finding.backend, status.facts, where)
            for refusal in status.refusals:
                if fix := refusal.reason.fix:
                    check_command(fix, finding.backend, status.facts, where)
            told[finding.backend, status.facts.name] = status.fix
    index = f"pip install torch --index-url {INDEXES}"
    assert told["cuda", "NVIDIA H200"] == f"{index}cu130"
    assert told["cuda", "NVIDIA GeForce GTX 1080"] == f"{index}cu126"
    assert told["cuda", "Tesla K40m"] == USE_ANOTHER
    assert told["cuda", "NVIDIA GeForce RTX 4070"] == f"{index}cu126"  # on Windows
    assert told["cuda", "NVIDIA GB10"] == f"{index}cu130"
    assert told["rocm", "AMD Radeon RX 7900 XTX"] == f"{index}rocm7.2"
    assert told["rocm", "AMD INSTINCT MI250X"] == f"update ROCm to 6.3.3 or newer, or {USE_ANOTHER}"
    assert told["metal", "Apple M1"] == "pip install mlx"
    assert told["rocm", "AMD gfx803 GPU"] == USE_ANOTHER
    assert len(told) > 20


def test_other_commands_name_packages_of_our_extras() -> None:
    """Those in findings of hardware, in errors and in advice: each `pip install` of the source."""
    lines = [EXTRAS["dependencies"], *EXTRAS["optional-dependencies"].values()]
    known = {Specification(line).name for group in lines for line in group}
    files = [*(ROOT / "src").rglob("*.py"), ROOT / "src/anydevice/_report/causes.toml"]
    named = {
        word
        for path in files
        if path.name != "text.py"  # installs anydevice itself: tests/repo/test_own_name.py
        for command in re.findall(r"pip install ([^\"'`,;)\n]+)", path.read_text("utf-8"))
        for word in re.sub(r"\{[^}]*\}", "", command).split()
        if word[0] != "-"
    }
    assert {"pyopencl", "pocl-binary-distribution", "onnxruntime", "cloudpickle"} <= named
    assert named - known == set()
    assert {row.libraries[0] for row in registry.BUILT_IN.values()} <= known


def test_the_page_on_troubleshooting_has_the_indexes_of_pytorch() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| ((?:cu|rocm)[\d.]+) \| ([^|]+) \|", page, re.MULTILINE))
    known = [x for backend in ("cuda", "rocm") for x in REQUIREMENTS["torch", backend]]
    supported = {x.index: DRIVERS.get(x.runtime, x.runtime) for x in known if x.is_supported}
    assert list(rows) == list(supported)
    assert all(version in rows[index] for index, version in supported.items())
