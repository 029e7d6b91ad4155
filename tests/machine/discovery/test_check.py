"""Checking a device in a child: right, wrong, crashing and hanging engines, and the verdict."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import pytest

import anydevice
from anydevice import testing
from anydevice._core.child.parent import Outcome
from anydevice._core.finding import Reason, Verdict
from anydevice._machine.discovery import check as checking
from anydevice._machine.discovery import matmul_probe as trial
from anydevice._machine.discovery.check import keep_verdict, key_of, read_verdicts
from anydevice.errors import DeviceNotFoundError, UnsupportedError


@pytest.fixture(autouse=True)
def own_home(home: Path) -> None:
    pass


def test_every_engine_of_the_cpu_multiplies_right() -> None:
    device = anydevice.device("cpu")
    verdict = device.check()
    assert verdict
    assert (verdict.device, verdict.engine, verdict.reason) == ("cpu", "numpy", None)
    assert verdict.seconds > 0
    assert verdict.first_call is not None
    assert list(read_verdicts().values()) == [verdict]


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(name, marks=pytest.mark.needs(name))
        for name in ("numpy", "torch", "jax", "mlx")
    ],
)
def test_the_trial_itself(engine: str) -> None:
    steps: list[str] = []
    before = list(sys.path)
    answer = trial.ask(steps.append, {"path": before, "engine": engine, "device": "cpu"})
    assert "cpu" in answer["where"]
    assert answer["largest_error"] == 0
    assert f"importing {engine}" in steps
    assert "the second multiplication" in steps


def test_opencl_is_checked_too() -> None:
    if not anydevice.devices("opencl"):
        pytest.skip("no OpenCL driver is installed")
    assert anydevice.device("opencl").check()


def test_an_engine_that_does_not_drive_it_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="cupy does not drive cpu") as refused:
        anydevice.device("cpu").check("cupy")
    assert refused.value.absent is not None
    with pytest.raises(DeviceNotFoundError, match="cannot be checked") as missing:
        anydevice.Device("cuda:9").check()
    assert {finding.backend for finding in missing.value.findings} >= {"cuda", "cpu"}


FAULTY = """
import numpy
from contextlib import nullcontext
from anydevice._core.device import Device

class Faulty:
    name = "faulty"
    def devices(self): return (Device("cpu"),)
    def native(self, device): return None
    def owns(self, x): return isinstance(x, numpy.ndarray)
    def devices_of(self, x): return (Device("cpu"),)
    def place(self, x, device, narrow=False): return numpy.array(x)
    def to_host(self, x): return x
    def move(self, x, device): return x
    def synchronize(self, device): pass
    def default_scope(self, device): return nullcontext()
    def matmul(self, a, b):
        {body}

from anydevice._machine.engines.registry import EngineRow
ENGINE = Faulty()
TARGET = "faulty_library:ENGINE"
ROW = EngineRow("faulty", "Faulty", "faulty_library", TARGET, ("faulty",), ("cpu",))
"""

BODIES = {
    "wrong": ("return a @ b + 1", "wrong answer: off by 1"),
    "raises": ("raise RuntimeError('no kernel image')", "RuntimeError: no kernel image"),
    "crashes": ("import os; os.kill(os.getpid(), 11)", "crashed (SIGSEGV) in the first mult"),
    "hangs": ("import time; time.sleep(60)", "timed out (no answer within 2 s)"),
    "exits": ("import os; os._exit(7)", "exit code 7"),
}


@pytest.fixture
def faulty(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An engine of another package, found by its entry point, whose product goes wrong."""
    body, said = BODIES[request.param]
    site = tmp_path / "site"
    info = site / "faulty-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[anydevice.engines]\nfaulty = faulty_library:ROW\n")
    (site / "faulty_library.py").write_text(FAULTY.replace("{body}", body))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "faulty_library", raising=False)
    return said


@pytest.mark.parametrize("faulty", list(BODIES), indirect=True)
def test_a_bad_answer_is_a_lasting_verdict(faulty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "_LONG_ENOUGH", 1.0)
    device = anydevice.discover(refresh=True)["cpu"].devices[0]
    assert "faulty" in checking.engines_to_check(device)
    # A busy machine may need longer than that to start the child.
    verdict = device.check("faulty", limit=2.0 if "timed out" in faulty else 60.0)
    assert not verdict
    assert faulty in verdict.reason.text
    again = anydevice.discover(refresh=True)["cpu"].devices[0]
    assert "faulty" not in again.status.engines
    assert "faulty" in checking.engines_to_check(again)
    assert again.usable
    with pytest.raises(DeviceNotFoundError):
        anydevice.device("cpu", engine="faulty")
    sys.modules.pop("faulty_library", None)
    anydevice.discover(refresh=True)


@pytest.mark.needs("torch")
def test_a_fake_device_is_checked_where_its_data_lies_and_no_verdict_is_kept() -> None:
    with testing.fake_machine(keep_settings=True, cuda=1):
        verdict = anydevice.device("cuda").check("torch")
    assert verdict, verdict.reason
    assert verdict.device == "cuda:0"
    assert read_verdicts() == {}


def test_an_answer_from_another_device_is_not_right() -> None:
    answer = {"largest_error": 0.0, "where": ["cpu"], "first_call": 0.1, "second_call": 0.1}
    outcome = Outcome("answered", answer=answer)
    verdict = checking._judge(anydevice.Device("cuda:0"), "torch", "cuda:0", outcome, 1.0)
    assert not verdict.right
    assert verdict.reason == Reason("computed_elsewhere", "it computed on cpu instead")


@pytest.mark.parametrize("how", ["failed", "crashed"])
@pytest.mark.parametrize(
    "said", ["OutOfMemoryError: CUDA out of memory", "CL_OUT_OF_MEMORY", "no memory left"]
)
def test_a_full_card_is_not_a_bad_one(said: str, how: Literal["failed", "crashed"]) -> None:
    outcome = Outcome(how, error=said)
    full = checking._judge(anydevice.Device("cuda:0"), "torch", "cuda:0", outcome, 1.0)
    assert full.to_dict()["code"] == "out_of_memory"
    assert not checking._is_conclusive(full, 120)


@pytest.mark.parametrize(
    ("code", "limit", "kept"),
    [
        ("not_started", 120, False),
        ("out_of_memory", 120, False),
        ("timed_out", 5, False),
        ("timed_out", 120, True),
        ("wrong_answer", 5, True),
    ],
)
@pytest.mark.parametrize("text", ["off by 1", "timed out", "not started", "CUDA out of memory"])
def test_the_code_decides_what_is_kept(code: str, limit: float, kept: bool, text: str) -> None:
    verdict = Verdict("cuda:0", "torch", False, Reason(code, text))
    assert checking._is_conclusive(verdict, limit) is kept


def test_a_verdict_that_cannot_be_kept_warns(home: Path) -> None:
    (home / "verdicts.json").mkdir()
    with pytest.warns(UserWarning, match=r"could not be kept|is not used \(Is a directory\)"):
        assert anydevice.device("cpu").check()


def test_nothing_can_be_checked_where_nothing_is() -> None:
    assert checking.engines_to_check(anydevice.Device("cuda:9")) == ()


@pytest.mark.parametrize("faulty", ["hangs"], indirect=True)
def test_what_was_given_too_little_time_is_not_condemned(faulty: str) -> None:
    verdict = anydevice.discover(refresh=True)["cpu"].devices[0].check("faulty", limit=2.0)
    assert faulty in str(verdict.reason)
    again = anydevice.discover(refresh=True)["cpu"].devices[0].status
    assert "faulty" in again.engines
    assert read_verdicts() == {}


def test_numpy_on_the_cpu_stays_whatever_was_said_of_it() -> None:
    device = anydevice.discover()["cpu"].devices[0]
    wrong = Reason("wrong_answer", "wrong")
    for engine in ("numpy", "torch"):
        key = key_of("cpu", 0, device.facts, engine)
        keep_verdict(key, Verdict("cpu", engine, False, wrong))
    again = anydevice.discover(refresh=True)["cpu"].devices[0]
    assert again.usable
    assert "numpy" in again.status.engines
    assert "torch" not in again.status.engines


@pytest.mark.needs("torch")
def test_a_chosen_device_knows_of_a_check_that_came_later() -> None:
    chosen = anydevice.device("cpu", engine="torch")
    key = key_of("cpu", 0, chosen.facts, "torch")
    keep_verdict(key, Verdict("cpu", "torch", False, Reason("wrong_answer", "wrong")))
    anydevice.discover(refresh=True)
    assert "torch" not in chosen.status.engines
