"""Lowers graphs of ONNX: tensors are elements of nodes, and operators add nodes.

A tensor is a constant, or a `Value`: numbers of one node, in some order, so that reshaping and
permuting cost nothing. This module imports NumPy alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from anydevice._proofs.checking.network import FormatError, Network, Node, NotSupportedError
from anydevice._proofs.checking.readers import (
    Array,
    Graph,
    Operator,
    integers,
    message,
    tensor,
    text,
)

LARGEST = 2 << 30
"""The limit of bytes for all matrices of a network."""
ROUNDED = 2.0**-52
"""The largest relative error of a number after one or two operations of float64."""


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
    """Turns the operators of a graph into nodes, one after the other."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.softmax = graph, False
        self.nodes: list[Node] = []
        self.sources: dict[int, tuple[str, Value]] = {}
        self.inputs = prod(graph.shape)
        self.tensors: dict[str, Tensor] = dict(graph.constants)
        self.tensors[graph.input] = Value(0, np.arange(self.inputs).reshape(graph.shape))
        names = [name for operator in graph.operators for name in operator.inputs]
        self.uses = Counter([*names, graph.output])

    def run(self, operators: Mapping[str, Callable[..., Any]]) -> Network:
        """Lower all operators; return the network of the nodes that the output depends on."""
        for operator in self.graph.operators:
            try:
                operator = operator._replace(attributes=_attributes(operator))
                inputs = [self._use(name) if name else None for name in operator.inputs]
                results = operators[operator.kind](self, operator, *inputs)
            except NotSupportedError as error:
                raise NotSupportedError(f"{operator}: {error}") from None
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise FormatError(f"{operator}: {error}") from error
            results = results if isinstance(results, list) else [results]
            self.tensors.update(zip(operator.outputs, results, strict=False))
        last = self.tensors.get(self.graph.output)
        if not isinstance(last, Value):
            raise FormatError(f"its output {self.graph.output!r} is not computed from its input")
        if not last.node or not self._in_order(last):
            last = self.copy(last)
        return Network(self.inputs, _drop_unused(self.nodes[: last.node]))

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
        own = value.alone and value.node > 0 and not self.nodes[value.node - 1].function
        return own and self._in_order(value._replace(places=np.sort(value.places, axis=None)))

    def zeros(self, rows: int, columns: int) -> Array:
        before = sum(weight.nbytes for node in self.nodes for weight in node.weights)
        if rows * columns * 8 + before > LARGEST:
            size, gib = f"{rows} x {columns}", 2.0**-30
            raise NotSupportedError(
                f"its matrix of {size} is too large to be built: with {before * gib:.2g} GiB of "
                f"those before it, there would be more than {LARGEST * gib:.2g} GiB"
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
        weights: dict[int, Array] = {}
        for value, weight in terms:
            weight = weight * np.ones(bias.size) if isinstance(weight, float) else weight
            new = self._columns(value, weight)
            if value.node in weights:
                new = _exact_sum(weights[value.node], new)
            weights[value.node] = new
        flat = np.array(bias, np.float64).reshape(-1)
        node = Node(tuple(weights), tuple(weights.values()), flat, function, roundings, inexact)
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

    def larger(self, a: Value, b: Value) -> Value:
        """Return the maximum b + relu(a - b), which every execution computes exactly."""
        more = self.add([(a, 1.0), (b, -1.0)], np.zeros(a.shape), "relu")
        return self.add([(b, 1.0), (more, 1.0)], np.zeros(a.shape))

    def product(self, a: Value, b: Value) -> Value:
        """Return the product ((a + b)^2 - (a - b)^2) / 4, which an execution rounds once."""
        zeros = np.zeros(a.shape)
        plus = self.add([(a, 1.0), (b, 1.0)], zeros, "square")
        minus = self.add([(a, 1.0), (b, -1.0)], zeros, "square")
        return self.add([(plus, 0.25), (minus, -0.25)], zeros, roundings=1)

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


def _attributes(operator: Operator) -> dict[str, Any]:
    """Return the attributes of an operator by name, as numbers, texts, lists and arrays."""
    attributes = {}
    for each in map(message, operator.attributes):
        floats = np.frombuffer(b"".join(map(bytes, each[7] or each[2])), "<f4").tolist()
        value: Any = floats[0] if each[2] else floats
        if each[3] or each[8]:
            value = each[3][-1] if each[3] else list(integers(each[8]))
        elif each[4] or each[5]:
            value = text(each[4]) if each[4] else tensor(each[5][-1])[1]
        attributes[text(each[1])] = value
    return attributes


def _exact_sum(a: Array, b: Array) -> Array:
    a, b = (np.diag(each) if a.ndim != b.ndim and each.ndim == 1 else each for each in (a, b))
    total = a + b
    if ((total - a != b) | (total - b != a)).any():
        raise NotSupportedError("a sum of its weights is no number of float64")
    return total


def _drop_unused(nodes: list[Node]) -> tuple[Node, ...]:
    """Return the nodes that the last one depends on, with new numbers."""
    needed = {len(nodes)}
    for number in range(len(nodes), 0, -1):
        needed |= set(nodes[number - 1].inputs) if number in needed else set()
    number_of = {old: new for new, old in enumerate(sorted(needed | {0}))}
    return tuple(
        node._replace(inputs=tuple(number_of[i] for i in node.inputs))
        for number, node in enumerate(nodes, 1)
        if number in needed
    )
