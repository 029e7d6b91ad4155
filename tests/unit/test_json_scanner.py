"""JSON read step by step, against the standard library's reader."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anydevice.transfer.json_scanner import MalformedError, Scanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)

# A busy machine is not a fault.
patiently = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def passes(text: bytes) -> bool:
    scanner = Scanner(text)
    try:
        scanner.skip()
        scanner.end()
    except MalformedError:
        return False
    return True


@patiently
@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_what_json_writes_is_passed_over(value: Any, ascii_only: bool, indent: int | None) -> None:
    assert passes(json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode())


@patiently
@given(st.dictionaries(st.text(), st.text()), st.booleans())
def test_texts_come_out_as_they_went_in(value: dict[str, str], ascii_only: bool) -> None:
    scanner = Scanner(json.dumps(value, ensure_ascii=ascii_only).encode())
    found = scanner.texts()
    scanner.end()
    assert list(found.items()) == list(value.items())


@patiently
@given(st.text(alphabet='{}[]",:\\0123456789.-+eE tfn\x00u', max_size=12))
def test_what_is_passed_over_is_json(text: str) -> None:
    if passes(text.encode()):
        json.loads(text)


@pytest.mark.parametrize("text", ["", "nul", "+1", ".5", "01", "1.", "--1", "[1,]", "{1:2}", "'a'"])
def test_what_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
    assert not passes(text.encode())


def test_values_are_nested_so_deep_and_no_deeper() -> None:
    assert passes(b"[" * 65 + b"]" * 65)
    assert not passes(b"[" * 66 + b"]" * 66)


@patiently
@given(st.lists(st.integers(0, 2**64 - 1), max_size=40), st.sampled_from([None, 1]))
def test_lists_of_whole_numbers_come_out_as_they_went_in(
    numbers: list[int], indent: int | None
) -> None:
    scanner = Scanner(json.dumps(numbers, indent=indent).encode())
    assert scanner.wholes(40) == tuple(numbers)
    scanner.end()


def test_a_list_of_numbers_ends_where_it_must() -> None:
    with pytest.raises(MalformedError, match="the end of a list of 2 at byte 7, found '3]'"):
        Scanner(b"[1, 2, 3]").wholes(2)
    with pytest.raises(MalformedError, match=r"below 2 to the 64th at byte 4, found '1844"):
        Scanner(b"[1, 18446744073709551616]").wholes(2)
