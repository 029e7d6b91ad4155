"""The outcome of a proof in a notebook, and the conditions that a counterexample violates."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from anydevice import nn, proofs
from anydevice._proofs.prove import SearchProgress
from anydevice._proofs.search import Progress
from anydevice._report.proof import violated_conditions
from anydevice.errors import ConfigurationError
from tests.proofs.checking.theorems import query
from tests.report.fragments import check_labels, shown


def facts(result: Any) -> dict[str, str]:
    return dict(row for row in shown(result).rows if len(row) == 2)


def plots(result: Any) -> list[ElementTree.Element]:
    found = [
        ElementTree.fromstring(svg) for svg in re.findall("<svg.*?</svg>", result._repr_html_())
    ]
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
