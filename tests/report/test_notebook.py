"""What notebooks show of a value: well-formed, escaped, with the same numbers as its text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import anydevice
from anydevice import nn, proofs, testing
from anydevice._bench.functions import DeviceTiming, Timings
from anydevice._check.verdicts import Cell, Verdicts
from anydevice._compile.report import CompileReport, Made
from anydevice._core.device import Device
from anydevice._libraries.precision import Policy
from anydevice._proofs.prove import SearchProgress
from anydevice._proofs.search import Progress
from anydevice._report import notebook
from anydevice._report.proof import violated_conditions
from anydevice._train.history import Epoch, History
from anydevice._train.train import TrainingReport
from anydevice.errors import ConfigurationError, TransferError
from tests.proofs.checking.theorems import query
from tests.report.fragments import EVIL, check_labels, shown

ONE = History([Epoch(1, 0.5, None, 0.1, 10, 1.0)])
POLICY = Policy("float32", "float32", "float32", "float32")


def history(epochs: int = 3, **changes: Any) -> History:
    return History(Epoch(n, 1 / n, 1.5 / n, 0.1, 10 * n, 0.5) for n in range(1, epochs + 1))


def report(**changes: Any) -> CompileReport:
    policy = Policy("float32", "float32", "float32", "float32")
    made = (Made("(2, 3)", "compiled", 1.5),)
    given = {"model": "a Chain", "notes": (), **changes}
    given |= {"device": Device("cpu"), "engine": "jax", "optimize": "default", "how": "jax.jit"}
    return CompileReport(policy=policy, kept_in=None, made=made, **given)


TIMINGS = Timings(
    EVIL,
    (
        DeviceTiming("cpu", "numpy", 0.002, 0.0019, 0.0021, 0.01, 20, 1.0),
        DeviceTiming("cuda:0", None, reason=EVIL),
    ),
)
VERDICTS = Verdicts(
    (
        Cell("add", "value", "float32", "cpu", "numpy", "right", 3),
        Cell("sub", "value", "float32", "cpu", "numpy", "right", 3),
        Cell("add", "value", "float32", "cpu", EVIL, "wrong", 3, "large", EVIL, 0.5),
    ),
    2.5,
)


@pytest.mark.parametrize(
    "value",
    [
        lambda: report(model=EVIL, notes=(EVIL,)),
        lambda: TIMINGS,
        lambda: VERDICTS,
        lambda: nn.Trained(None, history(), EVIL),
    ],
    ids=["report", "timings", "verdicts", "trained"],
)
def test_nothing_of_a_name_is_run(value: Callable[[], Any]) -> None:
    page = shown(value())
    assert "script" not in page.tags
    assert "alert('x')" in page.text


@pytest.mark.needs("torch")
def test_a_device_shows_its_facts_and_one_that_is_not_there_why() -> None:
    with testing.fake_machine(cuda=[EVIL + " 80GiB"], engines=["torch"]):
        page = shown(anydevice.device("cuda"))
        assert "script" not in page.tags
        assert page.rows[1][1] == "cuda:0"
        assert "80.0 GiB" in page.rows[1][2]
        assert "engine torch" in page.text
        assert "this machine has no cuda:7" in shown(Device("cuda:7")).text


@pytest.mark.needs("torch")
def test_devices_are_a_tuple_that_shows_as_a_table() -> None:
    with testing.fake_machine(cuda=2, engines=["torch"]):
        found = anydevice.devices("cuda")
        assert isinstance(found, tuple)
        assert found == (Device("cuda:0"), Device("cuda:1"))
        assert repr(found) == repr(tuple(found))
        assert [row[1] for row in shown(found).rows[1:]] == ["cuda:0", "cuda:1"]
        assert [row[1] for row in shown(found[1:]).rows[1:]] == ["cuda:1"]
    with testing.fake_machine():
        assert "no usable device" in shown(anydevice.devices("cuda")).text


def test_a_model_shows_the_table_that_it_prints() -> None:
    model = nn.build(nn.Dense(4, 8), "relu", nn.Dense(8, 2), device="cpu")
    page = shown(model)
    printed = [re.split(r"\s{2,}", line.strip()) for line in str(model).splitlines()]
    cells = [[cell for cell in row if cell] for row in page.rows]
    assert [" ".join(row) for row in cells] == [" ".join(row) for row in printed]
    assert "Model(Chain of 3 layers" in page.text


def test_a_history_shows_its_curves_and_its_table() -> None:
    page = shown(history())
    assert page.tags.count("svg") == 1
    assert (page.tags.count("circle"), page.tags.count("rect")) == (3, 3)  # points of two curves
    assert page.rows[0] == ["epoch", "loss", "validation", "rate", "steps", "seconds"]
    assert page.rows[-1] == ["3", "0.3333", "0.5", "0.1", "30", "0.5"]
    many = shown(history(100))
    assert len(many.rows) == 1 + 24 + 1
    assert "… 76 more …" in many.text
    assert "no epoch has ended" in shown(History()).text


def test_the_picture_of_a_notebook_styles_no_other_picture() -> None:
    """A rule for all pictures of the page would give the notebook's own icons a background."""
    for style in re.findall(r"<style>(.*?)</style>", history()._repr_html_()):
        for rule in re.findall(r"([^{}]+)\{", style):
            for selector in rule.split(","):
                assert selector.strip().startswith(".anydevice"), selector


def test_what_a_notebook_shows_sets_no_background() -> None:
    """The page is dark or light as its reader likes, which no style of ours can ask."""
    assert set(re.findall(r"background[^;}]*", notebook.STYLE)) == {
        "background:none",
        "background:currentColor",
    }
    assert "prefers-color-scheme" not in history()._repr_html_()


def test_a_training_shows_its_history_and_where_it_ran() -> None:
    pytest.importorskip("jax")
    x = np.ones((8, 2), "float32")
    here = anydevice.device("cpu", engine="jax")
    model = nn.build(nn.Dense(2, 1), device="cpu")
    how: Any = {"epochs": 2, "device": here, "progress": False, "optimize": "none"}
    run = nn.train(model, [(x, x[:, :1])], nn.SGD(0.1), "mean_squared_error", **how)
    page = shown(run)
    assert page.tags.count("svg") == 1
    assert ["device", "cpu, jax"] in page.rows
    assert "cpu, jax" in shown(run.report).text


def test_a_compiled_function_and_its_report() -> None:
    page = shown(report())
    assert ["device", "cpu, jax"] in page.rows
    assert ["verified", "no"] in page.rows
    compiled = anydevice.compile(lambda x: x, device=Device("cpu", engine="numpy"))
    assert shown(compiled).rows == shown(compiled.report).rows


def test_timings_show_rows_and_reasons() -> None:
    page = shown(TIMINGS)
    assert page.rows[1] == ["cpu", "numpy", "2.00 ms", "± 5.0 %", "10.0 ms", "–", "1.00 ×"]
    assert f"cuda:0: {EVIL}" in "".join(page.texts)


def test_verdicts_are_counted_by_engine_and_failures_are_named() -> None:
    page = shown(VERDICTS)
    assert page.rows[0][:3] == ["device", "engine", "right"]
    assert page.rows[1] == ["cpu", "numpy", "2", "0"]
    assert page.rows[2] == ["cpu", EVIL, "0", "1"]
    assert "add in float32 on cpu" in page.text
    assert "✗" in page.text
    assert "✓" in shown(Verdicts(VERDICTS.cells[:2])).text


@pytest.mark.needs("torch")
def test_a_plan_shows_its_placements_and_what_would_fit() -> None:
    numbers = {"layers": 32, "hidden": 4096, "intermediate": 14336, "heads": 32}
    numbers |= {"vocabulary": 32000}
    with testing.fake_machine(cuda=1, memory="24GiB", engines=["torch"]):
        page = shown(anydevice.plan_inference(devices="cuda", context=2048, **numbers))
        assert "✓ fits on cuda:0" in page.text
        row = next(row for row in page.rows if row[0] == "cuda:0")
        assert row[1] == "0–31"
    with testing.fake_machine(cuda=1, memory="8GiB", engines=["torch"]):
        plan = anydevice.plan_inference(devices="cuda", context=2048, **numbers)
        page = shown(plan)
        assert "✗ does not fit" in page.text
        assert "It would fit with:" in page.text
        assert "weights quantized to" in page.text
        meter = re.search(r"width:(\d+)%", plan._repr_html_())
        assert meter
        assert int(meter[1]) == 100


def test_metrics_stand_behind_the_losses_and_empty_columns_are_omitted() -> None:
    history = History(
        Epoch(n, 2 / n, 3 / n, 0.1 / n, 20 * n, 0.5, n == 1, {"accuracy": 1 - 1 / n})
        for n in range(1, 5)
    )
    head, *rows = shown(history).rows
    assert head[:4] == ["epoch", "loss", "validation", "accuracy"]
    assert rows[-1] == ["4", "0.5", "0.75", "0.75", "0.025", "80", "", "0.5"]
    assert shown(ONE).rows[0] == ["epoch", "loss", "rate", "steps", "seconds"]


@pytest.mark.parametrize("losses", [[0.5], [math.nan], [1.0, math.nan, math.inf, 0.5]], ids=str)
def test_losses_that_are_no_numbers_have_no_mark(losses: list[float]) -> None:
    history = History(Epoch(n, loss, None, math.nan, n, 0.0) for n, loss in enumerate(losses, 1))
    assert shown(history).tags.count("circle") == sum(map(math.isfinite, losses))


def test_a_training_shows_its_peak_memory_and_escapes_names() -> None:
    history = History([Epoch(1, 0.5, 0.6, 0.1, 10, 1.0, 0, {EVIL: 0.5})])
    report = TrainingReport(Device("cpu"), EVIL, POLICY, "none", EVIL, peak=2**30)
    fragment = shown(nn.Trained(None, history, EVIL, report))
    assert "script" not in fragment.tags
    assert ["peak memory", "1.0 GiB, of the process"] in fragment.rows
    assert fragment.text.count("alert('x')") >= 4


def test_a_picture_is_written_and_other_files_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "a.svg", tmp_path / "a.SVG"):
        ONE.plot(path)
        assert path.read_text("utf-8").startswith("<svg ")
    nn.Trained(None, ONE).plot(tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_bytes() == (tmp_path / "a.svg").read_bytes()
    (tmp_path / "config.json").write_text("{}")
    for name in ("losses.pdf", "config.json", "losses.html"):
        with pytest.raises(ConfigurationError, match=r"ending in \.svg; a notebook shows the rest"):
            ONE.plot(tmp_path / name)
    assert (tmp_path / "config.json").read_text() == "{}"
    (tmp_path / "folder.svg").mkdir()
    for name, why in (("folder.svg", "Is a directory"), ("no/a.svg", "there is no folder")):
        with pytest.raises(TransferError, match=f"{name} cannot be written: {why}"):
            ONE.plot(tmp_path / name)
    assert not (tmp_path / "no").exists()


def facts(result: Any) -> dict[str, str]:
    return dict(row for row in shown(result).rows if len(row) == 2)


def plots(result: Any) -> list[ElementTree.Element]:
    found = [ElementTree.fromstring(x) for x in re.findall("<svg.*?</svg>", result._repr_html_())]
    for plot in found:
        check_labels(plot)
    return found


@pytest.fixture(scope="module")
def smooth() -> Any:
    return nn.build(nn.Dense(2, 4), "tanh", nn.Dense(4, 1), device="cpu", seed=0)


def test_what_was_assumed_of_smooth_functions_is_shown(smooth: Any) -> None:
    result = proofs.prove(smooth, proofs.within(-9, 9), proofs.box([-1, -1], [1, 1]))
    assert isinstance(result, proofs.Proof)
    about = facts(result)
    assert about["assumed of tanh"] == "a relative error of at most 9.5e-07"
    assert about["assumed"] == "IEEE arithmetic in float32"
    assert "network, SHA-256" in about
    assert "✓ proved for every execution in float32" in shown(result).text
    with pytest.raises(ConfigurationError, match=r"removed in 0\.3: a notebook shows the same"):
        result.save_html("proof.html")


def test_exact_arithmetic_is_named(smooth: Any) -> None:
    over = proofs.box([-1, -1], [1, 1])
    real = proofs.prove(smooth, proofs.within(-9, 9), over, precision="real")
    assert facts(real)["precision"] == "exact arithmetic"
    assert "proved exactly" in shown(real).text
    # A Lipschitz bound is about real numbers, whatever the precision.
    model = nn.build(nn.Dense(2, 4), "relu", nn.Dense(4, 1), device="cpu", seed=0)
    assert (
        facts(proofs.prove(model, proofs.lipschitz(50.0), over))["precision"] == "exact arithmetic"
    )


def test_a_counterexample_shows_its_numbers() -> None:
    x, y = np.array([0.5, 2.0]), np.array([1.5])
    result = proofs.Counterexample(x, y, 0.25, True, 0.1)
    about = facts(result)
    assert (about["x"], about["y"]) == ("[0.5, 2.0]", "[1.5]")
    assert about["violation"] == "0.25, in rational numbers"
    assert "✗ counterexample in 0.1 s" in shown(result).text
    assert plots(result) == []


@pytest.mark.parametrize("largest", [1, 2, 3, 4, 7, 1500])
def test_an_undecided_search_shows_its_course_and_counts_parts_in_integers(largest: int) -> None:
    points = tuple(
        (at, Progress(at / 4, n, 9, 1.0, -1.0)) for at, n in ((0.5, 1), (1.0, largest), (2.0, 1))
    )
    result = proofs.Undecided("time", 0.5, -1.0, 9, 3.0, SearchProgress("float32", points))
    assert "The time was up: a longer limit may decide it." in shown(result).text
    assert facts(result)["open at the end"] == "1 part"
    share, _, *open_parts = plots(result)
    titles = [mark.findtext("title") or "" for mark in share.findall("circle")]
    assert titles[-1].endswith("seconds 2: 50 %")
    assert len(open_parts) == (largest > 1)  # a level line says nothing
    for plot in open_parts:
        texts = plot.findall("text[@text-anchor='end']")
        ticks = [int((text.text or "").replace(",", "")) for text in texts]
        assert ticks == sorted(set(ticks))
        assert (ticks[0], ticks[-1] >= largest) == (0, True)
        assert len({after - before for before, after in pairwise(ticks)}) == 1


def test_the_violated_conditions_are_those_of_the_box_and_of_the_worst_group() -> None:
    elsewhere = query([5], [6], [[1, 0]], [-100])
    groups = query([0], [1], [[1, -1], [1, 0], [0, 2]], [0, -3, -0.5], [0, 1, 1])
    both = [elsewhere, groups]
    assert violated_conditions(both, [0.5], [1.0, 2.0]) == ["Y_0 <= Y_1"]
    assert violated_conditions(both, [0.5], [0.25, -1.0]) == ["Y_0 <= 3", "2 Y_1 <= 0.5"]
    assert violated_conditions(both, [5.0], [0.0, 0.0]) == ["Y_0 <= 100"]
    assert violated_conditions(both, [9.0], [0.0, 0.0]) == []
    assert violated_conditions(both, [0.5], [1.0]) == []
    below = query([0], [1], [[0, -1]], [0.5], strict=True)
    assert violated_conditions([below], [0.0], [0.0, 1.0]) == ["0.5 < Y_1"]
    mean = query([0], [1], [[0.125] * 8], [0])
    many = "0.125 Y_0 + 0.125 Y_1 + 0.125 Y_2 + 0.125 Y_3 + … 4 more <= 0"
    assert violated_conditions([mean], [0.0], [0.0] * 8) == [many]
