"""How a training lies on its devices: on one, or on the devices of a mesh.

The steps stay the same functions. On several devices of JAX, only where their arrays lie changes,
and the compiler adds what the devices tell each other.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from anydevice.core.device import Device
from anydevice.core.engine import Absent
from anydevice.core.record import replace
from anydevice.core.text import format_size
from anydevice.core.trees import Tree, leaves, mapped, refilled
from anydevice.core.warn import warn
from anydevice.errors import ConfigurationError
from anydevice.memory.stats import memory_stats
from anydevice.models.precision import Policy
from anydevice.nn.layer import state_places
from anydevice.nn.losses import LOSSES
from anydevice.nn.optimizers import Optimizer, clipped
from anydevice.parallel.mesh import Mesh, devices_of, digest_of
from anydevice.parallel.placing import gather, row_ranges
from anydevice.training.batches import placer, rows_of
from anydevice.training.modules import takes_model
from anydevice.training.randomness import (
    device_state,
    dropping_as_whole,
    host_state,
    set_device_state,
    set_host_state,
)
from anydevice.training.steps import StepConfig, StepState, copied
from anydevice.transfer.moving import to_device, to_numpy

if TYPE_CHECKING:
    from anydevice.parallel.jax_mesh import JaxProcesses
    from anydevice.parallel.mlx_ring import RingProcesses
    from anydevice.parallel.processes import Group
    from anydevice.training.sharding import JoinedLoss

Function = Callable[..., Any]

STRATEGIES = ("auto", "replicate", "shard", "pipeline")
ROUNDING, ROUNDING_16 = 1e-5, 1e-3
"""Relative differences of losses, in float32 and in 16 bits, beyond which it is not rounding."""

CHECKED = 3
"""The first batches, whose loss is also computed as a whole."""

HELD = 4
"""Numbers that a training holds for each parameter: itself, its gradient and two moments."""


class Spread:
    """A training on one device. `text` says how it lies on several."""

    text: str | None = None
    is_several = False
    """Whether several processes train."""

    is_sharded = False
    """Whether each process holds a part of the parameters."""

    asked = False
    must_compile = False
    """Whether a step must be one program, whatever the options say."""

    checks_batches = False
    """Whether `check_batch` looks at batches before their steps."""

    in_flight = 2
    """Steps in flight when another one starts: one computes while one waits."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.place = placer(device)
        """Moves a batch to where steps take it."""

    @property
    def reads_to(self) -> Device:
        """Where a file is read to before `state` places it."""
        return self.device

    @property
    def is_ahead(self) -> bool:
        """Whether batches can be placed ahead by another thread."""
        return True

    def parameters(self, tree: Tree) -> Tree:
        """Parameters where steps take them."""
        return to_device(tree, self.device, convert=True)

    def state(self, state: StepState, trained: Sequence[bool] | None) -> StepState:
        """All that steps change, where they take it; `trained` is that of their `StepConfig`."""
        return state

    def joined(self, tree: Tree, name: str) -> Tree:
        """Arrays as others see them, of what a step has: a tree of its state with this name."""
        return tree

    def numbers(self, tree: Tree) -> Tree:
        """Single numbers where steps take them."""
        return tree

    def whole(self, tree: Tree) -> Tree:
        """A tree of parameters on one device, in one piece each."""
        return tree

    def readable(self, tree: Tree) -> Tree:
        """A tree whose numbers this process can read; all processes take part."""
        return tree

    def saved(self, tree: Tree) -> Tree:
        """A tree as the process that leads writes it to a file; all processes take part."""
        return tree

    def config(self, config: StepConfig) -> StepConfig:
        """The parts of a step, as this training takes them."""
        return config

    def gradients(self, differentiate: Function, loss: Function) -> Function:
        """The function of a loss and its gradients, of whole batches.

        `differentiate` makes it of the one of a loss.
        """
        return differentiate(loss)  # type: ignore[no-any-return]

    def check_batch(self, batch: Any, loss: Callable[[Any, Any], Any]) -> None:
        """Raise for a batch whose parts cannot be computed apart.

        `loss` is that of a part, and of where its rows lie in the batch.
        """

    def over_shards(self, number: Any) -> Any:
        """The sum of a number over the processes that have parts of the parameters."""
        return number

    def clipped(self, gradients: Tree, limit: float) -> tuple[Tree, Any]:
        """The gradients, clipped to a norm, and the norm that they had."""
        return clipped(gradients, limit)

    def module(self, layer: Any, dtype: str, optimizer: Any) -> Any:
        """A module of PyTorch where steps take it, and in the dtype that its weights have then.

        `optimizer` is one of PyTorch, or `None`.
        """
        layer.placed(self.device, dtype)
        self.share(leaves(layer.parameters))
        return layer

    def optimizer_state(self, saved: Any, optimizer: Any) -> Any:
        """The state of an optimizer of modules, read from a file, as it takes it."""
        return saved

    def module_loss(self, loss: Function, batch: Any) -> Any:
        """What a module of PyTorch takes gradients of: its sum over processes is the loss.

        `None` for a process without rows.
        """
        return loss(batch)

    def module_total(self, value: Any, like: Any) -> Any:
        """The loss of a whole batch, of what `module_loss` gave."""
        return value.detach()

    def sum_gradients(self, weights: Sequence[Any]) -> None:
        """Make gradients of weights of PyTorch those of whole batches."""

    def check(
        self, layer: Any, still: Collection[str], policy: Policy, optimizer: Optimizer | None
    ) -> None:
        """Raise `UnsupportedError` for a model that cannot be trained so."""

    def share(self, tensors: Sequence[Any]) -> None:
        """Give weights of PyTorch the same numbers in all processes."""

    def is_asked(self, asked: bool) -> bool:
        """Whether a training that is asked to stop here, or not, stops now: in all processes."""
        self.asked = asked
        return asked

    @property
    def leads(self) -> bool:
        """Whether this process writes files and shows progress."""
        return True

    def wait(self) -> None:
        """Wait until every process has come here."""


class MeshSpread(Spread):
    """A training on several devices, which JAX drives: those of one process, or of several.

    Processes compute the same step together, each on its parts of the same arrays.
    """

    def __init__(self, mesh: Mesh, text: str) -> None:
        from anydevice.parallel import jax_mesh

        super().__init__(mesh.devices[0])
        self.text = text
        self._mesh, self._jax = mesh, jax_mesh
        self._group = cast("JaxProcesses | None", mesh.group)
        self.is_several = self._group is not None
        self._to_first = self.place
        self.place = self._divided
        self._placed = 0
        self._answers: deque[Any] = deque()
        if self._group is not None:
            if self.device.kind == "cpu":
                # There, two programs that exchange numbers may wait for each other for ever.
                self.in_flight, self.must_compile = 0, True
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

    def is_asked(self, asked: bool) -> bool:
        self.asked = asked
        if self._group is None:
            return asked
        # The answer of some calls ago: by now it is there, so that no step waits for it.
        self._answers.append(self._jax.any_of(asked, self._mesh))
        if len(self._answers) <= self.in_flight:
            return False
        return bool(to_numpy(self._answers.popleft()))

    def parameters(self, tree: Tree) -> Tree:
        if self._group is not None and not self._group.is_same(tree):
            tree = mapped(self._group.from_first, mapped(to_numpy, tree))
        # One after the other: no device ever holds all of them.
        return mapped(lambda x: self._sharded(super(MeshSpread, self).parameters(x)), tree)

    def state(self, state: StepState, trained: Sequence[bool] | None) -> StepState:
        parameters, optimizer, total = (
            None if tree is None else mapped(self._sharded, tree)
            for tree in (state.parameters, state.optimizer, state.total)
        )
        scale = None if state.scale is None else self.numbers(state.scale)
        return replace(state, parameters=parameters, optimizer=optimizer, total=total, scale=scale)

    def numbers(self, tree: Tree) -> Tree:
        return mapped(lambda x: self._jax.replicated(x, self._mesh), tree)

    def whole(self, tree: Tree) -> Tree:
        return gather(tree)

    def readable(self, tree: Tree) -> Tree:
        return tree if self._group is None else gather(tree)

    def saved(self, tree: Tree) -> Tree:
        if self._group is None or tree is None:
            return tree
        leads = self.leads

        def own(x: Any) -> Any:
            whole = gather(x)
            return to_numpy(whole) if leads else None

        return mapped(own, tree)

    def _sharded(self, x: Any) -> Any:
        return self._jax.sharded(x, self._mesh)

    def _divided(self, batch: Any) -> Any:
        rows, size = rows_of(batch), self._mesh.size
        self._placed += 1
        if rows % size and self._placed == 1:  # the last batch of an epoch is often a small one
            warn(
                f"batches of {rows} rows do not divide over {size} devices, so each of these "
                f"computes all of such a batch; take a size that is a multiple of {size}"
            )
        there = self._to_first(batch)
        if self._group is not None and self._placed <= CHECKED and not self._group.is_same(there):
            raise _other_batches()
        return mapped(lambda x: self._jax.divided(x, self._mesh), there)


class ProcessSpread(Spread):
    """A training in several processes of PyTorch, each with its rows of the same batches.

    Gradients are summed, weighted by rows, before anything looks at them: so all processes clip,
    fail and scale alike, and keep the same parameters.
    """

    is_several = True

    def __init__(self, group: Any, device: Device, text: str) -> None:
        super().__init__(device)
        self.text = text
        self._group: Group = group
        self._checked = 0
        self._rounding = ROUNDING
        self._expected: Any = None
        self._joint: JoinedLoss | None = None
        self._stops = False
        host, own = group.of_first((host_state(), device_state(device)))
        set_host_state(host)
        set_device_state(device, own)

    @property
    def leads(self) -> bool:
        return self._group.rank == 0

    def wait(self) -> None:
        self._group.wait()

    def is_asked(self, asked: bool) -> bool:
        self.asked = asked  # the next sum tells the others
        return self._stops

    def parameters(self, tree: Tree) -> Tree:
        placed = copied(super().parameters(tree))
        self.share(leaves(placed))
        return placed

    def share(self, tensors: Sequence[Any]) -> None:
        self._group.copy_from_first(tensors)

    def check(
        self, layer: Any, still: Collection[str], policy: Policy, optimizer: Optimizer | None
    ) -> None:
        self._rounding = ROUNDING_16 if policy.is_narrow else ROUNDING
        module = getattr(layer, "given", None)
        if module is None:
            names = [f"{layer.root}{path}" for path, _ in state_places(layer) if path not in still]
        else:
            parts = module.named_modules()
            names = [name for name, part in parts if getattr(part, "track_running_stats", False)]
        if names:
            raise _not_by_rows(f"{names[0]} computes with statistics of whole batches")

    def config(self, config: StepConfig) -> StepConfig:
        loss = config.loss
        named = any(loss is own for own in LOSSES.values())
        if self.device.engine != "torch" or named or loss is None or takes_model(loss):
            return config
        if config.optimize != "none":  # compiled, it tells other processes nothing
            return config
        from anydevice.training.sharding import JoinedLoss

        self._joint = JoinedLoss(loss, Mesh([self.device], group=self._group))
        return replace(config, loss=self._joint)

    def gradients(self, differentiate: Function, loss: Function) -> Function:
        function = differentiate(loss)

        def summed(
            trained: Tree, held: Tree, batch: Any, seed: Any, number: Any, scale: Any
        ) -> tuple[tuple[Any, list[Any]], Tree]:
            self._check_first(batch, lambda: loss(trained, held, batch, seed, number, scale)[0])
            part, rows, share = self._own(batch)
            with self._part(rows, share) as weight:
                (value, state), found = function(trained, held, part, seed, number, scale, rows)
            sums = self._sum([self._own_value(value), *leaves(found)], weight)
            if sums is None:  # found to be no mean over rows: once more, with all of them
                return summed(trained, held, batch, seed, number, scale)
            return (sums[0], state), refilled(found, sums[1:])

        return summed

    def module_loss(self, loss: Function, batch: Any) -> Any:
        self._check_first(batch, lambda: self._as_whole(loss, batch))
        part, rows, share = self._own(batch)
        before = host_state(), device_state(self.device)
        value = self._module_part(loss, part, rows, share)
        if self._joint is not None and not self._joint.is_on and self._expected is not None:
            own = self._expected.new_zeros(()) if value is None else value.detach()
            if self._is_other(self._expected, self._group.sum([own])[0]):
                self._joint.is_on = True
                set_host_state(before[0])
                set_device_state(self.device, before[1])
                value = self._module_part(loss, part, rows, share)
        return value

    def _module_part(self, loss: Function, part: Any, rows: Any, share: float) -> Any:
        torch: Any = sys.modules["torch"]
        with self._part(rows, share) as weight, dropping_as_whole(rows):
            if weight:
                return loss(part) * weight
            with torch.no_grad():  # random numbers go on as in the others
                loss(part)
        return None

    @contextmanager
    def _part(self, rows: tuple[int, int, int], share: float) -> Iterator[float]:
        """A block in which a part of a batch is computed, with the weight of its gradients."""
        if self._joint is None or not self._joint.is_on:
            yield share
            return
        self._joint.rows = rows, share
        try:
            yield 1.0
        finally:
            self._joint.rows = None

    def _own_value(self, value: Any) -> Any:
        """What a process adds to the loss: its part of it where each has computed all of it."""
        return value if self._joint is None or not self._joint.is_on else value / self._group.size

    def _as_whole(self, loss: Function, batch: Any) -> Any:
        """The loss of a whole batch, with the random numbers that its parts will have."""
        before = host_state(), device_state(self.device)
        value = loss(batch)
        set_host_state(before[0])
        set_device_state(self.device, before[1])
        return value

    def module_total(self, value: Any, like: Any) -> Any:
        own = like.new_zeros(()) if value is None else self._own_value(value.detach())
        sums = self._sum([own], 1.0)
        assert sums is not None, "module_loss has compared it"
        return sums[0]

    def sum_gradients(self, weights: Sequence[Any]) -> None:
        torch: Any = sys.modules["torch"]
        like = weights[0]
        known = torch.tensor([float(x.grad is not None) for x in weights], device=like.device)
        found = [torch.zeros_like(x) if x.grad is None else x.grad for x in weights]
        known, *sums = self._group.sum([known, *found])
        for x, gradient, is_known in zip(weights, sums, known.tolist(), strict=True):
            x.grad = gradient if is_known else None

    def _sum(self, tensors: Sequence[Any], share: float) -> list[Any] | None:
        """The sums over processes, of which the first is the loss.

        `None` where that proves to be no mean over rows, and can be computed of all of them.
        """
        # A share of nothing would still be NaN where the numbers are.
        tensors = tensors if share else [x.new_zeros(x.shape) for x in tensors]
        stop = tensors[0].new_full((), float(self.asked) / (share or 1.0))
        value, stop, *sums = self._group.sum([tensors[0], stop, *tensors[1:]], share or 1.0)
        self._stops = bool(stop > 0)
        if self._expected is not None and self._is_other(self._expected, value):
            if self._joint is None or self._joint.is_on:
                raise self._wrong_parts(float(self._expected), float(value))
            self._joint.is_on = True
            return None
        self._expected = None
        return [value, *sums]

    def _own(self, batch: Any) -> tuple[Any, tuple[int, int, int], float]:
        """The rows of this process, where they lie in the batch, and their share of it.

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
        """Of the first batches: are they the same everywhere, and what is the loss of a whole one?

        Parts of one batch may have the same weight by chance.
        """
        if self._checked == CHECKED:
            return
        self._checked += 1
        number = float(int.from_bytes(digest_of(batch)[:6], "big"))
        like = leaves(batch)[0]
        if self._group.largest(number, like) != -self._group.largest(-number, like):
            raise _other_batches()
        with sys.modules["torch"].no_grad():
            self._expected = whole()

    def _is_other(self, expected: Any, value: Any) -> bool:
        """Whether the loss of a whole batch is another one than that of its parts."""
        difference = abs(float(expected) - float(value)) / max(1.0, abs(float(expected)))
        return self._group.largest(difference, value) > self._rounding

    def _wrong_parts(self, expected: float, value: float) -> Exception:
        return _not_by_rows(
            f"the loss of batch {self._checked} is {expected:.6g}, and {value:.6g} as the mean "
            f"of its rows in {self._group.size} processes: it is no mean over rows, as where "
            "tokens are masked or random numbers are drawn in another way"
        )


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
            raise _other_batches()
        whole = float(to_numpy(loss(batch, None)))
        part, rows, share = self._own(batch)
        (value,) = self._ring.sum([loss(part, rows)], share)
        found = float(to_numpy(value))
        if self._is_other(whole, found):
            raise self._wrong_parts(whole, found)


def _other_batches() -> ConfigurationError:
    return ConfigurationError(
        "the processes have different batches; give all of them the same data, such as "
        "nn.Batches, or a function of the seed and the epoch, without a sampler that divides it: "
        "each process takes its own rows of every batch",
        source="data",
    )


def _not_by_rows(what: str) -> Exception:
    return Absent(
        what,
        instead="train in one process, or on several devices of JAX, which compute whole batches; "
        "or take a loss that is a mean over rows, and LayerNorm in place of BatchNorm",
        code="no_collectives",
    ).error()


def mesh_of(device: Any, devices: Any, strategy: str) -> tuple[Any, Mesh | None]:
    """The device of a training, and the mesh where there are several; checks both arguments."""
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


def spread_of(mesh: Mesh | None, strategy: str, device: Device, parameters: Tree) -> Spread:
    """How a training of these parameters lies on a mesh; raises `UnsupportedError` if it cannot."""
    if mesh is None:
        return Spread(device)
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
    mesh, text = _chosen(mesh, strategy, parameters)
    if mesh.group is not None:  # the memory of one process decides for all of them
        shard, text = cast("JaxProcesses", mesh.group).of_first((mesh.shard, text))
        mesh = Mesh(mesh.devices, shard=shard, group=mesh.group)
    return MeshSpread(mesh, text)


def _over_ring(mesh: Mesh, strategy: str, device: Device) -> Spread:
    if strategy == "shard" or mesh.shard > 1:
        raise Absent(
            "processes of MLX hold all parameters each",
            instead='take strategy="replicate", or torch or jax, which shard them',
            code="no_collectives",
        ).error()
    why = "as asked" if strategy == "replicate" else "what processes of MLX do"
    return RingSpread(cast(Any, mesh.group), device, f"{mesh.size} processes, replicate: {why}")


def _over_processes(
    mesh: Mesh, group: Group, strategy: str, device: Device, parameters: Tree
) -> Spread:
    chosen, text = _chosen(mesh, strategy, parameters)
    # The memory of one process decides for all of them.
    shard, text = group.of_first((chosen.shard, text))
    if shard == 1:
        return ProcessSpread(group, device, text)
    from anydevice.training.sharding import ShardSpread

    return ShardSpread(group, Mesh(mesh.devices, shard=shard, group=group), device, text)


def _chosen(mesh: Mesh, strategy: str, parameters: Tree) -> tuple[Mesh, str]:
    """The mesh with the sizes of a strategy, and which that is and why."""
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
    if available is not None and device.kind == "cpu":  # one memory for all of them
        available //= mesh.size
    what = f"weights, gradients and optimizer state take {format_size(needed)}"
    if available is None:
        return "replicate", f"{what}, and {device} does not say how much it has"
    there = f"{format_size(available)} available to each device"
    if needed <= available // 2:
        return "replicate", f"{what}, less than half of {there}"
    return "shard", f"{what}, more than half of {there}"
