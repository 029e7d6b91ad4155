"""Public names that load when they are first used: misspelled ones, and what the error tells."""

from __future__ import annotations

import pickle
import sys
from importlib import import_module

import pytest


@pytest.mark.parametrize(
    ("package", "wrong", "right"),
    [
        ("anydevice", "to_devcie", "anydevice.to_device"),
        ("anydevice", "paralel", "anydevice.parallel"),
        ("anydevice.llm", "Languagemodel", "llm.LanguageModel"),
        ("anydevice.nn", "Conv2D", "nn.Conv2d"),
        ("anydevice.parallel", "mesh_", "parallel.Mesh"),
        ("anydevice.proofs", "prov", "proofs.prove"),
    ],
)
def test_a_misspelled_name_suggests_the_right_one(package: str, wrong: str, right: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(import_module(package), wrong)
    said = f"module {package!r} has no attribute {wrong!r}; did you mean {right}?"
    assert str(caught.value) == said
    assert str(pickle.loads(pickle.dumps(caught.value))) == said  # as a pool of processes does


def test_a_name_is_looked_up_once() -> None:
    package = import_module("anydevice.nn")
    vars(package).pop("Dense", None)
    dense = package.Dense
    assert vars(package)["Dense"] is dense is sys.modules["anydevice._nn.layers"].Dense
