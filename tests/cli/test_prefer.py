"""`anydevice prefer`: what is written, where, and what it comes to."""

from __future__ import annotations

from pathlib import Path

import pytest

from anydevice._core.finding import BackendScan, Reason
from tests.cli.conftest import Anydevice
from tests.machines import BROKEN_CPU, machine_of

NO_DRIVER = BackendScan(
    "rocm",
    True,
    stage="driver",
    reason=Reason("driver_failed", "no driver", "sudo modprobe amdgpu"),
)


def test_a_usable_device(anydevice: Anydevice, project: Path) -> None:
    project.write_text("# mine\n")
    assert anydevice.text("prefer", "CPU", cuda=1).splitlines() == [
        f"Preferred from now on: cpu, written to {project}",
        "✓ cpu is usable now",
        "Chosen: cpu, because the project's anydevice.toml asks for it",
    ]
    assert project.read_text() == '# mine\ndevice = "cpu"\n'


def test_a_project_without_a_file(anydevice: Anydevice, project: Path, user_file: Path) -> None:
    project.unlink()
    out = anydevice.text("prefer", "cpu", "--project", cuda=1)
    assert out.splitlines()[0] == f"Preferred from now on: cpu, written to {project}"
    assert project.read_text() == 'device = "cpu"\n'
    assert not user_file.exists()


def test_a_device_that_is_not_usable_now(anydevice: Anydevice, project: Path) -> None:
    out = anydevice.text("prefer", "rocm", "--engine", "torch", scans=[NO_DRIVER])
    assert out.splitlines() == [
        f"Preferred from now on: rocm with torch, written to {project}",
        "✗ rocm is not usable now: rocm stopped at driver: no driver (fix: sudo modprobe amdgpu)",
        "  It is passed over until it is.",
        'Chosen: cpu, because rocm stopped at "driver"',
    ]
    assert project.read_text() == 'device = "rocm"\nengine = "torch"\n'


def test_a_kind_without_a_fix(anydevice: Anydevice) -> None:
    out = anydevice.text("prefer", "gpu", cuda=0)
    assert "✗ gpu is not usable now: this machine has no gpu" in out
    assert "fix:" not in out


@pytest.mark.parametrize("word", ["--clear", ""])
def test_forgetting(anydevice: Anydevice, project: Path, word: str) -> None:
    project.write_text('device = "cuda"\nengine = "torch"\nx64 = true\n')
    out = anydevice.text("prefer", word, cuda=0)
    assert out.startswith(f"The preference is forgotten, in {project}")
    assert project.read_text() == "x64 = true\n"


def test_forgetting_where_nothing_was_preferred(anydevice: Anydevice, project: Path) -> None:
    project.unlink()
    with machine_of():
        code, out, _ = anydevice("prefer", "--clear")
        data = anydevice.json("prefer", "--clear")
    assert code == 0
    assert out.startswith("There is no preference to forget.\n")
    assert (data["file"], data["usable"], data["chosen"]) == (None, None, "cpu")


@pytest.mark.needs("torch")
def test_as_json(anydevice: Anydevice, project: Path) -> None:
    with machine_of(cuda=2):
        data = anydevice.json("prefer", "cuda:1", "--engine", "torch")
        missing = anydevice.json("prefer", "tpu")
    assert data == {
        "device": "cuda:1",
        "engine": "torch",
        "file": str(project),
        "usable": True,
        "code": None,
        "reason": None,
        "chosen": "cuda:1",
    }
    assert (missing["usable"], missing["code"]) == (False, "no_hardware")
    assert missing["reason"] == "this machine has no tpu: not in this fake machine"
    assert missing["chosen"] == "cuda:0"


def test_auto_is_what_would_be_chosen_anyway(anydevice: Anydevice, project: Path) -> None:
    assert "✓ cuda:0 is usable now" in anydevice.text("prefer", "auto", cuda=1)
    assert project.read_text() == 'device = "auto"\n'


def test_the_engine_is_forgotten_with_the_device(anydevice: Anydevice, project: Path) -> None:
    assert "leave --engine out" in anydevice.refusal("prefer", "--clear", "--engine", "torch")
    assert project.read_text() == ""


def test_where_nothing_is_usable_nothing_is_chosen(anydevice: Anydevice) -> None:
    out = anydevice.text("prefer", "cpu", scans=[BROKEN_CPU])
    assert "✗ cpu is not usable now: cpu stopped at driver: reading it failed" in out
    assert "Chosen" not in out
