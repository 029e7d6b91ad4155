"""Networks for tests of proofs, and their values in rationals and in float32 of any order."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from anydevice._proofs.attack import exact_outputs
from anydevice._proofs.checking.network import Network, Node


def network(*sizes: int, seed: int = 0, residual: bool = False, bias: float = 1.0) -> Network:
    """A chain of ReLU layers whose sums cancel, all weights float32."""
    random = np.random.default_rng(seed)
    nodes = []
    for i, (before, after) in enumerate(pairwise(sizes)):
        weight = random.normal(size=(after, before)).astype(np.float32).astype(np.float64)
        offset = bias * random.normal(size=after).astype(np.float32).astype(np.float64)
        function = "relu" if i < len(sizes) - 2 else ""
        nodes.append(Node((i,), (weight,), offset, function, before + 1))
    if residual:
        last = len(nodes)
        size = sizes[-1]
        again = random.normal(size=(size, size)).astype(np.float32).astype(np.float64)
        nodes.append(Node((last,), (again,), np.zeros(size), "relu", size + 1))
        nodes.append(Node((last, last + 1), (np.ones(size), np.ones(size)), np.zeros(size), "", 1))
    return Network(sizes[0], tuple(nodes))


def exact_arguments(net: Network, x: Any) -> list[tuple[Fraction, ...]]:
    """Return the arguments of each node's function, in rationals."""
    found = []
    for number in range(1, len(net.nodes) + 1):
        nodes = list(net.nodes[:number])
        nodes[-1] = nodes[-1]._replace(function="")
        found.append(exact_outputs(Network(net.inputs, tuple(nodes)), tuple(map(Fraction, x))))
    return found


def executed(net: Network, x: Any, random: np.random.Generator) -> list[Any]:
    """Return the arguments of each node's function in float32, with sums in a random order.

    At random, products and sums are one operation (FMA), and small numbers are flushed to zero.
    """
    fused, flushed = random.random(2) < 0.5
    values, arguments = [np.asarray(x, np.float32)], []
    for node in net.nodes:
        terms = [node.bias[:, None].astype(np.float32)]
        factors = [np.ones((node.size, 1), np.float32)]
        for i, weight in zip(node.inputs, node.weights, strict=True):
            whole = np.diag(weight) if weight.ndim == 1 else weight
            terms.append(whole.astype(np.float32))
            factors.append(np.broadcast_to(values[i], whole.shape))
        a, b = np.concatenate(terms, 1), np.concatenate(factors, 1)
        order = random.permutation(a.shape[1])
        z = _summed(a[:, order], b[:, order], bool(fused), bool(flushed), random)
        arguments.append(z)
        values.append(np.maximum(z, np.float32(0)) if node.function == "relu" else z)
    return arguments


def _summed(a: Any, b: Any, fused: bool, flushed: bool, random: np.random.Generator) -> Any:
    def rounded(x: Any) -> Any:
        x = np.asarray(x, np.float32)
        return np.where(np.abs(x) < 2.0**-126, np.float32(0), x) if flushed else x

    def added(columns: Any) -> Any:
        total = np.zeros(len(a), np.float32)
        for k in columns:
            if fused:
                total = rounded(total.astype(np.float64) + a[:, k].astype(np.float64) * b[:, k])
            else:
                total = rounded(total + rounded(a[:, k] * b[:, k]))
        return total

    columns = range(a.shape[1])
    cut = int(random.integers(0, a.shape[1]))  # two partial sums, as threads and lanes make them
    return rounded(added(columns[:cut]) + added(columns[cut:]))
