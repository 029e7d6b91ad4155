"""Every engine is run by the contract tests, and every op has cases: none can be forgotten."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from anydevice import _ops, ops
from anydevice._check.cases.table import TABLE
from anydevice._check.reference import REFERENCES
from anydevice._core.backends import BACKENDS
from anydevice._machine.engines.registry import BUILT_IN
from tests.programs import output_of

ROOT = Path(__file__).parents[2]
PUBLIC = sorted(_ops.__all__)


def test_every_engine_is_collected_by_every_contract_test() -> None:
    command = ("-m", "pytest", "tests/contract", "--collect-only", "-q", "--no-cov")
    listed = output_of(*command, cwd=ROOT, env={"ANYDEVICE_TEST_ENGINES": None})
    collected: dict[str, set[str]] = {}
    for test, parameters in re.findall(r"^tests/(\S+?)\[(.+)\]$", listed, re.MULTILINE):
        collected.setdefault(test, set()).update(re.split(r"[-\s]", parameters))
    assert collected
    for test, words in collected.items():
        assert set(BUILT_IN) <= words, test


def test_no_contract_test_names_an_engine() -> None:
    for path in (ROOT / "tests/contract").glob("test_*.py"):
        text = path.read_text("utf-8")
        # NumPy is the neutral form in which all of them are compared; its name is not a case.
        named = [name for name in BUILT_IN if name != "numpy" and f'"{name}"' in text]
        assert not named, path.name


def test_engines_and_backends_name_each_other() -> None:
    by_backend = {(e, row.name) for row in BACKENDS.values() for e in row.engines}
    by_engine = {(row.name, backend) for row in BUILT_IN.values() for backend in row.backends}
    assert by_backend == by_engine


def test_make_test_names_every_engine_that_needs_no_accelerator() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    line = next(line for line in makefile.splitlines() if line.startswith("ENGINES ?="))
    assert set(re.findall(r"[a-z]+", line)) & set(BUILT_IN) == set(BUILT_IN) - {"cupy"}


def test_every_op_has_a_row_and_a_reference_and_these_an_op() -> None:
    assert sorted(TABLE) == sorted(REFERENCES) == PUBLIC


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
