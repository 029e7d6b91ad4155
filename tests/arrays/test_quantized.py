"""Quantized weights are values: they are moved, tied, saved and shown like arrays."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import ops
from anydevice._check.cases.case import Draw
from anydevice._check.cases.quantized import SCHEMES, draw_weight
from anydevice._core.dtypes import DTYPES
from anydevice._core.quantized import QuantizedWeight
from anydevice._formats.packed import packed, unpacked
from anydevice._machine.engines import registry
from tests.comparing import COPIED, assert_same_values

ENGINES = ["numpy", "torch", "jax", "mlx", "opencl"]


def weight(scheme: str = "q4_k") -> QuantizedWeight:
    return draw_weight(Draw(DTYPES["float32"], scheme), scheme, 8, 256)


def assert_same_weight(a: Any, b: QuantizedWeight) -> None:
    assert isinstance(a, QuantizedWeight)
    for field in ("scheme", "shape", "bits", "zero", "table"):
        assert repr(getattr(a, field)) == repr(getattr(b, field))  # a table may hold NaN
    assert a.arrays.keys() == b.arrays.keys()
    for name, x in b.arrays.items():
        assert_same_values(a.arrays[name], x, because=COPIED)


@pytest.mark.parametrize("name", ENGINES)
def test_weights_are_moved_and_stay_tied(name: str) -> None:
    engine = pytest.importorskip("anydevice") and registry.load(name)
    device = anydevice.device("opencl" if name == "opencl" else "cpu", engine=name)
    table = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    views = weight("q8_0").with_arrays({"scales": table})  # shares memory with a plain array
    tree = {"embedding": weight(), "head": None, "views": views, "rest": [table[:2]]}
    tree["head"] = tree["embedding"]
    there = anydevice.to_device(tree, device)
    assert there["head"] is there["embedding"]
    assert all(engine.owns(x) for x in there["head"].arrays.values())
    assert anydevice.device_of(there["head"]) == device
    cast = anydevice.to_device(tree, device, dtype="float16")
    for moved in map(anydevice.to_numpy, (there, cast)):
        assert_same_weight(moved["head"], weight())
        assert_same_weight(moved["views"], views)
    assert anydevice.to_numpy(cast)["rest"][0].dtype == np.float16


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_copied_and_saved(scheme: str) -> None:
    for copied in (pickle.loads(pickle.dumps(weight(scheme))), copy.deepcopy(weight(scheme))):
        assert_same_weight(copied, weight(scheme))
    assert_same_weight(unpacked(packed({"a": [weight(scheme)]}))["a"][0], weight(scheme))


def test_weights_are_shown_by_their_scheme_and_shape() -> None:
    assert repr(weight()) == "QuantizedWeight(q4_k, (8, 256))"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.arrays | {"codes": w.codes[:, :-1]}, "codes"),
        (lambda w: w.arrays | {"scales": w.scales[:, :3]}, "scales"),
        (lambda w: w.arrays | {"super_scales": w.super_scales[:4]}, "super_scales"),
    ],
)
def test_arrays_of_other_shapes_are_refused_by_name(change: Any, words: str) -> None:
    broken = weight().with_arrays(change(weight()))
    x = np.ones((1, 256), np.float32)
    with pytest.raises(anydevice.ConfigurationError, match=rf"{words} .* shape"):
        ops.quantized_linear(x, broken)
    with pytest.raises(anydevice.ConfigurationError, match=rf"{words} .* shape"):
        ops.dequantize(broken)
