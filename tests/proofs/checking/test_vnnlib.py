"""VNN-LIB 1.0 and 2.0: what a file means in exact numbers, and where it is wrong."""

from __future__ import annotations

import time
from fractions import Fraction
from itertools import count
from pathlib import Path

import pytest

from anydevice._proofs.checking.network import FormatError, NotSupportedError, Query
from anydevice._proofs.checking.readers import read_vnnlib
from anydevice._proofs.files import ModelFile, read_queries
from anydevice.errors import ConfigurationError, UnsupportedError
from tests.proofs.checking.theorems import dense, query
from tests.proofs.checking.written import vnnlib_of

DECLARED = "".join(f"(declare-const {name} Real)\n" for name in ("X_0", "X_1", "Y_0", "Y_1", "Y_2"))
BOX = "(assert (and (>= X_0 -1) (<= X_0 0.1) (<= X_1 5e-1) (>= X_1 0)))\n"


def queries(text: str) -> tuple[Query, ...]:
    return read_vnnlib(DECLARED + BOX + text)[2]


MEANINGS = {
    "": (((0, 0, 0),), (0,), (0,), (False,)),
    "(assert (<= Y_0 0.1))": (((1, 0, 0),), (Fraction(-1, 10),), (0,), (False,)),
    "(assert (or (and (<= Y_0 Y_1) (> Y_2 3)) (>= Y_1 (* 2 Y_0))))": (
        ((1, -1, 0), (0, 0, -1), (2, -1, 0)),
        (0, 3, 0),
        (0, 0, 1),
        (False, True, False),
    ),
    "(assert (<= (+ Y_0 (- Y_1) 1) (- 2 (* 3 Y_2))))\n(assert (== Y_0 1))": (
        ((1, -1, 3), (1, 0, 0), (-1, 0, 0)),
        (-1, -1, 1),
        (0, 0, 0),
        (False,) * 3,
    ),
}
"""Coefficients, constants, groups and kinds: disjunctions are groups, and conjunctions rows."""


@pytest.mark.parametrize("text", MEANINGS)
def test_formulas_are_rows_of_the_rationals_that_they_name(text: str) -> None:
    """A box without outputs is bad everywhere."""
    (found,) = queries(text)
    assert found.low == (Fraction(-1), Fraction(0))
    assert found.high == (Fraction(1, 10), Fraction(1, 2))
    assert (found.coefficients, found.constants, found.group, found.strict) == MEANINGS[text]


def test_boxes_of_their_own_are_queries_of_their_own() -> None:
    text = """(assert (or (and (<= X_0 -0.5) (<= Y_0 0)) (and (>= X_0 -0.5) (<= Y_1 0))
                          (and (<= X_0 -0.5) (<= Y_2 0))))"""
    first, second = queries(text)
    assert (first.high[0], first.group, first.low[0]) == (Fraction(-1, 2), (0, 1), -1)
    assert (second.low[0], second.group) == (Fraction(-1, 2), (0,))


def test_both_versions_mean_the_same() -> None:
    question = query([-1, 0.25], [1, 0.5], [[1, -2, 0], [0, 0, 1]], [0.5, -1], [0, 0])
    for version in (1, 2):
        assert read_vnnlib(vnnlib_of(question, version)) == (2, 3, (question,))


def test_other_names_are_not_taken_for_x_and_y() -> None:
    text = vnnlib_of(query([0], [1], [[1]], [0]), version=2)
    for other in (
        text.replace("input X", "input Z"),
        text.replace("(declare-output", "(declare-input X float32 [1, 1])\n(declare-output"),
    ):
        with pytest.raises(NotSupportedError, match="one input X and one output Y"):
            read_vnnlib(other)


def test_brackets_without_end_take_no_time() -> None:
    begin = time.process_time()
    with pytest.raises((FormatError, NotSupportedError)):
        queries("[" * 300_000 + "a[" * 100_000)
    assert time.process_time() - begin < 60


def test_many_bounds_are_read_in_linear_time() -> None:
    lines = [f"(declare-const X_{k} Real)" for k in range(3000)] + ["(declare-const Y_0 Real)"]
    lines += [f"(assert (<= X_{k} 1))\n(assert (>= X_{k} 0))" for k in range(3000)]
    inputs, _, found = read_vnnlib("\n".join([*lines, "(assert (<= Y_0 0))"]))
    assert (inputs, len(found)) == (3000, 1)


WRONG = {
    "(assert (<= Y_0 1)": "a list of forms in parentheses",
    "(assert (<= Y_0 1)))": "a list of forms in parentheses",
    "(assert (<= Y_0 one))": "'one' is neither a number nor a variable",
    "(assert (<= Y_0 \u0663))": "neither a number",
    "(assert (<= Y_\u0661 1))": "neither a number",
    "(assert (<= Y_0\u00a01))": "assert",
    "(assert (<= Y_7 1))": "Y_7 was not declared",
    "(assert (<= Y_0 1e999999999))": "neither a number",
    "(assert (<= Y_0))": "assert <= Y_0",
    "(assert ())": "assert",
    "(declare-const (declare-const Y_1 Real) Real)": "declare-const",
    "(assert (<= Y_0 ]1))": "assert",
    "()": "",
    "(assert (<= X_0 -2))": "input X 0 is empty",
    "(declare-const X_2 Real)": "input X 2 is empty, or has no end",
    "(" * 100_000: "forms in parentheses",
    "(" * 9000 + ")" * 9000: "",
    "(assert (or))": "0 cases",
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:40])
def test_an_error_names_the_place(text: str) -> None:
    with pytest.raises(FormatError, match="at '.*" + WRONG[text]):
        queries(text)


UNSUPPORTED = [
    "(assert (<= (* Y_0 Y_1) 1))",
    "(assert (<= X_0 X_1))",
    "(assert (<= X_0 Y_0))",
    "(assert (< X_0 1))",
    "(check-sat)",
    "word",
    "(vnnlib-version <9.0>)",
    "(assert (<= Y_0 1) (<= Y_0 2))",
    "(declare-network N (declare-input X float16 [1, 2]) (declare-output Y float32 [1]))",
    "(assert (and" + " (or (<= Y_0 0) (<= Y_1 0))" * 40 + "))",
]


@pytest.mark.parametrize("text", UNSUPPORTED, ids=lambda text: text[:40])
def test_what_is_not_read_is_said(text: str) -> None:
    with pytest.raises((NotSupportedError, FormatError), match="at '"):
        queries(text)


def test_a_comment_ends_with_its_line() -> None:
    assert queries("; a comment\r\n(assert (<= Y_0 0))")
    for end in ("\r", "\v", "\f", "\x1c", "\x85", "\u2028"):
        with pytest.raises(FormatError, match="otherwise than with LF"):
            queries(f"; a comment{end}(assert (<= Y_0 0))\n(assert (<= Y_1 0))")


LONG = {
    "a sum": "(assert (<= (+" + " Y_0" * 70 + ") 0))",
    "rows": "(assert (<= Y_0 0))" * 35,
    "cases": "(assert (or" + " (<= Y_0 0)" * 35 + "))",
}


@pytest.mark.parametrize("name", LONG)
def test_reading_has_a_limit_of_time(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each look at the clock takes a second here; the last part of a file counts, too."""
    clock = count(0.0)
    monkeypatch.setattr("anydevice._proofs.checking.readers.time.monotonic", lambda: next(clock))
    assert queries("(assert (<= Y_0 0))")
    with pytest.raises(NotSupportedError, match="takes more than 60 s"):
        queries(LONG[name])


def test_errors_of_files_name_them(tmp_path: Path) -> None:
    file = tmp_path / "p.vnnlib"
    model = ModelFile("net.onnx", "", dense((2, 4, 3)))
    file.write_text(DECLARED + BOX + "(assert (<= Y_0 0))")
    assert len(read_queries(file, model)) == 1
    with pytest.raises(
        ConfigurationError, match=r"p\.vnnlib.*2 inputs and 3 outputs.* has 3 and 2"
    ):
        read_queries(file, ModelFile("net.onnx", "", dense((3, 4, 2))))
    with pytest.raises(UnsupportedError, match="softmax"):
        read_queries(file, ModelFile("net.onnx", "", dense((2, 4, 3)), softmax=True))
    file.write_text(DECLARED + BOX + "(assert (<= Y_0 Y_1))")
    assert read_queries(file, ModelFile("net.onnx", "", dense((2, 4, 3)), softmax=True))
    file.write_bytes(b"(assert \xff")
    with pytest.raises(ConfigurationError, match=r"p\.vnnlib"):
        read_queries(file)


def test_a_list_of_boxes_may_be_as_long_as_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no product of alternatives that would be longer than what was written."""
    number = 100
    monkeypatch.setattr("anydevice._proofs.checking.readers.MAX_CASES", number - 1)
    boxes = " ".join(
        f"(and (>= X_0 {k}) (<= X_0 {k}.5) (>= X_1 0) (<= X_1 1) (<= Y_0 {k}e-3))"
        for k in range(number)
    )
    _, _, found = read_vnnlib(DECLARED + f"(assert (or {boxes}))")
    assert len(found) == number
    assert (found[-1].low[0], found[-1].constants[0]) == (number - 1, Fraction(1 - number, 1000))
    with pytest.raises(NotSupportedError, match="more than 99 cases"):
        read_vnnlib(DECLARED + f"(assert (or {boxes})) (assert (or (<= Y_1 0) (<= Y_2 0)))")
