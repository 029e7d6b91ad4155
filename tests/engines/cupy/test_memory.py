"""Memory of CuPy, with a stand-in for the library."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from anydevice._core.device import Device

GIB = 2**30
CARD = Device("cuda", 0)


def test_a_lifted_limit_restores_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        limit = 7 * GIB

        def set_limit(self, size: int) -> None:
            self.limit = size

        def get_limit(self) -> int:
            return self.limit

    pool = Pool()
    library: Any = ModuleType("cupy")
    library.get_default_memory_pool = lambda: pool
    engine: Any = ModuleType("anydevice._engines.cupy.arrays")
    engine.ENGINE = SimpleNamespace(native=lambda device: nullcontext())
    monkeypatch.setitem(sys.modules, "cupy", library)
    monkeypatch.setitem(sys.modules, "anydevice._engines.cupy.arrays", engine)
    monkeypatch.delitem(sys.modules, "anydevice._engines.cupy.memory", raising=False)
    memory = import_module("anydevice._engines.cupy.memory").MEMORY
    del sys.modules["anydevice._engines.cupy.memory"]  # it must not be there after the test
    memory.set_limit(CARD, None)
    assert pool.limit == 7 * GIB
    for limit in (60 * GIB, 40 * GIB):
        memory.set_limit(CARD, limit)
        assert pool.limit == limit
    memory.set_limit(CARD, None)
    assert pool.limit == 7 * GIB
