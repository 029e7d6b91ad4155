"""What notebooks show of a value: well-formed, escaped, with the same numbers as its text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn, testing
from anydevice._bench.functions import DeviceTiming, Timings
from anydevice._check.verdicts import Cell, Verdicts
from anydevice._compile.report import CompileReport, Made
from anydevice._core.device import Device
from anydevice._libraries.precision import Policy
from anydevice._report import notebook
from anydevice._train.history import Epoch, History
from tests.report.fragments import shown

EVIL = "<script>alert('x')</script>&"


def history(epochs: int = 3, **changes: Any) -> History:
    return History(Epoch(n, 1 / n, 1.5 / n, 0.1, 10 * n, 0.5) for n in range(1, epochs + 1))


def report(**changes: Any) -> CompileReport:
    policy = Policy("float32", "float32", "float32", "float32")
    made = (Made("(2, 3)", "compiled", 1.5),)
    given = {"model": "a Chain", "notes": (), **changes}
    return CompileReport(
        device=Device("cpu"),
        engine="jax",
        optimize="default",
        policy=policy,
        how="jax.jit",
        kept_in=None,
        made=made,
        **given,
    )


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
    run = nn.train(
        model,
        [(x, x[:, :1])],
        nn.SGD(0.1),
        "mean_squared_error",
        epochs=2,
        device=here,
        progress=False,
        optimize="none",
    )
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
    assert page.rows[1] == ["cpu", "numpy", "2.00 ms", "± 5.0 %", "10.0 ms", "1.00 ×"]
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
    numbers = {
        "layers": 32,
        "hidden": 4096,
        "intermediate": 14336,
        "heads": 32,
        "vocabulary": 32000,
    }
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
        assert "layers quantized to" in page.text
        meter = re.search(r"width:(\d+)%", plan._repr_html_())
        assert meter
        assert int(meter[1]) == 100
