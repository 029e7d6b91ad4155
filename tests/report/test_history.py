"""Histories in notebooks and pictures: numbers, gaps, escaped names, and files that are refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from anydevice import nn
from anydevice._core.device import Device
from anydevice._libraries.precision import Policy
from anydevice._train.history import Epoch, History
from anydevice._train.train import TrainingReport
from anydevice.errors import ConfigurationError, TransferError
from tests.report.fragments import EVIL, shown

ONE = History([Epoch(1, 0.5, None, 0.1, 10, 1.0)])
POLICY = Policy("float32", "float32", "float32", "float32")


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
