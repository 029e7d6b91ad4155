"""Networks that compute derivatives of networks, for properties about slopes.

The tangent of each node goes forward beside its value (forward-mode differentiation). Products are
made of squares, and the derivative of a ReLU is a step. At a kink a step may be 0 or 1, so bounds
of these networks hold for every slope that a piecewise function has there (a local Lipschitz bound,
as in RecurJac, Zhang et al., 2019).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from anydevice._proofs.checking.network import Floats, Network
from anydevice._proofs.graph import ROUNDED, Builder, Cells
from anydevice.errors import UnsupportedError

_INEXACT = 64 * ROUNDED
"""The relative error of tangents that are numbers: products of some weights."""

Tangent = npt.NDArray[Any]
"""A tangent of each cell along each direction: numbers if all inputs have the same, else cells."""


def derivative(network: Network, along: int, output: int) -> Network:
    """Return the network of the derivative of one output along one input."""
    graph, tangent = _tangents(network, np.eye(network.inputs)[:, [along]])
    return graph.network(_cells(graph, tangent)[output])


def absolute_sums(network: Network) -> Network:
    """Return the network of `sum over inputs of |derivative|`, for each output."""
    graph, tangent = _tangents(network, np.eye(network.inputs))
    return graph.network(graph.total(graph.absolute(_cells(graph, tangent))))


def _tangents(network: Network, directions: Floats) -> tuple[Builder, Tangent]:
    """Return the graph of the network, and the tangent of its output: (outputs, directions)."""
    graph = Builder(network.inputs)
    values: list[Cells] = [np.arange(network.inputs)]
    tangents: list[Tangent] = [directions]
    for number, node in enumerate(network.nodes, 1):
        graph.path = f"node {number}"
        cells, weights, parts = [], [], []
        for source, weight in zip(node.inputs, node.weights, strict=True):
            matrix = np.diag(weight) if weight.ndim == 1 else weight
            cells.append(values[source])
            weights.append(matrix)
            parts.append((matrix, tangents[source]))
        joined, matrix = np.concatenate(cells)[None], np.concatenate(weights, axis=1)
        before = graph.rows(joined, matrix, node.bias, inexact=node.inexact)
        tangent = _through_sum(graph, parts, node.inexact)
        if not node.function:
            values.append(before)
            tangents.append(tangent)
            continue
        values.append(graph.function(before, node.function))
        slope = _slope(graph, node.function, before, values[-1])
        if _is_fixed(tangent):
            tangents.append(graph.affine(slope[:, None], tangent, inexact=_INEXACT))
        else:
            tangents.append(graph.product(slope[:, None], tangent))
    return graph, tangents[-1]


def _through_sum(graph: Builder, parts: list[tuple[Floats, Tangent]], inexact: float) -> Tangent:
    """Return the tangent of a sum of matrices times values."""
    matrix, tangent = parts[0]
    if len(parts) == 1 and _is_fixed(tangent):
        terms = (matrix != 0).astype(int) @ (tangent != 0).astype(int)
        if int(terms.max()) <= 1:  # nothing would bound the rounding of a sum
            product: Floats = matrix @ tangent
            return product
    cells = np.concatenate([_cells(graph, tangent) for _, tangent in parts])
    matrix = np.concatenate([weight for weight, _ in parts], axis=1)
    columns = [graph.rows(column[None], matrix, inexact=inexact) for column in cells.T]
    return np.stack(columns, -1)


def _is_fixed(tangent: Tangent) -> bool:
    return bool(tangent.dtype.kind == "f")


def _cells(graph: Builder, tangent: Tangent) -> Cells:
    return graph.constant(tangent, _INEXACT) if _is_fixed(tangent) else tangent


def _slope(graph: Builder, function: str, before: Cells, after: Cells) -> Cells:
    """Return the derivative of a function, from its argument and its value."""
    if function not in _SLOPES:
        raise UnsupportedError(
            f"proofs take no derivative of {function}; monotone and lipschitz are for models of "
            "ReLU, leaky ReLU, sigmoid, tanh and SiLU"
        )
    return _SLOPES[function](graph, before, after)


def _silu(graph: Builder, before: Cells, after: Cells) -> Cells:
    """Return `sigmoid(x) * (1 + x - silu(x))`."""
    gate = graph.function(before, "sigmoid")
    rest = graph.combine([(1.0, before), (-1.0, after)], "", 1.0)
    return graph.product(gate, rest)


_SLOPES: dict[str, Callable[[Builder, Cells, Cells], Cells]] = {
    "relu": lambda graph, before, after: graph.function(before, "step"),
    "sigmoid": lambda graph, before, after: graph.combine(
        [(1.0, after), (-1.0, graph.function(after, "square"))]
    ),
    "tanh": lambda graph, before, after: graph.combine(
        [(-1.0, graph.function(after, "square"))], "", 1.0
    ),
    "silu": _silu,
    "exp": lambda graph, before, after: after,
    "square": lambda graph, before, after: graph.affine(before, 2.0),
    "reciprocal": lambda graph, before, after: graph.affine(graph.function(after, "square"), -1.0),
    "rsqrt": lambda graph, before, after: graph.affine(
        graph.product(after, graph.function(after, "square")), -0.5
    ),
}
