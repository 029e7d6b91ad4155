"""Moving plain nests: what the contract of every engine does not show."""

from __future__ import annotations

import numpy
import pytest

import anydevice
from anydevice.errors import DeviceNotFoundError, TransferError, UnsupportedError


def test_an_error_of_the_library_names_the_leaf() -> None:
    tree = {"layers": [numpy.ones(2), numpy.ones(2, numpy.longdouble)]}
    device = anydevice.device("cpu", engine="torch")
    with pytest.raises(TransferError, match=r"\['layers'\]\[1\]: ") as caught:
        anydevice.to_device(tree, device)
    assert caught.value.path == "['layers'][1]"
    assert isinstance(caught.value.__cause__, UnsupportedError)


@pytest.mark.parametrize("engine", ["numpy", "torch", "jax", "mlx"])
def test_what_holds_no_numbers_is_left_alone(engine: str) -> None:
    texts = numpy.array(["a", "b"])
    tree = {
        "texts": texts,
        "objects": numpy.array([object()]),
        "dates": numpy.array(["2020-01-01"], "datetime64[D]"),
        "table": numpy.zeros(2, [("x", "f4")]),
    }
    moved = anydevice.device("cpu", engine=engine)(tree)
    assert all(moved[name] is tree[name] for name in tree)
    assert anydevice.to_numpy(moved)["texts"] is texts


def test_a_device_that_is_not_usable_is_refused() -> None:
    with pytest.raises(DeviceNotFoundError, match="cuda:9"):
        anydevice.to_device(numpy.ones(2), "cuda:9")
