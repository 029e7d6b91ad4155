"""Discovery: the stages, the report, users' own probes, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import anydevice
from anydevice import testing
from anydevice._core.finding import BackendScan, Facts, RawDevice, Reason, Verdict
from anydevice._machine.discovery import discover as discovery
from anydevice._machine.discovery import libraries
from anydevice._machine.discovery.check import keep_verdict, key_of, read_verdicts
from anydevice._machine.discovery.libraries import findings_of
from anydevice._machine.hardware import readers
from anydevice._machine.settings.files import verdicts_file
from anydevice.errors import ConfigurationError, DeviceNotFoundError
from tests.conftest import Site

H200 = Facts(
    name="NVIDIA H200",
    uuid="GPU-f425bb54-c4e9-c26e-8ead-eeb33db6c9aa",
    pci_address="0000:00:06.0",
    total_memory=150754820096,
    free_memory=150109880320,
    compute_capability="9.0",
    driver_version="580.159.04",
    runtime_version="13.0",
)


def scan(*facts: Facts, backend: str = "cuda", **more: object) -> BackendScan:
    seen = tuple(RawDevice(index, "gpu", fact) for index, fact in enumerate(facts))
    return BackendScan(backend, present=True, devices=seen, **more)  # type: ignore[arg-type]


def test_a_report_has_a_finding_for_every_backend() -> None:
    report = anydevice.discover()
    assert [f.backend for f in report] == ["cuda", "rocm", "metal", "xpu", "tpu", "opencl", "cpu"]
    assert len(report) == 7
    assert "cuda" in report
    assert "nope" not in report
    assert report["cpu"].usable
    for finding in report:
        assert finding.usable or (finding.stage and finding.reason)
    with pytest.raises(ConfigurationError, match="there is no backend 'nope'"):
        report["nope"]


def test_it_is_kept_until_the_environment_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    first = anydevice.discover()
    assert anydevice.discover() is first
    assert anydevice.discover(refresh=True) is not first
    second = anydevice.discover()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert anydevice.discover() is not second


def test_devices_by_kind_and_backend() -> None:
    with testing.fake_machine(keep_settings=True, cuda=2, tpu=1):
        assert [str(d) for d in anydevice.devices()][:3] == ["cuda:0", "cuda:1", "tpu:0"]
        assert [str(d) for d in anydevice.devices("gpu")] == ["cuda:0", "cuda:1"]
        assert [str(d) for d in anydevice.devices("tpu")] == ["tpu:0"]
        assert anydevice.devices("rocm") == ()
    with pytest.raises(ConfigurationError, match="one"):
        anydevice.devices("cuda:1")
    with pytest.raises(ConfigurationError, match="no backend 'gpus'"):
        anydevice.devices("gpus")


@pytest.mark.needs("torch")
def test_a_device_that_stops_at_its_library_says_what_fixes_it() -> None:
    (finding,) = findings_of([scan(H200)])
    assert (finding.usable, finding.stage) == (False, "library")
    assert "torch 2.13.0+cpu is a CPU-only build" in map(str, finding.reasons)
    assert {"cpu_only_build", "plugin_missing"} <= {reason.code for reason in finding.reasons}
    assert finding.fix.startswith("pip install")
    device = finding.devices[0]
    assert not device.usable
    assert device.why_not == finding.reason
    assert device.facts.name == "NVIDIA H200"


def test_a_whole_backend_that_stopped_takes_its_devices_along() -> None:
    reason = Reason("driver_too_old", "driver too old", "update it")
    stopped = scan(H200, stage="driver", reason=reason)
    (finding,) = findings_of([stopped])
    assert (finding.stage, finding.reasons, finding.fix) == ("driver", (reason,), "update it")
    assert finding.devices[0].why_not == "driver too old"
    plain = finding.to_dict()
    assert (plain["code"], plain["reason"], plain["fix"]) == (
        "driver_too_old",
        "driver too old",
        "update it",
    )
    assert plain["reasons"] == [reason.to_dict()]
    seen = finding.devices[0].to_dict()
    assert (seen["code"], seen["fix"]) == ("driver_too_old", "update it")


def test_one_old_card_does_not_spoil_the_other() -> None:
    old = RawDevice(0, "gpu", H200, Reason("card_too_old", "too old"))
    mixed = BackendScan("cuda", True, (old, RawDevice(1, "gpu", H200)), engines=("numpy",))
    (finding,) = findings_of([mixed])
    assert (finding.usable, finding.stage) == (True, None)
    assert [d.usable for d in finding.devices] == [False, True]
    assert finding.devices[0].status.stage == "device"


@pytest.mark.parametrize("devices", [(), (RawDevice(0, "gpu", H200),)])
def test_a_reason_that_is_only_a_text_is_a_finding(devices: tuple[RawDevice, ...]) -> None:
    told = BackendScan("npu", True, devices, stage="driver", reason="asleep")  # type: ignore[arg-type]
    (finding,) = findings_of([told])
    assert (finding.usable, finding.code) == (False, "probe_failed")


def test_no_library_at_all_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = scan(H200, backend="npu", engines=("cupy",))
    (finding,) = findings_of([unknown])
    assert finding.reason == "no array library that drives it is installed: cupy"
    assert finding.tier == "untested"


@pytest.mark.needs("torch")
def test_a_bad_verdict_makes_a_device_unusable_with_that_reason(home: Path) -> None:
    spec = scan(H200, engines=("numpy", "torch"))
    crashed = Reason("crashed", "crashed (SIGSEGV)")
    wrong = Reason("wrong_answer", "wrong answer: off by 3")
    key = key_of("cuda", 0, H200, "numpy")
    assert keep_verdict(key, Verdict("cuda:0", "numpy", False, crashed)) is None
    (finding,) = findings_of([spec])
    assert finding.devices[0].status.engines == ("torch",)
    other = key_of("cuda", 0, H200, "torch")
    keep_verdict(other, Verdict("cuda:0", "torch", False, wrong))
    (finding,) = findings_of([spec])
    assert (finding.usable, finding.stage, finding.fix) == (False, "compute", "anydevice doctor")
    assert finding.reason == "numpy: crashed (SIGSEGV); torch: wrong answer: off by 3"
    assert [reason.code for reason in finding.reasons] == ["crashed", "wrong_answer"]
    newer = Facts(**{**H200.to_dict(), "driver_version": "590.1"})  # type: ignore[arg-type]
    (finding,) = findings_of([scan(newer, engines=("numpy", "torch"))])
    assert finding.usable


@pytest.mark.parametrize("damage", ["", "not json", "[1]", "[" * 100_000])
def test_a_damaged_file_of_verdicts_is_ignored_and_named(home: Path, damage: str) -> None:
    verdicts_file().write_text(damage)
    with pytest.warns(UserWarning, match=r"verdicts\.json is not used"):
        assert read_verdicts() == {}


_KEPT = {"device": "cpu", "engine": "numpy", "right": False, "reason": None, "seconds": 1}
_DAMAGED: list[object] = [
    3,
    {"b": 1},
    {**_KEPT, "device": ["cpu"]},
    {**_KEPT, "right": "yes"},
    {**_KEPT, "seconds": None},
    {**_KEPT, "first_call": "soon"},
    {**_KEPT, "reason": {"code": 3, "text": "x"}},
    {**_KEPT, "reason": ["code"]},
]


@pytest.mark.parametrize("damage", _DAMAGED, ids=str)
def test_a_damaged_verdict_counts_for_nothing(home: Path, damage: object) -> None:
    verdicts_file().write_text(json.dumps({"a": damage}))
    assert read_verdicts() == {}
    assert keep_verdict("k", Verdict("cpu", "numpy", True)) is None
    assert read_verdicts() == {"k": Verdict("cpu", "numpy", True)}


def test_one_verdict_that_cannot_be_read_does_not_hide_the_others(home: Path) -> None:
    bad = Verdict("cuda:0", "torch", False, Reason("wrong_answer", "off by 1"))
    keep_verdict("bad", bad)
    kept = json.loads(verdicts_file().read_text())
    kept["of another version"] = {**kept["bad"], "reason": "off by 1"}
    verdicts_file().write_text(json.dumps(kept))
    assert read_verdicts() == {"bad": bad}


def test_a_verdict_that_cannot_be_kept_is_said(home: Path) -> None:
    verdicts_file().mkdir()
    said = keep_verdict("k", Verdict("cpu", "numpy", True))
    assert str(verdicts_file()) in said


def test_one_card_seen_through_two_backends_is_one_card() -> None:
    through_opencl = Facts(name="H200 by another name", uuid=H200.uuid, total_memory=1)
    other = Facts(name="NVIDIA H200")
    spec = [
        scan(H200, engines=("numpy",)),
        scan(through_opencl, other, backend="opencl", engines=("numpy",)),
    ]
    with testing.fake_machine(keep_settings=True, scans=spec) as report:
        cards = [[str(d) for d in card] for card in report.cards]
        assert ["cuda:0", "opencl:0"] in cards
        assert ["opencl:1"] in cards
        assert report.to_dict()["cards"] == cards


def test_virtual_cpus_are_devices_for_jax_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "virtual_cpus", lambda: 3)
    report = anydevice.discover(refresh=True)
    assert [str(d) for d in report["cpu"]] == ["cpu", "cpu:1", "cpu:2"]
    assert report["cpu"].devices[2].engine == "jax"
    monkeypatch.undo()
    anydevice.discover(refresh=True)


def test_discovery_leaves_no_thread_and_no_array_library(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    anydevice.discover(refresh=True)
    assert threading.active_count() == before


def a_probe(limit: float) -> BackendScan:
    facts = Facts(name="Neural thing", total_memory=4 * 2**30)
    seen = (RawDevice(0, "gpu", facts), RawDevice(1, "gpu", facts))
    return BackendScan("npu", present=True, devices=seen, engines=("numpy",))


def a_probe_of_cuda(limit: float) -> BackendScan:
    return scan(H200, engines=("numpy",))


def a_probe_that_fails(limit: float) -> BackendScan:
    raise RuntimeError("no luck")


def a_probe_that_exits(limit: float) -> BackendScan:
    sys.exit("no licence")


def a_probe_of_an_unknown_engine(limit: float) -> BackendScan:
    return BackendScan("npu", True, (RawDevice(0, "gpu", Facts(name="N1")),), engines=("nowhere",))


def a_probe_that_lies(limit: float) -> object:
    return "everything is fine"


PROBE_MAY_END = threading.Event()


def a_probe_that_hangs(limit: float) -> BackendScan:
    PROBE_MAY_END.wait(limit + 60)
    raise AssertionError("this is not waited for")


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Installs a package that adds a probe by its entry point."""

    def install(name: str) -> None:
        site = tmp_path / "site"
        site.mkdir()
        entry = f"[anydevice.probes]\nneural = neural_probe:{name}\n"
        Site(site).distribution("neural-probe", "1.0", entry)
        module = SimpleNamespace(**{name: globals()[name]})
        monkeypatch.setitem(sys.modules, "neural_probe", module)
        monkeypatch.syspath_prepend(str(site))

    yield install
    monkeypatch.undo()
    anydevice.discover(refresh=True)


def test_a_users_own_probe_adds_a_backend(probe, home: Path) -> None:  # type: ignore[no-untyped-def]
    probe("a_probe")
    report = anydevice.discover(refresh=True)
    assert [f.backend for f in report][-2:] == ["npu", "cpu"]
    assert str(anydevice.Device("npu:1")) == "npu:1"
    assert str(anydevice.device()) == "npu:0"
    assert anydevice.device("npu:1").kind == "gpu"
    assert str(anydevice.device("gpu")) == "npu:0"
    with pytest.raises(ConfigurationError, match=r"no backend 'mpu'; the backends are .*cpu, npu"):
        anydevice.Device("mpu")


def test_a_users_probe_may_replace_our_reader(probe) -> None:  # type: ignore[no-untyped-def]
    probe("a_probe_of_cuda")
    assert anydevice.discover(refresh=True)["cuda"].usable


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a_probe_that_fails", "RuntimeError: no luck"),
        ("a_probe_that_exits", "SystemExit: no licence"),
        ("a_probe_that_lies", "instead of a BackendScan"),
        ("a_probe_that_hangs", "timed out"),
    ],
)
def test_a_probe_that_fails_spoils_nothing(probe, name: str, said: str) -> None:  # type: ignore[no-untyped-def]
    probe(name)
    PROBE_MAY_END.clear()
    anydevice.configure(time_limit=0.5)
    began = time.monotonic()
    report = anydevice.discover(refresh=True)
    assert time.monotonic() - began < 60
    PROBE_MAY_END.set()
    assert any(said in note for note in report["cpu"].notes)
    assert report["cpu"].usable


def test_a_scan_that_makes_no_sense_is_a_finding(probe) -> None:  # type: ignore[no-untyped-def]
    probe("a_probe_of_an_unknown_engine")
    report = anydevice.discover(refresh=True)
    assert not report["npu"].usable
    assert "there is no engine 'nowhere'" in (report["npu"].reason or "")
    assert report["cpu"].usable


def test_an_added_backend_that_shows_no_device_is_a_finding() -> None:
    asleep = Reason("asleep", "its driver is asleep")
    silent = BackendScan("npu", present=True, stage="driver", reason=asleep)
    with testing.fake_machine(keep_settings=True, scans=[silent]) as report:
        assert report["npu"].reason == "its driver is asleep"
        with pytest.raises(DeviceNotFoundError, match="npu stopped at driver: its driver is asl"):
            anydevice.device("npu:0")


def test_two_packages_may_share_a_probe_name(probe: Callable[[str], None], tmp_path: Path) -> None:
    probe("a_probe")
    other = tmp_path / "site" / "other_probe-1.0.dist-info"
    other.mkdir()
    (other / "entry_points.txt").write_text("[anydevice.probes]\nneural = nowhere:probe\n")
    report = anydevice.discover(refresh=True)
    assert report["npu"].usable
    assert any(note.startswith("probe neural of other-probe") for note in report["cpu"].notes)


def test_a_made_up_machine_that_fails_leaves_the_real_one() -> None:
    def broken(limit: float) -> tuple[BackendScan, ...]:
        raise RuntimeError("not today")

    with pytest.raises(RuntimeError, match="not today"), discovery.machine_from(broken):
        pass
    assert anydevice.discover()["cpu"].usable


def test_the_report_may_be_forgotten_while_others_ask_for_it() -> None:
    errors: list[BaseException] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            try:
                anydevice.discover()
            except BaseException as error:
                errors.append(error)
                return

    with testing.fake_machine(keep_settings=True):
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(50):
            discovery.forget_report()
            time.sleep(0.002)
        over.set()
        for thread in threads:
            thread.join()
    assert errors == []


@pytest.mark.parametrize("begins", [True, False])
def test_a_reader_that_fails_is_a_finding(begins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*limit: float) -> BackendScan:
        raise OSError("sysfs is gone")

    monkeypatch.setitem(readers.READERS, "rocm", (lambda: broken) if begins else broken)
    finding = anydevice.discover(refresh=True)["rocm"]
    assert (finding.present, finding.stage) == (True, "driver")
    assert finding.reason == "reading it failed: OSError: sysfs is gone"
    monkeypatch.undo()
    anydevice.discover(refresh=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:os.fork.*:RuntimeWarning")
def test_a_fork_while_another_thread_discovers_does_not_hang() -> None:
    thread = threading.Thread(target=lambda: anydevice.discover(refresh=True))
    thread.start()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if anydevice.discover()["cpu"].usable else 1
        finally:
            os._exit(status)
    thread.join()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert status == 0
            return
        time.sleep(0.05)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    pytest.fail("the forked child waited for a lock that is free")


def test_added_backends_are_unknown_while_looking() -> None:
    discovery._looking.now = True
    try:
        assert discovery.added_backends() == frozenset()
    finally:
        discovery._looking.now = False
