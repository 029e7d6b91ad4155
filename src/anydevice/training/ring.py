"""Trainings in several processes of MLX, which its ring joins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from anydevice.core.device import Device
from anydevice.core.trees import Tree, leaves, mapped, refilled
from anydevice.parallel.mlx_ring import RingProcesses
from anydevice.training.spreading import CHECKED, Function, ProcessSpread, Spread, other_batches
from anydevice.transfer.moving import to_numpy


class RingSpread(ProcessSpread):
    """A training in several processes of MLX, each with its rows of the same batches.

    The sums of gradients are a part of the compiled step.
    """

    checks_batches = True

    def __init__(self, group: RingProcesses, device: Device, text: str) -> None:
        super().__init__(group, device, text)
        self._ring = group
        self._answers: deque[Any] = deque()

    def is_asked(self, asked: bool) -> bool:
        self.asked = asked
        # The answer of some calls ago: by now it is there, so that no step waits for it.
        self._answers.append(self._ring.any_of(asked))
        if len(self._answers) <= self.in_flight:
            return False
        return bool(to_numpy(self._answers.popleft()) > 0)

    def parameters(self, tree: Tree) -> Tree:
        placed = Spread.parameters(self, tree)
        return placed if self._ring.is_same(placed) else mapped(self._ring.from_first, placed)

    def gradients(self, differentiate: Function, loss: Function) -> Function:
        function = differentiate(loss)

        def summed(
            trained: Tree, held: Tree, batch: Any, seed: Any, number: Any, scale: Any
        ) -> tuple[tuple[Any, list[Any]], Tree]:
            part, rows, share = self._own(batch)
            (value, state), found = function(trained, held, part, seed, number, scale, rows)
            value, *sums = self._ring.sum([value, *leaves(found)], share)
            return (value, state), refilled(found, sums)

        return summed

    def check_batch(self, batch: Any, loss: Callable[[Any, Any], Any]) -> None:
        if self._checked == CHECKED:
            return
        self._checked += 1
        if not self._ring.is_same(batch):
            raise other_batches()
        whole = float(to_numpy(loss(batch, None)))
        part, rows, share = self._own(batch)
        (value,) = self._ring.sum([loss(part, rows)], share)
        self._compare(whole, float(to_numpy(value)), None)
