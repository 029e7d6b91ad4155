"""What is installed: distributions, entry points, and the build of each array library."""

from __future__ import annotations

import os
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest

from anydevice._machine.engines import registry
from anydevice._machine.engines.installed import (
    distributions,
    entry_points,
    package_folder,
    read_architectures,
    read_version,
)


def test_names_and_versions_come_from_the_folders_names(site) -> None:
    site.distribution("jax-cuda12-plugin", "0.10.2")
    for name in ("PyYAML-6.0-py3.11.egg", "torch-2.13.0+cpu.dist", "nameless.dist"):
        (site.folder / f"{name}-info").mkdir()
    (site.folder / "dist-info").mkdir()
    versions = {"jax-cuda12-plugin": "0.10.2", "pyyaml": "6.0", "torch": "2.13.0+cpu"}
    assert distributions() == versions


def test_a_later_installation_is_seen(site) -> None:
    assert distributions() == {}
    site.distribution("jax", "0.10.2")
    os.utime(site.folder, ns=(1, 1))
    assert distributions() == {"jax": "0.10.2"}


def test_the_first_on_the_search_path_counts(site, tmp_path, monkeypatch) -> None:
    site.distribution("jax", "0.10.2")
    archive = tmp_path / "library.zip"
    archive.touch()
    monkeypatch.setattr(sys, "path", [str(archive), str(tmp_path / "gone"), *sys.path])
    assert distributions() == {"jax": "0.10.2"}  # what is no folder is passed over
    for place, version in (("other", "2.0"), ("work", "0.1")):
        (tmp_path / place / f"jax-{version}.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "other"), *sys.path])
    assert distributions()["jax"] == "2.0"
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # the working directory
    assert distributions()["jax"] == "0.1"


def test_entry_points_of_one_group(site) -> None:
    text = """
[console_scripts]
tool = tool.main:run

[anydevice.engines]
# a comment = is.no:entry
tinygrad = tinygrad_anydevice:ROW [extra]
second=other : ROW
no entry here
"""
    site.distribution("tool", "1.0", entry_points=text)
    site.distribution("empty", "1.0", entry_points="")
    unreadable = site.distribution("broken", "1.0")
    (unreadable / "entry_points.txt").write_bytes(b"[anydevice.engines]\n\xff = a:b")
    found = entry_points("anydevice.engines")
    assert [(e.distribution, e.name, e.target) for e in found] == [
        ("tool", "tinygrad", "tinygrad_anydevice:ROW"),
        ("tool", "second", "other : ROW"),
    ]


def test_the_same_distribution_twice_offers_its_entries_once(site, tmp_path, monkeypatch) -> None:
    for folder, target in ((site.folder, "old:ROW"), (tmp_path / "first", "new:ROW")):
        info = folder / "tool-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "entry_points.txt").write_text(f"[anydevice.group]\ntool = {target}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), *sys.path])
    assert [entry.target for entry in entry_points("anydevice.group")] == ["new:ROW"]


def test_a_package_is_found_without_being_imported(site) -> None:
    folder = site.package("torch")
    assert package_folder("torch") == folder
    assert "torch" not in sys.modules
    assert package_folder("numpy") == Path(numpy.__file__).parent  # which is imported


def test_what_is_no_package(site, monkeypatch: pytest.MonkeyPatch) -> None:
    (site.folder / "torch" / "lib").mkdir(parents=True)  # a folder without code
    assert package_folder("torch") is None
    assert not registry.installed("torch").installed
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))  # without a spec
    assert package_folder("torch") is None
    assert package_folder("sys") is None


def test_a_namespace_folder_with_a_compiled_module_is_one(site) -> None:
    assert package_folder("mlx") is None
    assert package_folder("mlx") is None
    folder = site.mlx("0.32.4")
    os.utime(site.folder, ns=(1, 1))
    assert package_folder("mlx") == folder


LISTS = {
    b"\0sm_75 sm_80 sm_86 sm_90 sm_100 sm_120\0": "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120",
    b"std::string ipc_hsm_70 sm_75 sm_80\0\0\0": "sm_70 sm_75 sm_80",
    b"\0sm_80 sm_90a sm_120 compute_120\0": "sm_80 sm_90a sm_120 compute_120",
    b"\0sm_90 compute_90\0": "sm_90 compute_90",
    b"\0needs sm_80 or sm_90\0sm_89\0": "sm_89",
    b"\0gfx906 gfx90a:xnack- gfx942 gfx1100\0": "gfx906 gfx90a:xnack- gfx942 gfx1100",
    b"\0gfx90a gfx11-generic gfx9-4-generic\0": "gfx90a gfx11-generic gfx9-4-generic",
    b"\0gfx1030\0": "gfx1030",
    b"\0uses sm_80 where it can\0": "",
}


@pytest.mark.parametrize("library", LISTS, ids=lambda text: text.strip(b"\0").decode()[:40])
def test_the_architectures_inside_a_library(site, library: bytes) -> None:
    folder = site.torch("2.11.0+cu130", cuda="13.0", library=library)
    assert " ".join(read_architectures(folder)) == LISTS[library]


@pytest.mark.parametrize(
    ("file", "content", "found"),
    [("torch_python.dll", b"\0sm_80 sm_90\0", ("sm_80", "sm_90")), ("libtorch_python.so", b"", ())],
)
def test_other_architectures(site, file: str, content: bytes, found: tuple[str, ...]) -> None:
    folder = site.torch("2.11.0+cu130", cuda="13.0")
    assert read_architectures(folder / "elsewhere") == ()
    (folder / "lib" / file).write_bytes(content)
    assert registry.installed("torch").architectures() == found


@pytest.mark.parametrize(
    ("version", "cuda", "hip", "runtimes"),
    [
        ("2.13.0+cpu", None, None, {}),
        ("2.5.1", None, None, {}),
        ("2.11.0+cu130", "13.0", None, {"cuda": "13.0"}),
        ("2.9.1+rocm6.4", None, "6.4.43484-123eb5128", {"rocm": "6.4.43484-123eb5128"}),
        ("2.12.0a0+gitcf30153", "12.8", None, {"cuda": "12.8"}),
    ],
)
def test_torch(site, version: str, cuda: str | None, hip: str | None, runtimes: object) -> None:
    site.torch(version, cuda=cuda, hip=hip)
    build = registry.installed("torch")
    assert (build.version, build.runtimes, build.broken) == (version, runtimes, None)
    assert build.name == f"torch {version}"


def test_torch_for_macos_drives_metal(site) -> None:
    folder = site.torch("2.13.0")
    (folder / "lib" / "libtorch_python.dylib").touch()
    assert registry.installed("torch").runtimes == {"metal": ""}


@pytest.mark.parametrize("text", [None, "", "__version__ = (", "__version__ = 2", "a\0b"])
def test_a_version_file_that_says_nothing(site, text: str | None) -> None:
    folder = site.torch("2.13.0")
    (folder / "version.py").unlink()
    if text is not None:
        (folder / "version.py").write_text(text)
    assert read_version(folder) is None
    build = registry.installed("torch")
    assert str(build.broken) == "torch 2.13.0 is damaged: its version.py cannot be read"


def test_the_torch_of_this_machine_is_read_as_it_reads_itself() -> None:
    torch = pytest.importorskip("torch")
    build = registry.installed("torch")
    assert build.version == torch.__version__
    assert build.runtimes.get("cuda") == torch.version.cuda


@pytest.mark.parametrize("engine", ["torch", "jax", "mlx", "cupy", "opencl"])
def test_nothing_is_installed_on_an_empty_path(site, engine: str) -> None:
    build = registry.installed(engine)
    assert (build.installed, build.version, build.architectures()) == (False, None, ())


def test_without_metadata_the_version_is_the_one_in_use(site, monkeypatch) -> None:
    site.package("pyopencl")
    assert registry.installed("opencl").version == "of unknown version"
    module = types.ModuleType("pyopencl")
    module.__version__ = "2026.1"
    module.__spec__ = find_spec("pyopencl")
    monkeypatch.setitem(sys.modules, "pyopencl", module)
    assert registry.installed("opencl").version == "2026.1"


def install_jax(site, *more: str, jaxlib: str | None = "0.10.2") -> registry.Build:
    site.package("jax", "0.10.2")
    if jaxlib:
        site.package("jaxlib", jaxlib)
    for line in more:
        site.distribution(*line.split())
    return registry.installed("jax")


def test_jax_without_jaxlib(site) -> None:
    assert str(install_jax(site, jaxlib=None).broken) == "jax 0.10.2 is installed without jaxlib"


@pytest.mark.parametrize(
    ("plugins", "runtimes"),
    [
        ((), {}),
        (("jax-cuda12-plugin 0.10.2", "jax-cuda12-pjrt 0.10.2"), {"cuda": "12"}),
        (("jax-cuda13-plugin 0.10.2", "jax-cuda13-pjrt 0.10.2"), {"cuda": "13"}),
        (("jax-rocm7-plugin 0.10.0.post1", "jax-rocm7-pjrt 0.10.0"), {"rocm": "7"}),
        (("jax-rocm60-plugin 0.5.0", "jax-rocm60-pjrt 0.5.0"), {"rocm": "6.0"}),
        (("libtpu 0.0.42",), {"tpu": ""}),
        (("libtpu-nightly 0.1.dev2024",), {"tpu": ""}),
    ],
    ids=lambda value: str(value),
)
def test_jax_and_its_plugins(site, plugins: tuple[str, ...], runtimes: dict[str, str]) -> None:
    build = install_jax(site, *plugins)
    assert (build.name, build.runtimes, build.faults) == ("jax 0.10.2", runtimes, {})


def test_of_two_plugins_the_newer_one_counts(site) -> None:
    old = ("jax-cuda12-plugin 0.10.2", "jax-cuda12-pjrt 0.10.2", "jax-rocm60-plugin 0.5.0")
    new = ("jax-cuda13-plugin 0.10.1", "jax-cuda13-pjrt 0.10.1")
    build = install_jax(site, *old, *new, "jax-rocm7-plugin 0.10.2", "jax-rocm7-pjrt 0.10.2")
    assert build.runtimes == {"cuda": "13", "rocm": "7"}
    assert list(build.faults) == ["cuda"]
    assert "jax-cuda13-plugin 0.10.1" in build.faults["cuda"].text
    (site.folder / "jax_cuda9_plugin-0.10.2.dist-info").mkdir()
    assert registry.installed("jax").runtimes["cuda"] == "13"


@pytest.mark.parametrize(
    ("plugins", "fault"),
    [
        (
            ["jax-cuda12-plugin 0.10.1", "jax-cuda12-pjrt 0.10.1"],
            "jax-cuda12-plugin 0.10.1 does not fit jaxlib 0.10.2, so JAX will not use it",
        ),
        (
            ["jax-cuda12-plugin 0.10.2"],
            "jax-cuda12-plugin 0.10.2 is installed without jax-cuda12-pjrt",
        ),
    ],
    ids=["another release", "half a plugin"],
)
def test_a_plugin_that_cannot_be_used(site, plugins: list[str], fault: str) -> None:
    build = install_jax(site, *plugins)
    assert {name: fault.text for name, fault in build.faults.items()} == {"cuda": fault}


@pytest.mark.parametrize(
    ("distribution", "runtimes"),
    [
        ("cupy-cuda11x", {"cuda": "11"}),
        ("cupy-cuda12x", {"cuda": "12"}),
        ("cupy-cuda102", {"cuda": "10.2"}),
        ("cupy-rocm-7-0", {"rocm": "7.0"}),
        ("cupy", {"cuda": "", "rocm": ""}),
    ],
)
def test_cupy(site, distribution: str, runtimes: dict[str, str]) -> None:
    site.package("cupy")
    site.distribution(distribution, "14.2.0")
    build = registry.installed("cupy")
    assert (build.name, build.runtimes) == (f"{distribution} 14.2.0", runtimes)


def test_cupy_without_metadata_and_several_cupys(site) -> None:
    site.package("cupy")
    assert registry.installed("cupy").runtimes == {"cuda": "", "rocm": ""}
    site.distribution("cupy-cuda11x", "13.6.0")
    site.distribution("cupy-cuda12x", "14.2.0")
    both = "cupy-cuda11x 13.6.0 and cupy-cuda12x 14.2.0"
    broken = f"{both} are installed together and overwrite each other"
    assert str(registry.installed("cupy").broken) == broken


@pytest.mark.parametrize(("backend", "runtimes"), [("cpu", {}), ("metal", {"metal": ""})])
def test_mlx(site, backend: str, runtimes: dict[str, str]) -> None:
    site.mlx("0.32.4", backend)
    build = registry.installed("mlx")
    assert (build.name, build.runtimes, build.broken) == ("mlx 0.32.4", runtimes, None)


def test_mlx_without_a_backend(site) -> None:
    site.mlx("0.32.4")
    broken = str(registry.installed("mlx").broken)
    assert broken == "mlx 0.32.4 is installed without any of its backends"


def test_mlx_from_before_metal_was_a_package_of_its_own(site) -> None:
    folder = site.mlx("0.21.0")
    for library in ("libmlx.dylib", "mlx.metallib"):
        (folder / "lib" / library).touch()
    assert registry.installed("mlx").runtimes == {"metal": ""}
