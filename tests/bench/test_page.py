"""The page is one well-formed file that asks for nothing from outside."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from anydevice._bench.page import page
from anydevice._bench.results import Ceiling, Results
from anydevice._report.svg import Axis, Dot, Line, dot_plot, legend, roofline
from tests.report.pages import checked, parsed

from .tiny import CEILINGS, machine, measurement, results

NASTY = "<script>alert('x')</script>&\""


def some() -> Results:
    return results(
        measurement(bound="memory", fraction=0.5, speed_up=1.0, over="cpu with numpy"),
        measurement(
            "matmul",
            0.5,
            bound="compute",
            fraction=0.9,
            speed_up=12.5,
            engine="torch",
            dtype="half",
        ),
        measurement("matmul", 0.5, bound="compute", fraction=0.4, speed_up=3.0, engine="torch"),
        measurement("sum", 2e-6, bound="memory", fraction=3.0, speed_up=1e-4, engine="torch"),
        measurement("reshape", 1e-6, moved=0, operations=0),
        measurement("erf", 0.0, state="failed", reason=NASTY),
        notes=("a note",),
        quick=True,
    )


def test_it_is_well_formed_and_holds_every_figure() -> None:
    root = checked(page(some()))
    said = " ".join(root.itertext())
    for words in ("1.00 ms", "10.0 GB/s", "100 GFLOP/s", "matmul of 1024³", "12.5 ×", "a note"):
        assert words in said
    assert len(root.findall(".//tbody/tr")) == 5
    assert len(root.findall(".//figure")) == 3
    assert len(root.findall(".//figure//svg")) == 3


def test_whatever_comes_from_outside_is_escaped() -> None:
    run = results(
        measurement(NASTY, case=NASTY, fraction=0.5, speed_up=2.0, bound="memory", engine=NASTY),
        measurement("erf", 0.0, state="failed", reason=NASTY, dtype=NASTY),
        devices=(machine(name=NASTY, driver=NASTY, engines={NASTY: NASTY}),),
        ceilings=(
            *CEILINGS,
            Ceiling("cpu", "matmul", 1e9, NASTY, NASTY, NASTY),
        ),
        notes=(NASTY,),
        system=NASTY,
    )
    old = results(measurement(NASTY, 1e-9, case=NASTY, engine=NASTY), system=NASTY + "2")
    assert NASTY in "".join(checked(page(run, old)).itertext())


def test_a_comparison_is_on_the_page() -> None:
    both = {"bound": "memory", "fraction": 0.5}
    old, new = results(measurement(**both)), results(measurement(seconds=3e-3, **both))
    root = parsed(page(new, old))
    said = " ".join(root.itertext())
    assert "Against the earlier run" in said
    assert "1 slower, 0 faster" in said
    [change] = [each for each in root.findall(".//figure") if "before" in "".join(each.itertext())]
    [dot] = change.findall(".//circle")
    axis = Axis(0.1, 10.0, 122.0, 322.0, logarithmic=True)
    assert float(dot.get("cx", "")) == pytest.approx(axis.at(3.0), abs=0.1)


def test_notes_stand_below_the_results() -> None:
    text = page(some())
    assert text.index("a note") > text.index("<figure")


def test_labels_of_roofs_lie_beside_the_plot_and_apart() -> None:
    roofs = [("float32", 1e10), ("bfloat16", 1.02e10), ("float16", 1.01e10)]
    dots = [(1e9, Dot("jax", rate)) for _, rate in roofs]
    root = ElementTree.fromstring(roofline(dots, ["jax"], 1e9, roofs, str, title="t"))
    marks = [float(mark.get("cx", "")) for mark in root.findall("circle")]
    labels = [text for text in root.findall("text") if text.get("class") == "detail"]
    assert min(float(text.get("x", "")) for text in labels) > max(marks) + 3.6
    heights = sorted(float(text.get("y", "")) for text in labels)
    assert all(below - above >= 11 for above, below in pairwise(heights))


def test_a_device_without_figures_has_no_plots() -> None:
    root = parsed(page(results(devices=(machine("cuda:0"),))))
    assert root.findall(".//figure") == []
    assert root.findall(".//table") == []
    assert "cuda:0" in " ".join(root.itertext())


def test_several_dtypes_are_told_apart() -> None:
    said = " ".join(parsed(page(some())).itertext())
    assert "half, small" in said


def test_dots_stay_on_the_axis_and_text_is_short() -> None:
    lines = [Line("a" * 40, "b" * 40, (Dot("torch", 7.0, "seven"), Dot("numpy", -1.0, "less")))]
    plot = dot_plot(lines, ["numpy", "torch"], (0.0, 1.0), [(0.0, "0 %")], title="t")
    root = ElementTree.fromstring(plot)
    circle, square = root.find("circle"), root.find("rect")
    assert circle is not None
    assert square is not None
    assert float(circle.get("cx", "")) == 122.0
    assert 300 < float(square.get("x", "")) < 340
    assert any("…" in (text.text or "") for text in root.findall("text"))


def test_a_roof_for_each_dtype() -> None:
    dots = [(0.1, Dot("jax", 1e6, "slow")), (1e9, Dot("jax", 9e9, "fast"))]
    plot = roofline(
        dots, ["numpy", "jax"], 1e9, [("float32", 1e10), ("half", 2e10)], str, title="t"
    )
    root = ElementTree.fromstring(plot)
    assert len([path for path in root.findall("path") if path.get("class") == "roof"]) == 2
    assert len([path for path in root.findall("path") if path.get("class") == "grid"]) < 20


def test_every_engine_has_a_shape_and_a_colour_of_its_own() -> None:
    names = ["numpy", "torch", "jax", "mlx", "cupy", "opencl", "another"]
    root = ElementTree.fromstring(legend(names, names))
    shapes = [ElementTree.tostring(mark) for mark in root.findall(".//*[@class]")]
    assert len(shapes) == 7
    assert len(set(shapes)) == 6  # from the seventh on they repeat
    assert shapes[6] == shapes[0]


@pytest.mark.parametrize("value", [0.0, 5.0, 10.0])
def test_an_axis_runs_from_end_to_end(value: float) -> None:
    assert Axis(0.0, 10.0, 0.0, 10.0).at(value) == value
