"""Small theorems with certificates, by a prover of a few lines that asks the checker's bounds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydevice._proofs.checking import smooth
from anydevice._proofs.checking.certificate import LEAF, Certificate, Tree
from anydevice._proofs.checking.checker import refused
from anydevice._proofs.checking.network import Network, Node, Query
from anydevice._proofs.evaluation import evaluate

Points = np.ndarray[Any, Any]


def dense(sizes: Sequence[int], seed: int = 0, function: str = "relu") -> Network:
    """A chain of dense layers of float32 numbers, the last one without a function."""
    random = np.random.default_rng(seed)
    nodes = []
    for k, (fan, size) in enumerate(pairwise(sizes)):
        weight = random.normal(0, 1.5 / fan**0.5, (size, fan)).astype(np.float32)
        bias = random.normal(0, 0.3, size).astype(np.float32)
        name = "" if k == len(sizes) - 2 else function
        nodes.append(Node((k,), (weight.astype(float),), bias.astype(float), name, fan + 1))
    return Network(sizes[0], tuple(nodes))


def residual(seed: int = 0) -> Network:
    """Two branches that meet, a diagonal, one node used twice, and a copy of the input."""
    random = np.random.default_rng(seed)

    def numbers(*shape: int) -> Points:
        return random.normal(0, 0.6, shape).astype(np.float32).astype(float)

    return Network(
        3,
        (
            Node((0,), (numbers(5, 3),), numbers(5), "relu", 4),
            Node((1,), (numbers(5),), numbers(5), "relu", 2),
            Node((1, 2), (np.ones(5), np.ones(5)), np.zeros(5), "", 1),
            Node((3, 0, 3), (numbers(4, 5), numbers(4, 3), numbers(4, 5)), numbers(4), "relu", 15),
            Node((4, 3), (numbers(2, 4), numbers(2, 5)), numbers(2), "", 10),
        ),
    )


def query(
    low: Any, high: Any, rows: Any, constants: Any, group: Any = None, strict: bool = False
) -> Query:
    """Rows of numbers over a box; a group for each row if none are given."""

    def exact(numbers: Any) -> tuple[Fraction, ...]:
        return tuple(n if isinstance(n, Fraction) else Fraction(float(n)) for n in numbers)

    groups = tuple(range(len(rows)) if group is None else group)
    table = tuple(exact(row) for row in rows)
    return Query(exact(low), exact(high), table, exact(constants), groups, (strict,) * len(rows))


def executed(network: Network, x: Points) -> Points:
    """The outputs at points, in float64."""
    return evaluate(network, np.atleast_2d(x))[0].reshape(*np.shape(x)[:-1], network.outputs)


def exactly(network: Network, x: Sequence[Fraction]) -> list[Fraction]:
    """The outputs at a point, in rationals."""
    values = [list(x)]
    for node in network.nodes:
        z = [Fraction(number) for number in node.bias]
        for i, weight in zip(node.inputs, node.weights, strict=True):
            for j in range(node.size):
                row = [weight[j]] if weight.ndim == 1 else weight[j]
                its = values[i][j : j + 1] if weight.ndim == 1 else values[i]
                z[j] += sum((Fraction(w) * h for w, h in zip(row, its, strict=True)), Fraction(0))
        values.append([max(number, Fraction(0)) for number in z] if node.function else z)
    return values[-1]


def leaf_tree(weights: Any, steps: Sequence[int] = (LEAF,)) -> Tree:
    table = np.array(weights, np.uint8)
    none = np.full(len(table), -1)
    neurons = np.zeros((0, 0), np.uint8)
    return Tree(np.array(steps), table, none, neurons, np.zeros(0, np.float16))


def proved(network: Network, question: Query, arithmetic: str = "real", limit: int = 4000) -> Tree:
    """Return a tree of halvings along the widest input, whose leaves the checker closes."""
    rows = len(question.group)
    width = np.array([float(high - low) for low, high in zip(*question[:2], strict=True)])
    steps = [LEAF]
    while len(steps) < limit:
        tree = leaf_tree(np.full((steps.count(LEAF), rows), 255), steps)
        bad = set(refused(network, question, tree, arithmetic))
        if not bad:
            return tree
        steps = _split_leaves(steps, bad, width)
    raise AssertionError("the small prover found no proof")


def _split_leaves(steps: list[int], bad: set[int], width: Points) -> list[int]:
    divided: list[int] = []
    stack, leaf = [width], 0
    for step in steps:
        here = stack.pop()
        if step == LEAF and leaf not in bad:
            divided.append(LEAF)
        else:
            along = int(here.argmax()) if step == LEAF else step
            divided += [along, LEAF, LEAF] if step == LEAF else [along]
            half = here.copy()
            half[along] /= 2
            stack += [half, half] if step != LEAF else []
        leaf += step == LEAF
    return divided


def certificate(
    network: Network, queries: Sequence[Query], trees: Sequence[Tree], arithmetic: str = "real"
) -> Certificate:
    functions = {node.function for node in network.nodes}
    assumed = smooth.assumptions(functions, arithmetic == "float32")
    hashes = tuple(each.hash() for each in queries)
    return Certificate("", network.hash(), hashes, arithmetic, assumed, tuple(trees))


def acasxu(net: str, number: int | str) -> tuple[Path, Path]:
    """Return the files of a network and of a property of ACAS Xu."""
    folder = acasxu_folder()
    model = folder / "onnx" / f"ACASXU_run2a_{net}_batch_2000.onnx"
    return model, folder / "vnnlib" / f"prop_{number}.vnnlib"


def acasxu_folder() -> Path:
    """Return the folder of ACAS Xu, which is beside the project and not in it, or skip the test."""
    root = Path(os.environ.get("ANYDEVICE_DATA") or Path(__file__).parents[4] / "shared" / "data")
    if not (root / "acasxu").is_dir():
        pytest.skip(f"there is no {root / 'acasxu'}; ANYDEVICE_DATA names another folder of data")
    return root / "acasxu"
