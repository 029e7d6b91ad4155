"""ACAS Xu: the files are read as they mean it, and no certificate proves what is false there."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from anydevice._proofs.checking.certificate import LEAF
from anydevice._proofs.checking.checker import check, refused
from anydevice._proofs.checking.network import RefusedError
from anydevice._proofs.files import check as check_file
from anydevice._proofs.files import read_certificate, read_model, read_queries
from tests.proofs.checking.theorems import acasxu, acasxu_folder, certificate, leaf_tree


def instances(expected: str) -> Iterator[tuple[str, str]]:
    with (acasxu_folder() / "truth.csv").open() as file:
        for row in csv.DictReader(file):
            if row["expected"] == expected:
                yield row["property"], row["net"]


def test_both_versions_of_a_property_mean_the_same() -> None:
    for number in range(1, 11):
        one, two = (acasxu_folder() / x / f"prop_{number}.vnnlib" for x in ("vnnlib", "vnnlib2"))
        assert read_queries(one) == read_queries(two)


def test_a_network_is_seven_layers() -> None:
    model = read_model(acasxu("1_1", 1)[0])
    sizes = [node.size for node in model.network.nodes]
    assert (model.network.inputs, sizes) == (5, [50] * 6 + [5])
    assert [node.function for node in model.network.nodes] == ["relu"] * 6 + [""]
    assert [node.roundings for node in model.network.nodes] == [6] + [51] * 6


def full(depth: int, random: np.random.Generator) -> list[int]:
    """A tree of halvings, each level along an input of its own."""
    if not depth:
        return [LEAF]
    return [int(random.integers(5)), *full(depth - 1, random), *full(depth - 1, random)]


def forged(depth: int) -> int:
    """How many of the false theorems are refused, for certificates of 2**depth leaves each."""
    random, count = np.random.default_rng(depth), 0
    for number, name in instances("sat"):
        file, claim = acasxu(name, number)
        model = read_model(file)
        queries = read_queries(claim, model)
        trees = []
        for query in queries:
            weights = random.integers(0, 256, (2**depth, len(query.group))).astype(np.uint8)
            trees.append(leaf_tree(weights, full(depth, random)))
        with pytest.raises(RefusedError, match="leaf"):
            check(model.network, queries, certificate(model.network, queries, trees))
        count += 1
    return count


def test_none_of_the_47_false_theorems_is_accepted() -> None:
    assert forged(depth=2) == 47


@pytest.mark.soak
def test_no_leaf_with_a_counterexample_is_ever_closed() -> None:
    assert forged(depth=9) == 47


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("precision", ["float32", "real"])
def test_all_139_certificates_are_small_and_checked_quickly(precision: str, tmp_path: Path) -> None:
    """From files to files: at most 1 MB together, and 130 seconds of CPU, of which 20 are used."""
    from anydevice._proofs.prove import Proof, prove

    count, size, seconds = 0, 0, 0.0
    for number, name in instances("unsat"):
        network, claim = acasxu(name, number)
        proof = prove(network, claim, precision=precision)
        assert isinstance(proof, Proof)
        (file,) = proof.save(tmp_path / f"{number}_{name}.proof")
        size += file.stat().st_size
        begin = time.process_time()
        model = read_model(network)
        certificate = read_certificate(file)
        assert certificate.arithmetic == precision
        count += check_file(model, read_queries(claim, model), certificate, file) > 0
        seconds += time.process_time() - begin
    assert count == 139
    assert size <= 1e6
    assert seconds <= 130


def test_a_false_theorem_stays_open_where_it_is_false() -> None:
    """Leaves are closed one after the other until those with counterexamples are left."""
    network, claim = acasxu("2_1", 2)
    model = read_model(network)
    (query,) = read_queries(claim, model)
    steps = full(5, np.random.default_rng(0))
    assert refused(model.network, query, leaf_tree([[255] * 4] * 32, steps), "real")
