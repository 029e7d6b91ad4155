"""The command that a user is told, for machines of many kinds."""

from __future__ import annotations

import shlex

import pytest

from anydevice.core.finding import Facts
from anydevice.engines import registry
from anydevice.engines.diagnosis import (
    REQUIREMENTS,
    Platform,
    best_fix,
    command_for,
    this_platform,
)

LINUX = Platform("Linux", "x86-64", (3, 12))
ARM = Platform("Linux", "arm64", (3, 12))
WINDOWS = Platform("Windows", "x86-64", (3, 12))
MAC = Platform("macOS", "arm64", (3, 12))


def nvidia(serves: str | None = "13.0", capability: str | None = "8.9") -> Facts:
    return Facts("card", runtime_version=serves, compute_capability=capability)


def told(backend: str, facts: Facts, machine: Platform) -> str | None:
    builds = [registry.installed(name) for name in registry.engines_for(backend)]
    return best_fix(backend, facts, builds, machine)


@pytest.mark.parametrize(
    ("machine", "facts", "command"),
    [
        (LINUX, nvidia("13.0", "8.9"), 'pip install "anydevice[cuda]"'),
        (LINUX, nvidia("12.4", "8.9"), 'pip install "torch<2.11"'),
        (LINUX, nvidia("12.4", "7.0"), 'pip install "torch<2.11"'),
        (LINUX, nvidia("13.0", "7.0"), 'pip install "torch<2.11"'),
        (LINUX, nvidia("12.4", "6.1"), 'pip install "torch<2.8"'),
        (LINUX, nvidia(None, None), 'pip install "torch<2.11"'),
        (ARM, nvidia("13.0", "9.0"), 'pip install "anydevice[cuda]"'),
        (ARM, nvidia("12.8", "9.0"), 'pip install "jax[cuda12]"'),
        (WINDOWS, nvidia("13.0", "8.9"), 'pip install "anydevice[cuda]"'),
        (LINUX, nvidia("11.4", "8.0"), "update the NVIDIA driver to version 525 or newer"),
        (LINUX, nvidia("12.4", "3.5"), None),
    ],
)
def test_an_nvidia_card_and_no_library(
    site, machine: Platform, facts: Facts, command: str | None
) -> None:
    assert told("cuda", facts, machine) == command


@pytest.mark.parametrize(
    ("python", "command"),
    [
        ((3, 13), 'pip install "torch<2.8"'),
        ((3, 14), 'pip install "jax[cuda12]"'),
    ],
)
def test_a_python_that_the_old_release_was_not_made_for(
    site, python: tuple[int, int], command: str
) -> None:
    assert told("cuda", nvidia("12.4", "6.1"), Platform("Linux", "x86-64", python)) == command


@pytest.mark.parametrize(
    ("machine", "facts", "command"),
    [
        (LINUX, nvidia("13.0", "8.9"), "pip install --force-reinstall torch"),
        (LINUX, nvidia("12.6", "8.9"), 'pip install --force-reinstall "torch<2.11"'),
        (LINUX, nvidia("12.6", "6.1"), 'pip install --force-reinstall "torch<2.8"'),
        (WINDOWS, nvidia("13.0", "8.9"), 'pip install "cupy-cuda12x[ctk]"'),
    ],
)
def test_a_cpu_build_of_torch_is_replaced(
    site, machine: Platform, facts: Facts, command: str
) -> None:
    site.torch("2.13.0+cpu")
    assert told("cuda", facts, machine) == command


def test_what_is_tied_to_torch_changes_with_it(site) -> None:
    site.torch("2.13.0+cpu")
    site.distribution("torchvision", "0.28.0")
    assert told("cuda", nvidia(), LINUX) == "pip install --force-reinstall torch torchvision"


def test_an_installed_library_goes_before_another(site) -> None:
    site.package("jax", "0.10.2")
    site.package("jaxlib", "0.10.2")
    assert told("cuda", nvidia("13.0"), LINUX) == 'pip install "jax[cuda13]"'
    assert told("cuda", nvidia("12.4"), LINUX) == 'pip install "jax[cuda12]"'


def test_a_jax_that_does_not_know_the_extra_is_upgraded(site) -> None:
    site.package("jax", "0.5.0")
    assert told("cuda", nvidia("13.0"), LINUX) == 'pip install --upgrade "jax[cuda13]"'
    assert told("cuda", nvidia("12.4"), LINUX) == 'pip install "jax[cuda12]"'


def test_a_plugin_in_the_way_is_removed_first(site) -> None:
    site.package("jax", "0.10.2")
    for name in ("jax-cuda13-plugin", "jax-cuda13-pjrt"):
        site.distribution(name, "0.10.2")
    assert told("cuda", nvidia("12.4"), LINUX) == (
        'pip uninstall --yes jax-cuda13-pjrt jax-cuda13-plugin && pip install "jax[cuda12]"'
    )


def test_cupys_that_overwrite_each_other_are_all_removed_first(site) -> None:
    site.package("cupy")
    site.distribution("cupy-cuda11x", "13.6.0")
    site.distribution("cupy-cuda12x", "14.2.0")
    assert told("cuda", nvidia(), WINDOWS) == (
        'pip uninstall --yes cupy-cuda11x cupy-cuda12x && pip install "cupy-cuda12x[ctk]"'
    )


def test_the_right_cupy_is_not_in_its_own_way(site) -> None:
    site.package("cupy")
    site.distribution("cupy-cuda12x", "14.2.0")
    command = command_for(registry.installed("cupy"), "cuda", nvidia(), WINDOWS)
    assert command == 'pip install "cupy-cuda12x[ctk]"'


@pytest.mark.parametrize(
    ("rocm", "python", "command"),
    [
        ("7.0.1", (3, 12), 'pip install "anydevice[rocm]"'),
        (None, (3, 12), 'pip install "anydevice[rocm]"'),
        ("6.4", (3, 12), 'pip install "jax[rocm]==0.5.0"'),
        ("5.7", (3, 12), "pip install cupy-rocm-5-0"),
        ("6.4", (3, 13), None),
    ],
)
def test_an_amd_card(site, rocm: str | None, python: tuple[int, int], command: str | None) -> None:
    facts = Facts("AMD card", architecture="gfx942", runtime_version=rocm)
    assert told("rocm", facts, Platform("Linux", "x86-64", python)) == command


def test_an_amd_card_and_a_cuda_build_of_torch(site) -> None:
    site.torch("2.11.0+cu130", cuda="13.0")
    facts = Facts("AMD card", runtime_version="7.0")
    assert told("rocm", facts, LINUX) == 'pip install "jax[rocm7-local]"'


@pytest.mark.parametrize(
    ("backend", "machine", "command"),
    [
        ("metal", MAC, 'pip install "anydevice[metal]"'),
        ("opencl", WINDOWS, 'pip install "anydevice[opencl]"'),
        ("tpu", LINUX, 'pip install "anydevice[tpu]"'),
        ("metal", Platform("macOS", "x86-64", (3, 12)), None),
        ("gaudi", LINUX, None),
    ],
)
def test_the_other_backends(site, backend: str, machine: Platform, command: str | None) -> None:
    assert told(backend, Facts("device"), machine) == command


def test_jax_is_there_already(site) -> None:
    site.package("jax", "0.10.2")
    assert told("tpu", Facts("TPU v4"), LINUX) == 'pip install "jax[tpu]"'


def test_mlx_lacks_its_backend(site) -> None:
    site.mlx("0.32.4")
    build = registry.installed("mlx")
    assert command_for(build, "cpu", Facts("CPU"), LINUX) == 'pip install "mlx[cpu]"'
    assert command_for(build, "cpu", Facts("CPU"), MAC) == "pip install mlx"
    assert command_for(build, "cpu", Facts("CPU"), WINDOWS) is None


def test_this_machine_is_one_that_the_index_knows() -> None:
    machine = this_platform()
    assert machine.system in ("Linux", "Windows", "macOS")
    assert machine.python >= (3, 11)


def test_every_command_is_one_line_that_a_shell_reads_back() -> None:
    for rows in REQUIREMENTS.values():
        for row in rows:
            assert shlex.split(f'pip install "{row.spec}"')[2] == row.spec
            assert "://" not in row.spec


def test_every_requirement_is_for_an_engine_that_drives_the_backend() -> None:
    for engine, backend in REQUIREMENTS:
        assert backend in registry.BUILT_IN[engine].backends
