"""The pages of plans have the numbers of the plan, and bars as long as its bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from anydevice import testing
from anydevice._core.text import format_size
from anydevice._plan.plan import Plan, plan_inference
from anydevice._plan.training_plan import TrainingPlan, plan_training
from anydevice.errors import ConfigurationError, TransferError
from tests.plan.configs import LLAMA_8B
from tests.report.pages import EVIL, checked, facts, figure, rows, said

NUMBERS = {"layers": 32, "hidden": 4096, "intermediate": 11008, "heads": 32, "vocabulary": 32000}


def planned(cards: int, memory: str, model: Any = LLAMA_8B, **asked: Any) -> Plan:
    with testing.fake_machine(cuda=cards, memory=memory, engines=["torch"]):
        return plan_inference(model, "cuda", dtype="bfloat16", **{"context": 8192, **asked})


def page_of(plan: Plan | TrainingPlan, tmp_path: Path) -> ElementTree.Element:
    plan.save_html(tmp_path / "plan.html")
    return checked((tmp_path / "plan.html").read_text("utf-8"))


@pytest.mark.needs("torch")
def test_two_devices_have_a_bar_each_as_long_as_their_bytes(tmp_path: Path) -> None:
    plan = planned(2, "12GiB")
    root = page_of(plan, tmp_path)
    text = said(root)
    assert "✓ fits on cuda:0 and cuda:1 together" in text
    assert f"{format_size(plan.estimate.total)} needed context 8,192, batch 1" in text
    assert rows(root)[1][:4] == ["cuda:1", "16–31", *map(format_size, _needs(plan, 1))]
    assert facts(root)["total"] == format_size(plan.estimate.total)
    plot = figure(root, "Memory by device").find("svg")
    assert plot is not None
    bars = [each for each in plot.findall("rect") if each.get("y") == plot.find("rect").get("y")]  # type: ignore[union-attr]
    lengths = [float(each.get("width", "")) for each in bars]
    parts = plan.placements[0].parts
    sizes = [parts.weights, parts.kv_cache, parts.activations, parts.logits, parts.overhead]
    for length, size in zip(lengths, sizes, strict=True):
        assert length == pytest.approx(200 * size / (12 * 2**30), abs=0.15)
    assert len(plot.findall("path[@class='end']")) == 2


def _needs(plan: Plan, number: int) -> tuple[int, int]:
    each = plan.placements[number]
    return each.parts.total, each.free


@pytest.mark.needs("torch")
def test_what_does_not_fit_shows_what_would(tmp_path: Path) -> None:
    plan = planned(1, "16GiB")
    assert not plan.fits
    root = page_of(plan, tmp_path)
    assert "✗ does not fit on cuda:0" in said(root)
    assert root.find(".//p[@class='verdict bad']") is not None
    titles = [each.text or "" for each in figure(root, "What would fit").iter("title")]
    for each in plan.alternatives:
        assert f"needed: {format_size(each.total)}" in titles
    assert plan.alternatives


@pytest.mark.needs("torch")
def test_where_nothing_helps_it_is_said_with_the_answer(tmp_path: Path) -> None:
    text = said(page_of(planned(1, "2GiB"), tmp_path))
    assert text.index("it takes more devices") < text.index("needed context")


def test_many_cards_have_a_row_each_and_some_a_bar(tmp_path: Path) -> None:
    plan = plan_inference(LLAMA_8B, "4x8xA100-40GB", context=131072, batch=40, dtype="bfloat16")
    root = page_of(plan, tmp_path)
    assert len(rows(root)) == len(plan.placements) > 16
    bars = figure(root, "Memory by device").findall("svg/text[@class='name']")
    assert len(bars) == 16
    text = said(root)
    assert text.index("Notes") > text.index("Devices")
    assert "planned for 32xA100-40GB" in text


@pytest.mark.needs("torch")
def test_a_name_of_a_model_is_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert('x')<"
    folder.mkdir()
    import json

    (folder / "config.json").write_text(json.dumps(LLAMA_8B | {"_name_or_path": EVIL}))
    root = page_of(planned(1, "24GiB", folder), tmp_path)
    assert "<script>" in said(root)


def test_a_training_on_a_cluster(tmp_path: Path) -> None:
    plan = plan_training(cluster="16xH100-80GB", tokens="2T", context=4096, **NUMBERS)
    root = page_of(plan, tmp_path)
    text = said(root)
    assert plan.tokens_per_second is not None
    assert f"{plan.tokens_per_second:,.0f} tokens a second ± 15 %" in text
    assert f"{plan.days:,.0f} days for 2.00 T tokens" in text
    assert facts(root)["optimizer"] == format_size(plan.memory.optimizer)
    assert plan.time is not None
    bars = figure(root, "Time of a step").findall("svg/rect")
    lengths = [float(each.get("width", "")) for each in bars]
    assert lengths[0] == pytest.approx(200, abs=0.1)  # the longest: products
    assert lengths[1] / lengths[0] == pytest.approx(
        plan.time.attention / plan.time.products, rel=0.02
    )


def test_a_training_that_does_not_fit_has_no_times(tmp_path: Path) -> None:
    more = {"layers": 80, "hidden": 8192, "intermediate": 28672, "heads": 64}
    plan = plan_training(cluster="2xA100-40GB", context=4096, **NUMBERS | more)
    root = page_of(plan, tmp_path)
    text = said(root)
    assert "✗ does not fit on 2xA100-40GB" in text
    assert "Time of a step" not in text
    unknown = plan_training(cluster=f"8x{'My' * 20}Card-80GB", context=4096, **NUMBERS)
    assert "is not known: no time is planned" in said(page_of(unknown, tmp_path))


@pytest.mark.needs("torch")
def test_only_a_page_is_replaced_and_no_folder_is_made(tmp_path: Path) -> None:
    plan = planned(1, "24GiB")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"config\.json: write it to a name ending in"):
        plan.save_html(tmp_path / "config.json")
    assert (tmp_path / "config.json").read_text() == "{}"
    with pytest.raises(TransferError, match="cannot be written: there is no folder"):
        plan.save_html(tmp_path / "no" / "plan.html")
    assert not (tmp_path / "no").exists()
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(TransferError, match="cannot be written: Is a directory"):
        plan.save_html(tmp_path / "folder.html")
