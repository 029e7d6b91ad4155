"""The CUDA reader against real libraries that crash, hang, refuse or answer, through real children.

Both libraries are always built, so that a machine with NVIDIA's own behaves the same.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from anydevice._core.finding import BackendScan
from anydevice._machine.discovery import discover
from anydevice._machine.discovery.libraries import findings_of
from anydevice._machine.hardware.cuda import reader as cuda
from anydevice._machine.hardware.cuda.diagnosis import cuda_fault, nvml_fault
from tests.reasons import fix_of, text_of

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the faulty libraries are ELF files found by LD_LIBRARY_PATH"
)

RECORDED = Path(__file__).parent.parent / "recorded" / "cuda"
LIMIT = 2.0
"""For what hangs; the rest gets the usual limit, so that a busy machine changes no answer."""
USUAL_LIMIT = 5.0
MIB, GIB = 2**20, 2**30

HEALTHY_NVML = (RECORDED / "healthy_nvml.c").read_text()
HEALTHY_DRIVER = (RECORDED / "healthy_driver.c").read_text()
CRASHES = "volatile int *nowhere = 0; *nowhere = 1; return 0;"
SLEEPS = "for (;;) sleep(1000); return 0;"

Look = Callable[..., BackendScan]
BuildLibrary = Callable[[str, str], Path]


def nvml_that(body: str) -> str:
    return f"#include <unistd.h>\nint nvmlInitWithFlags(unsigned f) {{ {body} }}\n"


def driver_that(body: str) -> str:
    return (
        "#include <unistd.h>\n"
        "int cuDriverGetVersion(int *v) { *v = 13000; return 0; }\n"
        f"int cuInit(unsigned f) {{ {body} }}\n"
    )


@pytest.fixture
def look(build_library: BuildLibrary, monkeypatch: pytest.MonkeyPatch) -> Look:
    """Look with these two libraries in place of NVIDIA's, within the time that was promised."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def look(nvml: str, driver: str, limit: float = USUAL_LIMIT) -> BackendScan:
        build_library("libnvidia-ml.so.1", nvml)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(build_library("libcuda.so.1", driver)))
        began = time.monotonic()
        scan = cuda.begin()(limit)
        assert time.monotonic() - began <= limit + 60
        return scan

    return look


def test_two_healthy_cards_in_the_order_of_the_driver(look: Look) -> None:
    scan = look(HEALTHY_NVML, "#define TWO 1\n" + HEALTHY_DRIVER)
    assert (scan.present, scan.stage, scan.notes) == (True, None, ())
    assert [device.index for device in scan.devices] == [0, 1]
    assert [text_of(device) for device in scan.devices] == [None, None]
    facts, second = (device.facts for device in scan.devices)
    assert second.uuid == "GPU-aaaaaaaa-0000-4000-8000-000000000001"
    assert facts.uuid == "GPU-bbbbbbbb-0000-4000-8000-000000000002"
    assert facts.pci_address == "0000:0b:00.0"
    assert (facts.total_memory, facts.usable_memory) == (16384 * MIB, 16128 * MIB)
    assert (facts.compute_capability, facts.architecture) == ("9.0", "Hopper")
    assert (facts.driver_version, facts.runtime_version) == ("580.10.01", "13.0")


@pytest.mark.parametrize(
    ("body", "reason", "fix"),
    [
        (CRASHES, "the CUDA driver crashed (SIGSEGV) in cuInit", "reinstall the NVIDIA driver"),
        ("return 802;", "(CUDA_ERROR_SYSTEM_NOT_READY, 802) in cuInit", "nvidia-fabricmanager"),
        ("return 999;", "(CUDA_ERROR_UNKNOWN, 999) in cuInit", "nvidia_uvm"),
    ],
)
def test_nvml_answers_and_the_driver_fails(look: Look, body: str, reason: str, fix: str) -> None:
    scan = look(HEALTHY_NVML, driver_that(body))
    assert (scan.present, scan.stage) == (True, "driver")
    assert reason in text_of(scan)
    assert fix in fix_of(scan)
    assert [device.facts.pci_address for device in scan.devices] == ["0000:0a:00.0", "0000:0b:00.0"]
    (finding,) = findings_of([scan])
    assert [device.usable for device in finding.devices] == [False, False]


def test_nvml_answers_and_the_driver_hangs(look: Look) -> None:
    scan = look(HEALTHY_NVML, driver_that(SLEEPS), LIMIT)
    assert (scan.present, scan.stage, len(scan.devices)) == (True, "driver", 2)
    told = re.fullmatch(
        r"the CUDA driver timed out \(no answer within (\d\.\d{1,2}|\d) s\) in cuInit",
        text_of(scan),
    )
    assert LIMIT * 0.4 <= float(told[1]) < LIMIT
    assert "anydevice.configure(time_limit=20)" in fix_of(scan)


def test_nvml_answers_and_there_is_no_driver(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "driver_libraries", lambda around: ["libno-such.so.1"])
    scan = look(HEALTHY_NVML, driver_that(CRASHES))
    assert (scan.present, scan.stage, len(scan.devices)) == (True, "driver", 2)
    assert text_of(scan) == "NVML answers but there is no CUDA driver library"


def test_the_variable_reorders_real_answers(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb,GPU-aa")
    scan = look(HEALTHY_NVML, driver_that("return 999;"))
    assert [device.facts.pci_address for device in scan.devices] == ["0000:0b:00.0", "0000:0a:00.0"]


def test_nvml_crashes_and_the_driver_answers(look: Look) -> None:
    scan = look(nvml_that(CRASHES), HEALTHY_DRIVER)
    assert scan.stage is None
    assert scan.notes == ("NVML crashed (SIGSEGV) in nvmlInit",)
    (device,) = scan.devices
    assert device.facts.name == "NVIDIA Test 100"
    assert device.facts.uuid == "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf"
    assert (device.facts.total_memory, device.facts.free_memory) == (8 * GIB, 7 * GIB)
    assert device.facts.details["source"] == "driver"


def test_nvml_hangs_and_the_driver_answers(look: Look) -> None:
    scan = look(nvml_that(SLEEPS), HEALTHY_DRIVER, LIMIT)
    assert scan.stage is None
    assert len(scan.devices) == 1
    assert "timed out" in scan.notes[0]
    assert "in nvmlInit" in scan.notes[0]


def test_a_context_that_crashes_costs_only_the_free_memory(look: Look) -> None:
    crashing = HEALTHY_DRIVER.replace("*context = 0;", "*(volatile int *)0 = 1;")
    scan = look(nvml_that("return 9;"), crashing)
    assert scan.stage is None
    assert scan.devices[0].facts.free_memory is None
    assert scan.devices[0].facts.total_memory == 8 * GIB


def test_both_crash_or_leave_the_process(look: Look) -> None:
    scan = look(nvml_that(CRASHES), driver_that(CRASHES))
    assert (scan.present, scan.stage, scan.devices) == (True, "driver", ())
    assert text_of(scan) == (
        "NVML crashed (SIGSEGV) in nvmlInit; the CUDA driver crashed (SIGSEGV) in cuInit"
    )
    assert fix_of(scan) == "reinstall the NVIDIA driver, then reboot"
    scan = look(nvml_that("_exit(3);"), driver_that("_exit(3);"))
    assert scan.stage == "driver"
    assert "NVML crashed (exit code 3: no message) in nvmlInit" in text_of(scan)


def test_both_hang_and_no_time_is_left(look: Look) -> None:
    scan = look(nvml_that(SLEEPS), driver_that(SLEEPS), LIMIT)
    assert (scan.present, scan.stage) == (True, "driver")
    reason = text_of(scan)
    assert reason.startswith("NVML timed out (no answer within 1.2 s) in nvmlInit")
    assert "the CUDA driver timed out" in reason
    assert "in cuInit" in reason
    assert "anydevice.configure(time_limit=20)" in fix_of(scan)
    scan = look(nvml_that(SLEEPS), driver_that(SLEEPS), 0.1)
    assert (scan.present, scan.stage) == (True, "driver")
    assert "the CUDA driver timed out (no time was left for it)" in text_of(scan)


@pytest.mark.parametrize("code", [4, 9, 15, 16, 18, 999])
def test_an_error_of_nvml(look: Look, code: int) -> None:
    scan = look(nvml_that(f"return {code};"), driver_that("return 999;"))
    assert (scan.present, scan.stage) == (True, "driver")
    assert f"({nvml_fault(code).symbol}, {code}) in nvmlInit" in text_of(scan)
    assert "(CUDA_ERROR_UNKNOWN, 999) in cuInit" in text_of(scan)


@pytest.mark.parametrize("code", [2, 3, 34, 35, 46, 100, 719, 802, 803, 804, 999])
def test_an_error_of_the_driver(look: Look, code: int) -> None:
    scan = look(nvml_that("return 9;"), driver_that(f"return {code};"))
    assert (scan.present, scan.stage) == (True, "driver")
    assert f"({cuda_fault(code).symbol}, {code}) in cuInit" in text_of(scan)


def test_a_library_without_the_function(look: Look) -> None:
    scan = look("int nothing;", "int nothing;")
    assert scan.stage == "driver"
    assert "NVML_ERROR_FUNCTION_NOT_FOUND, 13" in text_of(scan)
    assert "undefined symbol: cuInit" in text_of(scan)


def test_files_that_are_no_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("libnvidia-ml.so.1", "libcuda.so.1"):
        (tmp_path / name).write_text("this is no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    scan = cuda.begin()(USUAL_LIMIT)
    assert (scan.present, scan.stage) == (True, "driver")
    assert "NVML cannot be loaded" in text_of(scan)
    assert "the CUDA driver cannot be loaded" in text_of(scan)


def test_devices_that_a_variable_hides(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    obedient = HEALTHY_DRIVER.replace(
        "int cuInit(unsigned flags) { return 0; }",
        "#include <stdlib.h>\n"
        'int cuInit(unsigned flags) { return getenv("CUDA_VISIBLE_DEVICES") ? 100 : 0; }',
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "nonsense")
    scan = look(nvml_that("return 9;"), obedient)
    assert (scan.present, scan.stage) == (True, "device")
    assert 'CUDA_VISIBLE_DEVICES="nonsense" hides every device' in text_of(scan)
    assert fix_of(scan) == "unset CUDA_VISIBLE_DEVICES"


def test_without_nvidia_ml_py(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is asked, also beside a pynvml that is no file."""
    monkeypatch.setattr(cuda, "find_spec", lambda name: None)
    scan = look(HEALTHY_NVML, HEALTHY_DRIVER)
    assert len(scan.devices) == 1
    assert scan.notes == ("NVML cannot be loaded: nvidia-ml-py is not installed",)
    monkeypatch.setattr(cuda, "find_spec", Mock(side_effect=ValueError("__spec__ is None")))
    assert len(look(HEALTHY_NVML, HEALTHY_DRIVER).devices) == 1


def test_an_error_is_a_finding_and_macos_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "read_surroundings", Mock(side_effect=RuntimeError("odd machine")))
    scan = discover._start({"cuda": cuda.begin}, USUAL_LIMIT)()["cuda"]
    assert (scan.present, scan.stage) == (True, "driver")
    assert "RuntimeError: odd machine" in text_of(scan)
    monkeypatch.setattr(sys, "platform", "darwin")
    scan = cuda.begin()(USUAL_LIMIT)
    assert (scan.present, text_of(scan)) == (False, "CUDA needs Linux or Windows")
