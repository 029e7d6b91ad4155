"""The plots: where marks lie, what interrupts a curve, and that labels never collide."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from anydevice._report.svg import Curve, line_chart, picture
from tests.report.fragments import EVIL, check_labels

NAN, INF = math.nan, math.inf


def chart(*curves: Curve, **options: object) -> ElementTree.Element:
    root = ElementTree.fromstring(line_chart(curves, title="t", below="epoch", **options))  # type: ignore[arg-type]
    check_labels(root)
    return root


def ticks(root: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in root.findall("text") if text.get("class") == "tick"]


def heights(root: ElementTree.Element) -> list[float]:
    return [float(mark.get("cy", "")) for mark in root.findall("circle")]


def test_a_smaller_loss_lies_lower_and_marks_say_their_value() -> None:
    root = chart(Curve("loss", [(1, 3.0), (2, 2.0), (3, 1.0)]))
    first, second, third = heights(root)
    assert first < second < third
    assert second == pytest.approx((first + third) / 2)
    assert [mark.findtext("title") for mark in root.findall("circle")] == [
        "loss, epoch 1: 3",
        "loss, epoch 2: 2",
        "loss, epoch 3: 1",
    ]


def test_what_is_no_number_interrupts_a_curve() -> None:
    points = [(1, 3.0), (2, NAN), (3, 2.0), (4, 1.0), (5, INF), (6, -INF), (7, 1e305)]
    root = chart(Curve("loss", points))
    [alone, pair] = [path.get("d", "") for path in root.findall("path[@class='curve c0']")]
    assert ("L" in alone, pair.count("L")) == (False, 1)
    assert len(heights(root)) == 3
    assert "nan" not in ElementTree.tostring(root, "unicode").lower()


@pytest.mark.parametrize(
    "values",
    [
        [0.5],
        [0.0],
        [NAN],
        [2.302585, 2.3025851],
        [1.0, 1.0 + 2.3e-16],
        [5e-324, 1e-310],
        [1e-15, 3e-15],
        [1e299, -1e299],
        [1e-290, 1e290],
        [-12345.678, 98765.432],
        [100000.0, 100001.0],
    ],
    ids=str,
)
def test_no_values_break_an_axis(values: list[float]) -> None:
    root = chart(Curve("loss", list(enumerate(values, 1))))
    beside = [text.text for text in root.findall("text[@text-anchor='end']")]
    assert len(set(beside)) == len(beside) >= 1  # no two labels are alike
    assert len(heights(root)) == sum(map(math.isfinite, values))


def test_wide_ranges_are_logarithmic_unless_ends_are_given() -> None:
    wide = Curve("loss", [(1, 100.0), (2, 10.0), (3, 1.0)])
    first, second, third = heights(chart(wide))
    assert second - first == pytest.approx(third - second, abs=0.2)
    first, second, third = heights(chart(wide, ends=(0.0, 100.0)))
    assert second - first == pytest.approx(10 * (third - second), rel=0.02)


def test_epochs_are_integers_and_the_last_is_named() -> None:
    def below(count: int) -> list[str]:
        found = ticks(chart(Curve("loss", [(n, 1 / n) for n in range(1, count + 1)])))
        return found[found.index("1", 1) if found[0] == "1" else found.index("1") : -1]

    assert below(3)[-3:] == ["1", "2", "3"]
    assert below(997)[-1] == "997"
    assert all(float(each.replace(",", "")).is_integer() for each in below(12_345)[-4:])


def test_places_are_tenths_and_many_points_have_two_marks() -> None:
    told = chart(Curve("loss", [(n, 10.0**-n) for n in range(4)])).findall("path[@class='grid']")
    assert told
    assert not [path.get("d") for path in told if re.search(r"\.\d\d", path.get("d", ""))]
    assert len(heights(chart(Curve("loss", [(n, 1 / n) for n in range(1, 42)])))) == 2


def test_names_of_curves_stand_above_the_plot() -> None:
    names = ["a curve with quite a long name", "another one of them", "a third", EVIL]
    curves = [Curve(name, [(1, n), (2, n + 1)]) for n, name in enumerate(names)]
    root = chart(*curves)
    text = "".join(root.itertext())
    assert "<script>" in text
    top = min(heights(root))
    assert all(float(each.get("y", "")) < top for each in root.findall("text[@class='detail']"))


def test_a_picture_of_its_own_carries_its_style_for_light_and_dark() -> None:
    text = picture([Curve("loss", [(1, 2.0)])], title="t", below="epoch")
    assert text.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert "prefers-color-scheme: dark" in text
    assert text.count("http") == 1
