"""Reads ONNX files without the onnx package: protocol buffers, and networks that are plain chains.

Chains of dense layers and ReLUs, such as ACAS Xu, are lowered here; operators.py lowers all others.
This module imports NumPy alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from anydevice.proofs.checking.network import FormatError, Network, Node, check_network

Array = np.ndarray[Any, Any]
_DTYPES = {1: ("<f4", 4), 6: ("<i4", 5), 7: ("<i8", 7), 11: ("<f8", 10)}  # and the field for them


class Operator(NamedTuple):
    """A node of a graph."""

    kind: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any]

    def __str__(self) -> str:
        return f"the {self.kind} that gives {' '.join(self.outputs)!r}"


class Graph(NamedTuple):
    """A model: its operators in order, its constants, its input's and its output's name."""

    operators: list[Operator]
    constants: dict[str, Array]
    input: str
    shape: list[int]
    output: str


@np.errstate(all="ignore")
def read_onnx(data: bytes) -> tuple[Network, bool]:
    """The network in the content of an ONNX file, and whether a softmax at its end was left out."""
    try:
        graph = _graph(data)
        nodes = _chain(graph)
    except (LookupError, TypeError, UnicodeDecodeError, ValueError) as error:
        raise FormatError(f"it is no ONNX model, or damaged: {error}") from error
    if nodes is None:
        from anydevice.proofs.checking.operators import lower

        network, softmax = lower(graph)
        return check_network(network), softmax
    return check_network(Network(prod(graph.shape), tuple(nodes))), False


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        size = {1: 8, 5: 4}.get(key & 7, -1)
        if key & 7 in (0, 2):
            size, at = _varint(data, at)
        if key & 7 == 0:
            yield key >> 3, size
        elif 0 <= size <= len(data) - at:
            yield key >> 3, data[at : at + size]
            at += size
        else:
            raise FormatError(f"field {key >> 3} of a message is cut or damaged")


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """The signed number at a place, and the place behind it."""
    value = 0
    for k in range(10):
        value |= (data[at + k] & 127) << 7 * k
        if data[at + k] < 128:
            value &= (1 << 64) - 1
            return value - (value >> 63 << 64), at + k + 1
    raise FormatError("a number of a message has more than ten bytes")


def _message(data: Any) -> defaultdict[int, list[Any]]:
    found = defaultdict(list)
    for number, content in _fields(memoryview(data)):
        found[number].append(content)
    return found


def _text(contents: list[Any]) -> str:
    return bytes(contents[-1]).decode() if contents else ""


def _integers(contents: list[Any]) -> list[int]:
    """A repeated field of integers, packed or not."""
    found: list[int] = []
    for part in contents:
        at = 0
        while not isinstance(part, int) and at < len(part):
            number, at = _varint(part, at)
            found.append(number)
        found += [part] if isinstance(part, int) else []
    return found


def _tensor(data: Any) -> tuple[str, Array]:
    found = _message(data)
    name, shape = _text(found[8]), _integers(found[1])
    if found[2][-1] not in _DTYPES or found[13] or found[14] not in ([], [0]):
        raise FormatError(f"tensor {name!r} is of no dtype that is read, or in another file")
    dtype, field = _DTYPES[found[2][-1]]
    if found[9] or "f" in dtype:
        array = np.frombuffer(found[9][-1] if found[9] else b"".join(found[field]), dtype)
    else:
        array = np.array(_integers(found[field]), dtype)
    if min(shape, default=0) < 0 or prod(shape) != array.size:
        raise FormatError(f"tensor {name!r} of shape {shape} has {array.size} numbers")
    return name, array.reshape(shape).astype(np.float64 if "f" in dtype else np.int64)


def _operator(data: Any) -> Operator:
    found, attributes = _message(data), {}
    for each in map(_message, found[5]):
        floats = np.frombuffer(b"".join(map(bytes, each[7] or each[2])), "<f4").tolist()
        value: Any = floats[0] if each[2] else floats
        if each[3] or each[8]:
            value = each[3][-1] if each[3] else _integers(each[8])
        elif each[4] or each[5]:
            value = _text(each[4]) if each[4] else _tensor(each[5][-1])[1]
        attributes[_text(each[1])] = value
    inputs, outputs = ([bytes(name).decode() for name in found[field]] for field in (1, 2))
    return Operator(_text(found[4]), inputs, outputs, attributes)


def _graph(data: bytes) -> Graph:
    graph = _message(_message(data)[7][-1])
    constants = dict(_tensor(each) for each in graph[5])
    given = [each for each in map(_message, graph[11]) if _text(each[1]) not in constants]
    outputs = [_text(_message(each)[1]) for each in graph[12]]
    if len(given) != 1 or len(outputs) != 1:
        raise FormatError(f"{len(given)} inputs and {len(outputs)} outputs, not one of each")
    sizes = _message(_message(_message(given[0][2][-1])[1][-1])[2][-1])[1]
    shape = [max(1, (_message(each)[1] or [1])[-1]) for each in sizes]
    if prod(shape) > 1 << 24 or len(shape) > 8:
        raise FormatError(f"its input has the shape {shape}")
    operators = [_operator(each) for each in graph[1]]
    return Graph(operators, constants, _text(given[0][1]), shape, outputs[0])


def _chain(graph: Graph) -> list[Node] | None:
    """The nodes of a chain of dense layers, each maybe with a ReLU; None if it is no such chain."""
    nodes: list[Node] = []
    last, size, bare = graph.input, prod(graph.shape), False  # bare: a product without its bias
    for each in graph.operators:
        if each.inputs[:1] != [last]:
            return None
        constant = graph.constants.get(each.inputs[-1])
        if each.kind == "MatMul" and constant is not None and constant.shape[:-1] == (size,):
            size = constant.shape[1]
            weights = (np.ascontiguousarray(constant.T),)
            nodes.append(Node((len(nodes),), weights, np.zeros(size), "", len(constant)))
            bare = True
        elif each.kind == "Add" and bare and constant is not None and constant.size == size:
            node = nodes[-1]
            nodes[-1] = node._replace(bias=constant.reshape(-1), roundings=node.roundings + 1)
            bare = False
        elif each.kind == "Relu" and nodes and not nodes[-1].function:
            nodes[-1], bare = nodes[-1]._replace(function="relu"), False
        elif each.kind == "Sub" and constant is not None and len(each.inputs) == 2:
            if constant.any() or constant.size not in (1, size):
                return None
        elif each.kind != "Flatten":
            return None
        last = each.outputs[0]
    return nodes if nodes and last == graph.output else None
