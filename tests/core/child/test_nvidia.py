"""The child's side of the questions, asked here in-process of healthy libraries written in C."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anydevice._core.child import cuda as cuda_driver
from anydevice._core.child import nvml
from anydevice._core.child.shared_library import open_first
from anydevice._core.finding import Facts
from anydevice._core.record import replace
from anydevice._machine.hardware.cuda import reader as cuda

pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is a dependency of anydevice")

RECORDED = Path(__file__).parents[2] / "recorded" / "cuda"
FILE_OF_PYNVML = importlib.util.find_spec("pynvml").origin  # type: ignore[union-attr]
MIB, GIB = 2**20, 2**30
MISSING = "libno-such-library-anywhere.so.1"

BuildLibrary = Callable[[str, str], Path]
Healthy = Callable[..., str]
Install = Callable[..., None]


@pytest.fixture
def healthy(build_library: BuildLibrary) -> Healthy:
    def build(which: str, *defined: str) -> str:
        source = "".join(f"#define {word} 1\n" for word in defined)
        source += (RECORDED / f"healthy_{which}.c").read_text()
        # A name of its own: the loader would otherwise hand back an earlier test's library.
        name = f"lib{which}{''.join(defined).lower()}.so.1"
        return str(build_library(name, source) / name)

    return build


def ask_nvml(*libraries: str, **arguments: Any) -> tuple[dict[str, Any], list[str]]:
    steps: list[str] = []
    question = {"libraries": libraries, "driver_libraries": [], "pynvml": FILE_OF_PYNVML}
    return nvml.ask(steps.append, question | arguments), steps


def ask_driver(*libraries: str, **arguments: Any) -> dict[str, Any]:
    return cuda_driver.ask(lambda _: None, {"libraries": libraries, **arguments})


def test_nvml_tells_of_two_cards(healthy: Healthy) -> None:
    library = healthy("nvml")
    answer, steps = ask_nvml(MISSING, library)
    assert (answer["library"], answer["error"]) == (library, None)
    assert (answer["driver_version"], answer["cuda_version"]) == ("580.10.01", 13000)
    first, second = answer["cards"]
    assert first == {
        "error": None,
        "uuid": "GPU-aaaaaaaa-0000-4000-8000-000000000001",
        "name": "NVIDIA Test 100",
        "bus": "00000000:0A:00.0",
        "capability": (9, 0),
        "compute_mode": 0,
        "cuda_cores": None,
        "mig": None,
        "instances": [],
        "total": 16384 * MIB,
        "free": 16128 * MIB,
        "reserved": 256 * MIB,
    }
    assert second["bus"] == "00000000:0B:00.0"
    assert steps[0] == "loading NVML"
    assert steps[-2:] == ["reading card 1", "loading the CUDA driver"]
    assert (answer["driver_library"], answer["driver_problem"]) == (None, None)
    card = ask_nvml(healthy("nvml", "OLD"))[0]["cards"][0]  # before driver 510
    assert (card["total"], card["free"], card["reserved"]) == (16384 * MIB, 15360 * MIB, None)


def test_nvml_tells_of_mig_instances_and_lost_cards(healthy: Healthy) -> None:
    answer, _ = ask_nvml(healthy("nvml", "SPLIT"))
    whole, split = answer["cards"]
    assert (whole["mig"], whole["instances"]) == (False, [])
    assert split["mig"] is True
    assert [part["uuid"][:12] for part in split["instances"]] == ["MIG-cccccccc", "MIG-dddddddd"]
    assert split["instances"][0]["gpu_instance"] == 7
    assert split["instances"][0]["multiprocessors"] == 14
    assert split["instances"][0]["total"] == 5120 * MIB
    lost, other = ask_nvml(healthy("nvml", "LOST"))[0]["cards"]
    assert lost == {"error": {"call": "nvmlDeviceGetHandleByIndex", "code": 15}}
    assert other["name"] == "NVIDIA Test 100"


def test_nvml_without_memory_tells_the_rest(build_library: BuildLibrary) -> None:
    source = (RECORDED / "healthy_nvml.c").read_text().replace("MemoryInfo", "MemoryUnknown")
    answer, _ = ask_nvml(str(build_library("libshared.so.1", source) / "libshared.so.1"))
    card = answer["cards"][0]
    assert (card["name"], card["total"], card["free"]) == ("NVIDIA Test 100", None, None)


def test_nvml_that_refuses_to_start(build_library: BuildLibrary) -> None:
    folder = build_library("librefuses.so.1", "int nvmlInitWithFlags(unsigned f) { return 18; }")
    answer, steps = ask_nvml(str(folder / "librefuses.so.1"))
    assert answer["error"] == {"call": "nvmlInit", "code": 18}
    assert steps[-2] == "nvmlInit"


@pytest.mark.parametrize(("code", "error"), [(0, "nvmlDeviceGetCount"), (18, "nvmlInit")])
def test_old_nvml_starts_without_flags(build_library: BuildLibrary, code: int, error: str) -> None:
    source = f"int nvmlInit_v2(void) {{ return {code}; }}"
    name = f"libold{code}.so.1"
    answer, _ = ask_nvml(str(build_library(name, source) / name))
    assert answer["error"] == {"call": error, "code": code or 13}


def test_without_nvml_or_nvidia_ml_py_the_driver_is_opened(healthy: Healthy) -> None:
    library = healthy("driver")
    answer, steps = ask_nvml(MISSING, driver_libraries=[library])
    assert (answer["library"], answer["problem"]) == (None, None)
    assert answer["driver_library"] == library
    assert steps[-1] == "loading the CUDA driver"
    answer, _ = ask_nvml(healthy("nvml"), pynvml=None, driver_libraries=[library])
    assert answer["library"] is None
    assert answer["problem"] == "nvidia-ml-py is not installed"
    assert answer["driver_library"] == library


def test_missing_and_broken_libraries_are_told_apart(tmp_path: Path) -> None:
    broken = tmp_path / "libbroken.so.1"
    broken.write_text("this is no library")
    assert open_first([MISSING, str(tmp_path / MISSING)]) == (None, None, None)
    name, library, problem = open_first([str(broken), MISSING])
    assert (name, library) == (None, None)
    assert "libbroken.so.1" in (problem or "")


def test_the_driver_tells_of_a_card(healthy: Healthy) -> None:
    library = healthy("driver")
    answer = ask_driver(MISSING, library)
    assert answer == {
        "library": library,
        "error": None,
        "cuda_version": 12040,
        "devices": [
            {
                "error": None,
                "name": "NVIDIA Test 100",
                "uuid": "a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf",
                "bus": "0000:0A:00.0",
                "capability": [8, 9],
                "compute_mode": 0,
                "integrated": False,
                "multiprocessors": 132,
                "total": 8 * GIB,
                "free": None,
            }
        ],
    }


def test_the_driver_tells_free_memory_if_asked_and_its_own_order(healthy: Healthy) -> None:
    (device,) = ask_driver(healthy("driver"), free_memory=True)["devices"]
    assert device["free"] == 7 * GIB
    (device,) = ask_driver(healthy("driver", "OLD", "INTEGRATED"))["devices"]
    assert device["uuid"] == "10111213-1415-1617-1819-1a1b1c1d1e1f"  # its first form
    assert device["integrated"] is True
    devices = ask_driver(healthy("driver", "TWO"))["devices"]
    assert [device["uuid"][:8] for device in devices] == ["bbbbbbbb", "aaaaaaaa"]
    answer = ask_driver(healthy("driver", "MUTE"), free_memory=True)
    (device,) = answer["devices"]
    assert answer["cuda_version"] is None
    assert {key for key, value in device.items() if value is not None} == {"integrated"}


@pytest.mark.parametrize(
    ("call", "source"),
    [
        ("cuInit", "int cuInit(unsigned f) { return 802; }"),
        (
            "cuDeviceGetCount",
            "int cuInit(int f) { return 0; } int cuDeviceGetCount() { return 802; }",
        ),
    ],
)
def test_a_failing_driver_says_where(build_library: BuildLibrary, call: str, source: str) -> None:
    name = f"lib{call}.so.1".lower()
    version = "int cuDriverGetVersion(int *v) { *v = 12000; return 0; }"
    answer = ask_driver(str(build_library(name, source + version) / name))
    assert answer["error"] == {"call": call, "code": 802}
    assert answer["cuda_version"] == 12000


def test_no_device_and_no_driver_library(build_library: BuildLibrary) -> None:
    source = (RECORDED / "healthy_driver.c").read_text()
    source = source.replace("*device = ordinal; return 0;", "return 101;")
    answer = ask_driver(str(build_library("libnodevice.so.1", source) / "libnodevice.so.1"))
    assert answer["devices"] == [{"error": {"call": "cuDeviceGet", "code": 101}}]
    assert ask_driver(MISSING) == {"library": None, "problem": None}


CARD = Facts(
    name="NVIDIA Test 100",
    uuid="GPU-aaaaaaaa-0000-4000-8000-000000000001",
    total_memory=16384 * MIB,
    details={"source": "nvml"},
)


@pytest.fixture
def installed(healthy: Healthy, monkeypatch: pytest.MonkeyPatch) -> Install:
    """A library of ours in the place of NVML, without a child yet."""

    def install(*defined: str) -> None:
        library = healthy("nvml", *defined)
        monkeypatch.setattr(cuda, "nvml_libraries", lambda *_: [library])
        monkeypatch.setattr(cuda, "_last_reading", (0.0, {}))

    return install


def test_a_child_reads_free_memory(installed: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    installed()
    assert cuda.free_memory(0, CARD) == 16128 * MIB
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "start", lambda *_: pytest.fail("asked again at once"))
        assert cuda.free_memory(0, CARD) == 16128 * MIB
    assert cuda.free_memory(0, replace(CARD, uuid="GPU-0")) is None
    assert pynvml.nvmlLib is None
    installed("OLD")
    assert cuda.free_memory(0, CARD) == 15360 * MIB


def test_free_memory_is_read_anew_after_a_moment(
    installed: Install, monkeypatch: pytest.MonkeyPatch, build_library: BuildLibrary
) -> None:
    installed()
    monkeypatch.setattr(cuda, "_ONE_MOMENT", 0.0)
    source = "int nvmlInitWithFlags(unsigned f) { *(volatile int *)0 = 0; return 0; }"
    crashing = str(build_library("libcrashing.so.1", source) / "libcrashing.so.1")
    for library in ("libno-such.so.1", crashing):
        cuda.free_memory(0, CARD)
        monkeypatch.setattr(cuda, "nvml_libraries", lambda *_, library=library: [library])
        assert cuda.free_memory(0, CARD) is None
        installed()


def test_free_memory_is_not_asked_of_nvml_that_never_answered() -> None:
    assert cuda.free_memory(0, Facts(name="x", uuid="GPU-0", details={"source": "driver"})) is None
    assert cuda.free_memory(0, Facts(name="x", details={"source": "nvml"})) is None


def test_free_memory_that_is_shared_is_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Facts(name="Orin", memory_kind="unified", total_memory=8 * GIB)
    for available, free in ((4 * GIB, 4 * GIB), (20 * GIB, 8 * GIB), (None, None)):
        monkeypatch.setattr(cuda, "available_memory", lambda root, a=available: a)
        assert cuda.free_memory(0, shared) == free
