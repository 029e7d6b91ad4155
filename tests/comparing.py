"""Comparisons of computed numbers: close up to rounding, or the same bits for a stated reason."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import anydevice

COPIED = "elements are copied, not computed"
EXACT = "integers, comparisons, sums of small integers and single roundings have one result"
SAME_PROGRAM = "the same program ran twice on the same input"


def rounding(dtype: Any, terms: int) -> float:
    """Return the relative error that two orders of a sum of `terms` terms may show.

    Two compilations of one program, or two engines, add up in different orders and fuse products
    into sums or not. Each result is within `n * u / (1 - n * u)` of the exact one, where `u` is
    half the distance from 1 to the next number and `n` counts the roundings on the longest path
    (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1): the terms of a sum, or
    of all sums that follow one another. Two results lie within twice that. The error is relative
    to the sum of the terms' magnitudes; the largest result stands in for it if the terms cancel.
    """
    unit = float(ml_dtypes.finfo(dtype).eps) / 2
    share = terms * unit
    assert share < 0.1, f"{terms} terms of {dtype} say nothing any more"
    return 2 * share / (1 - share)


def assert_close(actual: Any, expected: Any, *, terms: int, dtype: Any = None) -> None:
    """Assert that two computations of the same numbers differ by rounding alone.

    Args:
        actual: an array of any engine, or a number.
        expected: the same, computed in another way.
        terms: how many roundings lie on the longest path to a result, such as the length of a sum.
        dtype: the dtype that was computed in; by default the narrower one of the two arrays.

    """
    a, b = _host(actual), _host(expected)
    assert a.shape == b.shape, f"{a.shape} instead of {b.shape}"
    if dtype is None:
        dtype = max((a.dtype, b.dtype), key=lambda each: float(ml_dtypes.finfo(each).eps))
    a, b = a.astype(np.float64), b.astype(np.float64)
    tolerance = rounding(dtype, terms)
    finite = np.abs(b[np.isfinite(b)])
    largest = float(finite.max()) if finite.size else 0.0
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * largest)


def assert_same_bits(actual: Any, expected: Any, *, because: str) -> None:
    """Assert that two arrays have the same dtype, shape and bits.

    `because` says why no rounding may differ: the same program ran twice on the same input, or
    nothing was computed, only copied.
    """
    assert because, "say why the bits must be the same"
    a, b = _host(actual), _host(expected)
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    if a.tobytes() != b.tobytes():
        np.testing.assert_array_equal(a, b, err_msg=f"{because}, yet the bits differ")
        raise AssertionError(f"{because}, yet zeros or NaNs have different bits")


def assert_same_values(actual: Any, expected: Any, *, because: str) -> None:
    """Assert that two arrays have equal values, NaN included, whatever their dtypes.

    `because` says why there is only one result: `COPIED`, `EXACT`, `SAME_PROGRAM`, or in words.
    """
    assert because, "say why there is only one result"
    np.testing.assert_array_equal(_host(actual), _host(expected), err_msg=because)


def assert_same_integers(actual: Any, expected: Any) -> None:
    """Assert that two arrays of integers or booleans are equal; these have no rounding."""
    a, b = _host(actual), _host(expected)
    assert a.dtype.kind in "iub", f"{a.dtype} is rounded: use assert_close or assert_same_bits"
    assert b.dtype.kind in "iub", f"{b.dtype} is rounded: use assert_close or assert_same_bits"
    np.testing.assert_array_equal(a, b)


def _host(x: Any) -> np.ndarray[Any, Any]:
    is_plain = isinstance(x, np.ndarray | np.generic | int | float | list | tuple)
    return np.asarray(x if is_plain else anydevice.to_numpy(x))
