"""A history, and what training gives, print as tables."""

from __future__ import annotations

from anydevice import nn
from anydevice._train.history import Epoch, History


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
