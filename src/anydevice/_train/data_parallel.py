"""A training in several processes, each with its rows of the same batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from anydevice._arrays.move import to_numpy
from anydevice._core.device import Device
from anydevice._core.protocols import Function
from anydevice._core.record import replace
from anydevice._core.text import warn
from anydevice._core.trees import Tree, leaves, mapped, refilled
from anydevice._libraries.exchange import digest_of
from anydevice._libraries.layers import takes_model
from anydevice._libraries.precision import Policy
from anydevice._libraries.registry import part
from anydevice._nn.losses import LOSSES
from anydevice._nn.optimizers import Optimizer
from anydevice._parallel.mesh import Mesh
from anydevice._parallel.placing import row_ranges
from anydevice._train import strategy as strategies
from anydevice._train.batches import rows_of
from anydevice._train.randomness import random_state, set_random_state
from anydevice._train.step_config import StepConfig, copied
from anydevice._train.strategy import (
    CHECKED,
    Strategy,
    check_rows,
    is_compared,
    not_divisible,
    other_batches,
)

if TYPE_CHECKING:
    from anydevice._libraries.mlx.mesh import RingProcesses
    from anydevice._libraries.torch.mesh import Group, JoinedLoss

Rows = tuple[int, int, int]
"""First row of a part of a batch, number of rows of the part, number of rows of the batch."""

_INSTEAD = "train in one process, or on several devices of JAX, which compute whole batches"


class ProcessStrategy(Strategy):
    """A training in several processes of PyTorch, each with its rows of the same batches.

    Gradients are summed, weighted by rows, before any other use. So all processes clip, fail and
    scale alike, and keep the same parameters.
    """

    is_several = True

    def __init__(self, group: Any, device: Device, text: str) -> None:
        super().__init__(device)
        self.text = text
        self._group: Group = group
        self._number = 0
        self._rounding = strategies.ROUNDING
        self._expected: Any = None
        self._joint: JoinedLoss | None = None
        # Reading the counts at once would wait for the device in each step. So a process with one
        # batch too many starts a sum that no other process joins, and blocks there until the
        # launcher ends it, once the process that lacks the batch has failed.
        self.late = 0 if device.kind == "cpu" else self.in_flight
        self.reads_within = True
        set_random_state(group.of_first(random_state(device)), device)

    @property
    def leads(self) -> bool:
        return self._group.rank == 0

    def wait(self) -> None:
        self._group.wait()

    def _tell_rows(self, rows: int) -> Callable[[], Any]:
        return self._group.of_processes([rows, int(self.asked)], self.device)

    def parameters(self, tree: Tree) -> Tree:
        placed = copied(super().parameters(tree))
        self.share(leaves(placed))
        return placed

    def share(self, tensors: Sequence[Any]) -> None:
        self._group.copy_from_first(tensors)

    def check(
        self, layer: Any, frozen: Collection[str], policy: Policy, optimizer: Optimizer | None
    ) -> None:
        self._rounding = strategies.ROUNDING_16 if policy.is_narrow else strategies.ROUNDING
        check_rows(layer, frozen, _INSTEAD)

    def config(self, config: StepConfig) -> StepConfig:
        loss = config.loss
        named = any(loss is own for own in LOSSES.values())
        if self.device.engine != "torch" or named or loss is None or takes_model(loss):
            return config
        if config.optimize != "none":  # compiled code cannot communicate with other processes
            return config
        mesh = Mesh([self.device], shard=self._group.size, group=self._group)
        self._joint = part("torch", "mesh").JoinedLoss(loss, mesh)
        return replace(config, loss=self._joint)

    def gradients(self, differentiate: Function, loss: Function) -> Function:
        function = differentiate(loss)

        def summed(
            trained: Tree, held: Tree, batch: Any, seed: Any, number: Any, scale: Any
        ) -> tuple[tuple[Any, list[Any]], Tree]:
            self._check_first(batch, lambda: loss(trained, held, batch, seed, number, scale)[0])
            own, rows, share = self._own(batch)
            with self._part(rows, share) as weight:
                (value, state), found = function(trained, held, own, seed, number, scale, rows)
            sums = self._sum([self._own_value(value), *leaves(found)], weight)
            if sums is None:  # the loss is no mean over rows: repeat with the rows of all processes
                self._number -= 1
                return summed(trained, held, batch, seed, number, scale)
            return (sums[0], state), refilled(found, sums[1:])

        return summed

    def module_loss(self, loss: Function, batch: Any) -> Any:
        self._check_first(batch, lambda: self._as_whole(loss, batch))
        own, rows, share = self._own(batch)
        before = random_state(self.device)
        value = self._module_part(loss, own, rows, share)
        if self._joint is not None and not self._joint.is_on and self._expected is not None:
            share_of_loss = self._expected.new_zeros(()) if value is None else value.detach()
            if self._is_other(self._expected, self._group.sum([share_of_loss])[0]):
                self._join(self._joint)
                set_random_state(before, self.device)
                value = self._module_part(loss, own, rows, share)
        return value

    def _module_part(self, loss: Function, batch: Any, rows: Rows, share: float) -> Any:
        drops = part("torch", "random").dropping_as_whole(rows)
        with self._part(rows, share) as weight, drops:
            if weight:
                return loss(batch) * weight
            with part("torch", "module").no_gradients():  # keep random generators in step
                loss(batch)
        return None

    @contextmanager
    def _part(self, rows: Rows, share: float) -> Iterator[float]:
        """Run a block that computes a part of a batch; yields the weight of its gradients."""
        if self._joint is None or not self._joint.is_on:
            yield share
            return
        self._read_answers(self.late)
        self._joint.rows = rows, share, row_ranges(rows[2], self._group.size)
        try:
            yield 1.0
        finally:
            self._joint.rows = None

    def _own_value(self, value: Any) -> Any:
        """Return the loss this process contributes: its share, if each computed the whole loss."""
        return value if self._joint is None or not self._joint.is_on else value / self._group.size

    def _as_whole(self, loss: Function, batch: Any) -> Any:
        """Return the loss of a whole batch, with the same random numbers as its parts."""
        before = random_state(self.device)
        value = loss(batch)
        set_random_state(before, self.device)
        return value

    def module_total(self, value: Any, like: Any) -> Any:
        own = like.new_zeros(()) if value is None else self._own_value(value.detach())
        sums = self._sum([own], 1.0)
        assert sums is not None, "module_loss has compared it"
        return sums[0]

    def sum_gradients(self, weights: Sequence[Any]) -> None:
        self._read_answers(self.late)
        self._group.sum_gradients(weights)

    def _sum(self, tensors: Sequence[Any], share: float) -> list[Any] | None:
        """Return the sums over processes; the first is the loss.

        Returns None if the loss turns out not to be a mean over rows and needs the whole batch.
        """
        self._read_answers(self.late)
        # Multiplying by a share of 0 would keep NaN, so such numbers are replaced.
        tensors = tensors if share else [x.new_zeros(x.shape) for x in tensors]
        value, *sums = self._group.sum(tensors, share or 1.0)
        if self._expected is not None and self._is_other(self._expected, value):
            if self._joint is None or self._joint.is_on:
                raise self._wrong_parts(float(self._expected), float(value))
            self._join(self._joint)
            return None
        self._expected = None
        return [value, *sums]

    def _join(self, joint: JoinedLoss) -> None:
        """From now on, compute the loss over the rows of all processes."""
        joint.is_on = True
        if self._number > CHECKED:
            warn(
                f"the loss of batch {self._number} is not a mean over rows, unlike those that were "
                "checked before; from now on it is computed from the outputs of all processes"
            )

    def _own(self, batch: Any) -> tuple[Any, Rows, float]:
        """Return the rows of this process, their position in the batch, and their share of it.

        A process without rows computes the first one, with a share of 0.
        """
        every = rows_of(batch)
        first, stop = row_ranges(every, self._group.size)[self._group.rank]
        share = (stop - first) / every
        if not share:
            first, stop = 0, 1

        def own(x: Any) -> Any:
            return x[first:stop] if x.ndim and x.shape[0] == every else x

        return mapped(own, batch), (first, stop - first, every), share

    def _check_first(self, batch: Any, whole: Callable[[], Any]) -> None:
        """Check that the first batches are equal in all processes; compute the loss of a whole one.

        Later batches are checked too: parts may have equal weights by chance in the first ones.
        """
        self._number += 1
        if not is_compared(self._number):
            return
        self._read_answers(self.late)
        number = float(int.from_bytes(digest_of(batch)[:6], "big"))
        like = leaves(batch)[0]
        if self._group.largest(number, like) != -self._group.largest(-number, like):
            raise other_batches()
        with part("torch", "module").no_gradients():
            self._expected = whole()

    def _is_other(self, expected: Any, value: Any) -> bool:
        """Whether the loss of a whole batch differs from the loss of its parts."""
        difference = abs(float(expected) - float(value)) / max(1.0, abs(float(expected)))
        return self._group.largest(difference, value) > self._rounding

    def _wrong_parts(self, expected: float, value: float) -> Exception:
        return not_divisible(
            f"the loss of batch {self._number} is {expected:.6g}, and {value:.6g} as the mean "
            f"of its rows in {self._group.size} processes: it is no mean over rows, as where "
            "tokens are masked or random numbers are drawn in another way",
            _INSTEAD,
        )


class RingStrategy(ProcessStrategy):
    """A training in several processes of MLX, each with its rows of the same batches.

    The sums of gradients are part of the compiled step.
    """

    checks_batches = True

    def __init__(self, group: RingProcesses, device: Device, text: str) -> None:
        super().__init__(group, device, text)
        self._ring = group
        # A lazy array would be computed at another time than in the other processes.
        self.late, self.reads_within = 0, False

    def _tell_rows(self, rows: int) -> Callable[[], Any]:
        told = self._ring.of_processes([rows, int(self.asked)])
        return lambda: told

    def parameters(self, tree: Tree) -> Tree:
        placed = Strategy.parameters(self, tree)
        return placed if self._ring.is_same(placed) else mapped(self._ring.from_first, placed)

    def gradients(self, differentiate: Function, loss: Function) -> Function:
        function = differentiate(loss)

        def summed(
            trained: Tree, held: Tree, batch: Any, seed: Any, number: Any, scale: Any
        ) -> tuple[tuple[Any, list[Any]], Tree]:
            own, rows, share = self._own(batch)
            (value, state), found = function(trained, held, own, seed, number, scale, rows)
            value, *sums = self._ring.sum([value, *leaves(found)], share)
            return (value, state), refilled(found, sums)

        return summed

    def check_batch(self, batch: Any, loss: Callable[[Any, Any], Any]) -> None:
        self._number += 1
        if not is_compared(self._number):
            return
        if not self._ring.is_same(batch):
            raise other_batches()
        whole = float(to_numpy(loss(batch, None)))
        own, rows, share = self._own(batch)
        (value,) = self._ring.sum([loss(own, rows)], share)
        found = float(to_numpy(value))
        if self._is_other(whole, found):
            raise self._wrong_parts(whole, found)
