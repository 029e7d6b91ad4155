"""`anydevice devices`: every fact that is known, and none that is not."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from anydevice._core.device import Device
from anydevice._core.finding import (
    BackendScan,
    DeviceStatus,
    Facts,
    Finding,
    RawDevice,
    Reason,
    Refusal,
)
from anydevice._machine.discovery.discover import Report
from anydevice.cli import devices
from anydevice.cli.printing import Output
from tests.cli.conftest import Anydevice
from tests.machines import machine_of

GIB = 2**30

H200 = Facts(
    "NVIDIA H200",
    uuid="GPU-1",
    pci_address="0000:18:00.0",
    total_memory=140 * GIB,
    usable_memory=139 * GIB,
    free_memory=100 * GIB,
    compute_capability="9.0",
    driver_version="570.1",
    runtime_version="12.8",
    details={"mig": False, "ecc": True, "power": 512.5, "slot": None, "bus_width": 6144},
)
SEEN_TWICE = (
    BackendScan(
        "cuda", True, (RawDevice(0, "gpu", H200),), engines=("torch",), notes=("ECC is on",)
    ),
    BackendScan("opencl", True, (RawDevice(0, "gpu", H200),), engines=("opencl",)),
    BackendScan(
        "rocm",
        True,
        stage="driver",
        reason=Reason("driver_failed", "the driver is asleep", "sudo wake"),
    ),
)


@pytest.mark.needs("torch")
def test_every_known_fact_is_readable(anydevice: Anydevice) -> None:
    out = anydevice.text("devices", scans=SEEN_TWICE)
    block = out.partition("✓ cuda:0")[2].partition("\n\n")[0].splitlines()
    assert block[0] == "   NVIDIA H200"
    facts = {line[4:24].strip(): line[24:] for line in block[1:]}
    version = facts.pop("engines")
    assert version.startswith("torch 2.")
    assert facts == {
        "kind": "gpu",
        "tier": "stable (measured on an NVIDIA H200)",
        "memory": "140.0 GiB dedicated, 139.0 GiB usable, 100.0 GiB free",
        "compute capability": "9.0",
        "driver": "570.1, CUDA 12.8",
        "uuid": "GPU-1",
        "pci address": "0000:18:00.0",
        "mig": "no",
        "ecc": "yes",
        "power": "512.5",
        "bus width": "6144",
        "same card as": "opencl:0",
    }
    assert "  note on cuda: ECC is on\n" in out
    assert "– metal, xpu, tpu: not in this machine\n" in out
    assert out.endswith("\nRecommended: cuda\n")


def test_what_stopped_a_backend_and_what_fixes_it(anydevice: Anydevice) -> None:
    out = anydevice.text("devices", scans=SEEN_TWICE)
    assert out.partition("✗ rocm")[2].partition("\n\n")[0].splitlines() == [
        "   no device",
        "    stopped at          driver",
        "    reason              the driver is asleep",
        "    fix                 sudo wake",
    ]


def test_why_a_library_does_not_drive_a_usable_device(anydevice: Anydevice) -> None:
    refusals = (Refusal("jax", Reason("plugin_missing", "jax 0.10.2 has no CUDA plugin")),)
    device = Device.seen("cuda", 0, DeviceStatus("gpu", H200, ("torch",), refusals))
    report = Report((Finding("cuda", True, True, "stable", (device,)),), "cuda")
    page = io.StringIO()
    devices._show(report, Output(page))
    assert "    not by jax          jax 0.10.2 has no CUDA plugin\n" in page.getvalue()
    assert "not in this machine" not in page.getvalue()


def test_a_backend_of_a_probe(anydevice: Anydevice) -> None:
    memory = Facts("Q", total_memory=GIB)
    seen = (RawDevice(0, "gpu", Facts("Q")), RawDevice(1, "gpu", memory))
    with machine_of(scans=[BackendScan("quantum", True, seen, engines=("numpy",))]):
        out = anydevice.text("devices")
    assert "untested (from a probe)" in out
    assert "    memory              1.0 GiB dedicated\n" in out
    assert "kind                gpu" in out
    assert "memory" not in out.partition("✓ quantum:0")[2].partition("\n\n")[0]


@pytest.mark.needs("torch")
def test_json_is_the_report(anydevice: Anydevice) -> None:
    with machine_of(scans=SEEN_TWICE) as report:
        data = anydevice.json("devices")
    assert data == report.to_dict()
    assert data["recommended"] == "cuda"
    assert data["backends"][0]["devices"][0]["facts"]["uuid"] == "GPU-1"


def test_a_broken_file_hides_nothing(anydevice: Anydevice, project: Path) -> None:
    project.write_text("[")
    with machine_of():
        code, out, err = anydevice("devices")
        data = anydevice.json("devices", code=2)
    assert code == 2
    assert "✓ cpu" in out
    assert f"anydevice: {project}, line 1" in err
    assert f"{project}, line 1" in data["error"]
    assert data["backends"]
