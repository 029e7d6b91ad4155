"""The placement of a training: on one device here, on several in subclasses."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import closing
from typing import Any

from anydevice._arrays.move import to_device, to_numpy
from anydevice._core.device import Device
from anydevice._core.protocols import Function, StepState
from anydevice._core.text import format_size
from anydevice._core.trees import Tree, TreeT, leaves
from anydevice._libraries.precision import Policy
from anydevice._nn.layer import state_places
from anydevice._nn.optimizers import Optimizer, clip_gradients
from anydevice._parallel.mesh import no_collectives
from anydevice._train.batches import batch_name, mark_batch, placer, rows_of
from anydevice._train.step_config import StepConfig
from anydevice.errors import ConfigurationError

ROUNDING, ROUNDING_16 = 1e-5, 1e-3
"""Relative differences of losses, in float32 and in 16 bits, too large for rounding."""

CHECKED = 3
"""First batches whose loss is also computed as a whole; then powers of two, against chance."""

HELD = 4
"""Numbers stored per parameter: the parameter, its gradient and two moments."""


def is_compared(number: int) -> bool:
    """Whether the loss of the batch with this number, from 1 on, is also computed as a whole.

    >>> [number for number in range(1, 40) if is_compared(number)]
    [1, 2, 3, 4, 8, 16, 32]
    """
    return number <= CHECKED or not number & (number - 1)


class Strategy:
    """A training on one device. `text` describes the placement on several."""

    text: str | None = None
    is_several = False
    """Whether several processes train."""

    is_sharded = False
    """Whether each process holds a part of the parameters."""

    leads = True
    """Whether this process writes files and shows progress."""

    is_ahead = True
    """Whether another thread can place batches ahead."""

    stop_requested = False
    late = 0
    """Batches of delay before the answers of other processes are read."""

    reads_within = False
    """Whether answers are read within a step, before its first exchange, not before it."""

    must_compile = False
    """Whether a step must be one program, regardless of the options."""

    checks_batches = False
    """Whether `check_batch` checks batches before their steps."""

    in_flight = 2
    """Steps in flight when another one starts: one computes while another waits."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.reads_to = device
        """The device that a file is read to, before `state` places it."""
        self.place = placer(device)
        """Moves a batch to the place that steps expect."""
        self._answers: deque[tuple[Callable[[], Any], str]] = deque()
        self._stops = False

    def parameters(self, tree: Tree) -> Tree:
        """Return the parameters, placed for steps."""
        return to_device(tree, self.device, convert=True)

    def state(self, state: StepState, trained: Sequence[bool] | None) -> StepState:
        """Return the whole state of steps, placed; `trained` is the field of their `StepConfig`."""
        return state

    def joined(self, tree: Tree, name: str) -> Tree:
        """Return a tree of a step's state, by its name, as arrays for callers outside."""
        return tree

    def numbers(self, tree: TreeT) -> TreeT:
        """Return single numbers, placed for steps."""
        return tree

    def whole(self, tree: TreeT) -> TreeT:
        """Return a tree of whole parameters on one device."""
        return tree

    def readable(self, tree: TreeT) -> TreeT:
        """Return a tree that this process can read; all processes take part."""
        return tree

    def saved(self, tree: Tree) -> Tree:
        """Return a tree as the leading process writes it to a file; all processes take part."""
        return tree

    def config(self, config: StepConfig) -> StepConfig:
        """Return the parts of a step, adapted to this placement."""
        return config

    def divide_rows(self, batch: Any) -> Any:
        """Return a batch with its rows divided over the devices, also in compiled code."""
        return batch

    def gradients(self, differentiate: Function, loss: Function) -> Function:
        """Return `differentiate(loss)`: the loss of a whole batch, and its gradients."""
        return differentiate(loss)

    def check_batch(self, batch: Any, loss: Callable[[Any, Any], Any]) -> None:
        """Raise if parts of a batch cannot be computed alone; `loss` takes one, and its rows."""

    def over_shards(self, number: Any) -> Any:
        """Return the sum of a number over the processes that hold parts of the parameters."""
        return number

    def clip_gradients(self, gradients: Tree, limit: float) -> tuple[Tree, Any]:
        """Clip the gradients to a norm; also return their norm before."""
        return clip_gradients(gradients, limit)

    def module(self, layer: Any, dtype: str, optimizer: Any) -> Any:
        """Return a module of PyTorch, placed in `dtype`; `optimizer` is PyTorch's or `None`."""
        layer.placed(self.device, dtype)
        self.share(leaves(layer.parameters))
        return layer

    def optimizer_state(self, saved: Any, optimizer: Any) -> Any:
        """Return the saved state of a module's optimizer in the form that it loads."""
        return saved

    def module_loss(self, loss: Function, batch: Any) -> Any:
        """Return the share of this process in the loss of a batch; `None` without rows."""
        return loss(batch)

    def module_total(self, value: Any, like: Any) -> Any:
        """Return the loss of a whole batch from a result of `module_loss`."""
        return value.detach()

    def sum_gradients(self, weights: Sequence[Any]) -> None:
        """Sum the gradients of PyTorch weights over processes, as for whole batches."""

    def check(
        self, layer: Any, frozen: Collection[str], policy: Policy, optimizer: Optimizer | None
    ) -> None:
        """Raise `UnsupportedError` for a model that this placement cannot train."""

    def share(self, tensors: Sequence[Any]) -> None:
        """Give weights of PyTorch the same numbers in all processes."""

    def should_stop(self, requested: bool) -> bool:
        """Whether the training stops now, in all processes; Ctrl-C to this one is a request."""
        self.stop_requested = requested  # the next batch tells the others
        self._read_answers(self.late)
        return self._stops if self.is_several else requested

    def together(
        self, batches: Generator[Any, None, None], name: str, epoch: int, skipped: int = 0
    ) -> Generator[Any, None, None]:
        """Yield placed batches; raise `ConfigurationError` if processes differ in their rows."""
        number = skipped
        with closing(batches):
            for number, batch in enumerate(batches, skipped + 1):
                if self.is_several:
                    self.meet(rows_of(batch), batch_name(name, epoch, number))
                yield batch
        if self.is_several:
            self.meet(0, batch_name(name, epoch, number + 1))

    def meet(self, rows: int, where: str) -> None:
        """Tell the other processes of a batch: its rows, 0 for none, and whether to stop."""
        self._answers.append((self._tell_rows(rows), where))
        self._read_answers(self.late + self.reads_within if rows else 0)

    def _read_answers(self, left: int) -> None:
        """Read the answers of processes about all batches but the last `left`."""
        while len(self._answers) > left:
            answer, name = self._answers.popleft()
            rows, stops = to_numpy(answer()).T
            self._stops = self._stops or bool(stops.any())
            if (rows != rows[0]).any():
                raise _other_counts(rows.astype(int).tolist(), name)

    def _tell_rows(self, rows: int) -> Callable[[], Any]:
        """Tell the others; return a function that waits for each one's rows and stop request."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until every process has come here."""


_SAME = (
    "; give all of them the same data, such as nn.Batches, or a function of the seed and the "
    "epoch, without a sampler that divides it: each process takes its own rows of every batch"
)


def other_batches() -> ConfigurationError:
    """Return the error for processes that train on different numbers."""
    return ConfigurationError(f"the processes have different batches{_SAME}", source="data")


def _other_counts(rows: Sequence[int], where: str) -> ConfigurationError:
    least, most = rows.index(min(rows)), rows.index(max(rows))
    few = f"{rows[least]} rows" if rows[least] else "no such batch"
    of = f" of {len(rows)}"
    text = f"{most}{of} has one of {rows[most]} rows, and {least}{of} has {few}{_SAME}"
    return mark_batch(
        ConfigurationError(f"{where}: the processes have different batches: {text}", source="data")
    )


def check_rows(layer: Any, frozen: Collection[str], instead: str) -> None:
    """Raise `UnsupportedError` for a layer that needs whole batches, since they are divided."""
    module = getattr(layer, "given", None)
    if module is None:
        names = [f"{layer.root}{path}" for path, _ in state_places(layer) if path not in frozen]
    else:
        parts = module.named_modules()
        names = [name for name, part in parts if getattr(part, "track_running_stats", False)]
    if names:
        raise not_divisible(f"{names[0]} computes with statistics of whole batches", instead)


def not_divisible(what: str, instead: str) -> Exception:
    """Return the error for a computation that cannot be divided by rows."""
    more = "take a loss that is a mean over rows, and LayerNorm in place of BatchNorm"
    return no_collectives(what, f"{instead}, or {more}")


def training_size(parameters: Tree) -> tuple[int, str]:
    """Return the bytes that a training takes in float32, and a phrase that says so."""
    size = HELD * sum(4 * math.prod(x.shape) for x in leaves(parameters))
    return size, f"weights, gradients and optimizer state take {format_size(size)}"
