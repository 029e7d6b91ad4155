"""Certificates: proofs as trees of splits, in memory and in files.

A certificate names its network and queries by hashes, and has one tree for each query. A tree
divides the box of the query until plain bounds decide each part. It has no bounds and no
coefficients: the checker computes them anew, so that a wrong certificate can only be refused.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import pairwise
from math import isfinite, prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anydevice._proofs.checking.network import (
    FormatError,
    Network,
    Node,
    Query,
    RefusedError,
    check_network,
)

LEAF, EACH_GROUP = -1, -2
ARITHMETICS = ("real", "float32")
"""The arithmetics in which bounds are known."""

_MAGIC = b"anydevice proof 1\n"
UNPACK = 64
"""The most MiB that a certificate is unpacked to, unless the caller allows more."""
_TABLE = 100
"""The largest number of sets of weights that are shared by leaves, and written once."""

Integers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Tree(NamedTuple):
    """The division of the box of one query, in preorder: a node, then the subtrees of its parts.

    `steps` has one number for each node of the tree:

    - `0 <= step < inputs`: the box is halved along this input, at the midpoint (low + high) / 2 of
      float64. The lower half comes first.
    - `inputs <= step`: the case that neuron `step - inputs` has a value >= 0 before its function,
      then the case <= 0. All nodes with a function have neurons (`first_neurons`).
    - `EACH_GROUP`: one subtree for each group of the query, in order, and about this group alone.
    - `LEAF`: no subtree. Bounds decide it; a case narrows the bounds of its own neuron alone.

    `weights` (leaves, rows): for each group that a leaf is about, the sum of its rows times these
    weights is greater than 0 (at least 0 where all are strict).
    `slopes_of` (leaves): the set of `slopes` of a leaf, -1 if the checker chooses them.
    `slopes` (sets, neurons): 255 times the slope of the lower line of each undecided ReLU.
    `multipliers` of float16: for each leaf, in order, one for each case of a neuron on its path,
    from the root: the multiple of the neuron's value that is subtracted, for weights / 255.
    `lemmas` are proved first, in their order: bounds of neurons that hold in the whole box.
    """

    steps: Integers
    weights: Bytes
    slopes_of: Integers
    slopes: Bytes
    multipliers: npt.NDArray[np.float16]
    lemmas: tuple[Lemma, ...] = ()

    @property
    def leaves(self) -> int:
        return len(self.weights)

    def fits(self, rows: int, neurons: int, cases: int) -> bool:
        """Whether each leaf has weights, slopes and multipliers, and these are at least 0."""
        counts = self.weights.shape[1] == rows and len(self.multipliers) == cases
        positive = ((self.multipliers >= 0) & (self.multipliers < np.inf)).all()
        slopes = not len(self.slopes) or self.slopes.shape[1] == neurons
        return counts and slopes and bool(positive)


class Lemma(NamedTuple):
    """Bounds of some neurons of one node before its function, in the whole box of a query.

    `sides` is twice the number of a neuron in its node if the negative of its value is less than
    one of the `bounds`, and 1 more if the value itself is. `tree` proves it for the network that
    ends with this node and lacks its function; each bound is a group of one row.
    """

    node: int
    sides: Integers
    bounds: npt.NDArray[np.float64]
    tree: Tree

    def theorem(self, network: Network, query: Query) -> tuple[Network, Query]:
        """Return the network and query to prove; raises `RefusedError` for unknown neurons."""
        nodes, sides = network.nodes, self.sides
        if not isinstance(self.node, int) or not 0 < self.node <= len(nodes) or not len(sides):
            raise RefusedError(f"a lemma is about node {self.node}, or about no neuron")
        *before, last = nodes[: self.node]
        inside, size = (sides >= 0) & (sides < 2 * last.size), np.abs(self.bounds)
        known = (size == 0) | (size > 1e-250) & (size < 1e250)
        if not inside.all() or len(self.bounds) != len(sides) or not known.all():
            raise RefusedError(f"a lemma about node {self.node} has a neuron or a bound too many")
        ending = network._replace(nodes=(*before, last._replace(function="")))
        zeros, rows, constants = [Fraction(0)] * last.size, [], []
        for side, bound in zip(sides.tolist(), self.bounds.tolist(), strict=True):
            row = zeros.copy()
            row[side // 2] = Fraction(-1 if side % 2 else 1)
            rows.append(tuple(row))
            constants.append(Fraction(bound))
        group, strict = tuple(range(len(rows))), (False,) * len(rows)
        return ending, Query(query.low, query.high, tuple(rows), tuple(constants), group, strict)


class Certificate(NamedTuple):
    """A proof that can be checked again: its subject, its arithmetic, and the trees.

    `model` is the SHA-256 of the model's file, "" if there is none; `network` and `queries` are
    hashes of the lowered network and of each query. `assumptions` are the assumed relative errors
    of functions that no standard bounds, by name. `carried` is the network, if no file has it.
    """

    model: str
    network: str
    queries: tuple[str, ...]
    arithmetic: str
    assumptions: Mapping[str, float]
    trees: tuple[Tree, ...]
    carried: Network | None = None

    def to_bytes(self) -> bytes:
        """Return the certificate as the content of a file."""
        pieces: list[bytes] = []
        header = {
            "model": self.model,
            "network": self.network,
            "queries": list(self.queries),
            "arithmetic": self.arithmetic,
            "assumptions": dict(self.assumptions),
            "trees": [_write_tree(tree, pieces) for tree in self.trees],
            "carried": None if self.carried is None else _write_network(self.carried, pieces),
        }
        text = json.dumps(header).encode() + b"\n"
        return _MAGIC + zlib.compress(text + b"".join(pieces), 9)


@np.errstate(all="ignore")
def read_certificate(data: bytes, unpack: int = UNPACK) -> Certificate:
    """Read the content of a file; `FormatError` says what is wrong with it."""
    try:
        header, rest = _unpack(data, max(0, unpack) << 20)
        trees = tuple([_read_tree(tree, rest) for tree in header["trees"]])
        carried = header["carried"]
        network = None if carried is None else _read_network(carried, rest)
        assumptions = {str(k): float(v) for k, v in header["assumptions"].items()}
        texts = [header["model"], header["network"], header["arithmetic"], *header["queries"]]
    except (
        KeyError,
        TypeError,
        ValueError,
        OverflowError,
        AttributeError,
        RecursionError,
    ) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"its header is not one of a certificate ({error!r})") from error
    if not all(isinstance(text, str) for text in texts):
        raise FormatError("a hash or the arithmetic in its header is no text")
    if rest.left:
        raise FormatError(f"{rest.left} bytes are left behind its end")
    model, hash_, arithmetic, *queries = texts
    return Certificate(model, hash_, tuple(queries), arithmetic, assumptions, trees, network)


def first_neurons(network: Network) -> dict[int, int]:
    """Return the number of the first neuron of each node that has a function, by node."""
    first, count = {}, 0
    for number, node in enumerate(network.nodes, 1):
        if node.function:
            first[number] = count
            count += node.size
    return first


def preorder(steps: Integers, first: Integers, groups: int = 1) -> Integers:
    """Return the preorder of nodes that are numbered in the order of a search.

    Node 0 is the root. The children of node i have the numbers `first[i]`, `first[i] + 1`, …; all
    are greater than i. `steps` are steps of a `Tree`.

    >>> preorder(np.array([0, -1, 1, -1, -1]), np.array([1, 0, 3, 0, 0])).tolist()
    [0, 1, 2, 3, 4]
    >>> preorder(np.array([0, 1, -1, -1, -1]), np.array([1, 3, 0, 0, 0])).tolist()
    [0, 1, 3, 4, 2]
    """
    arity = np.select([steps >= 0, steps == EACH_GROUP], [2, groups], 0)
    levels = [np.zeros(1, np.int64)]
    while len(levels[-1]):
        starts, lengths = first[levels[-1]], arity[levels[-1]]
        offsets = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        levels.append(offsets + np.repeat(starts, lengths))
    size = np.ones(len(steps), np.int64)
    for below, above in zip(levels[:0:-1], levels[-2::-1], strict=True):
        np.add.at(size, np.repeat(above, arity[above]), size[below])
    position = np.zeros(len(steps), np.int64)
    for above, below in pairwise(levels):
        parent = np.repeat(above, arity[above])
        before = np.cumsum(size[below]) - size[below]  # sizes of all before it on this level
        eldest = np.repeat(np.cumsum(arity[above]) - arity[above], arity[above])
        position[below] = position[parent] + 1 + before - before[eldest]
    return np.argsort(position, kind="stable")


class _Rest:
    """The unread rest of the binary part."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, kind: str, *shape: int) -> npt.NDArray[Any]:
        """Read an array of a dtype and shape; raises `FormatError` if the data end before."""
        if not all(isinstance(length, int) and length >= 0 for length in shape):
            raise FormatError(f"{shape} is no shape")
        count = prod(shape)
        size = count * np.dtype(kind).itemsize
        if size > self.left:
            raise FormatError(f"it ends {size - self.left} bytes early: it was cut or damaged")
        array = np.frombuffer(self._data, kind, count, self._at).reshape(shape)
        self._at += size
        return array


def _unpack(data: bytes, largest: int) -> tuple[dict[str, Any], _Rest]:
    if not data.startswith(_MAGIC):
        raise FormatError("it does not begin as a certificate of this version does")
    unpacking = zlib.decompressobj()
    try:
        content = unpacking.decompress(data[len(_MAGIC) :], largest + 1)
    except zlib.error as error:
        raise FormatError(f"it cannot be unpacked: it was cut or damaged ({error})") from error
    if len(content) > largest:
        raise FormatError(f"it unpacks to over {largest >> 20} MiB; --unpack or unpack= allows it")
    if not unpacking.eof or unpacking.unused_data:
        raise FormatError("it cannot be unpacked: it was cut, or something follows its end")
    text, _, binary = content.partition(b"\n")
    header = json.loads(text)
    if not isinstance(header, dict):
        raise FormatError("its header is no object")
    return header, _Rest(binary)


def _write_tree(tree: Tree, pieces: list[bytes]) -> dict[str, Any]:
    """Write each node as one byte, or two or four if there are many kinds: its index in `kinds`.

    Kinds -10, -11, … are leaves with a set of weights of the table; `LEAF` has a set of its own.
    """
    rows = tree.weights.shape[1]
    sets, which, counts = np.unique(
        tree.weights.reshape(-1, rows), axis=0, return_inverse=True, return_counts=True
    )
    common = np.argsort(-counts, kind="stable")[:_TABLE]
    common = common[counts[common] > 1]
    code = np.full(len(sets), LEAF, np.int64)
    code[common] = -10 - np.arange(len(common))
    coded = tree.steps.copy()
    coded[coded == LEAF] = code[which.reshape(-1)]
    own = tree.weights[code[which.reshape(-1)] == LEAF]
    kinds, index = np.unique(coded, return_inverse=True)
    width = _width(len(kinds))
    set_width = _width(len(tree.slopes) + 1, "slopes")
    for array, kind in (
        (index, width),
        (sets[common], "u1"),
        (own, "u1"),
        (tree.slopes_of + 1 if len(tree.slopes) else np.zeros(0), set_width),
        (tree.slopes, "u1"),
        (tree.multipliers, "<f2"),
    ):
        pieces.append(np.ascontiguousarray(array.astype(kind)).tobytes())
    return {
        "nodes": len(coded),
        "kinds": kinds.tolist(),
        "rows": rows,
        "table": len(common),
        "own": len(own),
        "slopes": list(tree.slopes.shape),
        "multipliers": len(tree.multipliers),
        "lemmas": [_write_lemma(lemma, pieces) for lemma in tree.lemmas],
    }


def _write_lemma(lemma: Lemma, pieces: list[bytes]) -> dict[str, Any]:
    pieces += [lemma.sides.astype("<i4").tobytes(), lemma.bounds.astype("<f8").tobytes()]
    tree = _write_tree(lemma.tree, pieces)
    return {"node": lemma.node, "sides": len(lemma.sides), "tree": tree}


def _read_lemma(header: dict[str, Any], rest: _Rest) -> Lemma:
    sides, bounds = (rest.take(kind, header["sides"]) for kind in ("<i4", "<f8"))
    return Lemma(header["node"], sides.astype(np.int64), bounds, _read_tree(header["tree"], rest))


def _read_tree(header: dict[str, Any], rest: _Rest) -> Tree:
    kinds = np.array(header["kinds"], np.int64).reshape(-1)
    rows = header["rows"]
    sets, neurons = header["slopes"]
    index = rest.take(_width(len(kinds)), header["nodes"])
    if (index >= len(kinds)).any():
        raise FormatError("a node of a tree is of no kind")
    coded = kinds[index]
    table = rest.take("u1", header["table"], rows)
    own = rest.take("u1", header["own"], rows)
    inner = coded[(coded < 0) & (coded != LEAF) & (coded > -10)]
    if (inner != EACH_GROUP).any() or (coded < -9 - len(table)).any():
        raise FormatError("a node of a tree is of no known kind")
    codes = coded[(coded == LEAF) | (coded <= -10)]
    if np.count_nonzero(codes == LEAF) != len(own):
        raise FormatError("a tree has not as many weights as leaves")
    weights = np.zeros((len(codes), rows), np.uint8)
    weights[codes == LEAF] = own
    weights[codes != LEAF] = table[-10 - codes[codes != LEAF]]
    slopes_of = np.full(len(codes), -1, np.int64)
    if sets:
        slopes_of = rest.take(_width(sets + 1, "slopes"), len(codes)).astype(np.int64) - 1
    slopes = rest.take("u1", sets, neurons)
    if slopes_of.max(initial=-1) >= sets:
        raise FormatError("a tree names a set of slopes that does not exist")
    multipliers = rest.take("<f2", header["multipliers"])
    steps = np.where(coded <= -10, LEAF, coded)
    lemmas = tuple([_read_lemma(lemma, rest) for lemma in header.get("lemmas", [])])
    return Tree(steps, weights, slopes_of, slopes, multipliers, lemmas)


def _width(count: int, what: str = "nodes") -> str:
    for kind, limit in (("u1", 1 << 8), ("<u2", 1 << 16), ("<u4", 1 << 32)):
        if count <= limit:
            return kind
    raise FormatError(f"{count} kinds of {what} are too many for a certificate")


def _write_network(network: Network, pieces: list[bytes]) -> dict[str, Any]:
    nodes = []
    for node in network.nodes:
        arrays = (*node.weights, node.bias)
        short = [bool((array == array.astype("<f4")).all()) for array in arrays]
        for array, is_short in zip(arrays, short, strict=True):
            pieces.append(np.ascontiguousarray(array, "<f4" if is_short else "<f8").tobytes())
        nodes.append(
            {
                "inputs": list(node.inputs),
                "shapes": [list(array.shape) for array in arrays],
                "short": short,
                "function": node.function,
                "roundings": node.roundings,
                "inexact": node.inexact,
            }
        )
    return {"inputs": network.inputs, "nodes": nodes}


def _read_network(header: dict[str, Any], rest: _Rest) -> Network:
    def arrays(node: dict[str, Any]) -> Iterator[npt.NDArray[np.float64]]:
        for shape, short in zip(node["shapes"], node["short"], strict=True):
            yield rest.take("<f4" if short else "<f8", *shape).astype(np.float64)

    nodes = []
    for node in header["nodes"]:
        *weights, bias = arrays(node)
        function, roundings = str(node["function"]), int(node["roundings"])
        inputs, inexact = tuple(map(int, node["inputs"])), float(node["inexact"])
        if not isfinite(inexact):
            raise FormatError("a node of its network is inexact beyond all bounds")
        nodes.append(Node(inputs, tuple(weights), bias, function, roundings, inexact))
    return check_network(Network(int(header["inputs"]), tuple(nodes)))
