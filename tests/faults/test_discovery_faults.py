"""Discovery as a whole beside drivers that crash or hang: nothing else suffers, and it ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import anydevice
from tests.conftest import BuildLibrary

LIMIT = 2.0
CRASH = "*(volatile int *)0 = 0; return 0;"
HANG = "for (;;) sleep(60);"


@pytest.fixture
def faulty(build_library: BuildLibrary, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Installs a CUDA driver, an NVML and an OpenCL driver that all do the same wrong thing."""

    def install(body: str) -> None:
        include = "#include <unistd.h>\n"
        build_library("libcuda.so.1", f"{include}int cuInit(unsigned f) {{ {body} }}")
        build_library("libnvidia-ml.so.1", f"{include}int nvmlInit_v2(void) {{ {body} }}")
        icd = f"{include}void *clGetExtensionFunctionAddress(const char *n) {{ {body} }}"
        folder = build_library("libbadcl.so", icd)
        vendors = tmp_path / "vendors"
        vendors.mkdir()
        (vendors / "bad.icd").write_text(f"{folder / 'libbadcl.so'}\n")
        monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
        monkeypatch.setenv("OCL_ICD_VENDORS", str(vendors))
        anydevice.configure(time_limit=LIMIT)

    yield install
    monkeypatch.undo()
    anydevice.discover(refresh=True)


@pytest.mark.parametrize(("body", "word"), [(CRASH, "crashed"), (HANG, "timed out")])
def test_every_driver_at_fault_at_once(faulty, body: str, word: str) -> None:  # type: ignore[no-untyped-def]
    faulty(body)
    began = time.monotonic()
    report = anydevice.discover(refresh=True)
    assert time.monotonic() - began <= LIMIT + 20
    for backend in ("cuda", "opencl"):
        finding = report[backend]
        assert (finding.present, finding.usable, finding.stage) == (True, False, "driver")
        assert word in finding.reason
    assert "cuInit" in str(report["cuda"].reason)
    assert report["cpu"].usable
    for backend in ("rocm", "metal", "xpu", "tpu"):
        assert not report[backend].present
    with pytest.warns(UserWarning, match="using cpu: cuda stopped at driver"):
        assert str(anydevice.device()) == "cpu"
