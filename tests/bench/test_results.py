"""Two runs: what got slower beyond the noise of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anydevice._bench.results import compare_runs, from_dict, read_results
from anydevice._report.benchmark import comparison_lines
from anydevice.errors import ConfigurationError

from .tiny import machine, measurement, results


def test_the_same_run_is_alike() -> None:
    run = results(measurement(), measurement("sum"))
    comparison = compare_runs(run, run)
    assert comparison
    assert (comparison.alike, comparison.slower, comparison.faster) == (2, (), ())
    assert comparison.elsewhere == ()


def test_slower_and_faster_beyond_the_noise() -> None:
    old = results(*map(measurement, "abcd"))
    new = results(*map(measurement, "abcd", (1.2e-3, 3e-3, 0.5e-3, 1.06e-3)))
    comparison = compare_runs(old, new)
    assert not comparison
    assert [change.new.op for change in comparison.slower] == ["b", "a"]  # the worst first
    assert comparison.slower[0].factor == pytest.approx(3)
    assert [change.new.op for change in comparison.faster] == ["c"]
    assert comparison.alike == 1


def test_noise_hides_a_change() -> None:
    old = results(measurement("a", low=0.6e-3, high=1.9e-3), measurement("b", samples=1))
    new = results(measurement("a", 2e-3, low=1.5e-3, high=2.5e-3), measurement("b", 1.3e-3))
    assert compare_runs(old, new).alike == 2
    sure = compare_runs(results(measurement("b")), results(measurement("b", 1.3e-3)))
    assert len(sure.slower) == 1


def test_what_can_no_longer_be_measured_is_lost() -> None:
    old = results(measurement("a"), measurement("b"), measurement("gone"))
    broken = measurement("a", 0.0, state="failed", reason="RuntimeError: no")
    new = results(broken, measurement("b"), measurement("new"))
    comparison = compare_runs(old, new)
    assert not comparison
    assert comparison.lost == (broken,)
    assert compare_runs(results(broken), results(broken)), "it was broken before"
    assert (comparison.alike, comparison.only_before, comparison.only_now) == (1, 1, 1)
    said = "\n".join(comparison_lines(comparison, "old.json"))
    assert "lost: a in float32 on cpu with numpy: RuntimeError: no" in said
    assert "1 only there, 1 only here" in said


def test_another_machine_or_version_is_said() -> None:
    cards = machine("cuda:0", name="H100", driver="550"), machine("cuda:1", uuid="1")
    old = results(devices=(machine(), *cards))
    others = machine("cuda:0", name="H200", driver="580"), machine("cuda:1", uuid="2")
    here = machine(engines={"numpy": "2.5", "torch": "2.13", "jax": "0.10"})
    devices = (here, *others, machine("cuda:2"))
    new = results(devices=devices, quick=True, system="macOS", version="0.2.0")
    assert compare_runs(old, new).elsewhere == (
        "anydevice was 0.1.0, and is 0.2.0",
        "the system was Linux, and is macOS",
        "this run was a quick one",
        "numpy on cpu was 2.4, and is 2.5",
        "another machine: cuda:0 was H100, and is H200",
        "the driver of cuda:0 was 550, and is 580",
        "cuda:1 is another card of the same name",
    )
    assert "the earlier run was a quick one" in compare_runs(new, old).elsewhere
    said = list(comparison_lines(compare_runs(old, new), "old.json"))
    assert "  note: this run was a quick one" in said


def test_a_comparison_is_plain_data() -> None:
    lost = measurement("b", 0.0, state="failed", reason="no")
    comparison = compare_runs(
        results(measurement("a"), measurement("b")), results(measurement("a", 2e-3), lost)
    )
    data = json.loads(json.dumps(comparison.to_dict()))
    assert data["slower"][0]["op"] == "a"
    assert data["slower"][0]["factor"] == pytest.approx(2)
    names = {"device": "cpu", "engine": "numpy", "op": "b", "case": "small", "dtype": "float32"}
    assert data["lost"] == [{**names, "reason": "no"}]


def test_results_come_back_from_json_as_they_were(tmp_path: Path) -> None:
    run = results(measurement(bound="memory", fraction=0.5), notes=("a note",))
    assert from_dict(json.loads(json.dumps(run.to_dict()))) == run
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run.to_dict()), "utf-8")
    assert read_results(str(file)) == run


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not what"),
        ("[]", "'format'"),
        ('{"format": 2}', "'format'"),
        ('{"format": 1}', "KeyError"),
        ('{"format": 1, "devices": 3}', "TypeError"),
        (
            json.dumps(results(measurement(low="fast")).to_dict()),
            "the times of add are not times in seconds",
        ),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=reason):
        read_results(str(file))
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        read_results(str(tmp_path / "nothing.json"))


def test_runs_with_nothing_in_common_are_no_success() -> None:
    many = [measurement(op, engine="torch") for op in "abcd"]
    comparison = compare_runs(results(*many), results(measurement("a")))
    assert not comparison
    assert (comparison.only_before, comparison.only_now) == (4, 1)
    said = (
        "nothing in common: that run has 4 cases in float32 with torch on cpu, "
        "this one a of small in float32 with numpy on cpu"
    )
    assert comparison.to_dict()["apart"] == said
    assert list(comparison_lines(comparison, "old.json"))[-1] == f"  {said}"
    nothing = compare_runs(results(), results(measurement("a")))
    assert (nothing.apart or "").startswith("nothing in common: that run has nothing, this one a")
