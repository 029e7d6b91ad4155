"""Checks of arguments: what they take, what they return, and what their errors say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from anydevice._core import checks
from anydevice.errors import ConfigurationError


@pytest.mark.parametrize("value", [3, np.int64(3), np.array(3, np.uint8)])
def test_an_integer_of_any_library_becomes_one_of_python(value: object) -> None:
    assert type(checks.integer("n", value, 1, 3)) is int
    assert checks.integer("n", value) == 3


@pytest.mark.parametrize("value", [True, 3.0, "3", None, np.ones(2, int), np.float32(3)])
def test_nothing_else_is_an_integer(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"^n must be an integer, not "):
        checks.integer("n", value)


@pytest.mark.parametrize("value", [1, 1.0, np.float32(1), np.int8(1), np.array([1.0])])
def test_a_number_of_any_library_becomes_a_float(value: object) -> None:
    assert type(checks.number("n", value, above=0, at_most=1)) is float


@pytest.mark.parametrize(
    "value", [True, np.True_, "1", None, 1j, math.nan, math.inf, np.ones(2), 10**400]
)
def test_nothing_else_is_a_finite_number(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"^n must be a finite number, not "):
        checks.number("n", value)


def test_an_error_names_the_argument_the_bounds_and_the_value() -> None:
    cases = [
        (lambda: checks.integer("n", 0, 1), "n must be an integer of 1 or more, not 0"),
        (lambda: checks.integer("n", 9, 1, 8, note="a note"), "n must be at most 8, not 9; a note"),
        (lambda: checks.integer("n", 10**9000, 1, 8), "n must be at most 8, not a int"),
        (
            lambda: checks.number("n", -1, at_least=0),
            "n must be a finite number of 0 or more, not -1",
        ),
        (lambda: checks.number("n", 0, above=0, owner="f"), "f: n must be a finite number above 0"),
        (
            lambda: checks.number("n", 1, at_least=0, below=1),
            "n must be a number of 0 or more and b",
        ),
        (lambda: checks.one_of("n", 1, (True, "x")), "n must be True or 'x', not 1"),
        (lambda: checks.one_of("n", [], ("x",)), r"n must be 'x', not \[\]"),
    ]
    for call, message in cases:
        with pytest.raises(ConfigurationError, match=f"^{message}"):
            call()


def test_an_error_carries_where_the_value_came_from() -> None:
    assert checks.error("n", "a pair", 3).source == "n"
    assert checks.error("n", "a pair", 3, owner="Dense").source == "Dense.n"


def test_a_boolean_is_neither_an_integer_nor_a_number() -> None:
    assert [checks.is_integer(value) for value in (1, True, 1.0)] == [True, False, False]
    assert [checks.is_number(value) for value in (1, 1.0, True, "1")] == [True, True, False, False]
