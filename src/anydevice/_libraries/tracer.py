"""The interface of `trace.py` in the folder of each library whose modules can be proved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from anydevice._core.protocols import Trace, TracedTensor
from anydevice._libraries.base import ModelAdapter


class Tracer(Protocol):
    """A module `_libraries/<library>/trace.py`."""

    def trace_output(
        self, adapter: ModelAdapter, trace: Trace, shape: tuple[int, ...]
    ) -> TracedTensor:
        """Run a module on one example of a shape, and return its traced output."""

    def batch_call(self, adapter: ModelAdapter, shape: tuple[int, ...]) -> Callable[..., Any]:
        """Return the module as a function of a batch of one example."""
