"""A decoder layer in one go on the CPU: float32, against the reference in float64."""

from __future__ import annotations

import numpy as np
import pytest

import anydevice
from anydevice._check.cases.case import Case, Draw
from anydevice._check.cases.decoding import DECODER_LAYER
from anydevice._core.dtypes import DTYPES
from anydevice._machine.engines import registry

PLAIN = [case for case in DECODER_LAYER.cases if "exact" not in case.name]
"""Without those of quantized weights, which these engines leave to ops."""


@pytest.mark.parametrize("name", ["numpy", "torch", "mlx"])
@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_a_layer_is_right(case: Case, name: str) -> None:
    pytest.importorskip({"mlx": "mlx.core"}.get(name, name))
    drawn = case.make(Draw(DTYPES["float32"], case.name)).arguments
    numbers = drawn[-1]
    wide = [x.astype(np.float64) if getattr(x, "dtype", None) == np.float32 else x for x in drawn]
    assert DECODER_LAYER.reference is not None
    expected = DECODER_LAYER.reference(*wide)
    device, engine = anydevice.device("cpu", engine=name), registry.load(name)
    placed = [None if each is None else device(each.copy()) for each in drawn[:-1]]
    with engine.inference_scope(device):
        found = engine.fused["decoder_layer"](*placed, numbers)
    for mine, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(anydevice.to_numpy(mine), right, rtol=2e-4, atol=2e-5)


def test_mlx_leaves_what_may_be_traced_to_mlx() -> None:
    mx = pytest.importorskip("mlx.core")
    engine = registry.load("mlx")
    x, weight = mx.ones((2, 3)), mx.ones((4, 3))
    assert engine.fused["linear"](x, weight, None) is NotImplemented
    with engine.inference_scope(anydevice.device("cpu", engine="mlx")):
        product = engine.fused["linear"](x, weight, mx.ones(4))
        if product is not NotImplemented:  # on Linux
            assert product.tolist() == [[4.0] * 4] * 2
    gradient = mx.grad(lambda w: anydevice.ops.linear(x, w).sum())(weight)
    assert gradient.tolist() == [[2.0] * 3] * 4
