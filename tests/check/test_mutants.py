"""`verify` finds every wrong version of an op in the list of mutants."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from anydevice import _ops as ops
from anydevice._check.verify import verify

from .mutants import KERNEL_MUTANTS, MUTANTS, KernelMutant, Mutant

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
    found = verify(mutant.op, "cpu", "numpy", mutant.dtype, isolated=False, seed=0)
    (cell,) = [cell for cell in found if cell.of == "value"]
    assert cell.state == "wrong", "it passes for right"
    assert cell.reason is not None
    # What it gives is wrong, not that it fails.
    assert "instead of" in cell.reason, cell.reason


def forget_kernels() -> None:
    """Have every OpenCL kernel compiled anew from its text."""
    for name, module in list(sys.modules.items()):
        if name.startswith("anydevice._engines.opencl"):
            for value in vars(module).values():
                getattr(value, "cache_clear", lambda: None)()


@pytest.mark.soak
@pytest.mark.parametrize("mutant", KERNEL_MUTANTS, ids=str)
def test_a_kernel_is_caught(mutant: KernelMutant, monkeypatch: pytest.MonkeyPatch) -> None:
    programs: Any = pytest.importorskip("anydevice._engines.opencl.kernels.programs")
    text = programs.text
    assert text(mutant.file).count(mutant.right) >= 1

    def changed(file: str) -> str:
        return str(text(file)).replace(mutant.right, mutant.wrong)

    try:
        forget_kernels()
        monkeypatch.setattr(programs, "text", changed)
        found = verify(mutant.op, "opencl", "opencl", "float32", isolated=False)
        wrong = [cell for cell in found if cell.state == "wrong"]
        assert wrong, "it passes for right"
        assert all("instead of" in str(cell.reason) for cell in wrong)
    finally:
        monkeypatch.undo()
        forget_kernels()
