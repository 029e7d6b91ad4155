"""Every public op is in the table of cases and in the reference, and nothing else is."""

from __future__ import annotations

import inspect

import pytest

from anydevice import ops
from anydevice._check.cases.table import TABLE
from anydevice._check.reference import REFERENCES

PUBLIC = sorted(ops.__all__)


def test_every_op_has_a_row_and_every_row_an_op() -> None:
    assert sorted(TABLE) == PUBLIC


def test_every_op_has_a_reference_and_every_reference_an_op() -> None:
    assert sorted(REFERENCES) == PUBLIC


@pytest.mark.parametrize("op", PUBLIC)
def test_every_op_has_cases_in_every_type_of_its_row(op: str) -> None:
    row = TABLE[op]
    assert row.cases
    for dtype in row.dtypes:
        assert row.cases_for(dtype), dtype
    names = [case.name for case in row.cases]
    assert len(names) == len(set(names)), "a case is found by its name"
    places = [(benchmark.place, benchmark.name) for benchmark in row.benchmarks]
    assert len(places) == len(set(places))


@pytest.mark.parametrize("op", PUBLIC)
def test_the_reference_takes_the_arguments_of_the_op(op: str) -> None:
    try:
        reference = inspect.signature(REFERENCES[op]).parameters.values()
    except ValueError:  # a function of NumPy's that has no signature
        return
    function = inspect.signature(getattr(ops, op)).parameters.values()
    named = {p.name: p.default for p in function if p.kind is p.KEYWORD_ONLY}
    ours = {p.name: p.default for p in reference if p.kind is p.KEYWORD_ONLY}
    if op in ("rope", "attention", "experts") or op.startswith("update_"):
        assert ours == named
