"""What is dropped in a part of a batch is what would be dropped there in the whole one."""

from __future__ import annotations

import numpy as np
import pytest

from anydevice import nn
from anydevice._nn.layer import Run
from tests.comparing import assert_same_bits


@pytest.mark.parametrize("shape", [(7,), (7, 3), (7, 40), (7, 2, 5), (50, 4), (6, 3, 3, 2)])
def test_a_part_drops_what_the_whole_drops(shape: tuple[int, ...]) -> None:
    x = np.ones(shape, np.float32)
    layer = nn.Dropout(0.4)
    whole = layer.apply({}, x, Run(training=True, seed=3, step=5))
    assert 0 < (whole == 0).mean() < 1
    for first, stop in ((0, 3), (3, 4), (4, shape[0])):
        rows = (first, stop - first, shape[0])
        part = layer.apply({}, x[first:stop], Run(training=True, seed=3, step=5, rows=rows))
        assert_same_bits(part, whole[first:stop], because="the same hash of the same positions")


def test_several_rows_an_example_are_cut_with_it() -> None:
    x = np.ones((6 * 4, 5), np.float32)  # four tokens an example
    layer = nn.Dropout(0.4)
    whole = layer.apply({}, x, Run(training=True, seed=3))
    part = layer.apply({}, x[8:16], Run(training=True, seed=3, rows=(2, 2, 6)))
    assert_same_bits(part, whole[8:16], because="the same hash of the same positions")
