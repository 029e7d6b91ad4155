"""Figures as people read them; warnings at the file that called anydevice."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

import pytest

import anydevice
from anydevice._core.text import format_rate, format_time, parse_size, percent, times, warn
from anydevice.errors import ConfigurationError
from anydevice.testing import fake_machine

SOURCE = Path(__file__).parents[2] / "src" / "anydevice"


def test_times_and_rates() -> None:
    seconds = {123.4: "123 s", 0.9999: "1.00 s", 0.0123: "12.3 ms", 9.999e-4: "1.00 ms"}
    seconds |= {5e-10: "0.50 ns", 0.0: "0.00 ns"}
    assert {number: format_time(number) for number in seconds} == seconds
    rates = {989e12: "989 T", 1e15: "1.00 P", 999.9: "1.00 k", 0.5: "0.50 "}
    assert {rate: format_rate(rate, "FLOP/s") for rate in rates} == {
        rate: f"{said}FLOP/s" for rate, said in rates.items()
    }


def test_parts_and_factors() -> None:
    parts = {0.0: "0 %", 0.05: "5.0 %", 0.0949: "9.5 %", 0.5: "50 %", 1.2: "120 %"}
    assert {part: percent(part) for part in parts} == parts
    factors = {0.001: "0.001 ×", 0.25: "0.25 ×", 9.999: "10.0 ×", 1234.5: "1234 ×"}
    assert {factor: times(factor) for factor in factors} == factors


def test_sizes() -> None:
    sizes = [parse_size(size) for size in ("1PiB", "2 PB", "3p", "4TiB", "5", "6 b")]
    assert sizes == [2**50, 2 * 10**15, 3 * 2**50, 2**42, 5, 6]
    for wrong in ("1XiB", "1 EiB", "much", "-1GB", ""):
        with pytest.raises(ConfigurationError, match=r"B, KB, MB, GB, TB, PB, .*PiB"):
            parse_size(wrong)


def test_a_warning_of_ours_is_at_the_caller_s_line() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn("here")
        with fake_machine():
            anydevice.device()
    assert [Path(each.filename).name for each in said] == [Path(__file__).name] * 2
    assert str(said[0].message) == "here"


def test_no_other_file_counts_frames() -> None:
    found = [
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if "stacklevel" in (text := path.read_text("utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.keyword) and node.arg == "stacklevel"
    ]
    assert found == ["_core/text.py"]
