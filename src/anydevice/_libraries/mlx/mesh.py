"""The processes of a ring of MLX."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from anydevice._core.engine import Absent
from anydevice._core.protocols import Launched
from anydevice._libraries.exchange import HostExchange
from anydevice._libraries.group import meet, prove

_RING = "MLX_HOSTFILE"


class RingProcesses(HostExchange):
    def every(self, numbers: Any) -> Any:
        RingProcesses.calls += 1
        flat = mx.array(np.ascontiguousarray(numbers).reshape(-1))
        gathered = np.array(mx.distributed.all_gather(flat, group=_ring()))
        return gathered.reshape(self.size, *numbers.shape)

    def sum(self, arrays: Sequence[mx.array], share: float = 1.0) -> list[mx.array]:
        """Return sums over all processes, weighted by shares; a share of 0 excludes even NaN."""
        flat = mx.concatenate([x.reshape(-1).astype(mx.float32) for x in arrays])
        flat = flat * share if share else mx.zeros_like(flat)
        total = mx.distributed.all_sum(flat, group=_ring())
        ends = np.cumsum([x.size for x in arrays])[:-1].tolist()
        parts = mx.split(total, ends)
        return [
            part.reshape(x.shape).astype(x.dtype) for part, x in zip(parts, arrays, strict=True)
        ]

    def from_first(self, x: mx.array) -> Any:
        own = x if self.rank == 0 else mx.zeros_like(x)
        return mx.distributed.all_sum(own, group=_ring())

    def of_processes(self, numbers: Sequence[int]) -> Any:
        """Return the numbers of each process, one row each, ready once all have called this."""
        RingProcesses.calls += 1
        own = mx.array(list(numbers), mx.int32)
        return mx.distributed.all_gather(own, group=_ring()).reshape(self.size, len(numbers))


_rings: list[Any] = []


def _ring() -> Any:
    if not _rings:
        _rings.append(mx.distributed.init(strict=True, backend="ring"))
    return _rings[0]


def join(launched: Launched | None) -> RingProcesses:
    """Join the processes of MLX's launcher; they prove that they belong together."""
    if _RING not in os.environ:
        raise Absent(
            "MLX does not know where its processes are",
            instead="start them with `anydevice launch --engine mlx` on one machine, or with "
            "`mlx.launch` on several",
            code="no_collectives",
        ).error()
    if not _rings and launched is not None:
        # The ring would wait for a missing process for ever.
        meet(launched, lambda: {"ring": RingProcesses.calls})
        processes = RingProcesses(_ring().rank(), _ring().size())
        RingProcesses.key = prove(processes.gather, launched)
    return RingProcesses(_ring().rank(), _ring().size())
