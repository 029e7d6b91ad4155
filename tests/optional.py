"""Libraries that are imported when a test first uses them.

    from tests.optional import torch

Where one is not installed, the tests that use it are skipped, and the others of the file run.
"""

from __future__ import annotations

import importlib
from typing import Any


class _Library:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


torch: Any = _Library("torch")
