"""Real OpenCL drivers that crash or hang, registered beside the good one (PoCL)."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from anydevice._core.finding import BackendScan
from anydevice._machine.hardware.opencl import reader as opencl
from anydevice._machine.hardware.opencl.facts import find_loaders, pyopencl_folder, this_machine
from tests.reasons import fix_of, text_of

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the faulty drivers are Linux libraries"
)

BuildLibrary = Callable[[str, str], Path]
Look = Callable[[str, float], tuple[BackendScan, float]]

# A driver whose platform list is `PLATFORMS` and whose device list is `DEVICES`.
DRIVER = Path(__file__).with_name("opencl_driver.c").read_text("utf-8")
CRASH = "raise(SIGSEGV);"
HANG = "for (;;) pause();"
NO_DEVICE = "return -1;"
ONE_DEVICE = "if (count) *count = 1; if (out) *(void **)out = &only; return 0;"
COUNT = "if (count) *count = 4000000000u; return 0;"
SIZE = "if (size) *size = (size_t)1 << 40; return 0;"
ALL_ONES = "if (size) *size = 8; if (out) memset(out, 255, 8); return 0;"
ZEROS = "if (size) *size = 8; if (out) memset(out, 0, 8); return 0;"
NOTHING = "if (size) *size = 0; return 0;"
FLOOD = "static char noise[65536]; for (;;) write(2, noise, sizeof noise);"


def driver(platforms: str = "", devices: str = NO_DEVICE, info: str = "return -30;") -> str:
    filled = DRIVER.replace("PLATFORMS", platforms).replace("DEVICES", devices)
    return filled.replace("INFO", info)


@pytest.fixture
def look(tmp_path: Path, build_library: BuildLibrary, monkeypatch: pytest.MonkeyPatch) -> Look:
    """Look at a driver beside that of PoCL."""
    home = pyopencl_folder()
    if home is None or not (home / ".libs" / "pocl.icd").is_file():
        pytest.skip("PoCL's wheel is not installed, and so there is no good driver to stand beside")

    def look(source: str, limit: float) -> tuple[BackendScan, float]:
        library = build_library("libbad.so", source) / "libbad.so"
        vendors = tmp_path / "vendors"
        vendors.mkdir()
        (vendors / "bad.icd").write_text(f"{library}\n")
        monkeypatch.setenv("OCL_ICD_VENDORS", str(vendors))
        start = time.monotonic()
        return opencl.begin()(limit), time.monotonic() - start

    return look


@pytest.mark.parametrize(
    ("source", "how", "step"),
    [
        (driver(platforms=CRASH), "crashed (SIGSEGV)", "clGetPlatformIDs"),
        (driver(platforms="_exit(3);"), "crashed (exit code 3: no message)", "clGetPlatformIDs"),
        (driver(devices=CRASH), "crashed (SIGSEGV)", "clGetDeviceIDs of BAD"),
        (driver(platforms=HANG), "timed out (no answer within 1.", "clGetPlatformIDs"),
        (driver(devices=HANG), "timed out (no answer within 1.", "clGetDeviceIDs of BAD"),
        (driver(platforms=COUNT), "crashed (SIGSEGV)", "clGetPlatformIDs"),
        (driver(devices=FLOOD), "wrote without end (more than 16 MiB)", "clGetDeviceIDs of BAD"),
    ],
    ids=["crash", "exit", "crash in devices", "hang", "hang in devices", "count", "flood"],
)
def test_a_bad_driver(look: Look, tmp_path: Path, source: str, how: str, step: str) -> None:
    """It is named, and the good one is still seen."""
    limit = 3.0 if "timed out" in how else 30.0
    scan, took = look(source, limit)
    assert took <= limit + 60
    assert scan.present
    assert scan.stage == "driver"
    assert how in text_of(scan)
    assert f" in {step}; " in text_of(scan)
    bad = tmp_path / "vendors" / "bad.icd"
    assert str(bad) in text_of(scan)
    assert "pocl" not in text_of(scan)
    assert fix_of(scan) == f"mv {bad} {bad}.off"
    (device,) = scan.devices
    assert device.facts.details["platform"] == "Portable Computing Language"
    assert "because of bad.icd" in text_of(device)
    assert fix_of(device) == fix_of(scan)
    if source == driver(platforms=CRASH):
        assert os.system(fix_of(scan)) == 0
        after = opencl.begin()(5.0)
        assert after.stage is None
        assert [text_of(device) for device in after.devices] == [None]


@pytest.mark.parametrize(
    "source",
    [
        driver(devices=COUNT),
        driver(devices=ONE_DEVICE, info=SIZE),
        driver(devices=ONE_DEVICE, info=ALL_ONES),
        driver(devices=ONE_DEVICE, info=ZEROS),
        driver(devices=ONE_DEVICE, info=NOTHING),
    ],
    ids=["devices", "size", "ones", "zeros", "nothing"],
)
def test_an_absurd_answer_of_one_driver_hides_no_other(look: Look, source: str) -> None:
    scan, _ = look(source, 5.0)
    platforms = [device.facts.details["platform"] for device in scan.devices]
    assert "Portable Computing Language" in platforms
    assert [device for device in scan.devices if device.reason is None]


def test_a_single_driver(build_library: BuildLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    if pyopencl_folder() is None:
        pytest.skip("pyopencl is not installed, and its loader is the one asked here")
    library = build_library("libbad.so", driver(platforms=CRASH)) / "libbad.so"
    monkeypatch.setenv("OCL_ICD_VENDORS", str(library))
    scan = opencl.begin()(5.0)
    assert text_of(scan).startswith(f"{library} crashed (SIGSEGV) in clGetPlatformIDs; ")
    assert fix_of(scan) == "unset OCL_ICD_VENDORS"
    assert scan.devices == ()


def test_no_time_left_to_ask_one_by_one(look: Look) -> None:
    scan, took = look(driver(platforms=HANG), 0.2)
    assert took <= 0.7
    assert scan.stage == "driver"
    assert "timed out (no answer within 0.12 s)" in text_of(scan)
    assert "bad.icd" in text_of(scan)
    assert "pocl.icd" in text_of(scan)
    assert scan.devices == ()


def test_no_disk(look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "not there"))
    scan, _ = look(driver(platforms=CRASH), 5.0)
    assert "crashed (SIGSEGV) in clGetPlatformIDs" in text_of(scan)
    assert "bad.icd" in text_of(scan)


def test_loaders_that_fail(build_library: BuildLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "#include <signal.h>\n__attribute__((constructor)) void f(void) { raise(SIGABRT); }"
    folder = build_library("libOpenCL.so.1", source)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    machine = this_machine()
    scan = opencl.look_through(find_loaders(machine, None), machine, 5.0)
    assert scan.stage == "driver"
    assert "crashed (SIGABRT) in loading libOpenCL.so.1" in text_of(scan)
    (folder / "libOpenCL.so.1").write_text("not a library")
    scan = opencl.look_through(find_loaders(machine, None), machine, 5.0)
    assert (scan.stage, scan.present) == ("driver", True)
    assert "the OpenCL loader libOpenCL.so.1 does not work: failed (OSError: " in text_of(scan)
    assert text_of(scan).endswith("in loading libOpenCL.so.1")
