"""NumPy's own versions of ops, which large arrays take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from anydevice._engines.numpy.fused import FUSED
from anydevice._ops import elementwise as _elementwise
from anydevice._ops import reduce as _norm
from tests.comparing import COPIED, assert_same_values, rounding

LARGE = (3, 70, 401)


def drawn(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    return (3 * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


CASES: list[tuple[str, Callable[..., Any], Callable[[Any], tuple[Any, ...]]]] = [
    ("softmax", _norm._softmax, lambda x: (x, 2)),
    ("rmsnorm", _norm._rmsnorm, lambda x: (x, drawn(401, seed=1), 1e-6)),
    ("silu", _elementwise._silu, lambda x: (x,)),
    ("swiglu", _elementwise._swiglu, lambda x: (x, x[::-1])),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("name", "definition", "arguments"), CASES, ids=[c[0] for c in CASES])
@pytest.mark.parametrize("turned", [False, True], ids=["in order", "turned"])
def test_large_arrays(name: str, definition: Any, arguments: Any, dtype: Any, turned: bool) -> None:
    x = drawn(401, 70, 3, dtype=dtype).transpose() if turned else drawn(*LARGE, dtype=dtype)
    x[0, 0, :3], x[1, 1, 5], x[2, 2, 7] = (-200, 200, 0), math.nan, math.inf
    given = arguments(x)
    copies = [y.copy() for y in given if isinstance(y, np.ndarray)]
    found, expected = FUSED[name](*given), definition(*given)
    assert found.dtype == expected.dtype
    loose = rounding(dtype, 401)
    np.testing.assert_allclose(found, expected, rtol=loose, atol=loose)
    for before, y in zip(copies, given, strict=False):
        assert_same_values(before, y, because=COPIED)


def test_what_is_left_to_the_definitions() -> None:
    for name, _, arguments in CASES:
        assert FUSED[name](*arguments(drawn(1, 2, 401))) is NotImplemented
        assert FUSED[name](*arguments(drawn(*LARGE, dtype=np.float16))) is NotImplemented
    assert FUSED["softmax"](drawn(*LARGE), 0) is NotImplemented
