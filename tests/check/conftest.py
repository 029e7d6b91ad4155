"""Engines whose version of an op is replaced by a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from anydevice._ops import dispatch

Replace = Callable[..., None]


def _example(engine: str) -> Any:
    if engine == "numpy":
        return np.zeros(1)
    import torch

    return torch.zeros(1)


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch) -> Replace:
    """Let an engine have its own version of an op: `replace("numpy", rmsnorm=wrong)`."""

    def put(engine: str, **versions: Callable[..., Any]) -> None:
        dispatch.primitives(_example(engine))  # fills the tables for this engine
        monkeypatch.setitem(dispatch._fused, engine, {**dispatch._fused[engine], **versions})

    return put
