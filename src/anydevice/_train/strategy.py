"""The placement of a training on its devices: one device, or the devices of a mesh.

The steps stay the same functions. On several devices of JAX, only the placement of their arrays
changes, and the compiler adds the communication.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import closing
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from anydevice._arrays.memory.stats import memory_stats
from anydevice._arrays.move import to_device, to_numpy
from anydevice._core.device import Device
from anydevice._core.engine import Absent
from anydevice._core.protocols import Function, StepState
from anydevice._core.record import replace
from anydevice._core.text import format_size, warn
from anydevice._core.trees import Tree, TreeT, leaves, mapped
from anydevice._libraries.precision import Policy
from anydevice._libraries.registry import part
from anydevice._nn.layer import state_places
from anydevice._nn.optimizers import Optimizer, clip_gradients
from anydevice._parallel.mesh import Mesh, devices_of
from anydevice._parallel.placing import gather
from anydevice._train.batches import batch_name, mark_batch, placer, rows_of
from anydevice._train.randomness import host_state, set_host_state
from anydevice._train.step_config import StepConfig
from anydevice.errors import ConfigurationError

if TYPE_CHECKING:
    from anydevice._libraries.jax.mesh import JaxProcesses
    from anydevice._libraries.torch.mesh import Group

STRATEGIES = ("auto", "replicate", "shard", "pipeline")
ROUNDING, ROUNDING_16 = 1e-5, 1e-3
"""Relative differences of losses, in float32 and in 16 bits, too large for rounding."""

CHECKED = 3
"""First batches whose loss is also computed as a whole; later, those at powers of two."""

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

    asked = False
    late = 0
    """Batches of delay before the answers of other processes are read."""

    reads_within = False
    """Whether answers are read within a step, before its first exchange, and not before the step.
    """

    must_compile = False
    """Whether a step must be one program, regardless of the options."""

    checks_batches = False
    """Whether `check_batch` checks batches before their steps."""

    in_flight = 2
    """Steps in flight when another one starts: one computes while another waits."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.place = placer(device)
        """Moves a batch to the place that steps expect."""
        self._answers: deque[tuple[Callable[[], Any], str]] = deque()
        self._stops = False

    @property
    def reads_to(self) -> Device:
        """The device that a file is read to, before `state` places it."""
        return self.device

    @property
    def is_ahead(self) -> bool:
        """Whether another thread can place batches ahead."""
        return True

    def parameters(self, tree: Tree) -> Tree:
        """Return the parameters, placed for steps."""
        return to_device(tree, self.device, convert=True)

    def state(self, state: StepState, trained: Sequence[bool] | None) -> StepState:
        """Return the whole state of steps, placed for them.

        `trained` is the field of their `StepConfig`.
        """
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

    def gradients(self, differentiate: Function, loss: Function) -> Function:
        """Return a function that computes the loss of a whole batch and its gradients.

        `differentiate` makes such a function from a loss.
        """
        return differentiate(loss)

    def check_batch(self, batch: Any, loss: Callable[[Any, Any], Any]) -> None:
        """Raise for a batch whose parts cannot be computed separately.

        `loss` takes a part, and the position of its rows in the batch.
        """

    def over_shards(self, number: Any) -> Any:
        """Return the sum of a number over the processes that hold parts of the parameters."""
        return number

    def clip_gradients(self, gradients: Tree, limit: float) -> tuple[Tree, Any]:
        """Clip the gradients to a norm; also return their norm before."""
        return clip_gradients(gradients, limit)

    def module(self, layer: Any, dtype: str, optimizer: Any) -> Any:
        """Return a module of PyTorch, placed for steps, with its weights in `dtype`.

        `optimizer` is one of PyTorch, or `None`.
        """
        layer.placed(self.device, dtype)
        self.share(leaves(layer.parameters))
        return layer

    def optimizer_state(self, saved: Any, optimizer: Any) -> Any:
        """Return the saved state of a module's optimizer in the form that it loads."""
        return saved

    def module_loss(self, loss: Function, batch: Any) -> Any:
        """Return the loss to differentiate: its sum over processes is the loss of the batch.

        Returns None for a process without rows.
        """
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

    def is_asked(self, asked: bool) -> bool:
        """Whether the training stops now, in all processes; `asked` is the request to this one."""
        self.asked = asked  # the next batch tells the others
        self._read_answers(self.late)
        return self._stops if self.is_several else asked

    def together(
        self, batches: Generator[Any, None, None], name: str, epoch: int, skipped: int = 0
    ) -> Generator[Any, None, None]:
        """Yield placed batches, the same number in every process.

        Raises `ConfigurationError` if processes differ in batches or in numbers of rows.
        """
        return self._meet_batches(batches, name, epoch, skipped) if self.is_several else batches

    def _meet_batches(
        self, batches: Generator[Any, None, None], name: str, epoch: int, skipped: int
    ) -> Generator[Any, None, None]:
        numbers = count(skipped + 1)
        with closing(batches):
            for batch, number in zip(batches, numbers, strict=False):
                self.meet(rows_of(batch), batch_name(name, epoch, number))
                yield batch
        self.meet(0, batch_name(name, epoch, next(numbers)))

    def meet(self, rows: int, where: str) -> None:
        """Tell the other processes of a batch: its rows, 0 for none, and whether to stop."""
        self._answers.append((self._tell_rows(rows), where))
        self._read_answers(self.late + self.reads_within if rows else 0)

    def _read_answers(self, left: int) -> None:
        """Read the answers of processes about all batches but the last `left`."""
        while len(self._answers) > left:
            told, name = self._answers.popleft()
            found = to_numpy(told())
            self._stops = self._stops or bool(found[:, 1].any())
            if (found[:, 0] != found[0, 0]).any():
                raise _other_counts(found[:, 0].astype(int).tolist(), name)

    def _tell_rows(self, rows: int) -> Callable[[], Any]:
        """Tell the others; return a function that waits for each one's rows and stop request."""
        raise NotImplementedError

    @property
    def leads(self) -> bool:
        """Whether this process writes files and shows progress."""
        return True

    def wait(self) -> None:
        """Wait until every process has come here."""


class MeshStrategy(Strategy):
    """A training on several devices that JAX drives, in one process or in several.

    Processes compute the same step together, each on its parts of the same arrays.
    """

    def __init__(self, mesh: Mesh, text: str) -> None:
        super().__init__(mesh.devices[0])
        self.text = text
        self._mesh, self._jax = mesh, part("jax", "mesh")
        self._group = cast("JaxProcesses | None", mesh.group)
        self.is_several = self._group is not None
        self._to_first = self.place
        self.place = self._divide_batch
        self._placed = 0
        self._last: Any = None
        if self._group is not None:
            if self.device.kind == "cpu":
                # There, two programs that communicate may deadlock.
                self.in_flight, self.must_compile = 0, True
            self.late = self.in_flight  # the answer has arrived by then, so no step waits for it
            set_host_state(self._group.of_first(host_state()))

    @property
    def reads_to(self) -> Device:
        return self.device if self._mesh.shard == 1 else Device("cpu", engine="numpy")

    @property
    def is_ahead(self) -> bool:
        return False

    @property
    def leads(self) -> bool:
        return self._mesh.rank == 0

    def wait(self) -> None:
        if self._group is not None:
            self._group.wait()

    def meet(self, rows: int, where: str) -> None:
        super().meet(rows, where)
        last, self._last = self._last, None
        if last is not None and not cast("JaxProcesses", self._group).is_same(last):
            raise other_batches()

    def _tell_rows(self, rows: int) -> Callable[[], Any]:
        told = self._jax.of_processes([rows, int(self.asked)], self._mesh)
        return lambda: told

    def parameters(self, tree: Tree) -> Tree:
        if self._group is not None and not self._group.is_same(tree):
            tree = mapped(self._group.from_first, mapped(to_numpy, tree))
        # One array after the other: no device ever holds all of them.
        return mapped(lambda x: self._shard(super(MeshStrategy, self).parameters(x)), tree)

    def state(self, state: StepState, trained: Sequence[bool] | None) -> StepState:
        parameters, optimizer, total = (
            None if tree is None else mapped(self._shard, tree)
            for tree in (state.parameters, state.optimizer, state.total)
        )
        scale = None if state.scale is None else self.numbers(state.scale)
        return replace(state, parameters=parameters, optimizer=optimizer, total=total, scale=scale)

    def numbers(self, tree: TreeT) -> TreeT:
        return mapped(lambda x: self._jax.replicated(x, self._mesh), tree)

    def whole(self, tree: TreeT) -> TreeT:
        return gather(tree)

    def readable(self, tree: TreeT) -> TreeT:
        return tree if self._group is None else gather(tree)

    def saved(self, tree: Tree) -> Tree:
        if self._group is None or tree is None:
            return tree
        leads = self.leads

        def own(x: Any) -> Any:
            whole = gather(x)
            return to_numpy(whole) if leads else None

        return mapped(own, tree)

    def _shard(self, x: Any) -> Any:
        return self._jax.sharded(x, self._mesh)

    def _divide_batch(self, batch: Any) -> Any:
        rows, size = rows_of(batch), self._mesh.size
        self._placed += 1
        if rows % size and self._placed == 1:  # the last batch is often uneven: no warning
            warn(
                f"batches of {rows} rows do not divide over {size} devices, so each of these "
                f"computes all of such a batch; take a size that is a multiple of {size}"
            )
        there = self._to_first(batch)
        if self._group is not None and is_compared(self._placed):
            self._last = there
        return mapped(lambda x: self._jax.divided(x, self._mesh), there)


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
    error = ConfigurationError(
        f"{where}: the processes have different batches: {most}{of} has one of {rows[most]} rows, "
        f"and {least}{of} has {few}{_SAME}",
        source="data",
    )
    return mark_batch(error)


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
    return Absent(what, instead=f"{instead}, or {more}", code="no_collectives").error()


def mesh_of(device: Any, devices: Any, strategy: str) -> tuple[Any, Mesh | None]:
    """Return the device of a training, and the mesh if there are several; check both arguments."""
    if isinstance(device, list | tuple):
        raise ConfigurationError(
            f"device= is one device, and {device!r} is a list; use devices= for several",
            source="device=",
        )
    if strategy not in STRATEGIES:
        raise ConfigurationError(
            f"strategy is one of {', '.join(STRATEGIES)}, not {strategy!r}", source="strategy"
        )
    if devices is None:
        if strategy != "auto":
            raise ConfigurationError(
                f"strategy={strategy!r} is for several devices; give devices= too",
                source="strategy",
            )
        return device, None
    if device is not None:
        raise ConfigurationError(
            "device= and devices= are both given; use devices= alone", source="devices="
        )
    mesh = devices if isinstance(devices, Mesh) else Mesh(devices_of(devices))
    return mesh.devices[0], mesh if mesh.size > 1 else None


def strategy_for(mesh: Mesh | None, strategy: str, device: Device, parameters: Tree) -> Strategy:
    """Return the strategy of a training on a mesh; raise `UnsupportedError` if there is none."""
    if mesh is None:
        return Strategy(device)
    if mesh.group is not None and device.engine != mesh.engine:
        raise Absent(
            f"{device.engine} trains this model, and the processes are joined by {mesh.engine}",
            instead=f"take `anydevice launch --engine {device.engine}`, or a model of nn",
            code="no_collectives",
        ).error()
    if mesh.group is not None and device.engine == "mlx":
        return _over_ring(mesh, strategy, device)
    if mesh.group is not None and device.engine == "torch":
        return _over_processes(mesh, cast("Group", mesh.group), strategy, device, parameters)
    if device.engine != "jax":
        raise Absent(
            f"{device.engine} trains on one device a process, and {mesh.size} were given",
            instead="give one device, or a model that JAX trains",
            code="no_collectives",
        ).error()
    mesh, text = _choose_sizes(mesh, strategy, parameters)
    if mesh.group is not None:  # the memory of one process decides for all of them
        shard, text = cast("JaxProcesses", mesh.group).of_first((mesh.shard, text))
        mesh = Mesh(mesh.devices, shard=shard, group=mesh.group)
    return MeshStrategy(mesh, text)


def _over_ring(mesh: Mesh, strategy: str, device: Device) -> Strategy:
    if strategy == "shard" or mesh.shard > 1:
        raise Absent(
            "processes of MLX hold all parameters each",
            instead='take strategy="replicate", or torch or jax, which shard them',
            code="no_collectives",
        ).error()
    why = "as asked" if strategy == "replicate" else "what processes of MLX do"
    from anydevice._train.data_parallel import RingStrategy

    return RingStrategy(cast(Any, mesh.group), device, f"{mesh.size} processes, replicate: {why}")


def _over_processes(
    mesh: Mesh, group: Group, strategy: str, device: Device, parameters: Tree
) -> Strategy:
    chosen, text = _choose_sizes(mesh, strategy, parameters)
    # The memory of one process decides for all of them.
    shard, text = group.of_first((chosen.shard, text))
    if shard == 1:
        from anydevice._train.data_parallel import ProcessStrategy

        return ProcessStrategy(group, device, text)
    from anydevice._train.sharding import ShardStrategy

    return ShardStrategy(group, Mesh(mesh.devices, shard=shard, group=group), device, text)


def _choose_sizes(mesh: Mesh, strategy: str, parameters: Tree) -> tuple[Mesh, str]:
    """Return the mesh with the sizes of a strategy, and the strategy with its reason."""
    why = "as asked"
    if mesh.shard > 1:
        if strategy == "replicate":
            raise ConfigurationError(
                f'strategy="replicate" contradicts the mesh, which divides parameters over '
                f"{mesh.shard} devices; leave strategy= out, or make the mesh without shard=",
                source="strategy",
            )
        text = f"{mesh.replicate} groups that hold all of it, {mesh.shard} devices each"
        return mesh, f"{mesh.size} devices: {text}, as the mesh says"
    if strategy == "auto":
        strategy, why = _fitting(mesh, parameters)
    size = mesh.size
    sizes = (size, 1) if strategy == "replicate" else (1, size)
    where = "" if mesh.group is None else f" in {mesh.group.size} processes"
    these = f"{size} processes" if mesh.engine == "torch" else f"{size} devices{where}"
    return Mesh(mesh.devices, *sizes, mesh.group), f"{these}, {strategy}: {why}"


def _fitting(mesh: Mesh, parameters: Tree) -> tuple[str, str]:
    needed = HELD * sum(4 * int(np.prod(x.shape)) for x in leaves(parameters))
    device = mesh.devices[0]
    available = memory_stats(device).available
    if available is not None and device.kind == "cpu":  # all of them share one memory
        available //= mesh.size
    what = f"weights, gradients and optimizer state take {format_size(needed)}"
    if available is None:
        return "replicate", f"{what}, and {device} does not say how much it has"
    there = f"{format_size(available)} available to each device"
    if needed <= available // 2:
        return "replicate", f"{what}, less than half of {there}"
    return "shard", f"{what}, more than half of {there}"
