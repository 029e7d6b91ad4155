"""What the tests of several ops need."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from anydevice._ops import dispatch


@pytest.fixture(params=["as dispatched", "by definition"])
def either_version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs twice: with the versions that NumPy's engine has of its own, and without."""
    dispatch.primitives(np.ones(1))
    if request.param == "by definition":
        monkeypatch.setitem(dispatch._fused, "numpy", {})


@pytest.fixture
def nothing_met() -> Iterator[None]:
    """No type of array has been met yet."""
    dispatch.forget()
    yield
    dispatch.forget()
