"""The page of a training has the numbers of its history, whatever they are."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from anydevice import nn
from anydevice._core.device import Device
from anydevice._libraries.precision import Policy
from anydevice._train.history import Epoch, History
from anydevice._train.train import TrainingReport
from anydevice.errors import ConfigurationError, TransferError
from tests.report.pages import EVIL, checked, facts, figure, rows, said

POLICY = Policy("float32", "float32", "float32", "float32")


def page_of(history: History, tmp_path: Path) -> str:
    history.plot(tmp_path / "training.html")
    return (tmp_path / "training.html").read_text("utf-8")


def test_the_numbers_are_those_of_the_history(tmp_path: Path) -> None:
    history = History(
        Epoch(n, 2 / n, 3 / n, 0.1 / n, 20 * n, 0.5, n == 1, {"accuracy": 1 - 1 / n})
        for n in range(1, 5)
    )
    root = checked(page_of(history, tmp_path))
    assert len(rows(root)) == 4
    assert rows(root)[-1] == ["4", "0.5", "0.75", "0.75", "0.025", "80", "", "0.5"]
    text = said(root)
    for words in ("0.5 last loss", "0.75 best validation after epoch 4", "40 steps/s"):
        assert words in text
    assert "2.00 s in all 500 ms an epoch" in text
    assert facts(root) == {
        "steps": "80",
        "lowest loss": "0.5, in epoch 4",
        "learning rate": "0.1 to 0.025",
        "steps left out": "1, whose loss overflowed in float16",
    }
    titles = [each.text for each in root.findall(".//figcaption/b")]
    assert titles == ["Loss", "accuracy", "Learning rate", "Speed"]
    said_by_marks = [each.text or "" for each in figure(root, "Loss").iter("title")]
    assert "training, epoch 2: 1" in said_by_marks
    assert "validation, epoch 4: 0.75" in said_by_marks
    assert "Notes" not in text


def test_a_real_training_says_where_it_ran_and_what_it_took(tmp_path: Path) -> None:
    x = np.ones((8, 2), "float32")
    run = nn.train(
        nn.build(nn.Dense(2, 1), device="cpu"),
        [(x, x[:, :1])],
        nn.SGD(0.1),
        "mean_squared_error",
        epochs=2,
        optimize="none",
        progress=False,
    )
    run.plot(tmp_path / "training.html")
    root = checked((tmp_path / "training.html").read_text("utf-8"))
    assert run.report is not None
    found = facts(root)
    assert found["device"] == f"cpu, {run.report.engine}"
    assert found["model"].startswith("Model(")
    assert run.report.peak is not None
    assert run.report.peak > 2**24  # at least this interpreter
    assert found["peak memory"].endswith("iB, of the process")
    assert [row[1] for row in rows(root)] == [f"{each.loss:.4g}" for each in run.history]
    run.plot(tmp_path / "losses.svg")
    assert (tmp_path / "losses.svg").read_text("utf-8").startswith("<svg ")


@pytest.mark.parametrize("losses", [[0.5], [math.nan], [1.0, math.nan, math.inf, 0.5]], ids=str)
def test_any_losses_make_a_page_and_those_that_are_no_numbers_are_noted_below(
    losses: list[float], tmp_path: Path
) -> None:
    history = History(Epoch(n, loss, None, math.nan, n, 0.0) for n, loss in enumerate(losses, 1))
    root = checked(page_of(history, tmp_path))
    good = sum(map(math.isfinite, losses))
    assert len(figure(root, "Loss").findall("svg/circle")) == good
    text, bad = said(root), len(losses) - good
    assert ("is not finite in epoch " in text) == bool(bad)
    assert text.endswith("interrupted there.") == bool(bad)


def test_a_page_of_thousands_of_epochs_stays_small(tmp_path: Path) -> None:
    text = page_of(History(Epoch(n, 1 / n, None, 0.1, n, 0.5) for n in range(1, 5001)), tmp_path)
    assert len(text) < 400_000
    shown = [row[0] for row in rows(checked(text))]
    assert (len(shown), shown[250], shown[-1]) == (501, "…", "5000")


def test_whatever_comes_from_outside_is_escaped(tmp_path: Path) -> None:
    class Hostile:
        pass

    Hostile.__qualname__ = EVIL
    history = History([Epoch(1, 0.5, 0.6, 0.1, 10, 1.0, 0, {EVIL: 0.5})])
    report = TrainingReport(Device("cpu"), EVIL, POLICY, "none", EVIL)
    nn.Trained(Hostile(), history, EVIL, report).plot(tmp_path / "page.html")
    root = checked((tmp_path / "page.html").read_text("utf-8"))
    assert said(root).count("<script>alert('x')</script>") >= 5


def test_where_it_cannot_be_written(tmp_path: Path) -> None:
    history = History([Epoch(1, 0.5, None, 0.1, 10, 1.0)])
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(TransferError, match=r"folder\.html cannot be written: Is a directory"):
        history.plot(tmp_path / "folder.html")
    (tmp_path / "config.json").write_text("{}")
    for name in ("losses.pdf", "config.json"):
        with pytest.raises(ConfigurationError, match=r"ending in \.svg or \.html or \.htm"):
            history.plot(tmp_path / name)
    assert (tmp_path / "config.json").read_text() == "{}"
    for name in ("no/losses.svg", "no/losses.html"):
        with pytest.raises(TransferError, match=f"{name} cannot be written: there is no folder"):
            history.plot(tmp_path / name)
    assert not (tmp_path / "no").exists()


def test_endings_may_be_in_capitals(tmp_path: Path) -> None:
    history = History([Epoch(1, 0.5, None, 0.1, 10, 1.0)])
    for name, begins in (("a.HTM", "<!DOCTYPE html>"), ("a.SVG", "<svg")):
        history.plot(tmp_path / name)
        assert (tmp_path / name).read_text("utf-8").startswith(begins)
