"""`anydevice bench`: real runs at the smallest scale, and what becomes of their results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from anydevice.cli import bench as command
from tests.cli.conftest import Anydevice
from tests.cli.pseudo_terminal import TerminalStream
from tests.machines import machine_of

SHORT = ("--quick", "--engine", "numpy", "--limit", "0.001")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings of a few kilobytes, in this process: what they are is not asked here."""
    from anydevice._bench import measure
    from anydevice._bench.measure import bench

    def here(*arguments: Any, isolated: bool, **named: Any) -> Any:
        assert isolated, "a crash must not end the command"
        return bench(*arguments, **named)

    monkeypatch.setattr(command, "bench", here)

    tiny = measure.WorkloadSizes((2**16,), 2**16, (16,))
    monkeypatch.setattr(measure, "SIZES", dict.fromkeys(measure.SIZES, tiny))


def changed(file: Path, factor: float, **more: Any) -> None:
    data = json.loads(file.read_text("utf-8"))
    for each in data["measurements"]:
        for name in ("seconds", "low", "high"):
            each[name] *= factor
        each["samples"] = 9
    file.write_text(json.dumps({**data, **more}), "utf-8")


def test_it_prints_ceilings_and_a_table(anydevice: Anydevice) -> None:
    out = anydevice.text("bench", *SHORT, "--op", "reshape,argmax")
    lines = out.splitlines()
    assert lines[0].startswith("anydevice ")
    assert any(line.startswith("  copy ") for line in lines)
    assert any(line.startswith("  matmul float32 ") for line in lines)
    assert "cpu   speed-up over cpu with numpy" in lines
    assert [line.split()[0] for line in lines[-2:]] == ["reshape", "argmax"]
    assert "\x1b" not in out


@pytest.mark.parametrize("words", [("--json",), ("--json", "-")])
def test_json_alone_is_printed(anydevice: Anydevice, words: tuple[str, ...]) -> None:
    code, out, _ = anydevice("bench", *SHORT, "--op", "reshape", *words)
    data = json.loads(out)
    assert code == 0
    assert data["format"] == 1
    assert [each["op"] for each in data["measurements"]] == ["reshape"]
    assert data["devices"][0]["engines"]["numpy"]


def test_the_results_are_kept_and_compared(anydevice: Anydevice) -> None:
    out = anydevice.text("bench", *SHORT, "--op", "argmax", "--json", "old.json")
    assert "argmax" in out  # the table is printed as well
    file = Path("old.json")
    changed(file, 1000.0)
    out = anydevice.text("bench", *SHORT, "--op", "argmax", "--compare", "old.json")
    assert "  0 slower, 1 faster, 0 lost, 0 within the noise" in out
    changed(file, 1e-6, version="0.0.9")
    out = anydevice.text("bench", *SHORT, "--op", "argmax", "--compare", "old.json", code=1)
    assert "  note: anydevice was 0.0.9" in out
    assert "  slower  argmax" in out
    words = ("bench", *SHORT, "--op", "argmax", "--compare", "old.json")
    slower = anydevice.json(*words, code=1)["comparison"]["slower"]
    assert slower[0]["op"] == "argmax"


def test_two_saved_runs_are_compared_without_measuring(anydevice: Anydevice) -> None:
    anydevice("bench", *SHORT, "--op", "argmax", "--json", "new.json")
    Path("old.json").write_bytes(Path("new.json").read_bytes())
    changed(Path("old.json"), 1e-6)
    words = ("--from", "new.json", "--compare", "old.json")
    assert "  slower  argmax" in anydevice.text("bench", *words, code=1)
    made = json.loads(Path("new.json").read_text("utf-8"))["made"]
    assert anydevice.json("bench", "--from", "new.json")["made"] == made
    assert "--quick is for measuring" in anydevice.refusal("bench", *words, "--quick")


def test_saving_changes_the_choice_and_why_says_so(anydevice: Anydevice) -> None:
    pytest.importorskip("torch", reason="a second engine of the CPU")
    words = ("--quick", "--engine", "numpy,torch", "--limit", "0.001", "--op", "argmax")
    assert "; anydevice config --why shows the effect" in anydevice.text("bench", *words, "--save")
    out = anydevice.text("config", "--why")
    [line] = [line for line in out.splitlines() if "saved measurements" in line]
    assert line.startswith("✓ saved measurements")
    fastest = line.split(" was the fastest")[0].split()[-1]
    assert fastest in ("numpy", "torch")
    assert f"{fastest} serves it, the fastest measured here" in out
    out = anydevice.text("config", "--why", "--json")
    assert "saved measurements" in {step["source"] for step in json.loads(out)["steps"]}
    assert anydevice.json("bench", *words, "--save")["measurements"]


def test_where_nothing_can_be_saved_it_says_so(anydevice: Anydevice, tmp_path: Path) -> None:
    (tmp_path / "home" / "measurements.json").mkdir(parents=True)
    code, _, err = anydevice("bench", *SHORT, "--op", "argmax", "--save")
    assert code == 2
    assert "could not be kept" in err


def test_where_nothing_can_be_measured_it_says_so(anydevice: Anydevice) -> None:
    err = anydevice.refusal("bench", *SHORT, "--op", "argmax", "--dtype", "bool")
    assert "argmax has no case in bool; it has float32" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--op", "bogus"), "there is no op 'bogus'"),
        (("--engine", "bogus"), "there is no engine 'bogus'"),
        (("--limit", "0"), "is not a number of seconds above 0"),
        (("--limit", "soon"), "is not a number of seconds above 0"),
        (("file.json",), "write --json file.json"),
        (("--compare", "nothing.json"), "nothing.json cannot be read"),
    ],
)
def test_what_is_written_wrongly(anydevice: Anydevice, words: tuple[str, ...], said: str) -> None:
    got, _, err = anydevice("bench", *words)
    assert (got, said in err) == (2, True), err


def test_a_file_that_cannot_be_written_is_said(anydevice: Anydevice) -> None:
    code, out, err = anydevice("bench", *SHORT, "--op", "argmax", "--json", "no/such/file.json")
    assert (code, out) == (2, "")  # JSON goes to the file, so that errors are for people
    assert "no/such/file.json cannot be written: there is no folder no/such" in err
    Path("folder.json").mkdir()
    err = anydevice.refusal("bench", *SHORT, "--op", "argmax", "--json", "folder.json")
    assert "folder.json cannot be written: Is a directory" in err


def test_looking_whether_a_file_can_be_written_leaves_no_trace(anydevice: Anydevice) -> None:
    Path("there.json").write_text("kept", "utf-8")
    Path("link.json").symlink_to("nowhere.json")
    for name in ("new.json", "link.json", "there.json"):
        assert anydevice("bench", *SHORT, "--op", "bogus", "--json", name)[0] == 2
    assert not Path("new.json").exists()
    assert Path("link.json").is_symlink()
    assert Path("there.json").read_text("utf-8") == "kept"


def test_runs_with_nothing_in_common_are_a_failure(anydevice: Anydevice) -> None:
    anydevice("bench", *SHORT, "--op", "argmax", "--json", "old.json")
    out = anydevice.text("bench", *SHORT, "--op", "reshape", "--compare", "old.json", code=1)
    assert "  nothing in common: that run has argmax of 16 rows of 32000 in float32" in out
    assert "this one reshape of" in out


def test_saving_one_engine_says_that_two_are_needed(anydevice: Anydevice) -> None:
    out = anydevice.text("bench", *SHORT, "--op", "argmax", "--save")
    assert "once two engines of a device are measured" in out
    assert "config --why" not in out


def test_several_devices(anydevice: Anydevice) -> None:
    with machine_of(cuda=1, engines=("numpy",)):
        out = anydevice.text("bench", *SHORT, "--op", "argmax", "--device", "cpu,cuda")
    assert "to host" in out
    assert "cuda:0   speed-up over cpu with numpy" in out


def test_progress_goes_through_a_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from anydevice.cli.main import main

    terminal = TerminalStream()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "90")
    assert main(("bench", *SHORT, "--op", "argmax")) == 0
    assert "argmax in float32 on cpu with numpy" in terminal.getvalue()
    table = terminal.getvalue().rpartition("FLOP/s")[2]
    assert "speed-up" not in table  # the terminal is narrow
