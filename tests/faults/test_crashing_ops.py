"""Engines whose ops crash, hang or break the device: the other rows come, and the caller lives."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from shutil import copy
from typing import Any

import pytest

from anydevice._bench.measure import WorkloadSizes, bench
from anydevice._check import verify as verifying
from anydevice._check.verdicts import Cell
from anydevice._check.verify import verify, warm_up
from anydevice._core.child import parent
from anydevice._machine.choose.scope import device
from anydevice._machine.discovery import discover as discovery
from anydevice._machine.engines import registry
from anydevice._ops import trusted_kernels
from anydevice.cli.main import main
from tests.programs import run_python

TINYLIB = Path(__file__).parents[1] / "docs" / "tinylib.py"

ENGINE = """
import os, signal, time
import tinylib
from anydevice._core.device import Device
from anydevice._engines.base import BaseEngine
from anydevice._engines.host import known_dtype, private

CPU = Device("cpu")

class Primitives:
    def full(self, shape, value, dtype, like): return tinylib.full(shape, value, dtype.numpy())
    def arange(self, stop, dtype, like): return tinylib.arange(stop, dtype.numpy())
    def asarray(self, values, like): return tinylib.array(values)
    def dtype(self, x): return known_dtype(x.dtype)
    def astype(self, x, dtype): return tinylib.astype(x, dtype.numpy())
    def __getattr__(self, name): return getattr(tinylib, name)
    def exp(self, x): os.abort()
    def sin(self, x): os.kill(os.getpid(), signal.SIGSEGV)
    def cos(self, x): os._exit(3)
    def tanh(self, x): time.sleep(1000)
    def floor(self, x):
        FAILED.append(x)
        raise RuntimeError("an illegal memory access was encountered")

FAILED = []

class Planted(BaseEngine):
    name = "planted"
    ops = Primitives()
    def devices(self): return (CPU,)
    def native(self, device): return "cpu"
    def owns(self, x): return isinstance(x, tinylib.Array)
    def devices_of(self, x): return (CPU,)
    def empty(self, shape, dtype, device): return tinylib.empty(shape, dtype.numpy())
    def place(self, x, device, *, narrow=False):
        if FAILED: raise RuntimeError("the device is lost")
        return tinylib.array(private(x))
    def to_host(self, x): return x.numpy()

ENGINE = Planted()
"""

ROW = """
from anydevice._machine.engines.registry import EngineRow
ROW = EngineRow("planted", "Planted", "tinylib", "planted.arrays:ENGINE", ("planted",), ("cpu",),
                kernels="planted.fused", kernel_backends=("cpu",))
"""

FUSED = "KERNELS, FUSED = {'abs': None, 'sin': None}, {}\n"

PLANTED = ("--engine", "planted", "--dtype", "float32")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The site-packages folder of a package that adds an engine."""
    folder = tmp_path / "site"
    info = folder / "planted-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[anydevice.engines]\nplanted = planted:ROW\n")
    (folder / "planted").mkdir()
    for name, text in (("__init__", ROW), ("arrays", ENGINE), ("fused", FUSED)):
        (folder / "planted" / f"{name}.py").write_text(text)
    copy(TINYLIB, folder)
    return folder


@pytest.fixture
def planted(site: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, found by this process."""
    monkeypatch.syspath_prepend(str(site))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("planted", "tinylib")]:
        monkeypatch.delitem(sys.modules, name)
    discovery.forget_report()
    trusted_kernels.forget()
    trusted_kernels.kernel_module.cache_clear()
    registry.load.cache_clear()


def cells_of(*ops: str, **how: Any) -> dict[tuple[str, str], Cell]:
    found = verify(ops, engines="planted", dtypes="float32", **how)
    return {(cell.op, cell.of): cell for cell in found}


def command(site: Path, *words: str) -> tuple[int, list[str], str]:
    """The exit code, lines with single spaces, and errors of the command in a real process."""
    variables = {"PYTHONPATH": str(site), "PYTHONUTF8": "1"}
    ended = run_python("-m", "anydevice", *words, *PLANTED, env=variables)
    return ended.returncode, shown(ended.stdout), ended.stderr


def shown(output: str) -> list[str]:
    return [re.sub(" +", " ", line.strip()) for line in output.splitlines()]


def test_a_command_outlives_crashes_and_prints_the_other_rows(site: Path, home: Path) -> None:
    code, lines, errors = command(site, "verify", "--quick", "--op", "add,exp,sin,sqrt")
    assert lines[:5] == [
        "planted on cpu",
        "add ✓ f32",
        "exp ✗ crashed f32",
        "sin ✗ crashed f32 our kernel ✗ crashed f32",
        "sqrt ✓ f32",
    ], errors
    assert "exp in float32 on cpu with planted, two rows of 4096: crashed (SIGABRT)" in lines
    assert "sin in float32 on cpu with planted, two rows of 4096: crashed (SIGSEGV)" in lines
    assert lines[-2].startswith("2 right, 0 wrong, 0 unsupported, 3 crashed, in ")
    again = "To draw the same calls: anydevice verify --op exp,sin --device cpu --engine planted "
    assert lines[-1].startswith(f"{again}--dtype float32 --quick --seed ")
    assert code == 1


def test_a_line_is_printed_as_soon_as_its_op_is_decided(site: Path, home: Path) -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "anydevice", "verify", "--quick", *PLANTED, "--op", "add,tanh"],
        env={**os.environ, "PYTHONPATH": str(site), "PYTHONUTF8": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert running.stdout.readline() == "planted on cpu\n"
    assert running.stdout.readline().split() == ["add", "✓", "f32"]
    running.send_signal(signal.SIGINT)  # while the next one hangs
    assert running.wait(timeout=100) == 130
    running.stdout.close()


@pytest.mark.usefixtures("planted")
def test_python_outlives_them_too() -> None:
    cells = cells_of("exp", "sqrt", "sin", "abs", quick=True)
    crashed = cells["exp", "value"]
    assert (crashed.state, crashed.code, bool(crashed)) == ("crashed", "crashed", False)
    states = [cells[op, "value"].state for op in ("sqrt", "sin", "abs")]
    assert states == ["right", "crashed", "right"]


@pytest.mark.usefixtures("planted")
def test_a_benchmark_outlives_them_too() -> None:
    tiny = WorkloadSizes((2**16,), 2**16, (16,))
    how: dict[str, Any] = {"engines": "planted", "quick": True, "limit": 0.001, "sizes": tiny}
    results = bench(["exp", "sqrt"], isolated=True, **how)
    exp, sqrt = results.measurements
    assert (exp.state, exp.reason) == ("failed", "crashed (SIGABRT)")
    assert sqrt.state == "measured", sqrt.reason
    assert sqrt.seconds > 0


@pytest.mark.usefixtures("planted")
def test_a_hang_is_a_time_out(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(verifying, "QUICK_LIMIT", 5.0)
    assert main(["verify", "--quick", *PLANTED, "--op", "tanh,sqrt"]) == 1
    lines = shown(capsys.readouterr().out)
    assert lines[1:3] == ["tanh ✗ timed out f32", "sqrt ✓ f32"]
    assert (
        "tanh in float32 on cpu with planted, two rows of 4096: timed out (no answer within 5 s)"
    ) in lines
    assert lines[-2].startswith("1 right, 0 wrong, 0 unsupported, 1 timed out, in ")


@pytest.mark.usefixtures("planted")
def test_what_the_time_does_not_reach_is_not_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "QUICK_SECONDS", 1.0)
    began = time.monotonic()
    verdicts = verify(["tanh", "sqrt"], engines="planted", dtypes="float32", quick=True)
    assert time.monotonic() - began < 60
    assert [cell.state for cell in verdicts] == ["not_reached", "not_reached"]
    assert verdicts.cells[1].reason == "the 1 s of a quick run are over"
    assert not verdicts
    assert json.loads(json.dumps(verdicts.to_dict()))["right"] is False


@pytest.mark.usefixtures("planted")
def test_the_child_is_stopped_within_a_case_when_the_time_is_up(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    stopped: list[int] = []

    def noted(process: subprocess.Popen[bytes]) -> None:
        stopped.extend([process.pid] * ("stay" in process.args))  # type: ignore[operator]
        kill(process)

    kill = parent._kill
    monkeypatch.setattr(parent, "_kill", noted)
    monkeypatch.setattr(verifying, "QUICK_SECONDS", 5.0)
    began = time.monotonic()
    assert main(["verify", "--quick", *PLANTED, "--op", "sqrt,tanh,floor"]) == 3
    assert time.monotonic() - began < 100, "tanh alone takes 1000 s"
    assert "Time was up, and nothing is wrong so far" in capsys.readouterr().out
    assert stopped
    for process in stopped:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.usefixtures("planted")
def test_a_device_that_one_op_spoils_is_started_again_for_the_next() -> None:
    cells = cells_of("floor", "sqrt", quick=True)
    assert "an illegal memory access" in (cells["floor", "value"].reason or "")
    assert [cell.state for cell in cells.values()] == ["wrong", "right"]


@pytest.mark.usefixtures("planted")
def test_a_library_that_crashes_when_it_is_imported(site: Path) -> None:
    (site / "tinylib.py").write_text("import os; os.abort()\n")
    cells = cells_of("add", "sqrt", quick=True)
    assert [cell.state for cell in cells.values()] == ["crashed", "crashed"]
    assert cells["add", "value"].case == "importing planted"


@pytest.mark.usefixtures("planted")
def test_warming_up_keeps_kernels_that_are_right_and_forgets_one_that_crashes() -> None:
    kept = warm_up(device("cpu", engine="planted"), dtypes=["float32"])
    assert kept.trusted == (("abs", "float32", "cpu"),)
    assert kept.refused == (("sin", "float32", "cpu"),)
    assert kept.problem is None
    again = warm_up(device("cpu", engine="planted"), dtypes=["float32"])
    assert (again.trusted, again.refused) == (kept.trusted, kept.refused)


@pytest.mark.usefixtures("planted")
def test_an_engine_that_crashes_all_the_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "MOST_FAILURES", 2)
    cells = cells_of("exp", "cos", "sqrt", quick=True)
    assert [cell.state for cell in cells.values()] == ["crashed", "crashed", "not_reached"]
    assert "2 ops before it crashed" in (cells["sqrt", "value"].reason or "")
