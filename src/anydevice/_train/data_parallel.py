"""A training on several devices, or in several processes, each with its rows of the same batches.

On devices of JAX, only the placement of arrays changes, and the compiler adds the communication.
Processes of PyTorch and MLX sum their gradients. For our models on PyTorch, a sharded step gathers
the parameters it computes with, and leaves each process its share of the summed gradients; users'
modules are sharded by PyTorch's own FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from anydevice._arrays.memory.stats import memory_stats
from anydevice._arrays.move import to_device, to_numpy
from anydevice._core.device import Device
from anydevice._core.protocols import Function, StepState
from anydevice._core.record import replace
from anydevice._core.text import format_size, warn
from anydevice._core.trees import Tree, TreeT, leaves, mapped, refilled
from anydevice._formats.packed import PackedTree
from anydevice._libraries.layers import ModuleLayer, takes_model
from anydevice._libraries.precision import Policy
from anydevice._libraries.registry import adapter_of, part, training_device
from anydevice._machine.choose.scope import one_device
from anydevice._nn.losses import LOSSES
from anydevice._nn.optimizers import Optimizer
from anydevice._parallel.mesh import (
    Mesh,
    devices_of,
    list_devices,
    no_collectives,
    requested_engines,
)
from anydevice._parallel.placing import gather, row_ranges
from anydevice._parallel.processes import TOGETHER
from anydevice._train import randomness
from anydevice._train import strategy as strategies
from anydevice._train.batches import rows_between, rows_of
from anydevice._train.step_config import StepConfig, copied
from anydevice.errors import ConfigurationError

if TYPE_CHECKING:
    from anydevice._libraries.jax.mesh import JaxProcesses
    from anydevice._libraries.mlx.mesh import RingProcesses
    from anydevice._libraries.torch.mesh import Group, JoinedLoss, Layout

STRATEGIES = ("auto", "replicate", "shard", "pipeline")

Rows = tuple[int, int, int]
"""First row of a part of a batch, number of rows of the part, number of rows of the batch."""

LossAndGradients = tuple[tuple[Any, list[Any]], Tree]
"""The loss and the new state of the layers, and the gradients."""

_INSTEAD = "train in one process, or on several devices of JAX, which compute whole batches"


def mesh_of(model: Any, device: Any, devices: Any, strategy: str) -> tuple[Any, Mesh | None]:
    """Return the device of a training, and the mesh if there are several; check the arguments."""
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
    engine = engine_for(model, devices)
    if not isinstance(devices, Mesh):
        places = devices_of(devices, engine)
        if len(places) > 1 and engine == "torch":
            return places, None
        devices = Mesh(places)
    return devices.devices[0], devices if devices.size > 1 else None


def engine_for(model: Any, devices: Any) -> str | None:
    """Return the engine that trains a model on devices: the requested one, else its own."""
    adapter = adapter_of(model)
    own = adapter.library or getattr(adapter.device, "engine", None)
    own = own if own in TOGETHER else None
    is_mesh = isinstance(devices, Mesh)
    if is_mesh and (devices.group is not None or devices.size == 1):
        return devices.engine
    names = devices.devices if is_mesh else list_devices(devices)
    requested = requested_engines(names)
    if own is not None and requested - {own} and (adapter.library is not None or is_mesh):
        raise ConfigurationError(
            f"{own} trains this model, and {min(requested - {own})} drives devices=; give a list "
            f"of names, such as {[str(name) for name in names]}, or another model",
            source="devices=",
        )
    if requested or not names or adapter.library is not None:
        return min(requested, default=own)
    place = one_device(Device(str(names[0])).backend)
    if requested_engines([place]):  # by ANYDEVICE_ENGINE or a settings file
        return place.engine
    return training_device(adapter, place).engine if own is None and len(names) > 1 else own


def strategy_for(
    mesh: Mesh | None, strategy: str, device: Device, parameters: Tree
) -> strategies.Strategy:
    """Return the strategy of a training on a mesh; raise `UnsupportedError` if there is none."""
    if mesh is None:
        return strategies.Strategy(device)
    group: Any = mesh.group
    if group is not None and device.engine != mesh.engine:
        raise no_collectives(
            f"{device.engine} trains this model, and the processes are joined by {mesh.engine}",
            f"take `anydevice launch --engine {device.engine}`, or a model of nn",
        )
    if group is not None and device.engine == "mlx":
        if strategy == "shard" or mesh.shard > 1:
            raise no_collectives(
                "processes of MLX hold all parameters each",
                'take strategy="replicate", or torch or jax, which shard them',
            )
        why = "as asked" if strategy == "replicate" else "the only strategy for processes of MLX"
        return RingStrategy(group, device, f"{mesh.size} processes, replicate: {why}")
    mesh, text = _choose_sizes(mesh, strategy, parameters)
    if group is not None:  # the memory of one process decides for all of them
        shard, text = group.of_first((mesh.shard, text))
        mesh = Mesh(mesh.devices, shard=shard, group=group)
    if device.engine == "jax":
        return MeshStrategy(mesh, text)
    if mesh.shard == 1:
        return ProcessStrategy(group, device, text)
    return ShardStrategy(group, mesh, device, text)


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
        strategy, why = choose_strategy(mesh.devices[0], mesh.size, parameters)
    size = mesh.size
    sizes = (size, 1) if strategy == "replicate" else (1, size)
    where = "" if mesh.group is None else f" in {mesh.group.size} processes"
    these = f"{size} processes" if mesh.engine == "torch" else f"{size} devices{where}"
    return Mesh(mesh.devices, *sizes, mesh.group), f"{these}, {strategy}: {why}"


def choose_strategy(device: Device, count: int, parameters: Tree) -> tuple[str, str]:
    """Replicate if that takes less than half of the memory, else shard; also return the reason."""
    needed, text = strategies.training_size(parameters)
    available = memory_stats(device).available
    if available is None:
        return "replicate", f"{text}, and {device} does not say how much it has"
    if device.kind == "cpu":  # all of them share one memory
        available //= count
    there = f"{format_size(available)} available to each device"
    if needed <= available // 2:
        return "replicate", f"{text}, less than half of {there}"
    return "shard", f"{text}, more than half of {there}"


def _gather_saved(tree: Tree, leads: bool) -> Tree:
    """Gather one array after the other: no process holds all, and only the leader keeps them."""

    def host(x: Any) -> Any:
        whole = gather(x)
        return to_numpy(whole) if leads else None

    if not isinstance(tree, PackedTree):
        return None if tree is None else mapped(host, tree)
    packed = PackedTree(mapped(host, dict(tree)))
    packed.text = tree.text
    return packed


class MeshStrategy(strategies.Strategy):
    """A training on several devices that JAX drives, in one process or in several together."""

    is_ahead = False

    def __init__(self, mesh: Mesh, text: str) -> None:
        super().__init__(mesh.devices[0])
        self.text = text
        self._mesh, self._jax = mesh, part("jax", "mesh")
        self._group = cast("JaxProcesses | None", mesh.group)
        self.is_several, self.leads = self._group is not None, mesh.rank == 0
        if mesh.shard > 1:
            self.reads_to = Device("cpu", engine="numpy")
        self._to_first = self.place
        self.place = self._divide_batch
        self._placed = 0
        self._last: Any = None
        if self._group is not None:
            if self.device.kind == "cpu":
                # There, two programs that communicate may deadlock.
                self.in_flight, self.must_compile = 0, True
            self.late = self.in_flight  # the answer has arrived by then, so no step waits for it
            randomness.set_host_state(self._group.of_first(randomness.host_state()))

    def wait(self) -> None:
        if self._group is not None:
            self._group.wait()

    def meet(self, rows: int, where: str) -> None:
        super().meet(rows, where)
        last, self._last = self._last, None
        if last is not None and not cast("JaxProcesses", self._group).is_same(last):
            raise strategies.other_batches()

    def _tell_rows(self, rows: int) -> Callable[[], Any]:
        answer = self._jax.of_processes([rows, int(self.stop_requested)], self._mesh)
        return lambda: answer

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
        return tree if self._group is None else _gather_saved(tree, self.leads)

    def divide_rows(self, batch: Any) -> Any:
        return mapped(lambda x: self._jax.divided(x, self._mesh), batch)

    def _shard(self, x: Any) -> Any:
        return self._jax.sharded(x, self._mesh)

    def _divide_batch(self, batch: Any) -> Any:
        self._placed += 1
        there = self._to_first(batch)
        if self._group is not None and strategies.is_compared(self._placed):
            self._last = there
        return self.divide_rows(there)


class ProcessStrategy(strategies.Strategy):
    """A training in several processes of PyTorch, each with its rows of the same batches."""

    is_several = True

    def __init__(self, group: Any, device: Device, text: str) -> None:
        super().__init__(device)
        self.text = text
        self._group: Group = group
        self.leads = group.rank == 0
        self._number = 0
        self._rounding = strategies.ROUNDING
        self._expected: Any = None
        self._joint: JoinedLoss | None = None
        # Reading the counts at once would wait for the device in each step. So a process with one
        # batch too many starts a sum that no other process joins, and blocks there until the
        # launcher ends it, once the process that lacks the batch has failed.
        self.late = 0 if device.kind == "cpu" else self.in_flight
        self.reads_within = True
        randomness.set_random_state(group.of_first(randomness.random_state(device)), device)

    def wait(self) -> None:
        self._group.wait()

    def _tell_rows(self, rows: int) -> Callable[[], Any]:
        return self._group.of_processes([rows, int(self.stop_requested)], self.device)

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
        strategies.check_rows(layer, frozen, _INSTEAD)

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

        def summed(trained: Tree, fixed: Tree, batch: Any, *rest: Any) -> LossAndGradients:
            self._check_first(batch, lambda: loss(trained, fixed, batch, *rest)[0])
            own, rows, share = self._own(batch)
            with self._part(rows, share) as weight:
                (value, state), gradients = function(trained, fixed, own, *rest, rows)
            sums = self._sum([self._own_value(value), *leaves(gradients)], weight)
            if sums is None:  # the loss is no mean over rows: repeat with the rows of all processes
                self._number -= 1
                return summed(trained, fixed, batch, *rest)
            return (sums[0], state), refilled(gradients, sums[1:])

        return summed

    def module_loss(self, loss: Function, batch: Any) -> Any:
        def whole() -> Any:  # draws the same random numbers as the parts
            before = randomness.random_state(self.device)
            value = loss(batch)
            randomness.set_random_state(before, self.device)
            return value

        self._check_first(batch, whole)
        own, rows, share = self._own(batch)
        before = randomness.random_state(self.device)
        value = self._module_part(loss, own, rows, share)
        if self._joint is not None and not self._joint.is_on and self._expected is not None:
            share_of_loss = self._expected.new_zeros(()) if value is None else value.detach()
            if self._is_other(self._expected, self._group.sum([share_of_loss])[0]):
                self._join(self._joint)
                randomness.set_random_state(before, self.device)
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

    def module_total(self, value: Any, like: Any) -> Any:
        own = like.new_zeros(()) if value is None else self._own_value(value.detach())
        sums = self._sum([own], 1.0)
        assert sums is not None, "module_loss has compared it"
        return sums[0]

    def sum_gradients(self, weights: Sequence[Any]) -> None:
        self._read_answers(self.late)
        self._group.sum_gradients(weights)

    def _sum(self, tensors: Sequence[Any], share: float) -> list[Any] | None:
        """Return the sums over processes, first the loss; `None` if it is no mean over rows."""
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
        if self._number > strategies.CHECKED:
            warn(
                f"the loss of batch {self._number} is not a mean over rows, unlike those that were "
                "checked before; from now on it is computed from the outputs of all processes"
            )

    def _own(self, batch: Any) -> tuple[Any, Rows, float]:
        """Return the rows of this process, their position in the batch, and their share of it."""
        every = rows_of(batch)
        first, stop = row_ranges(every, self._group.size)[self._group.rank]
        share = (stop - first) / every
        if not share:  # none: compute the first one, which does not count
            first, stop = 0, 1
        return rows_between(batch, first, stop), (first, stop - first, every), share

    def _check_first(self, batch: Any, whole: Callable[[], Any]) -> None:
        """For some batches, check that all processes have them, and compute the whole loss."""
        self._number += 1
        if not strategies.is_compared(self._number):
            return
        self._read_answers(self.late)
        if not self._group.is_same(batch):
            raise strategies.other_batches()
        with part("torch", "module").no_gradients():
            self._expected = whole()

    def _is_other(self, expected: Any, value: Any) -> bool:
        """Whether the loss of a whole batch differs from the loss of its parts."""
        difference = abs(float(expected) - float(value)) / max(1.0, abs(float(expected)))
        return self._group.largest(difference) > self._rounding

    def _wrong_parts(self, expected: float, value: float) -> Exception:
        return strategies.not_divisible(
            f"the loss of batch {self._number} is {expected:.6g}, and {value:.6g} as the mean "
            f"of its rows in {self._group.size} processes: it is no mean over rows, as where "
            "tokens are masked or random numbers are drawn in another way",
            _INSTEAD,
        )


class RingStrategy(ProcessStrategy):
    """A training in several processes of MLX; the compiled step sums the gradients."""

    checks_batches = True

    def __init__(self, group: RingProcesses, device: Device, text: str) -> None:
        super().__init__(group, device, text)
        self._ring = group
        # A lazy array would be computed at another time than in the other processes.
        self.late, self.reads_within = 0, False

    def _tell_rows(self, rows: int) -> Callable[[], Any]:
        answer = self._ring.of_processes([rows, int(self.stop_requested)])
        return lambda: answer

    def parameters(self, tree: Tree) -> Tree:
        placed = strategies.Strategy.parameters(self, tree)
        return placed if self._ring.is_same(placed) else mapped(self._ring.from_first, placed)

    def gradients(self, differentiate: Function, loss: Function) -> Function:
        function = differentiate(loss)

        def summed(trained: Tree, fixed: Tree, batch: Any, *rest: Any) -> LossAndGradients:
            own, rows, share = self._own(batch)
            (value, state), gradients = function(trained, fixed, own, *rest, rows)
            value, *sums = self._ring.sum([value, *leaves(gradients)], share)
            return (value, state), refilled(gradients, sums)

        return summed

    def check_batch(self, batch: Any, loss: Callable[[Any, Any], Any]) -> None:
        self._number += 1
        if not strategies.is_compared(self._number):
            return
        if not self._ring.is_same(batch):
            raise strategies.other_batches()
        whole = float(to_numpy(loss(batch, None)))
        own, rows, share = self._own(batch)
        (total,) = self._ring.sum([loss(own, rows)], share)
        parts = float(to_numpy(total))
        if self._is_other(whole, parts):
            raise self._wrong_parts(whole, parts)


class ShardStrategy(ProcessStrategy):
    """A training with parameters and optimizer state divided over processes of PyTorch.

    ZeRO, stage 3 (Rajbhandari et al. 2020). A stepper of our models updates the shards of this
    process as plain tensors; callers outside see DTensors.
    """

    is_sharded = True

    def __init__(self, group: Group, mesh: Mesh, device: Device, text: str) -> None:
        super().__init__(group, device, text)
        self.reads_to = Device("cpu", engine="torch")
        self.reads_within = False  # a step begins with an exchange of its parameters
        self._mesh, self._torch = mesh, part("torch", "mesh")
        self._layouts: dict[str, list[Layout]] = {}

    def check(
        self, layer: Any, frozen: Collection[str], policy: Policy, optimizer: Optimizer | None
    ) -> None:
        super().check(layer, frozen, policy, optimizer)
        if optimizer is not None and not getattr(optimizer, "is_elementwise", False):
            raise no_collectives(
                f"{type(optimizer).__name__} may compute with whole parameters, and each process "
                "has a part of them",
                'take nn.AdamW, nn.Adam, nn.SGD or nn.Lion, or strategy="replicate"',
            )

    # Placement of trees

    def parameters(self, tree: Tree) -> Tree:
        return mapped(self._shard, tree)

    def state(self, state: StepState, trained: Sequence[bool] | None) -> StepState:
        parts = {}
        for name in ("parameters", "optimizer", "total"):
            tree = getattr(state, name)
            cut = None if tree is None else mapped(self._shard, tree)
            self._layouts[name] = [self._torch.layout_of(x, self._mesh) for x in leaves(cut)]
            parts[name] = None if tree is None else mapped(self._torch.part_of, cut)
        every = self._layouts["parameters"]
        is_trained = trained or [True] * len(every)
        pairs = list(zip(every, is_trained, strict=True))
        self._layouts["trained"] = self._layouts["total"] = [layout for layout, own in pairs if own]
        self._layouts["fixed"] = [layout for layout, own in pairs if not own]
        scale = state.scale
        parts["scale"] = None if scale is None else to_device(scale, self.device, convert=True)
        return replace(state, **parts)

    def joined(self, tree: Tree, name: str) -> Tree:
        pairs = zip(leaves(tree), self._layouts[name], strict=True)
        return None if tree is None else refilled(tree, [at.joined(x) for x, at in pairs])

    def readable(self, tree: TreeT) -> TreeT:
        return gather(tree)

    def whole(self, tree: TreeT) -> TreeT:
        return gather(tree)

    def saved(self, tree: Tree) -> Tree:
        return _gather_saved(tree, self.leads)

    # Steps of our models

    def gradients(self, differentiate: Function, loss: Function) -> Function:
        def own_loss(trained: Tree, fixed: Tree, *rest: Any) -> tuple[Any, list[Any]]:
            *given, share = rest
            value, state = loss(*self._gather_trees(trained, fixed), *given)
            return value * share, state

        own_gradients = differentiate(own_loss)

        def summed(trained: Tree, fixed: Tree, batch: Any, *rest: Any) -> LossAndGradients:
            def whole() -> Any:
                return loss(*self._gather_trees(trained, fixed), batch, *rest)[0]

            self._check_first(batch, whole)
            own, rows, share = self._own(batch)
            with self._part(rows, share) as weight:
                (value, state), gradients = own_gradients(trained, fixed, own, *rest, rows, weight)
            value = self._own_value(value if weight else value.new_zeros(()))
            sums = self._sum([value], 1.0)
            if sums is None:  # the loss is no mean over rows: repeat with the rows of all processes
                return summed(trained, fixed, batch, *rest)
            return (sums[0], state), gradients

        return summed

    def over_shards(self, number: Any) -> Any:
        return self._torch.summed(number, self._mesh)

    def clip_gradients(self, gradients: Tree, limit: float) -> tuple[Tree, Any]:
        # An array that every process has whole counts once in each group of shards.
        is_first = self._group.rank % self._mesh.shard == 0
        counts = [layout.axis is not None or is_first for layout in self._layouts["total"]]
        parts, norm = self._torch.clip_parts(leaves(gradients), counts, limit, self._mesh)
        return refilled(gradients, parts), norm

    def _gather_trees(self, trained: Tree, fixed: Tree) -> tuple[Tree, Tree]:
        def gathered(tree: Tree, layouts: Sequence[Layout]) -> Tree:
            pairs = zip(leaves(tree), layouts, strict=True)
            return None if tree is None else refilled(tree, [at.gathered(x) for x, at in pairs])

        layouts = self._layouts
        return gathered(trained, layouts["trained"]), gathered(fixed, layouts["fixed"])

    def _shard(self, x: Any) -> Any:
        if not self._torch.is_cut(x):
            x = to_device(x, self.device, convert=True)
        return self._torch.sharded(x, self._mesh)

    # Modules of users

    def module(self, layer: ModuleLayer, dtype: str, optimizer: Any) -> ModuleLayer:
        sharded: ModuleLayer = part("torch", "step").shard_layer(
            layer, dtype, self._mesh, self._group, optimizer
        )
        return sharded

    def _module_part(self, loss: Function, batch: Any, rows: Any, share: float) -> Any:
        # A process without rows takes part too, or the others would wait.
        with self._part(rows, share) as weight, part("torch", "random").dropping_as_whole(rows):
            return loss(batch) * weight

    def sum_gradients(self, weights: Sequence[Any]) -> None:
        """Do nothing: FSDP2 has summed the gradients already."""

    def optimizer_state(self, saved: Mapping[str, Any], optimizer: Any) -> Mapping[str, Any]:
        if "param_groups" not in saved:  # the state of an optimizer of anydevice
            return {**saved, "state": self.parameters(saved["state"])}
        step = part("torch", "step")
        weights = step.parameters_of(optimizer)
        state = {at: step.cut_state(own, weights[at]) for at, own in saved["state"].items()}
        return {**saved, "state": state}
