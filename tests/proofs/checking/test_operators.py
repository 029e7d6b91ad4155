"""Operators of ONNX are proved as the standard defines them, or refused."""

from __future__ import annotations

import numpy as np
import pytest

from anydevice._proofs.checking.network import FormatError, NotSupportedError
from anydevice._proofs.checking.operators import read_onnx
from tests.proofs.checking.written import described, field, operator, tensor


def file_of(*operators: bytes, inputs: int = 1, **constants: object) -> bytes:
    """An ONNX file from x to y."""
    graph = field(2, "graph") + b"".join(field(1, each) for each in operators)
    graph += b"".join(field(5, tensor(k, np.asarray(v))) for k, v in constants.items())
    graph += field(11, described("x", (1, inputs))) + field(12, described("y", (1, inputs)))
    return field(1, 8) + field(7, graph) + field(8, field(2, 13))


@pytest.mark.parametrize("kind", [7, 6, 9, 10, 16], ids=["int64", "int32", "bool", "f16", "bf16"])
def test_a_conversion_that_changes_numbers_is_refused(kind: int) -> None:
    there = operator("Cast", ["x"], "a", to=kind)
    with pytest.raises(NotSupportedError, match=f"Cast that gives 'a'.*{kind}"):
        read_onnx(file_of(there, operator("Cast", ["a"], "y", to=1)))


def test_a_conversion_between_floats_is_none() -> None:
    there = operator("Cast", ["x"], "a", to=11)
    network, _ = read_onnx(file_of(there, operator("Cast", ["a"], "y", to=1)))
    assert network.outputs == 1


@pytest.mark.parametrize("training", [0, 1])
def test_a_dropout_in_training_mode_is_refused(training: int) -> None:
    data = file_of(operator("Dropout", ["x", "share", "mode"], "y"), share=0.5, mode=training)
    if not training:
        assert read_onnx(data)[0].outputs == 1
        return
    with pytest.raises(NotSupportedError, match="training mode"):
        read_onnx(data)


@pytest.mark.parametrize("kind", ["ReduceSum", "ReduceMean"])
def test_a_reduction_without_axes_may_be_none(kind: str) -> None:
    whole, none = (
        read_onnx(file_of(operator(kind, ["x"], "y", noop_with_empty_axes=noop), inputs=3))[0]
        for noop in (0, 1)
    )
    assert (whole.outputs, none.outputs) == (1, 3)


def test_an_operator_of_another_domain_is_another_operator() -> None:
    relu = operator("Relu", ["x"], "y")
    assert read_onnx(file_of(relu + field(7, "ai.onnx")))[0].nodes[-1].function == "relu"
    with pytest.raises(NotSupportedError, match=r"com\.example\.Relu"):
        read_onnx(file_of(relu + field(7, "com.example")))


def test_a_clip_by_nan_is_refused() -> None:
    with pytest.raises(FormatError, match="NaN"):
        read_onnx(file_of(operator("Clip", ["x", "least"], "y"), least=np.float32(np.nan)))


def test_the_slope_of_a_leaky_relu_is_float32() -> None:
    network, _ = read_onnx(file_of(operator("LeakyRelu", ["x"], "y")))
    slopes = [weight.item() for node in network.nodes for weight in node.weights]
    assert float(np.float32(0.01)) in slopes
    assert 0.01 not in slopes
