"""Lowers graphs of ONNX: tensors are elements of nodes, and operators add nodes.

A tensor is a constant, or a `Value`: numbers of one node, in some order, so that reshaping and
permuting cost nothing. The operators are the affine, piecewise linear and smooth ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product
from math import ceil, prod, sqrt
from operator import index
from typing import Any, NamedTuple

import numpy as np

from anydevice._proofs.checking.network import (
    FormatError,
    Network,
    Node,
    NotSupportedError,
    check_network,
)
from anydevice._proofs.checking.readers import (
    Array,
    Graph,
    Operator,
    integers,
    message,
    read_graph,
    tensor,
    text,
)

LARGEST = 2 << 30
"""The limit of bytes for all matrices of a network."""
MAX_ELEMENTS, _COST = 1 << 26, 32
"""The limit of elements of all tensors; one of a node costs more, as it is computed often."""
ROUNDED = 2.0**-52
"""The largest relative error of a number after one or two operations of float64."""
_DOUBLE = 11
_DTYPES = {1: "f4", 6: "i4", 7: "i8", 9: "?", _DOUBLE: "f8"}
"""The dtypes by ONNX's numbers. Constants of float32 are stored in float64."""
_SLOPE, _EPSILON, _HARD = (float(np.float32(number)) for number in (0.01, 1e-5, 0.2))
"""The defaults of a leaky ReLU, a batch norm, a hard sigmoid; attributes of ONNX are float32."""
_MILD = 2.0**20
_COORDINATES = "coordinate_transformation_mode"
_REPEATS = (("asymmetric", "floor"), ("half_pixel", "round_prefer_floor"))
"""Coordinates and roundings by which a resize to a multiple repeats elements."""
_WAYS = ("pytorch_half_pixel", "half_pixel", "asymmetric", "align_corners")
_ONE = ((), (1,))
"""The shapes of one number that broadcasting does not notice."""
_ONLY_GELU = "erf is known as a part of GELU alone"
_HARMLESS = {"cubic_coeff_a", "momentum", "seed", "storage_order", "saturate"}
"""Attributes that do not change the outputs that are read."""
_OF_SEVERAL = {"Add", "Concat", "Div", "Gemm", "MatMul", "Max", "Min", "Mul", "Sub"}
"""Operators of several tensors; the others have constants behind the first."""


def read_onnx(data: bytes) -> tuple[Network, bool]:
    """Return the network of an ONNX file, and whether a last softmax was dropped.

    `NotSupportedError` names the first operator that cannot be lowered, before any work.
    """
    graph = read_graph(data)
    for operator in graph.operators:
        if operator.kind not in _OPERATORS or not operator.outputs:
            raise NotSupportedError(
                f"{operator} cannot be proved: it is not affine, piecewise linear or a known "
                "smooth function; remove it from the graph, or prove the part before it"
            )
    lowering = Lowering(graph)
    return check_network(lowering.run()), lowering.softmax


class Value(NamedTuple):
    """A tensor of the elements `places` of a node; `alone` if nothing else uses this node."""

    node: int
    places: Array
    alone: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.places.shape)


class Erf(NamedTuple):
    """The tensor scale * erf(of) + shift, which a product makes a GELU."""

    of: Value
    scale: float = 1.0
    shift: float = 0.0


Tensor = Array | Value | Erf


class Lowering:
    """Turns operators of a graph into nodes, one by one: now `operator` with its `attributes`."""

    operator: Operator
    attributes: Attributes

    def __init__(self, graph: Graph, join: bool = True) -> None:
        self.graph, self.softmax, self.join = graph, False, join
        self.wide = graph.dtype == _DOUBLE  # whether some tensor may be float64
        self.nodes: list[Node] = []
        self.elements = self.bytes = 0
        self.sources: dict[int, tuple[str, Value]] = {}
        self.inputs = prod(graph.shape)
        self.tensors: dict[str, Tensor] = dict(graph.constants)
        self.tensors[graph.input] = Value(0, np.arange(self.inputs).reshape(graph.shape))
        names = [name for operator in graph.operators for name in operator.inputs]
        self.uses = Counter([*names, graph.output])

    @np.errstate(all="ignore")
    def run(self) -> Network:
        """Lower all operators; return the network of the nodes that the output depends on."""
        for operator in self.graph.operators:
            try:
                self.operator, self.attributes = operator, attributes_of(operator)
                inputs = [self._use(name) if name else None for name in operator.inputs]
                if operator.kind not in _OF_SEVERAL and any(
                    isinstance(x, tuple) for x in inputs[1:]
                ):
                    raise NotSupportedError("an input behind its first is no constant")
                results = _OPERATORS[operator.kind](self, *inputs)
                results = results if isinstance(results, list) else [results]
                self.elements += sum(prod(getattr(x, "shape", ())) for x in results)
                self.check_size()
                if unread := self.attributes.unread - _HARMLESS:
                    raise NotSupportedError(f"its attribute {min(unread)!r} is not known")
            except NotSupportedError as error:
                raise NotSupportedError(f"{operator}: {error}") from None
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise FormatError(f"{operator}: {error}") from error
            self.tensors.update(zip(operator.outputs, results, strict=False))
        last = self.tensors.get(self.graph.output)
        if not isinstance(last, Value):
            raise FormatError(f"its output {self.graph.output!r} is not computed from its input")
        if not last.node or not self._in_order(last):
            last = self.copy(last)
        return Network(self.inputs, tuple(self.nodes[: last.node])).pruned()

    def _use(self, name: str) -> Tensor:
        value = self.tensors[name]
        if isinstance(value, Value) and self.uses[name] > 1:
            return value._replace(alone=False)
        return value

    def size(self, node: int) -> int:
        return self.nodes[node - 1].size if node else self.inputs

    def _in_order(self, value: Value) -> bool:
        return np.array_equal(value.places.reshape(-1), np.arange(self.size(value.node)))

    def free(self, value: Value) -> bool:
        """Whether the value is a whole affine node that nothing else uses, and may change."""
        own = self.join and value.alone and value.node > 0
        own = own and not self.nodes[value.node - 1].function
        return own and self._in_order(value._replace(places=np.sort(value.places, axis=None)))

    def check_size(self, *shape: int) -> None:
        """Refuse a tensor of a shape that does not exist yet, if all would be too large."""
        if self.elements + prod(shape) * bool(shape) > MAX_ELEMENTS:
            raise NotSupportedError(f"all tensors would have more than {MAX_ELEMENTS} elements")

    def broadcast(self, *arrays: Array) -> tuple[Array, ...]:
        self.check_size(*np.broadcast_shapes(*[array.shape for array in arrays]))
        return np.broadcast_arrays(*arrays)

    def zeros(self, rows: int, columns: int) -> Array:
        if rows * columns * 8 + self.bytes > LARGEST:
            size, gib = f"{rows} x {columns}", 2.0**-30
            raise NotSupportedError(
                f"its matrix of {size} is too large to be built: with {self.bytes * gib:.2g} GiB "
                f"of those before it, there would be more than {LARGEST * gib:.2g} GiB"
            )
        return np.zeros((rows, columns))

    def add(
        self,
        terms: Sequence[tuple[Value, Array | float]],
        bias: Array,
        function: str = "",
        roundings: int = 0,
        inexact: float = 0.0,
    ) -> Value:
        """Add a node of the shape of its bias; a weight of one axis, or a number, is a diagonal."""
        self.elements += _COST * bias.size
        self.check_size()
        weights: dict[int, Array] = {}
        for value, weight in terms:
            weight = weight * np.ones(bias.size) if isinstance(weight, float) else weight
            new = self._columns(value, weight)
            if value.node in weights:
                new = _exact_sum(weights[value.node], new)
            weights[value.node] = new
        flat = np.array(bias, np.float64).reshape(-1)
        node = Node(tuple(weights), tuple(weights.values()), flat, function, roundings, inexact)
        self.bytes += sum(weight.nbytes for weight in node.weights)
        self.nodes.append(node)
        return Value(len(self.nodes), np.arange(bias.size).reshape(bias.shape))

    def copy(self, value: Value, function: str = "") -> Value:
        """Add a node of the elements of a value, with a function."""
        return self.add([(value, 1.0)], np.zeros(value.shape), function)

    def apply(self, value: Value, function: str) -> Value:
        """Apply a function to each element, in the node itself if that is free."""
        if self.free(value):
            self.nodes[value.node - 1] = self.nodes[value.node - 1]._replace(function=function)
            return value
        result = self.copy(value, function)
        self.sources[result.node] = (function, value)
        return result

    def larger(self, a: Value, b: Value, sign: float = 1.0) -> Value:
        """Return the maximum b + relu(a - b), or the minimum; no execution rounds it."""
        more = self.add([(a, sign), (b, -sign)], np.zeros(a.shape), "relu")
        return self.add([(b, 1.0), (more, sign)], np.zeros(a.shape))

    def product(self, a: Value, b: Value) -> Value:
        """Return the product ((a + b)^2 - (a - b)^2) / 4, which an execution rounds once."""
        zeros = np.zeros(a.shape)
        plus = self.add([(a, 1.0), (b, 1.0)], zeros, "square")
        minus = self.add([(a, 1.0), (b, -1.0)], zeros, "square")
        return self.add([(plus, 0.25), (minus, -0.25)], zeros, roundings=1)

    def cancel(self, value: Value, weight: Array) -> None:
        """Add a term with both signs to the last sum: it changes the error bound, not the value."""
        node, weight = self.nodes[-1], self._columns(value, weight)
        self.bytes += 2 * weight.nbytes
        inputs = *node.inputs, value.node, value.node
        self.nodes[-1] = node._replace(inputs=inputs, weights=(*node.weights, weight, -weight))

    def _columns(self, value: Value, weight: Array) -> Array:
        if self._in_order(value):
            return np.ascontiguousarray(weight, np.float64)
        places = value.places.reshape(-1)
        full = self.zeros(len(weight), self.size(value.node))
        if weight.ndim == 1:
            full[np.arange(len(weight)), places] = weight
        elif len(np.unique(places)) == len(places):
            full[:, places] = weight
        else:
            raise NotSupportedError("one number is several elements of its input")
        return full


class Attributes(dict[str, Any]):
    """Attributes by name; those that a lowering never looked at stay `unread`."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.unread = set(values)

    def get(self, name: str, default: Any = None) -> Any:
        self.unread.discard(name)
        return super().get(name, default)


def attributes_of(operator: Operator) -> Attributes:
    """Return the attributes of an operator by name, as numbers, texts, lists and arrays."""
    attributes = dict[str, Any]()
    for fields in map(message, operator.attributes):
        name, (kind,) = text(fields.pop(1)), fields.pop(20, [0])
        fields.pop(13, None)  # a comment
        field, *others = fields or [_LISTS.get(kind, 0)]
        if others or kind not in (0, _KINDS.get(field)) or name in attributes:
            raise FormatError(f"its attribute {name!r} has two values, or one of another type")
        attributes[name] = _READERS[field](fields[field])
    return Attributes(attributes)


def _floats(contents: list[Any]) -> list[float]:
    floats: list[float] = np.frombuffer(b"".join(map(bytes, contents)), "<f4").tolist()
    return floats


_FLOAT, _FLOATS = -(2 << 3 | 5), -(7 << 3 | 5)
"""The fields of numbers of four bytes; a list of them may be packed into one field 7, too."""
_KINDS = {_FLOAT: 1, 3: 2, 4: 3, 5: 4, 7: 6, _FLOATS: 6, 8: 7, 9: 8}
_LISTS = {6: 7, 7: 8, 8: 9}
"""The types of attributes by field, and the fields of those that may be empty."""
_READERS: dict[int, Callable[[list[Any]], Any]] = {
    _FLOAT: lambda contents: _floats(contents)[-1],
    3: lambda contents: index(contents[-1]),
    4: text,
    5: lambda contents: tensor(*contents)[1],
    7: _floats,
    _FLOATS: _floats,
    8: lambda contents: list(integers(contents)),
    9: lambda contents: [text([content]) for content in contents],
}


def _exact_sum(a: Array, b: Array) -> Array:
    a, b = (np.diag(x) if a.ndim != b.ndim and x.ndim == 1 else x for x in (a, b))
    total = a + b
    if ((total - a != b) | (total - b != a)).any():
        raise NotSupportedError("a sum of its weights is no number of float64")
    return total


def _shape_of(function: Callable[..., Array]) -> Callable[..., Tensor]:
    """Return an operator that only rearranges elements, also of constants."""

    def run(net: Lowering, x: Tensor, *others: Array) -> Tensor:
        if isinstance(x, Value):
            return x._replace(places=function(net.attributes, x.places, *others))
        if isinstance(x, Erf):
            raise NotSupportedError(_ONLY_GELU)
        return function(net.attributes, x, *others)

    return run


def _reshape(attributes: Attributes, x: Array, shape: Array | None = None) -> Array:
    sizes = list(attributes.get("shape") if shape is None else shape.reshape(-1))
    keep = not attributes.get("allowzero", 0)
    return x.reshape([x.shape[i] if keep and n == 0 else int(n) for i, n in enumerate(sizes)])


def _gather(net: Lowering, x: Tensor, indices: Array) -> Tensor:
    axis = net.attributes.get("axis", 0)
    if not isinstance(x, Erf):
        net.check_size(prod(x.shape) // x.shape[axis] * indices.size)
    return _shape_of(lambda _, x: np.take(x, indices, axis))(net, x)


def _axes(attributes: Attributes, axes: Array | None) -> tuple[int, ...] | None:
    chosen = attributes.get("axes") if axes is None else axes.reshape(-1)
    return None if chosen is None else tuple(int(axis) for axis in chosen)


def _slice(attributes: Attributes, x: Array, *parts: Array) -> Array:
    names = ("starts", "ends", "axes", "steps")
    lists: list[Any] = [None if part is None else list(part.reshape(-1)) for part in parts]
    lists = lists or [attributes.get(name) for name in names[:3]]
    starts, ends, axes, steps = (*lists, None, None)[:4]
    cut = [slice(None)] * x.ndim
    for k, (start, end) in enumerate(zip(starts or [], ends or [], strict=True)):
        axis, step = (axes[k] if axes else k), (steps[k] if steps else 1)
        first = max(int(start), -x.shape[axis])
        cut[axis] = slice(first, int(end) if end > -(1 << 62) else None, int(step))
    return x[tuple(cut)]


def _cast(net: Lowering, x: Tensor) -> Tensor:
    kind = net.attributes.get("to", 0)
    is_float = _DTYPES.get(kind) in ("f4", "f8")
    if isinstance(x, Erf) or kind not in _DTYPES or not (is_float or isinstance(x, np.ndarray)):
        raise NotSupportedError(f"it converts to dtype {kind}, which is not float32 or float64")
    if isinstance(x, Value):
        if kind != _DOUBLE and net.wide:  # it rounds
            return net.add([(x, 1.0)], np.zeros(x.shape), roundings=1)
        net.wide |= kind == _DOUBLE
        return x
    dtype = np.dtype(_DTYPES[kind])
    edge = 2.0 ** (8 * dtype.itemsize - 1) if x.dtype.kind + dtype.kind == "fi" else np.inf
    if (np.abs(x) >= edge).any() or (np.isnan(x).any() and not is_float):
        raise NotSupportedError(f"it converts a number that {dtype} does not hold")
    x = x.astype(dtype)
    return x.astype(np.float64) if is_float else x


def _dropout(net: Lowering, x: Tensor, *others: Any) -> Tensor:
    if any(isinstance(x, Value) or np.any(x) for x in others[1:] if x is not None):
        raise NotSupportedError("it is in training mode")
    return x


def _constant(net: Lowering) -> Tensor:
    for name in ("value", "value_float", "value_floats", "value_int", "value_ints"):
        if name in net.attributes:
            return np.asarray(net.attributes.get(name), np.int64 if "int" in name else None)
    raise NotSupportedError("it has no numbers")


def _constant_of_shape(net: Lowering, shape: Array) -> Tensor:
    if prod(int(n) for n in shape) > 1 << 16 or len(shape) > 8:
        raise NotSupportedError("it is larger than the shapes of tensors are")
    value = net.attributes.get("value", np.zeros(1))
    return np.full([int(n) for n in shape], value.reshape(-1)[0], value.dtype)


def _concat(net: Lowering, *parts: Any) -> Any:
    axis = net.attributes.get("axis")
    net.check_size(sum(prod(part.shape) for part in parts))
    if not any(isinstance(part, Value) for part in parts):
        return np.concatenate(parts, axis)
    values = [part for part in parts if isinstance(part, Value)]
    if len(values) == len(parts) and len({value.node for value in values}) == 1:
        return values[0]._replace(places=np.concatenate([v.places for v in values], axis))
    shapes = [np.zeros(part.shape) for part in parts]
    bias = np.concatenate(
        [z if isinstance(p, Value) else p for p, z in zip(parts, shapes, strict=True)], axis
    )
    where = np.concatenate([z + k for k, z in enumerate(shapes)], axis).reshape(-1)
    terms = []
    for k, part in enumerate(parts):
        if isinstance(part, Value):
            rows = np.nonzero(where == k)[0]
            matrix = net.zeros(bias.size, part.places.size)
            matrix[rows, np.arange(len(rows))] = 1.0
            if len(np.unique(part.places)) < part.places.size:
                part = net.copy(part)
            terms.append((part, matrix))
    return net.add(terms, bias)


def _split_axis(net: Lowering, x: Value, sizes: Array | None = None) -> list[Value]:
    axis = net.attributes.get("axis", 0)
    lengths = net.attributes.get("split") if sizes is None else sizes.tolist()
    count = net.attributes.get("num_outputs", len(net.operator.outputs))
    if count != len(net.operator.outputs):
        raise FormatError("it has not as many outputs as parts")
    edges = np.cumsum(lengths)[:-1] if lengths else count
    return [x._replace(places=p, alone=False) for p in np.split(x.places, edges, axis)]


def _pad(net: Lowering, x: Value, pads: Any = None, value: Any = None) -> Value:
    mode = net.attributes.get("mode", "constant")
    amounts = np.array(net.attributes.get("pads") if pads is None else pads).reshape(2, -1).T
    if len(amounts) != len(x.shape) or (amounts < 0).any() or amounts.sum() > 1 << 20:
        raise NotSupportedError("it pads by a negative or a huge amount, or other axes")
    net.check_size(*(amounts.sum(1) + x.shape).tolist())
    if mode != "constant":
        if mode not in ("edge", "reflect") or (mode == "reflect" and (x.shape <= amounts.T).any()):
            raise NotSupportedError(f"its mode is {mode!r}, or it reflects more than there is")
        pad: Any = np.pad
        return net.copy(x._replace(places=pad(x.places, amounts, mode)))
    filler = float(value) if value is not None else net.attributes.get("value", 0.0)
    target = np.pad(np.arange(x.places.size).reshape(x.shape), amounts, constant_values=-1)
    inner = np.nonzero(target.reshape(-1) >= 0)[0]
    matrix = net.zeros(target.size, x.places.size)
    matrix[inner, target.reshape(-1)[inner]] = 1.0
    return net.add([(x, matrix)], np.where(target >= 0, 0.0, filler))


def _sum(net: Lowering, a: Any, b: Any) -> Tensor:
    sign = -1.0 if net.operator.kind == "Sub" else 1.0
    if isinstance(a, Erf) and isinstance(b, np.ndarray) and b.shape in _ONE and not a.shift:
        return a._replace(shift=sign * float(b.reshape(-1)[0]))
    if isinstance(b, Erf) and isinstance(a, np.ndarray) and sign > 0:
        return _sum(net, b, a)
    if isinstance(a, Erf) or isinstance(b, Erf):
        raise NotSupportedError(_ONLY_GELU)
    arrays = [x.places if isinstance(x, Value) else x for x in (a, b)]
    first, second = net.broadcast(*arrays)
    shape, zeros = first.shape, np.zeros(first.shape)
    if isinstance(a, Value) and isinstance(b, Value):
        terms = [(a._replace(places=first), 1.0), (b._replace(places=second), sign)]
        return net.add(terms, zeros, roundings=1)
    if isinstance(b, Value):
        return net.add([(b._replace(places=second), sign)], first, roundings=1)
    if not isinstance(a, Value):
        return _fold(net, np.subtract if sign < 0 else np.add, a, b)
    value, bias = a._replace(places=first), sign * second
    if not bias.any():
        return value
    node = net.nodes[a.node - 1] if shape == a.shape and net.free(a) else None
    if node is None or node.bias.any():
        return net.add([(value, 1.0)], bias, roundings=1)
    flat = np.zeros(node.size)
    flat[value.places] = bias
    net.nodes[a.node - 1] = node._replace(bias=flat, roundings=node.roundings + 1)
    return value


def _fold(net: Lowering, compute: Callable[..., Array], a: Array, b: Array) -> Array:
    """Compute with integers of one dtype, which wrap around."""
    if a.dtype != b.dtype or a.dtype.kind != "i":
        raise NotSupportedError("it computes with constants; simplify the model when exporting it")
    return np.asarray(compute(*net.broadcast(a, b)))


def _truncate(a: Array, b: Array) -> Array:
    """Divide integers as C does, towards 0."""
    if not b.all() or ((a == np.iinfo(a.dtype).min) & (b == -1)).any():  # processors end a program
        raise FormatError("it divides by 0, or its quotient is larger than its dtype")
    return np.asarray(a // b + ((a % b != 0) & ((a < 0) != (b < 0))))


def _mul(net: Lowering, a: Any, b: Any) -> Tensor:
    if isinstance(b, Erf) or not isinstance(a, Value | Erf):
        a, b = b, a
    if isinstance(a, Erf):
        return _gelu_of(net, a, b)
    if not isinstance(a, Value):
        return _fold(net, np.multiply, a, b)
    if isinstance(b, Value):
        return _silu_or_product(net, a, b)
    places, factors = net.broadcast(a.places, b)
    value = a._replace(places=places)
    return net.add([(value, factors.reshape(-1))], np.zeros(places.shape), roundings=1)


def _silu_or_product(net: Lowering, a: Value, b: Value) -> Value:
    for one, other in ((a, b), (b, a)) if a.shape == b.shape else ():
        function, source = net.sources.get(other.node, ("", None))
        if function == "sigmoid" and source is not None and source.node == one.node:
            inside = other.places.reshape(-1)
            if np.array_equal(source.places.reshape(-1)[inside], one.places.reshape(-1)):
                return net.copy(one, "silu")
    first, second = net.broadcast(a.places, b.places)
    return net.product(a._replace(places=first), b._replace(places=second))


def _gelu_of(net: Lowering, erf: Erf, other: Any) -> Tensor:
    """Multiply scale * erf(x / sqrt(2)) + scale with a number, or with a multiple of x (a GELU)."""
    if not isinstance(other, Value):
        if not isinstance(other, np.ndarray) or other.shape not in _ONE:
            raise NotSupportedError(_ONLY_GELU)
        factor = float(other.reshape(-1)[0])
        erf = erf._replace(scale=erf.scale * factor, shift=erf.shift * factor)
        if abs(np.frexp(factor)[0]) != 0.5 or not 1 / 16 <= abs(erf.scale) <= 16:
            raise NotSupportedError("erf is multiplied by other numbers than small powers of two")
        return erf
    x, inner = _multiple(net, erf.of)
    y, outer = _multiple(net, other)
    same = x.node == y.node and np.array_equal(x.places, y.places)
    if not same or abs(inner * sqrt(2.0) - 1.0) > 1e-6 or erf.scale != erf.shift:
        raise NotSupportedError(_ONLY_GELU)
    result, factor = net.copy(x, "gelu"), 2.0 * erf.scale * outer
    if factor == 1.0:
        return result
    return net.add([(result, factor)], np.zeros(result.shape), roundings=1, inexact=ROUNDED)


def _multiple(net: Lowering, value: Value) -> tuple[Value, float]:
    """Return the value that this one is a multiple of, and the factor."""
    node = net.nodes[value.node - 1] if value.node else None
    if node is None or node.function or node.bias.any() or len(node.weights) > 1:
        return value, 1.0
    weight = node.weights[0]
    if weight.ndim != 1 or (weight != weight[0]).any():
        return value, 1.0
    return Value(node.inputs[0], value.places, False), float(weight[0])


def _div(net: Lowering, a: Any, b: Any) -> Tensor:
    if not isinstance(a, Value | Erf) and not isinstance(b, Value | Erf):
        return _fold(net, _truncate, a, b)
    if isinstance(a, Erf) or isinstance(b, Erf):
        raise NotSupportedError(_ONLY_GELU)
    if isinstance(b, Value):
        return _mul(net, a, net.copy(b, "reciprocal"))
    places, divisors = net.broadcast(a.places, b)
    if not divisors.all():
        raise FormatError("it divides by 0")
    factors = 1.0 / divisors.reshape(-1)
    inexact = 0.0 if (np.abs(np.frexp(divisors)[0]) == 0.5).all() else ROUNDED
    value = a._replace(places=places)
    return net.add([(value, factors)], np.zeros(places.shape), roundings=2, inexact=inexact)


def _matmul(net: Lowering, a: Any, b: Any) -> Value:
    value, matrix = (a, b) if isinstance(a, Value) else (b, a)
    if not isinstance(value, Value) or isinstance(matrix, Value | Erf) or matrix.ndim > 2:
        raise NotSupportedError("it is not the product of a tensor with one matrix of constants")
    transposed = value is b and len(value.shape) > 1
    if value is b:
        matrix = matrix.T
    if transposed:
        value = value._replace(places=np.swapaxes(value.places, -1, -2))
    result = _product(net, value, matrix[:, None] if matrix.ndim == 1 else matrix)
    if matrix.ndim == 1:  # a vector of constants leaves no axis
        return result._replace(places=result.places[..., 0])
    return result._replace(places=np.swapaxes(result.places, -1, -2)) if transposed else result


def _product(net: Lowering, value: Value, matrix: Array, **node: Any) -> Value:
    """Return tensor @ matrix, for each row of the tensor."""
    if matrix.ndim != 2 or value.shape[-1] != len(matrix):
        raise FormatError(f"shapes {value.shape} and {matrix.shape} have no product")
    full, bias = _blocks(net, value, matrix), np.zeros((*value.shape[:-1], matrix.shape[1]))
    return net.add([(value, full)], bias, **{"roundings": len(matrix), **node})


def _blocks(net: Lowering, value: Value, matrix: Array) -> Array:
    """Return the weights of tensor @ matrix: the matrix for each row of the tensor."""
    rows, (terms, columns) = prod(value.shape[:-1]), matrix.shape
    if rows == 1:
        return matrix.T
    full = net.zeros(rows * columns, rows * terms)
    for k in range(rows):
        full[k * columns : (k + 1) * columns, k * terms : (k + 1) * terms] = matrix.T
    return full


def _gemm(net: Lowering, a: Any, b: Any, c: Any = None) -> Value:
    attributes = net.attributes
    alpha, beta = attributes.get("alpha", 1.0), attributes.get("beta", 1.0)
    if not isinstance(a, Value) or isinstance(b, Value) or isinstance(c, Value):
        raise NotSupportedError("it is not the product of a tensor with constants")
    if attributes.get("transA", 0):
        a = a._replace(places=a.places.T)
    product = _product(net, a, b.T if attributes.get("transB", 0) else b)
    if alpha != 1.0:
        _check_mild(alpha, 1 / alpha if alpha else np.inf)
        product = net.add([(product, alpha)], np.zeros(product.shape), roundings=1)
    if c is None or beta == 0:
        return product
    if beta != 1.0:
        raise NotSupportedError("its beta is not 1")
    result = _sum(net, product, c)
    assert isinstance(result, Value)
    return result


def _windows(net: Lowering, shape: Sequence[int], kernel: Sequence[int]) -> tuple[Array, list[int]]:
    """Return windows (channels, kernel, windows), -1 for padding, and their numbers by axis."""
    attributes, rank, spatial = net.attributes, len(kernel), shape[2:]
    if len(spatial) != rank or shape[0] != 1 or rank not in (1, 2):
        raise NotSupportedError(f"an input of shape {tuple(shape)} and a window of {tuple(kernel)}")
    strides = attributes.get("strides", [1] * rank)
    dilations = attributes.get("dilations", [1] * rank)
    if min(*strides, *dilations, *kernel) < 1 or attributes.get("ceil_mode", 0):
        raise NotSupportedError("its strides or its ceil_mode")
    spans = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    pads = list(attributes.get("pads", [0] * 2 * rank))
    auto = attributes.get("auto_pad", "NOTSET")
    if auto == "VALID":
        pads = [0] * 2 * rank
    elif auto in ("SAME_UPPER", "SAME_LOWER") and max(dilations) == 1:
        triples = zip(spatial, strides, spans, strict=True)
        total = [max(0, (ceil(n / s) - 1) * s + span - n) for n, s, span in triples]
        less, more = [t // 2 for t in total], [t - t // 2 for t in total]
        pads = [*less, *more] if auto == "SAME_UPPER" else [*more, *less]
    elif auto != "NOTSET":
        raise NotSupportedError(f"its auto_pad is {auto!r}")
    if len(pads) != 2 * rank or min(pads) < 0 or max(pads) > max(spans):
        raise NotSupportedError(f"it pads by {pads}")
    around = [(0, 0), *zip(pads[:rank], pads[rank:], strict=True)]
    whole = [n + sum(ends) for n, ends in zip(shape[1:], around, strict=True)]
    sizes = [(n - s) // t + 1 for n, s, t in zip(whole[1:], spans, strides, strict=True)]
    if min(sizes) < 1:
        raise FormatError("its window is larger than its input")
    net.check_size(*whole)
    net.check_size(_COST, shape[1], *kernel, *sizes)
    padded = np.pad(np.arange(prod(shape)).reshape(shape[1:]), around, constant_values=-1)
    parts = []
    for offsets in product(*(range(k) for k in kernel)):
        cut = [
            slice(o * d, o * d + (n - 1) * s + 1, s)
            for o, d, n, s in zip(offsets, dilations, sizes, strides, strict=True)
        ]
        parts.append(padded[(slice(None), *cut)].reshape(len(padded), -1))
    return np.stack(parts, 1), sizes


def _kernel_matrix(net: Lowering, shape: Sequence[int], w: Array) -> tuple[Array, list[int]]:
    """Return the matrix of a convolution over an input of a shape, and the sizes of its output."""
    groups = net.attributes.get("group", 1)
    windows, sizes = _windows(net, shape, w.shape[2:])
    if net.attributes.get("kernel_shape", list(w.shape[2:])) != list(w.shape[2:]):
        raise FormatError("its kernel_shape is not the shape of its kernels")
    channels, outputs = shape[1] // groups, w.shape[0] // groups
    if w.shape[1] != channels or channels * groups != shape[1] or outputs * groups != len(w):
        raise FormatError(f"shapes {tuple(shape)} and {w.shape} do not fit together")
    places = windows.shape[2]
    matrix = net.zeros(len(w) * places, prod(shape))
    for k in range(len(w)):
        group = k // outputs
        below = windows[group * channels : (group + 1) * channels].reshape(-1, places)
        term, place = np.nonzero(below >= 0)
        matrix[k * places + place, below[term, place]] = w[k].reshape(-1)[term]
    return matrix, sizes


def _conv(net: Lowering, x: Value, w: Array, b: Any = None) -> Value:
    matrix, sizes = _kernel_matrix(net, x.shape, w)
    bias = np.zeros((len(w), prod(sizes))) + (0.0 if b is None else b.reshape(-1, 1))
    bias, roundings = bias.reshape(1, len(w), *sizes), w[0].size + (b is not None)
    return net.add([(x, matrix)], bias, roundings=roundings)


def _conv_transpose(net: Lowering, x: Value, w: Array, b: Any = None) -> Value:
    """Multiply by the transposed matrix of the convolution that these kernels are of."""
    get, rank, outputs = net.attributes.get, w.ndim - 2, w.shape[1] * net.attributes.get("group", 1)
    if get("auto_pad", "NOTSET") != "NOTSET":
        raise NotSupportedError("its auto_pad")
    pads, more = get("pads", [0] * 2 * rank), get("output_padding", [0] * rank)
    steps, spread = get("strides", [1] * rank), get("dilations", [1] * rank)
    per_axis = zip(x.shape[2:], w.shape[2:], steps, spread, strict=True)
    spans = [s * (n - 1) + d * (k - 1) + 1 for n, k, s, d in per_axis]
    sizes = [n + more[i] - pads[i] - pads[i + rank] for i, n in enumerate(spans)]
    matrix, below = _kernel_matrix(net, (1, outputs, *sizes), w)
    if (1, len(w), *below) != x.shape:
        raise FormatError(f"an input of shape {x.shape} and kernels of shape {w.shape}")
    bias = np.zeros((1, outputs, *sizes)) + (0.0 if b is None else b.reshape(-1, *[1] * rank))
    terms = len(w) // (outputs // w.shape[1]) * prod(w.shape[2:])
    return net.add([(x, matrix.T)], bias, roundings=terms + (b is not None))


def _resize(net: Lowering, x: Value, *options: Any) -> Value:
    """Repeat each element an integer number of times along each axis."""
    get, way = net.attributes.get, ("asymmetric", "floor")
    _, scales, sizes = (None, *options, get("scales"), None)[:3]
    if len(options) > 1:  # from version 11 on
        way = get(_COORDINATES, "half_pixel"), get("nearest_mode", "round_prefer_floor")
        _, scales, sizes = (*options, None)[:3]
    times = np.asarray(scales) if sizes is None else sizes / np.array(x.shape)
    if get("mode", "nearest") == "linear":
        new = np.floor(times * x.shape) if sizes is None else sizes
        return _interpolate(net, x, times, [int(n) for n in new], way[0])
    repeats = get("mode", "nearest") == "nearest" and way in _REPEATS and min(times) >= 1
    if not repeats or (times % 1).any():
        raise NotSupportedError(
            "its scale is not an integer; use an integer scale, or mode 'linear'"
        )
    net.check_size(*(times * x.shape).astype(int).tolist())
    places = x.places
    for axis, count in enumerate(times.astype(int)):
        places = np.repeat(places, count, axis)
    return net.copy(x._replace(places=places))


def _interpolate(net: Lowering, x: Value, times: Array, sizes: Sequence[int], way: str) -> Value:
    """Resize one axis after another; the error bound includes rounded positions."""
    if net.attributes.get("antialias", 0) or way not in _WAYS:
        raise NotSupportedError(
            f"coordinate mode {way!r}, or antialias, is not supported; use half_pixel"
        )
    for axis, (old, new, scale) in enumerate(zip(x.shape, sizes, times.tolist(), strict=True)):
        if old == new and scale == 1:
            continue
        at = (np.arange(new) + 0.5) / scale - 0.5
        if way == "asymmetric":
            at = np.arange(new) / scale
        elif way == "align_corners" or (way == _WAYS[0] and new == 1):
            at = np.arange(new) * (old - 1) / max(new - 1, 1)
        at = np.clip(at, 0, old - 1)
        net.check_size(x.places.size // old * new)
        rows = net.copy(x._replace(places=np.moveaxis(x.places, axis, -1)))
        far = np.abs(np.arange(old)[:, None] - at)
        shares = np.maximum(1 - far, 0)
        y = _product(net, rows, shares, roundings=4 * old + 16, inexact=ROUNDED)
        if (np.array([*at, scale]) * 1024 % 1).any():
            net.cancel(rows, _blocks(net, rows, 1.0 * (far < 2)))
        x = y._replace(places=np.moveaxis(y.places, -1, axis))
    return x


def _depth_to_space(attributes: Attributes, x: Array) -> Array:
    size, (n, c, h, w) = attributes.get("blocksize"), x.shape
    if attributes.get("mode", "DCR") == "DCR":
        parts = x.reshape(n, size, size, c // size**2, h, w).transpose(0, 3, 4, 1, 5, 2)
    else:
        parts = x.reshape(n, c // size**2, size, size, h, w).transpose(0, 1, 4, 2, 5, 3)
    return parts.reshape(n, c // size**2, h * size, w * size)


def _average(net: Lowering, x: Value) -> Value:
    kernel = net.attributes.get("kernel_shape", x.shape[2:])
    windows, sizes = _windows(net, x.shape, kernel)
    channels, terms, places = windows.shape
    inside = windows >= 0
    whole = net.attributes.get("count_include_pad", 0)
    count = np.full((channels, places), terms) if whole else inside.sum(1)
    matrix = net.zeros(channels * places, x.places.size)
    channel, _, place = np.nonzero(inside)
    matrix[channel * places + place, windows[inside]] = (1.0 / count)[channel, place]
    bias = np.zeros((1, channels, *sizes))
    return net.add([(x, matrix)], bias, roundings=terms + 1, inexact=ROUNDED)


def _max_pool(net: Lowering, x: Value) -> Value:
    windows, sizes = _windows(net, x.shape, net.attributes.get("kernel_shape"))
    channels, _, places = windows.shape
    windows = np.where(windows < 0, windows.max(1, keepdims=True), windows)
    if windows.min() < 0:
        raise NotSupportedError("a window that has nothing but padding")
    flat = np.moveaxis(windows, 1, 0).reshape(-1, channels * places)
    value = x._replace(places=x.places.reshape(-1)[flat])
    while len(value.places) > 1:
        half = (len(value.places) + 1) // 2
        first, second = value.places[:half], value.places[-half:]
        value = net.larger(value._replace(places=first), value._replace(places=second))
    return value._replace(places=value.places.reshape(1, channels, *sizes))


def _mean(net: Lowering, x: Value, axes: Array | None = None) -> Value:
    chosen = _axes(net.attributes, axes)
    if not chosen and net.attributes.get("noop_with_empty_axes", 0):
        return x
    chosen = chosen or tuple(range(len(x.shape)))
    rest = [a for a in range(len(x.shape)) if a not in [c % len(x.shape) for c in chosen]]
    outer = prod(x.shape[a] for a in rest)
    terms = x.places.size // outer
    rows = np.moveaxis(x.places, rest, range(len(rest))).reshape(outer, terms)
    factors = np.full((terms, 1), 1.0 / terms if net.operator.kind == "ReduceMean" else 1.0)
    keep = net.attributes.get("keepdims", 1)
    shape = [n if a in rest else 1 for a, n in enumerate(x.shape) if a in rest or keep]
    y = _product(net, x._replace(places=rows), factors, roundings=terms + 1, inexact=ROUNDED)
    return y._replace(places=y.places.reshape(shape))


def _check_mild(*factors: Any) -> None:
    """Refuse factors so large that a step of an execution, which no node has, overflows.

    A number of a node is at most `smooth.LARGEST`, which leaves a factor of 2**28 to float32.
    """
    if not all((np.abs(factor) <= _MILD).all() for factor in factors):
        raise NotSupportedError(f"it multiplies by a number beyond {_MILD:g}, or divides by 0")


def _batch_norm(net: Lowering, x: Value, scale: Array, b: Array, mean: Array, var: Array) -> Value:
    if net.attributes.get("training_mode", 0) or len(net.operator.outputs) > 1:  # until version 13
        raise NotSupportedError("it is in training mode")
    if net.free(x):  # an execution may fold it into the layer before, which rounds more often
        node = net.nodes[x.node - 1]
        net.nodes[x.node - 1] = node._replace(roundings=node.roundings + 6)
    shape = (1, -1, *(1 for _ in x.shape[2:]))
    root = 1 / np.sqrt(var + net.attributes.get("epsilon", _EPSILON))
    factor = scale * root
    _check_mild(scale, root, factor)
    factors, means, shifts = (
        np.broadcast_to(array.reshape(shape), x.shape) for array in (factor, mean, b)
    )
    centred = net.add([(x, 1.0)], -means, roundings=4)
    terms = [(centred, factors.reshape(-1))]
    return net.add(terms, shifts, roundings=8, inexact=2.0**-50)


def _norm(net: Lowering, x: Value, scale: Array, b: Array) -> Value:
    """Normalize groups of channels, then scale and shift.

    An execution may take E(x^2) - E(x)^2 for the variance: the error counts the squares of x.
    """
    get, epsilon = net.attributes.get, net.attributes.get("epsilon", _EPSILON)
    count, column = (
        prod(x.shape[1:]) // get("num_groups", len(scale)),
        (-1, *[1] * len(x.shape[2:])),
    )
    _check_mild(scale, 1 / np.sqrt(epsilon), scale / np.sqrt(epsilon))
    if net.wide or count < 2 or get("stash_type", 1) != 1:
        raise NotSupportedError(
            "it normalizes float64 or groups of one element, or has a stash_type"
        )
    rows, means = x._replace(places=x.places.reshape(-1, count)), np.full((count, 1), 1 / count)
    rows, errors = net.copy(rows), {"roundings": 4 * count + 16, "inexact": 2.0**-50}
    raw = net.copy(rows, "square")
    centred = _product(net, rows, np.eye(count) - means, **errors)
    variance = _product(net, net.copy(centred, "square"), means, function="relu", **errors)
    root = net.add([(variance, 1.0)], np.full(variance.shape, epsilon), "rsqrt", **errors)
    net.cancel(raw, _blocks(net, raw, means))
    y = net.product(centred, root._replace(places=np.repeat(root.places, count, 1)))
    factors, shifts = (np.broadcast_to(array.reshape(column), x.shape) for array in (scale, b))
    terms = [(y._replace(places=y.places.reshape(x.shape)), factors.reshape(-1))]
    return net.add(terms, shifts, roundings=8)


_RECURRENT = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
"""The functions of a recurrent operator."""


def _recurrent(
    net: Lowering, x: Value, w: Array, r: Array, b: Any = None, lengths: Any = None, *states: Any
) -> list[Value]:
    """Unroll an RNN, GRU or LSTM over the first axis, from states of 0.

    An execution may sum all terms of a gate in one loop, or the biases first: each sum counts that.
    """
    get, kind, size = net.attributes.get, net.operator.kind, r.shape[-1]
    way, late = get("direction", "forward"), get("linear_before_reset", kind != "GRU")
    ways = ["forward", "reverse"] if way == "bidirectional" else [way]
    functions = get("activations", _RECURRENT[kind] * len(ways))
    relu = kind == "RNN" and functions == ["Relu"] * len(ways)
    usual = (relu or functions == _RECURRENT[kind] * len(ways)) and late and lengths is None
    usual &= not any(state is not None and state.any() for state in states)
    usual &= len(w) == len(r) == len(ways) and get("hidden_size", size) == size
    usual &= not any(net.uses[name] for name in net.operator.outputs[2:])
    if not usual or get("layout", 0) or get("input_forget", 0):
        raise NotSupportedError(
            "it has a nonzero initial state, sequence lengths, peepholes or the last cell state as "
            "an output, or is not in PyTorch's form (GRU: linear_before_reset=1); export it from "
            "PyTorch"
        )
    every, roundings = list[list[Value]](), x.shape[2] + 2 * size + 8
    zeros, wide = np.zeros((x.shape[1], size)), np.zeros((x.shape[1], w.shape[1]))
    gates_of = {"RNN": ["relu" * relu], "GRU": ["sigmoid"] * 2, "LSTM": ["sigmoid"] * 3 + ["tanh"]}
    for k, way in enumerate(ways):
        bias, more = np.zeros((2, w.shape[1])) if b is None else b[k].reshape(2, -1)
        state, cell, steps, turn = None, None, list[Value](), -1 if way == "reverse" else 1
        for places in x.places[::turn]:
            row = x._replace(places=places)
            old: Value | None = cell if kind == "LSTM" else state
            now = net.add([(row, _blocks(net, row, w[k].T))], wide + bias, roundings=roundings)
            terms = [(state, _blocks(net, state, r[k].T))] if state else [(now, 0.0)]
            own = net.add(terms, wide + more, roundings=roundings)
            halves = [np.split(y.places, w.shape[1] // size, 1) for y in (now, own)]
            parts = [
                [(now._replace(places=p), 1.0), (own._replace(places=q), 1.0)]
                for p, q in zip(*halves, strict=True)
            ]
            gates = [
                net.add(pair, zeros, name, roundings)
                for pair, name in zip(parts, gates_of[kind], strict=False)
            ]
            if kind == "GRU":
                rest = (gates[1], (zeros + more[2 * size :]).reshape(-1))
                if state is not None:
                    rest = (net.product(gates[1], parts[2][1][0]), 1.0)
                new = net.add([parts[2][0], rest], zeros, "tanh", roundings)
                share = net.add([(gates[0], -1.0)], zeros + 1.0, roundings=4)
                total, forget = net.product(share, new), gates[0]
            elif kind == "LSTM":
                total, forget = net.product(gates[0], gates[3]), gates[2]
            elif relu:
                total = gates[0]
            else:  # 2 sigmoid(2 z) - 1: onnxruntime has an absolute error for this tanh
                total = net.add([(gates[0], 2.0)], zeros, "sigmoid")
                total = net.add([(total, 2.0)], zeros - 1.0, roundings=16)
            if old is not None and kind != "RNN":
                total = net.add([(total, 1.0), (net.product(forget, old), 1.0)], zeros, roundings=8)
            state = total
            if kind == "LSTM":
                cell, state = total, net.product(gates[1], net.copy(total, "tanh"))
            steps.append(state)
        every.append(steps[::turn])
    columns = [y._replace(alone=False) for step in zip(*every, strict=True) for y in step]
    y = _concat(net, *columns)._replace(alone=False)
    places = y.places.reshape(-1, len(ways), x.shape[1], size)
    lasts = [places[0 if way == "reverse" else -1, k] for k, way in enumerate(ways)]
    return [y._replace(places=places), y._replace(places=np.stack(lasts))]


def _elementwise(function: str) -> Callable[[Lowering, Value], Value]:
    return lambda net, x: net.apply(x, function)


def _leaky(net: Lowering, x: Value, slope: Array | None = None) -> Value:
    slopes = net.attributes.get("alpha", _SLOPE) if slope is None else slope
    slopes = np.broadcast_to(slopes, x.shape).reshape(-1)
    positive, rest = net.copy(x, "relu"), 1.0 - slopes
    exact = all(Fraction(r) + Fraction(s) == 1 for r, s in zip(rest, slopes, strict=True))
    terms = [(x, np.array(slopes)), (positive, rest)]
    inexact = 0.0 if exact else ROUNDED
    return net.add(terms, np.zeros(x.shape), roundings=1, inexact=inexact)


def _clip(net: Lowering, x: Any, least: Any = None, most: Any = None) -> Tensor:
    bottom = net.attributes.get("min") if least is None else float(least)
    top = net.attributes.get("max") if most is None else float(most)
    if bottom != bottom or top != top:
        raise FormatError("it clips by NaN")
    largest = np.finfo(np.float64 if net.wide else np.float32).max  # it limits nothing
    if bottom is not None and bottom > -largest:
        x = _limit(net, x, bottom, 1.0)
    return x if top is None or top >= largest else _limit(net, x, top, -1.0)


def _limit(net: Lowering, x: Value, edge: Any, sign: float) -> Value:
    """Return the maximum of x and constants, or with `sign` -1 the minimum."""
    places, edges = net.broadcast(x.places, np.asarray(edge))
    beyond = net.add([(x._replace(places=places), sign)], -sign * edges, "relu")
    return net.add([(beyond, sign)], edges)


def _extreme(net: Lowering, *parts: Any) -> Value:
    """Return the minimum or maximum of values and constants."""
    sign = 1.0 if net.operator.kind == "Max" else -1.0
    result: Value
    result, *others = sorted(parts, key=lambda part: not isinstance(part, Value))
    for part in others:
        if not isinstance(part, Value):
            result = _limit(net, result, part, sign)
            continue
        first, second = net.broadcast(result.places, part.places)
        result = net.larger(result._replace(places=first), part._replace(places=second), sign)
    return result


def _abs(net: Lowering, x: Value) -> Value:
    positive = net.copy(x, "relu")
    negative = net.add([(x, -1.0)], np.zeros(x.shape), "relu")
    return net.add([(positive, 1.0), (negative, 1.0)], np.zeros(x.shape))


def _elu(net: Lowering, x: Value) -> Value:
    alpha = net.attributes.get("alpha", 1.0)
    if alpha == 1.0:
        return net.apply(x, "elu")
    curve, positive = net.copy(x, "elu"), net.copy(x, "relu")
    terms = [(curve, alpha), (positive, 1.0 - alpha)]
    return net.add(terms, np.zeros(x.shape), roundings=3, inexact=ROUNDED)


def _hard_sigmoid(net: Lowering, x: Value) -> Value:
    slope, shift = net.attributes.get("alpha", _HARD), net.attributes.get("beta", 0.5)
    line = net.add([(x, slope)], np.full(x.shape, shift), roundings=3)
    return _limit(net, _limit(net, line, 0.0, 1.0), 1.0, -1.0)


def _hard_swish(net: Lowering, x: Value) -> Value:
    """Return x * min(max(x / 6 + 1/2, 0), 1): t^2 / 6 - t / 2 + max(x - 3, 0), t in [0, 6].

    Here t is x + 3, clipped. An execution rounds |x| * t / 6, which is up to 4 times this sum.
    """
    moved = net.add([(x, 1.0)], np.full(x.shape, 3.0))
    t = _limit(net, _limit(net, moved, 0.0, 1.0), 6.0, -1.0)
    square = net.add([(t, 1.0)], np.full(x.shape, -1.5), "square")
    above = net.add([(x, 1.0)], np.full(x.shape, -3.0), "relu")
    terms = [(square, 1 / 6), (above, 1.0)]
    return net.add(terms, np.full(x.shape, -0.375), roundings=32, inexact=ROUNDED)


def _gelu(net: Lowering, x: Value) -> Value:
    if net.attributes.get("approximate", "none") != "none":
        raise NotSupportedError("GELU by tanh; export it with approximate='none'")
    return net.copy(x, "gelu")


def _power(net: Lowering, x: Value, exponent: Array) -> Value:
    if isinstance(exponent, Value) or exponent.size != 1 or float(exponent.reshape(-1)[0]) != 2.0:
        raise NotSupportedError("a power other than the square")
    places = np.broadcast_to(x.places, np.broadcast_shapes(x.shape, exponent.shape))
    square = net.copy(x._replace(places=places), "square")
    return net.add([(square, 1.0)], np.zeros(places.shape), roundings=1)


def _softmax(net: Lowering, x: Value) -> Value:
    axis = net.attributes.get("axis", -1) % len(x.shape)
    if net.operator.outputs != [net.graph.output] or x.shape[axis] != x.places.size:
        raise NotSupportedError("a softmax can only be the last operator, over all outputs")
    net.softmax = True
    return x


_OPERATORS: dict[str, Callable[..., Any]] = {
    "Abs": _abs,
    "Add": _sum,
    "AveragePool": _average,
    "BatchNormalization": _batch_norm,
    "Cast": _cast,
    "Clip": _clip,
    "Concat": _concat,
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "DepthToSpace": _shape_of(_depth_to_space),
    "Div": _div,
    "Dropout": _dropout,
    "Elu": _elu,
    "Erf": lambda net, x: Erf(x),
    "Expand": _shape_of(
        lambda _, x, shape: np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(shape)))
    ),
    "Flatten": _shape_of(
        lambda attributes, x: x.reshape(prod(x.shape[: attributes.get("axis", 1)]), -1)
    ),
    "GRU": _recurrent,
    "Gather": _gather,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "GlobalAveragePool": _average,
    "GroupNormalization": _norm,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "Identity": lambda net, x, *others: x,
    "InstanceNormalization": _norm,
    "LSTM": _recurrent,
    "LeakyRelu": _leaky,
    "MatMul": _matmul,
    "Max": _extreme,
    "MaxPool": _max_pool,
    "Min": _extreme,
    "Mul": _mul,
    "Neg": lambda net, x: net.add([(x, -1.0)], np.zeros(x.shape)),
    "PRelu": _leaky,
    "Pad": _pad,
    "Pow": _power,
    "RNN": _recurrent,
    "ReduceMean": _mean,
    "ReduceSum": _mean,
    "Reshape": _shape_of(_reshape),
    "Resize": _resize,
    "Shape": lambda net, x: np.array(
        x.shape[net.attributes.get("start", 0) : net.attributes.get("end")], np.int64
    ),
    "Slice": _shape_of(_slice),
    "Softmax": _softmax,
    "Split": _split_axis,
    "Squeeze": _shape_of(
        lambda attributes, x, axes=None: np.squeeze(x, _axes(attributes, axes) or None)
    ),
    "Sub": _sum,
    "Transpose": _shape_of(lambda attributes, x: np.transpose(x, attributes.get("perm"))),
    "Unsqueeze": _shape_of(
        lambda attributes, x, axes=None: np.expand_dims(x, _axes(attributes, axes) or ())
    ),
    "Upsample": _resize,
}
_OPERATORS |= {
    name: _elementwise(name.lower())
    for name in ("Exp", "Mish", "Reciprocal", "Relu", "Sigmoid", "Softplus", "Tanh")
}
