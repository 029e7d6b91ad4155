"""Drawn calls: every op has a space, the seed decides, and a wrong call is made small."""

from __future__ import annotations

import re
from math import prod

import numpy as np
import pytest

from anydevice import _ops as ops
from anydevice._check import checks as trials
from anydevice._check.cases.case import LAYOUTS, Row
from anydevice._check.cases.drawn import Space, draw_cases
from anydevice._check.cases.table import TABLE
from anydevice._check.verdicts import Cell, Verdicts
from anydevice._check.verify import verify
from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES
from anydevice._machine.engines import registry
from anydevice.cli.main import main
from tests.comparing import assert_same_bits

CPU = Device("cpu")
EVERY_ROW = pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.op)


@EVERY_ROW
def test_every_op_is_drawn_and_a_right_result_is_right(row: Row) -> None:
    assert Space(row.op, row.dtypes[0], 0).lines, "`SPACES` has no line for it"
    engine = registry.load("numpy")
    for dtype in row.dtypes:
        for case in draw_cases(row, dtype, 3, 6):
            trial = trials.prepare(row, case, dtype)
            for place, kind in enumerate(trial.types):
                with np.errstate(all="ignore"):
                    rounded = np.asarray(trial.wants[0][place]).astype(DTYPES[kind].numpy())
                assert trials._judge(trial, place, rounded) is None, case.name
            with np.errstate(all="ignore"):
                assert trials.run(trial, engine, CPU) is None, case.name


@EVERY_ROW
def test_a_large_draw_has_many_elements(row: Row) -> None:
    few = (
        "zeros",
        "ones",
        "full",
        "eye",
        "arange",
        "linspace",
        "one_hot",
        "broadcast_to",
        "mean_squared_error",
    )
    for case in draw_cases(row, row.dtypes[0], 1, 1, large=True):
        sizes = [x.size for x in row.draw(case, row.dtypes[0]).arrays()]
        assert row.op in few or sum(sizes) > 2**18, sizes


def test_the_seed_decides_and_more_draws_begin_with_the_same() -> None:
    row = TABLE["sum"]
    few, many, others = (draw_cases(row, "float32", *how) for how in ((7, 5), (7, 50), (8, 5)))
    for one, same, other in zip(few, many, others, strict=False):
        assert one.name == same.name != other.name
        a, b = (row.draw(case, "float32").arguments[0] for case in (one, same))
        assert_same_bits(a, b, because="the same seed draws the same numbers")


def test_a_run_meets_every_value_of_a_choice() -> None:
    made = [
        case.make(Space("sort", "float32", 0))
        for case in draw_cases(TABLE["sort"], "float32", 5, 192)
    ]
    places = {
        (x.ndim, how.get("axis")) for x, how in ((one.arguments[0], one.options) for one in made)
    }
    assert places >= {(rank, axis) for rank in range(1, 6) for axis in range(-rank, rank)}
    assert {1, 8, 127, 1024, 4097} <= {size for one in made for size in one.arguments[0].shape}
    assert {one.options.get("descending") for one in made} == {None, False, True}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_lie_apart_and_hold_the_same_numbers(layout: str) -> None:
    x = np.arange(24.0).reshape(2, 3, 4)
    placed = trials._place_as(layout, x, registry.load("numpy"), CPU)
    assert_same_bits(placed, x, because="only its place differs")
    assert layout == "offset" or not placed.flags.c_contiguous
    assert placed.base is not None


def four_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let softmax be wrong for four axes, of which no fixed case has so many."""
    right = ops.softmax

    def wrong(x: np.ndarray, axis: int = -1) -> np.ndarray:
        return right(x, axis) * x.dtype.type(1 if x.ndim != 4 else 1.5)

    monkeypatch.setattr(ops, "softmax", wrong)


def test_a_wrong_draw_is_made_small_and_repeated_by_its_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    four_axes(monkeypatch)
    first = verify("softmax", "cpu", "numpy", "float32", isolated=False)
    again = verify("softmax", "cpu", "numpy", "float32", isolated=False, seed=first.seed)
    (cell,), (same,) = (
        [one for one in verdicts if one.of == "value"] for verdicts in (first, again)
    )
    assert (cell.state, cell.case) == ("wrong", same.case)
    assert cell.case is not None
    assert cell.case.startswith("draw ")
    shape = re.search(r" in softmax\(float32\[([0-9, ]+)\], ", str(cell.reason))
    assert shape is not None, cell.reason
    assert prod(map(int, shape[1].split(", "))) <= 2, "one element, or two in which it is wrong"


def test_the_command_prints_how_to_draw_again(capsys: pytest.CaptureFixture[str]) -> None:
    how = ["verify", "--op", "abs", "--engine", "numpy", "--dtype", "float32", "--quick"]
    assert main([*how, "--seed", "11"]) == 0
    assert capsys.readouterr().out.endswith(f"anydevice {' '.join(how)} --seed 11\n")
    bad = Verdicts((Cell("abs", "value", "float32", "cpu", "numpy", "wrong"),), seed=3)
    assert bad.to_dict()["seed"] == 3


KEPT: dict[object, np.ndarray] = {}


def overwrite_input(x: np.ndarray) -> np.ndarray:
    result = np.asarray(np.abs(x))
    np.negative(x, out=x)
    return result


def share_output(x: np.ndarray) -> np.ndarray:
    return np.abs(x, out=KEPT.setdefault((x.shape, x.dtype), np.empty_like(x)))


def repeat_first(x: np.ndarray) -> np.ndarray:
    return KEPT.setdefault((x.shape, x.dtype), np.asarray(np.abs(x)))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (overwrite_input, "it changed its arguments"),
        (share_output, "a later call changed the result"),
        (repeat_first, "instead of"),
    ],
)
def test_what_one_call_does_to_another_is_found(
    monkeypatch: pytest.MonkeyPatch, wrong: object, reason: str
) -> None:
    KEPT.clear()
    monkeypatch.setattr(ops, "abs", wrong)
    verdicts = verify("abs", "cpu", "numpy", "float32", isolated=False)
    (cell,) = [one for one in verdicts if one.of == "value"]
    assert cell.state == "wrong"
    assert reason in str(cell.reason)
