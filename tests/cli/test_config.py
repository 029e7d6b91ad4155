"""`anydevice config` and `anydevice prefer`: settings, where they come from and where they go."""

from __future__ import annotations

import io
import os
import re
from argparse import Namespace
from pathlib import Path

import pytest

from anydevice._core.finding import BackendScan, Facts, RawDevice, Reason
from anydevice.cli import config as command
from anydevice.cli.printing import Output
from tests.cli.conftest import Anydevice
from tests.machines import BROKEN_CPU, machine_of

REASON = Reason("driver_failed", "no driver", "sudo modprobe amdgpu")
NO_DRIVER = BackendScan("rocm", True, stage="driver", reason=REASON)


def rows(text: str) -> dict[str, list[str]]:
    """Settings by name: their value and their origin."""
    block = text.partition("Settings\n")[2].partition("\n\n")[0]
    parts = [line.split("  ") for line in block.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in parts]
    return {row[0]: row[1:] for row in cells}


@pytest.fixture(autouse=True)
def _without_variables_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in os.environ if each.startswith("ANYDEVICE_")]:
        if name not in ("ANYDEVICE_DEVICE", "ANYDEVICE_ENGINE", "ANYDEVICE_HOME"):
            monkeypatch.delenv(name)


def test_the_defaults(anydevice: Anydevice, project: Path, tmp_path: Path) -> None:
    out = anydevice.text("config", cuda=0)
    assert rows(out) == {
        "device": ["automatic", "default"],
        "engine": ["automatic", "default"],
        "order": ["the order of backends", "default"],
        "memory": ["no limit", "default"],
        "return_memory": ["on", "default"],
        "threads": ["each library's own", "default"],
        "x64": ["off", "default"],
        "jit": ["on", "default"],
        "mixed_precision": ["off", "default"],
        "time_limit": ["5 s", "default"],
        "env": ["none", "default"],
    }
    home = tmp_path / "home"
    assert out.partition("Looked at\n")[2].splitlines() == [
        "  ANYDEVICE_DEVICE  not set",
        "  ANYDEVICE_ENGINE  not set",
        f"  ANYDEVICE_HOME    {home}",
        f"  project file      {project}",
        f"  user file         {home / 'anydevice.toml'} (does not exist)",
        f"  past checks       {home / 'verdicts.json'} (does not exist)",
        f"  measurements      {home / 'measurements.json'} (does not exist)",
        f"  our kernels       {home / 'kernels.json'} (does not exist)",
    ]


@pytest.mark.parametrize(
    ("written", "shown"), [('"conservative"', "conservative (60 %)"), ("0.8", "0.8 (80 %)")]
)
def test_memory_in_percent(anydevice: Anydevice, project: Path, written: str, shown: str) -> None:
    project.write_text(f"memory = {written}\n")
    assert rows(anydevice.text("config", cuda=0))["memory"][0] == shown


def test_every_origin(
    anydevice: Anydevice, project: Path, user_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_file.write_text('memory = "20GiB"\nx64 = false\nenv = { A = "1" }\n')
    project.write_text('device = ["cuda", "cpu"]\nengine = "numpy"\norder = ["opencl"]\nx64 = true')
    monkeypatch.setenv("ANYDEVICE_DEVICE", "cpu")
    out = anydevice.text("config", cuda=0)
    table = rows(out)
    assert table["memory"] == ["20GiB", f"user file {user_file}, line 1"]
    assert table["env"] == ["A=1", f"user file {user_file}, line 3"]
    assert table["order"] == ["opencl", f"project file {project}, line 3"]
    assert table["x64"] == ["on", f"project file {project}, line 4"]
    assert table["engine"] == ["numpy", "project file"]
    assert [line.split()[1:3] for line in out.splitlines() if line.startswith("  device")] == [
        ["cpu", "environment"],
        ["cuda,", "cpu"],
    ]
    assert "  ANYDEVICE_DEVICE  cpu\n" in out


def test_every_step_of_the_choice(anydevice: Anydevice, project: Path) -> None:
    project.write_text('device = "tpu"\n')
    out = anydevice.text("config", "--why", cuda=0)
    assert out.partition("Steps of the choice\n")[2].splitlines() == [
        "✗ project file        tpu   this machine has no tpu: not in this fake machine",
        "✓ order of backends   cpu   cpu is usable",
        "",
        "Chosen: cpu, because no accelerator is in this machine",
    ]


def test_steps_fit_a_narrow_terminal(project: Path) -> None:
    project.write_text('device = "tpu"\n')
    page = io.StringIO()
    with machine_of():
        command.run(Namespace(json=False, why=True), Output(page, width=60))
    steps = page.getvalue().partition("Steps of the choice\n")[2].splitlines()[:3]
    assert steps == [
        "✗ project file   tpu",
        "    this machine has no tpu: not in this fake machine",
        "✓ order of backends   cpu   cpu is usable",
    ]


def test_what_nobody_asked_for_is_not_marked_as_failed(anydevice: Anydevice) -> None:
    pocl = BackendScan("opencl", True, (RawDevice(0, "cpu", Facts("PoCL")),), engines=("numpy",))
    out = anydevice.text("config", "--why", scans=[pocl])
    assert "– order of backends   opencl   an OpenCL device that is the CPU" in out


def test_a_missing_engine_is_a_step(anydevice: Anydevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYDEVICE_ENGINE", "cupy")
    with machine_of():
        out = anydevice.text("config", "--why")
        data = anydevice.json("config", "--why")
    assert re.search(r"✗ ANYDEVICE_ENGINE +cupy +cpu: .*cupy", out)
    assert data["chosen"] == "cpu"
    assert data["environment"]["ANYDEVICE_ENGINE"] == "cupy"


def test_a_choice_of_nothing(anydevice: Anydevice) -> None:
    with machine_of(scans=[BROKEN_CPU]):
        out = anydevice.text("config", "--why")
        data = anydevice.json("config", "--why")
    assert out.endswith("Chosen: nothing, because no device fits\n")
    assert (data["chosen"], data["because"]) == (None, "")


def test_as_json(anydevice: Anydevice, project: Path) -> None:
    project.write_text('device = "cuda"\ntime_limit = 2\n')
    with machine_of(cuda=1):
        data = anydevice.json("config")
        with_steps = anydevice.json("config", "--why")
    assert data["settings"]["time_limit"] == 2.0
    assert data["origins"] == {"time_limit": f"project file {project}, line 2"}
    assert data["wishes"] == [
        {"source": "project file", "detail": str(project), "devices": ["cuda"]}
    ]
    files = [(f["file"], f["exists"]) for f in data["files"]]
    assert files == [("project file", True), ("user file", False)]
    assert "steps" not in data
    assert with_steps["chosen"] == "cuda:0"
    assert [step["taken"] for step in with_steps["steps"]] == [True]


def test_a_broken_file_is_named(anydevice: Anydevice, project: Path) -> None:
    project.write_text("x64 = 3\n")
    code, out, err = anydevice("config")
    assert code == 2
    assert f"  project file      {project}\n" in out
    assert f"{project}, line 1" in err
    data = anydevice.json("config", "--why", code=2)
    assert f"{project}, line 1" in data["error"]
    assert data["files"][0]["path"] == str(project)


def test_no_project_file(anydevice: Anydevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "project_file", lambda: None)
    with machine_of():
        out = anydevice.text("config")
        data = anydevice.json("config")
    assert "  project file      none here or in a folder above\n" in out
    assert data["files"][0] == {"file": "project file", "path": None, "exists": False}


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
    assert project.read_text().endswith('\ndevice = "cpu"\n')
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
def test_a_preference_as_json(anydevice: Anydevice, project: Path) -> None:
    with machine_of(cuda=2):
        data = anydevice.json("prefer", "cuda:1", "--engine", "torch")
        missing = anydevice.json("prefer", "tpu")
    known = {"device": "cuda:1", "engine": "torch", "file": str(project), "usable": True}
    assert data == {**known, "code": None, "reason": None, "chosen": "cuda:1"}
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
