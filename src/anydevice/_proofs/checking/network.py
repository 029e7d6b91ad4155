"""The subject of a proof: a network of affine nodes, and a query about its outputs.

Both are plain data, with hashes that a certificate names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
SMOOTH: tuple[str, ...] = ("sigmoid", "tanh", "gelu", "gelu_tanh", "silu", "exp", "reciprocal")
SMOOTH += ("rsqrt", "elu", "softplus", "mish")
FUNCTIONS = ("", "relu", *SMOOTH, "square", "step")


class FormatError(ValueError):
    """A file of a model, of a property or of a proof is damaged or has another format."""


class NotSupportedError(ValueError):
    """A model has a layer that is not affine, piecewise linear or a known smooth function."""


class RefusedError(ValueError):
    """A certificate does not prove its theorem; `leaf` names the open leaf."""

    def __init__(self, message: str, leaf: str = "") -> None:
        super().__init__(message)
        self.leaf = leaf


class Node(NamedTuple):
    """One step of a network: `h = function(sum of weights @ earlier h + bias)`.

    `inputs` are the numbers of earlier nodes; 0 is the input of the network, and the
    first node of a network is number 1. A weight of two axes is a matrix (outputs, inputs), one of
    one axis the diagonal of a square one. `function` is "" for none, "relu", or a smooth one.

    `roundings` is the largest number of float32 roundings of one term in an execution of the sum: 0
    if every execution is exact (a copy, a maximum), the number of terms + 1 for a dense layer.
    `inexact` bounds the relative error of the weights and the bias: 0 if they are copies, about
    2**-50 if they were computed, as those of a batch norm.
    """

    inputs: tuple[int, ...]
    weights: tuple[Floats, ...]
    bias: Floats
    function: str = ""
    roundings: int = 0
    inexact: float = 0.0

    @property
    def size(self) -> int:
        return len(self.bias)


class Network(NamedTuple):
    """A feed-forward network over flat vectors; the last node is its output."""

    inputs: int
    nodes: tuple[Node, ...]

    @property
    def outputs(self) -> int:
        return self.nodes[-1].size

    def pruned(self) -> Network:
        """Return the network without the nodes that its output does not depend on."""
        needed = {0, len(self.nodes)}
        for number in range(len(self.nodes), 0, -1):
            needed |= set(self.nodes[number - 1].inputs) if number in needed else set()
        number_of = {old: new for new, old in enumerate(sorted(needed))}
        nodes = [self.nodes[number - 1] for number in sorted(needed - {0})]
        renumbered = [n._replace(inputs=tuple(number_of[i] for i in n.inputs)) for n in nodes]
        return Network(self.inputs, tuple(renumbered))

    def hash(self) -> str:
        """Return the SHA-256 of all numbers of the network, independent of its file."""
        digest = hashlib.sha256(b"anydevice network 1\n")
        for piece in _pieces(self):
            digest.update(piece)
        return digest.hexdigest()


def check_network(network: Network) -> Network:
    """Return the network; raises `FormatError` if sizes do not fit or numbers are not finite."""
    sizes = [network.inputs]
    for number, node in enumerate(network.nodes, 1):
        fits = network.inputs > 0 and node.bias.ndim == 1 and node.size > 0
        fits &= len(node.inputs) == len(node.weights) > 0
        for earlier, weight in zip(node.inputs, node.weights, strict=False):
            fits &= 0 <= earlier < number and weight.ndim in (1, 2)
            fits = fits and weight.shape == (node.size, sizes[earlier])[: weight.ndim]
            fits = fits and weight.shape[-1] == sizes[earlier]
        if not fits:
            raise FormatError(f"the sizes of node {number} do not fit together")
        if not all(np.isfinite(array).all() for array in (*node.weights, node.bias)):
            raise FormatError(f"node {number} has a weight or a bias that is infinite or NaN")
        if node.function not in FUNCTIONS or node.roundings < 0 or not 0 <= node.inexact < 0.5:
            raise FormatError(f"the function or the error of node {number} is unknown")
        sizes.append(node.size)
    if not network.nodes:
        raise FormatError("the network has no nodes")
    return network


class Query(NamedTuple):
    """Is there an x in a box for which the outputs are bad?

    They are bad if all rows of some group have `coefficients @ y + constants <= 0` (`< 0` if
    `strict`). The theorem is that there is no such x: in each group some row is greater than 0 (at
    least 0 if strict). The numbers are exact: a decimal in a file is a rational.
    """

    low: tuple[Fraction, ...]
    high: tuple[Fraction, ...]
    coefficients: tuple[tuple[Fraction, ...], ...]
    constants: tuple[Fraction, ...]
    group: tuple[int, ...]
    strict: tuple[bool, ...]

    def hash(self) -> str:
        rows = [*self.coefficients, self.constants, self.low, self.high]
        text = "\n".join(" ".join(map(str, row)) for row in rows)
        text += f"\n{self.group} {[int(strict) for strict in self.strict]}"
        return hashlib.sha256(f"anydevice query 1\n{text}".encode()).hexdigest()


def check_query(query: Query, network: Network) -> Query:
    """Return the query; raises `FormatError` if sizes do not fit or its box is empty."""
    sizes = {len(query.low), len(query.high), network.inputs}
    rows = {len(row) for row in query.coefficients} | {network.outputs}
    if len(sizes) != 1 or len(rows) != 1:
        raise FormatError(f"the query is about {len(query.low)} inputs, or other outputs")
    columns = (query.coefficients, query.constants, query.group, query.strict)
    if {len(column) for column in columns} != {len(query.group)} or not query.group:
        raise FormatError("the query has not a constant, a group and a kind for each row")
    if sorted(set(query.group)) != list(range(max(query.group) + 1)):
        raise FormatError("the groups of the query are not numbered from 0")
    for i, (low, high) in enumerate(zip(query.low, query.high, strict=True)):
        if low > high:
            raise FormatError(f"the interval of input {i} is empty: {float(low)}, {float(high)}")
    numbers = (
        *query.low,
        *query.high,
        *query.constants,
        *(c for r in query.coefficients for c in r),
    )
    if any(number and not 1e-250 < abs(number) < 1e250 for number in numbers):
        raise FormatError("a number of the query is beyond 1e250, or closer to 0 than 1e-250")
    return query


def root_box(query: Query, network: Network) -> tuple[Floats, Floats]:
    """Return the box of a query in float64; raises `FormatError` if it does not fit."""
    check_query(query, network)
    return outward(query.low, query.high)


def outward(low: Sequence[Fraction], high: Sequence[Fraction]) -> tuple[Floats, Floats]:
    """Return the smallest box of float64 around one of rationals."""
    down = [np.nextafter(f, -np.inf) if (f := float(x)) > x else f for x in low]
    up = [np.nextafter(f, np.inf) if (f := float(x)) < x else f for x in high]
    return np.array(down, np.float64), np.array(up, np.float64)


def _pieces(network: Network) -> Iterator[bytes]:
    yield f"{network.inputs}\n".encode()
    for node in network.nodes:
        sizes = [list(weight.shape) for weight in node.weights]
        numbers = f"{node.roundings} {float(node.inexact).hex()}"
        yield f"{list(node.inputs)} {sizes} {node.function} {numbers}\n".encode()
        for array in (*node.weights, node.bias):
            yield np.ascontiguousarray(array, "<f8").tobytes()
