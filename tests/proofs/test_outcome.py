"""How a search went is kept with its result, at not too many times, and told on."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from anydevice import nn, proofs
from anydevice._proofs.outcome import ProgressRecorder, SearchProgress, violated
from anydevice._proofs.search import Progress
from tests.proofs.checking.theorems import query
from tests.report.pages import checked, facts, figure, said


def test_a_long_course_is_thinned_and_keeps_its_end() -> None:
    told: list[Progress] = []
    recorder = ProgressRecorder(time.monotonic(), told.append)
    for number in range(5000):
        recorder(Progress(number / 5000, 1, number, 1.0, -1.0))
    course = recorder.course("real")
    assert len(told) == 5000
    assert 100 < len(course.points) <= 401
    assert course.points[-1][1].boxes == 4999
    boxes = [now.boxes for _, now in course.points]
    assert boxes == sorted(set(boxes))
    gaps = {after - before for before, after in pairwise(boxes[:-1])}
    assert len(gaps) == 1
    assert repr(course) == f"SearchProgress(real, {len(course.points)} points)"
    assert ProgressRecorder(0.0, None).course("float32") == SearchProgress()


def test_the_share_of_several_queries_never_falls() -> None:
    shares: list[float] = []
    model = nn.build(nn.Dense(2, 8), "relu", nn.Dense(8, 3), device="cpu", seed=0)
    claim = proofs.all_of(proofs.within(-2, 2), proofs.lipschitz(50.0))
    over = proofs.box([-1, -1], [1, 1])
    result = proofs.prove(model, claim, over, progress=lambda now: shares.append(now.share))
    assert isinstance(result, proofs.Proof)
    assert shares == sorted(shares)
    assert 0.5 in shares  # the first of two is proved, and nothing of the second
    assert shares[-1] == 1.0
    assert [now.share for _, now in result.course.points] == shares


def test_what_was_assumed_of_smooth_functions_is_on_the_page(tmp_path: Path) -> None:
    model = nn.build(nn.Dense(2, 4), "tanh", nn.Dense(4, 1), device="cpu", seed=0)
    over = proofs.box([-1, -1], [1, 1])
    result = proofs.prove(model, proofs.within(-9, 9), over)
    assert isinstance(result, proofs.Proof)
    result.save_html(tmp_path / "proof.html", [("model", "<b>")])
    root = checked((tmp_path / "proof.html").read_text("utf-8"))
    about = facts(root)
    assert about["model"] == "<b>"
    assert about["assumed of tanh"] == "a relative error of at most 9.5e-07"
    assert "network, SHA-256" in about
    assert "100 % of the region proved" in said(root)
    real = proofs.prove(model, proofs.within(-9, 9), over, precision="real")
    real.save_html(tmp_path / "real.html")
    root = checked((tmp_path / "real.html").read_text("utf-8"))
    assert facts(root)["precision"] == "exact arithmetic"
    assert "proved exactly" in said(root)
    assert (root.find(".//figure") is None) == (len(real.course.points) < 2)


def test_the_arithmetic_is_that_of_the_theorem(tmp_path: Path) -> None:
    """A Lipschitz bound is about real numbers, whatever the precision that was asked for."""
    model = nn.build(nn.Dense(2, 4), "relu", nn.Dense(4, 1), device="cpu", seed=0)
    result = proofs.prove(model, proofs.lipschitz(50.0), proofs.box([-1, -1], [1, 1]))
    result.save_html(tmp_path / "proof.html")
    root = checked((tmp_path / "proof.html").read_text("utf-8"))
    assert facts(root)["precision"] == "exact arithmetic"


def stopping(told: list[Progress], after: int) -> Callable[[Progress], None]:
    """Keeps what is told, and interrupts the search after so many times."""

    def tell(now: Progress) -> None:
        told.append(now)
        if len(told) == after:
            raise KeyboardInterrupt

    return tell


def test_what_is_being_bounded_is_open(tmp_path: Path) -> None:
    """Beyond 50 inputs there is one part alone, and it is in hand all the time."""
    layers = nn.Dense(60, 40), "relu", nn.Dense(40, 40), "relu", nn.Dense(40, 1)
    model = nn.build(*layers, device="cpu", seed=0)
    told: list[Progress] = []
    over = proofs.box([-1] * 60, [1] * 60)
    result = proofs.prove(model, proofs.within(-4, 4), over, progress=stopping(told, 3))
    assert isinstance(result, proofs.Undecided)
    assert (result.reason, result.proved_share) == ("interrupted", 0.0)
    assert [now.open for now in told] == [1] * 3
    result.save_html(tmp_path / "page.html")
    root = checked((tmp_path / "page.html").read_text("utf-8"))
    assert facts(root)["open at the end"] == "1 part"
    assert "Open parts" not in said(root)  # a level line says nothing


def test_something_is_open_until_all_is_proved() -> None:
    told: list[Progress] = []
    layers = nn.Dense(3, 16), "relu", nn.Dense(16, 16), "relu", nn.Dense(16, 1)
    model = nn.build(*layers, device="cpu", seed=0)
    over = proofs.box([-1] * 3, [1] * 3)
    result = proofs.prove(model, proofs.within(-1.4, 1.4), over, progress=told.append)
    assert isinstance(result, proofs.Proof)
    assert len(told) > 3
    assert max(now.open for now in told) > 3
    assert [now.open == 0 for now in told] == [now.share == 1.0 for now in told]


@pytest.mark.parametrize("most", [2, 3, 4, 7, 1500])
def test_parts_are_counted_in_integers(tmp_path: Path, most: int) -> None:
    points = tuple(
        (at, Progress(0.0, n, 9, 1.0, -1.0)) for at, n in ((0.5, 1), (1.0, most), (2.0, 1))
    )
    result = proofs.Undecided("time", 0.0, -1.0, 9, 3.0, SearchProgress("float32", points))
    result.save_html(tmp_path / "page.html")
    root = checked((tmp_path / "page.html").read_text("utf-8"))
    texts = figure(root, "Open parts").findall("svg/text[@text-anchor='end']")
    ticks = [int((each.text or "").replace(",", "")) for each in texts]
    assert ticks == sorted(set(ticks))
    assert (ticks[0], ticks[-1] >= most) == (0, True)
    gaps = {after - before for before, after in pairwise(ticks)}
    assert len(gaps) == 1
    assert facts(root)["open at the end"] == "1 part"


def test_what_is_violated_is_that_of_the_box_and_of_the_worst_group() -> None:
    elsewhere = query([5], [6], [[1, 0]], [-100])
    groups = query([0], [1], [[1, -1], [1, 0], [0, 2]], [0, -3, -0.5], [0, 1, 1])
    asked = [elsewhere, groups]
    assert violated(asked, [0.5], [1.0, 2.0]) == ["Y_0 <= Y_1"]
    assert violated(asked, [0.5], [0.25, -1.0]) == ["Y_0 <= 3", "2 Y_1 <= 0.5"]
    assert violated(asked, [5.0], [0.0, 0.0]) == ["Y_0 <= 100"]
    assert violated(asked, [9.0], [0.0, 0.0]) == violated(asked, [0.5], [1.0]) == []
    below = query([0], [1], [[0, -1]], [0.5], strict=True)
    assert violated([below], [0.0], [0.0, 1.0]) == ["0.5 < Y_1"]
    mean = query([0], [1], [[0.125] * 8], [0])
    many = "0.125 Y_0 + 0.125 Y_1 + 0.125 Y_2 + 0.125 Y_3 + … 4 more <= 0"
    assert violated([mean], [0.0], [0.0] * 8) == [many]
