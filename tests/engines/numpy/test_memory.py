"""Memory of NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from anydevice._machine.engines import registry


def test_numpy_says_what_was_to_be_made() -> None:
    memory = registry.load("numpy").memory
    with pytest.raises(MemoryError) as caught:
        np.empty((2**40, 2**10), np.float64)
    assert memory.ran_out(caught.value)
    assert memory.asked(caught.value) == 2**53
    assert memory.asked(MemoryError()) is None
