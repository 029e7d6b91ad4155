"""What lies behind each reason: the sentences that readers and libraries really give."""

from __future__ import annotations

import pytest

from anydevice.core.device import Device
from anydevice.core.finding import Facts, Finding, Stage, Standing, Verdict
from anydevice.discovery.report import Report
from anydevice.engines.diagnosis import why_not
from anydevice.engines.installed import Build
from anydevice.hardware.cuda.diagnosis import cuda_fault, nvml_fault
from anydevice.hardware.readers import DeviceProcess
from anydevice.rendering import diagnosis as causes

GIB = 2**30


def report_of(*standings: Standing, backend: str = "cuda") -> Report:
    devices = tuple(Device.seen(backend, i, standing) for i, standing in enumerate(standings))
    usable = any(standing.usable for standing in standings)
    return Report((Finding(backend, True, usable, "stable", devices),), "cpu")


def usable(*engines: str, total: int | None = None, free: int | None = None) -> Standing:
    return Standing("gpu", Facts("A card", total_memory=total, free_memory=free), engines)


@pytest.mark.parametrize(
    ("reason", "stage", "name"),
    [
        ("an NVIDIA card is at 0000:18:00.0 but no NVIDIA driver is installed", "driver",
         "no driver"),
        ("an AMD card is on the PCI bus, but the driver amdgpu is not loaded", "driver",
         "no driver"),
        (nvml_fault(9).meaning, "driver", "no driver"),
        (nvml_fault(18).meaning, "driver", "version mismatch"),
        (cuda_fault(803).meaning, "driver", "version mismatch"),
        (cuda_fault(35).meaning, "driver", "version mismatch"),
        (cuda_fault(2).meaning, "driver", "out of memory"),
        (nvml_fault(4).meaning, "driver", "no permission"),
        ("the CUDA driver crashed (SIGSEGV) in cuInit", "driver", "the driver crashes"),
        ("NVML timed out (no answer within 5 s) in nvmlInit_v2", "driver", "no answer in time"),
        ("the CUDA driver cannot be loaded: wrong ELF class", "driver", "CUDA missing"),
        ("driver 470.1 serves CUDA 11.4, and CUDA 12 or newer is needed", "driver",
         "version mismatch"),
        ('CUDA_VISIBLE_DEVICES="-1" hides every device', "device", "hidden by a variable"),
        ("compute capability 3.5 is older than 5.0 (Maxwell)", "device", "card not in the build"),
        ("its compute mode is Prohibited", "device", "the device cannot be used"),
        ("torch 2.13.0+cpu is a CPU-only build", "library", "library built without this backend"),
        ("jax 0.10.2 has no CUDA plugin", "library", "library built without this backend"),
        ("no array library that drives it is installed: torch, jax", "library", "no library"),
        ("mlx is not installed", "library", "no library"),
        ("torch 2.9 is damaged: its version.py cannot be read", "library", "damaged installation"),
        ("something that nobody has said before", "library", "no library"),
        ("failed (ImportError: libcudart.so.12: cannot open shared object file)", "compute",
         "CUDA missing"),
        ("failed (RuntimeError: CUDA error: no kernel image is available)", "compute",
         "card not in the build"),
        ("failed (OutOfMemoryError: CUDA out of memory)", "compute", "out of memory"),
        ("wrong answer: off by 3", "compute", "wrong answer"),
        ("failed (ValueError: no)", "compute", "the computation failed"),
    ],
)  # fmt: skip
def test_the_cause_behind_a_reason(reason: str, stage: Stage, name: str) -> None:
    assert causes.cause_of(reason, stage).name == name


@pytest.mark.parametrize(
    ("build", "facts", "name"),
    [
        (Build("torch", "torch"), Facts("x"), "no library"),
        (Build("torch", "torch", "2.9"), Facts("x"), "library built without this backend"),
        (
            Build("torch", "torch", "2.9", runtimes={"rocm": "6.2"}),
            Facts("x"),
            "library built without this backend",
        ),
        (
            Build("torch", "torch", "2.9", runtimes={"cuda": "13.0"}),
            Facts("x", runtime_version="12.4"),
            "version mismatch",
        ),
        (
            Build("jax", "jax", "0.10", runtimes={"cuda": "12"}),
            Facts("x", compute_capability="5.0"),
            "card not in the build",
        ),
        (
            Build("jax", "jax", "0.10", broken="jax 0.10 is installed without jaxlib"),
            Facts("x"),
            "damaged installation",
        ),
        (
            Build(
                "jax",
                "jax",
                "0.10",
                faults={"cuda": "jax-cuda12-plugin 0.9 does not fit jaxlib 0.10, so JAX …"},
            ),
            Facts("x"),
            "version mismatch",
        ),
    ],
)
def test_every_refusal_of_a_library_has_its_cause(build: Build, facts: Facts, name: str) -> None:
    reason = why_not(build, "cuda", facts)
    assert reason is not None
    assert causes.cause_of(reason, "library").name == name


def test_each_cause_of_a_device_is_explained_with_its_evidence_and_mend() -> None:
    standing = Standing(
        "gpu",
        Facts("A card"),
        stage="library",
        reasons=(
            "torch 2 is a CPU-only build",
            "jax 1 has no CUDA plugin",
            "cupy is not installed",
        ),
        mend="pip install torch",
    )
    explained = causes.explain(report_of(standing, standing, usable("torch")))
    assert [(e.subject, e.cause) for e in explained] == [
        ("cuda:0, cuda:1", "library built without this backend"),
        ("cuda:0, cuda:1", "no library"),
    ]
    assert explained[0].evidence == ("torch 2 is a CPU-only build", "jax 1 has no CUDA plugin")
    assert {e.advice for e in explained} == {"pip install torch"}
    assert explained[0].to_dict()["evidence"] == list(explained[0].evidence)


def test_a_backend_without_devices_and_without_reasons_is_explained_by_its_stage() -> None:
    finding = Finding("tpu", True, False, "untested", stage="driver")
    absent = Finding("rocm", False, False, "untested", stage="driver", reasons=("none",))
    [explained] = causes.explain(Report((finding, absent), "cpu"))
    assert (explained.subject, explained.cause, explained.evidence) == ("tpu", "no driver", ())
    assert "install or repair the driver" in explained.advice


def test_a_failed_check_is_not_sent_back_to_the_doctor() -> None:
    standing = Standing(
        "gpu", Facts("x"), stage="compute", reasons=("torch: wrong answer: off by 1",),
        mend="anydevice doctor",
    )  # fmt: skip
    [explained] = causes.explain(report_of(standing))
    assert explained.cause == "wrong answer"
    assert explained.advice != "anydevice doctor"


def test_verdicts() -> None:
    assert causes.explain_verdict(Verdict("cuda:0", "torch", True)) is None
    wrong = causes.explain_verdict(Verdict("cuda:0", "torch", False, "wrong answer: off by 3"))
    assert wrong is not None
    assert (wrong.subject, wrong.cause) == ("cuda:0 with torch", "wrong answer")
    silent = causes.explain_verdict(Verdict("cuda:0", "torch", False))
    assert silent is not None
    assert silent.evidence == ("it gave no reason",)


@pytest.mark.parametrize(
    ("environment", "share"),
    [
        ({}, "75 %"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4"}, "40 %"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "much"}, "75 %"),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, "75 %"),
    ],
)
def test_what_jax_takes_at_its_start(environment: dict[str, str], share: str) -> None:
    report = report_of(usable("torch", "jax"), usable("torch"))
    [said] = causes.worth_knowing(report, (), environment)
    assert (said.subject, said.cause) == ("cuda:0", "memory held by preallocation")
    assert f"JAX takes {share}" in said.meaning
    assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in said.advice


@pytest.mark.parametrize(
    ("backend", "engine", "environment"),
    [
        ("cuda", "jax", {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
        ("cuda", "jax", {"XLA_PYTHON_CLIENT_PREALLOCATE": "0"}),
        ("cuda", "jax", {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}),
        ("cuda", "torch", {}),
        ("tpu", "jax", {}),
    ],
)
def test_where_jax_takes_nothing(backend: str, engine: str, environment: dict[str, str]) -> None:
    report = report_of(usable(engine), backend=backend)
    assert causes.worth_knowing(report, (), environment) == ()


def test_little_free_memory_is_said() -> None:
    little = usable("torch", total=80 * GIB, free=8 * GIB)
    enough = usable("torch", total=80 * GIB, free=40 * GIB)
    unknown = usable("torch", total=80 * GIB)
    [said] = causes.worth_knowing(report_of(little, enough, unknown), (), {})
    assert (said.subject, said.evidence) == ("cuda:0", ("8.0 GiB free of 80.0 GiB",))


def test_who_holds_the_memory_is_said() -> None:
    report = report_of(usable("torch", total=80 * GIB, free=8 * GIB))
    holders = {
        Device("cuda:0"): (
            DeviceProcess(7, "python fit.py", 60 * GIB),
            DeviceProcess(8, "another container", 3 * GIB),
            DeviceProcess(9, "one that does not tell"),
        )
    }
    [said] = causes.worth_knowing(report, (), {}, holders)
    assert said.evidence == (
        "8.0 GiB free of 80.0 GiB",
        "python fit.py (pid 7) holds 60.0 GiB, about what JAX takes at its start",
        "another container (pid 8) holds 3.0 GiB",
    )
    assert "anydevice watch" in said.advice


def test_slow_first_calls_are_said_together() -> None:
    verdicts = [
        Verdict("cuda:0", "jax", True, None, 3, 2.0, 0.001),
        Verdict("cpu", "jax", True, None, 3, 0.2, 0.01),
        Verdict("cpu", "numpy", True, None, 1, 0.002, 0.0001),  # much slower, and nobody notices
        Verdict("cpu", "torch", True, None, 1, 2.0, 1.0),
        Verdict("cpu", "mlx", False, "crashed", 1),
        Verdict("opencl:0", "opencl", True, None, 1),
    ]
    [said] = causes.worth_knowing(Report((), "cpu"), verdicts, {})
    assert said.subject == "cuda:0 with jax, cpu with jax"
    assert said.evidence[0] == "cuda:0 with jax: the first call took 2.0 s, the second 1.0 ms"
    assert "warm up" in said.advice


def test_seconds_in_words() -> None:
    shown = [causes.seconds_in_words(seconds) for seconds in (0.00004, 0.0099, 0.0123, 0.5, 61.2)]
    assert shown == ["0.0 ms", "9.9 ms", "12 ms", "500 ms", "61.2 s"]
