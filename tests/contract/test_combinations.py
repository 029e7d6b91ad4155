"""A test of many combinations runs them all, and its failure names every one that failed."""

from __future__ import annotations

import inspect

import pytest

from .combinations import each


def test_every_combination_runs_and_those_that_fail_are_named() -> None:
    seen = []

    @each(("dtype", "size"), lambda op: [(op, 1), (op, 2)], axis=[0, 1])
    def example(op: str, dtype: str, size: int, axis: int) -> None:
        seen.append((dtype, size, axis))
        assert axis == 0 or size == 1
        if size == 1:
            pytest.skip("not here")

    with pytest.raises(BaseExceptionGroup) as caught:
        example(op="x")
    assert seen == [("x", 1, 0), ("x", 1, 1), ("x", 2, 0), ("x", 2, 1)]
    assert "1 of 4 combinations fail: dtype=x, size=2, axis=1" in str(caught.value)
    assert list(inspect.signature(example).parameters) == ["op"]


def test_it_is_skipped_where_no_combination_applies() -> None:
    @each(size=[1, 2])
    def example(size: int) -> None:
        pytest.skip(f"no {size} here")

    with pytest.raises(pytest.skip.Exception, match="no 1 here"):
        example()
