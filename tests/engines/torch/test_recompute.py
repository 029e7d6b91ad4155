"""Recomputation for gradients on PyTorch: what changed between the two runs is an error."""

from __future__ import annotations

import pytest

from anydevice.errors import VerificationError
from tests.comparing import assert_close

torch = pytest.importorskip("torch")
recompute = pytest.importorskip("anydevice._engines.torch.recompute").recompute


def test_a_weight_changed_before_the_gradients_is_an_error() -> None:
    layer, x = torch.nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)

    def loss() -> torch.Tensor:
        return recompute(lambda x: layer(torch.tanh(layer(x))), x).sum()

    (expected,) = torch.autograd.grad(layer(torch.tanh(layer(x))).sum(), x)
    assert_close(torch.autograd.grad(loss(), x)[0].numpy(), expected.numpy(), terms=9)
    value = loss()
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(VerificationError, match="a tensor that the function uses was changed"):
        value.backward()
    loss().backward()  # the next step computes with the new weights


def test_a_tensor_of_the_surroundings_changed_before_the_gradients_is_an_error() -> None:
    scale, x = torch.full((3,), 2.0), torch.ones(3, requires_grad=True)
    value = recompute(lambda x: (torch.sin(x) * scale).sum(), x)
    scale.add_(1)
    with pytest.raises(VerificationError, match="a tensor that the function uses was changed"):
        value.backward()


def test_a_layer_that_counts_its_calls_is_recomputed() -> None:
    norm, x = torch.nn.BatchNorm1d(3), torch.randn(8, 3, requires_grad=True)
    recompute(lambda x: torch.sin(norm(x)), x).sum().backward()
    assert x.grad is not None
