"""Compares the network of an ONNX file, as read, with an execution of the same file.

onnxruntime executes it where that is installed, else onnx.reference. The two lowerings and the
execution must agree in every tensor, at points of the region and beyond it: an error names the
first operator that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import accumulate, combinations
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anydevice._core.protocols import FixedTensor
from anydevice._libraries.registry import part
from anydevice._proofs.checking.network import Floats, Network, Query
from anydevice._proofs.checking.operators import Erf, Lowering, Value
from anydevice._proofs.checking.readers import Graph, read_graph
from anydevice._proofs.evaluation import evaluate_nodes, points
from anydevice._proofs.files import ModelFile
from anydevice._proofs.onnx_lowering import OnnxTrace
from anydevice.errors import UnsupportedError, VerificationError

Array = npt.NDArray[Any]
INSTALL = "pip install onnx onnxruntime"
NOT_COMPARED = "checked for the network as read; reading not compared with an execution"
_MAX_BOXES = 8
_OPENERS = {"onnxruntime": "open_onnxruntime", "onnx": "open_reference"}
"""The function of `_libraries/onnxruntime/execution.py` for each package."""


class Computed(NamedTuple):
    """A tensor at each point, and a bound of its error in float32."""

    by: str
    value: Array
    error: Floats | float = 0.0

    def softmax(self) -> Computed:
        """Return the softmax over all elements, whose derivatives are at most 1."""
        axes = tuple(range(1, self.value.ndim))
        powers = np.exp(self.value - self.value.max(axes, keepdims=True))
        error = 2 * np.max(self.error, axes, keepdims=True) + 1e-6
        return Computed(self.by, powers / powers.sum(axes, keepdims=True), error)


def executors() -> list[str]:
    """Return the installed packages that execute ONNX files, the first choice first."""
    specs = {name: find_spec(name) for name in _OPENERS}
    return [name for name, spec in specs.items() if spec is not None and spec.origin]


@np.errstate(all="ignore")
def compare_reading(file: ModelFile, queries: Sequence[Query]) -> None:
    """Compare both lowerings of a file with each other and with an execution.

    Raises `VerificationError` with the first operator that differs, and `UnsupportedError` if
    nothing executes the file.
    """
    if not executors():
        raise UnsupportedError(
            f"{file.path}: an ONNX file is proved only after its network, as read, was compared "
            f"with an execution of the file; {INSTALL}"
        )
    graph = read_graph(file.data)
    chosen = queries[:: -(-len(queries) // _MAX_BOXES)]
    x = points([(query.low, query.high) for query in chosen], file.network.inputs)
    x = x.astype(np.float64 if graph.dtype == 11 else np.float32)
    readings = [_lower_for_checker(graph, x), _lower_for_search(graph, x)]
    plain, every, constants = _execute(file, graph, x)
    for name, value in graph.constants.items():
        read = Computed("the reader", value[None])
        _compare(f"{file.path}: the constant {name!r}", [read, constants[name]])
    for operator in graph.operators:
        for name in operator.outputs:
            tensors = [reading[name] for reading in readings if name in reading]
            if file.softmax and name == graph.output:
                tensors = [tensor.softmax() for tensor in tensors]
            _compare(f"{file.path}: {operator}", tensors + [every[name]] * bool(name))
    output = plain[graph.output]
    shape = output.value.shape[1:] if output.value[0].size == file.network.outputs else -1
    cells = np.arange(-file.network.outputs, 0).reshape(shape)
    joined = _evaluate("its network", file.network, {"": cells}, x)[""]
    _compare(f"{file.path}: its output", [joined.softmax() if file.softmax else joined, output])


def _lower_for_checker(graph: Graph, x: Array) -> dict[str, Computed]:
    lowering = Lowering(graph, join=False)
    lowering.run()
    network = Network(lowering.inputs, tuple(lowering.nodes))
    starts = [0, *accumulate([node.size for node in network.nodes], initial=network.inputs)]
    tensors = {k: v for k, v in lowering.tensors.items() if not isinstance(v, Erf)}
    cells = {
        k: v.places + starts[v.node] if isinstance(v, Value) else v.astype(float)
        for k, v in tensors.items()
    }
    return _evaluate("the checker", network, cells, x)


def _lower_for_search(graph: Graph, x: Array) -> dict[str, Computed]:
    trace = OnnxTrace(graph)
    tensors = {
        k: v.value.astype(float) if isinstance(v, FixedTensor) else v.cells
        for k, v in trace.tensors.items()
    }
    cells = {k: v for k, v in tensors.items() if v.dtype.kind == "f" or (v >= 0).all()}
    return _evaluate("the search", Network(trace.graph.inputs, tuple(trace.graph.nodes)), cells, x)


def _evaluate(by: str, network: Network, cells: dict[str, Array], x: Array) -> dict[str, Computed]:
    """Return tensors by name, from the numbers of their values in a network, or from floats."""
    values, errors = (np.concatenate(p, 1) for p in evaluate_nodes(network, x.astype(np.float64)))
    return {
        k: Computed(by, np.stack([v] * len(x)))
        if v.dtype.kind == "f"
        else Computed(by, values[:, v], errors[:, v])
        for k, v in cells.items()
    }


def _compare(place: str, tensors: Sequence[Computed]) -> None:
    """Raise `VerificationError` if two of these differ by more than their errors."""
    for a, b in combinations(tensors, 2):
        difference = f"shapes {a.value.shape[1:]} and {b.value.shape[1:]}"
        if a.value.shape == b.value.shape:
            one, other = (c.value.astype(np.float64) for c in (a, b))
            off = a.error + b.error
            differs = np.isfinite(one) & np.isfinite(off) & ~(np.abs(one - other) <= off)
            if not differs.any():
                continue
            difference = f"values {one[differs][0]} and {other[differs][0]}"
        raise VerificationError(
            f"{place} is not read as it is executed: {a.by} and {b.by} have the {difference}; "
            "nothing can be proved of this file. Export it again without this operator",
            where=place,
        )


def _execute(file: ModelFile, graph: Graph, x: Array) -> list[dict[str, Computed]]:
    """Return the output of the file at each point, then all its tensors, then its constants."""
    names = [name for operator in graph.operators for name in operator.outputs if name]
    others = [name for name in (*names, *graph.constants) if name != graph.output]
    outputs = [_field(12, _field(1, name.encode())) for name in others]
    more = _field(7, b"".join(outputs))  # parsers merge both graphs
    examples, problems = [{graph.input: row.reshape(graph.shape)} for row in x], []
    for by in executors():
        try:
            opened = getattr(part("onnxruntime", "execution"), _OPENERS[by])
            plain, whole = map(opened, (file.data, file.data + more))
            return [
                _run(by, plain, [graph.output], examples),
                _run(by, whole, names, examples),
                _run(by, whole, [*graph.constants], examples[:1]),
            ]
        except Exception as error:  # each package has errors of its own
            problems.append(f"{by}: {str(error)[:200]}")
    raise UnsupportedError(
        f"{file.path} cannot be executed, and its reading not be compared: {'; '.join(problems)}"
    )


def _run(
    by: str, run: Callable[..., Any], names: Sequence[str], examples: Sequence[Any]
) -> dict[str, Computed]:
    rows = [run(names, example) for example in examples] if names else []
    columns = zip(*rows, strict=True)
    return {k: Computed(by, np.stack(column)) for k, column in zip(names, columns, strict=True)}


def _field(number: int, content: bytes) -> bytes:
    """Return a field of a protocol buffer, whose length is a varint of five bytes."""
    length = [len(content) >> bits & 127 | 128 for bits in (0, 7, 14, 21)]
    return bytes([number << 3 | 2, *length, len(content) >> 28]) + content
