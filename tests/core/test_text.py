"""Figures as people read them."""

from __future__ import annotations

import pytest

from anydevice._core.text import format_rate, format_time, parse_size, percent, times
from anydevice.errors import ConfigurationError


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (123.4, "123 s"),
        (0.9999, "1.00 s"),
        (0.0123, "12.3 ms"),
        (9.999e-4, "1.00 ms"),
        (5e-10, "0.50 ns"),
        (0.0, "0.00 ns"),
    ],
)
def test_times(seconds: float, said: str) -> None:
    assert format_time(seconds) == said


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        (989e12, "989 TFLOP/s"),
        (1e15, "1.00 PFLOP/s"),
        (999.9, "1.00 kFLOP/s"),
        (0.5, "0.50 FLOP/s"),
    ],
)
def test_rates(rate: float, said: str) -> None:
    assert format_rate(rate, "FLOP/s") == said


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
