"""Damaged models, properties and certificates: our error with the file, soon, in little memory.

Each mutant is read as `anydevice prove` reads it. What can still be read is checked: a certificate
of a false theorem must not pass, whatever was changed in it.
"""

from __future__ import annotations

import json
import random
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydevice._proofs.checking.certificate import LEAF, Tree
from anydevice._proofs.files import ModelFile, check, read_certificate, read_model, read_queries
from anydevice.errors import AnyDeviceError, ConfigurationError, UnsupportedError
from tests.faults.damage import at_random, by_meaning
from tests.proofs.checking.theorems import certificate, dense, executed, query
from tests.proofs.checking.written import described, field, onnx_of, operator, tensor, vnnlib_of

NETWORK = dense((3, 8, 8, 2))
LEAST = executed(NETWORK, np.random.default_rng(0).uniform(-1, 1, (20_000, 3))).min(0)
FALSE = query([-1] * 3, [1] * 3, np.eye(2), np.floor(-LEAST))
HEADER = b"anydevice proof 1\n"
SLOWEST, LARGEST = 20.0, 400 << 20


def convolutional() -> bytes:
    """A file of operators with attributes: convolution, pooling, clip, concatenation."""
    weight = np.random.default_rng(0).normal(0, 1, (2, 1, 3, 3)).astype(np.float32)
    graph = b"".join(
        [
            field(5, tensor("w", weight)),
            field(5, tensor("shape", np.array([1, -1]))),
            field(5, tensor("two", np.full((1,), 2, np.float32))),
            field(1, operator("Conv", ["input", "w"], "c", group=1)),
            field(1, operator("Relu", ["c"], "r")),
            field(1, operator("Mul", ["r", "two"], "m")),
            field(1, operator("Concat", ["r", "m"], "both", axis=1)),
            field(1, operator("Reshape", ["both", "shape"], "flat")),
            field(1, operator("Sigmoid", ["flat"], "out")),
            field(11, described("input", (1, 1, 5, 4))),
            field(12, described("out", (1, 24))),
        ]
    )
    return field(1, 8) + field(7, graph) + field(8, field(2, 13))


def forged() -> bytes:
    """A certificate of a false theorem, with splits, cases, slopes and the network itself."""
    tree = Tree(
        np.array([0, 3, LEAF, LEAF, 1, LEAF, LEAF]),
        np.array([[255, 255], [255, 0], [0, 255], [7, 9]], np.uint8),
        np.array([0, 1, -1, -1]),
        np.random.default_rng(0).integers(0, 256, (2, 16)).astype(np.uint8),
        np.array([0.5, 0.25], np.float16),
    )
    return certificate(NETWORK, [FALSE], [tree])._replace(carried=NETWORK).to_bytes()


def damaged_certificate(dice: random.Random, data: bytes) -> bytes:
    """Changes before or behind the packing, or in the header alone."""
    if dice.random() < 0.2:
        return at_random(dice, data)
    content = zlib.decompress(data[len(HEADER) :])
    header, _, rest = content.partition(b"\n")
    way = dice.random()
    if way < 0.4:
        tree = json.loads(header)
        by_meaning(dice, tree, ["trees", "nodes", "kinds", "rows", "slopes", "carried", "inputs"])
        header = json.dumps(tree).encode("utf-8", "surrogatepass")
    elif way < 0.7:
        header = at_random(dice, header)
    else:
        rest = at_random(dice, rest)
    return HEADER + zlib.compress(header + b"\n" + rest, 1)


def models(dice: random.Random, folder: Path) -> Iterator[Callable[[], Any]]:
    seeds = [onnx_of(NETWORK), onnx_of(NETWORK, gemm=True), convolutional()]
    file = folder / "net.onnx"
    while True:
        data = dice.choice(seeds)
        file.write_bytes(at_random(dice, data, dice.choice([None, 200])))
        yield partial(read_model, file)


def properties(dice: random.Random, folder: Path) -> Iterator[Callable[[], Any]]:
    seeds = [vnnlib_of(FALSE, version).encode() for version in (1, 2)]
    file = folder / "p.vnnlib"
    while True:
        file.write_bytes(at_random(dice, dice.choice(seeds)))
        yield partial(read_queries, file, ModelFile("net.onnx", "", NETWORK))


def certificates(dice: random.Random, folder: Path) -> Iterator[Callable[[], Any]]:
    seed, model, file = forged(), ModelFile("net.onnx", "", NETWORK), folder / "p.proof"

    def read() -> None:
        found = read_certificate(file)
        with pytest.raises(AnyDeviceError, match=r"p\.proof"):
            check(model, [FALSE], found, file)

    while True:
        file.write_bytes(damaged_certificate(dice, seed))
        yield read


KINDS = {"models": models, "properties": properties, "certificates": certificates}


def outcomes(kind: str, count: int, folder: Path, seed: int) -> dict[str, int]:
    """How many mutants were read, and how many refused; anything else is an error here."""
    found = {"read": 0, "refused": 0}
    mutants = KINDS[kind](random.Random(seed), folder)
    tracemalloc.start()
    try:
        for _ in range(count):
            read = next(mutants)
            tracemalloc.reset_peak()
            begin = time.process_time()
            message = ""
            try:
                read()
            except (ConfigurationError, UnsupportedError) as error:
                message = str(error)
            found["refused" if message else "read"] += 1
            assert not message or str(folder) in message
            assert time.process_time() - begin < SLOWEST
            assert tracemalloc.get_traced_memory()[1] < LARGEST
    finally:
        tracemalloc.stop()
    return found


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [250, pytest.param(20_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_our_errors(kind: str, count: int, tmp_path: Path) -> None:
    found = outcomes(kind, count, tmp_path, seed=0 if count == 250 else 1)
    assert sum(found.values()) == count
    assert found["refused"] > 50
    assert found["read"] > 5


def doubled(kind: str, count: int, **attributes: int) -> list[bytes]:
    """Return operators that each take the one before twice."""
    return [operator(kind, [f"c{k}"] * 2, f"c{k + 1}", **attributes) for k in range(count)]


def windows(**attributes: list[int]) -> bytes:
    """Return a max pooling of the input with lists of integers as attributes."""
    data = operator("MaxPool", ["input"], LAST)
    for name, values in attributes.items():
        data += field(5, field(1, name) + b"".join(field(8, n) for n in values) + field(20, 7))
    return data


LAST = "c50"
ROW, COLUMN = np.zeros((1, 1 << 15), np.int64), np.zeros((1 << 15, 1, 1, 1))
BOMBS: dict[str, tuple[list[bytes], dict[str, Any]]] = {
    "constants that double": (doubled("Concat", 50, axis=0), {"c0": ROW[0]}),
    "indices of indices": (
        [operator("Gather", ["i", "i"], "j"), operator("Gather", ["input", "j"], LAST)],
        {"i": ROW},
    ),
    "a table of integers": ([operator("Add", ["a", "b"], LAST)], {"a": ROW, "b": ROW.T}),
    "a table of products": (
        [operator("Mul", ["input", "a"], "r"), operator("Mul", ["r", "b"], LAST)],
        {"a": COLUMN, "b": COLUMN.swapaxes(0, 1)},
    ),
    "windows": ([windows(kernel_shape=[1000, 1000], pads=[999] * 4)], {}),
    "elements of a window": ([windows(kernel_shape=[9000, 9000], pads=[4500] * 4)], {}),
    "a spread window": (
        [windows(kernel_shape=[2, 2], dilations=[1 << 40] * 2, pads=[1 << 39] * 4)],
        {},
    ),
    "padding of each axis": (
        [operator("Pad", ["input", "p"], LAST)],
        {"p": np.full(8, 1 << 16)},
    ),
}
"""Operators that give c50, and constants."""


@pytest.mark.parametrize("name", BOMBS)
def test_small_files_of_large_networks_are_refused(name: str, tmp_path: Path) -> None:
    operators, constants = BOMBS[name]
    graph = b"".join(field(5, tensor(k, v)) for k, v in constants.items())
    graph += b"".join(field(1, data) for data in operators)
    graph += field(11, described("input", (1, 1, 2, 2))) + field(12, described(LAST, (1, 2)))
    file = tmp_path / "net.onnx"
    file.write_bytes(field(1, 8) + field(7, graph) + field(8, field(2, 13)))
    tracemalloc.start()
    try:
        with pytest.raises(UnsupportedError, match=r"net\.onnx.*would have more than"):
            read_model(file)
        assert tracemalloc.get_traced_memory()[1] < 3 * LARGEST
    finally:
        tracemalloc.stop()
