"""Counts the bytes of tensors that are alive at once while PyTorch runs, operation by operation.

It gives the peak that a GPU's allocator would report, on a machine without one: every storage that
an operation makes is counted from then until nothing holds it any more. What a fused kernel keeps
inside itself is not seen, and on a GPU such kernels keep next to nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Within its block: `now` and `peak` are bytes."""

    def __init__(self, there_before: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}
        for tensor in there_before:
            self._count(tensor, counts=False)

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self._count(value)
        return result

    def reset(self) -> None:
        """Look for the peak from now on."""
        self.peak = self.now

    def _count(self, tensor: torch.Tensor, counts: bool = True) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if counts else 0

        def gone(_: object) -> None:
            del self._known[key]
            self.now -= size

        self._known[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)
