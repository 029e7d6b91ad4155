"""The progress of a training where there is no terminal, in notebooks, and its history."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import anydevice
from anydevice import nn
from anydevice._core import progress as bars
from anydevice._train.history import Epoch, History, TrainingProgress

X = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)


def trained(**options: Any) -> nn.History:
    pytest.importorskip("jax")
    given = {"epochs": 3, **options}
    model = nn.Model(nn.Dense(2, 1), device="cpu")
    here = anydevice.device("cpu", engine="jax")
    data = [(X[:8], X[:8, :1]), (X[8:], X[8:, :1])]
    run = nn.train(model, data, nn.SGD(0.1), "mean_squared_error", device=here, **given)
    return run.history


def test_each_epoch_is_a_line_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    history = trained(validation=[(X, X[:, :1])])
    assert capsys.readouterr().err.splitlines() == [
        f"epoch {each.epoch}/3  loss {each.loss:.4g}  validation {each.validation:.4g}  rate 0.1  "
        f"{each.seconds:.1f} s"
        for each in history
    ]
    trained(progress=False)
    assert not capsys.readouterr().err


def test_of_many_epochs_a_hundred_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    history = trained(epochs=205)
    lines = capsys.readouterr().err.splitlines()
    assert 60 <= len(lines) <= 100
    assert lines[0].startswith("epoch 3/205  ")
    assert lines[-1].startswith(f"epoch 205/205  loss {history[-1].loss:.4g}")


class Cell:
    """The output of a notebook's cell: what it shows, and every content it had."""

    def __init__(self) -> None:
        self.contents: list[dict[str, str]] = []
        self.outputs = 0

    def display(self, content: dict[str, str], *, raw: bool, display_id: bool) -> Cell:
        assert raw
        assert display_id
        self.outputs += 1
        self.contents.append(content)
        return self

    def update(self, content: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.contents.append(content)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    """A kernel of IPython, as far as progress sees it."""
    cell = Cell()
    shell = SimpleNamespace(kernel=object())
    ipython: Any = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    display: Any = SimpleNamespace(display=cell.display)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return cell


def test_in_a_notebook_one_output_of_the_cell_is_changed_in_place(
    cell: Cell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bars, "_EVERY", 0.0)
    history = trained()
    assert cell.outputs == 1
    assert len(cell.contents) > 1
    last = cell.contents[-1]
    assert 'value="6" max="6"' in last["text/html"]
    assert f"epoch {len(history)}/3  loss " in last["text/plain"]
    trained(progress=False)
    assert cell.outputs == 1
    assert not capsys.readouterr().err


def test_a_bar_in_a_notebook_is_changed_a_few_times_a_second(cell: Cell) -> None:
    with TrainingProgress(1, 10_000, 0) as shown:
        for position in range(1, 10_001):
            shown.tell(1, position, 0.5, 0.1, position)
    assert len(cell.contents) < 100
    assert 'value="10000" max="10000"' in cell.contents[-1]["text/html"]


def test_ipython_in_a_terminal_is_no_notebook(
    cell: Cell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ipython: Any = SimpleNamespace(get_ipython=lambda: SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    trained()
    assert not cell.contents
    assert capsys.readouterr().err.count("epoch ") == 3


def test_what_is_told_is_escaped(cell: Cell) -> None:
    with bars.ProgressBar(None, notebook=True) as bar:
        bar.tell(1, 2, "<b>&")
    assert "&lt;b&gt;&amp;" in cell.contents[0]["text/html"]
    assert cell.contents[0]["text/plain"].endswith("<b>&")


def test_loading_weights_shows_a_bar_in_a_notebook(cell: Cell, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"weight": X}, path)
    anydevice.load_weights(path, "cpu", progress=True)
    assert cell.contents[-1]["text/plain"] == "96/96 B  loading weights"
    anydevice.load_weights(path, "cpu", progress=False)
    assert cell.outputs == 1


# A history, and what training gives, print as tables


def test_a_history_prints_as_a_table_of_what_there_is() -> None:
    first, second = Epoch(1, 0.91234, None, 1e-3, 10, 1.25), Epoch(2, 0.5, None, 1e-4, 1020, 13.0)
    assert str(History([first, second])).splitlines() == [
        "epoch    loss    rate  steps  seconds",
        "    1  0.9123   0.001     10      1.2",
        "    2     0.5  0.0001  1,020     13.0",
    ]
    judged = str(History([Epoch(1, 0.5, 0.75, 0.1, 10, 1.0, left_out=3)])).splitlines()
    assert judged == [
        "epoch  loss  validation  rate  steps  left out  seconds",
        "    1   0.5        0.75   0.1     10         3      1.0",
    ]
    assert str(History()) == "no epoch has ended"


def test_of_many_epochs_the_middle_is_left_out() -> None:
    lines = str(History(Epoch(n, 1 / n, None, 0.1, n, 1.0) for n in range(1, 101))).splitlines()
    assert len(lines) == 1 + 24 + 1
    assert lines[13] == "… 76 more …"
    assert [int(line.split()[0]) for line in (lines[12], lines[14], lines[-1])] == [12, 89, 100]


def test_what_training_gives_prints_as_both_tables() -> None:
    model = nn.build(nn.Dense(2, 1), device="cpu")
    history = History([Epoch(1, 0.5, None, 0.1, 10, 1.0)])
    assert str(nn.Trained(model, history)) == f"{model}\n\n{history}"
    assert str(nn.Trained(model, history, "Ctrl-C")).endswith("\nstopped: Ctrl-C")
