"""Lowers graphs of ONNX a second time, through the trace that modules of other libraries have.

`checking/operators.py` makes the network of the theorem, and refuses what cannot be proved. This
file shares its parser of bytes and nothing else; `execution.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import inf, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from anydevice._core.protocols import FixedTensor, SymbolicTensor, Windows
from anydevice._core.protocols import TracedTensor as Tensor
from anydevice._proofs.checking.operators import attributes_of
from anydevice._proofs.checking.readers import Graph, Operator
from anydevice._proofs.graph import windows_of
from anydevice._proofs.tracing import NetworkTrace

Array = npt.NDArray[Any]
_DTYPES = {1: "float32", 6: "int32", 7: "int64", 9: "bool", 11: "float64"}
_HARD = float(np.float32(0.2))
_INTEGERS: dict[str, Callable[[Array, Array], Array]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": lambda a, b: (a - np.fmod(a, b)) // b,
}


class OnnxTrace(NetworkTrace):
    """The network of a graph, operator by operator; `tensors` are all of its tensors by name."""

    operator: Operator
    attributes: dict[str, Any]

    def __init__(self, graph: Graph) -> None:
        super().__init__(tuple(graph.shape))
        self.is_wide = _DTYPES[graph.dtype] == "float64"
        self.tensors: dict[str, Tensor] = {k: FixedTensor(v) for k, v in graph.constants.items()}
        self.tensors[graph.input] = self.rearrange(lambda x: x[0], self.input)
        for operator in graph.operators:
            self.path = str(operator)
            self.operator, self.attributes = operator, attributes_of(operator)
            inputs = [self.tensors[name] if name else None for name in operator.inputs]
            try:
                results = _OPERATORS[operator.kind](self, *inputs)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise self.refuse(f"its inputs or attributes ({error})") from error
            results = results if isinstance(results, list) else [results]
            self.tensors.update(zip(operator.outputs, results, strict=False))

    def option(self, name: str, given: Tensor | None = None, default: Any = None) -> Any:
        """Return an option as numbers: an input in newer versions, an attribute in older ones."""
        if given is None:
            return self.attributes.get(name, default)
        if not isinstance(given, FixedTensor):
            raise self.refuse("an option that depends on the input")
        return given.value.tolist()


def _change(change: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return an operator that moves elements; `change` gets the trace, the array and options."""
    return lambda net, x, *options: net.rearrange(lambda array: change(net, array, *options), x)


def _compute(net: OnnxTrace, a: Tensor, b: Tensor) -> Tensor:
    """Return a sum, difference, product or quotient; integers wrap around in their dtype."""
    kind = net.operator.kind
    if isinstance(a, FixedTensor) and isinstance(b, FixedTensor):
        return FixedTensor(np.asarray(_INTEGERS[kind](a.value, b.value)))
    if kind in ("Add", "Sub"):
        return net.add(a, b, 1.0 if kind == "Add" else -1.0)
    return net.multiply(a, b) if kind == "Mul" else net.divide(a, b)


def _cast(net: OnnxTrace, x: Tensor) -> Tensor:
    dtype = _DTYPES[net.attributes["to"]]
    if isinstance(x, FixedTensor):
        return FixedTensor(x.value.astype(dtype))
    if dtype == "float32" and net.is_wide:
        return SymbolicTensor(net.graph.affine(x.cells, roundings=1))
    net.is_wide |= dtype == "float64"
    return x


def _constant(net: OnnxTrace) -> Tensor:
    ((name, value),) = net.attributes.items()
    dtype = {"float": np.float32, "int": np.int64}.get(name.removeprefix("value_").rstrip("s"))
    return FixedTensor(np.asarray(value, dtype))


def _reshape(net: OnnxTrace, x: Array, shape: Tensor | None = None) -> Array:
    sizes = net.option("shape", shape)
    if not net.attributes.get("allowzero"):
        sizes = [size or x.shape[axis] for axis, size in enumerate(sizes)]
    return x.reshape(sizes)


def _flatten(net: OnnxTrace, x: Array) -> Array:
    axis = net.attributes.get("axis", 1)
    return x.reshape(prod(x.shape[:axis]), prod(x.shape[axis:]))


def _slice(net: OnnxTrace, x: Array, *given: Tensor | None) -> Array:
    inputs = (*given, None, None, None, None)
    names = ("starts", "ends", "axes", "steps")
    starts, ends, axes, steps = map(net.option, names, inputs)
    for k, axis in enumerate(range(len(starts)) if axes is None else axes):
        step, size = 1 if steps is None else steps[k], x.shape[axis]
        first, last = (n + size if n < 0 else n for n in (starts[k], ends[k]))
        first = min(max(first, 0), size if step > 0 else size - 1)
        last = min(max(last, 0 if step > 0 else -1), size)
        x = np.take(x, np.arange(first, last, step), axis)
    return x


def _split(net: OnnxTrace, x: Tensor, sizes: Tensor | None = None) -> list[Tensor]:
    axis, outputs = net.attributes.get("axis", 0), len(net.operator.outputs)
    lengths = net.option("split", sizes) or [x.shape[axis] // outputs] * outputs
    parts = np.split(np.arange(x.shape[axis]), np.cumsum(lengths)[:-1])
    return [net.rearrange(lambda y, part=part: np.take(y, part, axis), x) for part in parts]


def _pad(net: OnnxTrace, x: Tensor, pads: Any = None, fill: Any = None) -> Tensor:
    widths, rank = net.option("pads", pads), len(x.shape)
    pairs = list(zip(widths[:rank], widths[rank:], strict=True))
    mode = net.attributes.get("mode", "constant")
    if mode != "constant":
        return net.rearrange(lambda array: np.pad(array, pairs, mode), x)
    return net.pad(x, pairs, net.option("value", fill, 0.0))


def _matmul(net: OnnxTrace, a: Tensor, b: Tensor) -> Tensor:
    is_row, is_column = len(a.shape) == 1, len(b.shape) == 1
    a = net.rearrange(lambda x: x[None], a) if is_row else a
    b = net.rearrange(lambda x: x[:, None], b) if is_column else b
    product = net.matmul(a, b)
    product = net.rearrange(lambda x: x[..., 0, :], product) if is_row else product
    return net.rearrange(lambda x: x[..., 0], product) if is_column else product


def _gemm(net: OnnxTrace, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    options, sides = net.attributes, ((a, "transA"), (b, "transB"))
    product = net.matmul(
        *[net.rearrange(np.transpose, x) if options.get(name) else x for x, name in sides]
    )
    product = net.multiply(product, net.constant(options.get("alpha", 1.0)))
    beta = options.get("beta", 1.0)
    return product if c is None or not beta else net.add(product, c, beta)


def _windows(net: OnnxTrace, x: Tensor, size: Sequence[int]) -> Windows:
    """Return the windows over the axes behind the first two."""
    rank, options = len(size), net.attributes
    steps, spread = (options.get(name, [1] * rank) for name in ("strides", "dilations"))
    pads, auto = options.get("pads", [0] * 2 * rank), options.get("auto_pad", "NOTSET")
    padding = list(zip(pads[:rank], pads[rank:], strict=True))
    if auto != "NOTSET":
        padding = []
        for length, k, step, apart in zip(x.shape[2:], size, steps, spread, strict=True):
            missing = max(0, (-(-length // step) - 1) * step + apart * (k - 1) + 1 - length)
            ends = (0, 0) if auto == "VALID" else (missing // 2, (missing + 1) // 2)
            padding.append(ends[::-1] if auto == "SAME_LOWER" else ends)
    return Windows(tuple(steps), padding, tuple(spread))


def _resize(net: OnnxTrace, x: Tensor, *options: Tensor | None) -> Tensor:
    """Take the element before each position, for integer scales, or interpolate."""
    is_new = net.operator.kind == "Resize" and len(options) > 1  # since version 11
    sizes = net.option("sizes", options[2]) if len(options) > 2 else None
    scales = net.option("scales", (*options, None)[len(options) > 1]) or []
    way = net.attributes.get("coordinate_transformation_mode", "half_pixel")
    for axis, old in enumerate(x.shape):
        new = sizes[axis] if sizes else int(old * scales[axis])
        if net.attributes.get("mode") == "linear":
            scale = new / old if sizes else scales[axis]
            if scale != 1:
                x = net.layer("interpolate", x, axis, new, scale, way if is_new else "asymmetric")
            continue
        index = np.arange(new) // (new // old)
        x = net.rearrange(lambda y, i=index, k=axis: np.take(y, i, k), x)
    return x


def _norm(net: OnnxTrace, x: Tensor, scale: Tensor, b: Tensor) -> Tensor:
    epsilon = net.attributes.get("epsilon", float(np.float32(1e-5)))
    return net.group_norm(x, scale, b, net.attributes.get("num_groups", x.shape[1]), epsilon)


_GATES = {"RNN": [0], "GRU": [1, 0, 2], "LSTM": [0, 2, 3, 1]}
"""The gates of a recurrent operator in the order of PyTorch."""


def _recurrent(net: OnnxTrace, x: Tensor, w: Any, r: Any, b: Any = None, *_: Any) -> list[Tensor]:
    kind, option, size = net.operator.kind, net.attributes.get, r.shape[-1]
    function = option("activations", ["Tanh"])[0] if kind == "RNN" else kind
    rows = [gate * size + row for gate in _GATES[kind] for row in range(size)]
    ways = []
    for k in range(len(w.value)):
        biases = np.zeros((2, len(rows))) if b is None else b.value[k].reshape(2, -1)
        weights = [FixedTensor(a[rows]) for a in (w.value[k], r.value[k], *biases)]
        step = -1 if k or option("direction") == "reverse" else 1
        turned = net.rearrange(lambda a, step=step: a[::step], x)
        steps = net.recurrent(function.lower(), turned, weights)
        y = net.rearrange(lambda *parts: np.stack(parts), *steps[::step])
        ways.append([y, steps[-1]])
    sequences, lasts = zip(*ways, strict=True)
    join = net.rearrange
    return [join(lambda *a: np.stack(a, 1), *sequences), join(lambda *a: np.stack(a), *lasts)]


def _conv_transpose(net: OnnxTrace, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    windows, groups = _windows(net, x, w.shape[2:]), net.attributes.get("group", 1)
    more = net.attributes.get("output_padding", [0] * len(windows.stride))
    return net.convolution(x, w, b, windows._replace(more=more), groups)


def _depth_to_space(net: OnnxTrace, x: Tensor) -> Tensor:
    size, sizes = net.attributes["blocksize"], x.shape
    if net.attributes.get("mode", "DCR") == "DCR":
        corners = (sizes[0], size**2, -1, *sizes[2:])
        x = net.rearrange(lambda y: y.reshape(corners).swapaxes(1, 2).reshape(sizes), x)
    return net.pixel_shuffle(x, size)


def _pool(net: OnnxTrace, x: Tensor) -> Tensor:
    size = net.attributes["kernel_shape"]
    windows = _windows(net, x, size)
    if net.operator.kind == "MaxPool":
        return net.pool("max", x, size, windows)
    inside = windows_of(np.zeros(x.shape, np.int64), size, windows) == 0  # padding is negative
    inside |= bool(net.attributes.get("count_include_pad"))
    counts = inside.sum(tuple(range(len(x.shape), inside.ndim)))
    return net.divide(net.pool("sum", x, size, windows), FixedTensor(counts.astype(np.float64)))


def _reduce(net: OnnxTrace, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = net.option("axes", axes)
    if not chosen and net.attributes.get("noop_with_empty_axes"):
        return x
    keep, is_mean = bool(net.attributes.get("keepdims", 1)), net.operator.kind == "ReduceMean"
    return net.sum(x, chosen or range(len(x.shape)), keep, is_mean)


def _clip(net: OnnxTrace, x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    bottom, top = net.option("min", low, -inf), net.option("max", high, inf)
    limit = np.finfo("float64" if net.is_wide else "float32").max
    return net.clip(x, None if bottom <= -limit else bottom, None if top >= limit else top)


_OPERATORS: dict[str, Callable[..., Any]] = {
    "Abs": OnnxTrace.absolute,
    "AveragePool": _pool,
    "BatchNormalization": lambda net, x, *weights: net.batch_norm(
        x, *weights, net.attributes.get("epsilon", float(np.float32(1e-5)))
    ),
    "Cast": _cast,
    "Clip": _clip,
    "Concat": lambda net, *parts: net.rearrange(
        lambda *arrays: np.concatenate(arrays, net.attributes["axis"]), *parts
    ),
    "Constant": _constant,
    "ConstantOfShape": lambda net, shape: FixedTensor(
        np.full(shape.value, net.attributes.get("value", np.zeros(1, np.float32))[0])
    ),
    "Conv": lambda net, x, w, b=None: net.convolution(
        x, w, b, _windows(net, x, w.shape[2:]), net.attributes.get("group", 1)
    ),
    "ConvTranspose": _conv_transpose,
    "DepthToSpace": _depth_to_space,
    "Dropout": lambda net, x, *_: x,
    "Elu": lambda net, x: net.layer("elu", x, net.attributes.get("alpha", 1.0)),
    "Erf": OnnxTrace.erf,
    "Expand": _change(
        lambda net, x, to: np.broadcast_to(x, np.broadcast_shapes(x.shape, net.option("", to)))
    ),
    "Flatten": _change(_flatten),
    "GRU": _recurrent,
    "Gather": _change(
        lambda net, x, at: np.take(x, net.option("", at), net.attributes.get("axis", 0))
    ),
    "Gemm": _gemm,
    "GlobalAveragePool": lambda net, x: net.sum(x, range(2, len(x.shape)), True, True),
    "GroupNormalization": _norm,
    "HardSigmoid": lambda net, x: net.layer(
        "hard_sigmoid", x, net.attributes.get("alpha", _HARD), net.attributes.get("beta", 0.5)
    ),
    "HardSwish": lambda net, x: net.layer("hard_swish", x),
    "Identity": lambda net, x: x,
    "InstanceNormalization": _norm,
    "LSTM": _recurrent,
    "LeakyRelu": lambda net, x: net.leaky_relu(
        x, net.attributes.get("alpha", float(np.float32(0.01)))
    ),
    "MatMul": _matmul,
    "Max": lambda net, *parts: reduce(net.maximum, parts),
    "MaxPool": _pool,
    "Min": lambda net, *parts: reduce(net.minimum, parts),
    "Neg": lambda net, x: net.multiply(x, net.constant(-1.0)),
    "PRelu": OnnxTrace.leaky_relu,
    "Pad": _pad,
    "Pow": lambda net, x, e: net.function("square", net.add(x, FixedTensor(e.value * 0.0))),
    "RNN": _recurrent,
    "ReduceMean": _reduce,
    "ReduceSum": _reduce,
    "Reshape": _change(_reshape),
    "Resize": _resize,
    "Shape": lambda net, x: FixedTensor(
        np.array(x.shape[net.attributes.get("start") : net.attributes.get("end")], np.int64)
    ),
    "Slice": _change(_slice),
    "Softmax": lambda net, x: x,  # the last one, which is left out
    "Split": _split,
    "Squeeze": _change(
        lambda net, x, axes=None: np.squeeze(x, tuple(net.option("axes", axes) or ()) or None)
    ),
    "Transpose": _change(lambda net, x: np.transpose(x, net.attributes.get("perm"))),
    "Unsqueeze": _change(lambda net, x, axes=None: np.expand_dims(x, net.option("axes", axes))),
    "Upsample": _resize,
}
_OPERATORS |= dict.fromkeys(_INTEGERS, _compute)
_OPERATORS |= {
    name: lambda net, x, name=name: net.function(name.lower(), x)
    for name in ("Exp", "Gelu", "Mish", "Reciprocal", "Relu", "Sigmoid", "Softplus", "Tanh")
}
