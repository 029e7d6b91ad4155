"""How a search went is kept with its result, at not too many times, and told on."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

from anydevice import nn, proofs
from anydevice.proofs.outcome import Course, CourseRecorder
from anydevice.proofs.search import Progress
from tests.rendering.pages import checked, facts, said


def test_a_long_course_is_thinned_and_keeps_its_end() -> None:
    told: list[Progress] = []
    recorder = CourseRecorder(time.monotonic(), told.append)
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
    assert repr(course) == f"Course(real, {len(course.points)} points)"
    assert CourseRecorder(0.0, None).course("float32") == Course()


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
