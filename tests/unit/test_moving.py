"""Moving plain nests: what the contract of every engine does not show."""

from __future__ import annotations

import numpy
import pytest

import anydevice
from anydevice.errors import DeviceNotFoundError, TransferError


def test_an_error_of_the_library_names_the_leaf() -> None:
    tree = {"layers": [numpy.ones(2), numpy.array([object()])]}
    device = anydevice.device("cpu", engine="torch")
    with pytest.raises(TransferError, match=r"\['layers'\]\[1\]: ") as caught:
        anydevice.to_device(tree, device)
    assert caught.value.path == "['layers'][1]"
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_device_that_is_not_usable_is_refused() -> None:
    with pytest.raises(DeviceNotFoundError, match="cuda:9"):
        anydevice.to_device(numpy.ones(2), "cuda:9")
