"""Why an installed library does not drive a device, and the command that fixes it."""

from __future__ import annotations

import pytest

from anydevice._core.finding import Facts, Reason, Refusal
from anydevice._core.record import replace
from anydevice._machine.engines import registry
from anydevice._machine.engines.diagnosis import (
    Platform,
    best_fix,
    code_of_message,
    command_for,
    refusal,
    this_platform,
    why_not,
)

CARD = Facts(
    "NVIDIA RTX 4070", compute_capability="8.9", driver_version="560.35.03", runtime_version="12.6"
)
RADEON = Facts("AMD Radeon RX 7900 XTX", architecture="gfx1100", runtime_version="7.0.1")
TURING = b"\0sm_75 sm_80 sm_86 sm_90 sm_100 sm_120\0"


def card(**facts: str) -> Facts:
    return Facts(**{"name": "NVIDIA card", "runtime_version": "13.0", **facts})


def said(engine: str, backend: str, facts: Facts) -> str | None:
    reason = why_not(registry.installed(engine), backend, facts)
    return reason and reason.text


def install_jax(site, version: str = "0.10.2", *plugins: str) -> None:
    site.package("jax", "0.10.2")
    site.package("jaxlib", "0.10.2")
    for name in plugins:
        site.distribution(name, version)


def install_cupy(site, *names: str) -> None:
    site.package("cupy")
    for name in names:
        site.distribution(name, "13.6.0" if name == "cupy-cuda11x" else "14.2.0")


@pytest.mark.parametrize(
    ("engine", "backend", "sentence"),
    [
        ("torch", "cuda", "torch is not installed"),
        ("cupy", "rocm", "cupy is not installed"),
        ("opencl", "opencl", "pyopencl is not installed"),
        ("mlx", "cpu", "mlx is not installed"),
    ],
)
def test_not_installed(site, engine: str, backend: str, sentence: str) -> None:
    assert said(engine, backend, CARD) == sentence


def test_a_refusal_carries_engine_reason_and_fix(site) -> None:
    site.torch("2.13.0+cpu")
    build = registry.installed("torch")
    text, fix = "torch 2.13.0+cpu is a CPU-only build", command_for(build, "cuda", CARD)
    reason = Reason("cpu_only_build", text, fix)
    assert refusal(build, "cuda", CARD) == Refusal("torch", reason)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("ImportError: libcudart.so.12: cannot open shared object file", "cuda_library_missing"),
        ("RuntimeError: CUDA error: no kernel image is available", "card_not_in_build"),
        ("OutOfMemoryError: CUDA out of memory", "out_of_memory"),
        ("LogicError: clEnqueue failed: OUT_OF_MEMORY", "out_of_memory"),
        ("XlaRuntimeError: RESOURCE_EXHAUSTED: no", "out_of_memory"),
        ("AssertionError: Torch not compiled with CUDA enabled", "cpu_only_build"),
        ("RuntimeError: CUDA driver version is insufficient", "version_mismatch"),
        ("RuntimeError: clBuildProgram failed\n\nerror: unknown target CPU 'x'", "driver_defect"),
        ("OSError: [Errno 13] Permission denied: '/dev/kfd'", "no_permission"),
        ("ValueError: no", "failed"),
    ],
)
def test_messages_of_other_libraries_get_a_code(message: str, code: str) -> None:
    assert code_of_message(message) == code


CPU_BUILD, CUDA_BUILD = ("2.13.0+cpu", None, None), ("2.9.1+cu128", "12.8", None)
ROCM_BUILD = ("2.9.1+rocm6.4", None, "6.4.43484")


@pytest.mark.parametrize(
    ("build", "backend", "sentence"),
    [
        (CUDA_BUILD, "cuda", None),
        (CUDA_BUILD, "rocm", "torch 2.9.1+cu128 is a build for CUDA, not for ROCm"),
        (ROCM_BUILD, "cuda", "torch 2.9.1+rocm6.4 is a build for ROCm, not for CUDA"),
        (CPU_BUILD, "cpu", None),
        (CPU_BUILD, "gaudi", "torch 2.13.0+cpu is a CPU-only build"),  # of another package
    ],
)
def test_what_torch_was_built_for(
    site, build: tuple[str, str | None, str | None], backend: str, sentence: str | None
) -> None:
    site.torch(*build, library=TURING)
    assert said("torch", backend, RADEON if backend == "rocm" else CARD) == sentence
    installed = registry.installed("torch")
    assert (refusal(installed, backend, CARD) is None) == (sentence is None)


def test_what_has_nothing_to_compare_is_taken_at_its_word(site) -> None:
    site.package("pyopencl", "2026.1.4")
    assert said("opencl", "opencl", Facts("GPU", runtime_version="3.0")) is None
    install_cupy(site, "cupy")  # from source
    assert said("cupy", "cuda", card(compute_capability="3.7")) is None


def test_other_libraries_that_lack_a_part(site) -> None:
    install_cupy(site, "cupy-cuda12x")
    assert said("cupy", "rocm", RADEON) == "cupy-cuda12x 14.2.0 is a build for CUDA, not for ROCm"
    site.package("jax", "0.10.2")
    assert said("jax", "cpu", Facts("CPU")) == "jax 0.10.2 is installed without jaxlib"
    site.mlx("0.32.4", "cpu")
    sentence = "mlx 0.32.4 has no Metal: only its builds for macOS do"
    assert said("mlx", "metal", Facts("Apple M3")) == sentence


@pytest.mark.parametrize(
    ("backend", "plugin"),
    [("cuda", "CUDA plugin"), ("rocm", "ROCm plugin"), ("tpu", "TPU plugin (libtpu)")],
)
def test_jax_without_the_plugin(site, backend: str, plugin: str) -> None:
    install_jax(site)
    assert said("jax", backend, Facts("device")) == f"jax 0.10.2 has no {plugin}"


def test_jax_with_a_plugin_that_does_not_fit(site) -> None:
    install_jax(site, "0.10.1", "jax-cuda12-plugin", "jax-cuda12-pjrt")
    assert "does not fit jaxlib 0.10.2" in str(said("jax", "cuda", CARD))
    assert said("jax", "cpu", Facts("CPU")) is None


@pytest.mark.parametrize("driver", ["535.104", None])
@pytest.mark.parametrize(
    ("needs", "serves", "refused"),
    [
        *(("13.0", "12.2", True), ("13.0", "13.0", False), ("13.2", "13.0", False)),
        *(("12.8", "12.2", False), ("12.8", "13.0", False), ("12.1", "11.8", True)),
        ("13.0", None, False),
    ],
)
def test_the_driver_serves_a_major_release(
    site, needs: str, serves: str | None, refused: bool, driver: str | None
) -> None:
    site.torch("2.11.0+cu130", cuda=needs)
    named = f"driver {driver}" if driver else "the driver"
    sentence = f"torch 2.11.0+cu130 needs CUDA {needs}, but {named} serves CUDA {serves}"
    facts = Facts("card", driver_version=driver, runtime_version=serves)
    assert said("torch", "cuda", facts) == (sentence if refused else None)


@pytest.mark.parametrize(
    ("library", "capability", "runs"),
    [
        (TURING, "7.5", True),
        (TURING, "8.9", True),
        (TURING, "12.1", True),
        (TURING, "10.3", True),
        (TURING, "6.1", False),
        (TURING, "7.0", False),
        (TURING, "11.0", False),
        (b"\0sm_86 sm_90a\0", "8.0", False),
        (b"\0sm_86 sm_90a\0", "9.0", True),
        (b"\0sm_86 sm_100a\0", "10.3", False),
        (b"\0sm_86 sm_100f\0", "10.3", True),
        (b"\0sm_80 compute_80\0", "9.0", True),
        (b"\0sm_80 compute_80\0", "7.5", False),
        (b"", "3.0", True),
    ],
)
def test_the_build_carries_the_card(site, library: bytes, capability: str, runs: bool) -> None:
    site.torch("2.11.0+cu130", cuda="13.0", library=library)
    assert (said("torch", "cuda", card(compute_capability=capability)) is None) is runs


def test_the_sentence_for_a_card_that_is_not_in_the_build(site) -> None:
    site.torch("2.11.0+cu130", cuda="13.0", library=TURING)
    assert said("torch", "cuda", card(compute_capability="6.1")) == (
        "torch 2.11.0+cu130 was built for sm 7.5, 8.0, 8.6, 9.0, 10.0, 12.0; this card is 6.1"
    )
    assert said("torch", "cuda", card()) is None  # its capability is not known


@pytest.mark.parametrize(
    ("major", "oldest", "too_old"), [("12", "5.2", "5.0"), ("13", "7.5", "7.0")]
)
def test_the_oldest_card_for_jax(site, major: str, oldest: str, too_old: str) -> None:
    install_jax(site, "0.10.2", f"jax-cuda{major}-plugin", f"jax-cuda{major}-pjrt")
    assert said("jax", "cuda", card(compute_capability=oldest)) is None
    needs = f"jax 0.10.2 for CUDA {major} needs compute capability {oldest} or newer"
    sentence = said("jax", "cuda", card(compute_capability=too_old))
    assert sentence == f"{needs}; this card is {too_old}"


@pytest.mark.parametrize(("package", "oldest"), [("cupy-cuda12x", "5.0"), ("cupy-cuda13x", "7.5")])
def test_the_oldest_card_for_cupy(site, package: str, oldest: str) -> None:
    install_cupy(site, package)
    assert said("cupy", "cuda", card(compute_capability=oldest)) is None
    sentence = str(said("cupy", "cuda", card(compute_capability="3.7")))
    assert f"needs compute capability {oldest}" in sentence


@pytest.mark.parametrize("override", [None, "9.0.10"])
@pytest.mark.parametrize(
    ("library", "architecture", "runs"),
    [
        (b"\0gfx90a gfx942 gfx1100\0", "gfx1100", True),
        (b"\0gfx90a:xnack- gfx942\0", "gfx90a:sramecc+:xnack-", True),
        (b"\0gfx90a gfx942\0", "gfx1100", False),
        (b"\0gfx90a gfx11-generic\0", "gfx1100", True),
        (b"", "gfx1100", True),
    ],
)
def test_the_rocm_build_carries_the_card_or_an_override_does(
    site, monkeypatch, library: bytes, architecture: str, runs: bool, override: str | None
) -> None:
    monkeypatch.delenv("HSA_OVERRIDE_GFX_VERSION", raising=False)
    if override:
        monkeypatch.setenv("HSA_OVERRIDE_GFX_VERSION", override)
    site.torch("2.9.1+rocm6.4", hip="6.4.43484", library=library)
    facts = Facts("AMD card", architecture=architecture, runtime_version="7.0")
    sentence = "torch 2.9.1+rocm6.4 was built for gfx90a, gfx942; this card is gfx1100"
    assert said("torch", "rocm", facts) == (None if runs or override else sentence)


@pytest.mark.parametrize("rocm", ["6.4.1", "7.1", None])
def test_cupy_uses_the_rocm_of_the_machine(site, rocm: str | None) -> None:
    install_cupy(site, "cupy-rocm-7-0")
    needs = "cupy-rocm-7-0 14.2.0 needs ROCm 7.0, but this machine has ROCm 6.4.1"
    sentence = needs if rocm == "6.4.1" else None
    assert said("cupy", "rocm", Facts("AMD card", runtime_version=rocm)) == sentence


LINUX = Platform("Linux", "x86-64", (3, 12))
ARM = Platform("Linux", "arm64", (3, 12))
WINDOWS = Platform("Windows", "x86-64", (3, 12))
MAC = Platform("macOS", "arm64", (3, 12))


def nvidia(serves: str | None = "13.0", capability: str | None = "8.9") -> Facts:
    return Facts("card", runtime_version=serves, compute_capability=capability)


def told(backend: str, facts: Facts, machine: Platform) -> str | None:
    builds = [registry.installed(name) for name in registry.engines_for(backend)]
    return best_fix(backend, facts, builds, machine)


def index(name: str, options: str = "") -> str:
    return f"pip install {options}torch --index-url https://download.pytorch.org/whl/{name}"


ANOTHER = "use OpenCL (pip install pyopencl) or the CPU"
NO_CODE = (
    f"{ANOTHER}: no supported release of PyTorch, JAX and CuPy is published with code for this card"
)


@pytest.mark.parametrize(
    ("machine", "facts", "command"),
    [
        (LINUX, nvidia("13.0", "8.9"), index("cu130")),
        (LINUX, nvidia("13.2", "12.0"), index("cu130")),
        (LINUX, nvidia("12.4", "8.9"), index("cu126")),
        (LINUX, nvidia("12.8", "12.0"), index("cu128")),
        (LINUX, nvidia("13.0", "7.0"), index("cu126")),
        (LINUX, nvidia("12.4", "6.1"), index("cu126")),
        (LINUX, nvidia("12.4", "5.2"), index("cu126")),
        (LINUX, nvidia(None, None), index("cu126")),
        (LINUX, replace(nvidia(None, "8.9"), driver_version="580.65.06"), index("cu130")),
        (LINUX, replace(nvidia(None, "8.9"), driver_version="560.35.03"), index("cu126")),
        (ARM, nvidia("13.0", "9.0"), index("cu130")),
        (ARM, nvidia("12.8", "9.0"), index("cu126")),
        (ARM, nvidia("12.8", "10.0"), index("cu128")),
        (ARM, nvidia("13.0", "7.5"), 'pip install "jax[cuda13]"'),
        (ARM, nvidia("12.6", "8.7"), NO_CODE),  # an Orin
        (WINDOWS, nvidia("13.0", "8.9"), index("cu130")),
        (WINDOWS, nvidia("12.4", "6.1"), index("cu126")),
        (LINUX, nvidia("11.4", "8.0"), f"update the NVIDIA driver to 525 or newer, or {ANOTHER}"),
        (LINUX, nvidia("12.4", "3.5"), NO_CODE),
    ],
)
def test_a_card_without_library(site, machine: Platform, facts: Facts, command: str) -> None:
    assert told("cuda", facts, machine) == command


@pytest.mark.parametrize(
    ("minor", "command"),
    [(14, index("cu128")), (15, 'pip install "jax[cuda12]"')],
)
def test_a_python_that_the_old_release_was_not_made_for(site, minor: int, command: str) -> None:
    machine = Platform("Linux", "x86-64", (3, minor))
    assert told("cuda", nvidia("12.8", "12.0"), machine) == command


@pytest.mark.parametrize(
    ("machine", "facts", "name"),
    [
        (LINUX, nvidia("13.0", "8.9"), "cu130"),
        (LINUX, nvidia("12.6", "6.1"), "cu126"),
        (WINDOWS, nvidia("13.0", "8.9"), "cu130"),
    ],
)
def test_a_cpu_build_is_replaced(site, machine: Platform, facts: Facts, name: str) -> None:
    site.torch("2.13.0+cpu")
    assert told("cuda", facts, machine) == index(name, "--force-reinstall ")


def test_what_is_tied_to_torch_changes_with_it(site) -> None:
    site.torch("2.13.0+cpu")
    site.distribution("torchvision", "0.28.0")
    command = index("cu130", "--force-reinstall ").replace("torch ", "torch torchvision ", 1)
    assert told("cuda", nvidia(), LINUX) == command


def test_what_is_tied_to_torch_comes_from_the_same_index(site) -> None:
    site.torch("2.13.0", cuda="13.0")
    site.distribution("torchvision", "0.28.0")
    index = "--index-url https://download.pytorch.org/whl/xpu"
    command = f"pip install --force-reinstall torch torchvision {index}"
    assert told("xpu", Facts("Arc"), LINUX) == command


def test_an_installed_library_goes_before_another(site) -> None:
    install_jax(site)
    assert told("cuda", nvidia("13.0"), LINUX) == 'pip install "jax[cuda13]"'
    assert told("cuda", nvidia("12.4"), LINUX) == 'pip install "jax[cuda12]"'
    assert told("tpu", Facts("TPU v4"), LINUX) == 'pip install "jax[tpu]"'


def test_a_jax_that_is_older_than_ours_is_upgraded(site) -> None:
    site.package("jax", "0.5.0")
    assert told("cuda", nvidia("13.0"), LINUX) == 'pip install --upgrade "jax[cuda13]"'
    assert told("cuda", nvidia("12.4"), LINUX) == 'pip install --upgrade "jax[cuda12]"'


def test_a_plugin_in_the_way_is_removed_first(site) -> None:
    install_jax(site, "0.10.2", "jax-cuda13-plugin", "jax-cuda13-pjrt")
    assert told("cuda", nvidia("12.4"), LINUX) == (
        'pip uninstall --yes jax-cuda13-pjrt jax-cuda13-plugin && pip install "jax[cuda12]"'
    )


def test_cupys_that_overwrite_each_other_are_all_removed_first(site) -> None:
    install_cupy(site, "cupy-cuda12x")
    command = 'pip install "cupy-cuda12x[ctk]"'
    cupy, old = registry.installed("cupy"), nvidia("12.4")
    assert command_for(cupy, "cuda", old, WINDOWS) == command
    removal = "pip uninstall --yes cupy-cuda12x"
    newer = command.replace("12x", "13x")
    assert command_for(cupy, "cuda", nvidia("13.0"), WINDOWS) == f"{removal} && {newer}"
    site.distribution("cupy-cuda11x", "13.6.0")
    removal = "pip uninstall --yes cupy-cuda11x cupy-cuda12x"
    assert told("cuda", old, WINDOWS) == f"{removal} && {command}"


@pytest.mark.parametrize(
    ("rocm", "architecture", "command"),
    [
        ("7.0.1", "gfx942", index("rocm7.2")),
        (None, "gfx942:sramecc+:xnack-", index("rocm7.2")),
        ("6.4", "gfx942", index("rocm7.2")),  # PyTorch brings its own ROCm
        ("5.7", "gfx942", f"update ROCm to 6.3.3 or newer, or {ANOTHER}"),
        ("7.0.1", "gfx906", NO_CODE),
        ("7.0.1", "gfx1031", NO_CODE),
    ],
)
def test_an_amd_card(site, rocm: str | None, architecture: str, command: str) -> None:
    facts = Facts("AMD card", architecture=architecture, runtime_version=rocm)
    assert told("rocm", facts, LINUX) == command


def test_an_amd_card_and_a_cuda_build_of_torch(site) -> None:
    site.torch("2.11.0+cu130", cuda="13.0")
    facts = Facts("AMD card", runtime_version="7.0")
    assert told("rocm", facts, LINUX) == index("rocm7.2", "--force-reinstall ")


@pytest.mark.parametrize(
    ("backend", "machine", "command"),
    [
        ("metal", MAC, "pip install mlx"),
        ("opencl", WINDOWS, "pip install pyopencl"),
        ("tpu", LINUX, 'pip install "jax[tpu]"'),
        ("xpu", WINDOWS, "pip install torch --index-url https://download.pytorch.org/whl/xpu"),
        (
            "metal",
            Platform("macOS", "x86-64", (3, 12)),
            f"{ANOTHER}: no supported release of MLX and PyTorch is published for macOS x86-64"
            " and Python 3.12",
        ),
        ("gaudi", LINUX, None),
    ],
)
def test_the_other_backends(site, backend: str, machine: Platform, command: str | None) -> None:
    assert told(backend, Facts("device"), machine) == command


def test_the_index_for_intel_s_gpus(site) -> None:
    assert command_for(registry.installed("torch"), "xpu", Facts("Arc A770"), LINUX) == index("xpu")


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
