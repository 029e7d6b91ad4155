"""What lies behind each code of a reason, and where the codes stand."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

import anydevice
from anydevice._core.child.parent import How
from anydevice._core.device import Device
from anydevice._core.finding import DeviceStatus, Facts, Finding, Reason, Stage, Verdict
from anydevice._machine.discovery.discover import Report
from anydevice._machine.engines.diagnosis import _FOREIGN, why_not
from anydevice._machine.engines.installed import Build
from anydevice._machine.engines.registry import BUILT_IN
from anydevice._machine.hardware.cuda.diagnosis import _CUDA, _NVML
from anydevice._machine.hardware.readers import DeviceProcess
from anydevice._report import diagnosis
from anydevice._report.diagnosis import CAUSES

GIB = 2**30


def report_of(*statuses: DeviceStatus, backend: str = "cuda") -> Report:
    devices = tuple(Device.seen(backend, i, status) for i, status in enumerate(statuses))
    usable = any(status.usable for status in statuses)
    return Report((Finding(backend, True, usable, "stable", devices),), "cpu")


def usable(*engines: str, total: int | None = None, free: int | None = None) -> DeviceStatus:
    return DeviceStatus("gpu", Facts("A card", total_memory=total, free_memory=free), engines)


def stopped(*reasons: Reason, stage: Stage = "library", fix: str | None = None) -> DeviceStatus:
    return DeviceStatus("gpu", Facts("A card"), stage=stage, reasons=reasons, fix=fix)


@pytest.mark.parametrize("code", CAUSES)
def test_the_code_decides_whatever_the_sentence_says(code: str) -> None:
    for text in ("words that nobody has said before", "timed out: out of memory, CPU-only build"):
        [explained] = diagnosis.explain(report_of(stopped(Reason(code, text))))
        assert (explained.code, explained.cause) == (code, CAUSES[code].name)
        assert (explained.evidence, explained.meaning) == ((text,), CAUSES[code].meaning)
        failed = Verdict("cuda:0", "torch", False, Reason(code, text))
        verdict = diagnosis.explain_verdict(failed)
        assert verdict is not None
        assert verdict.code == code


@pytest.mark.parametrize(
    ("stage", "code"),
    [("driver", "driver_missing"), ("device", "card_unsupported"), ("library", "library_missing"),
     ("compute", "failed")],
)  # fmt: skip
def test_a_code_of_a_users_own_probe_is_explained_by_its_stage(stage: Stage, code: str) -> None:
    [explained] = diagnosis.explain(report_of(stopped(Reason("moon_full", "."), stage=stage)))
    assert explained.code == code


@pytest.mark.parametrize(
    ("build", "facts", "code"),
    [
        (Build("torch", "torch"), Facts("x"), "library_missing"),
        (Build("torch", "torch", "2.9"), Facts("x"), "cpu_only_build"),
        (Build("jax", "jax", "0.10"), Facts("x"), "plugin_missing"),
        (Build("torch", "torch", "2.9", runtimes={"rocm": "6.2"}), Facts("x"), "other_build"),
        (
            Build("torch", "torch", "2.9", runtimes={"cuda": "13.0"}),
            Facts("x", runtime_version="12.4"),
            "version_mismatch",
        ),
        (
            Build("jax", "jax", "0.10", runtimes={"cuda": "12"}),
            Facts("x", compute_capability="5.0"),
            "card_not_in_build",
        ),
        (Build("jax", "jax", "0.10", broken=Reason("a", "b")), Facts("x"), "a"),
        (Build("jax", "jax", "0.10", faults={"cuda": Reason("c", "d")}), Facts("x"), "c"),
    ],
)
def test_every_refusal_of_a_library_has_its_code(build: Build, facts: Facts, code: str) -> None:
    reason = why_not(build, "cuda", facts)
    assert reason is not None
    assert reason.code == code


def test_each_cause_of_a_device_is_explained_with_its_evidence_and_fix() -> None:
    status = stopped(
        Reason("cpu_only_build", "torch 2 is a CPU-only build"),
        Reason("cpu_only_build", "mlx 1 is one too"),
        Reason("library_missing", "cupy is not installed"),
        fix="pip install torch",
    )
    explained = diagnosis.explain(report_of(status, status, usable("torch")))
    assert [(e.subject, e.cause) for e in explained] == [
        ("cuda:0, cuda:1", "library built without this backend"),
        ("cuda:0, cuda:1", "no library"),
    ]
    assert explained[0].evidence == ("torch 2 is a CPU-only build", "mlx 1 is one too")
    assert {e.advice for e in explained} == {"pip install torch"}
    plain = explained[0].to_dict()
    assert plain["evidence"] == list(explained[0].evidence)
    assert plain["code"] == "cpu_only_build"


def test_a_backend_without_devices_and_without_reasons_is_explained_by_its_stage() -> None:
    finding = Finding("tpu", True, False, "untested", stage="driver")
    absent = Finding("rocm", False, False, "untested", stage="driver")
    [explained] = diagnosis.explain(Report((finding, absent), "cpu"))
    assert (explained.subject, explained.cause, explained.evidence) == ("tpu", "no driver", ())
    assert "install or repair the driver" in explained.advice


def test_a_failed_check_is_not_sent_back_to_the_doctor() -> None:
    wrong = Reason("wrong_answer", "torch: wrong answer: off by 1")
    status = stopped(wrong, stage="compute", fix="anydevice doctor")
    [explained] = diagnosis.explain(report_of(status))
    assert explained.cause == "wrong answer"
    assert explained.advice != "anydevice doctor"


def test_verdicts() -> None:
    assert diagnosis.explain_verdict(Verdict("cuda:0", "torch", True)) is None
    bad = diagnosis.explain_verdict(Verdict("cuda:0", "torch", False, Reason("wrong_answer", "3")))
    assert bad is not None
    assert (bad.subject, bad.cause) == ("cuda:0 with torch", "wrong answer")
    silent = diagnosis.explain_verdict(Verdict("cuda:0", "torch", False))
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
    [said] = diagnosis.worth_knowing(report, (), environment)
    assert (said.subject, said.cause) == ("cuda:0", "memory held by preallocation")
    assert said.evidence == (f"JAX takes {share} of a card's memory when it starts",)
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
    assert diagnosis.worth_knowing(report, (), environment) == ()


def test_little_free_memory_is_said() -> None:
    little = usable("torch", total=80 * GIB, free=8 * GIB)
    enough = usable("torch", total=80 * GIB, free=40 * GIB)
    unknown = usable("torch", total=80 * GIB)
    [said] = diagnosis.worth_knowing(report_of(little, enough, unknown), (), {})
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
    [said] = diagnosis.worth_knowing(report, (), {}, holders)
    assert said.evidence == (
        "8.0 GiB free of 80.0 GiB",
        "python fit.py (pid 7) holds 60.0 GiB, about what JAX takes at its start",
        "another container (pid 8) holds 3.0 GiB",
    )
    assert "anydevice watch" in said.advice


def test_slow_first_calls_are_said_together() -> None:
    verdicts = [
        Verdict("cuda:0", "jax", True, None, 3, 2.0, 0.001),
        Verdict("cpu", "jax", True, None, 3, 0.9, 0.01),
        Verdict("cpu", "numpy", True, None, 1, 0.06, 0.0001),  # much slower, and nobody notices
        Verdict("cpu", "torch", True, None, 1, 2.0, 1.0),
        Verdict("cpu", "mlx", False, Reason("crashed", "crashed"), 1),
        Verdict("opencl:0", "opencl", True, None, 1),
    ]
    [said] = diagnosis.worth_knowing(Report((), "cpu"), verdicts, {})
    assert said.subject == "cuda:0 with jax, cpu with jax"
    assert said.evidence[0] == "cuda:0 with jax: the first call took 2.00 s, the second 1.00 ms"
    assert "warm up" in said.advice


def _given_codes() -> set[str]:
    """Every code that the sources give to a reason, an absent part or an error."""
    found: set[str] = set()
    for path in Path(anydevice.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Call(func=ast.Name("Reason" | "Fault" | "_stopped_scan")):
                    codes: list[ast.expr] = node.args[:1]
                case ast.Call(func=ast.Attribute(attr="stopped")):
                    codes = node.args[1:2]
                case ast.Call(func=ast.Name("Absent")):
                    codes = node.args[2:]
                case ast.Assign(targets=[ast.Name("_code" | "code")], value=value):
                    codes = [value]
                case ast.Return(value=ast.Call(func=ast.Name("_explanation"), args=[_, code, *_])):
                    codes = [code]
                case ast.Expr(
                    value=ast.Yield(ast.Call(func=ast.Name("_explanation"), args=[_, code, *_]))
                ):
                    codes = [code]
                case _:
                    codes = []
            if isinstance(node, ast.Call):
                codes += [each.value for each in node.keywords if each.arg == "code"]
            texts = [each.value for each in codes if isinstance(each, ast.Constant)]
            found |= {text for text in texts if isinstance(text, str)}
    found |= {code for code, _ in _FOREIGN}
    found |= {fault.code for fault in (*_NVML.values(), *_CUDA.values())}
    return found | set(get_args(How)) - {"answered"}


def test_every_code_that_is_given_is_explained_and_no_other() -> None:
    given = _given_codes() | {"bad_usage"}  # that of an error which argparse raises
    given |= {absent.code for row in BUILT_IN.values() for absent in row.lacks.values()}
    assert given - CAUSES.keys() == set()
    assert CAUSES.keys() - given == set()


def test_the_documentation_lists_every_code() -> None:
    page = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", page.read_text("utf-8"), re.M)
    assert rows == [(code, each.meaning, each.advice) for code, each in CAUSES.items()]
