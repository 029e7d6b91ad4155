"""How far two computations of the same numbers may lie apart, on whatever processor they run."""

from __future__ import annotations

from typing import Any

import ml_dtypes


def rounding(dtype: Any, terms: int) -> float:
    """The share of its magnitude by which a sum of so many terms may differ between two orders.

    Two compilations of one program, or two engines, add up in different orders and fuse products
    into sums or not. Each result is within `n * u / (1 - n * u)` of the exact one, where `u` is
    half the distance from 1 to the next number and `n` counts the roundings on the longest way to
    it (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1): the terms of a sum, or
    of all sums that follow one another. Two of them lie within twice that. It is a share of the sum
    of the terms' magnitudes, for which the largest result stands in where the terms cancel out.
    """
    unit = float(ml_dtypes.finfo(dtype).eps) / 2
    share = terms * unit
    assert share < 0.1, f"{terms} terms of {dtype} say nothing any more"
    return 2 * share / (1 - share)
