"""A home of its own for every test: what is saved in one is not found in another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from anydevice._machine.discovery import discover as discovery


@pytest.fixture(autouse=True)
def own_home(home: Path) -> Iterator[Path]:
    discovery.forget_report()
    yield home
    discovery.forget_report()
