"""The progress of a search is kept with its result, in at most 401 points, and reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from anydevice import nn, proofs
from anydevice._proofs.prove import ProgressRecorder, SearchProgress
from anydevice._proofs.search import Progress


def test_a_long_course_is_thinned_and_keeps_its_end() -> None:
    reports: list[Progress] = []
    recorder = ProgressRecorder(time.monotonic(), reports.append)
    for number in range(5000):
        recorder(Progress(number / 5000, 1, number, 1.0, -1.0))
    course = recorder.progress("real")
    assert len(reports) == 5000
    assert 100 < len(course.points) <= 401
    assert course.points[-1][1].boxes == 4999
    boxes = [now.boxes for _, now in course.points]
    assert boxes == sorted(set(boxes))
    gaps = {after - before for before, after in pairwise(boxes[:-1])}
    assert len(gaps) == 1
    assert repr(course) == f"SearchProgress(real, {len(course.points)} points)"
    assert ProgressRecorder(0.0, None).progress("float32") == SearchProgress()


def test_a_counterexample_prints_its_headline() -> None:
    model = nn.build(nn.Dense(64, 3), device="cpu", seed=0)
    x = np.zeros((1, 64), "float32")
    label = int(model(x).argmax())
    result = proofs.prove(model, proofs.same_class(label), over=proofs.ball(x[0], 1.0))
    assert isinstance(result, proofs.Counterexample)
    other, more = int(result.y.argmax()), result.y.max() - result.y[label]
    assert repr(result).startswith(f"Counterexample(class {label} became {other}, by {more:.4g}, ")
    result = proofs.prove(model, proofs.within(0, 1), over=proofs.ball(x[0], 1.0))
    assert repr(result).startswith("Counterexample(Within(low=0.0, high=1.0, outputs=None) is miss")


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


def stopping(reports: list[Progress], after: int) -> Callable[[Progress], None]:
    """Return a function that stores reports, and interrupts the search after `after` of them."""

    def tell(now: Progress) -> None:
        reports.append(now)
        if len(reports) == after:
            raise KeyboardInterrupt

    return tell


def test_what_is_being_bounded_is_open() -> None:
    """Beyond 50 inputs there is one part alone, and it is in hand all the time."""
    layers = nn.Dense(60, 40), "relu", nn.Dense(40, 40), "relu", nn.Dense(40, 1)
    model = nn.build(*layers, device="cpu", seed=0)
    reports: list[Progress] = []
    over = proofs.box([-1] * 60, [1] * 60)
    result = proofs.prove(model, proofs.within(-4, 4), over, progress=stopping(reports, 3))
    assert isinstance(result, proofs.Undecided)
    assert (result.reason, result.proved_share) == ("interrupted", 0.0)
    assert [now.open for now in reports] == [1] * 3


def test_something_is_open_until_all_is_proved() -> None:
    reports: list[Progress] = []
    layers = nn.Dense(3, 16), "relu", nn.Dense(16, 16), "relu", nn.Dense(16, 1)
    model = nn.build(*layers, device="cpu", seed=0)
    over = proofs.box([-1] * 3, [1] * 3)
    result = proofs.prove(model, proofs.within(-1.4, 1.4), over, progress=reports.append)
    assert isinstance(result, proofs.Proof)
    assert len(reports) > 3
    assert max(now.open for now in reports) > 3
    assert [now.open == 0 for now in reports] == [now.share == 1.0 for now in reports]
