"""A report in words: lines for a terminal, a table for a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from anydevice._core.finding import BackendScan, Facts, RawDevice, Reason
from anydevice._machine.choose.scope import why
from anydevice._machine.discovery import discover as discovery
from anydevice._machine.discovery.discover import Report
from anydevice._report.summary import memory_in_words, text
from tests.machines import machine_of
from tests.report.fragments import shown as table_of

GIB = 2**30


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("ANYDEVICE_DEVICE", "ANYDEVICE_ENGINE", "LOCAL_RANK", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ANYDEVICE_HOME", str(tmp_path / "home"))
    (tmp_path / "anydevice.toml").touch()  # no file above it is looked at
    monkeypatch.chdir(tmp_path)
    discovery.forget_report()
    yield
    discovery.forget_report()


def line_of(shown: str, start: str) -> str:
    return next(line for line in shown.splitlines() if line.startswith(start))


def ending_of(report: Report) -> list[str]:
    return text(report, choice=why()).partition("\n\n")[2].rpartition("\n\n")[2].splitlines()


def stopped(backend: str, names: list[str], reason: str) -> BackendScan:
    devices = tuple(
        RawDevice(index, "gpu", Facts(name), Reason("card_too_old", reason, "do this"))
        for index, name in enumerate(names)
    )
    return BackendScan(backend, True, devices)


def test_without_a_choice_the_recommended_backend_is_named() -> None:
    with machine_of(cuda=1) as report:
        assert str(report).endswith("\n\nRecommended: cuda")


def test_a_usable_device_says_who_drives_it() -> None:
    with machine_of(cuda=1, memory="80GiB", free="79GiB", engines=["numpy"]) as report:
        line = line_of(text(report), "✓ cuda:0")
        ending = ending_of(report)
    assert line.startswith("✓ cuda:0   fake CUDA device, sm 9.0   80.0 GiB, 79.0 free   numpy ")
    assert ending == ["Chosen: cuda:0, because it is the first usable one in the order of backends"]


def test_unified_memory_tiers_and_architectures_are_said() -> None:
    with machine_of(metal=1, opencl=1, engines=["numpy"]) as report:
        shown = text(report)
    assert "16.0 GiB unified, 16.0 free" in line_of(shown, "✓ metal:0")
    assert line_of(shown, "✓ metal:0").endswith("   not tested on hardware")
    assert line_of(shown, "✓ opencl:0").endswith("   experimental")
    card = RawDevice(0, "gpu", Facts("MI300X", architecture="gfx942"))
    scans = (
        BackendScan("rocm", True, (card,), engines=("numpy",)),
        BackendScan("opencl", True, (RawDevice(0, "cpu", Facts("PoCL")),), engines=("numpy",)),
    )
    with machine_of(scans=scans) as report:
        shown = text(report)
    assert line_of(shown, "✓ rocm:0").startswith("✓ rocm:0     MI300X, gfx942   numpy ")
    assert line_of(shown, "✓ opencl:0").startswith("✓ opencl:0   PoCL, a CPU   numpy ")


def test_one_card_seen_twice_says_so() -> None:
    facts = Facts("H200", uuid="GPU-1", pci_address="0000:18:00.0")
    scans = [
        BackendScan(backend, True, (RawDevice(0, "gpu", facts),), engines=("numpy",))
        for backend in ("cuda", "opencl")
    ]
    with machine_of(scans=scans) as report:
        shown = text(report)
    assert "same card as opencl:0" in line_of(shown, "✓ cuda:0")
    assert "same card as cuda:0" in line_of(shown, "✓ opencl:0")


def test_the_cpu_devices_of_jax_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    with machine_of() as report:
        shown = text(report)
    assert line_of(shown, "✓ cpu").endswith("4 devices for jax")
    assert "cpu:1" not in shown


def test_cards_with_one_and_the_same_trouble_share_its_lines() -> None:
    with machine_of(scans=[stopped("cuda", ["A", "B", "C"], "too old")]) as report:
        lines = text(report).splitlines()[2:8]
    assert lines[:3] == ["✗ cuda:0   A", "✗ cuda:1   B", "✗ cuda:2   C"]
    assert lines[3:] == [
        "           stopped at: device (each of these 3)",
        "             too old",
        "           fix: do this",
    ]


def test_a_backend_without_devices_is_a_line_of_its_own() -> None:
    reason = Reason("asleep", "it is asleep")
    broken = BackendScan("cuda", True, stage="driver", reason=reason, notes=("seen by lspci",))
    with machine_of(scans=[broken]) as report:
        shown = text(report, choice=why())
    assert shown.splitlines()[2:6] == [
        "✗ cuda",
        "           stopped at: driver",
        "             it is asleep",
        "           note: seen by lspci",
    ]
    assert shown.endswith('Chosen: cpu, because cuda stopped at "driver"')


def test_lines_are_broken_to_fit_but_commands_stay_whole() -> None:
    reason = "a sentence that goes on and on and on until nobody can read it in one line any more"
    fix = ("sudo " + "very-long-command " * 8).strip()
    scan = BackendScan("cuda", True, stage="driver", reason=Reason("asleep", reason, fix))
    with machine_of(scans=[scan]) as report:
        wide, narrow = text(report, choice=why()), text(report, choice=why(), width=60)
    assert f"             {reason}\n" in wide
    assert reason not in narrow
    assert fix in narrow
    for line in narrow.splitlines():
        assert len(line) <= 60 or "fix:" in line
    assert " ".join(narrow.split()) == " ".join(wide.split()), "no word is lost"
    starts = [line for line in narrow.splitlines() if line.startswith(" " * 13 + "a sentence")]
    assert len(starts) == 1


def test_styles_change_nothing_but_the_styles() -> None:
    with machine_of(scans=[stopped("cuda", ["A"], "too old")]) as report:
        plain = text(report)
        painted = text(report, paint=lambda words, style: f"<{style}>{words}</>")
    for style in ("good", "bad", "dim", "strong", "fix"):
        assert f"<{style}>" in painted
        painted = painted.replace(f"<{style}>", "")
    assert painted.replace("</>", "") == plain


def test_the_card_that_could_be_had_is_named_without_its_maker() -> None:
    card = BackendScan("cuda", True, (RawDevice(0, "gpu", Facts("NVIDIA A100")),))
    with machine_of(scans=[card]) as report:
        assert ending_of(report)[1] == "One command away from the A100. Then: anydevice doctor"
    with machine_of(scans=[stopped("cuda", ["NVIDIA A100"], "asleep")]) as report:
        assert ending_of(report)[1] == ("To get the A100, fix it as above. Then: anydevice doctor")
    with machine_of(scans=[stopped("quantum", ["Q1"], "asleep")]) as report:
        assert "To get the Q1, fix" in ending_of(report)[1]


def test_who_asked_for_the_cpu_is_not_told_of_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYDEVICE_DEVICE", "cpu")
    with machine_of(scans=[stopped("cuda", ["A"], "too old")]) as report:
        assert ending_of(report) == ["Chosen: cpu, because ANYDEVICE_DEVICE asks for it"]


def test_a_wish_that_was_not_met_is_said(tmp_path: Path) -> None:
    (tmp_path / "anydevice.toml").write_text('device = "tpu"\n')
    with machine_of() as report:
        assert ending_of(report) == [
            "Chosen: cpu, because no accelerator is in this machine",
            "tpu is not available, although the project's anydevice.toml asks for it. "
            "See: anydevice config --why",
        ]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (Facts("x"), ""),
        (Facts("x", total_memory=12 * GIB), "12.0 GiB"),
        (Facts("x", total_memory=12 * GIB, free_memory=GIB), "12.0 GiB, 1.0 free"),
        (Facts("x", total_memory=12 * GIB, free_memory=2**20), "12.0 GiB, 1.0 MiB free"),
        (Facts("x", memory_kind="unified", total_memory=GIB), "1.0 GiB unified"),
    ],
)
def test_memory_in_words(facts: Facts, words: str) -> None:
    assert memory_in_words(facts) == words


def test_a_notebook_shows_a_table_and_runs_nothing_from_a_name() -> None:
    evil = stopped("cuda", ["<script>alert(1)</script>"], "a < b")
    with machine_of(scans=[evil]) as report:
        table = table_of(report)
    assert "script" not in table.tags
    rows = {row[1]: row for row in table.rows}
    stop = "stopped at: device\na < b\nfix: do this"
    assert rows["cuda:0"] == ["✗", "cuda:0", "<script>alert(1)</script>", stop]
    assert rows["rocm"] == ["–", "rocm", "", "not in this machine: not in this fake machine"]
    assert rows["cpu"][0] == "✓"
    assert "recommended: cpu" in report._repr_html_()
    with machine_of(scans=[BackendScan("tpu", present=False)]) as report:
        rows = {row[1]: row for row in table_of(report).rows}
    assert rows["tpu"] == ["–", "tpu", "", ""]
