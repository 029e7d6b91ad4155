"""`verify` finds every wrong version of an op in the list of mutants."""

from __future__ import annotations

import pytest

from anydevice import ops
from anydevice.check.verifying import verify

from .mutants import MUTANTS, Mutant

EACH = [
    pytest.param(each, id=str(each), marks=() if each.short else pytest.mark.soak)
    for each in MUTANTS
]


def test_there_are_many() -> None:
    assert len({str(each) for each in MUTANTS}) == len(MUTANTS) >= 100
    assert sum(each.short for each in MUTANTS) >= 20


@pytest.mark.parametrize("mutant", EACH)
def test_it_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(ops, mutant.op)
    monkeypatch.setattr(ops, mutant.op, mutant.broken(right))
    found = verify(mutant.op, "cpu", "numpy", mutant.dtype, isolated=False)
    (cell,) = [cell for cell in found if cell.of == "value"]
    assert cell.state == "wrong", "it passes for right"
    assert cell.reason is not None
    # What it gives is wrong, not that it fails.
    assert "instead of" in cell.reason, cell.reason
