"""Gradients are compared with differences of the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from anydevice._check import checks as trials
from anydevice._check import verify as verifying
from anydevice._check.cases.case import Row
from anydevice._check.cases.table import TABLE
from anydevice._check.verdicts import Cell
from anydevice._check.verify import verify as verify_in_children
from tests.optional import torch

Replace = Callable[..., None]
verify = partial(verify_in_children, isolated=False)


@pytest.fixture(autouse=True)
def one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """One case of each op, none drawn: values are not what these tests are about."""
    cases_for = Row.cases_for
    monkeypatch.setattr(Row, "cases_for", lambda row, dtype: cases_for(row, dtype)[:1])
    monkeypatch.setattr(verifying, "draw_cases", lambda *call, **how: ())


def of(op: str, dtype: str = "float32") -> Cell:
    (cell,) = [cell for cell in verify([op], None, ["torch"], [dtype]) if cell.of == "gradient"]
    return cell


@pytest.mark.needs("torch")
def test_the_gradients_of_torch_are_right() -> None:
    verdicts = verify(engines=["torch"], dtypes=["float32", "float64"])
    wrong = [cell for cell in verdicts.wrong if cell.of == "gradient"]
    assert not wrong, "\n".join(map(str, wrong))
    assert sum(cell.of == "gradient" for cell in verdicts) > 80


def test_gradients_are_differences_by_floating_arrays() -> None:
    slope = trials.prepare_gradient(TABLE["tanh"], "float64")
    x = slope.call.arguments[0]
    np.testing.assert_allclose(slope.wants[0], slope.weights / np.cosh(x) ** 2, atol=1e-9)
    slope = trials.prepare_gradient(TABLE["embedding"], "float32")
    assert len(slope.wants) == 1
    assert len(trials.prepare_gradient(TABLE["concat"], "float32").wants) == 2


def test_a_forgotten_gradient_is_caught(replace: Replace) -> None:
    def without_weight(x: Any, weight: Any, eps: float) -> Any:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight.detach(), eps)

    replace("torch", rmsnorm=without_weight)
    cell = of("rmsnorm")
    assert cell.state == "wrong"
    (value,) = [c for c in verify(["rmsnorm"], None, ["torch"], ["float32"]) if c.of == "value"]
    assert value.state == "right", "only its gradient is wrong"


def test_a_gradient_with_a_wrong_factor_is_caught(replace: Replace) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Any) -> Any:
            context.save_for_backward(x)
            return torch.nn.functional.silu(x)

        @staticmethod
        def backward(context: Any, given: Any) -> Any:
            (x,) = context.saved_tensors
            return given * torch.sigmoid(x)  # a term is missing

    replace("torch", silu=Wrong.apply)
    cell = of("silu", "bfloat16")
    assert cell.state == "wrong"
    assert cell.case == trials.GRADIENT_CASE
    assert cell.largest_error is not None


def test_an_engine_without_gradients_is_unsupported() -> None:
    cells = [cell for cell in verify(["tanh"], None, ["numpy"], ["float32"]) if not cell]
    assert [(cell.of, cell.state) for cell in cells] == [("gradient", "unsupported")]
    assert cells[0].reason == "NumPy has no autodiff; train on torch, jax or mlx"


def test_gradients_of_another_form_are_wrong() -> None:
    slope = trials.prepare_gradient(TABLE["tanh"], "float32")
    want = slope.wants[0]
    assert trials._judge_gradients(slope, [want.astype(np.float32)]) is None
    assert trials._judge_gradients(slope, []) == "gave 0 gradients instead of 1"
    words = trials._judge_gradients(slope, [want])
    assert words == "gave a gradient of float64 (3, 5) instead of float32 (3, 5)"
