"""What is proved of an ONNX file holds for the file as it runs."""

from __future__ import annotations

import sys
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydevice import proofs
from anydevice._core.protocols import SymbolicTensor
from anydevice._core.record import replace
from anydevice._proofs import execution, onnx_lowering
from anydevice._proofs.checking import operators, smooth
from anydevice._proofs.checking.network import Query
from anydevice._proofs.checking.smooth import executors_of
from anydevice._proofs.execution import compare_reading
from anydevice._proofs.files import read_model
from anydevice._proofs.prove import outcome_data
from anydevice.errors import (
    AnyDeviceError,
    ConfigurationError,
    UnsupportedError,
    VerificationError,
)
from tests.proofs.onnx_files import (
    DOUBLE,
    FLOAT,
    OPERATORS,
    chain,
    integer,
    node,
    numbers,
    one,
    write_model,
    write_operator,
)

pytest.importorskip("onnxruntime")


def box_of(inputs: int, outputs: int) -> Query:
    low, high = (Fraction(-1),) * inputs, (Fraction(2),) * inputs
    return Query(low, high, ((Fraction(1),) * outputs,), (Fraction(0),), (0,), (False,))


def compare(path: Path) -> None:
    file = read_model(path)
    compare_reading(file, [box_of(file.network.inputs, file.network.outputs)])


def test_every_operator_has_a_file_here_and_two_lowerings() -> None:
    assert set(OPERATORS) == set(operators._OPERATORS) == set(onnx_lowering._OPERATORS)


@pytest.mark.parametrize("executor", ["onnxruntime", "onnx"])
@pytest.mark.parametrize("kind", OPERATORS)
def test_an_operator_is_read_as_it_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, executor: str
) -> None:
    monkeypatch.setattr(execution, "executors", lambda: [executor])
    compare(write_operator(tmp_path, kind))


def shift(net: Any, result: Any) -> Any:
    """Return a wrong result: all numbers are a little larger."""
    if isinstance(result, list):
        return [shift(net, part) for part in result]
    if isinstance(result, operators.Value):
        return net.add([(result, 1.05)], np.full(result.shape, 0.01))
    if isinstance(result, SymbolicTensor):
        return net.add(net.multiply(result, net.constant(1.05)), net.constant(0.01))
    if isinstance(result, operators.Erf):
        return result._replace(shift=0.01)
    array = getattr(result, "value", result)
    wrong = array + np.ones(1, array.dtype)
    return result._replace(value=wrong) if array is not result else wrong


@pytest.mark.parametrize("side", ["checker", "search"])
@pytest.mark.parametrize("kind", OPERATORS)
def test_a_mistake_in_one_lowering_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, side: str
) -> None:
    """By the other lowering alone, and by the execution alone."""
    path = write_operator(tmp_path, kind)
    module: Any = operators if side == "checker" else onnx_lowering
    right, judge = module._OPERATORS[kind], execution._compare
    monkeypatch.setitem(module._OPERATORS, kind, lambda net, *x: shift(net, right(net, *x)))
    others = {"the checker", "the search"} - {f"the {side}"}
    for witness in (others, {"onnxruntime"}):
        trusted = {f"the {side}", *witness}

        def compare_two(place: str, tensors: Any, trusted: set[str] = trusted) -> None:
            judge(place, [tensor for tensor in tensors if tensor.by in trusted])

        monkeypatch.setattr(execution, "_compare", compare_two)
        with pytest.raises(
            AnyDeviceError, match=f"the {kind} that gives|proofs do not take|erf is known"
        ):
            compare(path)


def test_a_mistake_in_joining_nodes_is_found(tmp_path: Path) -> None:
    file = read_model(write_operator(tmp_path, "Gemm"))
    (node,) = file.network.nodes
    wrong = file.network._replace(nodes=(node._replace(bias=node.bias + 0.01),))
    with pytest.raises(VerificationError, match="its output is not read as it is executed"):
        compare_reading(replace(file, network=wrong), [box_of(6, 8)])


PRODUCT = node("Transpose", "m", "t"), node("Mul", "t x", "y")
"""The product of each element of m with each of x, if m has two axes."""
ZERO = np.zeros((1, 1), np.float32)
FALSE: dict[str, tuple[Any, tuple[float, float], tuple[float, float]]] = {
    "SiLU of another shape": (
        chain(*OPERATORS["Mul"][0], shape=(3,), s=np.array([3, 1])), (-1, 1), (-0.5, 1)
    ),
    "maximum with a matrix": (
        chain(node("Max", "x c", "m"), *PRODUCT, shape=(3,), c=ZERO), (-1, 1), (-0.5, 1.5)
    ),
    "minimum with a matrix": (
        chain(node("Min", "x c", "m"), *PRODUCT, shape=(3,), c=ZERO), (-1, 1), (-0.5, 1.5)
    ),
    "number to integer": (OPERATORS["Cast"], (0, 0.1), (2.6, 2.9)),
    "quotient of integers": (OPERATORS["Div"], (0, 0.1), (-4.5, -3.5)),
    "overflow of integers": (OPERATORS["Sub"], (0, 0.1), (-3e9, 0)),
    "integer to boolean": (
        integer(node("Cast", "c", "k", to=9), c=np.array([5])), (0, 0.1), (4, 6)
    ),
    "pads that VALID ignores": (
        chain(
            node(
                "AveragePool", "x", "p", kernel_shape=[2], pads=[1, 1], auto_pad="VALID",
                count_include_pad=1,
            ),
            node("ReduceMean", "p", "y"), shape=(1, 1, 4),
        ), (1, 2), (0.7, 1.7),
    ),
}  # fmt: skip
"""Files with a range of inputs, and a range of outputs that they leave."""


@pytest.mark.parametrize("name", FALSE)
def test_what_an_execution_refutes_is_refuted(tmp_path: Path, name: str) -> None:
    import onnxruntime

    (nodes, shape, opset, constants), ends, outputs = FALSE[name]
    path = write_model(tmp_path / "net.onnx", nodes, shape, opset, **constants)
    region = proofs.box([float(ends[0])] * prod(shape), [float(ends[1])] * prod(shape))
    result = proofs.prove(path, proofs.within(*outputs), over=region)
    assert isinstance(result, proofs.Counterexample)
    (y,) = onnxruntime.InferenceSession(path).run(None, {"x": np.float32(result.x).reshape(shape)})
    assert y.min() < outputs[0] or y.max() > outputs[1]


def test_a_double_that_is_rounded_is_not_exact(tmp_path: Path) -> None:
    nodes = [
        node("Cast", "x", "a", to=FLOAT), node("Cast", "a", "b", to=DOUBLE),
        node("Sub", "x b", "c"), node("Mul", "c s", "y"),
    ]  # fmt: skip
    path = write_model(tmp_path / "net.onnx", nodes, (1,), dtype=DOUBLE, s=np.float64(1e8))
    small, region = proofs.within(-0.1, 0.1), proofs.box([1.0], [2.0])
    assert not proofs.prove(path, small, over=region, limit=0.5)
    assert proofs.prove(path, proofs.within(-60, 60), over=region)


def test_a_small_sigmoid_is_not_proved_smaller_than_it_is_computed(tmp_path: Path) -> None:
    path = write_model(tmp_path / "net.onnx", [node("Sigmoid", "x", "y")], (1,))
    region = proofs.box([-17.58], [-17.57])
    assert not proofs.prove(path, proofs.within(0, 1e-7), over=region, limit=0.5)
    result = proofs.prove(path, proofs.within(-1, 1e-6), over=region)
    assert outcome_data(result)["executors"] == list(smooth.EXECUTORS)
    assert executors_of({"sigmoid": 2.0**-20}) == ["CUDA", "JAX", "MLX", "NumPy", "PyTorch"]


REFUSED = {
    "an unknown attribute": (one("Relu", 1, 3, beyond=1), "'beyond' is not known"),
    "an input that is no constant": (one("Clip", 1, inputs="x x"), "behind its first"),
    "dilated windows with automatic pads": (
        one("MaxPool", 1, 1, 6, kernel_shape=[2], dilations=[2], auto_pad="SAME_LOWER"), "auto_pad"
    ),
    "parts without a name": (
        one("Split", 1, 3, axis=-1, num_outputs=2, opset=18), "as many outputs as parts"
    ),
    "a conversion that overflows": (
        integer(node("Cast", "c", "k", to=6), c=np.float32([3e9])), "int32 does not hold"
    ),
    "constants that are no integers": (
        chain(node("Add", "c c", "k"), node("Add", "x k", "y"), c=numbers(3)), "with constants"
    ),
    "erf of another shape": (
        chain(node("Erf", "x", "a"), node("Add", "a o", "y"), shape=(3,), o=ZERO + 1), "Add"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_files_are_refused(tmp_path: Path, name: str) -> None:
    (nodes, shape, opset, constants), reason = REFUSED[name]
    with pytest.raises(AnyDeviceError, match=reason):
        read_model(write_model(tmp_path / "net.onnx", nodes, shape, opset, **constants))


def test_inputs_of_integers_are_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "net.onnx", [node("Relu", "x", "y")], (1, 3), dtype=7)
    with pytest.raises(ConfigurationError, match="dtype 7"):
        read_model(path)


def test_a_file_that_nothing_executes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "net.onnx", [node("Relu", "x", "y")], (1, 3), opset=999)
    with monkeypatch.context() as only:
        only.setitem(sys.modules, "onnx", None)  # it takes any version
        with pytest.raises(UnsupportedError, match="cannot be executed"):
            compare(path)
    for name in ("onnx", "onnxruntime"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match="pip install onnx onnxruntime"):
        proofs.prove(path, proofs.within(0, 9), over=proofs.box(0.0, 1.0))
