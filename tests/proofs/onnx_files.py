"""Small ONNX files: one for each supported operator, and files that were once read wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
Node = tuple[str, str, str, dict[str, Any]]
FLOAT, DOUBLE = 1, 11
RANDOM = np.random.default_rng(0)


def node(kind: str, inputs: str, output: str, **attributes: Any) -> Any:
    return onnx.helper.make_node(
        kind, inputs.split(" ") if inputs else [], output.split(), **attributes
    )


def write_model(
    path: Path, nodes: Sequence[Any], shape: Sequence[int], opset: int = 17, dtype: int = FLOAT,
    **constants: Any,
) -> Path:  # fmt: skip
    """Write a file from x to y; the dtype of y is the one of x, and its shape is not stated."""
    value = onnx.helper.make_tensor_value_info
    tensors = [onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()]
    ends = [value("x", dtype, shape)], [value("y", dtype, None)]
    graph = onnx.helper.make_graph(nodes, "graph", *ends, tensors)
    versions = [onnx.helper.make_opsetid("", opset)]
    model = onnx.helper.make_model(graph, opset_imports=versions, ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


def numbers(*shape: int) -> Any:
    return RANDOM.normal(0, 1, shape).astype(np.float32)


def one(kind: str, *shape: int, inputs: str = "x", opset: int = 17, **words: Any) -> Any:
    """Return a file of one operator; arrays are constants, other words attributes."""
    arrays = {k: v for k, v in words.items() if isinstance(v, np.ndarray | np.generic)}
    attributes = {k: v for k, v in words.items() if k not in arrays}
    return [node(kind, inputs, "y", **attributes)], shape, opset, arrays


def chain(*nodes: Any, shape: tuple[int, ...] = (1, 3), opset: int = 17, **constants: Any) -> Any:
    return list(nodes), shape, opset, constants


def integer(*nodes: Any, **constants: Any) -> Any:
    """Return x plus an integer k that constants give."""
    last = node("Cast", "k", "f", to=FLOAT), node("Add", "x f", "y")
    return chain(*nodes, *last, shape=(1,), **constants)


_I = np.array
OPERATORS: dict[str, Any] = {
    "Abs": one("Abs", 1, 3),
    "Add": one("Add", 1, 3, inputs="x c", c=numbers(2, 1)),
    "AveragePool": one("AveragePool", 1, 2, 5, 4, kernel_shape=[3, 2], pads=[1, 0, 1, 1]),
    "BatchNormalization": one(
        "BatchNormalization", 1, 2, 3, inputs="x a b c d",
        a=numbers(2), b=numbers(2), c=numbers(2), d=np.abs(numbers(2)),
    ),
    "Cast": integer(node("Cast", "c", "k", to=7), c=np.float32([2.7])),
    "Clip": one("Clip", 1, 3, inputs="x a b", a=np.float32(-0.2), b=np.float32(0.4)),
    "Concat": one("Concat", 1, 3, inputs="x c x", axis=1, c=numbers(1, 2)),
    "Constant": chain(
        node("Constant", "", "c", value_floats=[0.1, 0.2, 0.3]), node("Add", "x c", "y")
    ),
    "ConstantOfShape": chain(
        node("ConstantOfShape", "s", "c"), node("Concat", "c x", "y", axis=0), s=_I([2, 3])
    ),
    "Conv": one(
        "Conv", 1, 2, 5, inputs="x w b", w=numbers(4, 1, 2), b=numbers(4),
        group=2, strides=[2], pads=[1, 0],
    ),
    "ConvTranspose": one(
        "ConvTranspose", 1, 2, 3, 2, inputs="x w b", w=numbers(2, 3, 3, 2), b=numbers(3),
        strides=[2, 1], pads=[1, 0, 0, 1], output_padding=[1, 0],
    ),
    "DepthToSpace": one("DepthToSpace", 3, 8, 2, 1, blocksize=2),
    "Div": integer(node("Div", "a b", "k"), a=_I([-7]), b=_I([2])),
    "Dropout": one("Dropout", 1, 3),
    "Elu": one("Elu", 1, 3, alpha=0.4),
    "Erf": chain(
        node("Div", "x r", "a"), node("Erf", "a", "b"), node("Add", "b o", "c"),
        node("Mul", "x c", "d"), node("Mul", "d h", "y"),
        r=np.float32(2**0.5), o=np.float32(1), h=np.float32([0.5]),
    ),
    "Exp": one("Exp", 1, 3),
    "Expand": one("Expand", 1, 3, inputs="x s", s=_I([2, 1, 1])),
    "Flatten": one("Flatten", 2, 3, 2, axis=2),
    "GRU": one(
        "GRU", 3, 1, 2, inputs="x w r b", w=numbers(2, 6, 2), r=numbers(2, 6, 2), b=numbers(2, 12),
        hidden_size=2, direction="bidirectional", linear_before_reset=1,
    ),
    "Gather": one("Gather", 2, 3, inputs="x i", axis=1, i=_I([[2, -3], [1, 1]])),
    "Gelu": one("Gelu", 1, 3, opset=20),
    "Gemm": one(
        "Gemm", 3, 2, inputs="x w b", w=numbers(4, 3), b=numbers(4), transA=1, transB=1, alpha=0.5
    ),
    "GlobalAveragePool": one("GlobalAveragePool", 1, 2, 3, 3),
    "GroupNormalization": one(
        "GroupNormalization", 1, 4, 3, inputs="x s b", opset=21, s=numbers(4), b=numbers(4),
        num_groups=2,
    ),
    "HardSigmoid": one("HardSigmoid", 1, 3, alpha=0.3),
    "HardSwish": one("HardSwish", 1, 3),
    "Identity": one("Identity", 1, 3),
    "InstanceNormalization": one(
        "InstanceNormalization", 2, 2, 3, inputs="x s b", s=numbers(2), b=numbers(2), epsilon=0.1
    ),
    "LSTM": one(
        "LSTM", 2, 2, 3, inputs="x w r b", w=numbers(1, 8, 3), r=numbers(1, 8, 2), b=numbers(1, 16),
        hidden_size=2, direction="reverse",
    ),
    "LeakyRelu": one("LeakyRelu", 1, 3, alpha=0.3),
    "MatMul": one("MatMul", 2, 3, inputs="x w", w=numbers(3, 2)),
    "Max": one("Max", 3, inputs="x c", c=np.zeros((1, 1), np.float32)),
    "MaxPool": one("MaxPool", 1, 1, 5, kernel_shape=[2], strides=[2], pads=[1, 0]),
    "Min": one("Min", 3, inputs="x c x", c=numbers(2, 1)),
    "Mish": one("Mish", 1, 3, opset=18),
    "Mul": chain(
        node("Reshape", "x s", "r"), node("Sigmoid", "x", "g"), node("Mul", "r g", "y"),
        s=_I([3, 1]),
    ),
    "Neg": one("Neg", 1, 3),
    "PRelu": one("PRelu", 1, 2, 3, inputs="x s", s=numbers(2, 1)),
    "Pad": one("Pad", 1, 3, inputs="x p v", p=_I([0, 1, 1, 2]), v=np.float32(0.5)),
    "Pow": one("Pow", 3, inputs="x e", e=np.float32([[2]])),
    "Reciprocal": chain(node("Exp", "x", "e"), node("Reciprocal", "e", "y")),
    "RNN": one(
        "RNN", 3, 1, 2, inputs="x w r b", w=numbers(1, 2, 2), r=numbers(1, 2, 2), b=numbers(1, 4),
        hidden_size=2, activations=["Tanh"],
    ),
    "ReduceMean": one("ReduceMean", 2, 3, axes=[-1], keepdims=0),
    "ReduceSum": one("ReduceSum", 2, 3, inputs="x a", a=_I([0])),
    "Relu": one("Relu", 1, 3),
    "Reshape": one("Reshape", 2, 3, inputs="x s", s=_I([0, -1, 1])),
    "Resize": one(
        "Resize", 1, 1, 3, 2, inputs="x r s", r=np.zeros(0, np.float32),
        s=np.float32([1, 1, 3, 1.5]), mode="linear",
    ),
    "Shape": integer(node("Shape", "x", "k", start=0, end=1)),
    "Sigmoid": one("Sigmoid", 1, 3),
    "Slice": one(
        "Slice", 3, 4, inputs="x a b c d",
        a=_I([3, 0]), b=_I([-9, 3]), c=_I([1, 0]), d=_I([-2, 1]),
    ),
    "Softmax": one("Softmax", 1, 3),
    "Softplus": one("Softplus", 1, 3),
    "Split": chain(
        node("Split", "x s", "a b", axis=1), node("Mul", "a b", "y"), shape=(2, 3), s=_I([1, 2])
    ),
    "Squeeze": one("Squeeze", 1, 3, 1, inputs="x a", a=_I([-1])),
    "Sub": integer(node("Sub", "a b", "k"), a=np.int32([-(2**31)]), b=np.int32([1])),
    "Tanh": one("Tanh", 1, 3),
    "Transpose": one("Transpose", 2, 3, 2, perm=[2, 0, 1]),
    "Unsqueeze": one("Unsqueeze", 2, 3, inputs="x a", a=_I([0, -1])),
    "Upsample": one("Upsample", 1, 1, 2, 2, inputs="x s", opset=9, s=np.float32([1, 1, 2, 3])),
}  # fmt: skip


def write_operator(folder: Path, kind: str) -> Path:
    nodes, shape, opset, constants = OPERATORS[kind]
    return write_model(folder / "net.onnx", nodes, shape, opset, **constants)
