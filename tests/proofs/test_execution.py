"""What is proved of an ONNX file holds for the file as it runs."""

from __future__ import annotations

import sys
from contextlib import suppress
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
from anydevice._proofs.checking import operators, readers, smooth
from anydevice._proofs.checking.network import Query
from anydevice._proofs.checking.smooth import executors_of
from anydevice._proofs.evaluation import evaluate
from anydevice._proofs.execution import compare_reading
from anydevice._proofs.files import read_model
from anydevice._proofs.graph import Builder
from anydevice._proofs.prove import outcome_data
from anydevice._report.proof import outcome_text
from anydevice.errors import (
    AnyDeviceError,
    ConfigurationError,
    UnsupportedError,
    VerificationError,
)
from tests.proofs.checking.written import varint
from tests.proofs.onnx_files import (
    DOUBLE,
    FLOAT,
    OPERATORS,
    chain,
    integer,
    node,
    numbers,
    one,
    onnx,
    write_model,
    write_operator,
)

pytest.importorskip("onnxruntime")


def box_of(inputs: int, outputs: int) -> Query:
    low, high = (Fraction(-1),) * inputs, (Fraction(2),) * inputs
    return Query(low, high, ((Fraction(1),) * outputs,), (Fraction(0),), (0,), (False,))


def execute(path: Path, x: Any) -> Any:
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    kind = np.float64 if "double" in session.get_inputs()[0].type else np.float32
    return session.run(None, {"x": np.asarray(x, kind)})[0]


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


FAULTS: dict[str, tuple[str, Any, str, Any]] = {
    "the search takes one gate for another": ("GRU", onnx_lowering._GATES, "GRU", [0, 1, 2]),
    "the search repeats instead of a line": (
        "Resize", Builder, "interpolate",
        lambda self, cells, axis, size, *rest: cells.take(
            np.arange(size) * cells.shape[axis] // size, axis
        ),
    ),
    "the checker takes one gate for another": (
        "LSTM", operators._OPERATORS, "LSTM",
        lambda net, x, w, *rest: operators._recurrent(net, x, np.roll(w, 2, 1), *rest),
    ),
    "the checker turns no direction around": (
        "GRU", operators._OPERATORS, "GRU",
        lambda net, x, *rest: operators._recurrent(net, x, *[w[[0, 0]] for w in rest]),
    ),
    "the checker adds another epsilon": ("GroupNormalization", operators, "_EPSILON", 0.1),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_lowering_is_seen_by_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    kind, where, name, wrong = FAULTS[fault]
    path, judge = write_operator(tmp_path, kind), execution._compare
    lowerings = {"the checker", "the search"}
    monkeypatch.setattr(
        execution, "_compare", lambda p, t: judge(p, [x for x in t if x.by in lowerings])
    )
    compare(path)
    change = monkeypatch.setitem if isinstance(where, dict) else monkeypatch.setattr
    change(where, name, wrong)
    with pytest.raises(VerificationError, match=f"the {kind} that gives"):
        compare(path)


def test_a_tanh_of_an_rnn_has_an_absolute_error(tmp_path: Path) -> None:
    weights = {name: np.ones((1, 1, 1), np.float32) for name in "wr"}
    rnn = node("RNN", "x w r", "y", hidden_size=1)
    path = write_model(tmp_path / "net.onnx", [rnn], (1, 5000, 1), **weights)
    x = np.random.default_rng(0).normal(0, 0.1, (1, 5000, 1)).astype(np.float32)
    y, off = np.tanh(x.astype(np.float64)), 2 * (2.0**-22 + 2.0**-20)
    assert np.abs(execute(path, x).reshape(x.shape) - y).max() <= off
    small = write_model(tmp_path / "small.onnx", [rnn], (1, 1, 1), **weights)
    for z in x.flat[:20]:
        values, errors = evaluate(read_model(small).network, np.full((1, 1), np.float64(z)))
        assert abs(execute(small, [[[z]]]) - values) <= errors
        assert errors >= 2.0**-22


STATE = np.ones((1, 2, 2), np.float32)
OTHER_FORMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a first state": ("LSTM", "x w r b  h", {"h": STATE}),
    "lengths": ("LSTM", "x w r b l", {"l": np.int32([2, 2])}),
    "a reset before the product": ("GRU", "x w r b", {"linear_before_reset": 0}),
    "another activation": ("RNN", "x w r b", {"activations": ["Sigmoid"]}),
    "another position": (
        "Resize",
        "x r s",
        {"coordinate_transformation_mode": "tf_crop_and_resize"},
    ),
}


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_other_forms_are_refused_with_a_way_out(tmp_path: Path, name: str) -> None:
    kind, inputs, more = OTHER_FORMS[name]
    ((old,), shape, opset, constants) = OPERATORS[kind]
    attributes = {x.name: onnx.helper.get_attribute_value(x) for x in old.attribute}
    arrays = {k: v for k, v in more.items() if isinstance(v, np.ndarray)}
    attributes |= {k: v for k, v in more.items() if k not in arrays}
    path = write_model(
        tmp_path / "net.onnx", [node(kind, inputs, "y", **attributes)], shape, opset,
        **constants, **arrays,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match=f"the {kind} that gives 'y'.*(export|use half)"):
        read_model(path)


def test_a_mistake_in_joining_nodes_is_found(tmp_path: Path) -> None:
    file = read_model(write_operator(tmp_path, "Gemm"))
    *nodes, node = file.network.nodes
    wrong = file.network._replace(nodes=(*nodes, node._replace(bias=node.bias + 0.01)))
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
    (nodes, shape, opset, constants), ends, outputs = FALSE[name]
    path = write_model(tmp_path / "net.onnx", nodes, shape, opset, **constants)
    region = proofs.box([float(ends[0])] * prod(shape), [float(ends[1])] * prod(shape))
    result = proofs.prove(path, proofs.within(*outputs), over=region)
    assert isinstance(result, proofs.Counterexample)
    y = execute(path, result.x.reshape(shape))
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


def hide(*nodes: Any, top: float, **constants: Any) -> Any:
    """Return a file of g, which is `top` at x = 0.5678, and 0 where files are compared."""
    near = {"g1": 0.5678, "g2": 2.5e-4, "g3": top / 2.5e-4, **constants}
    peak = [node("Sub", "x g1", "g4"), node("Abs", "g4", "g5"), node("Sub", "g2 g5", "g6")]
    peak += [node("Relu", "g6", "g7"), node("Mul", "g7 g3", "g")]
    return chain(*peak, *nodes, shape=(1,), **{k: np.float32(v) for k, v in near.items()})


NINE = np.full((1, 9), 1e38)
UNSEEN: dict[str, tuple[Any, Any, tuple[float, float], tuple[float, float]]] = {
    "bounds of a softmax": (one("Softmax", 1, 2), [[2, 3]], (2, 3), (1.5, 3.5)),
    "a sum that overflows before its division": (
        one("ReduceMean", 1, 9, axes=[1]), NINE, (0.9e38, 1e38), (0.8e38, 1.1e38)
    ),
    "the sum of a pooling": (
        one("GlobalAveragePool", 1, 1, 3, 3), NINE.reshape(1, 1, 3, 3), (0.9e38, 1e38),
        (0.8e38, 1.1e38),
    ),
    "a product that overflows before alpha": (
        one("Gemm", 1, 1, inputs="x w", w=np.float32([[1e4]]), alpha=1e-30), [[1e37]],
        (0.9e37, 1e37), (0, 1.5e12),
    ),
    "a norm that overflows before its shift": (
        one(
            "BatchNormalization", 1, 1, inputs="x s b m v", epsilon=0.0, s=np.float32([1e2]),
            b=np.float32([0]), m=np.float32([1e37]), v=np.float32([1]),
        ), [[1e37]], (1e37, 1.0001e37), (-1e37, 1e37),
    ),
    "parts of a GELU that overflow": (
        hide(
            node("Sub", "g d", "z"), node("Div", "z r", "a"), node("Erf", "a", "b"),
            node("Add", "b o", "c"), node("Mul", "c u", "e"), node("Mul", "e u", "f"),
            node("Mul", "f i", "h"), node("Mul", "h i", "j"), node("Mul", "z j", "y"),
            top=22, d=20, r=2**0.5, o=1, u=1e30, i=1e-30,
        ), [0.5678], (0, 1), (-1, 6),
    ),
}  # fmt: skip
"""Files with a point at which an execution is outside of the outputs, and is not compared."""


@pytest.mark.parametrize("name", UNSEEN)
def test_what_an_execution_refutes_elsewhere_is_not_proved(tmp_path: Path, name: str) -> None:
    (nodes, shape, opset, constants), x, ends, outputs = UNSEEN[name]
    path = write_model(tmp_path / "net.onnx", nodes, shape, opset, **constants)
    region = proofs.box(*(np.full(prod(shape), end) for end in ends))
    y = execute(path, x)
    assert not (outputs[0] <= y.min() and y.max() <= outputs[1])
    with suppress(AnyDeviceError):
        assert not proofs.prove(path, proofs.within(*outputs), over=region, limit=2)


def raw(number: int, kind: int, content: bytes) -> bytes:
    """Return a field of a protocol buffer, of any kind."""
    return varint(number << 3 | kind) + (varint(len(content)) if kind == 2 else b"") + content


def attribute(name: str, kind: int, *values: bytes) -> bytes:
    return raw(1, 2, name.encode()) + b"".join(values) + raw(20, 0, bytes([kind]))


ONE, SMALL = np.float32([1]).tobytes(), np.float32([1e-3, 1e-3]).tobytes()
FORGED: dict[str, tuple[str, bytes, float]] = {
    "a number of eight bytes": (
        "LeakyRelu n", raw(5, 2, attribute("alpha", 1, raw(2, 5, ONE), raw(2, 1, SMALL))), 1
    ),
    "an operator of four bytes": ("Identity n", raw(4, 5, b"Tanh"), 1.1),
    "an input of four bytes": ("Max n", raw(1, 5, b"none"), 1.1),
    "an input that is a number": ("Max n", raw(1, 0, b"\1"), 1.1),
    "an attribute under a key of 33 bits": (
        "LeakyRelu n", raw(5 | 1 << 29, 2, attribute("alpha", 1, raw(2, 5, ONE))), 3
    ),
    "a flag that is a text": (
        "Gemm m w", raw(5, 2, attribute("transA", 2, raw(3, 2, b"\1"))), 1
    ),
}  # fmt: skip
"""Operators of n = -g and m = [[0, n], [0, 0]], more fields, and a limit for what is read."""


@pytest.mark.parametrize("name", FORGED)
def test_what_parsers_pass_over_is_not_read(tmp_path: Path, name: str) -> None:
    """The same field of another kind, or under another key, is another field to them."""
    operator, fields, limit = FORGED[name]
    kind, _, inputs = operator.partition(" ")
    given = {"none": -1, "\0": -1, "p": [[0, 1], [0, 0]], "w": [[0], [1]]}
    shapes = [node("Neg", "g", "n"), node("Mul", "n p", "m"), node(kind, inputs, "y")]
    nodes, shape, opset, constants = hide(*shapes, top=250, **given)
    path = write_model(tmp_path / "net.onnx", nodes, shape, opset, **constants)
    model = onnx.ModelProto.FromString(path.read_bytes())
    nodes = [operator.SerializeToString() for operator in model.graph.node]
    del model.graph.node[:]
    graph = b"".join(raw(1, 2, data) for data in [*nodes[:-1], nodes[-1] + fields])
    graph += model.graph.SerializeToString()
    model.ClearField("graph")
    path.write_bytes(model.SerializeToString() + raw(7, 2, graph))
    assert np.abs(execute(path, [0.5678])).max() > 100
    with suppress(AnyDeviceError):
        assert not proofs.prove(path, proofs.within(-limit, limit), over=proofs.box(0.0, 1.0))


def test_a_norm_in_training_mode_is_refused(tmp_path: Path) -> None:
    """Until version 13 that is one with more outputs than one."""
    norm = node("BatchNormalization", "h s b b s", "n m v p q")
    nodes = [node("Reshape", "g r", "h"), norm, node("Sub", "n h", "y")]
    ones = {"s": [1], "b": [0]}
    nodes, shape, _, constants = hide(*nodes, top=250, **ones)
    constants["r"] = np.array([1, 1])
    path = write_model(tmp_path / "net.onnx", nodes, shape, 13, **constants)
    assert np.abs(execute(path, [0.5678])).max() > 100
    with pytest.raises(UnsupportedError, match="training mode"):
        proofs.prove(path, proofs.within(-1, 1), over=proofs.box(0.0, 1.0))


def test_operators_of_old_versions_are_refused(tmp_path: Path) -> None:
    """Until version 6 a norm and a dropout without attributes are in training mode."""
    path = write_model(tmp_path / "net.onnx", [node("Relu", "x", "y")], (1, 3), opset=6)
    with pytest.raises(ConfigurationError, match="older than version 7"):
        read_model(path)


@pytest.mark.parametrize(
    ("dtype", "x", "limit"), [(FLOAT, -3.3e38, -3.2e38), (DOUBLE, -1e40, -1e39)]
)
def test_a_limit_near_the_largest_number_counts(
    tmp_path: Path, dtype: int, x: float, limit: float
) -> None:
    kind = np.float32 if dtype == FLOAT else np.float64
    constants = {"a": kind(limit), "b": np.finfo(kind).max}
    nodes = [node("Clip", "x a b", "y")]
    path = write_model(tmp_path / "net.onnx", nodes, (1,), dtype=dtype, **constants)
    region, below = proofs.box([1.01 * x], [x]), proofs.within(1.02 * x, 0.98 * x)
    assert not proofs.prove(path, below, over=region, precision="real", limit=2)


def add_sparse(graph: Any) -> None:
    sparse = graph.sparse_initializer.add(dims=[1])
    sparse.values.CopyFrom(onnx.numpy_helper.from_array(np.float32([5]), "w"))
    sparse.indices.CopyFrom(onnx.numpy_helper.from_array(np.int64([0]), "i"))


def add_constant(graph: Any) -> None:
    graph.node.append(node("Constant", "", "w", value_floats=[5.0]))


@pytest.mark.parametrize("is_merged", [True, False])
@pytest.mark.parametrize("add", [add_sparse, add_constant])
def test_a_constant_with_two_values_is_refused(tmp_path: Path, add: Any, is_merged: bool) -> None:
    """Parsers merge two graphs, and onnxruntime takes another value than the first."""
    nodes, shape, opset, constants = hide(node("Mul", "g w", "y"), top=250, w=[0])
    path = write_model(tmp_path / "net.onnx", nodes, shape, opset, **constants)
    model = onnx.ModelProto.FromString(path.read_bytes())
    other = onnx.ModelProto() if is_merged else model
    add(other.graph)
    path.write_bytes(other.SerializeToString() + model.SerializeToString() * is_merged)
    assert execute(path, [0.5678]) > 1000
    with pytest.raises(ConfigurationError, match=r"several graphs|two of its tensors"):
        proofs.prove(path, proofs.within(-1, 1), over=proofs.box(0.0, 1.0))


def test_an_attribute_with_two_values_is_refused(tmp_path: Path) -> None:
    path = write_operator(tmp_path, "LeakyRelu")
    model = onnx.ModelProto.FromString(path.read_bytes())
    (attribute,) = model.graph.node[0].attribute
    attribute.i = 3
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ConfigurationError, match="'alpha' has two values"):
        read_model(path)
    attribute.ClearField("f")
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ConfigurationError, match="of another type"):
        read_model(path)


@pytest.mark.parametrize("domain", ["", "ai.onnx"])
def test_operators_that_a_file_defines_anew_are_refused(tmp_path: Path, domain: str) -> None:
    path = write_operator(tmp_path, "Abs")
    model = onnx.ModelProto.FromString(path.read_bytes())
    model.functions.add(name="Abs", domain=domain)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ConfigurationError, match="defines an operator of ONNX anew"):
        read_model(path)


def test_constants_are_compared_with_an_execution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, shape, opset, constants = hide(node("Mul", "g w", "y"), top=250, w=[0])
    path = write_model(tmp_path / "net.onnx", nodes, shape, opset, **constants)
    right = readers.tensor

    def read_wrongly(data: Any) -> Any:
        name, array = right(data)
        return name, array + 5.0 * (name == "w")

    monkeypatch.setattr(readers, "tensor", read_wrongly)
    with pytest.raises(VerificationError, match="the constant 'w' is not read as it is executed"):
        compare(path)


def test_a_proof_of_logits_says_so(tmp_path: Path) -> None:
    path = write_operator(tmp_path, "Softmax")
    result = proofs.prove(path, proofs.less(0, 1), over=proofs.box([0, 1, 0], [0, 2, 0]))
    assert outcome_data(result)["logits"]
    assert "for the logits before the last softmax" in outcome_text(outcome_data(result))


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
    "a quotient that ends a process": (
        integer(node("Div", "a b", "k"), a=np.array([-(2**63)]), b=np.array([-1])), "larger than"
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
