"""`anydevice doctor`: real computations in real children, on a machine that is partly made up."""

from __future__ import annotations

import os
from itertools import product

import pytest

from anydevice._core.child.parent import Outcome
from anydevice._core.device import Device
from anydevice._core.finding import BackendScan, Facts, RawDevice, Reason, Verdict
from anydevice._machine.discovery import check as checking
from anydevice._machine.discovery import doctor as examination
from anydevice._machine.engines import diagnosis
from anydevice.cli import doctor
from anydevice.cli.printing import Output
from anydevice.errors import DeviceNotFoundError
from tests.cli.conftest import Anydevice
from tests.machines import machine_of

NO_DRIVER = BackendScan(
    "cuda",
    present=True,
    stage="driver",
    reason=Reason(
        "driver_missing",
        "an NVIDIA card is at 0000:18:00.0 but no NVIDIA driver is installed",
        "sudo ubuntu-drivers install",
    ),
)
NO_LIBRARY = BackendScan("cuda", True, (RawDevice(0, "gpu", Facts("NVIDIA RTX 4070")),))


def test_a_healthy_machine(anydevice: Anydevice) -> None:
    out = anydevice.text("doctor", "--engine", "numpy", cuda=0)
    first = out.splitlines()[0]
    assert first.startswith("✓ cpu")
    assert "numpy" in first
    assert "right" in first
    assert "first call" in first
    assert "– cuda     not in this fake machine" in out
    assert out.endswith("\n1 of 1 computations were right.\n")
    data = anydevice.json("doctor", "cpu", "--engine", "numpy", cuda=0)
    assert data["healthy"] is True
    (check,) = data["checks"]
    assert (check["device"], check["engine"], check["right"]) == ("cpu", "numpy", True)
    assert check["second_call"] > 0
    assert data["not_usable"] == data["explanations"] == []


def test_a_present_backend_that_is_not_usable_is_a_failure(anydevice: Anydevice) -> None:
    out = anydevice.text("doctor", "--engine", "numpy", scans=[NO_DRIVER], code=1)
    assert "✗ cuda     stopped at: driver\n" in out
    explained = out.partition("What is wrong, and what to do")[2]
    assert "  cuda: no driver\n" in explained
    assert str(NO_DRIVER.reason) in explained
    assert "    → sudo ubuntu-drivers install\n" in explained
    assert out.endswith("1 of 1 computations were right; not usable: cuda.\n")


@pytest.mark.needs("torch")
def test_a_library_without_cuda_is_explained(anydevice: Anydevice) -> None:
    data = anydevice.json("doctor", "cuda", scans=[NO_LIBRARY], code=1)
    assert data["checks"] == []
    assert data["not_usable"][0]["place"] == "cuda:0"
    assert data["not_usable"][0]["code"] == data["explanations"][0]["code"]
    assert data["explanations"][0]["cause"] == "library built without this backend"
    assert data["explanations"][0]["advice"].startswith("pip install")


def test_a_failed_computation_condemns_the_device(anydevice: Anydevice) -> None:
    card = BackendScan(
        "cuda", True, (RawDevice(0, "gpu", Facts("a card", uuid="GPU-1")),), engines=("numpy",)
    )
    with machine_of(scans=[card]):  # NumPy in the child knows no cuda:0
        out = anydevice.text("doctor", "gpu", code=1)
        assert out.startswith("✗ cuda:0   numpy")
        assert "cuda:0 with numpy: " in out.partition("What is wrong")[2]
        assert "0 of 1 computations were right." in out
        assert not Device("cuda:0").usable
        again = anydevice.json("doctor", "gpu", code=1)
    assert [c["right"] for c in again["checks"]] == [False], "stopped at compute: checked anew"
    assert [e["subject"] for e in again["explanations"]] == ["cuda:0 with numpy"]


def test_a_computation_that_takes_too_long(anydevice: Anydevice) -> None:
    out = anydevice.text("doctor", "--engine", "numpy", "--limit", "0.001", cuda=0, code=1)
    assert "✗ cpu" in out
    assert "timed out (no answer within 0.001 s)" in out
    assert "no answer in time" in out


BUILD_ERROR = """RuntimeError: clBuildProgram failed: BUILD_PROGRAM_FAILURE

Build on <pyopencl.Device 'pthread' on 'Portable Computing Language' at 0x5634>:

error: unknown target CPU 'generic'
Device pthread failed to build the program

(options: -w -I /usr/lib/pyopencl/cl)"""


def test_an_error_of_many_lines_is_one_cell_and_explained(
    anydevice: Anydevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = Outcome("failed", step="the first multiplication", error=BUILD_ERROR)
    monkeypatch.setattr(checking, "ask_child", lambda *given, **named: outcome)
    out = anydevice.text("doctor", "--engine", "numpy", cuda=0, code=1)
    table, _, explained = out.partition("\n\nWhat is wrong")
    assert [line[:1] for line in table.splitlines()] == ["✗", *"–" * (table.count("\n"))]
    assert "cpu with numpy: driver with a known defect\n" in explained
    assert "unknown target CPU" in explained


def test_a_library_without_its_cuda_is_installed_again(
    anydevice: Anydevice, monkeypatch: pytest.MonkeyPatch, site
) -> None:
    site.torch("2.13.0+cu130", cuda="13.0")
    linux = diagnosis.Platform("Linux", "x86-64", (3, 12))
    monkeypatch.setattr(diagnosis, "this_platform", lambda: linux)
    outcome = Outcome("failed", error="OSError: libcudart.so.13: cannot open shared object file")
    monkeypatch.setattr(checking, "ask_child", lambda *given, **named: outcome)
    facts = Facts("RTX 4070", compute_capability="8.9", runtime_version="13.0")
    card = BackendScan("cuda", True, (RawDevice(0, "gpu", facts),))
    data = anydevice.json("doctor", "cuda", scans=[card], code=1)
    advice = data["explanations"][0]["advice"]
    assert advice.startswith("pip install --force-reinstall torch --index-url https://download.")


@pytest.mark.needs("torch")
def test_only_what_is_named_is_examined() -> None:
    with machine_of(cuda=2, engines=["numpy", "torch"]) as report:
        everything = examination.prepare(report)
        one = examination.prepare(report, ["CUDA:1"], "torch")
        both = examination.prepare(report, ["gpu"], "numpy")
        mixed = examination.prepare(report, ["cuda:0", "cpu"], "numpy")
    places = [(str(device), engine) for device, engine in everything.pairs]
    assert places[:4] == list(product(("cuda:0", "cuda:1"), ("numpy", "torch")))
    assert {place for place, _ in places[4:]} == {"cpu"}
    assert [(str(device), engine) for device, engine in one.pairs] == [("cuda:1", "torch")]
    assert [str(device) for device, _ in both.pairs] == ["cuda:0", "cuda:1"]
    assert [str(device) for device, _ in mixed.pairs] == ["cuda:0", "cpu"]
    assert [finding.backend for finding in one.report] == ["cuda"]


def test_cpu_devices_of_jax_are_checked_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    with machine_of() as report:
        usual = examination.prepare(report, [], "jax")
        named = examination.prepare(report, ["cpu:2"], "jax")
    assert [str(device) for device, _ in usual.pairs] == ["cpu"]
    assert [str(device) for device, _ in named.pairs] == ["cpu:2"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rocm"], "this machine has no rocm: not in this fake machine"),
        (["cuda:7"], "this machine has no cuda:7"),
        (["tpu"], "this machine has no tpu"),
        (["quantum"], "there is no backend 'quantum'"),
        (["--engine", "tensorflow"], "there is no engine 'tensorflow'"),
        (["cpu", "--engine", "opencl"], "opencl drives none of cpu"),
    ],
)
def test_what_cannot_be_examined(anydevice: Anydevice, words: list[str], message: str) -> None:
    assert message in anydevice.refusal("doctor", *words, cuda=1)


@pytest.mark.needs("torch")
def test_an_engine_that_is_refused_is_refused_with_the_reason() -> None:
    said = r"torch drives none of cuda:0: cuda:0: torch .*CPU"
    with machine_of(scans=[NO_LIBRARY]) as report, pytest.raises(DeviceNotFoundError, match=said):
        examination.prepare(report, ["cuda"], "torch")


def test_slow_calls_are_explained(anydevice: Anydevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(device: Device, engine: str, *, limit: float) -> Verdict:
        return Verdict(str(device), engine, True, None, 3.0, 2.5, 0.001)

    monkeypatch.setattr(doctor, "check", slow)
    out = anydevice.text("doctor", "cuda", cuda=1, engines=["jax"])
    knowing = out.partition("Worth knowing")[2]
    assert "memory held by preallocation" in knowing
    assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in knowing
    assert "the first call took 2.50 s, the second 1.00 ms" in knowing
    assert "warm up" in knowing


def test_progress_and_broken_lines_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    page = io.StringIO()
    page.isatty = lambda: True  # type: ignore[method-assign]
    output = Output(page, colour=False, width=60)
    with machine_of(scans=[NO_DRIVER]) as report:
        doctor._show(examination.prepare(report, [], "numpy"), 60, output)
    shown = page.getvalue()
    assert "0/1" in shown
    assert "cpu with numpy" in shown.partition("0/1")[2].splitlines()[0]
    explained = shown.partition("What is wrong")[2]
    long = [line for line in explained.splitlines() if len(line) > 60]
    assert all("→" in line for line in long), "only commands may be longer than the terminal"
    assert "    an NVIDIA card is at 0000:18:00.0 but no NVIDIA driver\n" in explained


def test_the_child_does_not_take_most_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    given: list[dict[str, str]] = []

    def ask(*_: object, environment: dict[str, str], **__: object) -> Outcome:
        given.append(environment)
        return Outcome("not_started", error="only asked")

    monkeypatch.setattr(checking, "ask_child", ask)
    assert not Device("cpu").check("numpy")
    assert [each["XLA_PYTHON_CLIENT_PREALLOCATE"] for each in given] == ["false"]
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ


def test_wrong_settings(anydevice: Anydevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYDEVICE_DEVICE", "nonsense")
    words = ("doctor", "cpu", "--engine", "numpy")
    code, out, err = anydevice(*words)
    assert code == 1
    assert "1 of 1 computations were right" in out
    assert "ANYDEVICE_DEVICE" in err
    assert "ANYDEVICE_DEVICE" in anydevice.json(*words, code=1)["error"]


def test_a_kind_whose_backend_stopped_at_its_driver_is_explained(anydevice: Anydevice) -> None:
    stopped = BackendScan(
        "cuda", present=True, stage="driver", reason=Reason("reading_failed", "cuInit returned 999")
    )
    with machine_of(scans=[stopped]):
        code, out, _ = anydevice("doctor", "gpu")
        nothing, _, err = anydevice("doctor", "tpu")
    assert code == 1
    assert "cuInit returned 999" in out
    assert nothing == 2
    assert "this machine has no tpu" in err
